"""`python3 -m benchmarks quality`: what each cache format costs in accuracy, and gates on it.

Levels: `format` packs values, `attention` runs one layer through a cache and the operations on
patterns and on captured activations, `model` a whole language model. Prints a table for each, then
every gate with its value; the exit status is 1 if one fails. A quantised Q that costs more than 2 %
is marked `fails`. --committed shows the rows of benchmarks/results/quality.jsonl instead; those of
other sources than these are STALE.
"""

from __future__ import annotations

import argparse
import pathlib

from benchmarks import quality_configs, quality_rows, quality_table
from benchmarks.progress import Progress
from benchmarks.quality_gates import GATES
from benchmarks.quality_judge import Verdict, judge
from benchmarks.quality_rows import LEVELS, QualityRow


def main(argv: list[str]) -> int:
  parser = argparse.ArgumentParser(prog="python3 -m benchmarks quality", description=__doc__)
  parser.add_argument(
    "--levels", nargs="+", choices=LEVELS, default=["format", "attention"], metavar="LEVEL"
  )
  parser.add_argument(
    "--smoke", action="store_true", help="few configs and short contexts, about half a minute"
  )
  parser.add_argument("--implementation", help="who runs the operations; default: the device's")
  parser.add_argument("--configs", nargs="+", choices=quality_configs.BY_NAME, metavar="CONFIG")
  parser.add_argument(
    "--plan",
    choices=("full", "levers"),
    default="full",
    help="of level model: everything, or one text at 1,024 tokens, which a CPU reads in minutes",
  )
  parser.add_argument("--context", type=int, default=8192, help="of level model, plan full")
  parser.add_argument("--model", type=pathlib.Path, help="of level model: where its files are")
  parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/quality.jsonl"))
  parser.add_argument("--plot", type=pathlib.Path, metavar="DIR", help="also draw pictures there")
  parser.add_argument("--committed", action="store_true", help="measure nothing, show what is kept")
  options = parser.parse_args(argv)
  if options.committed:
    rows = quality_rows.read(quality_rows.COMMITTED) if quality_rows.COMMITTED.exists() else []
    if not rows:
      print("no rows are committed: `python3 -m benchmarks quality --out FILE` makes them")
      return 1
    status = report(rows, list(LEVELS))
  else:
    rows = measure(options)
    quality_rows.write(rows, options.out)
    context = 1024 if options.plan == "levers" else options.context
    status = report(rows, options.levels, smoke=options.smoke, contexts=[context])
    print(f"\nRows: {options.out}")
  if options.plot:
    from benchmarks import quality_plot

    try:
      drawn = quality_plot.draw(rows, options.plot)
    except ImportError as error:
      parser.error(f"--plot needs matplotlib, which the extra `reports` installs: {error}")
    print("Drawn: " + ", ".join(map(str, drawn)))
  return status


def measure(options: argparse.Namespace) -> list[QualityRow]:
  levels, smoke, implementation = options.levels, options.smoke, options.implementation
  rows = []
  if "format" in levels:
    from benchmarks import quality_data, quality_format

    quantisers = quality_format.QUANTISERS
    rows += quality_format.measure(
      quantisers,
      implementation=implementation,
      progress=Progress(len(quantisers) * len(quality_data.DISTRIBUTIONS)),
    )
  if "attention" in levels:
    from benchmarks import quality_attention

    cases = quality_attention.SMOKE if smoke else quality_attention.FULL
    progress = Progress(quality_attention.steps(cases))
    rows += quality_attention.measure(cases, implementation, progress)
  if "model" in levels:
    from benchmarks import quality_model

    configs = [quality_configs.BY_NAME[name] for name in options.configs or quality_configs.BY_NAME]
    levers = options.plan == "levers"
    rows += quality_model.measure(
      configs,
      smoke=smoke,
      implementation=implementation,
      progress=Progress,
      model=options.model,
      plan=quality_model.LEVERS if levers else quality_model.full_plan(options.context),
    )
  return rows


def report(
  rows: list[QualityRow],
  levels: list[str],
  *,
  smoke: bool = False,
  contexts: list[int] | None = None,
) -> int:
  """Prints tables and gates; 0, or 1 where a gate fails."""
  for level in levels:
    print("\n".join([f"== {level}", *quality_table.of_rows(rows, level), ""]))
  current = [row for row in rows if not row.stale]
  if len(current) < len(rows):
    print(f"{len(rows) - len(current)} of {len(rows)} rows are stale; gates judge the others\n")
  verdicts = verdicts_of(current, levels, smoke=smoke, contexts=contexts)
  print("\n".join(quality_table.of_verdicts(verdicts)))
  failed = [verdict.gate.name for verdict in verdicts if verdict.passed is False]
  if failed:
    print(f"FAILED: {'; '.join(failed)}")
  return 1 if failed else 0


def verdicts_of(
  rows: list[QualityRow], levels: list[str], *, smoke: bool, contexts: list[int] | None = None
) -> list[Verdict]:
  # A kernel's rows say by themselves how they compare with the definition.
  implementations = {"xla"} | {row.implementation for row in rows if row.level == "attention"}
  return judge(
    rows,
    levels,
    gates=GATES,
    smoke=smoke,
    implementations=implementations,
    contexts=contexts,
  )
