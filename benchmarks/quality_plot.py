"""The quality rows drawn: error against size, error against length, K against V. From rows only."""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Callable, Sequence

from benchmarks.quality_configs import BY_NAME
from benchmarks.quality_rows import QualityRow

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
  """A figure and its panels' axes, in rows of three."""
  from matplotlib.figure import Figure  # without pyplot, which would look for a display

  columns = min(panels, 3)
  lines = -(-panels // columns)
  figure = Figure(figsize=(6.5 * columns, 5.2 * lines), layout="constrained")
  figure.suptitle(title)
  axes = list(figure.subplots(lines, columns, squeeze=False).flat)
  for unused in axes[panels:]:
    unused.remove()
  return figure, axes[:panels]


def size_against_error(rows: Sequence[QualityRow]):
  """A panel for each kind of data and each length: sizes and errors are both of that length.

  A grey line joins configs that no other beats in both. BF16, which is the measure, is left out.
  """
  kinds = {
    "a model, all from the cache: KL": [r for r in rows if _is_stored_text(r) and r.metric == "kl"],
    "layers of SmolLM2: error of the output": [r for r in _of(rows, "rel_l2") if _is_layer(r)],
    "peaky: KL of one layer": [r for r in _of(rows, "kl") if r.data == "peaky"],
  }
  panels = {
    f"{kind}, {context} tokens": points
    for kind, of in kinds.items()
    for context in sorted({row.context for row in of})
    if (points := _points([row for row in of if row.context == context]))
  }
  if not panels:
    return None
  figure, axes = _figure("Error against size, the mean over data", len(panels))
  for axis, (title, points) in zip(axes, panels.items(), strict=True):
    for name, (bits, error) in points.items():
      axis.loglog(bits, error, _marker(_place(name)), color=_color(_place(name)), label=name)
    best = pareto(points.values())
    axis.step(*zip(*best, strict=True), where="post", color="0.6", zorder=0)
    for name, point in points.items():
      if point in best:
        axis.annotate(name, point, xytext=(4, -9), textcoords="offset points", fontsize=7)
    axis.set(title=title, xlabel="bits a value of as many tokens")
    _ticks(axis, (4.5, 5, 6, 7, 8, 9), "{}".format)
    axis.legend(fontsize=6, ncols=2)
  return figure


def _place(name: str) -> int:
  """Of a config among all: it looks the same in each panel."""
  return list(BY_NAME).index(name) if name in BY_NAME else len(BY_NAME)


def _is_stored_text(row: QualityRow) -> bool:
  """Of a text, the newest tokens read from the cache too: what decoding pays."""
  prefill = row.operation.startswith("prefill") and row.operation.endswith("stored")
  return row.level == "model" and prefill


def _of(rows: Sequence[QualityRow], metric: str) -> list[QualityRow]:
  """Rows of a metric of attention, in the head dim that all cases have."""
  return [
    r
    for r in rows
    if r.level == "attention" and r.metric == metric and (_is_layer(r) or r.head_dim == 128)
  ]


def _is_layer(row: QualityRow) -> bool:
  return row.data.startswith("SmolLM2")


def _points(rows: Sequence[QualityRow]) -> dict[str, tuple[float, float]]:
  """config -> (bits, mean error) of rows of one length."""
  found: dict = {}
  for row in rows:
    if row.config.k_format != "bf16":
      found.setdefault((row.config.name, row.bits_per_value), []).append(row.value)
  return {name: (bits, statistics.fmean(values)) for (name, bits), values in found.items()}


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
