"""`python -m benchmarks dispatch --target sm_120`: who runs each phase there, and why.

    python -m benchmarks dispatch --target sm_90|sm_100|sm_120|cpu [--phase PHASE ...]
                                  [--no-compile]

A server flag does not prove that the optimised dispatch ran. This resolves calls of every phase as
on that device and, for sm_120 and sm_100, compiles what they launch and reads from the machine code
which instruction each product is (`aot` compiles for sm_90); the assembler that the first line
names says what is spilled. Nothing is run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import aot, aot_cases, triton_aot, triton_cases
from benchmarks.aot import AotError, MissingError
from benchmarks.aot_calls import abstract_cache
from benchmarks.sass import TENSOR_CORE_OPS, Code
from benchmarks.triton_cases import Case
from nvfp4_pallas.dispatch import Resolved, Target, use_target
from nvfp4_pallas.ops.append import append_request, resolve_append
from nvfp4_pallas.ops.pack import PackRequest, resolve_pack

TARGETS = ("sm_90", "sm_100", "sm_120", "cpu")
PHASES = tuple(dict.fromkeys(case.name.split("/")[0] for case in triton_cases.CASES)) + (
  "append",
  "pack",
)
WIDTH = 100
ASSEMBLED = ("sm_100", "sm_120")
WITHOUT = "`--no-compile` leaves the instructions out"
FP4 = ("OMMA", "UTCOMMA")  # opcodes of block-scaled FP4 products


def main(argv: list[str]) -> int:
  """0 when everything compiles to the instructions that it should be."""
  parser = argparse.ArgumentParser(prog="python -m benchmarks dispatch", description=__doc__)
  parser.add_argument("--target", required=True, choices=TARGETS)
  parser.add_argument("--phase", nargs="+", choices=PHASES, default=PHASES, metavar="PHASE")
  parser.add_argument("--no-compile", action="store_true", help="resolve only")
  options = parser.parse_args(argv)
  compilers = {} if options.no_compile else COMPILERS
  try:
    print(title(options.target, compiles=not options.no_compile))
  except MissingError as error:
    print(f"{error}\n{WITHOUT}", file=sys.stderr)
    return 1
  good = True
  for case in triton_cases.CASES:
    if case.name.split("/")[0] not in options.phase:
      continue
    try:
      with use_target(Target(options.target)):
        resolved = case.resolve()
    except NotImplementedError as error:  # something that the target's kernel needs is not here
      print(error, file=sys.stderr)
      return 1
    print("\n" + describe(case, resolved), flush=True)
    if resolved.implementation in compilers:
      try:
        lines, ok = compilers[resolved.implementation](case)
      except MissingError as error:
        print(f"{error}\n{WITHOUT}", file=sys.stderr)
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
  """Raises aot.MissingError where something is to be compiled and there is no assembler."""
  if not compiles:
    return f"{target}: who runs what, as resolved; nothing was compiled or run"
  versions = [f"{name} {_version(name)}" for name in ("jax", "jax-triton", "triton")]
  versions += [f"ptxas {aot.ptxas_version()}"] if target in ASSEMBLED else []
  text = f"{target}: who runs what, by {', '.join(versions)}; nothing was run"
  return textwrap.fill(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _version(package: str) -> str:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return "(missing)"


def describe(case: Case, resolved: Resolved) -> str:
  phase, shape = case.name.split("/")[0], "/".join(map(str, case.shape))
  levels = {1: ", Q in one level", 2: ", Q in two levels"}[case.q_levels]
  levels = levels if case.read_path == "nvfp4_a4q" else ""
  more = f", head_dim {case.head_dim}" if case.head_dim != 128 else ""
  more += f", {case.group} query heads a KV head" if case.group != 4 else ""
  more += f", pages of {case.page_size}" if case.page_size != 16 else ""
  more += f", window {case.window}" if case.window else ""
  more += f", soft cap {case.soft_cap}" if case.soft_cap else ""
  return said(f"{phase} {shape} {case.read_path}{levels}{more}", resolved)


def said(what: str, resolved: Resolved) -> str:
  """A call, its implementation and the reason, within a terminal's width."""
  text = f"because: {resolved.reason}"
  because = textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="    ")
  return f"{what}: {resolved.implementation}\n{because}"


def by_triton(case: Case) -> tuple[str, bool]:
  """What a case's machine code multiplies with, and whether it is what it should be."""
  report = triton_aot.compile_case(case)
  return instructions(report.products, report, report.code, triton_aot.verdict(case, report))


def name_on_sm_100(case: Case) -> str:
  """Of the same call in aot_cases.CASES, where it is one of ON_SM_100."""
  return "sm100/" + case.name.replace("/", "_")


def by_mosaic(case: Case) -> tuple[str, bool]:
  name = name_on_sm_100(case)
  compiled = next((c for c in aot_cases.CASES if c.name == name), None)
  if compiled is None:
    return f"  FAIL aot has no case {name}, so nothing here shows its instructions", False
  report = aot.compile_case(compiled)
  (kernel,) = report.kernels
  products, verdict = kernel.code.with_modifiers(*TENSOR_CORE_OPS), aot.verdict(compiled, report)
  if not any(op.startswith(FP4) for op in products):
    verdict = f"FAIL products are {dict(products)}"
  return instructions(products, report, kernel.code, verdict)


COMPILERS = {"triton_sm120": by_triton, "mosaic_sm100": by_mosaic}


def instructions(products: Mapping[str, int], report: Any, code: Code, verdict: str):
  """(lines to print, whether all is well)."""
  fp4 = any(op.startswith(FP4) for op in products)
  lines = []
  for op, count in products.items():
    who = "Q K^T, P V" if not fp4 else "Q K^T     " if op.startswith(FP4) else "P V       "
    as_stored = ", K's codes as they are stored" if op.startswith(FP4) else ""
    lines.append(f"{who}  {count} x {op}{as_stored}")
  outside = report.spills and not code.in_tensor_core_loops("STL", "LDL")
  spills = f"{report.spills} bytes spilled" + " outside the loops over keys" * bool(outside)
  lines.append(
    f"{report.registers} registers, {spills}, {report.smem} bytes of shared memory, "
    f"{code.count().total()} instructions; {verdict}"
  )
  return "\n".join("  " + line for line in lines), verdict == "ok"


def _append() -> Resolved:
  rows: Any = jax.ShapeDtypeStruct((64, 8, 128), jnp.bfloat16)
  return resolve_append(append_request(abstract_cache(), rows, rows))


def _pack() -> Resolved:
  return resolve_pack(PackRequest((64, 128), "bfloat16", 1, "amax", False))
