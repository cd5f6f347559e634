"""Tests of placed caches over Auto and Explicit axes; as sharded_devices.py, over eight devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import AxisType

import nvfp4_pallas as nv
from nvfp4_pallas import checkpoint
from tests import sharded_devices
from tests.base import TestCase
from tests.sharded_devices import DIM, PAGE, bits, mesh_of, placed

BOTH = parameterized.parameters(AxisType.Auto, AxisType.Explicit)
RINGS = {"recent_window": 20, "num_rings": 4}


def random_cache(**options) -> nv.PagedKVCache:
  """Any bytes in pages and rings."""
  r = np.random.default_rng(7)
  cache = nv.PagedKVCache.create(
    num_pages=32, page_size=PAGE, num_kv_heads=8, head_dim=DIM, **options
  )
  any_bytes = lambda a: jnp.asarray(r.integers(0, 100, a.shape), jnp.uint8).astype(a.dtype)
  return jax.tree.map(lambda a: any_bytes(a) if a.ndim == 4 else a, cache)


class ExplicitMeshChecksTest(sharded_devices.MeshChecksTest):
  AXIS_TYPE = AxisType.Explicit

  def test_in_a_context_of_the_mesh(self):
    """Where arrays that say nothing else are of the mesh too."""
    with jax.set_mesh(self.ops.mesh):
      for operation, rows, changes in (
        (self.append, self.k, {}),
        (self.prefill, self.q, {}),
        (self.decode, self.q[:4], {"cu": (0, 1, 2)}),
      ):
        arguments = self.arguments(rows, changes)
        jax.block_until_ready(self.operations[operation](*arguments))
        jax.block_until_ready(operation(*arguments))

  def test_arguments_that_lie_elsewhere(self):
    cache, _, batch = self.arguments(self.k, {})
    with self.assertRaisesRegex(ValueError, "does not match the specs of the input"):
      self.operations[self.append](cache, self.k, batch)


class PlacedTest(TestCase):
  def assert_same(self, got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      np.testing.assert_array_equal(bits(a), bits(b))

  def assert_placed(self, got, ops):
    for a, sharding in zip(jax.tree.leaves(got), jax.tree.leaves(ops.shardings(got)), strict=True):
      self.assertTrue(a.sharding.is_equivalent_to(sharding, a.ndim), a.sharding)

  @BOTH
  def test_pages_leave_and_come_back(self, axis_type):
    mesh = mesh_of(axis_type, data=2, tensor=2, context=2)
    ops = nv.MeshOps(mesh, heads="tensor", sequences="data", pages="context")
    for options in ({}, {"k_format": "fp8", "v_format": "bf16"}):
      original = random_cache(**options)
      cache = ops.place(original)
      host = checkpoint.fetch_pages(original, [3, 1, 30])
      self.assert_same(checkpoint.fetch_pages(cache, [3, 1, 30]), host)
      restore = functools.partial(checkpoint.restore_pages, pages=[0, 31, 2], host=host)
      want, got = restore(original), restore(cache)
      self.assert_same(got, want)
      self.assert_placed(got, ops)
      program = jax.jit(restore, donate_argnums=0).lower(cache).compile()
      self.assertNotRegex(program.as_text(), sharded_devices.COLLECTIVES)
      got = program(cache)
      self.assert_same(got, want)
      self.assert_placed(got, ops)

  @BOTH
  def test_rings_leave_and_come_back(self, axis_type):
    ops = nv.MeshOps(mesh_of(axis_type, data=2, tensor=4), heads="tensor", sequences="data")
    want = random_cache(**RINGS)
    cache = ops.place(want)
    host = checkpoint.fetch_rings(want, [3, 1])
    self.assert_same(checkpoint.fetch_rings(cache, [3, 1]), host)
    got = checkpoint.restore_rings(cache, [0, 3], host)
    self.assert_same(got, checkpoint.restore_rings(want, [0, 3], host))
    self.assert_placed(got, ops)

  @BOTH
  def test_pages_and_rings_copied(self, axis_type):
    """In place, each device its own, on one call and under jit."""
    ids = lambda *numbers: jnp.asarray(numbers, jnp.int32)
    for axes, options in (
      ({"heads": "tensor", "sequences": "data"}, RINGS),
      ({"heads": "tensor", "sequences": "data", "pages": "context"}, {}),
    ):
      ops = nv.MeshOps(mesh_of(axis_type, data=2, tensor=2, context=2), **axes)
      original = random_cache(**options)
      runs = [(nv.copy_pages, ids(1, 30, 99), ids(7, 3, 2))]
      if options:
        runs += [(nv.copy_rings, ids(0, 9), ids(3, 2)), (nv.open_rings, ids(2, -1), ids(32, 16))]
      for run, *arguments in runs:
        want = run(original, *arguments)
        for how in (run, jax.jit(run)):
          got = how(ops.place(original), *arguments)
          self.assert_same(got, want)
          self.assert_placed(got, ops)

  @BOTH
  def test_operations_that_are_not_told_of_the_mesh(self, axis_type):
    """append, prefill and decode of what lies by heads: as on one device, to a step of bfloat16."""
    ops = nv.MeshOps(mesh_of(axis_type, tensor=8), heads="tensor")
    r, table = np.random.default_rng(3), jnp.arange(4, dtype=jnp.int32).reshape(2, 2)
    k, v = jnp.asarray(r.standard_normal((2, 29, 8, DIM)), jnp.bfloat16)
    q = jnp.asarray(r.standard_normal((29, 16, DIM)), jnp.bfloat16)
    lens = jnp.asarray([20, 9], jnp.int32)
    batch = nv.RaggedBatch(table, lens, jnp.asarray([0, 20, 29], jnp.int32))
    decodes = nv.RaggedBatch.for_decode(table, lens)

    def step(cache, q, k, v):
      cache = nv.append(cache, k, v, batch)
      chunk = nv.prefill(q, cache, batch, read_path="auto", new_kv=(k, v))
      return cache, (chunk, nv.decode(q[:2], cache, decodes, read_path="auto"))

    original = random_cache(**RINGS)
    arguments = [placed(ops, a, ops.rows) for a in (q, k, v)]
    want, exact = step(original, q, k, v)
    for run in (step, jax.jit(step)):
      got, results = run(ops.place(original), *arguments)
      self.assert_same(got, want)
      self.assert_placed(got, ops)
      for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(exact), strict=True):
        self.assertEqual(a.sharding.spec[:2], (None, "tensor"))
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=2.0**-7, atol=1e-5)

  @BOTH
  def test_the_original_survives_a_donation(self, axis_type):
    """All of it where an axis divides pages; where none does, all but what is not copied."""
    options = {"recent_window": 20, "num_rings": 8, "k_mean": np.ones((8, DIM), np.float32)}
    donated = jax.jit(lambda cache: jax.tree.map(jnp.negative, cache), donate_argnums=0)
    for axes in ({"heads": "mesh"}, {"sequences": "mesh"}, {}):
      ops = nv.MeshOps(mesh_of(axis_type, mesh=8), **axes)
      original = random_cache(**options)
      jax.block_until_ready(donated(ops.place(original)))
      for a, b in zip(*map(jax.tree.leaves, (original, random_cache(**options))), strict=True):
        if axes or a.ndim < 4:
          np.testing.assert_array_equal(bits(a), bits(b))
        else:
          with self.assertRaisesRegex(RuntimeError, "deleted"):
            np.asarray(a)

  @BOTH
  def test_all_rings_without_ids(self, axis_type):
    """As with the ids that they stand for."""
    ops = nv.MeshOps(mesh_of(axis_type, data=2, tensor=4), heads="tensor", sequences="data")
    cache = ops.place(random_cache(**RINGS))
    arrays = ((0, 1, 2), (3, 4, 5)), (40, 30), (0, 40, 70)
    k = placed(ops, jnp.ones((2 * 70, 8, DIM), jnp.bfloat16), ops.rows)

    def appended(*ids):
      one = nv.RaggedBatch(*(jnp.asarray(a, jnp.int32) for a in (*arrays, *ids)))
      batch = ops.lay_out([one, one])
      return jax.jit(ops.append)(cache, k, k, placed(ops, batch, ops.batch_specs(batch)))

    self.assert_same(appended(), appended((0, 1)))


if __name__ == "__main__":
  absltest.main()
