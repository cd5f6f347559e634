"""`python3 -m benchmarks report`: measured rows as tables, Markdown and plots.

Of files that `matrix` wrote, or else of the committed ones: times by read path with their limits,
ratios as the reports that this project began with have them, and what was not measured. Only rows
of one card, revision and equal work are compared. Rows of other kernel sources than these are
stale: shown with --stale, marked ~. --all adds what explains the times: each kernel's, the part of
the limit, in which numbers kernels ran, errors. With --out all of it is written as report.md, with
plots beside it, and of the committed rows quality.md, on accuracy.
"""

from __future__ import annotations

import argparse
import pathlib

from benchmarks import measured, report_tables, seeds
from benchmarks.measured import Run
from benchmarks.text_table import Table


def main(argv: list[str]) -> int:
  parser = argparse.ArgumentParser(prog="python3 -m benchmarks report", description=__doc__)
  parser.add_argument("rows", nargs="*", type=pathlib.Path, metavar="ROWS.jsonl")
  parser.add_argument("--stale", action="store_true", help="also rows of other kernel sources")
  parser.add_argument("--all", action="store_true", help="also kernels, limits and errors")
  parser.add_argument("--out", type=pathlib.Path, metavar="FOLDER", help="also write and draw it")
  options = parser.parse_args(argv)
  paths = measured.files(options.rows)
  try:
    runs = measured.runs(paths, stale=options.stale)
    left_out = sum(len(run.rows) for run in measured.runs(paths)) - sum(len(r.rows) for r in runs)
  except (OSError, ValueError) as error:
    parser.error(str(error))
  if not runs:
    print(f"no current rows, {left_out} stale ones: `python3 -m benchmarks matrix` makes them")
    return 1
  for run in runs:
    print("\n".join(terminal(run, all_of_them=options.all)))
  if left_out:
    print(f"{left_out} stale rows are left out: --stale shows them")
  if options.out:
    try:
      write(runs, options.out)
      if not options.rows:
        from benchmarks import report_quality

        print("the report on accuracy:", flush=True)
        for path in report_quality.write(options.out):
          _say(path)
    except ImportError as error:
      parser.error(f"--out needs matplotlib, which the extra `reports` installs: {error}")
  return 0


def _tables(run: Run, *, all_of_them: bool = True) -> list[Table]:
  ratios = seeds.table(run)
  more = report_tables.tables(run, all_of_them=all_of_them)
  return [*([ratios] if ratios.rows else []), *more]


def terminal(run: Run, *, all_of_them: bool = False) -> list[str]:
  lines = ["=" * len(run.heading), run.heading, "=" * len(run.heading), ""]
  for table in _tables(run, all_of_them=all_of_them):
    lines += [*table.terminal(), ""]
  return lines


def _say(path: pathlib.Path) -> None:
  print(f"written: {path}", flush=True)


def write(runs: list[Run], folder: pathlib.Path) -> None:
  """report.md and its plots, each named when it is there."""
  from benchmarks import report_plots

  folder.mkdir(parents=True, exist_ok=True)
  lines = ["# Measured", ""]
  for i, run in enumerate(runs):
    lines += [f"## {run.heading}", "", *_provenance(run), ""]
    for name, draw in report_plots.PLOTS.items():
      path = folder / (f"{name}.png" if i == 0 else f"{name}_{i + 1}.png")
      if draw(run, path):
        _say(path)
        lines += [f"![{name.replace('_', ' ')}]({path.name})", ""]
    for table in _tables(run):
      lines += [*table.markdown(), ""]
  path = folder / "report.md"
  path.write_text("\n".join(lines), encoding="utf-8")
  _say(path)


def _provenance(run: Run) -> list[str]:
  """What a reader must know of how the rows came to be."""
  timed = [row for row in run.rows if row["us_median"] is not None]
  said = [f"{len(timed)} timed rows, each the median of {_range(timed, 'us_count')} calls"]
  rates = [row["copy_gbs"] for row in timed if row["copy_gbs"]]
  if rates:
    said.append(f"copy bandwidth of the run {min(rates):.0f} to {max(rates):.0f} GB/s")
  clocks = [row["clocks"]["sm_mhz"] for row in timed if row["clocks"]]
  if clocks:
    said.append(f"clocks of the multiprocessors {min(clocks):.0f} to {max(clocks):.0f} MHz")
  versions = sorted({row["version"] for row in timed if row["version"]})
  return [". ".join([*said, *versions]) + "."]


def _range(rows: list[dict], name: str) -> str:
  values = sorted({row[name] for row in rows if row[name]})
  return "?" if not values else "/".join(map(str, dict.fromkeys((values[0], values[-1]))))
