"""The break-even condition of a cache format as a sum that a person can follow.

    a format's time = FP8's time
      + its kernels' extra time on tokens that it computes      (cold, missed, recomputed)
      + its appends' extra time
      + its decodes' extra time                                 (faster: below 0)
      - tokens that it finds in the cache and FP8 does not      x FP8's time for a prompt token
      - tokens that it need not compute again                   x the same
      - what is left: more requests share a step, and its weights

The first three lines compare kernels on the same steps, those of the format's own run; the others
compare both runs at FP8's prices. Nothing is left over: the lines sum to the difference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from benchmarks.serve_costs import StepCosts, Times
from benchmarks.serve_formats import BASELINE, Format
from benchmarks.serve_run import Run, serve
from benchmarks.serve_scheduler import Step
from benchmarks.serve_setup import Setup
from benchmarks.serve_workloads import Workload


@dataclasses.dataclass
class TwoPrices:
  """An executor that takes one format's time, and adds up what FP8's kernels would take for the
  same steps."""

  costs: StepCosts
  base_costs: StepCosts
  base: Times = dataclasses.field(default_factory=Times)

  def execute(self, step: Step) -> Times:
    self.base += self.base_costs.times(step)
    return self.costs.times(step)


@dataclasses.dataclass(frozen=True)
class Term:
  """One line of the sum: count * price = seconds, in a format over FP8.

  Attributes:
    name: what it is.
    count: tokens; None where there is nothing to count.
    seconds: below 0 where the format saves.
  """

  name: str
  count: int | None
  seconds: float

  @property
  def price(self) -> float | None:
    """Seconds a token."""
    return self.seconds / self.count if self.count else None


@dataclasses.dataclass(frozen=True)
class Balance:
  """A format against FP8 under the same requests.

  Attributes:
    format: which.
    base, run: FP8's run and the format's.
    at_base: FP8's kernels on the format's steps.
  """

  format: Format
  base: Run
  run: Run
  at_base: Times

  @property
  def seconds(self) -> float:
    """That the device is busy with the format's run."""
    return self.run.times.total

  @property
  def extra(self) -> float:
    """Over FP8's; below 0 where the format pays."""
    return self.seconds - self.base.times.total

  @property
  def terms(self) -> list[Term]:
    run, base, times, at_base = self.run, self.base, self.run.times, self.at_base
    # What FP8 takes to read a prompt token, its share of weights and of those who decode with it.
    read = base.reading.total / base.prefill_tokens if base.prefill_tokens else 0.0
    again = base.scheduler.recomputed - run.scheduler.recomputed
    found = base.prefill_tokens - run.prefill_tokens - again
    terms = [
      Term("prefill kernels", run.prefill_tokens, times.prefill - at_base.prefill),
      Term("append kernels", run.prefill_tokens + run.decode_tokens, times.append - at_base.append),
      Term("decode kernels", run.decode_tokens, times.decode - at_base.decode),
      Term("prompt tokens found in the cache", found, -found * read),
      Term("tokens not computed again", again, -again * read),
    ]
    left = self.extra - sum(term.seconds for term in terms)
    return [*terms, Term("steps shared by more requests", None, left)]

  def flips(self) -> Iterator[tuple[str, float, float]]:
    """What would make the format break even, all else as it is: (of what, as it is, as it would
    have to be). Only what can do it alone: ratios of kernels stay above 0."""
    times, at_base = self.run.times, self.at_base
    for name, own, base in (
      ("prefill kernels", times.prefill, at_base.prefill),
      ("decode kernels", times.decode, at_base.decode),
    ):
      if base and own - self.extra > 0:
        yield f"{name} over FP8's", own / base, (own - self.extra) / base
    saved = -sum(term.seconds for term in self.terms[3:])
    # Both signs of saving make sense: a format that loses would have to save more by its pages.
    if saved > 0 and saved + self.extra > 0:
      yield "seconds saved by pages", saved, saved + self.extra


def balance(setup: Setup, workload: Workload, format: Format, base: Run) -> Balance:
  """Simulates a format; `base` is FP8's run of the same workload and setup."""
  executor = TwoPrices(setup.step_costs(format), setup.step_costs(BASELINE))
  run = serve(
    workload,
    setup.scheduler(format),
    executor,
    concurrency=setup.concurrency,
    time_scale=setup.time_scale,
  )
  return Balance(format, base, run, executor.base)
