"""Tests of caches over eight devices; sharding_test.py runs them in a process that has so many."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import nvfp4_pallas as nv
from nvfp4_pallas import sharding
from tests.base import TestCase

DEVICES = 8
HEADS, GROUP, DIM, PAGE = 8, 2, 64, 16
UNCHECKED = {"check_vma": False}  # pallas_call says nothing of how its results vary over a mesh


def bits(x) -> np.ndarray:
  return np.asarray(x).view(np.uint8)


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
  cache = nv.append(cache, k, v, batch)
  q = jnp.asarray(r.standard_normal((len(lens), HEADS * GROUP, DIM)), jnp.bfloat16)
  return cache, nv.RaggedBatch.for_decode(table, batch.kv_lens), q


class ShardedTest(TestCase):
  def setUp(self):
    super().setUp()
    self.assertLen(jax.devices(), DEVICES)
    self.mesh = Mesh(np.asarray(jax.devices()), ("shards",))
    self.decode = functools.partial(nv.decode, read_path="nvfp4_dequant")

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

  def test_rings_over_heads(self):
    """A device has its heads of the rings, and all rings."""
    cache = nv.PagedKVCache.create(
      num_pages=8, page_size=PAGE, num_kv_heads=HEADS, head_dim=DIM, recent_window=20, num_rings=2
    )
    r = np.random.default_rng(2)
    k, v = jnp.asarray(r.standard_normal((2, 90, HEADS, DIM)), jnp.bfloat16)
    table = jnp.asarray(r.permutation(8).reshape(2, 4), jnp.int32)
    lens = jnp.asarray([40, 50], jnp.int32)
    cache = nv.append(cache, k, v, nv.RaggedBatch(table, lens, jnp.asarray([0, 40, 90], jnp.int32)))
    q = jnp.asarray(r.standard_normal((2, HEADS * GROUP, DIM)), jnp.bfloat16)
    batch = nv.RaggedBatch.for_decode(table, lens)
    want = jax.jit(self.decode)(q, cache, batch)
    got = self.over_heads(cache)(q, cache, batch)
    for a, b in zip(got, want, strict=True):
      np.testing.assert_array_equal(bits(a), bits(b))
    with self.assertRaisesRegex(ValueError, "pages must be None .* recent window"):
      sharding.cache_specs(cache, pages="shards")

  def test_append_to_heads(self):
    cache, batch, _ = filled(12, (60, 0, 33))
    k, v = jax.random.normal(jax.random.key(3), (2, 3, HEADS, DIM), jnp.bfloat16)
    more = nv.RaggedBatch.for_decode(batch.page_table, batch.kv_lens + 1)
    specs = sharding.cache_specs(cache, heads="shards")
    heads = P(None, "shards")
    append = jax.shard_map(
      nv.append,
      mesh=self.mesh,
      in_specs=(specs, heads, heads, P()),
      out_specs=specs,
      **UNCHECKED,
    )
    got, want = jax.jit(append)(cache, k, v, more), nv.append(cache, k, v, more)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      np.testing.assert_array_equal(bits(a), bits(b))

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


if __name__ == "__main__":
  absltest.main()
