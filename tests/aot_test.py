"""The kernels compile for the GPU, within their bounds, and append is in place. No GPU is needed.

Skipped where JAX's CUDA compiler can neither be found nor downloaded.
"""

import os
from unittest import mock

from absl.testing import absltest, parameterized

from benchmarks import aot, aot_cases
from tests.base import TestCase


class CompileTest(TestCase):
  @parameterized.named_parameters((case.name, case) for case in aot_cases.CASES)
  def test_case(self, case):
    try:
      report = aot.compile_case(case)
    except aot.MissingError as error:
      self.skipTest(str(error))
    self.assertEqual(aot.verdict(case, report), "ok")
    kernel = case.name.partition("/")[0]
    if kernel in ("pack", "unpack", "append"):
      # Nothing that rounds twice, or less than exactly.
      self.assertNotRegex(report.ptx, r"div\.(full|approx)|rcp|fma\.|\.ftz")
      self.assertEqual(report.hlo.count("custom-call("), 1)
    if case.name == "append/large":
      page_bytes = 8 * 128 * 64
      self.assertRegex(report.ptx, rf"mul\.wide\.u32\s+%rd\d+, %r\d+, {page_bytes};")
    if case.donate:
      self.check_in_place(report.hlo, by_kernel=kernel != "definition")

  def check_in_place(self, hlo, by_kernel):
    self.assertIn("input_output_alias=", hlo)
    self.assertNotRegex(hlo, r" copy\(| copy-start\(| bitcast-convert\(")
    if by_kernel:
      self.assertIn("output_to_operand_aliasing=", hlo)
      self.assertNotIn(" fusion(", hlo)
    else:  # bytes of 8-bit floats are reinterpreted for free and scattered in place
      self.assertRegex(hlo, r"= u8\[512,8,64,\d+\]\S* bitcast\(")


class ReportTest(TestCase):
  def report(self, registers=40, spills=0):
    kernel = aot.Kernel("k", registers, spills, 0, "", "")
    return aot.AotReport((kernel,), "", 0.0)

  def test_verdict(self):
    case = aot_cases.Case("k", lambda: None, max_registers=40)
    self.assertEqual(aot.verdict(case, self.report()), "ok")
    self.assertStartsWith(aot.verdict(case, self.report(registers=41)), "FAIL")
    self.assertStartsWith(aot.verdict(case, self.report(spills=8)), "FAIL")

  def test_counts_instructions(self):
    sass = """
      2:-:-:Y:01        /*00c0*/                   LD.E.128 R4, desc[UR4][R16.64]
      -:-:-:Y:01        /*00d0*/              @!P0 HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24
      -:-:-:Y:01        /*00e0*/              @UP1 UMOV UR4, 0x0
      -:-:-:Y:01        /*00f0*/                   NOP
    """
    kernel = aot.Kernel("k", 1, 0, 0, "", sass)
    self.assertEqual(kernel.ops, {"LD": 1, "HGMMA": 1, "UMOV": 1})

  def test_missing_tool(self):
    with (
      mock.patch.dict(os.environ, {"PATH": "", "CUDA_HOME": "", "CUDA_PATH": "", "CUDA_ROOT": ""}),
      mock.patch.object(aot.importlib.util, "find_spec", return_value=None),
      self.assertRaisesRegex(aot.MissingError, "nvdisasm is missing.*triton"),
    ):
      aot._find_tool("nvdisasm")

  def test_unknown_name(self):
    self.assertEqual(aot.main(["pack", "no_such_kernel"]), 2)


if __name__ == "__main__":
  absltest.main()
