"""The sm_90 attention kernel under GPU interpret mode against float64, on the same decoded bytes.

The caches of cases.build hold poison wherever nothing may be read (NaN scales and data in unused
slots and pages, wild page numbers in table tails), pages in random order, scales with zeros and
subnormals among them, a global scale for each head, and rows of q that belong to nobody.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.experimental.pallas import mosaic_gpu as plgpu

from nvfp4_pallas import RaggedBatch
from nvfp4_pallas.kernels import attention_mosaic_sm90 as kernel
from nvfp4_pallas.ops.merge import merge_splits
from nvfp4_pallas.ops.request import attention_request
from tests import cases, kernel_cases
from tests.base import TestCase
from tests.judged import check_close, exact_of, poisoned, spec_of

# The contract. P is rounded to bf16, by at most 2^-9 of each weight, and its sum is not, so that
# |out - exact| is within 2^-8 of sum_j p_j |v_j|; rounding errors of many keys mostly cancel.
# lse is float32 throughout.
MEAN_L2, WORST_L2, LSE_ABS = 5e-3, 1e-2, 1e-3

# Three key tiles in two slots, the last one cut, and tiles of queries that end in different ones.
LONG = cases.Case("long", (1, 0, 40), (300, 5, 170), 1, 2, head_dim=128, page_size=64)


def run(built, spec, **options):
  """(out, lse) as numpy float32."""

  def attention(q, cache, batch, interpret):
    f = functools.partial(kernel.attention, spec=spec, interpret=interpret, **options)
    return jax.jit(f)(q, cache, batch)

  result = kernel_cases.interpret(attention, built.q, built.cache, built.batch)
  return tuple(np.asarray(a) for a in result)


class AttentionTest(TestCase):
  def check(self, case, read_path="nvfp4_dequant", q_levels=2, **options):
    built, spec = cases.build(case), spec_of(case, read_path, q_levels=q_levels)
    out, lse = run(built, spec, **options)
    self.assertEqual((out.dtype, lse.dtype), (np.float32, np.float32))
    if "num_splits" in options:
      self.assertLen(out, options["num_splits"])
      out, lse = merge_splits(jnp.asarray(out), jnp.asarray(lse))
    self.check_close(np.asarray(out), np.asarray(lse), exact_of(built, spec))

  def check_close(self, out, lse, exact):
    check_close(self, out, lse, exact)
    sees = np.isfinite(exact.lse)
    if not sees.any():
      return
    error = out.astype(np.float64) - exact.out
    relative = np.linalg.norm(error[sees], axis=-1) / np.linalg.norm(exact.out[sees], axis=-1)
    self.assertLess(relative.mean(), MEAN_L2)
    self.assertLess(relative.max(), WORST_L2)
    self.assertLess(np.abs(lse[sees] - exact.lse[sees]).max(), LSE_ABS)

  def check_equal_bits(self, results, expected):
    for a, b in zip(results, expected, strict=True):
      np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))

  @parameterized.named_parameters(
    (case.name, case)
    for case in (
      cases.MIXED,
      *(case for case in cases.GQA if case.group in (1, 5, 7, 8)),
      *(case for case in cases.PAGES if case.page_size in (16, 64, 256)),
      *(case for case in cases.HEAD_DIMS if case.head_dim in (96, 192, 256)),
      *(case for case in cases.MASKS if case.name != "window_1"),
      *(case for case in cases.SCORES if case.name != "sm_scale"),
      *cases.EMPTY,
      LONG,
      dataclasses.replace(LONG, name="long_window", options=(("window", 40),)),
    )
  )
  def test_dequant(self, case):
    self.check(case)

  @parameterized.parameters(1, 2)
  def test_a4q(self, q_levels):
    self.check(cases.MIXED, "nvfp4_a4q", q_levels)

  @parameterized.parameters(
    ("bf16", "bf16", "bf16"), ("fp8", "fp8", "bf16"), ("nvfp4_dequant", "fp8", "nvfp4")
  )
  def test_formats(self, read_path, k_format, v_format):
    self.check(cases.with_formats(cases.MIXED, k_format, v_format), read_path)

  def test_splits(self):
    self.check(LONG, num_splits=3, max_q_len=1000)

  def test_decode(self):
    self.check(cases.decode_case(LONG), num_splits=2, max_q_len=1)

  def test_same_bits_in_any_batch(self):
    """Alone, among others and again."""
    built, spec = cases.build(LONG), spec_of(LONG)
    expected = run(built, spec, num_splits=2)
    self.check_equal_bits(run(built, spec, num_splits=2), expected)
    last = RaggedBatch(
      built.batch.page_table[2:], built.batch.kv_lens[2:], jnp.asarray([0, 40], jnp.int32)
    )
    alone = run(dataclasses.replace(built, q=built.q[1:41], batch=last), spec, num_splits=2)
    self.check_equal_bits(alone, (a[:, 1:41] for a in expected))

  def test_query_tiles_of_other_heights(self):
    """Right, not the same bits: how the interpreter's products add up depends on their shape."""
    self.check(LONG, num_splits=2, max_q_len=7)

  def test_a_step_never_retraces(self):
    spec, traces = spec_of(cases.MIXED), []

    @jax.jit
    def attention(q, cache, batch):
      traces.append(1)
      return kernel.attention(
        q, cache, batch, spec, interpret=plgpu.InterpretGPUParams(detect_races=True)
      )

    built = cases.build(cases.MIXED)
    other = cases.build(dataclasses.replace(cases.MIXED, q_lens=(0, 30, 1, 19, 0)))
    for b in (built, dataclasses.replace(built, q=other.q, batch=other.batch)):
      result = kernel_cases.interpret(lambda *a, interpret: attention(*a), b.q, b.cache, b.batch)
      self.check_close(*map(np.asarray, result), exact_of(b, spec))
    self.assertLen(traces, 1)

  def test_no_tokens_no_sequences(self):
    built, spec = cases.build(cases.MIXED), spec_of(cases.MIXED)
    nobody = RaggedBatch(*(jnp.zeros(shape, jnp.int32) for shape in ((0, 3), (0,), (1,))))
    for q, batch in ((built.q[:0], built.batch), (built.q, nobody)):
      out, lse = run(dataclasses.replace(built, q=q, batch=batch), spec)
      self.assertEqual(out.shape, q.shape)
      np.testing.assert_array_equal(out, 0)
      np.testing.assert_array_equal(lse, -np.inf)

  def test_faulty_blocks_surface(self):
    """In the rows that see the key, of that head only, and for V in those columns only."""
    case = cases.Case("nan", q_lens=(20, 1), kv_lens=(40, 37), group=2)
    built, spec = cases.build(case), spec_of(case)
    table = np.asarray(built.batch.page_table)
    k = poisoned(built.cache.k, (table[0, 25 // 16], 0, 25 % 16, 1))
    v = poisoned(built.cache.v, (table[1, 36 // 16], 1, 36 % 16, 2))
    built = dataclasses.replace(built, cache=dataclasses.replace(built.cache, k=k, v=v))
    out, lse = run(built, spec)
    exact = exact_of(built, spec)
    self.assertEqual(np.isnan(exact.lse).sum(), 15 * 2)
    self.assertEqual(np.isnan(exact.out).sum(), 15 * 2 * 64 + 2 * 16)
    np.testing.assert_array_equal(np.isnan(lse), np.isnan(exact.lse))
    np.testing.assert_array_equal(np.isnan(out), np.isnan(exact.out))

  @parameterized.parameters(
    ({}, {}, None),
    ({"head_dim": 256, "v_head_dim": 256}, {"read_path": "nvfp4_a4q"}, None),
    ({"head_dim": 80}, {}, "head_dim 80"),
    ({"v_head_dim": 224}, {}, "v_head_dim 224 does not fit into the registers"),
    ({"group": 65}, {}, "up to 64 query heads a KV head, got 65"),
    ({"new_kv": True}, {}, "new_kv must be appended first"),
    ({}, {"read_path": "nvfp4_a8q"}, "not nvfp4_a8q"),
    (
      {"head_dim": 256, "v_head_dim": 256, "formats": ("bf16", "bf16")},
      {"read_path": "bf16"},
      "bytes of shared memory, there are 232448",
    ),
  )
  def test_unsupported(self, request, spec, reason):
    built = cases.build(cases.MIXED)
    spec = spec_of(cases.MIXED, **spec)
    request = dataclasses.replace(attention_request(built.q, built.cache, spec), **request)
    if reason is None:
      self.assertIsNone(kernel.unsupported(request))
    else:
      self.assertIn(reason, kernel.unsupported(request))


if __name__ == "__main__":
  absltest.main()
