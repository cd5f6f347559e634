"""The quality rows drawn: error against size, error against length, K against V. From rows only."""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Callable, Sequence

from benchmarks.quality_configs import bits_per_value
from benchmarks.quality_rows import QualityRow

SIZES_AT = 8192
_MARKERS = "osD^vPX*<>"


def draw(rows: Sequence[QualityRow], folder: pathlib.Path) -> list[pathlib.Path]:
  """Writes the pictures that the rows are enough for, and returns their paths.

  Raises:
    ImportError: matplotlib is not installed.
  """
  import matplotlib  # noqa: F401, so that a missing one is known before anything is made

  folder.mkdir(parents=True, exist_ok=True)
  drawn = []
  for name, make in _PICTURES.items():
    figure = make(rows)
    if figure is not None:
      path = folder / f"{name}.png"
      figure.savefig(path, dpi=120)
      drawn.append(path)
  return drawn


def _figure(title: str, panels: int):
  from matplotlib.figure import Figure  # without pyplot, which would look for a display

  figure = Figure(figsize=(6.5 * panels, 5.2), layout="constrained")
  figure.suptitle(title)
  return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def size_against_error(rows: Sequence[QualityRow]):
  """A panel for each kind of data; a grey line joins configs that no other beats in both.

  Sizes are at one context, whatever was measured: a ring is large beside a short text.
  """
  panels = {
    "a model: KL": [r for r in rows if r.level == "model" and r.metric == "kl"],
    "layers of SmolLM2: error of the output": [r for r in _of(rows, "rel_l2") if _is_layer(r)],
    "peaky: KL of one layer": [r for r in _of(rows, "kl") if r.data == "peaky"],
  }
  panels = {title: _points(of) for title, of in panels.items() if of}
  if not panels:
    return None
  figure, axes = _figure("Error against size, the mean over data of one context", len(panels))
  for axis, (title, (context, points)) in zip(axes, panels.items(), strict=True):
    for i, (name, (bits, error)) in enumerate(points.items()):
      axis.loglog(bits, error, _marker(i), color=_color(i), label=name)
    best = pareto(points.values())
    axis.step(*zip(*best, strict=True), where="post", color="0.6", zorder=0)
    for name, point in points.items():
      if point in best:
        axis.annotate(name, point, xytext=(4, -9), textcoords="offset points", fontsize=7)
    axis.set(title=f"{title}, {context} tokens", xlabel=f"bits a value, of {SIZES_AT} tokens")
    _ticks(axis, (4.5, 5, 6, 7, 8, 9), "{}".format)
    axis.legend(fontsize=6, ncols=2)
  return figure


def _of(rows: Sequence[QualityRow], metric: str) -> list[QualityRow]:
  """Rows of a metric of attention, in the head dim that all cases have."""
  return [
    r
    for r in rows
    if r.level == "attention" and r.metric == metric and (_is_layer(r) or r.head_dim == 128)
  ]


def _is_layer(row: QualityRow) -> bool:
  return row.data.startswith("SmolLM2")


def _points(rows: Sequence[QualityRow]) -> tuple[int, dict[str, tuple[float, float]]]:
  """(context, config -> (bits, mean error)), at the longest of the contexts of most configs."""
  configs = lambda context: len({r.config for r in rows if r.context == context})
  context = max({r.context for r in rows}, key=lambda n: (configs(n), n))
  found: dict = {}
  for row in rows:
    if row.context == context and row.config.k_format != "bf16":  # which is the measure
      found.setdefault(row.config, []).append(row.value)
  return context, {
    config.name: (bits_per_value(config, SIZES_AT), statistics.fmean(values))
    for config, values in found.items()
  }


def _marker(i: int) -> str:
  return _MARKERS[i % len(_MARKERS)]


def _color(i: int) -> str:
  """One of ten, shifted after each round of markers, so that no two look alike."""
  return f"C{(i + i // len(_MARKERS)) % 10}"


def _ticks(axis, places, write: Callable) -> None:
  axis.set_xticks(places, [write(place) for place in places])
  axis.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)


def pareto(points) -> list[tuple[float, float]]:
  """Of (size, error), those that no other beats in one and equals in the other, by size."""
  best: list[tuple[float, float]] = []
  for size, error in sorted(points):
    if not best or error < best[-1][1]:
      best.append((size, error))
  return best


def error_against_length(rows: Sequence[QualityRow]):
  """A panel for each pattern that was measured at more than two lengths."""
  chosen = [r for r in _of(rows, "rel_l2") if not _is_layer(r)]
  lengths = lambda **fields: sorted(
    {r.context for r in chosen if all(getattr(r, n) == f for n, f in fields.items())}
  )
  patterns = [p for p in dict.fromkeys(r.data for r in chosen) if len(lengths(data=p)) > 2]
  if not patterns:
    return None
  figure, axes = _figure("Error of the output (relative L2) against keys", len(patterns))
  configs = [c for c in dict.fromkeys(r.config for r in chosen) if len(lengths(config=c)) > 2]
  for axis, pattern in zip(axes, patterns, strict=True):
    for i, config in enumerate(configs):
      line = sorted(
        (r.context, r.value) for r in chosen if r.data == pattern and r.config == config
      )
      axis.loglog(*zip(*line, strict=True), f"{_marker(i)}-", color=_color(i), label=config.name)
    axis.set(title=pattern, xlabel="keys")
    _ticks(axis, lengths(data=pattern), lambda n: f"{n // 1024}K")
  axes[-1].legend(fontsize=7)
  return figure


def parts(rows: Sequence[QualityRow]):
  """Bars: the error with only Q, only K or only V as the config has it, the mean over data."""
  metrics = {part: f"rel_l2, {part} only" for part in "qkv"}
  chosen = [r for metric in metrics.values() for r in _of(rows, metric)]
  panels = {
    "layers of SmolLM2": [r for r in chosen if _is_layer(r)],
    "gauss": [r for r in chosen if r.data == "gauss"],
    "peaky": [r for r in chosen if r.data == "peaky"],
  }
  panels = {title: of for title, of in panels.items() if of}
  if not panels:
    return None
  figure, axes = _figure("Error of the output with one of Q, K and V quantised", len(panels))
  for axis, (title, of) in zip(axes, panels.items(), strict=True):
    names = list(dict.fromkeys(r.config.name for r in of))
    for i, (part, metric) in enumerate(metrics.items()):
      values = [[r.value for r in of if (r.config.name, r.metric) == (n, metric)] for n in names]
      places = [y + 0.27 * (1 - i) for y in range(len(names))]
      axis.barh(places, [statistics.fmean(v) for v in values], 0.25, label=f"{part.upper()} only")
    axis.set_yticks(range(len(names)), names, fontsize=6)
    axis.set(title=title, xlabel="relative L2")
    axis.legend(fontsize=7)
  return figure


_PICTURES = {
  "size_against_error": size_against_error,
  "error_against_length": error_against_length,
  "parts": parts,
}
