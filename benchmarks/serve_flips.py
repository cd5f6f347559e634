"""How far a request mix, or the pool, must change until another format takes less time.

A dial is one number of the experiment: the share of prompts that is reused, tokens of the output,
GiB of the pool. It is turned stop by stop away from where it stands, both ways, and both formats
are simulated at every stop; between the first stop at which the other one is ahead and the one
before, the place is found by bisection. What happens between two stops at which nothing changed is
not seen, and where a pool is too small for some request nothing is compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from benchmarks import serve_options
from benchmarks.serve_formats import FORMATS
from benchmarks.serve_setup import GIB, Setup
from benchmarks.serve_workloads import Workload

HALVINGS = 6  # of a bisection: to a 64th of what is between two stops
REUSES = (0.0, 0.25, 0.5, 0.75, 0.95)
FACTORS = (2.0, 4.0, 8.0)  # of an output or a pool, and their inverses


@dataclasses.dataclass(frozen=True)
class Dial:
  """One number of the experiment.

  Attributes:
    name: with its unit.
    at: where it stands.
    down, up: stops, the nearest first.
    make: the server and its requests with another number.
    digits: that are told behind the point at most.
  """

  name: str
  at: float
  down: tuple[float, ...]
  up: tuple[float, ...]
  make: Callable[[float], tuple[Setup, Workload]]
  digits: int = 2

  def told(self, value: float) -> str:
    return f"{round(value, self.digits):,.10g}"


def dials(options: argparse.Namespace, setup: Setup, workload: Workload) -> list[Dial]:
  """Of a command's options, as serve_options reads them: reuse and output of generated requests,
  and the pool."""
  gib = setup.pool_bytes / GIB
  pool = lambda value: (dataclasses.replace(setup, pool_bytes=round(value * GIB)), workload)
  scaled = lambda at: (tuple(at / f for f in FACTORS), tuple(at * f for f in FACTORS))
  found = [Dial("GiB of the pool", gib, *scaled(gib), pool)]
  if options.trace is not None:
    return found

  def remade(name: str, value: float) -> tuple[Setup, Workload]:
    return setup, serve_options.generated(argparse.Namespace(**{**vars(options), name: value}))

  at = options.reuse
  less, more = tuple(r for r in REUSES[::-1] if r < at), tuple(r for r in REUSES if r > at)
  down, up = scaled(options.output)
  down = tuple(value for value in down if value >= 1)
  return [
    Dial("reuse", at, less, more, lambda value: remade("reuse", value)),
    Dial(
      "output tokens", options.output, down, up, lambda value: remade("output", round(value)), 0
    ),
    *found,
  ]


class Mix:
  """Dials, and what was simulated for them."""

  def __init__(self, dials: Sequence[Dial]):
    self._dials = dials
    self._seconds: dict[tuple[str, float, str], float | None] = {}

  def flips(self, ahead: str, behind: str) -> Iterator[tuple[str, str, str]]:
    """Where the format that is ahead no longer is: (of what, as it is, as it would have to be)."""
    for dial in self._dials:
      leads = lambda value, dial=dial: self._leads(dial, value, ahead, behind)
      for stops in (dial.down, dial.up):
        value = first_loss(leads, dial.at, stops)
        if value is not None:
          yield dial.name, dial.told(dial.at), dial.told(value)

  def tried(self, *names: str) -> Iterator[str]:
    """How far dials were turned while these formats could be compared."""
    for dial in self._dials:
      places = [dial.at]
      for value in (*dial.down, *dial.up):
        if all(self._seconds.get((dial.name, value, name)) is not None for name in names):
          places.append(value)
      if len(places) > 1:
        yield f"{dial.name} from {dial.told(min(places))} to {dial.told(max(places))}"

  def _leads(self, dial: Dial, value: float, ahead: str, behind: str) -> bool | None:
    mine, other = (self._simulated(dial, value, name) for name in (ahead, behind))
    return None if mine is None or other is None else mine <= other

  def _simulated(self, dial: Dial, value: float, name: str) -> float | None:
    """Seconds of the device; None: not all requests fit into the pool."""
    key = dial.name, value, name
    if key not in self._seconds:
      setup, workload = dial.make(value)
      try:
        run = setup.simulate(workload, FORMATS[name])
        self._seconds[key] = None if run.rejected else run.times.total
      except ValueError:  # not a page
        self._seconds[key] = None
    return self._seconds[key]


def first_loss(
  leads: Callable[[float], bool | None], at: float, stops: Sequence[float]
) -> float | None:
  """Where a lead is lost on the way from `at` over `stops`; None: it is not, or not before it
  cannot be told."""
  before = at
  for stop in stops:
    lead = leads(stop)
    if lead is None:
      return None
    if not lead:
      for _ in range(HALVINGS):
        middle = math.sqrt(before * stop) if before * stop > 0 else (before + stop) / 2
        if leads(middle) is False:
          stop = middle
        else:
          before = middle
      return stop
    before = stop
  return None
