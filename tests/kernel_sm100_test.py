"""The kernel for sm_100 under GPU interpret mode against float64, on the same decoded bytes.

The interpreter has no block-scaled product: a model takes the place of two calls, with the same
references (kernels/block_scaled_mma.py). What orders scales for tensor memory, and that hardware
gets what the model gets, is checked apart.
"""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import nvfp4_pallas as nv
from nvfp4_pallas.dispatch import Target, use_target
from nvfp4_pallas.kernels import attention_mosaic_sm100 as kernel
from nvfp4_pallas.kernels import block_scaled_mma
from nvfp4_pallas.ops.decode import resolve_decode
from nvfp4_pallas.ops.merge import merge_splits
from nvfp4_pallas.ops.prefill import resolve_prefill
from nvfp4_pallas.ops.request import attention_request
from tests import cases, kernel_cases
from tests.base import TestCase
from tests.judged import check_close, exact_of, spec_of
from tests.triton_shapes import LONG


class AttentionTest(TestCase):
  def check(self, case, q_levels=2, **options):
    built, spec = cases.build(case), spec_of(case, "nvfp4_a4q", q_levels=q_levels)

    def attention(q, cache, batch, interpret):
      run = functools.partial(kernel.attention, spec=spec, interpret=interpret, **options)
      return jax.jit(run)(q, cache, batch)

    out, lse = kernel_cases.interpret(attention, built.q, built.cache, built.batch)
    if "num_splits" in options:
      out, lse = merge_splits(out, lse)
    check_close(self, *map(np.asarray, (out, lse)), exact_of(built, spec))

  @parameterized.named_parameters(
    ("mixed", cases.MIXED, 2),
    ("group_5_v_bf16", cases.with_formats(cases.GQA[3], "nvfp4", "bf16"), 1),
    (
      "page_128_dims_v_fp8",
      dataclasses.replace(cases.PAGES[3], head_dim=128, v_head_dim=64, v_format="fp8"),
      2,
    ),
  )
  def test_a4q(self, case, levels):
    self.check(case, levels)

  def test_splits_and_masks(self):
    """Of three key tiles, two follow each other in the first split."""
    case = dataclasses.replace(LONG, options=(("window", 290), ("soft_cap", 3.5)))
    self.check(case, num_splits=2)

  def test_decode_by_the_operation(self):
    case = cases.decode_case(dataclasses.replace(LONG, page_size=16))
    built = cases.build(case, padding_rows=0)
    sinks = jnp.asarray([0.5, -1.0], jnp.float32)
    options = {"read_path": "nvfp4_a4q", "sinks": sinks}

    def decode(q, cache, batch, interpret):
      run = functools.partial(nv.decode, implementation="mosaic_sm100", **options)
      with use_target(Target("sm_100", interpret)):
        return jax.jit(run)(q, cache, batch)

    out, lse = kernel_cases.interpret(decode, built.q.astype(jnp.float32), built.cache, built.batch)
    exact = exact_of(built, spec_of(case, "nvfp4_a4q"), sinks=sinks)
    check_close(self, *map(np.asarray, (out, lse)), exact)

  def test_no_tokens(self):
    built = cases.build(cases.MIXED)
    out, lse = kernel.attention(built.q[:0], built.cache, built.batch, spec_of(cases.MIXED))
    self.assertEqual((out.shape, lse.shape), ((0, 8, 64), (0, 8)))


class HardwareTest(TestCase):
  """Tcgen05 hands on what Modelled computes with; all else of the kernel they share."""

  def test_operands(self):
    acc, a, b, a_scale, b_scale = (mock.Mock(name=name) for name in ("acc", *"ab", "sa", "sb"))
    with mock.patch.object(block_scaled_mma.plgpu, "tcgen05_mma") as product:
      for accumulate in (False, True):
        block_scaled_mma.Tcgen05.multiply(acc, a, b, a_scale, b_scale, accumulate=accumulate)
    b.transpose.assert_called_with((1, 0))
    scales = {"a_scale": a_scale, "b_scale": b_scale}
    operands = acc, a, b.transpose.return_value
    wanted = [mock.call(*operands, **scales, accumulate=later) for later in (False, True)]
    self.assertEqual(product.call_args_list, wanted)

  def test_scales(self):
    with mock.patch.object(block_scaled_mma.plgpu, "async_copy_scales_to_tmem") as copy:
      block_scaled_mma.Tcgen05.copy_scales("smem", "tmem")
    copy.assert_called_once_with("smem", "tmem")


class ScalesTest(TestCase):
  def test_order_in_tensor_memory(self):
    """A lane for each of 32 rows, four words for the four such groups of rows, four scales a word;
    one such block for each 64 columns."""
    bytes_in = np.random.default_rng(0).integers(0, 0x7F, (2, 128, 8), dtype=np.uint8)
    found = np.asarray(kernel.arranged(jnp.asarray(bytes_in))).view(np.uint8)
    self.assertEqual(found.shape, (2, 2, 32, 16))
    for tile, row, column in np.ndindex(bytes_in.shape):
      place = tile, column // 4, row % 32, row // 32 * 4 + column % 4
      self.assertEqual(found[place], bytes_in[tile, row, column])


class ResolveTest(TestCase):
  def request_of(self, read_path="nvfp4_a4q", **changes):
    built = cases.build(cases.MIXED)
    spec = spec_of(cases.MIXED, read_path)
    return dataclasses.replace(attention_request(built.q, built.cache, spec), **changes)

  def test_picked_on_its_device(self):
    for resolve in (resolve_prefill, resolve_decode):
      with use_target(Target("sm_100")):
        chosen = resolve(self.request_of())
      self.assertEqual(chosen.implementation, "mosaic_sm100")
      self.assertIn("Q K^T in FP4 with block scales, two levels of Q, P V in BF16", chosen.reason)
      self.assertIn("compiled for this GPU, not yet run on one", chosen.reason)
      with self.assertRaisesRegex(NotImplementedError, "it needs sm_100, the device is cpu"):
        resolve(self.request_of(), "mosaic_sm100")

  @parameterized.parameters(
    ({"read_path": "nvfp4_dequant"}, "has the read paths nvfp4_a4q, not nvfp4_dequant"),
    ({"head_dim": 256}, "head dims 64, 128, got head_dim 256"),
    ({"group": 200}, "up to 128 query heads a KV head, got 200"),
    ({"new_kv": True}, "new_kv must be appended first"),
    ({"recent_window": 64}, "not a recent window's ring"),
  )
  def test_says_what_it_lacks(self, changes, reason):
    with use_target(Target("sm_100")):
      chosen = resolve_prefill(self.request_of(**changes))
    self.assertEqual(chosen.implementation, "xla")
    self.assertRegex(chosen.reason, f"not mosaic_sm100: .*{reason}")

  def test_keys_are_cut_to_fill_the_gpu(self):
    shape = {"num_seqs": 1, "num_tokens": 16, "num_kv_heads": 8, "max_keys": 16384}
    with use_target(Target("sm_100")):
      self.assertIn("keys in 16 runs", resolve_prefill(self.request_of(**shape)).reason)
      self.assertNotIn("keys in", resolve_prefill(self.request_of(num_seqs=300)).reason)


if __name__ == "__main__":
  absltest.main()
