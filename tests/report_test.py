"""Measured rows as tables, Markdown and plots: what stands beside what, and what is stale."""

import contextlib
import dataclasses
import importlib.util
import io
import json
import pathlib
import sys
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized

from benchmarks import measured, records, report, report_plots, report_tables, seeds, sources, split
from benchmarks.table import WIDTH
from benchmarks.text_table import Table, number
from tests.base import TestCase
from tests.benchmarks_test import example_row

DECODE = {
  "phase": "decode",
  "q_len": 1,
  "kv_len": 8192,
  "num_q_heads": 32,
  "num_kv_heads": 8,
  "implementation": "mosaic_sm90",
  "timer": "trace",
  "device": "a GPU",
  "part": "decode",
  "kernel_names": ("decode_attend_mosaic_gpu_kernel",),
  "layout": "head_major",
  "git_revision": "abc",
  "time": "2026-12-01T00:00:00+00:00",
}
PATHS = {
  "bf16": "bf16",
  "fp8": "fp8",
  "nvfp4_dequant": "nvfp4",
  "nvfp4_repack": "nvfp4",
  "nvfp4_a8q": "nvfp4",
}


def timed(path, us, **changes):
  format = PATHS.get(path, "nvfp4")
  fields = {"read_path": path, "k_format": format, "v_format": format, "us_median": us}
  return example_row(**DECODE | fields | changes)


def prefill(path, us, **changes):
  names = ("fused_attend_mosaic_gpu_kernel",)
  shape = {"phase": "prefill", "q_len": 8192, "part": "full", "kernel_names": names}
  return timed(path, us, **shape | changes)


def cudnn(us, **changes):
  fields = {"implementation": "cudnn", "kernel_names": ("cudnn_fprop",), "page_size": 8192}
  return timed("bf16", us, **fields | {"layout": "contiguous"} | changes)


class ReportTestCase(TestCase):
  """Rows in a file of their own."""

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))

  def file(self, rows, name="rows"):
    records.write(rows, self.folder / f"{name}.jsonl")
    return self.folder / f"{name}.jsonl"

  def run_of(self, rows, **options):
    (run,) = measured.runs([self.file(rows)], **options)
    return run

  def report(self, rows, *argv):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
      code = report.main([str(self.file(rows)), *argv])
    return code, printed.getvalue().splitlines()

  def line(self, rows, *argv, of="1/1/8192"):
    _, lines = self.report(rows, *argv)
    (line,) = (line for line in lines if line.startswith(of))
    return line.split()


