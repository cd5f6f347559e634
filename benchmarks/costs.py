"""`python3 -m benchmarks costs`: measured rows as the cost table that nvfp4_pallas.policy reads.

Rows are files that `python3 -m benchmarks matrix` wrote, by default the committed ones; those of
other kernel sources than these are left out. With --record they are taken first, on this machine's
GPU: one command for a table of one's own card. --judge says how good choices are at shapes that the
table does not know: each of its own left out in turn, those between others and then all, and those
of other heads; beside them what always taking one path would give.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Iterable

import jax

from benchmarks import held_out, measured
from benchmarks.records import read
from benchmarks.workloads import ATTENTION, PAGE_SIZE
from nvfp4_pallas.dispatch import IMPLEMENTATIONS, current_target
from nvfp4_pallas.policy import Cost, CostTable

# Parts of the matrix that are of the table's heads and pages.
PARTS = ("full", "chunk", "tail", "decode", "grid")
OTHER_HEADS = "geometries"
Q_LEVELS = 2  # prefill's default


def main(argv: list[str]) -> int:
  parser = argparse.ArgumentParser(prog="python3 -m benchmarks costs", description=__doc__)
  parser.add_argument("rows", nargs="*", type=pathlib.Path, metavar="ROWS.jsonl")
  parser.add_argument("--out", type=pathlib.Path, metavar="FILE.json")
  parser.add_argument("--stale", action="store_true", help="also rows of other kernel sources")
  parser.add_argument("--record", action="store_true", help="take the rows first, into ROWS.jsonl")
  parser.add_argument("--judge", action="store_true", help="choices at shapes left out")
  options = parser.parse_args(argv)
  if options.out is None and not options.judge:
    parser.error("--out FILE.json or --judge must be given")
  if options.record:
    if len(options.rows) != 1:
      parser.error(f"--record takes one ROWS.jsonl to write, got {len(options.rows)}")
    if not current_target().architecture.startswith("sm_"):
      parser.error(f"--record needs a GPU, JAX sees only {current_target().architecture}")
    from benchmarks import matrix

    parts = [*PARTS, OTHER_HEADS]
    code = matrix.main(["--out", str(options.rows[0]), "--resume", "--no-peers", "--parts", *parts])
    if code > 1:
      return code
  rows = []
  for path in measured.files(options.rows):
    try:
      rows += read(path)
    except (OSError, ValueError) as error:
      parser.error(str(error))
  if options.record:  # the file may have rows of other devices
    device = jax.devices()[0].device_kind
    rows = [row for row in rows if row["device"] == device]
  if not options.stale:
    rows = [row for row in rows if not measured.is_stale(row)]
  try:
    made = table(rows)
  except ValueError as error:
    parser.error(str(error))
  if options.judge:
    others = [_cost(row) for row in rows if _is_cost(row, (OTHER_HEADS,))]
    print("\n".join(held_out.lines(made, others)))
  if options.out:
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
  # The matrix times all paths of a shape in one run: its rows before others of the same case, and
  # of those the newest.
  rows = sorted(rows, key=lambda row: row["time"], reverse=True)
  of_case = {}
  for row in sorted(rows, key=lambda row: row["part"] is None):
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


def _is_cost(row: dict, parts: tuple[str | None, ...] = (None, *PARTS)) -> bool:
  return (
    row["phase"] in ATTENTION
    and row["part"] in parts
    and row["implementation"] in IMPLEMENTATIONS
    and row["us_median"] is not None
    and row["timer"] == "trace"
    and row["page_size"] == PAGE_SIZE
    and not row["batch_invariant"]
    and not row["levers"]
    and (row["read_path"] != "nvfp4_a4q" or row["q_levels"] == Q_LEVELS)
  )


_SAME_NAMES = (
  *("read_path", "k_format", "v_format", "implementation"),
  *("num_q_heads", "num_kv_heads", "head_dim", "batch", "q_len", "kv_len"),
)


def _case(row: dict) -> tuple:
  return _phase(row), *(row[name] for name in _SAME_NAMES)


def _phase(row: dict) -> str:
  """The operation that ran."""
  return "decode" if row["phase"] == "decode" else "prefill"


def _cost(row: dict) -> Cost:
  return Cost(
    phase=_phase(row),
    us=round(row["us_median"], 3),
    workspace_bytes=row["workspace_bytes"] or 0,
    **{name: row[name] for name in _SAME_NAMES},
  )
