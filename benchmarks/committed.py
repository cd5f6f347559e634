"""`python3 -m benchmarks results`: the committed rows of benchmarks/results, as a table.

Rows of other kernel sources than those here are stale: they are counted, and shown with --stale,
marked. Ratios compare with rows of the same shape and the same run.
"""

from __future__ import annotations

import argparse
import math
import pathlib

from benchmarks.records import read
from benchmarks.sources import ROOT, kernel_hash

RESULTS = ROOT / "benchmarks" / "results"


def main(argv: list[str]) -> int:
  parser = argparse.ArgumentParser(prog="python3 -m benchmarks results", description=__doc__)
  parser.add_argument("--stale", action="store_true", help="also rows of other kernel sources")
  options = parser.parse_args(argv)
  for line in lines(options.stale):
    print(line)
  return 0


def lines(stale: bool, folder: pathlib.Path = RESULTS) -> list[str]:
  printed = []
  for path in sorted(folder.glob("*.jsonl")):
    rows = read(path)
    current = [row for row in rows if not is_stale(row)]
    shown = rows if stale else current
    left = len(rows) - len(current)
    about = rows[0]
    printed.append(
      f"{path.name}: {about['device']}, jax {about['jax_version']}, revision "
      f"{about['git_revision']}, {about['time'][:10]}; {len(current)} current rows, {left} stale"
    )
    if shown:
      printed += [_HEAD, "-" * len(_HEAD), *(_line(row, rows) for row in shown)]
    printed.append("")
  return printed


def is_stale(row: dict) -> bool:
  """Whether the kernels' sources have changed since."""
  return row["kernel_hash"] != kernel_hash(row["kernel_names"])


_HEAD = (
  f"{'phase':8}{'b/q/kv':>15}{'page':>6}  {'K, V':7}{'read path':15}{'by':12}{'us':>9}"
  f"{'of floor':>9}{'x FP8':>7}{'x cuDNN':>8}"
)


def _line(row: dict, rows: list[dict]) -> str:
  shape = f"{row['batch']}/{row['q_len']}/{row['kv_len']}"
  if row["phase"] in ("append", "pack", "unpack", "copy"):
    shape = f"{row['batch'] * row['q_len']} rows"
  who = row["implementation"].replace("mosaic_", "")
  if row.get("batch_invariant"):
    who += " inv."
  share = row.get("floor_fraction")
  data = "" if "global scale" not in row["data"] else f"  g {row['data'].split()[-1]}"
  of = {peer: _ratio(row, rows, peer) for peer in _PEERS}
  return (
    f"{row['phase']:8}{shape:>15}{row['page_size']:>6}  {row['k_format']:7}"
    f"{row['read_path'] or '-':15}{who:12}{row['us_median'] or math.nan:>9.1f}"
    f"{'' if share is None else f'{100 * share:.0f} %':>9}{of['fp8']:>7}{of['cudnn']:>8}"
    f"{data}{'  STALE' if is_stale(row) else ''}"
  ).rstrip()


_SHAPE = ("phase", "batch", "q_len", "kv_len")
_OPTIONS = ("page_size", "batch_invariant")
_PEERS = {
  "fp8": ((*_SHAPE, *_OPTIONS), {"implementation": "mosaic_sm90", "k_format": "fp8"}),
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
