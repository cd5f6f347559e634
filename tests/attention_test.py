"""prefill and decode of the xla definition against the float64 oracle on the same bytes.

This judges the arithmetic only: both sides decode the same cache. How far a format is from wide
inputs is judged in quality_test.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import nvfp4_pallas as nv
from benchmarks import oracle
from tests import cases
from tests.base import TestCase

PATHS = tuple(cases.FORMATS_OF_PATH)


def all_formats():
  return [(path, k, v) for path, pairs in cases.FORMATS_OF_PATH.items() for k, v in pairs]


def run_prefill(built, read_path, **options):
  return jax.jit(
    lambda q, cache, batch: nv.prefill(
      q, cache, batch, read_path=read_path, implementation="xla", **built.options, **options
    )
  )(built.q, built.cache, built.batch)


def run_decode(built, read_path, **options):
  q = built.q[: built.batch.num_seqs]
  return jax.jit(
    lambda q, cache, batch: nv.decode(
      q, cache, batch, read_path=read_path, implementation="xla", **options
    )
  )(q, built.cache, built.batch)


def expected(built, q, read_path, **options):
  return oracle.attention(
    q,
    built.cache,
    built.batch.page_table,
    built.batch.kv_lens,
    built.batch.cu_q_lens,
    read_path=read_path,
    **options,
  )


class AttentionTestCase(TestCase):
  def assert_within_bounds(self, result, want):
    out, lse = (np.asarray(a).astype(np.float64) for a in result)
    bf16_out = result[0].dtype == jnp.bfloat16
    self.assertEqual(result[1].dtype, jnp.float32)
    empty = np.isneginf(want.lse)
    self.assertTrue((out[empty] == 0).all())
    np.testing.assert_array_equal(np.isneginf(lse), empty)
    self.assertTrue((np.abs(out - want.out) <= want.out_bound(bf16_out=bf16_out)).all())
    lse_error = np.abs(np.where(empty, 0, lse) - np.where(empty, 0, want.lse))
    self.assertTrue((lse_error <= want.lse_bound()).all())


class PrefillTest(AttentionTestCase):
  @parameterized.named_parameters((c.name, c) for c in cases.SHAPES)
  def test_shapes(self, case):
    built = cases.build(case)
    want = expected(built, built.q, "nvfp4_dequant", **built.options)
    self.assert_within_bounds(run_prefill(built, "nvfp4_dequant"), want)

  @parameterized.parameters(*all_formats())
  def test_read_paths_and_formats(self, read_path, k_format, v_format):
    built = cases.build(cases.with_formats(cases.MIXED, k_format, v_format))
    want = expected(built, built.q, read_path)
    self.assert_within_bounds(run_prefill(built, read_path), want)

  @parameterized.parameters(1, 2)
  def test_q_levels(self, q_levels):
    built = cases.build(cases.MIXED)
    want = expected(built, built.q, "nvfp4_a4q", q_levels=q_levels)
    self.assert_within_bounds(run_prefill(built, "nvfp4_a4q", q_levels=q_levels), want)

  @parameterized.parameters("float32", "float16")
  def test_q_dtypes(self, dtype):
    built = cases.build(cases.MIXED)
    q = built.q.astype(dtype)
    want = expected(built, q, "nvfp4_dequant")
    out, lse = nv.prefill(q, built.cache, built.batch, read_path="nvfp4_dequant")
    self.assertEqual(out.dtype, q.dtype)
    unit = {"float32": 0, "float16": 2.0**-11}[dtype]
    error = np.abs(np.asarray(out).astype(np.float64) - want.out)
    self.assertTrue((error <= want.out_bound() + unit * np.abs(want.out) + 2.0**-25).all())
    self.assertEqual(lse.dtype, jnp.float32)

  def test_sinks(self):
    built = cases.build(cases.MIXED)
    sinks = jnp.linspace(-3, 4, built.q.shape[1], dtype=jnp.float32)
    want = expected(built, built.q, "nvfp4_dequant", sinks=sinks)
    self.assert_within_bounds(run_prefill(built, "nvfp4_dequant", sinks=sinks), want)

  @parameterized.parameters(*PATHS)
  def test_new_kv(self, read_path):
    case = cases.Case("chunk", q_lens=(5, 1, 24, 0), kv_lens=(40, 1, 24, 9))
    built = cases.build(cases.with_formats(case, *cases.FORMATS_OF_PATH[read_path][0]))
    r = np.random.default_rng(1)
    shape = (built.q.shape[0], case.num_kv_heads, case.head_dim)
    # float32: they are attended to as bfloat16 all the same.
    new_kv = tuple(jnp.asarray(r.standard_normal(shape), jnp.float32) for _ in range(2))
    for options in ({}, {"window": 11}, {"causal": False, "soft_cap": 5.0}):
      want = expected(built, built.q, read_path, new_kv=new_kv, **options)
      got = run_prefill(built, read_path, new_kv=new_kv, **options)
      self.assert_within_bounds(got, want)

  def test_repack_equals_dequant(self):
    built = cases.build(cases.MIXED)
    first, second = (run_prefill(built, path) for path in ("nvfp4_dequant", "nvfp4_repack"))
    jax.tree.map(np.testing.assert_array_equal, first, second)

  def test_repeats_bit_for_bit(self):
    built = cases.build(cases.MIXED)
    first, second = (run_prefill(built, "nvfp4_a4q") for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)

  @parameterized.parameters(*PATHS)
  def test_a_sequence_alone_equals_the_sequence_in_a_batch(self, read_path):
    case = cases.with_formats(cases.MIXED, *cases.FORMATS_OF_PATH[read_path][0])
    built = cases.build(case)
    out, lse = run_prefill(built, read_path)
    for s in (1, 2, 4):
      rows = slice(int(built.batch.cu_q_lens[s]), int(built.batch.cu_q_lens[s + 1]))
      batch = nv.RaggedBatch(
        built.batch.page_table[s : s + 1],
        built.batch.kv_lens[s : s + 1],
        jnp.asarray([0, rows.stop - rows.start], jnp.int32),
      )
      alone = run_prefill(cases.Built(built.q[rows], built.cache, batch, {}), read_path)
      np.testing.assert_array_equal(out[rows], alone[0])
      np.testing.assert_array_equal(lse[rows], alone[1])

  def test_new_kv_alone_and_in_a_batch(self):
    case = cases.Case("chunk", q_lens=(5, 1, 40), kv_lens=(700, 1, 90), num_kv_heads=1, group=3)
    built = cases.build(case, padding_rows=0)
    r = np.random.default_rng(2)
    k, v = (jnp.asarray(r.standard_normal((46, 1, 64)), jnp.bfloat16) for _ in range(2))
    sinks = jnp.asarray([0.3, -1.0, 2.0], jnp.float32)
    out, lse = run_prefill(built, "nvfp4_a4q", new_kv=(k, v), sinks=sinks)
    for s in range(3):
      rows = slice(*(int(n) for n in built.batch.cu_q_lens[s : s + 2]))
      batch = nv.RaggedBatch(
        built.batch.page_table[s : s + 1],
        built.batch.kv_lens[s : s + 1],
        jnp.asarray([0, rows.stop - rows.start], jnp.int32),
      )
      one = cases.Built(built.q[rows], built.cache, batch, {})
      alone = run_prefill(one, "nvfp4_a4q", new_kv=(k[rows], v[rows]), sinks=sinks)
      np.testing.assert_array_equal(out[rows], alone[0])
      np.testing.assert_array_equal(lse[rows], alone[1])

  def test_nothing_to_attend_to(self):
    """No rows, no sequences, no pages, with and without a new chunk."""
    built = cases.build(cases.Case("some", q_lens=(2,), kv_lens=(2,)), padding_rows=0)
    none = nv.RaggedBatch(
      jnp.zeros((0, 3), jnp.int32), jnp.zeros((0,), jnp.int32), jnp.zeros((1,), jnp.int32)
    )
    no_pages = nv.RaggedBatch(
      jnp.zeros((1, 0), jnp.int32), jnp.zeros((1,), jnp.int32), jnp.asarray([0, 1], jnp.int32)
    )
    no_rows = nv.RaggedBatch(
      built.batch.page_table, built.batch.kv_lens, jnp.zeros((2,), jnp.int32)
    )
    for batch, tokens in ((none, 0), (none, 3), (no_pages, 1), (no_rows, 0)):
      q = jnp.ones((tokens, 8, 64), jnp.bfloat16)
      kv = jnp.ones((tokens, 2, 64), jnp.bfloat16)
      for new_kv in (None, (kv, kv)) if batch is not no_pages else (None,):
        for path in ("nvfp4_dequant", "nvfp4_a8q"):
          out, lse = nv.prefill(q, built.cache, batch, read_path=path, new_kv=new_kv)
          self.assertEqual((out.shape, lse.dtype), ((tokens, 8, 64), jnp.float32))
          self.assertTrue((np.asarray(out) == 0).all() and np.isneginf(lse).all())
    for batch, tokens in ((none, 0), (no_pages, 1)):
      q = jnp.ones((tokens, 8, 64), jnp.bfloat16)
      out, lse = nv.decode(q, built.cache, batch, read_path="nvfp4_a8q")
      self.assertTrue((np.asarray(out) == 0).all() and np.isneginf(lse).all())


class DecodeTest(AttentionTestCase):
  @parameterized.product(path=all_formats(), num_splits=(None, 3))
  def test_read_paths(self, path, num_splits):
    read_path, k_format, v_format = path
    case = cases.decode_case(cases.with_formats(cases.LONG[0], k_format, v_format))
    built = cases.build(case)
    q = built.q[: built.batch.num_seqs]
    want = expected(built, q, read_path)
    self.assert_within_bounds(run_decode(built, read_path, num_splits=num_splits), want)

  @parameterized.named_parameters((c.name, c) for c in (cases.MIXED, *cases.GQA, *cases.PAGES))
  def test_shapes(self, case):
    built = cases.build(cases.decode_case(case))
    q = built.q[: built.batch.num_seqs]
    want = expected(built, q, "nvfp4_dequant")
    self.assert_within_bounds(run_decode(built, "nvfp4_dequant", num_splits=2), want)

  @parameterized.parameters({"window": 7}, {"soft_cap": 2.0}, {"sm_scale": 0.4})
  def test_options(self, **options):
    built = cases.build(cases.decode_case(cases.LONG[0]))
    q = built.q[: built.batch.num_seqs]
    sinks = jnp.linspace(-1, 2, q.shape[1], dtype=jnp.float32)
    want = expected(built, q, "nvfp4_dequant", sinks=sinks, **options)
    got = run_decode(built, "nvfp4_dequant", num_splits=2, sinks=sinks, **options)
    self.assert_within_bounds(got, want)

  def test_equals_prefill_of_one_token(self):
    built = cases.build(cases.decode_case(cases.MIXED))
    q = built.q[: built.batch.num_seqs]
    want = expected(built, q, "nvfp4_dequant")
    got = nv.prefill(q, built.cache, built.batch, read_path="nvfp4_dequant")
    self.assert_within_bounds(got, want)
    self.assert_within_bounds(run_decode(built, "nvfp4_dequant"), want)

  @parameterized.product(group=(3, 5), num_splits=(1, 2), soft_cap=(None, 4.0))
  def test_batch_invariant_shapes(self, group, num_splits, soft_cap):
    lens = (1190, 515, 3, 777)
    case = cases.Case("invariant", kv_lens=lens, num_kv_heads=1, group=group, page_size=64)
    built = cases.build(cases.decode_case(case))
    options = {"num_splits": num_splits, "soft_cap": soft_cap, "batch_invariant": True}
    options["sinks"] = jnp.linspace(-1, 1, group, dtype=jnp.float32)
    out, lse = run_decode(built, "nvfp4_a4q", **options)
    for s in range(len(lens)):
      one = nv.RaggedBatch.for_decode(
        built.batch.page_table[s : s + 1], built.batch.kv_lens[s : s + 1]
      )
      alone = run_decode(
        cases.Built(built.q[s : s + 1], built.cache, one, {}), "nvfp4_a4q", **options
      )
      np.testing.assert_array_equal(out[s], alone[0][0])
      np.testing.assert_array_equal(lse[s], alone[1][0])

  def test_batch_invariant(self):
    built = cases.build(cases.decode_case(cases.LONG[0]))
    out, lse = run_decode(built, "nvfp4_dequant", num_splits=2, batch_invariant=True)
    for s in range(built.batch.num_seqs):
      one = nv.RaggedBatch.for_decode(
        built.batch.page_table[s : s + 1], built.batch.kv_lens[s : s + 1]
      )
      alone = nv.decode(
        built.q[s : s + 1],
        built.cache,
        one,
        read_path="nvfp4_dequant",
        num_splits=2,
        batch_invariant=True,
      )
      np.testing.assert_array_equal(out[s], alone[0][0])
      np.testing.assert_array_equal(lse[s], alone[1][0])


class NanTest(AttentionTestCase):
  """A fault that was cached shows in the rows that see it, and in no others."""

  def faulty(self):
    """Token 3 of a sequence of 24 has a NaN block in K of head 0, token 20 one in V of head 1."""
    case = cases.Case("fault", q_lens=(24,), kv_lens=(24,))
    built = cases.build(case, padding_rows=0)
    pages = np.asarray(built.batch.page_table)[0]
    k_scale, v_scale = (
      np.array(p.block_scale).view(np.uint8) for p in (built.cache.k, built.cache.v)
    )
    k_scale[pages[0], 0, 3, 1] = 0x7F
    v_scale[pages[1], 1, 4, 2] = 0x7F
    e4m3 = jnp.float8_e4m3fn
    return built, nv.PagedKVCache(
      k=dataclasses.replace(built.cache.k, block_scale=jnp.asarray(k_scale.view(e4m3))),
      v=dataclasses.replace(built.cache.v, block_scale=jnp.asarray(v_scale.view(e4m3))),
    )

  @parameterized.parameters("nvfp4_dequant", "nvfp4_a4q", "nvfp4_a8q")
  def test_prefill(self, read_path):
    built, cache = self.faulty()
    clean, _ = run_prefill(built, read_path)
    out, _ = nv.prefill(built.q, cache, built.batch, read_path=read_path)
    nan = np.isnan(np.asarray(out).astype(np.float32))
    expected_nan = np.zeros(nan.shape, bool)
    expected_nan[3:, :4] = True
    expected_nan[20:, 4:, 32:48] = True
    np.testing.assert_array_equal(nan, expected_nan)
    if read_path != "nvfp4_a8q":  # there a lost block may change the head's scale
      np.testing.assert_array_equal(np.asarray(out)[~nan], np.asarray(clean)[~nan])

  def test_decode(self):
    built, cache = self.faulty()
    batch = nv.RaggedBatch.for_decode(built.batch.page_table, built.batch.kv_lens)
    out, _ = nv.decode(built.q[:1], cache, batch, read_path="nvfp4_dequant")
    nan = np.isnan(np.asarray(out).astype(np.float32))[0]
    self.assertTrue(nan[:4].all() and nan[4:, 32:48].all())
    self.assertFalse(nan[4:, :32].any() or nan[4:, 48:].any())
    out, _ = nv.decode(built.q[:1], cache, batch, read_path="nvfp4_dequant", window=3)
    self.assertFalse(np.isnan(np.asarray(out).astype(np.float32)).any())


class MergeStatesTest(TestCase):
  def test_disjoint_keys(self):
    built = cases.build(cases.Case("whole", q_lens=(1,), kv_lens=(60,)), padding_rows=0)
    batch = built.batch
    whole = nv.decode(built.q, built.cache, batch, read_path="nvfp4_dequant")
    old = nv.RaggedBatch.for_decode(batch.page_table, jnp.asarray([32], jnp.int32))
    new = nv.RaggedBatch.for_decode(batch.page_table[:, 2:], jnp.asarray([28], jnp.int32))
    parts = [
      nv.decode(built.q.astype(jnp.float32), built.cache, b, read_path="nvfp4_dequant")
      for b in (old, new)
    ]
    merged = nv.merge_states(*parts)
    # Two float32 states whose own rounding is some 2^-20 relative to |v| <= 12; bf16 in `whole`.
    np.testing.assert_allclose(merged[0], whole[0].astype(jnp.float32), rtol=2**-8, atol=1e-4)
    np.testing.assert_allclose(merged[1], whole[1], rtol=1e-6, atol=2e-5)

  def test_empty_states(self):
    some = jnp.ones((2, 3), jnp.float32), jnp.asarray([0.5, 2.0], jnp.float32)
    none = jnp.zeros((2, 3), jnp.float32), jnp.full((2,), -jnp.inf, jnp.float32)
    for merged in (nv.merge_states(some, none), nv.merge_states(none, some)):
      jax.tree.map(np.testing.assert_array_equal, merged, some)
    jax.tree.map(np.testing.assert_array_equal, nv.merge_states(none, none), none)

  @parameterized.parameters("bfloat16", "float16", "float32")
  def test_keeps_the_dtype(self, dtype):
    state = jnp.ones((2, 3), dtype), jnp.zeros((2,), jnp.float32)
    out, lse = nv.merge_states(state, state)
    self.assertEqual((out.dtype, lse.dtype), (jnp.dtype(dtype), jnp.float32))

  def test_far_apart_and_equal(self):
    a = jnp.zeros((1, 2), jnp.float32), jnp.asarray([-500.0], jnp.float32)
    b = jnp.ones((1, 2), jnp.float32), jnp.asarray([500.0], jnp.float32)
    np.testing.assert_array_equal(nv.merge_states(a, b)[0], b[0])
    equal = nv.merge_states((a[0], b[1]), b)
    np.testing.assert_array_equal(equal[0], np.full((1, 2), 0.5, np.float32))
    np.testing.assert_allclose(equal[1], 500 + np.log(2), rtol=1e-7)

  @parameterized.parameters(
    (lambda o, s: ((o, s), (o[:1], s[:1])), "equal shape and dtype"),
    (lambda o, s: ((o, s), (o.astype(jnp.bfloat16), s)), "equal shape and dtype"),
    (lambda o, s: ((o, s[:1]), (o, s)), r"first's lse must be float32 \(2,\), got float32 \(1,\)"),
    (lambda o, s: ((o, s), (o, s.astype(jnp.bfloat16))), "second's lse must be float32"),
  )
  def test_errors(self, make, message):
    with self.assertRaisesRegex(ValueError, message):
      nv.merge_states(*make(jnp.ones((2, 3), jnp.float32), jnp.ones((2,), jnp.float32)))


if __name__ == "__main__":
  absltest.main()
