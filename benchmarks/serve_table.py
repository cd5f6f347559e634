"""Metrics of several formats as tables: cold prompts, prefix hits and decode stand apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.serve_formats import FORMATS
from benchmarks.serve_metrics import Metrics, Percentiles
from benchmarks.serve_setup import Setup

_Cells = Callable[[Metrics], tuple[str, ...]]


def lines(setup: Setup, of: Mapping[str, Metrics]) -> list[str]:
  """All tables, each with a row for every format; of phases only where they were told apart, which
  a live run does by kinds of steps instead (serve_live.py)."""
  heads = setup.model.heads
  server = table(
    "Server",
    ("pages", "B/token", "wall s", "prompt/s", "output/s", "goodput/s", "served", "rejected"),
    {
      name: (
        f"{setup.pages(FORMATS[name]):,}",
        f"{heads.token_bytes(FORMATS[name]):,}",
        f"{m.wall_seconds:.1f}",
        f"{m.prompt_tokens_per_second:,.0f}",
        f"{m.generation_tokens_per_second:,.0f}",
        f"{m.request_goodput:.2f}",
        f"{m.request_success:,}",
        f"{m.rejected:,}",
      )
      for name, m in of.items()
    },
  )
  told_apart = any(m.seconds["prefill"] or m.seconds["decode"] for m in of.values())
  parts = server, *_TABLES, *([_SHARES] if told_apart else [])
  return [line for part in parts for line in (*_rows(part, of), "")][:-1]


def _rows(part, of: Mapping[str, Metrics]) -> list[str]:
  if isinstance(part, list):
    return part
  title, columns, cells = part
  return table(title, columns, {name: cells(m) for name, m in of.items()})


def table(title: str, columns: tuple[str, ...], rows: Mapping[str, tuple[str, ...]]) -> list[str]:
  """Columns as wide as what is in them."""
  first = max(map(len, (title, *rows)))
  width = [max(map(len, cells)) for cells in zip(columns, *rows.values(), strict=True)]
  line = lambda name, cells: (
    f"{name:{first}}" + "".join(f"  {cell:>{w}}" for cell, w in zip(cells, width, strict=True))
  )
  head = line(title, columns)
  return [head, "-" * len(head), *(line(name, cells) for name, cells in rows.items())]


def _three(of: Percentiles | None, scale: float = 1.0, digits: int = 2) -> str:
  if of is None:
    return "-"
  return " ".join(_short(scale * value, digits) for value in (of.p50, of.p90, of.p99))


def _short(value: float, digits: int) -> str:
  """Without decimals where they say nothing, so that hours are no wider than seconds."""
  return f"{value:.{digits}f}" if value < 1e4 else f"{value:.0f}"


def _pool(m: Metrics) -> tuple[str, ...]:
  return (
    f"{m.num_requests_running}",
    f"{100 * m.kv_cache_usage_mean:.1f} {100 * m.kv_cache_usage_perc:.1f}",
    f"{m.num_preemptions:,}",
    f"{m.recomputed_tokens:,}",
    f"{m.evictions:,}",
  )


def _latency(m: Metrics) -> tuple[str, ...]:
  return (
    _three(m.request_queue_time_seconds),
    _three(m.time_to_first_token_seconds),
    _three(m.e2e_request_latency_seconds),
  )


def _cold(m: Metrics) -> tuple[str, ...]:
  return (
    f"{m.cold.requests:,}",
    f"{m.cold.prompt_tokens:,}",
    _three(m.cold.time_to_first_token_seconds),
  )


def _hits(m: Metrics) -> tuple[str, ...]:
  return (
    f"{m.hits.requests:,}",
    f"{m.hits.cached_tokens:,} of {m.hits.prompt_tokens:,}",
    _three(m.hits.time_to_first_token_seconds),
  )


def _cache(m: Metrics) -> tuple[str, ...]:
  return (
    f"{m.prefix_cache_queries:,}",
    f"{m.prefix_cache_hits:,}",
    f"{100 * m.hit_share:.1f}",
  )


def _decode(m: Metrics) -> tuple[str, ...]:
  return (
    f"{m.decode_tokens:,}",
    f"{m.generation_tokens_per_second:,.0f}",
    _three(m.inter_token_latency_seconds, 1e3, 1),
  )


def _shares(m: Metrics) -> tuple[str, ...]:
  total = sum(m.seconds.values()) or 1.0
  return (*(f"{100 * seconds / total:.1f}" for seconds in m.seconds.values()), f"{m.steps:,}")


_THREE = "p50 p90 p99"
_TABLES: tuple[tuple[str, tuple[str, ...], _Cells], ...] = (
  (
    "Pool",
    ("running", "use %, mean peak", "preemptions", "tokens recomputed", "evictions"),
    _pool,
  ),
  (
    f"Seconds, {_THREE}",
    ("in the queue", "to the first token", "end to end"),
    _latency,
  ),
  ("Cold prompts", ("requests", "prompt tokens", f"first token s, {_THREE}"), _cold),
  ("Prefix hits", ("requests", "cached tokens", f"first token s, {_THREE}"), _hits),
  ("Prefix cache", ("tokens asked for", "found", "%"), _cache),
  ("Decode", ("tokens", "output/s", f"between tokens ms, {_THREE}"), _decode),
)
_SHARES = "Share of time, %", ("prefill", "decode", "append", "model, host", "steps"), _shares
