"""A serving run: a workload, a scheduler, and somebody who computes its steps.

`serve` is the one loop of both kinds of run. An executor computes a step and says how long it took:
the simulator looks that up (SimulatedExecutor), the live engine does it. Time is the sum of these,
and where nothing is left to do it jumps to the next arrival; so a live run waits for nobody, and
what is decided never depends on a clock unless arrivals do.
"""

from __future__ import annotations

import array
import dataclasses
import math
from collections import deque
from collections.abc import Callable
from typing import Protocol

from benchmarks.serve_costs import StepCosts, Times
from benchmarks.serve_scheduler import Request, Scheduler, Step, TooLarge
from benchmarks.serve_workloads import Workload


class Executor(Protocol):
  def execute(self, step: Step) -> Times:
    """Computes a step that was scheduled and is not complete yet."""
    ...


@dataclasses.dataclass(frozen=True)
class SimulatedExecutor:
  costs: StepCosts

  def execute(self, step: Step) -> Times:
    return self.costs.times(step)


@dataclasses.dataclass
class Timeline:
  """When what happened to a request, in seconds from the start; None: not yet.

  Attributes:
    request: and its counts.
    arrival: when it came to the scheduler.
    started: when its first step began.
    first: when its first token was there.
    latest: its newest token.
    finished: its last one.
  """

  request: Request
  arrival: float
  started: float | None = None
  first: float | None = None
  latest: float = 0.0
  finished: float | None = None


SAMPLED = 10.0  # seconds between two lines of vLLM's log, which is where others read peaks


@dataclasses.dataclass
class Usage:
  """The share of held pages over time, and who runs: as every step has it, for as long as it takes.

  Attributes:
    peak, peak_running: of all steps.
    seen, seen_running: of those under way when SAMPLED seconds are over: what a log shows.
    seconds: of all steps.
  """

  peak: float = 0.0
  peak_running: int = 0
  seen: float = 0.0
  seen_running: int = 0
  seconds: float = 0.0
  _sum: float = 0.0

  def step(self, usage: float, running: int, seconds: float) -> None:
    self.peak = max(self.peak, usage)
    self.peak_running = max(self.peak_running, running)
    if (self.seconds + seconds) // SAMPLED > self.seconds // SAMPLED:
      self.seen = max(self.seen, usage)
      self.seen_running = max(self.seen_running, running)
    self._sum += usage * seconds
    self.seconds += seconds

  @property
  def mean(self) -> float:
    return self._sum / self.seconds if self.seconds else 0.0


@dataclasses.dataclass
class Run:
  """What happened.

  Attributes:
    workload: its name.
    scheduler: with the pool, and what both counted.
    timelines: of all requests that were accepted, in the order of their arrival.
    rejected: messages of those that were not.
    error: why the workload ended early, or that the run was interrupted; or None.
    wall: seconds until the last token.
    reading: by phase, of steps that read some of a prompt.
    writing: of the others.
    prefill_tokens: computed by chunks, again or not.
    decode_tokens: computed one at a time.
    steps, writing_steps: how many, and how many of them read nothing of a prompt.
    gaps: seconds between a request's tokens.
    usage: of the pool.
    decisions, seconds: of every step, if they were asked for; a step in which somebody gave way and
      nobody else was there takes none.
  """

  workload: str
  scheduler: Scheduler
  timelines: list[Timeline] = dataclasses.field(default_factory=list)
  rejected: list[str] = dataclasses.field(default_factory=list)
  error: str | None = None
  wall: float = 0.0
  reading: Times = dataclasses.field(default_factory=Times)
  writing: Times = dataclasses.field(default_factory=Times)
  prefill_tokens: int = 0
  decode_tokens: int = 0
  steps: int = 0
  writing_steps: int = 0
  gaps: array.array = dataclasses.field(default_factory=lambda: array.array("d"))
  usage: Usage = dataclasses.field(default_factory=Usage)
  decisions: list[tuple] = dataclasses.field(default_factory=list)
  seconds: list[float] = dataclasses.field(default_factory=list)

  @property
  def times(self) -> Times:
    """By phase, of all steps."""
    return self.reading + self.writing

  def _count(self, step: Step, times: Times) -> None:
    part = self.reading if step.chunks else self.writing
    part += times
    self.wall += times.total
    self.steps += 1
    self.writing_steps += not step.chunks
    self.prefill_tokens += step.chunk_tokens
    self.decode_tokens += len(step.decodes)
    scheduler = self.scheduler
    self.usage.step(scheduler.pool.usage, len(scheduler.running), times.total)

  def _write(self, of: Timeline) -> None:
    if of.first is None:
      of.first = self.wall
    else:
      self.gaps.append(self.wall - of.latest)
    of.latest = self.wall


