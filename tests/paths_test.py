"""When each read path pays: the table of the sweep's rows, and the figure."""

import contextlib
import importlib.util
import io
import pathlib
import sys
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized

from benchmarks import cli, paths, records
from benchmarks.table import WIDTH
from tests.base import TestCase
from tests.benchmarks_test import example_row

PATHS = ("bf16", "fp8", "nvfp4_dequant", "nvfp4_repack", "nvfp4_a8q")
STALE = "another hash"


def at_one_shape(times, shape=(1, 16, 1024), **changes):
  """A row of each path, those without a time with a reason."""
  of = dict(zip(("batch", "q_len", "kv_len"), shape, strict=True))
  return [
    example_row(phase="sweep", read_path=path, us_median=us, reason="why", **of | changes)
    for path, us in zip(PATHS, times, strict=True)
  ]


class SweepTestCase(TestCase):
  """Rows in a folder of their own, and the command over it."""

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))

  def commit(self, rows, name="a_gpu"):
    records.write(rows, self.folder / f"{name}.jsonl")

  def run_paths(self, *argv):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
      code = paths.main(list(argv), self.folder)
    return code, printed.getvalue().splitlines()


class PathsTest(SweepTestCase):
  @parameterized.parameters(
    ((8.0, 6.0, 5.0, 4.0, 4.5), "8.0 6.0 5.0 4.0* 4.5 0.67 0.50 both"),
    ((8.0, 4.0, 6.0, 7.0, 9.0), "8.0 4.0 6.0* 7.0 9.0 1.50 0.75 bf16"),
    ((5.0, 8.0, 9.0, 7.0, 6.0), "5.0 8.0 9.0 7.0 6.0* 0.75 1.20 fp8"),
    ((4.0, 4.0, 4.0, 9.0, 9.0), "4.0 4.0 4.0* 9.0 9.0 1.00 1.00 neither"),
    ((4.0, 2.0, 8.0, None, None), "4.0 2.0 8.0* - - 4.00 2.00 neither"),
    ((None, 2.0, None, 1.0, None), "- 2.0 - 1.0* - 0.50 fp8"),
    ((4.0, 2.0, None, None, None), "4.0 2.0 - - -"),
    ((None, None, 3.0, None, None), "- - 3.0* - -"),
  )
  def test_the_fastest_nvfp4_path_and_what_it_beats(self, times, expected):
    self.commit(at_one_shape(times))
    code, (_, head, _, line, _) = self.run_paths()
    self.assertEqual(code, 0)
    self.assertEqual(head.split(), ["b/q/kv", *PATHS, "x", "fp8", "x", "bf16", "beats"])
    self.assertEqual(line.split(), ["1/16/1024", *expected.split()])

  def test_shapes_are_in_order_and_apart(self):
    shapes = (16, 1, 1024), (1, 128, 1024), (1, 16, 4096), (1, 16, 1024)
    rows = [
      row for i, s in enumerate(shapes) for row in at_one_shape((9.0, 8.0, 1.0 + i, 5.0, 6.0), s)
    ]
    self.commit([*rows, example_row(phase="prefill", us_median=1234.5)])
    _, lines = self.run_paths()
    expected = [("1/16/1024", "4.0*"), ("1/16/4096", "3.0*"), ("1/128/1024", "2.0*")]
    expected.append(("16/1/1024", "1.0*"))
    self.assertEqual([(line.split()[0], line.split()[3]) for line in lines[3:-1]], expected)
    self.assertNotIn("1234.5", "".join(lines))

  def test_stale_rows_only_if_asked_for(self):
    times = 8.0, 6.0, 5.0, 4.0, 4.5
    mixed = [row for row in at_one_shape(times) if row.read_path in ("bf16", "nvfp4_dequant")]
    self.commit([*mixed, *at_one_shape([9 * us for us in times], kernel_hash=STALE)])
    _, (*_, line, _) = self.run_paths()
    self.assertEqual(line.split(), ["1/16/1024", "8.0", "5.0*", "0.62", "bf16"])
    _, (*_, line, _) = self.run_paths("--stale")
    self.assertEqual(line.split()[1:4] + line.split()[-1:], ["8.0", "54.0", "5.0*", "STALE"])

  def test_no_sweep(self):
    self.commit([*at_one_shape((1.0,) * 5, kernel_hash=STALE), example_row(us_median=1.0)])
    code, (line,) = self.run_paths()
    self.assertEqual(code, 1)
    self.assertIn("python3 -m benchmarks gpu --only sweep", line)

  def test_a_table_for_each_run_within_a_terminal(self):
    widest = at_one_shape((123456.7,) * 5, (16, 8192, 65536), kernel_hash=STALE)
    self.commit(widest, "a")
    self.commit(widest[:2], "b")
    _, lines = self.run_paths("--stale")
    self.assertEqual(
      [line.split(":")[0] for line in lines if "jsonl" in line], ["a.jsonl", "b.jsonl"]
    )
    self.assertLessEqual(max(map(len, lines)), WIDTH)

  def test_it_is_a_command(self):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), self.assertRaises(SystemExit) as raised:
      cli.main(["paths", "--help"])
    self.assertEqual(raised.exception.code, 0)
    self.assertIn("python3 -m benchmarks paths [-h] [--stale]", printed.getvalue())
    for command in cli._COMMANDS:
      self.assertIn("" if command == "small" else f"benchmarks {command} ", cli.__doc__)

  def test_without_matplotlib(self):
    self.commit(at_one_shape((1.0,) * 5))
    error = io.StringIO()
    lacking = mock.patch.dict(sys.modules, {"matplotlib": None, "matplotlib.figure": None})
    with lacking, contextlib.redirect_stderr(error), self.assertRaises(SystemExit) as raised:
      self.run_paths("--plot", str(self.folder / "a.png"))
    self.assertEqual(raised.exception.code, 2)
    self.assertIn("--plot needs matplotlib, which the extra `reports` installs", error.getvalue())


