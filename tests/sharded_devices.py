"""Tests of caches over eight devices; sharding_test.py runs them in a process that has so many."""

import contextlib
import dataclasses
import functools
import io
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import nvfp4_pallas as nv
from benchmarks import plan, scale
from nvfp4_pallas import sharding
from nvfp4_pallas.policy import Geometry
from tests.base import TestCase

DEVICES = 8
HEADS, GROUP, DIM, PAGE = 8, 2, 64, 16
UNCHECKED = {"check_vma": False}  # pallas_call says nothing of how its results vary over a mesh


def bits(x) -> np.ndarray:
  return np.asarray(x).view(np.uint8)


def mesh_of(axis_type: AxisType, **axes: int) -> Mesh:
  devices = np.asarray(jax.devices()).reshape(*axes.values())
  return Mesh(devices, tuple(axes), axis_types=(axis_type,) * len(axes))


def placed(ops, tree, specs):
  """As Explicit axes want it; for Auto ones as it is, to be moved."""
  if AxisType.Explicit not in ops.mesh.axis_types:
    return tree
  place = lambda spec, array: jax.device_put(array, NamedSharding(ops.mesh, spec))
  return jax.tree.map(place, specs, tree)


def filled(num_pages: int, lens: tuple[int, ...], **levers):
  """(cache, batch, q): random keys and values in pages in any order."""
  r = np.random.default_rng(0)
  cache = nv.PagedKVCache.create(
    num_pages=num_pages, page_size=PAGE, num_kv_heads=HEADS, head_dim=DIM, **levers
  )
  per_seq = num_pages // len(lens)
  table = jnp.asarray(r.permutation(num_pages).reshape(len(lens), per_seq), jnp.int32)
  tokens = sum(lens)
  k, v = jnp.asarray(r.standard_normal((2, tokens, HEADS, DIM)), jnp.bfloat16)
  starts = jnp.asarray(np.cumsum([0, *lens]), jnp.int32)
  batch = nv.RaggedBatch(table, jnp.asarray(lens, jnp.int32), starts)
  cache = jax.jit(nv.append)(cache, k, v, batch)
  q = jnp.asarray(r.standard_normal((len(lens), HEADS * GROUP, DIM)), jnp.bfloat16)
  return cache, nv.RaggedBatch.for_decode(table, batch.kv_lens), q


