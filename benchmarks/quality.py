"""`python3 -m benchmarks quality`: what each cache format costs in accuracy, and gates on it.

Levels: `format` packs values, `attention` runs one layer through a cache and the operations on
patterns and on captured activations, `model` a whole language model. Prints a table for each, then
every gate with its value; the exit status is 1 if one fails. A quantised Q that costs more than 2 %
is marked `fails`. --committed shows the rows of benchmarks/results/quality.jsonl instead; those of
other sources than these are STALE. What is wrong with an argument ends it with status 2.
"""

from __future__ import annotations

import argparse
import pathlib
from typing import TYPE_CHECKING

from benchmarks import quality_configs, quality_rows, quality_table
from benchmarks.progress import Progress
from benchmarks.quality_gates import GATES
from benchmarks.quality_judge import Verdict, judge
from benchmarks.quality_rows import LEVELS, QualityRow
from nvfp4_pallas.dispatch import IMPLEMENTATIONS

if TYPE_CHECKING:
  from benchmarks.quality_model import Plan

PLANS = ("full", "levers")


def main(argv: list[str]) -> int:
  parser = argparse.ArgumentParser(prog="python3 -m benchmarks quality", description=__doc__)
  parser.add_argument(
    "--levels", nargs="+", choices=LEVELS, default=["format", "attention"], metavar="LEVEL"
  )
  parser.add_argument(
    "--smoke", action="store_true", help="few configs and short contexts, one to two minutes"
  )
  parser.add_argument(
    "--implementation",
    choices=IMPLEMENTATIONS,
    metavar="NAME",
    help="who runs the operations; default: the device's",
  )
  parser.add_argument(
    "--configs",
    nargs="+",
    choices=quality_configs.BY_NAME,
    metavar="CONFIG",
    help="of level model; default: all",
  )
  parser.add_argument(
    "--plan",
    choices=PLANS,
    help="of level model: everything (full, the default), or levers: one text at 1,024 tokens, "
    "which a CPU reads in minutes",
  )
  parser.add_argument("--context", type=int, help="of level model, plan full; default: 8192")
  parser.add_argument("--model", type=pathlib.Path, help="of level model: where its files are")
  parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/quality.jsonl"))
  parser.add_argument("--plot", type=pathlib.Path, metavar="DIR", help="also draw pictures there")
  parser.add_argument("--committed", action="store_true", help="measure nothing, show what is kept")
  options = parser.parse_args(argv)
  try:
    return _run(options)
  except WrongArgument as error:
    parser.error(str(error))


class WrongArgument(Exception):
  """Something that was given on the command line; the message names it, its rule and its value."""


def _run(options: argparse.Namespace) -> int:
  if options.committed:
    rows = _committed()
    if not rows:
      print("no rows are committed: `python3 -m benchmarks quality --out FILE` makes them")
      return 1
    status = report(rows, list(LEVELS))
  else:
    plan = _plan(options)
    _check_files(options)
    loaded = _load(options.model) if "model" in options.levels else None
    try:
      rows = measure(options, plan, loaded)
    except NotImplementedError as error:  # by a named implementation that cannot run
      raise WrongArgument(f"--implementation {options.implementation}: {error}") from error
    quality_rows.write(rows, options.out)
    contexts = None if plan is None else [plan.context]
    status = report(
      rows,
      options.levels,
      smoke=options.smoke,
      contexts=contexts,
      implementation=options.implementation,
    )
    print(f"\nRows: {options.out}")
  if options.plot:
    from benchmarks import quality_plot

    try:
      drawn = quality_plot.draw(rows, options.plot)
    except ImportError as error:
      raise WrongArgument(
        f"--plot needs matplotlib, which the extra `reports` installs: {error}"
      ) from error
    print("Drawn: " + ", ".join(map(str, drawn)))
  return status


def _committed() -> list[QualityRow]:
  path = quality_rows.COMMITTED
  try:
    return quality_rows.read(path) if path.exists() else []
  except ValueError as error:
    raise WrongArgument(f"--committed: {error}") from error