@absltest.skipUnless(importlib.util.find_spec("matplotlib"), "matplotlib is not installed")
class PlotTest(SweepTestCase):
  def drawn(self, *argv):
    """The figure, kept from being written."""
    from matplotlib.figure import Figure

    with mock.patch.object(Figure, "savefig", autospec=True) as savefig:
      code, _ = self.run_paths("--plot", "a.png", *argv)
    self.assertEqual(code, 0)
    ((figure, path),) = (call.args for call in savefig.call_args_list)
    self.assertEqual(path, pathlib.Path("a.png"))
    return figure

  def test_a_panel_for_each_query_length(self):
    shapes = (1, 16, 1024), (1, 16, 4096), (16, 16, 1024), (1, 1, 1024)
    times = lambda i: (9.0 + i, 8.0, 1.0, 5.0, None if i == 3 else 6.0)
    self.commit([row for i, shape in enumerate(shapes) for row in at_one_shape(times(i), shape)])
    figure = self.drawn()
    one, sixteen, *empty = figure.axes
    self.assertEqual([one.get_title(), sixteen.get_title()], ["q_len 1", "q_len 16"])
    self.assertFalse(any(panel.axison for panel in empty))
    self.assertEqual({sixteen.get_xscale(), sixteen.get_yscale()}, {"log"})
    self.assertLen(one.get_lines(), 4)
    self.assertLen(sixteen.get_lines(), 5 + 5)
    points = [list(zip(*line.get_data(), strict=True)) for line in sixteen.get_lines()]
    self.assertIn([(1024, 9.0), (4096, 10.0)], points)  # bf16, batch 1
    self.assertIn([(1024, 11.0)], points)  # bf16, batch 16
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    self.assertEqual(labels, [f"{path}, batch {n}" for path in PATHS for n in (1, 16)])

  def test_a_read_path_looks_the_same_in_every_panel(self):
    self.commit(
      [
        *at_one_shape((9.0, None, 1.0, None, 2.0), (1, 1, 1024)),
        *at_one_shape((9.0, 8.0, 1.0, 5.0, 2.0), (1, 16, 1024)),
      ]
    )
    looks = [
      {line.get_ydata()[0]: (line.get_color(), line.get_linestyle()) for line in panel.get_lines()}
      for panel in self.drawn().axes[:2]
    ]
    for us in (9.0, 1.0, 2.0):
      self.assertEqual(looks[0][us], looks[1][us])
    self.assertLen(set(looks[1].values()), 5)

  def test_the_newest_run_is_drawn(self):
    for name, year in (("a", 2027), ("b", 2026)):
      self.commit(at_one_shape((1.0,) * 5, time=f"{year}-01-01T00:00:00+00:00"), name)
    self.assertStartsWith(self.drawn().get_suptitle(), "a.jsonl: ")

  def test_a_picture_is_written(self):
    self.commit(at_one_shape((4.0, 3.0, 2.0, 2.5, 1.0)))
    path = self.folder / "a.png"
    _, (*_, last) = self.run_paths("--plot", str(path))
    self.assertEqual(last, f"drawn: {path}")
    self.assertStartsWith(path.read_bytes(), b"\x89PNG")


if __name__ == "__main__":
  absltest.main()