class ShardedTest(TestCase):
  def setUp(self):
    super().setUp()
    self.assertLen(jax.devices(), DEVICES)
    self.mesh = Mesh(np.asarray(jax.devices()), ("shards",))
    self.decode = jax.jit(functools.partial(nv.decode, read_path="nvfp4_dequant"))

  def over_heads(self, cache):
    specs = sharding.cache_specs(cache, heads="shards")
    heads = P(None, "shards")
    return jax.jit(
      jax.shard_map(
        self.decode,
        mesh=self.mesh,
        in_specs=(heads, specs, P()),
        out_specs=(heads, heads),
        **UNCHECKED,
      )
    )

  def test_heads(self):
    """The same bits, and no bytes between devices."""
    cache, batch, q = filled(12, (60, 0, 33))
    decode = self.over_heads(cache)
    for a, b in zip(decode(q, cache, batch), self.decode(q, cache, batch), strict=True):
      np.testing.assert_array_equal(bits(a), bits(b))
    hlo = decode.lower(q, cache, batch).compile().as_text()
    self.assertNotRegex(hlo, "all-gather|all-reduce|all-to-all|collective-permute")

  def test_rings_over_pages(self):
    cache = nv.PagedKVCache.create(
      num_pages=8, page_size=PAGE, num_kv_heads=HEADS, head_dim=DIM, recent_window=20, num_rings=2
    )
    with self.assertRaisesRegex(ValueError, "pages must be None .* recent window"):
      sharding.cache_specs(cache, pages="shards")

  def test_heads_with_levers(self):
    """Each device has its heads' part of the mean, and again nothing goes between devices."""
    mean = np.random.default_rng(1).standard_normal((HEADS, DIM)).astype(np.float32)
    levers = {"k_rotation": "hadamard", "v_rotation": "hadamard", "k_mean": mean}
    cache, batch, q = filled(12, (60, 0, 33), **levers)
    decode = self.over_heads(cache)
    for a, b in zip(decode(q, cache, batch), self.decode(q, cache, batch), strict=True):
      a, b = (np.nan_to_num(np.asarray(x, np.float64), neginf=0) for x in (a, b))
      # Sums of rotations may be ordered otherwise for fewer heads: bfloat16's last bit.
      np.testing.assert_allclose(a, b, rtol=2.0**-7, atol=1e-3)
    hlo = decode.lower(q, cache, batch).compile().as_text()
    self.assertNotRegex(hlo, "all-gather|all-reduce|all-to-all|collective-permute")

  def test_a_cache_that_is_placed_by_its_specs(self):
    cache, batch, q = filled(12, (60, 0, 33))
    place = lambda spec: NamedSharding(self.mesh, spec)
    specs = sharding.cache_specs(cache, heads="shards")
    placed = jax.device_put(cache, jax.tree.map(place, specs))
    self.assertEqual(placed.k.data.addressable_shards[0].data.shape, (12, 1, PAGE, DIM // 2))
    for a, b in zip(
      self.over_heads(cache)(q, placed, batch), self.decode(q, cache, batch), strict=True
    ):
      np.testing.assert_array_equal(bits(a), bits(b))

  def test_context(self):
    """Pages of one sequence on all devices: each attends to its own, and states are merged.

    Device d has the pages 2 d and 2 d + 1 of the sequence, under its own numbers 0 and 1. The last
    pages are not full, and some hold nothing.
    """
    length = 11 * PAGE + 5
    cache, batch, q = filled(2 * DEVICES, (length,))
    # Page by page in the sequence's order, so that a block of pages is a shard.
    order = batch.page_table[0]
    pools = {
      name: jax.tree.map(lambda a: a[order] if a.ndim == 4 else a, getattr(cache, name))
      for name in ("k", "v")
    }
    in_order = nv.PagedKVCache(**pools)

    def attend(q, shard):
      begin = jax.lax.axis_index("shards") * 2 * PAGE
      own = jnp.clip(length - begin, 0, 2 * PAGE).astype(jnp.int32)
      local = nv.RaggedBatch.for_decode(jnp.asarray([[0, 1]], jnp.int32), own[None])
      return sharding.merge_over("shards", *self.decode(q, shard, local))

    specs = sharding.cache_specs(in_order, pages="shards")
    run = jax.jit(
      jax.shard_map(
        attend, mesh=self.mesh, in_specs=(P(), specs), out_specs=(P(), P()), **UNCHECKED
      )
    )
    out, lse = (np.asarray(a, np.float64) for a in run(q, in_order))
    exact, exact_lse = (np.asarray(a, np.float64) for a in self.decode(q, cache, batch))
    # Each device's out is rounded to bfloat16, and the merged one again: 2^-8 of the largest, each.
    self.assertLess(np.abs(out - exact).max(), 2 * 2.0**-8 * np.abs(exact).max())
    # float32 sums of eight.
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-6)
    hlo = run.lower(q, in_order).compile().as_text()
    self.assertNotIn("all-gather", hlo)

  def test_context_that_nobody_sees(self):
    run = jax.shard_map(
      functools.partial(sharding.merge_over, "shards"),
      mesh=self.mesh,
      in_specs=(P(), P()),
      out_specs=(P(), P()),
      **UNCHECKED,
    )
    out, lse = run(jnp.zeros((2, 3, 4)), jnp.full((2, 3), -jnp.inf))
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)


COLLECTIVES = r"= (\(?\S.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"


