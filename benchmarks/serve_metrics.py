"""What a serving run came to, under the names that vLLM's metrics have.

Latencies are percentiles over requests; inter-token latency is over all gaps between two tokens of
a request. Requests of whose prompt less than a tenth was found in the cache are `cold`, the others
`hits`: apart, since a shorter time to the first token by more hits is no faster kernel, and a hit
that saves hardly anything is none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from benchmarks.serve_run import Run, Timeline

SHARES = (50, 90, 99)
USEFUL = 0.1  # of a prompt, that makes a hit


@dataclasses.dataclass(frozen=True)
class Slo:
  """What a request must keep to count as served well: seconds to the first token, and between its
  tokens on average."""

  time_to_first_token: float = 2.0
  inter_token_latency: float = 0.1

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if not value > 0:
        raise ValueError(f"slo's {field.name} must be positive seconds, got {value}")

  def kept_by(self, of: Timeline) -> bool:
    if of.finished is None or of.first is None:
      return False
    gaps = of.request.item.output - 1
    between = (of.finished - of.first) / gaps if gaps else 0.0
    first = of.first - of.arrival
    return first <= self.time_to_first_token and between <= self.inter_token_latency


@dataclasses.dataclass(frozen=True)
class Percentiles:
  p50: float
  p90: float
  p99: float

  @classmethod
  def of(cls, values: Sequence[float]) -> Percentiles | None:
    """None where there are no values."""
    return cls(*map(float, np.percentile(values, SHARES))) if len(values) else None


@dataclasses.dataclass(frozen=True)
class Prompts:
  """Of requests that started cold, or with a hit.

  Attributes:
    requests: that have their first token.
    prompt_tokens, cached_tokens: of them together.
    time_to_first_token_seconds: from arrival.
  """

  requests: int
  prompt_tokens: int
  cached_tokens: int
  time_to_first_token_seconds: Percentiles | None

  @classmethod
  def of(cls, timelines: Iterable[Timeline]) -> Prompts:
    found = [t for t in timelines if t.first is not None]
    return cls(
      len(found),
      sum(t.request.prompt for t in found),
      sum(t.request.cached or 0 for t in found),
      Percentiles.of([t.first - t.arrival for t in found if t.first is not None]),
    )


@dataclasses.dataclass(frozen=True)
class Metrics:
  """Of a run.

  Attributes:
    request_success, rejected: requests that were served to their end, and that were refused.
    wall_seconds: from the start to the last token.
    prompt_tokens, generation_tokens: of requests that were served, whatever was computed again.
    prompt_tokens_per_second, generation_tokens_per_second: of them over wall_seconds.
    request_goodput: requests a second that kept the SLO.
    time_to_first_token_seconds, inter_token_latency_seconds, e2e_request_latency_seconds,
      request_queue_time_seconds: the last is from arrival to the first step.
    num_preemptions, recomputed_tokens, evictions: evictions are pages with a key, reused.
    short_steps: in which somebody gave way, or did not start, for want of pages.
    num_requests_running: the peak.
    kv_cache_usage_perc, kv_cache_usage_mean: the peak of a step, and the mean over time; shares.
    sampled_running, sampled_usage: peaks of what a log line every ten seconds would show.
    prefix_cache_queries, prefix_cache_hits: tokens, when requests first start.
    cold, hits: prompts by what of them was cached.
    seconds: by phase.
    decode_tokens: computed one at a time.
    steps: how many.
  """

  request_success: int
  rejected: int
  wall_seconds: float
  prompt_tokens: int
  generation_tokens: int
  prompt_tokens_per_second: float
  generation_tokens_per_second: float
  request_goodput: float
  time_to_first_token_seconds: Percentiles | None
  inter_token_latency_seconds: Percentiles | None
  e2e_request_latency_seconds: Percentiles | None
  request_queue_time_seconds: Percentiles | None
  num_preemptions: int
  recomputed_tokens: int
  evictions: int
  short_steps: int
  num_requests_running: int
  kv_cache_usage_perc: float
  kv_cache_usage_mean: float
  sampled_running: int
  sampled_usage: float
  prefix_cache_queries: int
  prefix_cache_hits: int
  cold: Prompts
  hits: Prompts
  seconds: dict[str, float]
  decode_tokens: int
  steps: int

  @property
  def hit_share(self) -> float:
    return self.prefix_cache_hits / max(self.prefix_cache_queries, 1)


def _hit(of: Timeline) -> bool:
  return (of.request.cached or 0) >= USEFUL * of.request.prompt


def measure(run: Run, slo: Slo | None = None) -> Metrics:
  slo = Slo() if slo is None else slo
  timelines, scheduler, wall = run.timelines, run.scheduler, run.wall
  done = [t for t in timelines if t.finished is not None]
  started = [t for t in timelines if t.started is not None]
  prompt = sum(t.request.prompt for t in done)
  generated = sum(t.request.generated for t in done)
  a_second = lambda count: count / wall if wall else 0.0
  return Metrics(
    request_success=len(done),
    rejected=len(run.rejected),
    wall_seconds=wall,
    prompt_tokens=prompt,
    generation_tokens=generated,
    prompt_tokens_per_second=a_second(prompt),
    generation_tokens_per_second=a_second(generated),
    request_goodput=a_second(sum(map(slo.kept_by, done))),
    time_to_first_token_seconds=Prompts.of(timelines).time_to_first_token_seconds,
    inter_token_latency_seconds=Percentiles.of(run.gaps),
    e2e_request_latency_seconds=Percentiles.of([t.finished - t.arrival for t in done]),
    request_queue_time_seconds=Percentiles.of([t.started - t.arrival for t in started]),
    num_preemptions=scheduler.preemptions,
    recomputed_tokens=scheduler.recomputed,
    evictions=scheduler.pool.evictions,
    short_steps=scheduler.short_steps,
    num_requests_running=run.usage.peak_running,
    kv_cache_usage_perc=run.usage.peak,
    kv_cache_usage_mean=run.usage.mean,
    sampled_running=run.usage.seen_running,
    sampled_usage=run.usage.seen,
    prefix_cache_queries=scheduler.queries,
    prefix_cache_hits=scheduler.hits,
    cold=Prompts.of(t for t in timelines if not _hit(t)),
    hits=Prompts.of(t for t in timelines if _hit(t)),
    seconds=dataclasses.asdict(run.times),
    decode_tokens=run.decode_tokens,
    steps=run.steps,
  )
