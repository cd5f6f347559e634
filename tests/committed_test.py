"""The table of committed rows."""

import dataclasses
import pathlib
import tempfile

from absl.testing import absltest

from benchmarks import committed, records, sources
from tests.base import TestCase
from tests.benchmarks_test import example_row


class CommittedTest(TestCase):
  def lines(self, rows, stale=False):
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder)
      records.write(rows, path / "a_gpu.jsonl")
      return committed.lines(stale, path)

  def rows(self):
    decode = {"phase": "decode", "q_len": 1, "implementation": "mosaic_sm90", "floor_us": 2.0}
    decode["kernel_names"] = ("decode_attend_mosaic_gpu_kernel",)
    return [
      example_row(**decode, us_median=4.0),
      example_row(**decode, us_median=5.0, k_format="fp8", v_format="fp8", read_path="fp8"),
      example_row(
        **decode | {"implementation": "cudnn", "kernel_names": ("cudnn_fprop",)},
        us_median=16.0,
        k_format="bf16",
      ),
      example_row(**decode, us_median=9.0, kernel_hash="another"),
    ]

  def test_ratios_are_of_rows_of_the_same_sources(self):
    lines = self.lines(self.rows())
    self.assertIn("3 current rows, 1 stale", lines[0])
    (ours,) = (line for line in lines if " nvfp4 " in line)
    self.assertEqual(ours.split()[-5:], ["4.0", "50", "%", "0.80", "0.25"])

  def test_no_ratio_to_other_work(self):
    ours, fp8, *_ = self.rows()
    for changes in ({"page_size": 16}, {"kv_len": 65}, {"batch_invariant": True}):
      lines = self.lines([ours, dataclasses.replace(fp8, **changes)])
      (line,) = (line for line in lines if " nvfp4 " in line)
      self.assertEqual(line.split()[-2:], ["50", "%"])

  def test_stale_rows_say_so(self):
    *_, line, _ = self.lines(self.rows(), stale=True)
    self.assertRegex(line, r" 9\.0 .*STALE$")
    self.assertNotIn("0.", line)

  def test_what_is_committed_fits_a_terminal(self):
    for line in committed.lines(stale=True):
      self.assertLessEqual(len(line), 120)

  def test_a_changed_kernel_is_stale(self):
    row = dataclasses.asdict(self.rows()[0])
    self.assertFalse(committed.is_stale(row))
    self.assertTrue(committed.is_stale(row | {"kernel_hash": "0" * 12}))

  def test_sources_of_a_kernel(self):
    decode = sources.closure(["decode_mosaic_sm90"])
    self.assertContainsSubset(["decode_attend", "decode_join", "mma_fragments", "ptx"], decode)
    self.assertNoCommonElements(["tail_attend", "wide_consumer", "append_ptx"], decode)
    self.assertIn("wide_consumer", sources.closure(["prefill_mosaic_sm90"]))
    self.assertEqual(sources.kernel_hash(["cudnn_fprop", "loop_add_fusion"]), "")
    names = ["decode_attend_mosaic_gpu_kernel"], ["fused_attend_mosaic_gpu_kernel"]
    self.assertLen({sources.kernel_hash(of) for of in names}, 2)

  def test_every_launching_module_has_a_name_in_traces(self):
    modules = {path.stem for path in sources.KERNELS.glob("*_mosaic_sm90.py")}
    self.assertEqual(set(sources.LAUNCHERS.values()), modules)


if __name__ == "__main__":
  absltest.main()
