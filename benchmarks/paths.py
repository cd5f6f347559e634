"""`python3 -m benchmarks paths`: when each read path pays, from the committed rows of the sweep.

For each batch, query length and key length, the microseconds of each read path side by side. `*`
marks the fastest NVFP4 path, `x fp8` and `x bf16` are its time over theirs: below 1 it pays. FP8
and BF16 are caches read by this package's kernels, not by cuDNN. --plot draws the newest run.
"""

from __future__ import annotations

import argparse
import pathlib

from benchmarks.committed import RESULTS, is_stale, runs
from nvfp4_pallas.read_paths import READ_PATHS

WIDE = ("fp8", "bf16")  # what an NVFP4 path has to beat
Shape = tuple[int, int, int]  # batch, q_len, kv_len


def main(argv: list[str], folder: pathlib.Path = RESULTS) -> int:
  parser = argparse.ArgumentParser(prog="python3 -m benchmarks paths", description=__doc__)
  parser.add_argument("--stale", action="store_true", help="also rows of other kernel sources")
  parser.add_argument("--plot", type=pathlib.Path, metavar="FILE.png", help="also draw it")
  options = parser.parse_args(argv)
  swept = sweeps(options.stale, folder)
  if not swept:
    print("no current rows of the sweep: `python3 -m benchmarks gpu --only sweep` makes them")
    return 1
  for heading, rows in swept:
    print("\n".join([heading, *table(rows), ""]))
  if options.plot:
    from benchmarks import paths_plot

    heading, rows = max(swept, key=lambda sweep: max(row["time"] for row in sweep[1]))
    try:
      paths_plot.draw(by_shape(rows), heading, options.plot)
    except ImportError as error:
      parser.error(f"--plot needs matplotlib, which the extra `reports` installs: {error}")
    print(f"drawn: {options.plot}")
  return 0


def sweeps(stale: bool, folder: pathlib.Path) -> list[tuple[str, list[dict]]]:
  """Of each file with rows of the sweep what it is, and those rows."""
  found = []
  for heading, rows in runs(stale, folder):
    swept = [row for row in rows if row["phase"] == "sweep"]
    if swept:
      found.append((heading, swept))
  return found


def by_shape(rows: list[dict]) -> dict[Shape, dict[str, dict]]:
  """The timed row of each read path at each shape, in order; a current one rather than a stale."""
  found: dict[Shape, dict[str, dict]] = {}
  timed = (row for row in rows if row["us_median"] is not None)
  for row in sorted(timed, key=is_stale, reverse=True):
    shape = row["batch"], row["q_len"], row["kv_len"]
    found.setdefault(shape, {})[row["read_path"]] = row
  return dict(sorted(found.items()))


def fastest_nvfp4(of: dict[str, dict]) -> str | None:
  """The read path, of the rows at one shape; None where no NVFP4 path was timed."""
  nvfp4 = (path for path in of if path not in WIDE)
  return min(nvfp4, key=lambda path: of[path]["us_median"], default=None)


def table(rows: list[dict]) -> list[str]:
  seen = {row["read_path"] for row in rows}
  columns = [path for path in READ_PATHS if path in seen]
  head = f"{'b/q/kv':>13}" + "".join(f"{path:>{_width(path)}} " for path in columns)
  head += "".join(f"{f'x {path}':>7}" for path in WIDE) + "  beats"
  lines = [_line(shape, of, columns) for shape, of in by_shape(rows).items()]
  return [head, "-" * len(head), *lines]


def _line(shape: Shape, of: dict[str, dict], columns: list[str]) -> str:
  best = fastest_nvfp4(of)
  us = {path: row["us_median"] for path, row in of.items()}
  ratios = {} if best is None else {path: us[best] / us[path] for path in WIDE if path in us}
  beaten = [path for path, ratio in ratios.items() if ratio < 1]
  verdict = "both" if len(beaten) == 2 else "".join(beaten) or "neither"
  return (
    f"{'/'.join(map(str, shape)):>13}"
    + "".join(_cell(us.get(path), path, path == best) for path in columns)
    + "".join(f"{f'{ratios[path]:.2f}' if path in ratios else '':>7}" for path in WIDE)
    + f"  {verdict if ratios else '':7}"
    + ("  STALE" if any(map(is_stale, of.values())) else "")
  ).rstrip()


def _cell(us: float | None, path: str, best: bool) -> str:
  return f"{'-' if us is None else f'{us:.1f}':>{_width(path)}}{'*' if best else ' '}"


def _width(path: str) -> int:
  return max(len(path), 8)