class MeshOpsTest(TestCase):
  """Two devices of each axis, or two of heads and four of sequences, against one device.

  All caches have the same arrays: the pages of device (d, c) of `sequences` and `pages` begin at
  (d * devices of pages + c) * (pages of a device), so that one device's page table names the same.
  """

  ROWS = 96  # of each device, padding included

  def laid_out(self, ops, past, steps, per_device, rings):
    """Of a step of so many tokens a sequence: (laid out batch, that of one device, its rows)."""
    data, context = ops.size(ops.sequences), ops.size(ops.pages)
    r, local, tables = np.random.default_rng(4), [], []
    lens, steps = (np.reshape(x, (data, -1)) for x in (past, steps))
    for d in range(data):
      order = np.stack([r.permutation(per_device) for _ in range(context)])
      table = np.zeros((lens.shape[1], 6), np.int32)
      used = np.zeros(context, np.int32)
      for place in np.ndindex(*table.shape):
        c = place[1] % context
        table[place] = order[c, used[c]]
        used[c] += 1
      local.append(table)
      tables.append(table + (d * context + np.arange(6) % context) * per_device)
    batches, rows, ring_ids = [], [], []
    for d in range(data):
      cu = np.cumsum([0, *steps[d]])
      ids = np.arange(lens.shape[1])[::-1]
      arrays = local[d], lens[d] + steps[d], cu, ids
      batches.append(nv.RaggedBatch(*(jnp.asarray(a, jnp.int32) for a in arrays)))
      rows.append(d * self.ROWS + np.arange(cu[-1]))
      ring_ids.append(ids + d * rings // data)
    cu = np.cumsum([0, *steps.reshape(-1)])
    arrays = np.concatenate(tables), (lens + steps).reshape(-1), cu, np.concatenate(ring_ids)
    whole = nv.RaggedBatch(*(jnp.asarray(a, jnp.int32) for a in arrays))
    return ops.lay_out(batches), whole, np.concatenate(rows)

  def run_both(self, ops, past, step, per_device=24, dtype=jnp.bfloat16, **options):
    """A step of chunks and one of decodes, on the mesh and on one device; rows of `dtype`.

    Yields of each operation its name, the results of both, and the compiled program of the mesh.
    """
    places = ops.size(ops.sequences) * ops.size(ops.pages)
    empty = nv.PagedKVCache.create(
      num_pages=places * per_device,
      page_size=PAGE,
      num_kv_heads=HEADS,
      head_dim=DIM,
      **options,
    )
    rings = options.get("num_rings", 0)
    r = np.random.default_rng(5)
    data = ops.size(ops.sequences)
    normal = lambda n, heads: jnp.asarray(r.standard_normal((n, heads, DIM)), dtype)
    rows = lambda n: [normal(n, h) for h in (HEADS * GROUP, HEADS, HEADS)]
    whole_cache, cache = empty, ops.place(empty)
    sinks = jnp.asarray(r.standard_normal(HEADS * GROUP), jnp.float32)
    mesh_sinks = placed(ops, sinks, P(ops.heads))

    def laid_out(steps_before, steps):
      batch, *one = self.laid_out(ops, steps_before, steps, per_device, rings)
      return placed(ops, batch, ops.batch_specs(batch)), *one

    def both(of_mesh, of_one, mesh_arguments, arguments):
      compiled = jax.jit(of_mesh).lower(*mesh_arguments).compile()
      return compiled(*mesh_arguments), jax.jit(of_one)(*arguments), compiled

    nothing = tuple((0,) * len(lens) for lens in past)
    batch, whole, real = laid_out(nothing, past)
    _, k, v = rows(data * self.ROWS)
    on_mesh = lambda rows: placed(ops, rows, ops.rows)
    # As many rows on one device, so that one program does all its appends.
    one_append, pad = jax.jit(nv.append), np.zeros(data * self.ROWS, np.int32)
    padded = lambda x, real: x[np.r_[real, pad][: len(pad)]]
    whole_cache = one_append(whole_cache, padded(k, real), padded(v, real), whole)
    mesh_append = (
      jax.jit(ops.append, donate_argnums=0).lower(cache, on_mesh(k), on_mesh(v), batch).compile()
    )
    cache = mesh_append(cache, on_mesh(k), on_mesh(v), batch)

    batch, whole, real = laid_out(past, step)
    q, k, v = rows(data * self.ROWS)
    how = {"read_path": "auto"}
    got, want, program = both(
      lambda q, c, b, k, v: ops.prefill(q, c, b, new_kv=(k, v), sinks=mesh_sinks, **how),
      lambda q, c, b, k, v: nv.prefill(q, c, b, new_kv=(k, v), sinks=sinks, **how),
      (on_mesh(q), cache, batch, on_mesh(k), on_mesh(v)),
      (q[real], whole_cache, whole, k[real], v[real]),
    )
    yield "prefill", [np.asarray(a)[real] for a in got], want, program
    cache = mesh_append(cache, on_mesh(k), on_mesh(v), batch)
    whole_cache = one_append(whole_cache, padded(k, real), padded(v, real), whole)
    yield "append", cache, whole_cache, mesh_append
    starts = jnp.arange(len(whole.kv_lens) + 1, dtype=jnp.int32)
    own_starts = jnp.tile(starts[: len(whole.kv_lens) // data + 1], data)
    own_starts = placed(ops, own_starts, P(ops.sequences))
    got, want, program = both(
      lambda q, c, b: ops.decode(q, c, b, sinks=mesh_sinks, **how),
      lambda q, c, b: nv.decode(q, c, b, sinks=sinks, **how),
      (on_mesh(q[: len(whole.kv_lens)]), cache, dataclasses.replace(batch, cu_q_lens=own_starts)),
      (q[: len(whole.kv_lens)], whole_cache, dataclasses.replace(whole, cu_q_lens=starts)),
    )
    yield "decode", got, want, program

  @parameterized.parameters(AxisType.Auto, AxisType.Explicit)
  def test_all_three_axes(self, axis_type):
    mesh = mesh_of(axis_type, data=2, tensor=2, context=2)
    ops = nv.MeshOps(mesh, heads="tensor", sequences="data", pages="context")
    past, step = ((41, 3, 0), (0, 70, 16)), ((5, 20, 0), (9, 2, 14))
    for name, got, want, program in self.run_both(ops, past, step, v_format="fp8"):
      hlo = program.as_text()
      moved = re.findall(COLLECTIVES, hlo)
      if name == "append":
        self.assertEmpty(moved)
        self.assertIn("input_output_alias", hlo)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
          np.testing.assert_array_equal(bits(a), bits(b))
        continue
      # Of merge_over: the largest lse, the sum of weights and that of outs; float32 of the rows.
      rows = self.ROWS if name == "prefill" else 3
      heads = HEADS * GROUP // 2
      for shapes, kind in moved:
        self.assertEqual(kind, "all-reduce")
        for found in re.findall(r"\w+\[[\d,]*\]", shapes):
          self.assertIn(found, (f"f32[{rows},{heads}]", f"f32[{rows},{heads},{DIM}]"))
      self.assertNotEmpty(moved)
      out, lse = (np.asarray(a, np.float64) for a in got)
      exact, exact_lse = (np.asarray(a, np.float64) for a in want)
      # Sums in another order, then one rounding to bfloat16: a step of it.
      np.testing.assert_allclose(out, exact, rtol=2.0**-7, atol=1e-5)
      np.testing.assert_allclose(lse, exact_lse, rtol=1e-6, atol=1e-6)

  @parameterized.parameters(AxisType.Auto, AxisType.Explicit)
  def test_heads_and_sequences(self, axis_type):
    """The same bits, and no bytes between devices; rings are divided as sequences are."""
    mesh = mesh_of(axis_type, tensor=2, data=4)
    ops = nv.MeshOps(mesh, heads="tensor", sequences="data")
    past, step = ((41, 3), (0, 0), (0, 70), (16, 1)), ((5, 20), (0, 3), (9, 2), (14, 1))
    rings = {"k_format": "fp8", "recent_window": 20, "num_rings": 12}
    for _, got, want, program in self.run_both(ops, past, step, **rings):
      self.assertNotRegex(program.as_text(), COLLECTIVES)
      for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))

  @parameterized.parameters(AxisType.Auto, AxisType.Explicit)
  def test_one_head_a_device(self, axis_type):
    """The same bits unrounded too, of this shape; attention.py says that others may differ."""
    mesh = mesh_of(axis_type, tensor=8)
    ops = nv.MeshOps(mesh, heads="tensor")
    past, step = ((41, 3, 0, 70),), ((5, 20, 3, 2),)
    options = {"k_format": "fp8", "v_format": "nvfp4", "recent_window": 20, "num_rings": 4}
    for _, got, want, _ in self.run_both(ops, past, step, dtype=jnp.float32, **options):
      for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))

  @parameterized.parameters({"pages": "context"}, {"recent_window": 20, "num_rings": 4})
  def test_a_device_has_the_bytes_that_were_planned(self, pages=None, **rings):
    """As `python -m benchmarks plan` counts them: of pages, scales, rings and their starts."""
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 2, 2), ("data", "tensor", "context"))
    ops = nv.MeshOps(mesh, heads="tensor", sequences="data", pages=pages)
    planned = plan.Model(
      layers=1,
      kv_heads=HEADS,
      head_dim=DIM,
      v_head_dim=128,
      page_size=PAGE,
      tensor=2,
      data=2,
      context=ops.size(pages),
      recent_window=rings.get("recent_window", 0),
    )
    for formats in (("nvfp4", "nvfp4"), ("fp8", "nvfp4"), ("fp8", "fp8")):
      cache = nv.PagedKVCache.create(
        num_pages=2 * 8 * ops.size(pages),
        page_size=PAGE,
        num_kv_heads=HEADS,
        head_dim=DIM,
        v_head_dim=128,
        k_format=formats[0],
        v_format=formats[1],
        **rings,
      )
      leaves = jax.tree.leaves(ops.place(cache))
      found = sum(a.addressable_shards[5].data.nbytes for a in leaves)
      # 98 tokens with a window of 20: two sequences of a device have 4 pages and a ring each.
      fits = plan.plan(planned, found, 98, *formats)
      self.assertEqual((fits.pages, fits.cache_bytes), (8, found))
      self.assertLess(plan.plan(planned, found - 1, 98, *formats).cache_bytes, found)

  def test_arguments(self):
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("tensor", "context"))
    ops = nv.MeshOps(mesh, heads="tensor", pages="context")
    cache, batch, q = filled(12, (60, 0, 33))
    odd, _, _ = filled(6, (60,))
    for call, message in (
      (lambda: nv.MeshOps(mesh, heads="model"), r"heads must be an axis of .*, got 'model'"),
      (lambda: nv.MeshOps(mesh, heads="tensor", pages="tensor"), "must be different axes"),
      (lambda: ops.place(odd), "num_pages must be a multiple of 4 devices, got 6"),
      (lambda: ops.lay_out([batch, batch]), "batches must be 1, got 2"),
      (lambda: ops.decode(q, cache, batch, window=8, read_path="auto"), "window must be None .* 8"),
      (lambda: ops.prefill(q, cache, batch, read_path="auto"), "new_kv must be given"),
    ):
      with self.assertRaisesRegex(ValueError, message):
        call()


