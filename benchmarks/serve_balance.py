"""The break-even condition of a cache format as a sum that a person can follow.

    a format's time = FP8's time
      + its kernels' extra time on tokens that it computes      (cold, missed, recomputed)
      + its appends' extra time
      + its decodes' extra time                                 (faster: below 0)
      - tokens that it finds in the cache and FP8 does not      x FP8's time for a prompt token
      - tokens that it need not compute again                   x the same
      - steps without a prompt that it need not take            x FP8's time for one
      + its prompt tokens                                       x what one takes more in its steps
      + its steps without a prompt                              x what one takes more

The first three lines compare kernels on the same steps, those of the format's own run; the others
compare both runs at FP8's prices: a prompt token takes its share of the step that reads it, weights
and requests that decode beside it included, and the last two lines say how that share and a step
changed since others are in it. No line is what the others leave: that they sum to the difference
can be tested.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from benchmarks.serve_costs import StepCosts, Times
from benchmarks.serve_formats import BASELINE, Format
from benchmarks.serve_run import Run, serve
from benchmarks.serve_scheduler import Request, Step, TooLarge
from benchmarks.serve_setup import Setup
from benchmarks.serve_workloads import Workload


@dataclasses.dataclass
class TwoPrices:
  """An executor that takes one format's time, and adds up what FP8's kernels would take for the
  same steps: `reading` those with some of a prompt, `writing` the others."""

  costs: StepCosts
  base_costs: StepCosts
  reading: Times = dataclasses.field(default_factory=Times)
  writing: Times = dataclasses.field(default_factory=Times)

  def execute(self, step: Step) -> Times:
    part = self.reading if step.chunks else self.writing
    part += self.base_costs.times(step)
    return self.costs.times(step)


@dataclasses.dataclass(frozen=True)
class Term:
  """One line of the sum: count * price = seconds, in a format over FP8.

  Attributes:
    name: what it is.
    count: of units.
    seconds: below 0 where the format saves.
    unit: tokens or steps.
  """

  name: str
  count: int
  seconds: float
  unit: str = "tokens"

  @property
  def price(self) -> float | None:
    """Seconds a unit; None where there is nothing to count."""
    return self.seconds / self.count if self.count else None


@dataclasses.dataclass(frozen=True)
class Balance:
  """A format against FP8 under the same requests.

  Attributes:
    format: which.
    base, run: FP8's run and the format's.
    reading_at_base, writing_at_base: FP8's kernels on the format's steps, as for TwoPrices.
  """

  format: Format
  base: Run
  run: Run
  reading_at_base: Times
  writing_at_base: Times

  @property
  def at_base(self) -> Times:
    return self.reading_at_base + self.writing_at_base

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
    write = base.writing.total / base.writing_steps if base.writing_steps else 0.0
    again = base.scheduler.recomputed - run.scheduler.recomputed
    found = base.prefill_tokens - run.prefill_tokens - again
    fewer = base.writing_steps - run.writing_steps
    fuller = self.reading_at_base.total - run.prefill_tokens * read
    larger = self.writing_at_base.total - run.writing_steps * write
    return [
      Term("prefill kernels", run.prefill_tokens, times.prefill - at_base.prefill),
      Term("append kernels", run.prefill_tokens + run.decode_tokens, times.append - at_base.append),
      Term("decode kernels", run.decode_tokens, times.decode - at_base.decode),
      Term("prompt tokens found in the cache", found, -found * read),
      Term("tokens not computed again", again, -again * read),
      Term("steps without a prompt, not taken", fewer, -fewer * write, "steps"),
      Term("prompt tokens in other steps", run.prefill_tokens, fuller),
      Term("steps without a prompt, by load", run.writing_steps, larger, "steps"),
    ]

  def flips(self, rival: Balance | None = None) -> Iterator[tuple[str, str, str]]:
    """What would make the format take as long as another one, or as FP8, all else as it is: (of
    what, as it is, as it would have to be). Only what can do it alone: ratios of kernels stay
    above 0."""
    times, at_base = self.run.times, self.at_base
    gap = self.extra if rival is None else self.seconds - rival.seconds
    for name, own, base in (
      ("prefill kernels", times.prefill, at_base.prefill),
      ("decode kernels", times.decode, at_base.decode),
    ):
      if base and own - gap > 0:
        yield f"{name} over FP8's", f"{own / base:.2f}", f"{(own - gap) / base:.2f}"
    if rival is not None:  # pages are counted against FP8's alone
      return
    saved = -sum(term.seconds for term in self.terms[3:])
    # Both signs of saving make sense: a format that loses would have to save more by its pages.
    if saved > 0 and saved + self.extra > 0:
      yield "seconds saved by pages", f"{saved:.2f}", f"{saved + self.extra:.2f}"


def rejections(setup: Setup, workload: Workload, format: Format) -> dict[int, str]:
  """Requests that a format's pool cannot hold, by their place in the workload, and why."""
  scheduler = setup.scheduler(format)
  found = {}
  for index, item in enumerate(workload.items):
    try:
      scheduler.add(Request(index, item))
    except TooLarge as error:
      found[index] = str(error)
  return found


def balance(setup: Setup, workload: Workload, format: Format, base: Run) -> Balance:
  """Simulates a format; `base` is FP8's run of the same workload and setup.

  Raises:
    ValueError: one pool holds requests that the other one does not, so that no times of both can be
      compared; or the format's costs were not measured.
  """
  executor = TwoPrices(setup.step_costs(format), setup.step_costs(BASELINE))
  run = serve(
    workload,
    setup.scheduler(format),
    executor,
    concurrency=setup.concurrency,
    time_scale=setup.time_scale,
  )
  served, by_base = _served(run), _served(base)
  if served != by_base:
    raise ValueError(
      f"format must serve the requests that FP8 serves, got {len(served):,} of {format.name} and "
      f"{len(by_base):,} of FP8"
    )
  return Balance(format, base, run, executor.reading, executor.writing)


def _served(run: Run) -> set[int]:
  return {t.request.index for t in run.timelines if t.finished is not None}
