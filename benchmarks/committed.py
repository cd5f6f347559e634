"""`python3 -m benchmarks results`: the committed timings of benchmarks/results, as a table.

Rows of other kernel sources than those here are stale: they are counted, and shown with --stale,
marked. Ratios compare with rows of the same shape and the same run. `g` is the global scale of what
is appended or packed, `emu.` marks A4Q without FP4 tensor cores; --split shows what each kernel of
a call costs. Rows of the sweep stand in a table of their own: `python3 -m benchmarks paths`, and
so does accuracy: `python3 -m benchmarks quality --committed`.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Iterator

from benchmarks import split
from benchmarks.records import read
from benchmarks.sources import ROOT, kernel_hash

RESULTS = ROOT / "benchmarks" / "results"
QUALITY = "quality.jsonl"  # rows of another kind, see quality_rows.py


def main(argv: list[str]) -> int:
  parser = argparse.ArgumentParser(prog="python3 -m benchmarks results", description=__doc__)
  parser.add_argument("--stale", action="store_true", help="also rows of other kernel sources")
  parser.add_argument(
    "--split", action="store_true", help="rows of more than one kernel, by kernel"
  )
  options = parser.parse_args(argv)
  for line in lines(options.stale, split_kernels=options.split):
    print(line)
  return 0


def runs(stale: bool, folder: pathlib.Path = RESULTS) -> Iterator[tuple[str, list[dict]]]:
  """Of each file what it is, and its rows; the stale ones only if asked for."""
  for path in sorted(folder.glob("*.jsonl")):
    if path.name == QUALITY:
      continue
    rows = read(path)
    current = [row for row in rows if not is_stale(row)]
    left = len(rows) - len(current)
    about = rows[0]
    heading = (
      f"{path.name}: {about['device']}, jax {about['jax_version']}, {about['git_revision']}, "
      f"{about['time'][:10]}; {len(current)} current rows, {left} stale"
    )
    yield heading, rows if stale else current


def lines(stale: bool, folder: pathlib.Path = RESULTS, *, split_kernels: bool = False) -> list[str]:
  printed = []
  for heading, rows in runs(stale, folder):
    table = _split_rows(rows) if split_kernels else _rows(rows)
    printed += [heading, *((_HEAD, "-" * len(_HEAD), *table) if table else ()), ""]
  return printed


def _rows(rows: list[dict]) -> list[str]:
  printed = [_line(row, rows) for row in rows if row["phase"] != "sweep"]
  swept = len(rows) - len(printed)
  return printed + [f"and {swept} rows of the sweep: `python3 -m benchmarks paths`"] * (swept > 0)


def _split_rows(rows: list[dict]) -> list[str]:
  apart = (row for row in rows if len(row.get("us_by_kernel") or ()) > 1)
  return [line for row in apart for line in (_line(row, rows), *split.lines(row))]


def is_stale(row: dict) -> bool:
  """Whether the kernels' sources have changed since."""
  return row["kernel_hash"] != kernel_hash(row["kernel_names"])


_HEAD = (
  f"{'phase':8}{'b/q/kv':>13}{'page':>5} {'K, V':6}{'read path':14}{'by':9}{'us':>8}"
  f"{'floor':>7}{'TFLOP/s':>8}{'x FP8':>6}{'x cuDNN':>8}"
)
_WITH_TFLOPS = ("prefill", "chunk", "tail", "sweep")  # decode waits for the memory


def _line(row: dict, rows: list[dict]) -> str:
  shape = f"{row['batch']}/{row['q_len']}/{row['kv_len']}"
  if row["phase"] in ("append", "pack", "unpack", "copy"):
    shape = f"{row['batch'] * row['q_len']} rows"
  who = row["implementation"].replace("mosaic_", "")
  if row.get("batch_invariant"):
    who += " inv."
  if row["read_path"] == "nvfp4_a4q" and who == "sm90":
    who += " emu."
  page = "-" if row["implementation"] == "cudnn" else row["page_size"]
  us, share = row["us_median"], row.get("floor_fraction")
  tflops = row.get("tflops") if row["phase"] in _WITH_TFLOPS else None
  of = {peer: _ratio(row, rows, peer) for peer in _PEERS}
  return (
    f"{row['phase']:8}{shape:>13}{page:>5} {row['k_format']:6}{_what(row):14}{who:9}"
    f"{'-' if us is None else f'{us:.1f}':>8}{'' if share is None else f'{100 * share:.0f} %':>7}"
    f"{'' if tflops is None else f'{tflops:.0f}':>8}{of['fp8']:>6}{of['cudnn']:>8}"
    f"{'  STALE' if is_stale(row) else ''}"
  ).rstrip()


def _what(row: dict) -> str:
  """The read path, with what else tells it from rows of the same."""
  if row["read_path"] == "nvfp4_a4q":
    return f"nvfp4_a4q x{row['q_levels']}"
  if row["read_path"] and row["data"].endswith("no mask"):
    return f"{row['read_path']}, no mask"
  what = row["read_path"] or "-"
  if row["data"].startswith("a step"):
    what = "a step"
  if "global scale" in row["data"]:
    what = f"g {row['data'].split()[-1]}"
  return f"{what.removeprefix('nvfp4_')} {row['levers']}" if row.get("levers") else what


_SHAPE = ("phase", "batch", "q_len", "kv_len")
_OPTIONS = ("page_size", "batch_invariant", "levers")
_PEERS = {
  "fp8": ((*_SHAPE, *_OPTIONS, "data"), {"implementation": "mosaic_sm90", "k_format": "fp8"}),
  "cudnn": (_SHAPE, {"implementation": "cudnn"}),  # it has neither pages nor a choice
}


def _ratio(row: dict, rows: list[dict], peer: str) -> str:
  """Of an NVFP4 row's time to a peer's for the same work."""
  same, what = _PEERS[peer]
  for other in rows if row["k_format"] == "nvfp4" else ():
    if (
      all(other.get(name) == row.get(name) for name in same)
      and all(other[name] == value for name, value in what.items())
      and is_stale(other) == is_stale(row)
      and row["us_median"]
      and other["us_median"]
    ):
      return f"{row['us_median'] / other['us_median']:.2f}"
  return ""