class ReportTest(ReportTestCase):
  def test_times_side_by_side(self):
    rows = [
      timed("bf16", 20.0),
      timed("fp8", 10.0),
      timed("nvfp4_dequant", 8.0, floor_us=4.0),
      timed("nvfp4_repack", 7.0),
      timed("nvfp4_a8q", 6.0),
      cudnn(14.0),
    ]
    line = self.line(rows)
    self.assertEqual(
      line, ["1/1/8192", "20.0", "10.0", "8.00", "7.00*", "6.00", "14.0", "4.00", "0.70", "0.50"]
    )

  @parameterized.parameters(
    {"page_size": 16},
    {"num_q_heads": 64},
    {"kv_len": 4096},
    {"batch": 2},
    {"levers": "w64"},
    {"batch_invariant": True},
    {"git_revision": "another"},
    {"device": "another GPU"},
    {"jax_version": "0"},
    {"timer": "wall"},
  )
  def test_no_ratio_to_other_work(self, **changes):
    ours = timed("nvfp4_dequant", 8.0)
    fp8 = timed("fp8", 10.0)
    runs = measured.runs([self.file([ours, fp8])])
    of = runs[0].attention[measured.shape_of(dataclasses.asdict(ours))]
    self.assertEqual(measured.ratio(of, "dequant", "fp8"), 0.8)
    runs = measured.runs([self.file([ours, dataclasses.replace(fp8, **changes)])])
    for run in runs:
      for of in run.attention.values():
        self.assertIsNone(measured.ratio(of, "dequant", "fp8"))

  def test_stale_rows_are_marked_and_compared_with_nothing(self):
    rows = [timed("nvfp4_dequant", 8.0), timed("fp8", 10.0, kernel_hash="another")]
    _, lines = self.report(rows)
    self.assertEqual(lines[-1], "1 stale rows are left out: --stale shows them")
    self.assertEqual(self.line(rows, "--stale"), ["1/1/8192", "10.0~", "8.00*", "-"])
    _, lines = self.report(rows, "--stale")
    self.assertIn("2 rows, 1 of them stale", lines[1])

  def test_a_current_row_stands_before_a_stale_one(self):
    new = timed("nvfp4_dequant", 8.0)
    old = timed("nvfp4_dequant", 9.0, kernel_hash="another", time="2027-01-01T00:00:00+00:00")
    for rows in ([new, old], [old, new]):
      self.assertIn("8.00*", self.line(rows, "--stale"))

  def test_nothing_current(self):
    code, (line,) = self.report([timed("fp8", 1.0, kernel_hash="another")])
    self.assertEqual(code, 1)
    self.assertIn("no current rows, 1 stale ones: `python3 -m benchmarks matrix` makes them", line)

  def test_wall_times_are_compared_with_nothing(self):
    _, lines = self.report(
      [timed(path, 9.0, timer="wall", implementation="xla") for path in ("fp8", "nvfp4_dequant")]
    )
    text = "\n".join(lines)
    self.assertIn("Wall times of the definition: what is right, not what is fast.", text)
    self.assertNotIn("published ratios", text)
    self.assertIn("1/1/8192  9.00     9.00", text)
    self.assertIn("output error", text)

  def test_emulated_and_unmasked_say_so(self):
    a4q = prefill("nvfp4_a4q", 5.0, q_levels=2)
    _, lines = self.report([a4q, cudnn(9.0, phase="chunk", q_len=8, data="x, no mask")])
    text = "\n".join(lines)
    self.assertIn("a4q is emulated on 16-bit tensor cores", text)
    self.assertIn("cuDNN runs chunks and tails without their mask", text)
    own = dataclasses.replace(a4q, implementation="triton_sm120")
    self.assertNotIn("emulated", "\n".join(self.report([own])[1]))

  def test_what_options_cost(self):
    rows = [
      timed("nvfp4_dequant", 8.0),
      timed("nvfp4_dequant", 9.0, levers="w64"),
      timed("nvfp4_dequant", 8.4, batch_invariant=True),
      timed("nvfp4_dequant", 7.0, levers="w64", page_size=16),
    ]
    table = report_tables.options(self.run_of(rows))
    self.assertEqual(
      [row[2:] for row in table.rows],
      [
        ("w64", "9.00", "8.00", "1.12"),
        ("batch invariant", "8.40", "8.00", "1.05"),
        ("w64, pages of 16", "7.00", "-", ""),
      ],
    )

  def test_the_definition_stands_apart(self):
    rows = [timed("nvfp4_dequant", 8.0), timed("nvfp4_dequant", 900.0, implementation="xla")]
    for order in (rows, rows[::-1]):
      run = self.run_of(order)
      self.assertEqual([row[2:] for row in report_tables.definition(run).rows], [("900.0", "8.00")])
      self.assertNotIn("900", str(next(report_tables.attention(run)).rows))

  def test_what_was_not_measured(self):
    rows = [
      timed("fp8", 1.0),
      timed("nvfp4_a8q", None, reason="no such kernel", timer=None, kernel_names=()),
      timed("bf16", None, error="ValueError: a fault", timer=None, kernel_names=()),
    ]
    table = report_tables.not_measured(self.run_of(rows))
    self.assertEqual(
      table.rows,
      [
        ("mosaic_sm90", "1", "FAILED: ValueError: a fault"),
        ("mosaic_sm90", "1", "no such kernel"),
      ],
    )

  def test_which_kernels_ran(self):
    dtypes = {"decode_attend": ["bf16", "u8", "e4m3", "u8", "e4m3"], "not_run": ["f32"]}
    products = {"decode_attend": ["mma m16n8k16 f16 x f16"]}
    row = timed("nvfp4_dequant", 8.0, operand_dtypes=dtypes, products=products)
    ((path, shapes, what),) = report_tables.launched(self.run_of([row])).rows
    self.assertEqual((path, shapes), ("dequant", "1/1/8192"))
    self.assertEqual(what, "decode_attend (bf16, u8, e4m3): mma m16n8k16 f16 x f16")

  def test_the_worst_errors(self):
    rows = [timed("fp8", 8.0, kernel_error=e, kv_len=n) for e, n in ((1e-3, 64), (3e-3, 128))]
    (row,) = report_tables.errors(self.run_of(rows)).rows
    self.assertEqual(row, ("fp8", "3.0e-03", "1.3e-01"))

  def test_a_file_that_is_none(self):
    path = self.file([timed("fp8", 8.0)])
    path.write_text(path.read_text() + "{broken\n")
    error = io.StringIO()
    with contextlib.redirect_stderr(error), self.assertRaises(SystemExit):
      report.main([str(path)])
    self.assertIn("line 2 is no row", error.getvalue())

  def test_rows_of_before_the_matrix(self):
    row = dataclasses.asdict(timed("fp8", 8.0, phase="sweep", part=None))
    for name in ("part", "geometry", "layout", "operand_dtypes", "clocks", "copy_gbs"):
      del row[name]
    path = self.folder / "old.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (read,) = records.read(path)
    self.assertEqual((read["phase"], read["part"], read["layout"]), ("decode", "grid", None))
    (run,) = measured.runs([path])
    self.assertLen(run.attention, 1)

  def test_a_changed_definition_is_stale(self):
    of_xla = {"implementation": "xla", "kernel_names": ("loop_fusion",)}
    row = dataclasses.asdict(timed("fp8", 8.0, **of_xla))
    self.assertFalse(measured.is_stale(row))
    self.assertTrue(measured.is_stale(row | {"definition_hash": "another"}))

  def test_what_chooses_a_kernel_is_in_its_hash(self):
    chosen = {
      "dense_attend": {"prefill_sm90", "prefill_choice_sm90"},
      "tail_attend": {"prefill_sm90", "prefill_choice_sm90"},
      "decode_attend": {"decode_sm90"},
      "kernel_mosaic": {"prefill_sm90", "prefill_choice_sm90", "decode_sm90"},
    }
    for name, modules in chosen.items():
      self.assertEqual(sources.choosers([sources.launcher(name)]), modules)
      was = sources.kernel_hash([name])
      for module in modules:
        changed = lambda of, module=module: (
          "" if of == module else (sources.OPS / f"{of}.py").read_text()
        )
        with mock.patch.object(sources, "_hash", sources._hash.__wrapped__):
          self.assertEqual(sources.kernel_hash([name]), was)
          with mock.patch.object(sources, "source_of", changed):
            self.assertNotEqual(sources.kernel_hash([name]), was)

  def test_what_is_committed_fits_a_terminal(self):
    for run in measured.runs(measured.files()):
      for line in report.terminal(run, all_of_them=True):
        self.assertLessEqual(len(line), WIDTH, line)

  def test_the_widest_rows_fit_a_terminal(self):
    shape = {"kv_len": 32768, "q_len": 32768, "kernel_hash": "another", "floor_us": 18400.0}
    rows = [
      *(prefill(path, 12345.7, **shape) for path in PATHS),
      *(prefill("nvfp4_a4q", 12345.7, q_levels=n, **shape) for n in (1, 2)),
      cudnn(12345.7, phase="prefill", **shape),
      *(
        prefill(path, 12345.7, implementation="flashinfer", **shape)
        for path in ("bf16", "fp8", "nvfp4_dequant")
      ),
    ]
    for line in report.terminal(self.run_of(rows), all_of_them=True):
      self.assertLessEqual(len(line), WIDTH, line)


