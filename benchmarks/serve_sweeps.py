"""Where a smaller cache earns its place: formats against FP8 over many simulated servers.

    capacity  context length and concurrency, a closed loop of equal requests that share nothing: up
              to where FP8 first runs out of pages, from there on, and where the other one does too
    reuse     the share of a prompt that begins a document from 0 to 95 %, other things equal

A server is out of pages when somebody waits or gives way for want of them, which the scheduler
counts. Where formats serve different requests, since a pool is too small for some, no time is
compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from benchmarks.serve_formats import BASELINE, Format
from benchmarks.serve_metrics import Metrics, measure
from benchmarks.serve_setup import Setup
from benchmarks.serve_table import table
from benchmarks.serve_workloads import generate, ideal_hit_share

SWEEPS = ("capacity", "reuse")
CONTEXTS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
CONCURRENCIES = (2, 4, 8, 16, 32, 64, 128, 256)
ROUNDS = 2  # requests of each client
MARKS = {"": "", BASELINE.name: "*", "both": "+"}  # of regions
REUSES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95)


@dataclasses.dataclass(frozen=True)
class Point:
  """One server in FP8 and in another format, with the same requests.

  Attributes:
    context, concurrency: tokens of a request, prompt and output, and requests under way.
    reuse: the share of a prompt that begins a document; 0 for `capacity`.
    findable: the share of all prompt tokens that a pool without end would find: the first prompt
      of every document is cold.
    base, other: of FP8 and the other format.
  """

  context: int
  concurrency: int
  reuse: float
  findable: float
  base: Metrics
  other: Metrics

  @property
  def speedup(self) -> float | None:
    """Of the other format: FP8's time for the same requests over its own; None: they served
    different requests, or none. What a pool cannot hold a smaller one cannot either, so that as
    many are the same ones."""
    served = self.base.request_success
    if not served or served != self.other.request_success:
      return None
    return self.base.wall_seconds / self.other.wall_seconds

  @property
  def region(self) -> str:
    """Who is out of pages: `` nobody, `fp8` alone, or `both`."""
    if not out_of_pages(self.base):
      return ""
    return "both" if out_of_pages(self.other) else BASELINE.name


def out_of_pages(of: Metrics) -> bool:
  return of.short_steps > 0 or of.rejected > 0


def capacity(
  setup: Setup,
  other: Format,
  *,
  output: int,
  contexts: Sequence[int],
  concurrencies: Sequence[int],
) -> Iterator[Point]:
  """Points in order of their context, then concurrency. Contexts that no pool holds are left out.

  Args:
    output: tokens of a request; the rest of the context is its prompt.
  """
  for context in contexts:
    if context > setup.pages(BASELINE) * setup.page_size:
      continue
    for concurrency in concurrencies:
      server = dataclasses.replace(
        setup, concurrency=concurrency, most_running=max(concurrency, setup.most_running)
      )
      workload = generate(ROUNDS * concurrency, prompt=context - output, output=output)
      base, one = (measure(server.simulate(workload, f)) for f in (BASELINE, other))
      yield Point(context, concurrency, 0.0, 0.0, base, one)


def reuse(
  setup: Setup,
  other: Format,
  *,
  requests: int,
  prompt: int,
  output: int,
  spread: float,
  documents: int,
  seed: int,
  reuses: Sequence[float],
) -> Iterator[Point]:
  """Points in order of their reuse; arguments are those of serve_workloads.generate."""
  for share in reuses:
    workload = generate(
      requests,
      prompt=prompt,
      output=output,
      spread=spread,
      reuse=share,
      documents=documents,
      seed=seed,
    )
    base, one = (measure(setup.simulate(workload, f)) for f in (BASELINE, other))
    findable = ideal_hit_share(workload.items)
    under_way = setup.concurrency or requests
    yield Point(prompt + output, under_way, share, findable, base, one)


def capacity_lines(points: Sequence[Point], other: Format) -> list[str]:
  """Speedups, contexts down and concurrencies across."""
  across = sorted({p.concurrency for p in points})
  at = {(p.context, p.concurrency): p for p in points}
  rows = {
    f"{context:,}": tuple(_cell(at.get((context, n))) for n in across)
    for context in sorted({p.context for p in points})
  }
  return [
    f"FP8's time over {other.name}'s, by context and requests under way:",
    *table("context", tuple(map(str, across)), rows),
    f"* FP8 is out of pages, {other.name} is not; + both are",
    *_first_out(points, other),
  ]


def _cell(point: Point | None) -> str:
  if point is None:  # the sweep was interrupted before it
    return ""
  return f"{speedup_told(point)}{MARKS[point.region] or ' '}"


def speedup_told(point: Point) -> str:
  return "-" if point.speedup is None else f"{point.speedup:.2f}"


def _first_out(points: Sequence[Point], other: Format) -> Iterator[str]:
  for context in sorted({p.context for p in points}):
    mine = [p for p in points if p.context == context]
    first = lambda metrics, mine=mine: next(
      (f"at {p.concurrency}" for p in mine if out_of_pages(metrics(p))), "never"
    )
    base, one = first(lambda p: p.base), first(lambda p: p.other)
    yield f"{context:>9,} tokens: FP8 runs out {base:>6}, {other.name} {one:>6}"


def reuse_lines(points: Sequence[Point], other: Format) -> list[str]:
  columns = (
    "served",
    "found, %",
    "cold, s",
    "hit, s",
    "output/s",
    "preempted",
    "evicted",
    "speedup",
  )
  rows = {}
  for p in points:
    for name, m in ((BASELINE.name, p.base), (other.name, p.other)):
      rows[f"{100 * p.reuse:.0f} % {name}"] = (
        f"{m.request_success}/{m.request_success + m.rejected}",
        f"{100 * m.hit_share:.1f} of {100 * p.findable:.1f}",
        _median(m.cold.time_to_first_token_seconds),
        _median(m.hits.time_to_first_token_seconds),
        f"{m.generation_tokens_per_second:,.0f}",
        f"{m.num_preemptions}",
        f"{m.evictions:,}",
        "" if m is p.base else speedup_told(p),
      )
  return [
    "Prompt tokens found, of those that could be; median times to the first token, cold and with a "
    "hit:",
    *table("reuse", columns, rows),
  ]


def _median(of) -> str:
  return "-" if of is None else f"{of.p50:.2f}"
