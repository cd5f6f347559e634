"""The operations inside jit, scan, vmap and with donated caches: results, traces, copies."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax import lax

import nvfp4_pallas as nv
from tests import cases
from tests.base import TestCase

HEADS, DIM, PAGE, Q_HEADS = 2, 64, 16, 6
PATHS = {"bf16": "bf16", "fp8": "fp8", "nvfp4": "nvfp4_a4q"}


def new_cache(format="nvfp4", num_pages=16):
  return nv.PagedKVCache.create(
    num_pages=num_pages, page_size=PAGE, num_kv_heads=HEADS, head_dim=DIM, k_format=format
  )


def step_inputs(steps, num_seqs, seed=0):
  r = np.random.default_rng(seed)
  normal = lambda heads: jnp.asarray(r.standard_normal((steps, num_seqs, heads, DIM)), jnp.bfloat16)
  return normal(Q_HEADS), normal(HEADS), normal(HEADS)


def decode_step(cache, batch, q, k, v, read_path):
  cache = nv.append(cache, k, v, batch)
  out, lse = nv.decode(q, cache, batch, read_path=read_path)
  return cache, (out, lse)


class TraceTest(TestCase):
  def test_other_lengths_and_pages_do_not_retrace(self):
    traces = []

    @jax.jit
    def step(cache, q, k, v, batch):
      traces.append(None)
      cache = nv.append(cache, k, v, batch)
      return cache, nv.prefill(q, cache, batch, read_path="nvfp4_dequant")

    cache = new_cache()
    r = np.random.default_rng(1)
    for q_lens, kv_lens in (((3, 0), (3, 0)), ((1, 4), (4, 4)), ((0, 5), (4, 9)), ((0, 0), (4, 9))):
      table = jnp.asarray(r.permutation(16)[:4].reshape(2, 2), jnp.int32)
      batch = nv.RaggedBatch(
        table, jnp.asarray(kv_lens, jnp.int32), jnp.asarray([0, q_lens[0], sum(q_lens)], jnp.int32)
      )
      x = jnp.ones((5, HEADS, DIM), jnp.bfloat16)
      cache, (out, _) = step(cache, jnp.ones((5, Q_HEADS, DIM), jnp.bfloat16), x, x, batch)
      self.assertEqual(np.count_nonzero(np.asarray(out).any(axis=(1, 2))), sum(q_lens))
    self.assertLen(traces, 1)

  @parameterized.parameters(*PATHS)
  def test_decode_loop_in_scan(self, format):
    """64 steps of append and decode in one scan: one trace, and the same as step by step."""
    steps, num_seqs, traces = 64, 2, []
    table = jnp.asarray(np.random.default_rng(2).permutation(16)[:10].reshape(2, 5), jnp.int32)

    def body(state, inputs):
      traces.append(None)
      cache, lens = state
      lens = lens + 1
      batch = nv.RaggedBatch.for_decode(table, lens)
      cache, result = decode_step(cache, batch, *inputs, PATHS[format])
      return (cache, lens), result

    start = (new_cache(format), jnp.asarray([0, 7], jnp.int32))
    inputs = step_inputs(steps, num_seqs)
    run = jax.jit(lambda start, inputs: lax.scan(body, start, inputs))
    (cache, lens), (out, lse) = run(start, inputs)
    self.assertLessEqual(len(traces), 1)
    np.testing.assert_array_equal(lens, [64, 71])

    one_step = jax.jit(lambda *a: decode_step(*a, PATHS[format]))
    state = start[0]
    for t in range(steps):
      batch = nv.RaggedBatch.for_decode(table, start[1] + 1 + t)
      state, (out_t, lse_t) = one_step(state, batch, *(a[t] for a in inputs))
      np.testing.assert_array_equal(out[t], out_t)
      np.testing.assert_array_equal(lse[t], lse_t)
    jax.tree.map(np.testing.assert_array_equal, cache, state)


def copies_of(compiled, cache) -> list[str]:
  """Copy instructions of the compiled module whose result has the shape of a page array."""
  shapes = {str(list(a.shape)).replace(" ", "") for a in jax.tree.leaves(cache) if a.ndim == 4}
  lines = [line.strip() for line in compiled.as_text().splitlines()]
  copies = [(re.search(r"= \w+(\[[\d,]*\])\S* copy(?:-start)?\(", line), line) for line in lines]
  return [line for match, line in copies if match and match.group(1) in shapes]


class DonationTest(TestCase):
  """A donated cache is updated in place: aliased to the result, with no copy of its pages."""

  def check(self, compiled, cache):
    self.assertIn("input_output_alias", compiled.as_text())
    self.assertEmpty(copies_of(compiled, cache))
    memory = compiled.memory_analysis()
    self.assertGreaterEqual(memory.alias_size_in_bytes, cache.nbytes)
    # XLA on a CPU reinterprets 8-bit floats by writing them anew (on a GPU that is free, which
    # aot_test checks): of an nvfp4 cache the scales, a ninth; of an fp8 cache all of it.
    e4m3 = sum(a.nbytes for a in jax.tree.leaves(cache) if a.dtype == jnp.float8_e4m3fn)
    self.assertLess(memory.temp_size_in_bytes, e4m3 + 2**16)

  @parameterized.parameters("bf16", "fp8", "nvfp4")
  def test_append(self, format):
    cache = new_cache(format, num_pages=512)
    x = jnp.zeros((4, HEADS, DIM), jnp.bfloat16)
    slots = jnp.arange(4, dtype=jnp.int32)
    append = jax.jit(lambda c, k, v, s: nv.append(c, k, v, slot_mapping=s), donate_argnums=0)
    self.check(append.lower(cache, x, x, slots).compile(), cache)

  def test_copy_pages(self):
    cache = new_cache(num_pages=512)
    ids = jnp.zeros((2,), jnp.int32)
    compiled = jax.jit(nv.copy_pages, donate_argnums=0).lower(cache, ids, ids).compile()
    self.check(compiled, cache)

  def test_a_copy_would_be_seen(self):
    cache = new_cache(num_pages=512)
    x, slots = jnp.zeros((4, HEADS, DIM), jnp.bfloat16), jnp.arange(4, dtype=jnp.int32)
    append = jax.jit(lambda c, k, v, s: nv.append(c, k, v, slot_mapping=s))
    compiled = append.lower(cache, x, x, slots).compile()
    self.assertNotEmpty(copies_of(compiled, cache))

  def test_decode_loop(self):
    cache = new_cache(num_pages=512)
    table = jnp.asarray(np.arange(20).reshape(2, 10), jnp.int32)

    def body(state, inputs):
      cache, lens = state
      batch = nv.RaggedBatch.for_decode(table, lens + 1)
      cache, (out, _) = decode_step(cache, batch, *inputs, "nvfp4_dequant")
      return (cache, lens + 1), out

    loop = jax.jit(
      lambda cache, inputs: lax.scan(body, (cache, jnp.zeros((2,), jnp.int32)), inputs),
      donate_argnums=0,
    )
    compiled = loop.lower(cache, step_inputs(8, 2)).compile()
    self.assertEmpty(copies_of(compiled, cache))
    self.assertGreaterEqual(compiled.memory_analysis().alias_size_in_bytes, cache.nbytes)


class LayersTest(TestCase):
  """A model's layers as a leading axis on every leaf of the cache."""

  def setUp(self):
    super().setUp()
    self.layers = 3
    self.one = [new_cache(num_pages=4) for _ in range(self.layers)]
    self.stacked = jax.tree.map(lambda *a: jnp.stack(a), *self.one)
    self.batch = nv.RaggedBatch(
      jnp.asarray([[2, 0], [3, 1]], jnp.int32),
      jnp.asarray([5, 18], jnp.int32),
      jnp.asarray([0, 5, 23], jnp.int32),
    )
    r = np.random.default_rng(3)
    shape = (self.layers, 23)
    normal = lambda heads: jnp.asarray(r.standard_normal((*shape, heads, DIM)), jnp.bfloat16)
    self.q, self.k, self.v = normal(Q_HEADS), normal(HEADS), normal(HEADS)

  def layer(self, cache, q, k, v):
    cache = nv.append(cache, k, v, self.batch)
    return cache, nv.prefill(q, cache, self.batch, read_path="nvfp4_dequant")

  def check(self, caches, results):
    for i in range(self.layers):
      alone = jax.jit(self.layer)(self.one[i], self.q[i], self.k[i], self.v[i])
      got = jax.tree.map(lambda a, i=i: a[i], (caches, results))
      jax.tree.map(np.testing.assert_array_equal, got[0], alone[0])
      # vmap may batch the products of the layers: equal to float32 rounding, then to bfloat16's.
      out, lse = (np.asarray(a).astype(np.float32) for a in got[1])
      np.testing.assert_allclose(
        out, np.asarray(alone[1][0]).astype(np.float32), rtol=2**-7, atol=1e-5
      )
      np.testing.assert_allclose(lse, alone[1][1], rtol=1e-5, atol=1e-5)

  def test_vmap(self):
    self.check(*jax.jit(jax.vmap(self.layer))(self.stacked, self.q, self.k, self.v))

  def test_scan(self):
    step = lambda _, x: (None, self.layer(*x))
    _, (caches, results) = jax.jit(lambda *x: lax.scan(step, None, x))(
      self.stacked, self.q, self.k, self.v
    )
    self.check(caches, results)