class MeshChecksTest(TestCase):
  """Wrong values are named, and end all devices alike: one alone would leave the others waiting."""

  AXIS_TYPE = AxisType.Auto
  TOKENS, PAGES = 29, 16  # of a step on each device of `sequences`, and of the cache
  TABLE, LENS, CU = ((0, 0, 1, 1, 0, 0), (1, 0, 0, 1, 0, 0)), (20, 9), (0, 20, 29)

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    mesh = mesh_of(cls.AXIS_TYPE, data=2, tensor=2, context=2)
    cls.ops = ops = nv.MeshOps(mesh, heads="tensor", sequences="data", pages="context")
    cls.cache = ops.place(
      nv.PagedKVCache.create(num_pages=cls.PAGES, page_size=PAGE, num_kv_heads=2, head_dim=DIM)
    )
    cls.k, cls.q = (jnp.ones((2 * cls.TOKENS, h, DIM), jnp.bfloat16) for h in (2, 4))

    def append(cache, k, batch):
      return ops.append(cache, k, k, batch)

    def prefill(cache, q, batch):
      k = jax.lax.slice_in_dim(q, 0, 2, axis=1)
      return ops.prefill(q, cache, batch, new_kv=(k, k), read_path="auto")

    def decode(cache, q, batch):
      return ops.decode(q, cache, batch, read_path="auto")

    # Compiled once, for all tests.
    cls.operations = {f: jax.jit(f) for f in (append, prefill, decode)}
    cls.append, cls.prefill, cls.decode = map(staticmethod, cls.operations)

  def batch(self, table=TABLE, lens=LENS, cu=CU):
    """Right on the first device of `sequences`, as given on the second."""
    of = lambda *arrays: nv.RaggedBatch(*(jnp.asarray(a, jnp.int32) for a in arrays))
    cu_of_first = self.CU if len(cu) == 3 and cu[1] != 1 else cu
    return self.ops.lay_out([of(self.TABLE, self.LENS, cu_of_first), of(table, lens, cu)])

  def arguments(self, rows, changes):
    batch = self.batch(**changes)
    rows = placed(self.ops, rows, self.ops.rows)
    return self.cache, rows, placed(self.ops, batch, self.ops.batch_specs(batch))

  def calls(self):
    """(operation, rows, changes of the second batch, message, only by debug_checks)."""
    wild = ((0, 9, 1, 1, 0, 0), self.TABLE[1])
    negative = ((0, -5, 1, 1, 0, 0), self.TABLE[1])
    twice = (self.TABLE[0], (0, 1, 0, 1, 0, 0))
    one_each = {"cu": (0, 1, 2)}
    k, q = self.k, self.q
    must = r"page_table\[0, 1\] must "
    yield self.append, k, {"table": negative}, must + "not be negative, got -5", True
    yield self.append, k, {"table": wild}, must + "be below 4, got 9", True
    yield self.append, k, {"table": twice}, r"slot_mapping\[20\] must not repeat a slot", True
    yield self.append, k, {"lens": (200, 9)}, r"kv_lens\[0\] is 200", False
    yield self.append, k, {"lens": (-3, 9)}, "kv_lens must not be negative, got -3", False
    yield self.append, k, {"cu": (0, 30, 29)}, "cu_q_lens must ascend, got 30 then 29", False
    yield self.append, k[:10], {}, "cu_q_lens must end at most at 5 tokens, got 29", False
    yield self.append, k, {"lens": (19, 9)}, "kv_lens must count this step's tokens", False
    later = {"lens": (40, 9)}  # 20 tokens before this step
    yield self.prefill, q, later | {"table": negative}, must + "not be negative, got -5", True
    yield self.decode, q[:4], one_each | {"table": negative}, must + "not be negative", True
    yield self.decode, q[:4], {"cu": (0, 1, 1)}, "cu_q_lens must be 0..2 for decode", False

  def test_every_rule(self):
    for operation, rows, changes, message, only_debug in self.calls():
      arguments = self.arguments(rows, changes)
      jitted = self.operations[operation]
      with self.subTest(f"{operation.__name__} {changes}"):
        if not only_debug:
          with self.assertRaisesRegex(ValueError, message):
            operation(*arguments)
        with nv.debug_checks():
          with self.assertRaisesRegex(ValueError, message):
            operation(*arguments)
          with self.assertRaisesRegex(jax.errors.JaxRuntimeError, message):
            jax.block_until_ready(jitted(*arguments))

  def test_known_values_of_a_traced_call(self):
    cache, k, batch = self.arguments(self.k, {"lens": (-3, 9)})
    with self.assertRaisesRegex(ValueError, "kv_lens must not be negative, got -3"):
      jax.jit(lambda cache, k: self.ops.append(cache, k, k, batch))(cache, k)

  def test_right_values_pass(self):
    for operation, rows, changes in (
      (self.append, self.k, {}),
      (self.prefill, self.q, {}),
      (self.decode, self.q[:4], {"cu": (0, 1, 2)}),
    ):
      arguments = self.arguments(rows, changes)
      with nv.debug_checks():
        jax.block_until_ready(self.operations[operation](*arguments))

  def test_rings(self):
    ops = nv.MeshOps(self.ops.mesh, heads="tensor", sequences="data")
    cache = ops.place(
      nv.PagedKVCache.create(
        num_pages=8, page_size=PAGE, num_kv_heads=2, head_dim=DIM, recent_window=20, num_rings=4
      )
    )
    of = lambda ids: nv.RaggedBatch(
      *(jnp.asarray(a, jnp.int32) for a in (((0, 1), (2, 3)), self.LENS, self.CU, ids))
    )
    message = r"ring_ids\[1\] must not repeat a ring, got 1"
    with self.assertRaisesRegex(ValueError, message):
      ops.append(cache, self.k, self.k, ops.lay_out([of((0, 1)), of((1, 1))]))
    append, k = jax.jit(ops.append), placed(ops, self.k, ops.rows)
    for ids, outcome in (
      ((1, 1), self.assertRaisesRegex(jax.errors.JaxRuntimeError, message)),
      ((1, 0), contextlib.nullcontext()),
    ):
      batch = ops.lay_out([of((0, 1)), of(ids)])
      batch = placed(ops, batch, ops.batch_specs(batch))
      with nv.debug_checks(), outcome:
        jax.block_until_ready(append(cache, k, k, batch))

  def test_arguments(self):
    ops, cache, k, q = self.ops, self.cache, self.k, self.q
    batch = self.batch()
    narrow = dataclasses.replace(batch, page_table=batch.page_table[:, :5])
    prefill = functools.partial(ops.prefill, read_path="auto")
    for call, message in (
      (lambda: nv.MeshOps(None, heads="tensor"), "mesh must be a jax.sharding.Mesh, got NoneType"),
      (lambda: ops.lay_out([batch, 2]), "batches must be of RaggedBatch, got int"),
      (lambda: ops.lay_out(batch), "batches must be a list of .*, got RaggedBatch"),
      (lambda: ops.append(cache, k, k, None), "batch must be a RaggedBatch, got NoneType"),
      (lambda: ops.append(cache, k[:5], k[:5], batch), "rows of .* must be a multiple of 2 .* 5"),
      (lambda: ops.append(cache, k, k[:4], batch), "equally many tokens, got 58 and 4"),
      (lambda: ops.append(cache, k, k, narrow), "max_pages must be a multiple of 2 devices, got 5"),
      (lambda: prefill(q, cache, batch, new_kv=(k,)), "a pair .k, v., got tuple of 1"),
      (lambda: prefill(q, cache, batch, new_kv=(k[:4],) * 2), "new_kv must have q's 58 tokens"),
      (lambda: prefill(q[:, :3], cache, batch, new_kv=(k, k)), "multiple of num_kv_heads 2, got 3"),
      (
        lambda: prefill(q, cache, batch, new_kv=(k, k), sinks=jnp.ones(3)),
        r"sinks must be of shape \(4,\), got \(3,\)",
      ),
    ):
      with self.assertRaisesRegex(ValueError, message):
        call()


