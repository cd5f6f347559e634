"""`python -m benchmarks dispatch --target sm_120`: who runs each phase there, and why.

    python -m benchmarks dispatch --target sm_90|sm_100|sm_120|cpu [--phase PHASE ...]
                                  [--no-compile]

A server flag does not prove that the optimised dispatch ran. This resolves calls of every phase as
on that device and, for sm_120, compiles what they launch and reads from the machine code which
instruction each product is. Nothing is run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import textwrap
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import triton_aot, triton_cases
from benchmarks.aot import AotError, MissingError
from benchmarks.aot_cases import abstract_cache
from benchmarks.triton_cases import Case
from nvfp4_pallas.dispatch import Resolved, Target, use_target
from nvfp4_pallas.ops.append import append_request, resolve_append
from nvfp4_pallas.ops.pack import PackRequest, resolve_pack

TARGETS = ("sm_90", "sm_100", "sm_120", "cpu")
COMPILED = "triton_sm120"
PHASES = tuple(dict.fromkeys(case.name.split("/")[0] for case in triton_cases.CASES)) + (
  "append",
  "pack",
)
WIDTH = 100


def main(argv: list[str]) -> int:
  """0 when everything compiles to the instructions that it should be."""
  parser = argparse.ArgumentParser(prog="python -m benchmarks dispatch", description=__doc__)
  parser.add_argument("--target", required=True, choices=TARGETS)
  parser.add_argument("--phase", nargs="+", choices=PHASES, default=PHASES, metavar="PHASE")
  parser.add_argument("--no-compile", action="store_true", help="resolve only")
  options = parser.parse_args(argv)
  compiles = options.target == triton_cases.TARGET and not options.no_compile
  print(title(options.target, compiles))
  good = True
  for case in triton_cases.CASES:
    if case.name.split("/")[0] not in options.phase:
      continue
    with use_target(Target(options.target)):
      resolved = case.resolve()
    print("\n" + describe(case, resolved), flush=True)
    if compiles and resolved.implementation == COMPILED:
      try:
        lines, ok = instructions(case)
      except MissingError as error:
        print(f"{error}\n`--no-compile` leaves the instructions out", file=sys.stderr)
        return 1
      except AotError as error:
        lines, ok = str(error), False
      print(lines, flush=True)
      good &= ok
  for phase, resolve in (("append", _append), ("pack", _pack)):
    if phase in options.phase:
      with use_target(Target(options.target)):
        print("\n" + said(f"{phase} of 64 rows", resolve()), flush=True)
  return 0 if good else 1


def title(target: str, compiles: bool) -> str:
  if not compiles:
    return f"{target}: who runs what, as resolved; nothing was compiled or run"
  triton, through = (importlib.metadata.version(name) for name in ("triton", "jax-triton"))
  return (
    f"{target}: who runs what, compiled by Triton {triton} through jax-triton {through}; "
    "nothing was run"
  )


def describe(case: Case, resolved: Resolved) -> str:
  phase, shape = case.name.split("/")[0], "/".join(map(str, case.shape))
  levels = {1: ", Q in one level", 2: ", Q in two levels"}[case.q_levels]
  levels = levels if case.read_path == "nvfp4_a4q" else ""
  more = f", head_dim {case.head_dim}" if case.head_dim != 128 else ""
  more += f", window {case.window}" if case.window else ""
  return said(f"{phase} {shape} {case.read_path}{levels}{more}", resolved)


def said(what: str, resolved: Resolved) -> str:
  """A call, its implementation and the reason, within a terminal's width."""
  text = f"because: {resolved.reason}"
  because = textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="    ")
  return f"{what}: {resolved.implementation}\n{because}"


def instructions(case: Case) -> tuple[str, bool]:
  """What a case's machine code multiplies with, and whether it is what it should be."""
  report = triton_aot.compile_case(case)
  verdict = triton_aot.verdict(case, report)
  fp4, bf16 = (report.products[op] for op in (triton_aot.FP4_OPCODE, triton_aot.BF16_OPCODE))
  lines = [f"Q K^T       {fp4} x {triton_aot.FP4_OPCODE}, K's codes as they are stored"] * (fp4 > 0)
  who = "P V       " if fp4 else "Q K^T, P V"
  lines += [f"{who}  {bf16} x {triton_aot.BF16_OPCODE}"]
  lines += [
    f"{report.registers} registers, {report.spills} bytes spilled, {report.smem} bytes of shared "
    f"memory, {report.code.count().total()} instructions; {verdict}"
  ]
  return "\n".join("  " + line for line in lines), verdict == "ok"


def _append() -> Resolved:
  rows: Any = jax.ShapeDtypeStruct((64, 8, 128), jnp.bfloat16)
  return resolve_append(append_request(abstract_cache(), rows, rows))


def _pack() -> Resolved:
  return resolve_pack(PackRequest((64, 128), "bfloat16", 1, "amax", False))
