"""The judge of `benchmarks gpu`, with the definition in the kernels' place."""

import dataclasses

from absl.testing import absltest, parameterized

import nvfp4_pallas as nv
from benchmarks import gpu_checks
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


if __name__ == "__main__":
  absltest.main()
