"""`python3 -m benchmarks gpu`: are the kernels right on this machine's GPU.

Packing and appending bit for bit against the definition run on the CPU, and attention against
float64 on the same bytes (gpu_checks.py). How fast they are says `python3 -m benchmarks matrix`.
"""

from __future__ import annotations

import argparse
import sys
import time

from benchmarks.gpu_checks import CHECKS
from nvfp4_pallas.dispatch import current_target


def main(argv: list[str]) -> int:
  parser = argparse.ArgumentParser(prog="python3 -m benchmarks gpu", description=__doc__)
  parser.add_argument("--seconds", type=float, help="start nothing after so many seconds")
  options = parser.parse_args(argv)
  target = current_target()
  if not target.architecture.startswith("sm_"):
    print(f"this needs a GPU, JAX sees only {target.architecture}", file=sys.stderr)
    return 1
  began, failures = time.monotonic(), []
  for done, check in enumerate(CHECKS):
    spent = time.monotonic() - began
    if options.seconds is not None and spent > options.seconds:
      print(f"{len(CHECKS) - done} checks left out for lack of time")
      break
    try:
      said = check()
    except Exception as error:  # noqa: BLE001 - any fault of one check is named, the others go on
      said = f"FAILED: {_name(check)}: {type(error).__name__}: {str(error)[:300]}"
      failures.append(said)
    print(f"[{done + 1}/{len(CHECKS)}, {time.monotonic() - began:4.0f} s] {said}", flush=True)
  print("\n".join([f"{len(failures)} failures", *failures]))
  return 1 if failures else 0


def _name(check) -> str:
  named = getattr(check, "__name__", None)
  return named or f"{check.func.__name__}{check.args}{check.keywords}"