class SeedsTest(ReportTestCase):
  """The ratios, with the seeds' own numbers in."""

  def test_the_seeds_arithmetic(self):
    at = lambda phase, path, us, **more: (prefill if phase == "prefill" else timed)(
      path, us, **more
    )
    append = {"phase": "append", "read_path": None, "data": "gaussian, global scale 1.0"}
    rows = [
      at("prefill", "fp8", 11.1e3, bytes_per_token=2048.0),
      at("prefill", "nvfp4_dequant", 21.0e3, bytes_per_token=1152.0),
      at("prefill", "nvfp4_a4q", 18.0e3, q_levels=2, implementation="triton_sm120"),
      at("decode", "fp8", 12.35, batch=16),
      at("decode", "nvfp4_dequant", 9.63, batch=16),
      timed("fp8", 3.01, **append),
      timed("nvfp4_dequant", 8.39, **append),
      timed("nvfp4_dequant", 1.0, **append | {"data": "gaussian, global scale 0.0123"}),
      timed("nvfp4_dequant", 138.0, **append | {"implementation": "xla"}),
      timed("fp8", 30.0, **append | {"kernel_hash": "another"}),  # stale
    ]
    found = {row[0]: row[3] for row in seeds.table(self.run_of(rows)).rows}
    self.assertEqual(found["stock / FP8, prefill"], "1.89")
    self.assertEqual(found["A4Q x2 / stock, prefill"], "0.86")
    self.assertEqual(found["A4Q x2 / FP8, prefill"], "1.62")
    self.assertEqual(found["stock / FP8, decode"], "0.78")
    self.assertEqual(found["stock / FP8, append"], "2.79")
    self.assertEqual(found["cache bytes a token"], "0.5625")

  def test_emulated_a4q_is_marked(self):
    rows = [prefill("nvfp4_dequant", 20.0), prefill("nvfp4_a4q", 25.0, q_levels=2)]
    table = seeds.table(self.run_of(rows))
    self.assertEqual([row[3] for row in table.rows], ["1.25 emulated"])
    self.assertIn("takes FP4 tensor cores", table.notes[-1])

  def test_other_heads_are_none_of_theirs(self):
    rows = [prefill(path, 20.0, num_q_heads=8) for path in ("nvfp4_dequant", "fp8")]
    self.assertEmpty(seeds.table(self.run_of(rows)).rows)