class NamedShardingTest(TestCase):
  """jit alone, of operations that know no mesh: XLA divides the definition by heads by itself."""

  def setUp(self):
    super().setUp()
    self.mesh = Mesh(np.asarray(jax.devices()), ("shards",))

  def place(self, x, *spec):
    return jax.device_put(x, NamedSharding(self.mesh, P(*spec)))

  def test_heads(self):
    cache, batch, q = filled(12, (60, 0, 33))
    specs = sharding.cache_specs(cache, heads="shards")
    placed = jax.tree.map(lambda a, spec: self.place(a, *spec), cache, specs)
    r = np.random.default_rng(6)
    k, v = jnp.asarray(r.standard_normal((2, 3, HEADS, DIM)), jnp.bfloat16)
    more = nv.RaggedBatch.for_decode(batch.page_table, batch.kv_lens + 1)

    def step(cache, q, k, v, batch):
      cache = nv.append(cache, k, v, batch)
      how = {"read_path": "nvfp4_dequant"}
      return cache, nv.decode(q, cache, batch, **how), nv.prefill(q, cache, batch, **how)

    rows = [self.place(x, None, "shards") for x in (q, k, v)]
    compiled = jax.jit(step, donate_argnums=0).lower(placed, *rows, more).compile()
    # Prefill asks whether all values are finite.
    self.assertLessEqual(
      set(re.findall(COLLECTIVES, compiled.as_text())), {("pred[]", "all-reduce")}
    )
    got, want = compiled(placed, *rows, more), jax.jit(step)(cache, q, k, v, more)
    self.assertEqual(got[0].k.data.sharding.spec, P(None, "shards"))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      np.testing.assert_array_equal(bits(a), bits(b))


