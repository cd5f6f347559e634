"""`python3 -m benchmarks compare A.jsonl B.jsonl`: what moved from A to B, beyond noise.

For people who change a kernel: rows of equal work, options, read path and implementation, on the
same device by the same timer, are paired. A pair has moved if its medians differ by more than 5 %
and by more than .5 us, and either all calls of the slower are above the median of the faster, or
all of the faster below that of the slower. One call that something delayed is the maximum of its
row and can break the second alone; an odd minimum can break the first alone: so one outlier hides
nothing. Two fresh machines with the same card, kernels and JAX differed by more than 3 % in 48 of
599 pairs, by more than 5 % in 17 (and by up to 22 %). So pairs of the same sources and JAX, peers
among them, decide nothing: they are counted apart, and say how much this very comparison can tell.

It also says where other kernels ran, where errors grew, what was timed before and is no more though
it was asked for, and how many rows have no partner. The exit code is 1 if anything became less
exact, is timed no more, or became slower by device time.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib

from benchmarks import measured
from benchmarks.cases import key
from benchmarks.records import read
from benchmarks.sources import launcher
from benchmarks.text_table import Table, factor, number

NOISE = 0.05
ERROR_NOISE = 0.5  # of kernel_error, which is of a few rows
LEAST_US = 0.5  # what a kernel's start and end can differ by


@dataclasses.dataclass(frozen=True)
class Pair:
  """Two rows of one case."""

  a: dict
  b: dict

  @property
  def ratio(self) -> float:
    return self.b["us_median"] / self.a["us_median"]

  @property
  def moved(self) -> bool:
    a, b = self.a, self.b
    fast, slow = (a, b) if self.ratio > 1 else (b, a)
    apart = slow["us_min"] > fast["us_median"] or slow["us_median"] > fast["us_max"]
    enough = abs(self.ratio - 1) > NOISE and abs(b["us_median"] - a["us_median"]) > LEAST_US
    return apart and enough

  @property
  def same_sources(self) -> bool:
    names = "kernel_hash", "definition_hash", "jax_version", "version"
    return all(self.a[name] == self.b[name] for name in names)

  @property
  def changed(self) -> bool:
    """Whether it moved for a reason."""
    return self.moved and not self.same_sources

  @property
  def slower(self) -> bool:
    return self.changed and self.ratio > 1

  @property
  def is_wall(self) -> bool:
    return self.a["timer"] == "wall"

  @property
  def worse(self) -> bool:
    """Whether the arithmetic's error grew."""
    before, after = self.a["kernel_error"], self.b["kernel_error"]
    return None not in (before, after) and after > (1 + ERROR_NOISE) * before

  @property
  def other_kernels(self) -> bool:
    return set(self.a["kernel_names"]) != set(self.b["kernel_names"])


def main(argv: list[str]) -> int:
  parser = argparse.ArgumentParser(prog="python3 -m benchmarks compare", description=__doc__)
  parser.add_argument("before", type=pathlib.Path, metavar="A.jsonl")
  parser.add_argument("after", type=pathlib.Path, metavar="B.jsonl")
  options = parser.parse_args(argv)
  try:
    a, b = read(options.before), read(options.after)
  except (OSError, ValueError) as error:
    parser.error(str(error))
  pairs, alone = paired(a, b)
  gone = no_more(a, b)
  if not pairs and not gone:
    print("no row of one file has a partner in the other: equal work, device and timer are needed")
    return 2
  print("\n".join(lines(pairs, alone, gone)))
  bad = any(pair.worse or (pair.slower and not pair.is_wall) for pair in pairs)
  return 1 if bad or gone else 0


def paired(a: list[dict], b: list[dict]) -> tuple[list[Pair], tuple[int, int]]:
  """The pairs, in the order of `b`, and how many timed rows of each have no partner."""
  before, after = ({_key(row): row for row in rows if _is_timed(row)} for rows in (a, b))
  both = [name for name in after if name in before]
  pairs = [Pair(before[name], after[name]) for name in both]
  return pairs, (len(before) - len(both), len(after) - len(both))