class Interrupted(KeyboardInterrupt):
  """A run that was interrupted: who wants no part of a run lets it pass.

  Attributes:
    run: as far as it came; its `error` says so.
  """

  def __init__(self, run: Run):
    super().__init__(run.error)
    self.run = run


def serve(
  workload: Workload,
  scheduler: Scheduler,
  executor: Executor,
  *,
  concurrency: int | None = None,
  time_scale: float = 1.0,
  keep_decisions: bool = False,
  after_step: Callable[[Scheduler, Step], None] | None = None,
) -> Run:
  """Runs a workload to its end.

  Args:
    workload: requests that are too large for the pool are rejected, and the others go on.
    scheduler: with nothing in it yet.
    concurrency: so many requests are under way at a time, and the next one comes when one is done,
      whatever its arrival; None: they come when they arrive.
    time_scale: arrivals are so many times as far apart.
    keep_decisions: whether the run lists what every step decided, and how long it took.
    after_step: called when a step is complete, for tests.

  Raises:
    Interrupted: by the user, wherever that was.
  """
  if concurrency is not None and concurrency < 1:
    raise ValueError(f"concurrency must be at least 1, got {concurrency}")
  if not 0 < time_scale < math.inf:
    raise ValueError(f"time_scale must be positive and finite, got {time_scale}")
  run = Run(workload.name, scheduler, error=workload.error)
  clients = _Clients(workload, run, concurrency, time_scale)
  try:
    _serve(run, clients, executor, keep_decisions, after_step)
  except KeyboardInterrupt:
    run.error = f"interrupted in step {run.steps:,}"
    raise Interrupted(run) from None
  return run


def _serve(
  run: Run,
  clients: _Clients,
  executor: Executor,
  keep_decisions: bool,
  after_step: Callable[[Scheduler, Step], None] | None,
) -> None:
  timelines: dict[Request, Timeline] = {}
  scheduler = run.scheduler
  while clients.send(timelines):
    step = scheduler.schedule()
    for request in step.started:
      if timelines[request].started is None:
        timelines[request].started = run.wall
    # No tokens: somebody gave way, and nobody else was there.
    times = executor.execute(step) if step.tokens else Times()
    if keep_decisions:
      run.decisions.append(step.decision())
      run.seconds.append(times.total)
    if not step.tokens:
      continue
    run._count(step, times)
    wrote, done = scheduler.complete(step)
    for request in wrote:
      run._write(timelines[request])
    for request in done:
      timelines.pop(request).finished = run.wall
    if after_step is not None:
      after_step(scheduler, step)


class _Clients:
  """Who sends requests, and when."""

  def __init__(self, workload: Workload, run: Run, concurrency: int | None, time_scale: float):
    self._coming = deque(enumerate(workload.items))
    self._run, self._concurrency, self._scale = run, concurrency, time_scale

  def send(self, under_way: dict[Request, Timeline]) -> bool:
    """Adds requests that are due, moving the clock where nothing else is left to do; whether any
    are under way then."""
    run = self._run
    while self._coming and (self._concurrency is None or len(under_way) < self._concurrency):
      index, item = self._coming[0]
      arrival = run.wall
      if self._concurrency is None:
        arrival = self._scale * item.arrival
        if arrival > run.wall:
          if under_way:
            break
          run.wall = arrival
      self._coming.popleft()
      request = Request(index, item)
      try:
        run.scheduler.add(request)
      except TooLarge as error:
        run.rejected.append(str(error))
        continue
      under_way[request] = Timeline(request, arrival)
      run.timelines.append(under_way[request])
    return bool(under_way)
