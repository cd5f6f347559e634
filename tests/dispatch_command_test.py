"""`python -m benchmarks dispatch` says who runs what, and fails where an instruction is missing."""

import dataclasses
from unittest import mock

from absl.testing import absltest, parameterized

from benchmarks import aot, aot_cases, dispatch, triton_aot
from benchmarks.aot import AotError, MissingError
from benchmarks.sass import Code
from nvfp4_pallas.dispatch import Target, use_target
from nvfp4_pallas.kernels import triton_launch
from tests.base import TestCase


class DispatchTest(TestCase):
  def run_command(self, *argv):
    with mock.patch("builtins.print") as printed:
      status = dispatch.main([*argv])
    return status, "\n".join(str(call.args[0]) for call in printed.call_args_list)

  @parameterized.parameters(
    ("sm_120", "triton_sm120", "xla"),
    ("sm_100", "mosaic_sm100", "xla"),
    ("sm_90", "mosaic_sm90", "mosaic_sm90"),
    ("cpu", "xla", "xla"),
  )
  def test_resolves_every_phase(self, target, attends, appends):
    with mock.patch("nvfp4_pallas.kernels.triton_launch.check_installed"):
      status, text = self.run_command("--target", target, "--no-compile")
    self.assertEqual(status, 0)
    self.assertStartsWith(
      text, f"{target}: who runs what, as resolved; nothing was compiled or run"
    )
    self.assertIn(f"decode 16/1/8192 nvfp4_a4q, Q in two levels: {attends}\n  because: ", text)
    self.assertIn(f"append of 64 rows: {appends}\n", text)
    self.assertLessEqual(max(map(len, text.splitlines())), 100)

  def compiled(self, ops=None, error=None):
    """The command's decode phase with a compiler that gives this."""
    case = dispatch.triton_cases.named("decode/a4q")
    wanted = case.products()
    ops = ops or {triton_aot.FP4_OPCODE: wanted["OMMA"], triton_aot.BF16_OPCODE: wanted["HMMA"]}
    line = "        /*0010*/                   {} R8, R4, R6, R8 ;\n"
    sass = "".join(line.format(op) * count for op, count in ops.items())
    report = triton_aot.TritonReport("", sass, 100, 0, 1024)
    with (
      mock.patch.object(dispatch.triton_cases, "CASES", (case,)),
      mock.patch.object(triton_aot, "compile_case", return_value=report, side_effect=error),
      mock.patch("nvfp4_pallas.kernels.triton_launch.check_installed"),
      mock.patch("importlib.metadata.version", return_value="1.2.3"),
      mock.patch.object(aot, "ptxas_version", return_value="13.0.88"),
    ):
      return self.run_command("--target", "sm_120", "--phase", "decode")

  def test_names_what_is_to_be_installed(self):
    missing = NotImplementedError("needs triton 3.7 or later: pip install 'triton>=3.7'")
    with mock.patch("nvfp4_pallas.kernels.triton_launch.check_installed", side_effect=missing):
      status, text = self.run_command("--target", "sm_120")
    self.assertEqual(status, 1)
    self.assertEndsWith(text, f"\n{missing}")

  def test_names_the_instructions(self):
    status, text = self.compiled()
    self.assertEqual(status, 0)
    self.assertStartsWith(text, "sm_120: who runs what, by jax 1.2.3, jax-triton 1.2.3, ")
    self.assertIn(", ptxas 13.0.88; nothing was run\n", text)
    self.assertLessEqual(max(map(len, text.splitlines())), 100)
    self.assertIn("  Q K^T       16 x OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X, K's codes as", text)
    self.assertIn("  P V         32 x HMMA.16816.F32.BF16\n", text)
    self.assertIn("100 registers, 0 bytes spilled, 1024 bytes of shared memory, 48 instr", text)

  def test_says_that_spills_are_outside_the_loops(self):
    report = mock.Mock(registers=255, spills=56, smem=1024)
    code = Code.parse("  /*0010*/   LDL R8, [R1] ;")
    lines, _ = dispatch.instructions({}, report, code, "ok")
    self.assertIn("255 registers, 56 bytes spilled outside the loops over keys, 1024 by", lines)
    loop = ".L_x_0:\n /*0010*/  LDL R8, [R1] ;\n /*0010*/ HMMA R8 ;\n /*0010*/ BRA `(.L_x_0) ;"
    lines, _ = dispatch.instructions({}, report, Code.parse(loop), "ok")
    self.assertIn("255 registers, 56 bytes spilled, 1024 by", lines)

  def test_fails_where_products_are_emulated(self):
    status, text = self.compiled(ops={triton_aot.BF16_OPCODE: 96})
    self.assertEqual(status, 1)
    self.assertIn("FAIL products are {'HMMA.16816.F32.BF16': 96}, not", text)

  def test_without_an_assembler(self):
    with mock.patch.object(aot, "_find_tool", side_effect=MissingError("ptxas is missing")):
      status, text = self.run_command("--target", "sm_100")
    self.assertEqual(status, 1)
    self.assertEqual(text, "ptxas is missing\n`--no-compile` leaves the instructions out")

  def test_version_of_the_assembler(self):
    said = "Cuda compilation tools, release 13.0, V13.0.88\nBuild cuda_13.0.r13.0/compiler.1_0\n"
    with (
      mock.patch.object(aot, "_find_tool", return_value="ptxas"),
      mock.patch.object(aot, "run", return_value=said),
    ):
      self.assertEqual(aot.ptxas_version(), "13.0.88")

  def test_all_that_sm_100_runs_is_compiled(self):
    known = {case.name for case in aot_cases.CASES}
    for case in dispatch.triton_cases.CASES:
      with use_target(Target("sm_100")), mock.patch.object(triton_launch, "check_installed"):
        runs = case.resolve().implementation == "mosaic_sm100"
      self.assertEqual(runs, case.name in aot_cases.ON_SM_100)
      self.assertEqual(runs, dispatch.name_on_sm_100(case) in known)

  def test_fails_where_a_case_is_not_compiled(self):
    case = dispatch.triton_cases.named("tail/a4q")
    case = dataclasses.replace(case, name="tail/another")
    with (
      mock.patch.object(dispatch.triton_cases, "CASES", (case,)),
      mock.patch.object(aot, "ptxas_version", return_value="13.0.88"),
    ):
      status, text = self.run_command("--target", "sm_100", "--phase", "tail")
    self.assertEqual(status, 1)
    self.assertIn("FAIL aot has no case sm100/tail_another", text)

  def test_fails_where_nothing_compiles(self):
    for error in (AotError("it does not compile"), MissingError("ptxas is missing")):
      status, text = self.compiled(error=error)
      self.assertEqual(status, 1)
      self.assertIn(str(error), text)


if __name__ == "__main__":
  absltest.main()
