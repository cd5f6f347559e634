"""How cases are timed, and what the compiled call and the card say about it."""

import ctypes
import functools
import zlib
from unittest import mock

import jax
import jax.numpy as jnp
from absl.testing import absltest
from jaxlib.mlir import ir

import nvfp4_pallas as nv
from benchmarks import clocks, program
from benchmarks.trace import KernelTimes, wall_times
from benchmarks.turns import Timed, in_turns
from nvfp4_pallas.dispatch import Target, use_target
from tests.base import TestCase
from tests.benchmarks_test import example_row


def called(calls, wait, warm_up):
  """In place of kernel_times: runs all."""
  assert warm_up == 0  # which would be on the same memory
  wait([call() for call in calls])
  return KernelTimes(("a",), (1.0,) * len(calls), {"a": 1.0})


class TurnsTest(TestCase):
  def test_a_case_after_the_other(self):
    """Each case's own calls and row, several times; first some to warm up."""
    order = []

    def case(name):
      if name == "x":
        raise ValueError("no such case")
      calls = [functools.partial(order.append, f"{name}{i}") for i in range(5 * (name != "-"))]
      row = lambda times: example_row(data=name, us_count=times and len(times.calls))
      return Timed(calls, row, wait=lambda results: None)

    rows = in_turns([functools.partial(case, name) for name in "ax-b"], called, turns=4)
    self.assertEqual([rows[i].data for i in (0, 2, 3)], ["a", "-", "b"])
    self.assertEqual([rows[i].us_count for i in (0, 2, 3)], [8, None, 8])
    self.assertIsInstance(rows[1], ValueError)
    first = "a3 a4 a0 a1 b3 b4 b0 b1 a2 a3 b2 b3 a4 a0 b4 b0"
    self.assertEqual(" ".join(order).split()[: len(first.split())], first.split())

  def test_a_call_that_fails(self):
    def fail():
      raise RuntimeError("out of memory")

    timed = Timed([fail], lambda times: example_row())
    (error,) = in_turns([lambda: timed], called)
    self.assertRegex(str(error), "out of memory")

  def test_clocks_are_in_the_row(self):
    timed = Timed([lambda: None], lambda times: example_row(), wait=lambda results: None)
    with mock.patch.object(clocks, "read", lambda: {"sm_mhz": 1980.0}):
      (row,) = in_turns([lambda: timed], called)
    self.assertEqual(row.clocks, {"sm_mhz": 1980.0})

  def test_wall_times(self):
    waited = []
    times = wall_times([lambda: 1, lambda: 2], wait=waited.append)
    self.assertEqual(waited, [[1, 2], [1], [2]])
    fields = times.row_fields()
    self.assertEqual((fields["timer"], fields["us_count"], fields["kernel_names"]), ("wall", 2, ()))
    self.assertIsNone(fields["us_by_kernel"])


class ClocksTest(TestCase):
  def test_no_nvml(self):
    with mock.patch.object(clocks, "_library", lambda: None):
      self.assertIsNone(clocks.read())

  def test_what_nvml_says(self):
    class Nvml:
      """Answers as the library does: a status, and the value by reference."""

      def nvmlDeviceGetHandleByIndex_v2(self, index, device):
        return 0

      def nvmlDeviceGetClockInfo(self, device, kind, value):
        value._obj.value = {1: 1980, 2: 2619}[kind]
        return 0

      def nvmlDeviceGetPowerUsage(self, device, value):
        value._obj.value = 512_300
        return 0

      def nvmlDeviceGetTemperature(self, device, sensor, value):
        del value
        return 3  # not supported

    self.assertTrue(hasattr(ctypes.byref(ctypes.c_uint()), "_obj"))
    with mock.patch.object(clocks, "_library", Nvml):
      said = clocks.read()
    self.assertEqual(said, {"sm_mhz": 1980, "memory_mhz": 2619, "watts": 512.3})


class ProgramTest(TestCase):
  """Of a decode over NVFP4 that is lowered for Hopper."""

  def lowered(self, operation, cache_format, tokens, **options):
    shape = jax.ShapeDtypeStruct
    cache = jax.eval_shape(
      lambda: nv.PagedKVCache.create(
        num_pages=8, page_size=64, num_kv_heads=2, head_dim=128, k_format=cache_format
      )
    )
    batch = nv.RaggedBatch(shape((1, 8), jnp.int32), shape((1,), jnp.int32), shape((2,), jnp.int32))
    run = jax.jit(functools.partial(operation, implementation="mosaic_sm90", **options))
    with use_target(Target("sm_90")):
      traced = run.trace(shape((tokens, 8, 128), jnp.bfloat16), cache, batch)
      return traced.lower(lowering_platforms=("cuda",)).as_text()

  def test_kernels_and_their_operands(self):
    text = self.lowered(nv.decode, "nvfp4", 1, read_path="nvfp4_dequant")
    operands = program.operands(text)
    self.assertEqual(list(operands), ["decode_attend", "decode_join"])
    self.assertEqual(
      operands["decode_attend"],
      ["bf16", "s32", "s32", "f32", "f32", "u8", "e4m3", "u8", "e4m3"],
    )
    self.assertEqual(program.products(text), {"decode_attend": ["mma m16n8k16 f16 x f16"]})

  def test_formats_differ(self):
    text = self.lowered(nv.decode, "fp8", 1, read_path="fp8")
    self.assertNotIn("u8", program.operands(text)["decode_attend"])
    self.assertIn("e4m3", program.operands(text)["decode_attend"])

  def test_the_definition_has_no_kernels(self):
    text = jax.jit(lambda a, b: a @ b).lower(jnp.ones((2, 2)), jnp.ones((2, 2))).as_text()
    self.assertEqual(program.operands(text), {"dot_general": ["f32 x f32"]})
    self.assertEqual(program.products(text), {})
    self.assertEqual(program.operands("module {}"), {})

  def test_a_library_s_call(self):
    text = (
      "%0 = stablehlo.custom_call @__cudnn$fmhaSoftmax(%arg0, %arg1) {backend_config = ...} : "
      "(tensor<1x8x4x128xbf16>, tensor<1x8x2x128xbf16>) -> (tensor<1x8x4x128xbf16>, tensor<0xui8>)"
    )
    self.assertEqual(program.operands(text), {"__cudnn$fmhaSoftmax": ["bf16", "bf16"]})

  def test_a_program_of_triton(self):
    """jax-triton hands it over compressed; MLIR writes bytes as they are or escaped."""
    fp4 = "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1"
    ptx = f"{list(range(500))} .entry triton_attend( {fp4}.f32.ue4m3 {{ }};\n"
    ptx += "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { };"
    with ir.Context():
      opaque = str(ir.StringAttr.get(zlib.compress(ptx.encode())))
    self.assertIn("\\", opaque)
    text = (
      "%0:2 = stablehlo.custom_call @triton_kernel_call_ffi(%arg0, %arg1) {backend_config = "
      f'"", mhlo.backend_config = {{opaque = {opaque}}}}} : '
      "(tensor<16x64xbf16>, tensor<8x16xui8>) -> (tensor<16x64xf32>, tensor<16xf32>)"
    )
    self.assertEqual(program.operands(text), {"triton_attend": ["bf16", "u8"]})
    products = ["mma m16n8k16 bf16 x bf16", "mma m16n8k64 e2m1 x e2m1"]
    self.assertEqual(program.products(text), {"triton_attend": products})


if __name__ == "__main__":
  absltest.main()