def _plan(options: argparse.Namespace) -> Plan | None:
  """What level model measures; None where it is not asked for."""
  if "model" not in options.levels:
    for name in ("configs", "plan", "context", "model"):
      if (value := getattr(options, name)) is not None:
        raise WrongArgument(f"--{name} is of level model, which --levels must name, got {value}")
    return None
  from benchmarks import quality_model

  if options.smoke:
    for name in ("plan", "context"):
      if (value := getattr(options, name)) is not None:
        raise WrongArgument(f"--{name} must not be given with --smoke, got {value}")
    for name in options.configs or ():
      if name not in quality_model.SMOKE_CONFIGS:
        some = ", ".join(quality_model.SMOKE_CONFIGS)
        raise WrongArgument(f"--configs must be of {some} with --smoke, got {name}")
    return quality_model.SMOKE
  if options.plan == "levers":
    if options.context is not None:
      raise WrongArgument(f"--context must not be given with --plan levers, got {options.context}")
    return quality_model.LEVERS
  try:
    return quality_model.full_plan(8192 if options.context is None else options.context)
  except ValueError as error:
    raise WrongArgument(f"--{error}") from error


def _check_files(options: argparse.Namespace) -> None:
  """Before hours of measuring: that the results can be written."""
  for name, path, of_folder in (("out", options.out, False), ("plot", options.plot, True)):
    if path is None:
      continue
    folder = path if of_folder else path.parent
    try:
      folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
      raise WrongArgument(f"--{name} must lie in a folder, got {path}: {error}") from error
    if not of_folder and path.is_dir():
      raise WrongArgument(f"--{name} must be a file, got the folder {path}")


def _load(path: pathlib.Path | None):
  from benchmarks import quality_model

  Progress(1).step("the model and its texts")
  try:
    return quality_model.load(path)
  except (ValueError, OSError, ImportError) as error:
    given = "the pinned SmolLM2, as none was given" if path is None else path
    raise WrongArgument(
      f"--model must be what a Llama can be read from, got {given}: {error}"
    ) from error


def measure(options: argparse.Namespace, plan: Plan | None, loaded) -> list[QualityRow]:
  """Rows of the levels; plan and loaded: of level model (quality_model.load)."""
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
  if plan is not None:
    from benchmarks import quality_model

    names = options.configs or (quality_model.SMOKE_CONFIGS if smoke else quality_configs.BY_NAME)
    rows += quality_model.measure(
      [quality_configs.BY_NAME[name] for name in names],
      plan,
      loaded,
      implementation=implementation,
      progress=Progress,
    )
  return rows


def report(rows: list[QualityRow], levels: list[str], **asked) -> int:
  """Prints tables and gates; 0, or 1 where a gate fails. `asked`: as for verdicts_of."""
  for level in levels:
    print("\n".join([f"== {level}", *quality_table.of_rows(rows, level), ""]))
  current = [row for row in rows if not row.stale]
  if len(current) < len(rows):
    print(f"{len(rows) - len(current)} of {len(rows)} rows are stale; gates judge the others\n")
  verdicts = verdicts_of(current, levels, **asked)
  print("\n".join(quality_table.of_verdicts(verdicts)))
  failed = [verdict.gate.name for verdict in verdicts if verdict.passed is False]
  if failed:
    print(f"FAILED: {'; '.join(failed)}")
  return 1 if failed else 0


def verdicts_of(
  rows: list[QualityRow],
  levels: list[str],
  *,
  smoke: bool = False,
  contexts: list[int] | None = None,
  implementation: str | None = None,
) -> list[Verdict]:
  """implementation: that was asked for by name, if one was."""
  # Kernels' rows say by themselves how they compare with the definition. On a GPU there should be
  # some: that none ran is found by the gates that ask for them.
  of_kernels = lambda row: "xla" != row.implementation or row.device != "cpu"
  return judge(
    rows,
    levels,
    gates=GATES,
    smoke=smoke,
    kernels=implementation != "xla"
    and any(row.level == "attention" and of_kernels(row) for row in rows),
    contexts=contexts,
  )
