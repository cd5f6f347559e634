"""The Triton kernel's own source, executed on a CPU, against float64 on the same decoded bytes.

triton_emulator.py says what executes it and what that cannot show. Caches hold poison wherever
nothing may be read (cases.build), and so does the kernel's output before.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized

from benchmarks import oracle
from nvfp4_pallas import RaggedBatch
from nvfp4_pallas import format as nvfp4
from nvfp4_pallas.kernels import attention_triton_sm120 as kernel
from nvfp4_pallas.ops.merge import merge_splits
from nvfp4_pallas.ops.request import attention_request
from tests import cases, kernel_cases
from tests.base import TestCase
from tests.judged import check_close, exact_of, poisoned, spec_of
from tests.triton_shapes import DENSE, LONG
from tests.triton_version import INTERPRETS, has_triton, need_triton

if has_triton(INTERPRETS):
  from tests import triton_emulator
  from tests import triton_emulator_kernels as kernels


def run(built, spec, **options):
  """(out, lse) as numpy arrays."""
  with triton_emulator.emulated():
    result = kernel.attention(built.q, built.cache, built.batch, spec, **options)
  return tuple(np.asarray(a) for a in result)


class AttentionTest(TestCase):
  def setUp(self):
    super().setUp()
    need_triton(self, INTERPRETS)

  def check(self, case, read_path="nvfp4_dequant", q_levels=2, padding_rows=3, **options):
    built = cases.build(case, padding_rows=padding_rows)
    spec = spec_of(case, read_path, q_levels=q_levels)
    out, lse = run(built, spec, **options)
    if "num_splits" in options:
      self.assertLen(out, options["num_splits"])
      out, lse = map(np.asarray, merge_splits(jnp.asarray(out), jnp.asarray(lse)))
    check_close(self, out, lse, exact_of(built, spec))

  @parameterized.named_parameters(
    (f"{case.name}_{levels}", case, levels)
    for case, levels in (
      (cases.MIXED, 1),
      (cases.MIXED, 2),
      (DENSE, 2),
      *((case, 2) for case in cases.GQA if case.group in (5, 16)),
      *((case, 2) for case in cases.PAGES if case.page_size == 128),
      *((case, 1) for case in cases.HEAD_DIMS if case.name == "dim_64_128"),
      *((case, 2) for case in cases.MASKS if case.name == "queries_past_keys"),
    )
  )
  def test_a4q(self, case, levels):
    self.check(case, "nvfp4_a4q", levels)

  @parameterized.named_parameters(
    (case.name, case)
    for case in (
      *(case for case in cases.GQA if case.group == 7),
      *(case for case in cases.PAGES if case.page_size in (32, 64)),
      *(case for case in cases.MASKS if case.name in ("window_1", "not_causal_window")),
      *(case for case in cases.SCORES if case.name != "sm_scale"),
      dataclasses.replace(DENSE, name="dense_window", options=(("window", 90),)),
    )
  )
  def test_dequant(self, case):
    self.check(case)

  @parameterized.parameters(
    ("bf16", "bf16", "bf16"),
    ("fp8", "fp8", "fp8"),
    ("nvfp4_dequant", "fp8", "nvfp4"),
    ("nvfp4_a4q", "nvfp4", "bf16"),
  )
  def test_formats(self, read_path, k_format, v_format):
    self.check(cases.with_formats(DENSE, k_format, v_format), read_path)

  @parameterized.parameters(False, True)
  def test_repack(self, ahead):
    self.check(cases.PAGES[0], "nvfp4_repack", ahead=ahead)

  def test_splits(self):
    self.check(LONG, "nvfp4_a4q", num_splits=3)

  def test_decode(self):
    self.check(cases.decode_case(LONG), "nvfp4_a4q", 2, 0, num_splits=2, one_each=True)

  @parameterized.parameters((jnp.float32, jnp.bfloat16), (jnp.bfloat16, jnp.float16))
  def test_dtypes(self, q_dtype, out_dtype):
    built, spec = cases.build(cases.GQA[1]), spec_of(cases.GQA[1], "nvfp4_a4q")
    wide = dataclasses.replace(built, q=(built.q.astype(jnp.float32) * 1.001).astype(q_dtype))
    out, _ = run(wide, spec, out_dtype=out_dtype)
    rounded = dataclasses.replace(built, q=wide.q.astype(jnp.bfloat16))
    expected, _ = run(rounded, spec)
    np.testing.assert_array_equal(out, np.asarray(jnp.asarray(expected).astype(out_dtype)))

  def test_same_bits_in_any_batch(self):
    """Alone, among others and again; with the same query tiles, which follow from averages."""
    built, spec = cases.build(DENSE), spec_of(DENSE, "nvfp4_a4q")
    expected = run(built, spec, num_splits=2)
    for a, b in zip(run(built, spec, num_splits=2), expected, strict=True):
      np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))
    lens = jnp.asarray([70], jnp.int32)
    alone = RaggedBatch(built.batch.page_table[:1], built.batch.kv_lens[:1], jnp.pad(lens, (1, 0)))
    alone = dataclasses.replace(built, q=built.q[:70], batch=alone)
    for a, b in zip(run(alone, spec, num_splits=2), expected, strict=True):
      np.testing.assert_array_equal(a.view(np.uint32), b[:, :70].view(np.uint32))

  def test_no_tokens_no_sequences(self):
    built, spec = cases.build(cases.MIXED), spec_of(cases.MIXED)
    nobody = RaggedBatch(*(jnp.zeros(shape, jnp.int32) for shape in ((0, 3), (0,), (1,))))
    for q, batch in ((built.q[:0], built.batch), (built.q, nobody)):
      out, lse = run(dataclasses.replace(built, q=q, batch=batch), spec)
      self.assertEqual(out.shape, q.shape)
      np.testing.assert_array_equal(out, 0)
      np.testing.assert_array_equal(lse, -np.inf)

  @parameterized.parameters("nvfp4_a4q", "nvfp4_dequant")
  def test_faulty_blocks_surface(self, read_path):
    """In the rows that see the key, of that head only, and for V in those columns only."""
    case = cases.Case("nan", q_lens=(20, 1), kv_lens=(40, 37), group=2)
    built, spec = cases.build(case), spec_of(case, read_path)
    table = np.asarray(built.batch.page_table)
    k = poisoned(built.cache.k, (table[0, 25 // 16], 0, 25 % 16, 1))
    v = poisoned(built.cache.v, (table[1, 36 // 16], 1, 36 % 16, 2))
    built = dataclasses.replace(built, cache=dataclasses.replace(built.cache, k=k, v=v))
    out, lse = run(built, spec)
    exact = exact_of(built, spec)
    self.assertEqual(np.isnan(exact.lse).sum(), 15 * 2)
    np.testing.assert_array_equal(np.isnan(lse), np.isnan(exact.lse))
    np.testing.assert_array_equal(np.isnan(out), np.isnan(exact.out))

  def test_what_a_window_has_left_behind_is_not_read(self):
    """Pages before all windows may be somebody else's, and faulty."""
    case = dataclasses.replace(LONG, q_lens=(1, 2, 1), options=(("window", 40),))
    built, spec = cases.build(case), spec_of(case)
    table, k, v = np.asarray(built.batch.page_table), built.cache.k, built.cache.v
    for seq, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
      for key in range(kv_len - q_len + 1 - 40):
        place = table[seq, key // case.page_size], 0, key % case.page_size, key % 8
        k, v = poisoned(k, place), poisoned(v, place)
    cache = dataclasses.replace(built.cache, k=k, v=v)
    check_close(self, *run(dataclasses.replace(built, cache=cache), spec), exact_of(built, spec))

  @parameterized.parameters(
    ({}, {}, None),
    ({"v_head_dim": 128}, {"read_path": "nvfp4_a4q"}, None),
    ({"head_dim": 256}, {}, "head dims 64, 128, got head_dim 256"),
    ({"group": 129}, {}, "up to 128 query heads a KV head, got 129"),
    ({"new_kv": True}, {}, "new_kv must be appended first"),
    ({}, {"read_path": "nvfp4_a8q"}, "not nvfp4_a8q"),
    ({}, {"soft_cap": 2000.0}, "loses digits above 1000.0, got 2000.0"),
  )
  def test_unsupported(self, request, spec, reason):
    built = cases.build(cases.MIXED)
    spec = spec_of(cases.MIXED, **spec)
    request = dataclasses.replace(attention_request(built.q, built.cache, spec), **request)
    if reason is None:
      self.assertIsNone(kernel.unsupported(request))
    else:
      self.assertIn(reason, kernel.unsupported(request))


class ConfigTest(TestCase):
  """How the kernel is cut, from shapes alone."""

  @parameterized.parameters(
    ((8192, 1, 4), {}, (128, 256, 8)),
    ((512, 4, 4), {}, (128, 19, 8)),
    ((16, 1, 4), {}, (64, 1, 4)),
    ((16, 16, 4), {"one_each": True}, (16, 16, 4)),
    ((7, 7, 100), {"one_each": True}, (128, 7, 8)),
    ((3, 8, 1), {}, (16, 3, 4)),
  )
  def test_config(self, shape, options, expected):
    config = kernel.choose_config(*shape, **options)
    self.assertEqual((config.rows, config.num_tiles, config.num_warps), expected)

  @parameterized.parameters((1, 16, 16384, 28), (1, 8192, 8192, 1), (16, 1, 8192, 2), (64, 1, 0, 1))
  def test_splits(self, seqs, q_len, max_keys, expected):
    built = cases.build(cases.MIXED)
    request = attention_request(built.q, built.cache, spec_of(cases.MIXED))
    request = dataclasses.replace(
      request, num_seqs=seqs, num_tokens=seqs * q_len, num_kv_heads=8, max_keys=max_keys
    )
    self.assertEqual(kernel.splits_to_fill_a_gpu(request, one_each=q_len == 1), expected)

  @parameterized.parameters(
    ("nvfp4_dequant", 8192, 2**40, False, "widens tiles as they are read"),
    ("nvfp4_repack", 8192, 2**40, True, "widened once, for 256.0 query tiles"),
    ("nvfp4_repack", 8, 2**40, False, "once for each of 0.2 query tiles"),
    ("nvfp4_repack", 8192, 2**20, False, "would have 33554432 bytes, more than 1048576"),
  )
  def test_repacks_ahead_where_it_may_pay(self, read_path, tokens, limit, ahead, reason):
    built = cases.build(cases.MIXED)
    request = attention_request(built.q, built.cache, spec_of(cases.MIXED, read_path))
    request = dataclasses.replace(
      request,
      num_seqs=1,
      num_tokens=tokens,
      num_kv_heads=8,
      max_keys=8192,
      head_dim=128,
      v_head_dim=128,
      max_workspace_bytes=limit,
    )
    self.assertEqual(kernel.widens_ahead(request)[0], ahead)
    self.assertIn(reason, kernel.widens_ahead(request)[1])


class FormatTest(TestCase):
  """The device functions that round, on values that are easily rounded wrongly."""

  def setUp(self):
    super().setUp()
    need_triton(self, INTERPRETS)

  def encoded(self, x):
    """(codes, scale bytes) of the first level and of what it misses."""
    rows, dim = x.shape
    arrays = [np.full((rows, dim // per), 0xFF, np.uint8) for per in (2, 16, 2, 16)]
    triton_emulator.run(kernels.encode_twice, (1,), x, *arrays, ROWS=rows, DIM=dim)
    return arrays

  def test_encode_is_the_definition(self):
    blocks = kernel_cases.hard_blocks(np.random.default_rng(0), 2048, 1.0, jnp.dtype("bfloat16"))
    x = blocks.reshape(256, 128)
    x = np.where(np.abs(x) < 2.0**-126, x.dtype.type(0), x)  # XLA on a CPU loses their signs
    packed = jax.jit(functools.partial(nvfp4.encode, levels=2))(jnp.asarray(x))
    expected = packed, packed.residual
    codes, scales, codes_left, scales_left = self.encoded(x.astype(np.float32))
    for level, found in zip(expected, ((codes, scales), (codes_left, scales_left)), strict=True):
      np.testing.assert_array_equal(found[0], np.asarray(level.codes))
      np.testing.assert_array_equal(found[1], np.asarray(level.block_scale).view(np.uint8))

  def test_widen_is_exact(self):
    """All bytes of codes with all block scales."""
    codes = np.broadcast_to(np.arange(256, dtype=np.uint8), (128, 256)).copy()
    scales = np.broadcast_to(np.arange(128, dtype=np.uint8)[:, None], (128, 32)).copy()
    wide = np.zeros((2, 128, 256), ml_dtypes.bfloat16)
    triton_emulator.run(
      kernels.widen_rows, (1,), codes, scales.view(ml_dtypes.float8_e4m3fn), wide, ROWS=128, DIM=512
    )
    expected = oracle.decode(codes, scales) * 2.0**-7
    found = np.moveaxis(wide.astype(np.float64), 0, -1).reshape(128, 512)
    np.testing.assert_array_equal(found, expected)


if __name__ == "__main__":
  absltest.main()
