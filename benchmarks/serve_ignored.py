"""Options that a command would ignore: an error, lest somebody believes in what was not done."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

GENERATED = frozenset(
  ("requests", "prompt", "output", "spread", "reuse", "documents", "interval", "poisson", "seed")
)
_LIVE = frozenset(("layers", "implementation", "compilers", "revision", "write_model_costs"))
_SWEPT = frozenset(("trace", "limit", "keep", "reuse", "interval", "poisson", "time_scale", "slo"))
_OF_REUSE = GENERATED - _SWEPT
_IGNORED = {
  "capacity": _SWEPT | (_OF_REUSE - {"output"}) | {"concurrency"},
  "reuse": _SWEPT,
}


def parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
  """Options of a command line; `given` has the names of those that it spells out.

  An option that would be ignored ends the program, as one that there is not does.
  """
  options = parser.parse_args(argv)
  unset = object()
  marked = argparse.Namespace(**dict.fromkeys(vars(options), unset))
  found = vars(parser.parse_args(argv, marked))
  options.given = frozenset(name for name, value in found.items() if value is not unset)
  for names, why in _ignored(options):
    for name in sorted(names & options.given):
      parser.error(f"--{name.replace('_', '-')} {why}")
  return options


def _ignored(options: argparse.Namespace) -> Iterator[tuple[frozenset[str], str]]:
  """(names, why they say nothing here)."""
  case, sweep = getattr(options, "case", None), getattr(options, "sweep", None)
  live = getattr(options, "live", False)
  if case is not None:
    yield options.given - {"simulate", "live", "case"}, "is not for --case, whose server is given"
  if sweep is not None:
    yield _IGNORED[sweep], f"is not for --sweep {sweep}"
  elif options.trace is not None:
    yield GENERATED, "is of generated requests, not of --trace"
  else:
    yield frozenset(("limit",)), "needs --trace"
  if live:
    yield frozenset(("model_costs",)), "is for --simulate: --live times the model itself"
    yield frozenset(("recent_window",)), "is for --simulate: --live has caches without a window"
    yield frozenset(("costs",)), "is for --simulate: --live compares with the measured ones"
  else:
    yield _LIVE, "is for --live"
