"""The Triton kernel compiles for sm_120, and its products are the instructions that they should be.

No GPU is needed. Skipped where Triton or JAX's CUDA compiler can neither be found nor downloaded.
"""

import dataclasses

from absl.testing import absltest, parameterized

from benchmarks import triton_aot, triton_cases
from benchmarks.aot import MissingError
from nvfp4_pallas.kernels.attention_triton_sm120 import KEYS
from tests.base import TestCase
from tests.triton_version import need_triton

# The commands compile all of them; these have every kind of loop, every number of rows and each
# reason to spill.
TESTED = (
  "prefill/a4q",
  "prefill/a4q_1_level",
  "prefill/a4q_64_window",
  "prefill/a4q_window",
  "prefill/a4q_group_7",
  "prefill/dequant",
  "tail/a4q",
  "decode/a4q",
  "decode/dequant",
)


class CompileTest(TestCase):
  @parameterized.parameters(*TESTED)
  def test_case(self, name):
    case = triton_cases.named(name)
    need_triton(self)
    try:
      report = triton_aot.compile_case(case)
    except MissingError as error:
      self.skipTest(str(error))
    self.assertEqual(triton_aot.verdict(case, report), "ok")
    self.assertIn(".target sm_120a", report.ptx)
    self.assertIn(".version 8.7", report.ptx)
    count = report.ptx.count(triton_aot.FP4_PRODUCT)
    self.assertEqual(count, report.products[triton_aot.FP4_OPCODE])
    self.assertEqual(count > 0, case.read_path == "nvfp4_a4q")
    self.assertEqual(
      report.ptx.count(triton_aot.BF16_PRODUCT), report.products[triton_aot.BF16_OPCODE]
    )
    # What widens codes, in each loop for V, and for K unless it is multiplied as it is.
    widened = report.ptx.count("0x81c081c0") // 4
    per_loop = case.loops * self.bytes_of_tile(case) // 4
    tiles = 1 if case.read_path == "nvfp4_a4q" else 2
    self.assertEqual(widened, tiles * per_loop)

  def bytes_of_tile(self, case):
    """Codes of a tile of K or V that a thread has."""
    return KEYS * case.head_dim // 2 // (32 * case.config().num_warps)


class VerdictTest(TestCase):
  """What makes a compiled kernel fail."""

  def report(self, **changes):
    case = triton_cases.named("prefill/a4q_1_level")
    wanted = case.products()
    line = "        /*0010*/                   {} R8, R4, R6, R8 ;"
    ops = [triton_aot.FP4_OPCODE] * wanted["OMMA"] + [triton_aot.BF16_OPCODE] * wanted["HMMA"]
    fields = {"registers": 200, "spills": 0, "smem": 1, "ptx": ""}
    fields["sass"] = "\n".join(map(line.format, ops))
    return case, triton_aot.TritonReport(**fields | changes)

  def test_ok(self):
    self.assertEqual(triton_aot.verdict(*self.report()), "ok")

  @parameterized.parameters(
    ({"registers": 256}, "more than 255 registers"),
    ({"spills": 8}, "spills 8 bytes, more than 0"),
    ({"smem": 2**20}, "1048576 bytes of shared memory, there are 101376"),
    ({"ptx": "cvt.rn.f16x2.e2m1x2 a, b;"}, "E2M1 is converted"),
    ({"sass": ""}, "products are {}, not"),
  )
  def test_fails(self, changes, reason):
    self.assertStartsWith(triton_aot.verdict(*self.report(**changes)), f"FAIL {reason}")

  def test_spills_of_a_case_that_may_are_outside_its_loops(self):
    case, report = self.report(spills=8)
    case = dataclasses.replace(case, max_spills=8)
    self.assertEqual(triton_aot.verdict(case, report), "ok")
    load = "        /*0010*/                   LDL R8, [R1] ;"
    back = "        /*0010*/               @P0 BRA `(.L_x_0) ;"
    outside = f"{load}\n.L_x_0:\n{report.sass}\n{back}\n{load}"
    report = dataclasses.replace(report, sass=outside)
    self.assertEqual(triton_aot.verdict(case, report), "ok")
    inside = dataclasses.replace(report, sass=f".L_x_0:\n{load}\n{report.sass}\n{back}")
    self.assertEqual(triton_aot.verdict(case, inside), "FAIL 1 spills in loops over keys")

  def test_an_emulated_product_fails(self):
    case, report = self.report()
    emulated = report.sass.replace(triton_aot.FP4_OPCODE, triton_aot.BF16_OPCODE)
    self.assertStartsWith(
      triton_aot.verdict(*self.report(sass=emulated)), "FAIL products are {'HMMA.16816.F32.BF16'"
    )


if __name__ == "__main__":
  absltest.main()