class TableTest(TestCase):
  def test_a_long_last_column_goes_on(self):
    table = Table("t", ("a", "b"), [("x", "word " * 40)], left=2)
    lines = table.terminal()
    self.assertLessEqual(max(map(len, lines)), WIDTH)
    self.assertEqual(" ".join(lines).count("word"), 40)

  def test_markdown(self):
    table = Table("t", ("a", "b"), [("x", "1")], ["a note"])
    self.assertEqual(
      table.markdown(), ["### t", "", "| a | b |", "| :-- | --: |", "| x | 1 |", "", "a note"]
    )

  @parameterized.parameters((None, "-"), (5.634, "5.63"), (154.72, "154.7"), (13417.2, "13417"))
  def test_numbers(self, us, text):
    self.assertEqual(number(us), text)


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
    of_jax = {"implementation": "jax_paged", "us_by_kernel": {"paged": 1.0, "loop_fusion": 2.0}}
    self.assertEqual(list(split.costs(of_jax)), ["paged", "loop_fusion"])


class SourcesTest(TestCase):
  def test_a_changed_kernel_is_stale(self):
    row = dataclasses.asdict(timed("fp8", 1.0))
    self.assertFalse(measured.is_stale(row))
    self.assertTrue(measured.is_stale(row | {"kernel_hash": "0" * 12}))

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


