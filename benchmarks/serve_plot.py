"""Sweeps drawn: where a format is faster than FP8, and where either runs out of pages."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Sequence

from benchmarks.serve_formats import BASELINE, Format
from benchmarks.serve_sweeps import MARKS, Point, speedup_told


def draw_capacity(
  points: Sequence[Point], other: Format, title: str, tokens: Sequence[int], path: pathlib.Path
) -> None:
  """Writes a map of speedups over concurrency and context.

  Args:
    tokens: that the pool holds in FP8 and in the other format: from there on somebody waits.

  Raises:
    ImportError: matplotlib is not installed.
  """
  from matplotlib.colors import TwoSlopeNorm
  from matplotlib.figure import Figure  # without pyplot, which would look for a display

  across = sorted({p.concurrency for p in points})
  down = sorted({p.context for p in points})
  at = {(p.context, p.concurrency): p for p in points}
  # Where formats serve different requests there is none, and the cell stays empty.
  speedup = [[at[context, n].speedup or math.nan for n in across] for context in down]
  flat = [value for row in speedup for value in row if not math.isnan(value)]
  figure = Figure(figsize=(8, 5.5), layout="constrained")
  panel = figure.subplots()
  norm = TwoSlopeNorm(1.0, min([*flat, 0.9]), max([*flat, 1.1]))
  image = panel.pcolormesh(_edges(across), _edges(down), speedup, cmap="RdBu", norm=norm)
  for (context, n), point in at.items():
    text = f"{speedup_told(point)}{MARKS[point.region]}"
    dark = point.speedup is not None and not 0.15 < norm(point.speedup) < 0.85
    colour = "white" if dark else "black"
    panel.text(n, context, text, ha="center", va="center", size=8, color=colour)
  for count, style, name in zip(tokens, ("k-", "k--"), ("FP8", other.name), strict=True):
    ends = [_edges(across)[0], _edges(across)[-1]]
    panel.plot(ends, [count / n for n in ends], style, label=f"the pool of {name} is full")
  panel.set_xscale("log", base=2)
  panel.set_yscale("log", base=2)
  panel.set_xlim(_edges(across)[0], _edges(across)[-1])
  panel.set_ylim(_edges(down)[0], _edges(down)[-1])
  panel.set_xticks(across, map(str, across))
  panel.set_yticks(down, [f"{n // 1024}K" for n in down])
  panel.set_xlabel("requests under way")
  panel.set_ylabel("tokens of a request")
  figure.legend(loc="outside lower center", ncols=2)
  figure.colorbar(image, label=f"FP8's time over {other.name}'s")
  figure.suptitle(title, size=9)
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path)


def _edges(values: list[int]) -> list[float]:
  """Of cells around values that are spaced evenly in the logarithm."""
  step = (values[1] / values[0]) ** 0.5 if len(values) > 1 else 2**0.5
  return [values[0] / step, *(value * step for value in values)]


def draw_reuse(points: Sequence[Point], other: Format, title: str, path: pathlib.Path) -> None:
  """Writes hits and output rates over the share of a prompt that begins a document."""
  from matplotlib.figure import Figure

  shares = [100 * p.reuse for p in points]
  figure = Figure(figsize=(9, 4), layout="constrained")
  hits, rates = figure.subplots(1, 2)
  for name, of in ((BASELINE.name, lambda p: p.base), (other.name, lambda p: p.other)):
    hits.plot(shares, [100 * of(p).hit_share for p in points], ".-", label=name)
    rates.plot(shares, [of(p).generation_tokens_per_second for p in points], ".-", label=name)
  hits.plot(shares, [100 * p.findable for p in points], "k:", label="a pool without end")
  hits.set_ylabel("prompt tokens found, %")
  rates.set_ylabel("output tokens per second")
  rates.set_ylim(bottom=0)
  for panel in (hits, rates):
    panel.set_xlabel("share of a prompt that begins a document, %")
    panel.legend()
  figure.suptitle(title, size=9)
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path)
