"""The table of committed rows."""

import dataclasses
import json
import pathlib
import tempfile

from absl.testing import absltest

from benchmarks import committed, records, sources, split
from benchmarks.table import WIDTH
from tests.base import TestCase
from tests.benchmarks_test import example_row


class CommittedTest(TestCase):
  def lines(self, rows, stale=False, **options):
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder)
      records.write(rows, path / "a_gpu.jsonl")
      return committed.lines(stale, path, **options)

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
    for line in (*committed.lines(stale=True), *committed.lines(stale=True, split_kernels=True)):
      self.assertLessEqual(len(line), WIDTH)

  def test_the_widest_rows_fit_a_terminal(self):
    wide = {"phase": "prefill", "q_len": 32768, "kv_len": 32768, "implementation": "mosaic_sm90"}
    wide |= {"us_median": 18496.61, "floor_us": 18400.0, "tflops": 599.9, "page_size": 128}
    wide |= {"kernel_hash": "another"}
    rows = [
      example_row(**wide, read_path="nvfp4_dequant"),
      example_row(**wide | {"us_median": 9000.0}, k_format="fp8"),
      example_row(**wide | {"implementation": "cudnn"}, k_format="bf16"),
    ]
    lines = self.lines(rows, stale=True)
    self.assertRegex(lines[3], r"1/32768/32768 .*18496\.6 .* 99 % .*600 .*2\.06 .*1\.00 .*STALE$")
    self.assertLessEqual(max(map(len, lines[1:])), WIDTH)

  def test_rates_of_what_the_tensor_cores_bound(self):
    fields = {"us_median": 4.0, "tflops": 612.3}
    for phase, shown in (("prefill", True), ("chunk", True), ("tail", True), ("decode", False)):
      (line,) = self.lines([example_row(phase=phase, **fields)])[3:-1]
      self.assertEqual(line.split()[-1], "612" if shown else "4.0")

  def test_rows_of_before_a_field_was_there(self):
    row = dataclasses.asdict(self.rows()[0])
    del row["tflops"], row["us_by_kernel"]
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder)
      (path / "old.jsonl").write_text(json.dumps(row | {"phase": "prefill"}) + "\n")
      self.assertEqual(committed.lines(False, path)[3].split()[-1], "4.0")
      self.assertLen(committed.lines(False, path, split_kernels=True), 2)

  def test_what_tells_rows_of_one_read_path_apart(self):
    rows = [
      example_row(read_path="nvfp4_a4q", q_levels=1),
      example_row(read_path="bf16", data="gaussian, contiguous keys, no mask"),
      example_row(read_path=None, data="gaussian, global scale 0.0123"),
    ]
    shown = [line.split("nvfp4 ")[1] for line in self.lines(rows)[3:-1]]
    for line, what in zip(shown, ("nvfp4_a4q x1 ", "bf16, no mask ", "g 0.0123 "), strict=True):
      self.assertStartsWith(line, what)

  def test_a4q_without_fp4_tensor_cores_is_marked(self):
    rows = [
      example_row(read_path=path, implementation=by, q_levels=2)
      for path, by in (
        ("nvfp4_a4q", "mosaic_sm90"),
        ("nvfp4_a8q", "mosaic_sm90"),
        ("nvfp4_a4q", "mosaic_sm100"),
      )
    ]
    marked = ["emu." in line for line in self.lines(rows)[3:-1]]
    self.assertEqual(marked, [True, False, False])

  def test_rows_of_the_sweep_have_their_own_table(self):
    lines = self.lines([*self.rows(), example_row(phase="sweep", us_median=7.0)])
    self.assertEqual(lines[-2], "and 1 rows of the sweep: `python3 -m benchmarks paths`")
    self.assertNotIn(" 7.0", "".join(lines))

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
    modules = {path.stem for path in sources.KERNELS.glob("*_sm[0-9]*.py")}
    self.assertEqual(set(sources.LAUNCHERS.values()), modules)


class SplitTest(TestCase):
  """What each kernel of a call costs."""

  def costs(self, **us_by_kernel):
    return split.costs({"us_by_kernel": us_by_kernel})

  def test_names_are_short_and_in_order(self):
    costs = self.costs(
      dense_widen_mosaic_gpu_kernel=12.4, a_fusion=1.0, dense_attend_mosaic_gpu_kernel=741.0
    )
    self.assertEqual(
      list(costs.items()), [("dense_widen", 12.4), ("a_fusion", 1.0), ("dense_attend", 741.0)]
    )

  def test_kernels_of_xla_are_together(self):
    costs = self.costs(
      loop_multiply_fusion=1.0, tail_attend_mosaic_gpu_kernel=4.0, input_reduce_fusion=2.5
    )
    self.assertEqual(costs, {"xla (2)": 3.5, "tail_attend": 4.0})

  def test_kernels_of_libraries_are_not_of_xla(self):
    self.assertLen(self.costs(cudnn_fprop=1.0, cudnn_join=2.0), 2)

  def test_lines_are_broken_between_kernels(self):
    by_kernel = {f"decode_{i}_{'x' * 60}": float(i) for i in range(5)}
    lines = split.lines({"us_by_kernel": by_kernel})
    self.assertLessEqual(max(map(len, lines)), WIDTH)
    self.assertEqual("".join(lines).count("decode_"), 5)
    self.assertNotIn("", [line.strip() for line in lines])

  def test_rows_of_one_kernel_are_left_out(self):
    row = {"phase": "prefill", "us_median": 753.5, "implementation": "mosaic_sm90"}
    two = {"dense_widen_mosaic_gpu_kernel": 12.4, "dense_attend_mosaic_gpu_kernel": 741.0}
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder)
      rows = [example_row(**row, us_by_kernel=kernels) for kernels in (two, {"fused": 753.5})]
      records.write(rows, path / "a_gpu.jsonl")
      _, _, _, line, kernels, _ = committed.lines(False, path, split_kernels=True)
    self.assertIn(" 753.5", line)
    self.assertEqual(kernels.split(), ["dense_widen", "12.4", "dense_attend", "741.0"])


if __name__ == "__main__":
  absltest.main()