@absltest.skipUnless(importlib.util.find_spec("matplotlib"), "matplotlib is not installed")
class PlotTest(ReportTestCase):
  def rows(self):
    split_up = {"decode_attend_mosaic_gpu_kernel": 6.0, "decode_join_mosaic_gpu_kernel": 2.0}
    return [
      timed(path, us * kv_len / 8192, kv_len=kv_len, floor_us=us / 2, us_by_kernel=split_up)
      for kv_len in (2048, 8192)
      for path, us in (("bf16", 20.0), ("fp8", 10.0), ("nvfp4_dequant", 8.0))
    ]

  def drawn(self, draw, rows):
    """The figure, kept from being written."""
    from matplotlib.figure import Figure

    with mock.patch.object(Figure, "savefig", autospec=True) as savefig:
      self.assertTrue(draw(self.run_of(rows), pathlib.Path("a.png")))
    ((figure, _),) = (call.args for call in savefig.call_args_list)
    return figure

  def points(self, panel):
    return [
      [(float(x), float(y)) for x, y in zip(*line.get_data(), strict=True)]
      for line in panel.get_lines()
    ]

  def test_times_with_their_limits(self):
    (panel,) = self.drawn(report_plots.times, self.rows()).axes
    self.assertEqual(panel.get_title(), "1 x 1 queries")
    self.assertIn([(2048.0, 2.0), (8192.0, 8.0)], self.points(panel))  # NVFP4
    self.assertIn([(2048.0, 5.0), (8192.0, 5.0)], self.points(panel))  # the limit of FP8
    self.assertLen(self.points(panel), 3 + 2)

  def test_ratios_to_fp8(self):
    (panel,) = self.drawn(report_plots.ratios, self.rows()).axes
    self.assertEqual(self.points(panel)[0], [(2048.0, 0.8), (8192.0, 0.8)])

  def test_stale_rows_are_not_drawn_beside_current_ones(self):
    rows = [*self.rows(), timed("nvfp4_repack", 5.0, kernel_hash="another")]
    figure = self.drawn(report_plots.times, rows)
    self.assertNotIn("repack", [text.get_text() for text in figure.legends[0].get_texts()])

  def test_parts_of_the_limit(self):
    (panel,) = self.drawn(report_plots.limits, self.rows()).axes
    heights = sorted(round(float(bar.get_height()), 3) for bar in panel.patches)
    self.assertEqual(heights, [50.0] * 3 + [200.0] * 3)

  def test_kernels_of_a_call(self):
    (panel,) = self.drawn(report_plots.kernels, self.rows()).axes
    widths = [float(bar.get_width()) for bar in panel.patches if bar.get_width()]
    self.assertLen(widths, 2 * 6)
    self.assertEqual(set(widths), {75.0, 25.0})
    said = [text.get_text() for text in panel.texts]
    self.assertEqual(said, ["5.00 us", "2.50 us", "2.00 us", "20.0 us", "10.0 us", "8.00 us"])

  def test_many_kernels_are_in_columns(self):
    """Nothing is taller than a screen is."""
    rows = [dataclasses.replace(row, batch=batch) for batch in range(1, 16) for row in self.rows()]
    figure = self.drawn(report_plots.kernels, rows)
    self.assertLen(figure.axes, 3)
    bars = [len(panel.get_yticks()) for panel in figure.axes]
    self.assertEqual(bars, [30, 30, 30])
    self.assertLess(figure.get_figheight(), 9)

  def test_nothing_to_draw(self):
    run = self.run_of([timed("fp8", 1.0)])
    self.assertFalse(report_plots.times(run, self.folder / "a.png"))
    self.assertFalse(report_plots.ratios(run, self.folder / "a.png"))

  def test_a_report_is_written(self):
    out = self.folder / "made"
    code, lines = self.report(self.rows(), "--out", str(out))
    self.assertEqual(code, 0)
    text = (out / "report.md").read_text()
    for name in report_plots.PLOTS:
      self.assertStartsWith((out / f"{name}.png").read_bytes(), b"\x89PNG")
      self.assertIn(f"({name}.png)", text)
    self.assertIn("a GPU, abc, jax", text)
    self.assertIn("| 1/1/8192 |", text)
    self.assertEqual(lines[-1], f"written: {out / 'report.md'}")

  def test_without_matplotlib(self):
    error = io.StringIO()
    lacking = mock.patch.dict(sys.modules, {"matplotlib": None, "matplotlib.figure": None})
    with lacking, contextlib.redirect_stderr(error), self.assertRaises(SystemExit):
      self.report(self.rows(), "--out", str(self.folder))
    self.assertIn("--out needs matplotlib, which the extra `reports` installs", error.getvalue())


if __name__ == "__main__":
  absltest.main()