def no_more(a: list[dict], b: list[dict]) -> list[dict]:
  """Rows of `b` without a time, of cases that `a` has a time of and `b` no other row with one."""
  before, after = ({_case(row) for row in rows if _is_timed(row)} for rows in (a, b))
  rows = {_case(row): row for row in b if row["us_median"] is None}
  return [row for case, row in rows.items() if case in before and case not in after]


def _is_timed(row: dict) -> bool:
  return row["us_median"] is not None and row["phase"] != "copy"


def _key(row: dict) -> tuple:
  return _case(row), row["timer"]


def _case(row: dict) -> tuple:
  # Rows of before the matrix name neither layout.
  layout = row["layout"] or ("contiguous" if row["implementation"] == "cudnn" else "head_major")
  same = {"layout": layout, "batch_invariant": bool(row["batch_invariant"])}
  return key(row | same), row["device"]


def lines(pairs: list[Pair], alone: tuple[int, int], gone: list[dict]) -> list[str]:
  moved = sorted((pair for pair in pairs if pair.changed), key=lambda pair: -pair.ratio)
  slower = sum(pair.slower for pair in moved)
  same = sorted(abs(pair.ratio - 1) for pair in pairs if pair.same_sources)
  within = len(pairs) - len(same) - len(moved)
  head = ("case", "before", "after", "ratio")
  said = [
    f"{len(pairs)} pairs: {slower} slower, {len(moved) - slower} faster, {within} within noise; "
    f"without a partner {alone[0]} before, {alone[1]} after"
  ]
  if same:
    said.append(
      f"{len(same)} of the same sources: {same[len(same) // 2]:.1%} apart in the middle, "
      f"{same[-1]:.0%} at most, {sum(by > NOISE for by in same)} more than {NOISE:.0%}"
    )
  if any(pair.is_wall for pair in pairs):
    said.append(
      "Wall times also move with whatever else the machine does: no verdict is built on them."
    )
  rows = [
    (name(p.b), number(p.a["us_median"]), number(p.b["us_median"]), factor(p.ratio)) for p in moved
  ]
  if rows:
    said += ["", *Table("moved, us", head, rows).terminal()]
  rows = [
    (name(p.b), f"{p.a['kernel_error']:.1e}", f"{p.b['kernel_error']:.1e}", "")
    for p in pairs
    if p.worse
  ]
  if rows:
    said += ["", *Table("error against float64 on the same bytes grew", head, rows).terminal()]
  rows = [(name(row), row["error"] or row["reason"] or "") for row in gone]
  if rows:
    said += ["", *Table("timed no more", ("case", "why"), rows, left=2).terminal()]
  rows = [(name(p.b), _kernels(p.a), _kernels(p.b)) for p in pairs if p.other_kernels]
  if rows:
    table = Table("other kernels ran", ("case", "before", "after"), rows, left=3)
    said += ["", *table.terminal()]
  return said


def name(row: dict) -> str:
  """Which case a row is, in few words."""
  shape = f"{row['phase']} {row['batch']}/{row['q_len']}/{row['kv_len']}"
  path = measured.column(row) if row["read_path"] else row["k_format"]
  more = [row["levers"], "batch invariant" if row["batch_invariant"] else None]
  if row["implementation"] != "cudnn" and row["page_size"] != 64:
    more.append(f"pages of {row['page_size']}")
  if "scale" in row["data"]:
    more.append(f"scale {row['data'].split()[-1]}")
  heads = measured.shape_of(row).geometry
  return ", ".join(filter(None, (f"{shape} {path}", *more, None if heads == "8b" else heads)))


def _kernels(row: dict) -> str:
  """Of this package; all of XLA's and of libraries as one."""
  ours = dict.fromkeys(
    launcher(name) and name.partition("_mosaic")[0] for name in row["kernel_names"]
  )
  return " ".join(name or "others" for name in ours) or "none"
