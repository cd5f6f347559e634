"""The cases of the sweep, and when `python3 -m benchmarks gpu` runs them."""

import contextlib
import functools
import io
import itertools
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest

from benchmarks import gpu, gpu_timings, records, sweep
from nvfp4_pallas.dispatch import Target, use_target
from tests.base import TestCase
from tests.benchmarks_test import example_row


def variant_and_shape(case):
  _, variant, shape = case.args
  return variant, shape


class SweepTest(TestCase):
  def test_every_read_path_at_the_same_lengths(self):
    shapes = {}
    for variant, shape in map(variant_and_shape, sweep.CASES):
      shapes.setdefault(variant.read_path, []).append(shape)
    wide = shapes["bf16"]
    self.assertLen(wide, 7 + 7 + 8 + 8 + 9)
    self.assertTrue(all(q_len <= kv_len for _, q_len, kv_len in wide))
    self.assertContainsSubset([(1, 1024, 1024), (1, 8192, 65536), (16, 128, 16384)], wide)
    more = [shape for shape in wide if shape[1] > 1]
    for path in ("fp8", "bf16", "nvfp4_dequant", "nvfp4_repack"):
      self.assertEqual(shapes.pop(path), wide)
    self.assertEqual(shapes, {"nvfp4_a8q": more})

  def test_a_cache_is_made_once(self):
    caches = []
    for variant, (batch, _, kv_len) in map(variant_and_shape, sweep.CASES):
      caches.append((variant.k_format, variant.v_format, batch, kv_len))
    runs = [cache for cache, _ in itertools.groupby(caches)]
    self.assertLen(runs, len(set(caches)))

  def test_cases_are_short_and_named(self):
    for case in sweep.CASES:
      self.assertEqual(case.args[0], "sweep")
      self.assertEqual(case.keywords, {"calls": 5})


class GpuCommandTest(TestCase):
  """`gpu` with cases that do nothing."""

  def run_gpu(self, *argv):
    """Names of the cases that ran, and the rows that were written."""
    ran = []

    def case(name, *copy_rate):
      ran.append((name, *copy_rate))
      return example_row(phase=name) if copy_rate else "checked"

    named = lambda names: {name: (functools.partial(case, name),) for name in names}
    self.enter_context(mock.patch.dict(gpu.GROUPS, named(gpu.GROUPS)))
    copy = mock.patch.object(gpu_timings, "copy_bandwidth", lambda: (4e12, example_row()))
    with tempfile.TemporaryDirectory() as folder, copy, use_target(Target("sm_90")):
      out = pathlib.Path(folder) / "rows.jsonl"
      with contextlib.redirect_stdout(io.StringIO()):
        self.assertEqual(gpu.main(["--out", str(out), *argv]), 0)
      return ran, [row["phase"] for row in records.read(out)]

  def test_the_sweep_only_if_asked_for(self):
    ran, rows = self.run_gpu()
    groups = ["levers", "decode", "append", "pack", "tail", "prefill"]
    self.assertCountEqual(ran, [*((name, 4e12) for name in groups), ("checks",)])
    self.assertEqual(ran[-1], ("checks",))
    self.assertCountEqual(rows, ["prefill", *groups])

  def test_the_sweep_alone(self):
    self.assertEqual(self.run_gpu("--only", "sweep"), ([("sweep", 4e12)], ["prefill", "sweep"]))


if __name__ == "__main__":
  absltest.main()