class ScaleTest(TestCase):
  """The scaling benchmark on devices that gain nothing by it: its results and its line."""

  def test_small_shapes(self):
    for axis, sequences in (("heads", 3), ("pages", 1)):
      small = scale.Case(axis, sequences, 5 * PAGE, 1.5, Geometry(4, 2, DIM), PAGE)
      with mock.patch.object(scale, "_steps", wraps=scale._steps) as steps:
        scaled = scale.measure(small, jax.devices()[:2], few=0, many=1)
      # Bits are compared of what promises them; what is timed need not.
      compared = [call.kwargs.get("batch_invariant", False) for call in steps.mock_calls]
      self.assertEqual(sum(compared), 2 if axis == "heads" else 0)
      self.assertGreater(len(compared), 2)
      self.assertTrue(scaled.same, scaled)
      self.assertRegex(scaled.line(), rf"by {axis}: 1 GPU .* times as fast \(target 1.5, .*GPU's$")

  def test_wrong_results_are_named(self):
    scaled = scale.Scaled(scale.CASES[0], 2, us_one=200.0, us_all=100.0, error=1e-6)
    self.assertFalse(scaled.same)
    line = "decode 64/1/8K by heads: 1 GPU 200.0 us, 2 GPUs 100.0 us, 2.00 times as fast (target "
    self.assertEqual(scaled.line(), line + "1.8, met); WRONG RESULTS, off by 1.0e-06")

  def test_without_gpus(self):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
      self.assertEqual(scale.main([]), 1)
    self.assertIn("this needs 2 GPUs of one host", said.getvalue())


if __name__ == "__main__":
  absltest.main()
