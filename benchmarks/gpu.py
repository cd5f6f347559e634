"""`python3 -m benchmarks gpu`: are the kernels right on this machine's GPU, and how fast are they.

First the timings (gpu_timings.py), the most wanted first: device times by trace, every kernel of a
call summed, over memory that the L2 cache cannot hold, in one run with the device's copy bandwidth.
Then the checks (gpu_checks.py): packing and appending bit for bit against the definition run on the
CPU, and attention against float64 on the same bytes. Rows are written as they come, so that a run
that is cut short leaves what it has. The sweep (sweep.py) is long and runs only if asked for.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time

from benchmarks import gpu_timings, sweep
from benchmarks.gpu_checks import CHECKS
from benchmarks.records import Row, write
from nvfp4_pallas.dispatch import current_target

GROUPS = gpu_timings.GROUPS | {"sweep": sweep.CASES, "checks": CHECKS}
BY_DEFAULT = (*gpu_timings.GROUPS, "checks")


def main(argv: list[str]) -> int:
  parser = argparse.ArgumentParser(prog="python3 -m benchmarks gpu", description=__doc__)
  parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/gpu.jsonl"))
  parser.add_argument(
    "--only", nargs="+", choices=GROUPS, default=BY_DEFAULT, help="run these alone"
  )
  parser.add_argument("--seconds", type=float, help="start nothing after so many seconds")
  options = parser.parse_args(argv)
  target = current_target()
  if not target.architecture.startswith("sm_"):
    print(f"this needs a GPU, JAX sees only {target.architecture}", file=sys.stderr)
    return 1
  run = _Run(options.seconds)
  copy_rate, copy_row = gpu_timings.copy_bandwidth()
  run.say(f"device copy {copy_rate / 1e9:.0f} GB/s")
  rows = [copy_row]
  for group in options.only:
    for case in GROUPS[group]:
      row = run.one(case) if group == "checks" else run.one(case, copy_rate)
      if row is not None:
        rows.append(row)
        write(rows, options.out)
  run.say(f"rows: {options.out}; {len(run.failures)} failures, {run.left} cases left out")
  for failure in run.failures:
    print(f"FAILED: {failure}")
  return 1 if run.failures else 0


class _Run:
  """Runs cases one after the other; a failing one is named and the rest goes on."""

  def __init__(self, seconds: float | None):
    self.failures: list[str] = []
    self.left = 0  # not started, for lack of time
    self._began, self._seconds = time.monotonic(), seconds

  def say(self, text: str) -> None:
    print(f"[{time.monotonic() - self._began:5.0f} s] {text}", flush=True)

  def one(self, case, *arguments) -> Row | None:
    if self._seconds is not None and time.monotonic() - self._began > self._seconds:
      self.left += 1
      return None
    try:
      result = case(*arguments)
    except Exception as error:  # noqa: BLE001 - any fault of one case is reported, not raised
      name = getattr(case, "__name__", None) or f"{case.func.__name__}{case.args}{case.keywords}"
      self.failures.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
      self.say(self.failures[-1])
      return None
    if isinstance(result, Row):
      self.say(describe(result))
      return result
    self.say(result)
    return None


def describe(row: Row) -> str:
  shape = f"{row.phase} {row.batch}/{row.q_len}/{row.kv_len} page {row.page_size} {row.k_format}"
  who = f"{shape} {row.read_path or ''} {row.implementation}"
  if row.batch_invariant:
    who += ", batch invariant"
  if row.us_median is None:
    return f"{who}: {row.reason}"
  share = f", {100 * row.floor_us / row.us_median:.0f} % of its floor" if row.floor_us else ""
  return f"{who} ({row.data}): {row.us_median:.1f} us{share}"
