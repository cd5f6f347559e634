"""The judge of `benchmarks gpu`, with the definition in the kernels' place."""

import contextlib
import dataclasses
import io
from unittest import mock

from absl.testing import absltest, parameterized

import nvfp4_pallas as nv
from benchmarks import gpu, gpu_checks
from nvfp4_pallas.dispatch import Target, use_target
from tests.base import TestCase


def by_definition(q, cache, batch, spec):
  return nv.prefill(q, cache, batch, implementation="xla", **dataclasses.asdict(spec))


class JudgeTest(TestCase):
  def worst(self, run, **options):
    arguments = gpu_checks.ragged_prefill((90, 0, 1, 70), (30, 0, 1, 9), padding_rows=3)
    return gpu_checks.worst_of({"a kernel": run}, *arguments, **options)

  @parameterized.parameters("nvfp4_repack", "nvfp4_dequant", "nvfp4_a4q")
  def test_the_definition_passes(self, read_path):
    self.assertLess(self.worst(by_definition, read_path=read_path), 4e-3)

  @parameterized.parameters(
    (lambda out, lse: (out * 1.02, lse), "a kernel: errors 0.02"),
    (lambda out, lse: (out.at[-1].set(1), lse), "a row that sees nothing is not 0"),
    (lambda out, lse: (out, lse.at[-1].set(0)), "a row that sees nothing is not 0"),
    (lambda out, lse: (out, lse + 0.01), "lse 0.01"),
  )
  def test_faults_are_seen(self, change, message):
    def faulty(*arguments, **options):
      return change(*by_definition(*arguments, **options))

    with self.assertRaisesRegex(AssertionError, message):
      self.worst(faulty)


class GpuCommandTest(TestCase):
  """`gpu` with checks that do nothing."""

  def run_gpu(self, *checks):
    printed = io.StringIO()
    fake = mock.patch.object(gpu, "CHECKS", checks)
    with fake, use_target(Target("sm_90")), contextlib.redirect_stdout(printed):
      return gpu.main([]), printed.getvalue()

  def test_a_failing_check_is_named_and_the_others_go_on(self):
    def wrong():
      raise AssertionError("3 values differ")

    code, printed = self.run_gpu(wrong, lambda: "check b: right")
    self.assertEqual(code, 1)
    self.assertIn("FAILED: wrong: AssertionError: 3 values differ", printed)
    self.assertIn("check b: right", printed)
    self.assertEqual(self.run_gpu(lambda: "right")[0], 0)

  def test_without_a_gpu(self):
    with use_target(Target("cpu")), contextlib.redirect_stderr(io.StringIO()):
      self.assertEqual(gpu.main([]), 1)


if __name__ == "__main__":
  absltest.main()
