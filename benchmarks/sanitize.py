"""`python3 -m benchmarks sanitize`: the kernels' checks under NVIDIA's compute-sanitizer.

    memcheck    accesses outside of arrays, each of which has an allocation of its own here
    racecheck   races in shared memory
    initcheck   reads of device memory that nobody wrote

One process for each tool, of `benchmarks gpu` with few checks of small shapes and without repeats,
since everything is 10 to 1000 times slower. What the tool says is kept in a log for each; printed
are its end and the places in kernels that it names most. Where the tool is not installed that is
said, and nothing else happens.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import glob
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable

from benchmarks.text_table import Table

TOOL = "compute-sanitizer"
TOOLS = ("memcheck", "racecheck", "initcheck")
# Every kernel for Hopper is in one of these.
CHECKS = (
  *("pack", "append", "four_over_six", "recent", "plain", "new_kv", "decode", "tails"),
  "whole_tiles",
)
TAIL_LINES = 25
PRINTED = 2000  # reports in a log
PLACES = 10  # in the table
ENVIRONMENT = {
  # An allocation for each array, so that an access past its end is one past an allocation.
  "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
  "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
}
# XLA shall time nothing, and launch kernels one by one.
XLA_FLAGS = "--xla_gpu_autotune_level=0 --xla_gpu_enable_command_buffer="


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What one tool said.

  Attributes:
    found: errors or hazards, None where the log has no summary.
    ended: how the process ended.
  """

  tool: str
  found: int | None
  ended: str
  seconds: float
  log: pathlib.Path

  @property
  def clean(self) -> bool:
    return self.found == 0 and self.ended == "exit code 0"


def main(argv: list[str]) -> int:
  parser = argparse.ArgumentParser(prog="python3 -m benchmarks sanitize", description=__doc__)
  parser.add_argument("--tools", default=",".join(TOOLS), help="with commas")
  parser.add_argument("--only", default=",".join(CHECKS), help="checks, as for `benchmarks gpu`")
  parser.add_argument("--seconds", type=float, default=180, help="for each tool")
  parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/sanitize"))
  options = parser.parse_args(argv)
  tools = options.tools.split(",")
  if not set(tools) <= set(TOOLS):
    parser.error(f"--tools must be of {', '.join(TOOLS)}, got {options.tools}")
  looked = list(places())
  program = next((place for place in looked if os.access(place, os.X_OK)), None)
  if program is None:
    print(f"{TOOL} is not installed: nothing was checked. Looked at", *looked, sep="\n  ")
    return 1
  print(f"{program}, checks {options.only}, {options.seconds:g} s for each tool", flush=True)
  options.out.mkdir(parents=True, exist_ok=True)
  outcomes = []
  for tool in tools:
    outcome = run(program, tool, options.only, options.seconds, options.out)
    outcomes.append(outcome)
    print(f"\n{tool}, the end of {outcome.log}:")
    lines = outcome.log.read_text(errors="replace").splitlines() if outcome.log.exists() else []
    print("\n".join(f"  {line}" for line in lines[-TAIL_LINES:]), flush=True)
  print("", *table(outcomes).terminal(), sep="\n")
  where = named_places(outcomes)
  if where.rows:
    print("", *where.terminal(), sep="\n")
  return 0 if all(outcome.clean for outcome in outcomes) else 1


def places() -> Iterable[str]:
  """Where the tool may be, best first."""
  on_path = shutil.which(TOOL)
  if on_path is not None:
    yield on_path
  roots = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
  roots += sorted(glob.glob("/usr/local/cuda*"), reverse=True)
  for root in roots:
    yield os.path.join(root, "bin", TOOL)
    yield os.path.join(root, TOOL, TOOL)
  for folder in sys.path:
    yield from sorted(glob.glob(os.path.join(folder, "nvidia", "**", TOOL), recursive=True))


def run(program: str, tool: str, checks: str, seconds: float, out: pathlib.Path) -> Outcome:
  """One tool over the checks; ended after `seconds`, and asked to start none late."""
  log, printed = out / f"{tool}.log", out / f"{tool}.checks.log"
  log.unlink(missing_ok=True)
  command = [program, "--tool", tool, "--error-exitcode", "99", "--target-processes", "all"]
  command += ["--print-limit", str(PRINTED), "--show-backtrace", "no", "--log-file", str(log)]
  command += [sys.executable, "-m", "benchmarks", "gpu", "--repeats", "0", "--only", checks]
  command += ["--seconds", f"{seconds / 2:g}"]
  flags = f"{os.environ.get('XLA_FLAGS', '')} {XLA_FLAGS}".strip()
  began = time.monotonic()
  with open(printed, "w") as file:
    process = subprocess.Popen(
      command,
      env=os.environ | ENVIRONMENT | {"XLA_FLAGS": flags},
      stdin=subprocess.DEVNULL,
      stdout=file,
      stderr=subprocess.STDOUT,
      start_new_session=True,  # so that the checks end with the tool
    )
    try:
      ended = f"exit code {process.wait(seconds)}"
    except subprocess.TimeoutExpired:
      ended = f"ended after {seconds:g} s"
    finally:
      if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
  text = log.read_text(errors="replace") if log.exists() else ""
  return Outcome(tool, found_in(text), ended, time.monotonic() - began, log)


def found_in(log: str) -> int | None:
  """The errors or hazards that the summaries of a log count."""
  counts = re.findall(r"SUMMARY: (\d+) (?:errors?|hazards?)\b(?! were not printed)", log)
  return sum(map(int, counts)) if counts else None


def table(outcomes: list[Outcome]) -> Table:
  rows = [
    (
      outcome.tool,
      "no summary" if outcome.found is None else str(outcome.found),
      outcome.ended,
      f"{outcome.seconds:.0f}",
      last_check(outcome.log.with_name(f"{outcome.tool}.checks.log")),
    )
    for outcome in outcomes
  ]
  head = ("tool", "errors", "process", "s", "last check")
  return Table("compute-sanitizer", head, rows, left=len(head))


def named_places(outcomes: list[Outcome]) -> Table:
  """The instructions of kernels that the printed reports name, most named first."""
  rows = []
  for outcome in outcomes:
    text = outcome.log.read_text(errors="replace") if outcome.log.exists() else ""
    found = collections.Counter(re.findall(r"\bat (\w+\+0x[0-9a-f]+)", text))
    rows += [(outcome.tool, place, str(count)) for place, count in found.most_common(PLACES)]
  return Table("named most, of what is printed", ("tool", "place", "times"), rows, left=2)


def last_check(printed: pathlib.Path) -> str:
  """The last line that the checks printed about themselves."""
  lines = [line for line in printed.read_text(errors="replace").splitlines() if line[:1] == "["]
  return lines[-1] if lines else "none"
