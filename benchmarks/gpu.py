"""`python3 -m benchmarks gpu`: are the kernels right on this machine's GPU.

Packing and appending bit for bit against the definition run on the CPU, and attention against
float64 on the same bytes (gpu_checks.py); each kernel gives the same bits 100 times. How fast they
are says `python3 -m benchmarks matrix`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

from benchmarks.gpu_checks import CHECKS
from benchmarks.gpu_repeats import repeats
from nvfp4_pallas.dispatch import current_target


def main(argv: list[str]) -> int:
  names = dict.fromkeys(map(name_of, CHECKS))
  parser = argparse.ArgumentParser(prog="python3 -m benchmarks gpu", description=__doc__)
  parser.add_argument("--seconds", type=float, help="start nothing after so many seconds")
  parser.add_argument("--only", help=f"checks, with commas: of {', '.join(names)}")
  parser.add_argument("--repeats", type=int, default=100, help="calls of each kernel, beside one")
  options = parser.parse_args(argv)
  wanted = names if options.only is None else options.only.split(",")
  unknown = [name for name in wanted if name not in names]
  if unknown:
    parser.error(f"--only must name checks of {', '.join(names)}, got {', '.join(unknown)}")
  target = current_target()
  if not target.architecture.startswith("sm_"):
    print(f"this needs a GPU, JAX sees only {target.architecture}", file=sys.stderr)
    return 1
  with repeats(options.repeats):
    return _run([check for check in CHECKS if name_of(check) in wanted], options.seconds)


def name_of(check: Callable[[], str]) -> str:
  """`append` of check_append; those with other arguments have one name."""
  return getattr(check, "func", check).__name__.removeprefix("check_")


def _run(checks: list[Callable[[], str]], seconds: float | None) -> int:
  began, failures = time.monotonic(), []
  for done, check in enumerate(checks):
    spent = time.monotonic() - began
    if seconds is not None and spent > seconds:
      print(f"{len(checks) - done} checks left out for lack of time")
      break
    try:
      said = check()
    except Exception as error:  # noqa: BLE001 - any fault of one check is named, the others go on
      said = f"FAILED: {_named(check)}: {type(error).__name__}: {str(error)[:300]}"
      failures.append(said)
    print(f"[{done + 1}/{len(checks)}, {time.monotonic() - began:4.0f} s] {said}", flush=True)
  print("\n".join([f"{len(failures)} failures", *failures]))
  return 1 if failures else 0


def _named(check) -> str:
  named = getattr(check, "__name__", None)
  return named or f"{check.func.__name__}{check.args}{check.keywords}"
