"""The judge of `benchmarks gpu`, with the definition in the kernels' place."""

import contextlib
import dataclasses
import functools
import io
from unittest import mock

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import nvfp4_pallas as nv
from benchmarks import gpu, gpu_checks, gpu_large, gpu_repeats
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


class RepeatedTest(TestCase):
  def counting(self, *, wrong=()):
    """A kernel whose calls with these numbers give another NaN."""
    calls = []

    def run(x):
      calls.append(len(calls))
      return x, jnp.where(calls[-1] in wrong, -x, x).astype(jnp.bfloat16)

    return run, calls

  def test_a_hundred_times_more(self):
    run, calls = self.counting()
    x = jnp.asarray([1, jnp.nan])
    np.testing.assert_array_equal(gpu_repeats.repeated(run, x)[0], x)
    self.assertLen(calls, 101)

  def test_other_bits(self):
    run, _ = self.counting(wrong=(3, 9))
    with self.assertRaisesRegex(AssertionError, "other bits in 2 of 20 calls"):
      with gpu_repeats.repeats(20):
        gpu_repeats.repeated(run, jnp.asarray([jnp.nan]))

  def test_the_judge_names_the_kernel(self):
    other = mock.Mock(side_effect=AssertionError("other bits"))
    with mock.patch.object(gpu_checks, "repeated", other):
      with self.assertRaisesRegex(AssertionError, "a kernel: other bits"):
        gpu_checks.worst_of({"a kernel": by_definition}, *gpu_checks.ragged_prefill((9,), (3,)))


class LargeCacheTest(TestCase):
  """With a pool that is not large, by the definition."""

  def check(self, format, reads=(), **options):
    with mock.patch.multiple(gpu_large, READS={format: reads}, HEADS=1):
      return gpu_large.check_large_cache(format, num_pages=7, **options)

  def test_the_definition_passes(self):
    said = self.check("nvfp4", (("nvfp4_dequant", 1),))
    self.assertRegex(said, "large nvfp4 cache: page 6 of .* acts as page 0")

  def test_another_place_is_seen(self):
    def faulty(q, cache, batch):
      """Reads page 4 in place of page 5."""
      keys = cache.k.data[jnp.minimum(batch.page_table, 4)]
      return jnp.repeat(keys, len(q) // 2, axis=0), jnp.ones(len(q))

    with self.assertRaisesRegex(AssertionError, "a further kernel: the last pages differ"):
      self.check("bf16", kernels=(faulty,))

  def test_nothing_written_is_seen(self):
    with mock.patch.object(nv, "append", lambda cache, *_: cache):
      with self.assertRaisesRegex(AssertionError, "K after append: nothing was written"):
        self.check("bf16")


class GpuCommandTest(TestCase):
  """`gpu` with checks that do nothing."""

  def run_gpu(self, *checks, argv=()):
    printed = io.StringIO()
    fake = mock.patch.object(gpu, "CHECKS", checks)
    with fake, use_target(Target("sm_90")), contextlib.redirect_stdout(printed):
      return gpu.main(list(argv)), printed.getvalue()

  def test_some_checks_without_repeats(self):
    def check_a():
      run, calls = lambda: calls.append(1) or jnp.zeros(1), []
      gpu_repeats.repeated(run)
      return f"a: {len(calls)} calls"

    def check_b(x):
      return f"b: {x}"

    checks = (check_a, functools.partial(check_b, 1), functools.partial(check_b, 2))
    code, printed = self.run_gpu(*checks, argv=("--only", "a", "--repeats", "3"))
    self.assertEqual(code, 0)
    self.assertIn("a: 4 calls", printed)
    self.assertNotIn("b:", printed)
    self.assertRegex(self.run_gpu(*checks, argv=("--only", "b"))[1], r"(?s)b: 1.*b: 2")
    with self.assertRaises(SystemExit), contextlib.redirect_stderr(io.StringIO()) as said:
      self.run_gpu(*checks, argv=("--only", "b,c"))
    self.assertIn("must name checks of a, b, got c", said.getvalue())

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