class LongContextTest(TestCase):
  """The definition holds one tile of keys at a time: a 32K context fits a small machine."""

  def test_memory_of_32k_prefill(self):
    tokens, pages = 32768, 32768 // 64
    make = lambda: nv.PagedKVCache.create(
      num_pages=pages, page_size=64, num_kv_heads=8, head_dim=128
    )
    cache = jax.eval_shape(make)
    q = jax.ShapeDtypeStruct((tokens, 32, 128), jnp.bfloat16)
    batch = nv.RaggedBatch(
      jax.ShapeDtypeStruct((1, pages), jnp.int32),
      jax.ShapeDtypeStruct((1,), jnp.int32),
      jax.ShapeDtypeStruct((2,), jnp.int32),
    )
    prefill = jax.jit(lambda q, c, b: nv.prefill(q, c, b, read_path="nvfp4_a4q"))
    memory = prefill.lower(q, cache, batch).compile().memory_analysis()
    # Q' and the output in float32 are 0.5 GiB each; the score matrix would be 128 GiB.
    self.assertLess(memory.temp_size_in_bytes, 6 * 2**30)

  def test_32k_context_runs(self):
    case = cases.Case(
      "long", q_lens=(3,), kv_lens=(32768,), num_kv_heads=1, group=2, head_dim=64, page_size=256
    )
    built = cases.build(case)
    prefill = jax.jit(lambda b: nv.prefill(b[0], b[1], b[2], read_path="nvfp4_dequant"))
    out, lse = prefill((built.q, built.cache, built.batch))
    decode_batch = nv.RaggedBatch.for_decode(built.batch.page_table, built.batch.kv_lens)
    last, last_lse = nv.decode(
      built.q[2:3], built.cache, decode_batch, read_path="nvfp4_dequant", num_splits=8
    )
    np.testing.assert_allclose(lse[2], last_lse[0], rtol=1e-5)
    np.testing.assert_allclose(
      np.asarray(out[2]).astype(np.float32),
      np.asarray(last[0]).astype(np.float32),
      rtol=2**-7,
      atol=1e-4,
    )


if __name__ == "__main__":
  absltest.main()
