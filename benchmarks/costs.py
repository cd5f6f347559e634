"""`python3 -m benchmarks costs`: measured rows as the cost table that nvfp4_pallas.policy reads.

Rows are files that `python3 -m benchmarks gpu` wrote (`--only sweep` times every read path at the
same shapes), by default the committed ones; those of other kernel sources than these are left out.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Iterable

from benchmarks.committed import QUALITY, RESULTS, is_stale
from benchmarks.records import read
from nvfp4_pallas.dispatch import IMPLEMENTATIONS
from nvfp4_pallas.policy import Cost, CostTable

PAGE_SIZE = 64  # the sweep's; other pages were timed at few shapes
Q_LEVELS = 2  # prefill's default
ATTENTION = ("prefill", "chunk", "tail", "decode", "sweep")  # phases of rows


def main(argv: list[str]) -> int:
  parser = argparse.ArgumentParser(prog="python3 -m benchmarks costs", description=__doc__)
  parser.add_argument("rows", nargs="*", type=pathlib.Path, metavar="ROWS.jsonl")
  parser.add_argument("--out", type=pathlib.Path, required=True, metavar="FILE.json")
  parser.add_argument("--stale", action="store_true", help="also rows of other kernel sources")
  options = parser.parse_args(argv)
  rows = []
  committed = (path for path in sorted(RESULTS.glob("*.jsonl")) if path.name != QUALITY)
  for path in options.rows or committed:
    try:
      rows += read(path)
    except OSError as error:
      parser.error(str(error))
  try:
    made = table(rows if options.stale else [row for row in rows if not is_stale(row)])
  except ValueError as error:
    parser.error(str(error))
  options.out.parent.mkdir(parents=True, exist_ok=True)
  made.save(options.out)
  print(f"{options.out}: {len(made.rows)} costs of {made.device}, {made.revision}")
  return 0


def table(rows: Iterable[dict]) -> CostTable:
  """Of the timed rows of this package's attention; ValueError where they do not make one table."""
  rows = [row for row in rows if _is_cost(row)]
  devices = sorted({row["device"] for row in rows})
  if len(devices) != 1:
    raise ValueError(f"rows must be timings of attention on one device, got {devices or 'none'}")
  # The sweep timed all paths of a shape in one run: its rows before others of the same case.
  of_case = {}
  for row in sorted(rows, key=lambda row: row["phase"] != "sweep"):
    of_case.setdefault(_case(row), row)
  chosen = [of_case[case] for case in sorted(of_case)]
  names: dict[str, set[str]] = {}
  for row in chosen:
    names.setdefault(row["kernel_hash"], set()).update(row["kernel_names"])
  return CostTable(
    device=devices[0],
    revision=", ".join(sorted({row["git_revision"] for row in chosen})),
    kernel_hashes={key: tuple(sorted(names[key])) for key in sorted(names)},
    rows=tuple(map(_cost, chosen)),
  )


def _is_cost(row: dict) -> bool:
  return (
    row["phase"] in ATTENTION
    and row["implementation"] in IMPLEMENTATIONS
    and row["us_median"] is not None
    and row["timer"] == "trace"
    and row["page_size"] == PAGE_SIZE
    and not row["batch_invariant"]
    and not row.get("levers")
    and (row["read_path"] != "nvfp4_a4q" or row["q_levels"] == Q_LEVELS)
  )


_SAME_NAMES = (
  *("read_path", "k_format", "v_format", "implementation"),
  *("num_q_heads", "num_kv_heads", "head_dim", "batch", "q_len", "kv_len"),
)


def _case(row: dict) -> tuple:
  return _phase(row), *(row[name] for name in _SAME_NAMES)


def _phase(row: dict) -> str:
  """The operation that ran: the sweep takes decode where there is one query token."""
  decodes = row["phase"] == "decode" or (row["phase"] == "sweep" and row["q_len"] == 1)
  return "decode" if decodes else "prefill"


def _cost(row: dict) -> Cost:
  return Cost(
    phase=_phase(row),
    us=round(row["us_median"], 3),
    workspace_bytes=row["workspace_bytes"] or 0,
    **{name: row[name] for name in _SAME_NAMES},
  )
