"""`python3 -m benchmarks published`: the published comparison of NVFP4, FP8 and A4Q, on this card.

Times the shapes that were published (full prompts of 8K, 16K and 32K tokens, 128 tokens over 2K
keys, 16 over 16K, decode) over BF16, FP8 and NVFP4 caches: widened in the loop (dequant), once for
several readers (repack), or multiplied as FP4 (a4q, Q in one level and in two). They are cases of
`matrix`, with its rows, errors and options, and take a minute or two. The published ratios and
times then stand beside those of here.

Published: 21.0 ms for stock NVFP4, 18.0 for A4Q and 11.1 for FP8, a prompt of 16K on an RTX PRO
5000 (sm_120): 1.89 and 1.62 times FP8; 1.74 over 48 other prompts. This package's A4Q multiplies
FP4 on sm_120 and sm_100; on sm_90 it is emulated, which its ratios say. On sm_100 there is no other
path yet, and so no ratio: A4Q's times stand alone. Where there is no such
card, this says what is missing and exits with 2; with --size small it then runs small shapes by the
definition, which times nothing.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import textwrap

import jax

from benchmarks import cases, matrix, measured, report_tables, seeds, triton_cases
from benchmarks.measured import Run
from benchmarks.table import WIDTH
from nvfp4_pallas.dispatch import current_target

OUT = pathlib.Path("out/published.jsonl")
NOT_HERE = "not measured here"
PATHS = ("a4q", "dequant", "repack", "fp8", "bf16")  # as triton_cases names them
SHAPES = tuple(dict.fromkeys(shape for of in seeds.RATIOS for shape in of.published))


def main(argv: list[str]) -> int:
  parser = argparse.ArgumentParser(prog="python3 -m benchmarks published", description=__doc__)
  matrix.add_options(parser, OUT)
  options = matrix.parsed(parser, argv)
  why_not = missing()
  if why_not is not None and options.size != "small":
    print("\n".join(seeds.table(None, NOT_HERE).terminal()))
    print(textwrap.fill(why_not, WIDTH, break_on_hyphens=False), file=sys.stderr)
    return 2
  if options.size != "small" and (warning := incomparable()) is not None:
    print(textwrap.fill(warning, WIDTH, break_on_hyphens=False), file=sys.stderr)
  code = matrix.measure(cases.published(matrix.device_of(options), SHAPES), options)
  if not options.list and options.out.exists():
    for run in measured.runs([options.out], stale=False):
      if run.device == jax.devices()[0].device_kind:
        print("\n".join(described(run)))
  return code


def missing() -> str | None:
  """What this machine lacks to run A4Q by a kernel of its card, or None."""
  target = current_target()
  if not target.architecture.startswith("sm_"):
    return (
      f"JAX sees no GPU here, only {target.architecture}. This needs a card of sm_120 (RTX PRO, "
      "GeForce), sm_100 (B200) or sm_90 (H100, H200), and JAX with CUDA: "
      f"pip install 'jax[cuda13]=={jax.__version__}'"
    )
  try:
    resolved = triton_cases.named("prefill/a4q").resolve()
  except NotImplementedError as error:  # something that this card's kernel needs
    return str(error)
  return f"no kernel for this card: {resolved.reason}" if resolved.implementation == "xla" else None


def incomparable() -> str | None:
  """Which published ratios this card's kernels cannot form, or None."""
  resolved = {name: triton_cases.named(f"prefill/{name}").resolve() for name in PATHS}
  absent = [name for name, by in resolved.items() if by.implementation == "xla"]
  if not absent:
    return None
  return (
    f"{resolved['a4q'].implementation} has no {', '.join(absent)}: no published ratio that these "
    "are part of can be formed on this card. A4Q's own times are measured, and stand last."
  )


def described(run: Run) -> list[str]:
  """Which kernels ran, the published numbers beside the run's, and its times of A4Q."""
  kernels = [report_tables.launched(run)] if run.is_of_kernels else []
  tables = [*kernels, seeds.table(run, NOT_HERE), *seeds.a4q_times(run)]
  return [line for table in tables for line in ("", *table.terminal())]
