"""The figures of a report, each of one run; a function returns whether there was anything to draw.

A read path has one colour in all of them. matplotlib's Figure is used without pyplot, which would
look for a display.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

from benchmarks import split
from benchmarks.measured import COLUMNS, NVFP4, Run, Shape, is_emulated, is_stale, ratio
from benchmarks.text_table import number
from benchmarks.workloads import PAGE_SIZE

GEOMETRY = "8b"
_COLOURS = dict(zip(COLUMNS, (f"C{i}" for i in (7, 0, 3, 1, 4, 6, 2, 5, 8, 9, 9, 9)), strict=True))
_WIDTHS = {"dequant": 3.5}  # it is one kernel with repack where queries are few
_TITLE_WIDTH = 9.0  # inches, of a heading and of the legend
_PANELS = 4  # side by side
_BAR_COLUMNS, _LEAST_BARS = 3, 20  # of `kernels`, and bars that make a column
Shapes = dict[Shape, dict[str, dict]]


def _usual(run: Run) -> Shapes:
  """Shapes of the usual heads and pages."""
  return {
    shape: of
    for shape, of in run.attention.items()
    if shape.geometry == GEOMETRY and shape.page_size == PAGE_SIZE
  }


def times(run: Run, path: pathlib.Path) -> bool:
  """Time over key length: a panel for each batch and query length, with NVFP4's and FP8's limit."""
  lines = _by_lengths(_usual(run))
  if not lines:
    return False
  what = "microseconds a call over kv_len; dashed: the limit", *_reservations(run)
  figure, panels = _figure(len(lines), run, "; ".join(what))
  for (title, at), panel in zip(lines.items(), panels, strict=False):
    for name in COLUMNS:
      points = [(kv, of[name]["us_median"]) for kv, of in at.items() if name in of]
      if points:
        panel.loglog(*zip(*points, strict=True), **_look(name, at))
    for name in ("fp8", "dequant"):
      floor = [
        (kv, of[name]["floor_us"]) for kv, of in at.items() if name in of and of[name]["floor_us"]
      ]
      if floor:
        panel.loglog(*zip(*floor, strict=True), "--", color=_COLOURS[name], alpha=0.5)
    _key_lengths(panel, at, title)
  return _save(figure, panels, path)


def ratios(run: Run, path: pathlib.Path) -> bool:
  """Time of each NVFP4 path over our FP8's: below 1 it pays."""
  lines = {
    title: at
    for title, at in _by_lengths(_usual(run)).items()
    if run.is_of_kernels and any(ratio(of, name, "fp8") for of in at.values() for name in NVFP4)
  }
  if not lines:
    return False
  what = "time over our FP8's, over kv_len", *_reservations(run)
  figure, panels = _figure(len(lines), run, "; ".join(what))
  for (title, at), panel in zip(lines.items(), panels, strict=False):
    for name in NVFP4:
      points = [(kv, value) for kv, of in at.items() if (value := ratio(of, name, "fp8"))]
      if points:
        panel.semilogx(*zip(*points, strict=True), **_look(name, at))
    panel.axhline(1.0, color="black", linewidth=0.8)
    _key_lengths(panel, at, title)
  return _save(figure, panels, path)


def limits(run: Run, path: pathlib.Path) -> bool:
  """Which part of its limit each path reaches, where a matrix has its own shapes."""
  shapes = {
    shape: of
    for shape, of in _usual(run).items()
    if any(row["floor_fraction"] and row["part"] != "grid" for row in of.values())
  }
  if not shapes:
    return False
  names = [name for name in COLUMNS if any(name in of for of in shapes.values())]
  from matplotlib.figure import Figure

  inches = max(1.0 + 1.1 * len(shapes), _TITLE_WIDTH), 4.5
  figure = Figure(figsize=inches, layout="constrained")
  panel = figure.subplots()
  width = 0.85 / len(names)
  for i, name in enumerate(names):
    points = [
      (x + i * width, 100 * of[name]["floor_fraction"])
      for x, of in enumerate(shapes.values())
      if name in of and of[name]["floor_fraction"]
    ]
    if points:
      panel.bar(*zip(*points, strict=True), width=width, color=_COLOURS[name], label=name)
  panel.set_xticks(
    [x + 0.4 for x in range(len(shapes))],
    [f"{shape.phase}\n{shape.lengths}" for shape in shapes],
    rotation=45,
    ha="right",
    fontsize=8,
  )
  panel.axhline(100.0, color="black", linewidth=0.8)
  panel.set_ylabel("% of the limit")
  figure.suptitle(f"{run.heading}\npart of the limit: bytes over copy bandwidth, or products")
  figure.legend(loc="outside lower center", ncols=len(names))
  figure.savefig(path)
  return True


def kernels(run: Run, path: pathlib.Path) -> bool:
  """What each kernel of a call costs, of shapes with a call of several.

  A bar's number is the call's median; its parts are medians of each kernel's, whose sum may differ.
  """
  bars = []
  for shape, of in _usual(run).items():
    named = [(name, split.costs(of[name])) for name in COLUMNS if name in of]
    if any(len(costs) > 1 for _, costs in named) and _in_matrix(of):
      total = max(sum(costs.values()) for _, costs in named) or 1.0
      bars += [
        (f"{shape.lengths} {name}", costs, total, of[name]["us_median"])
        for name, costs in named
        if costs
      ]
  if not bars:
    return False
  from matplotlib import colormaps
  from matplotlib.figure import Figure

  columns = min(_BAR_COLUMNS, -(-len(bars) // _LEAST_BARS))
  rows = -(-len(bars) // columns)
  figure = Figure(figsize=(3 + 5 * columns, 1.5 + 0.22 * rows), layout="constrained")
  panels = figure.subplots(1, columns, squeeze=False)[0]
  names = list(dict.fromkeys(_kind(kernel) for _, costs, *_ in bars for kernel in costs))
  colours = {name: colormaps["tab20"](i % 20) for i, name in enumerate(names)}
  for i, panel in enumerate(panels):
    some = bars[i * rows : (i + 1) * rows]
    for y, (_, costs, total, median) in enumerate(some):
      left = 0.0
      for kernel, us in costs.items():
        panel.barh(-y, 100 * us / total, left=left, color=colours[_kind(kernel)])
        left += 100 * us / total
      panel.text(left + 0.5, -y, f"{number(median)} us", va="center", fontsize=7)
    panel.set_yticks([-y for y in range(len(some))], [label for label, *_ in some], fontsize=7)
    panel.set_xlabel("% of the slowest path at the shape")
    panel.set_xlim(0, 118)
    panel.set_ylim(0.6 - rows, 0.6)
  for name, colour in colours.items():
    panels[0].barh(0, 0, color=colour, label=name)
  figure.suptitle(f"{run.heading}\nkernels of a call")
  figure.legend(loc="outside lower center", ncols=5, fontsize=8)
  figure.savefig(path)
  return True


def _in_matrix(of: dict[str, dict]) -> bool:
  return any(row["part"] != "grid" for row in of.values())


def _kind(kernel: str) -> str:
  """What kernels have in common that are drawn in one colour."""
  if kernel.startswith("cudnn"):
    return "cudnn"
  return "xla" if kernel.startswith("xla") else kernel


PLOTS: dict[str, Callable[[Run, pathlib.Path], bool]] = {
  "times": times,
  "ratio_to_fp8": ratios,
  "part_of_limit": limits,
  "kernels": kernels,
}


def _by_lengths(shapes: Shapes) -> dict[str, dict[int, dict[str, dict]]]:
  """By title what was timed at each kv_len, stale apart: of each batch and query length, and of
  whole prompts. A single length is a panel only where it is one that was asked for by itself."""
  lines: dict[tuple[int, int], dict[int, dict[str, dict]]] = {}
  prompts: dict[int, dict[int, dict[str, dict]]] = {}
  for shape, of in shapes.items():
    current = {name: row for name, row in of.items() if not is_stale(row)} or of
    lines.setdefault((shape.batch, shape.q_len), {})[shape.kv_len] = current
    if shape.phase == "prefill":
      prompts.setdefault(shape.batch, {})[shape.kv_len] = current
  found = {
    f"{batch} x {'whole prompts' if batch > 1 else 'a whole prompt'}": at
    for batch, at in sorted(prompts.items())
    if len(at) > 1
  }
  for (batch, q_len), at in sorted(lines.items()):
    asked = any(row["phase"] == "tail" and row["part"] != "grid" for row in _rows(at))
    if len(at) > 1 or asked:
      found[f"{batch} x {q_len} queries"] = at
  return {title: dict(sorted(at.items())) for title, at in found.items()}


def _rows(at: dict[int, dict[str, dict]]) -> list[dict]:
  return [row for of in at.values() for row in of.values()]


def _look(name: str, at: dict[int, dict[str, dict]]) -> dict[str, Any]:
  emulated = any(is_emulated(of[name]) for of in at.values() if name in of)
  return {
    "color": _COLOURS[name],
    "linewidth": _WIDTHS.get(name, 1.5),
    "label": name,
    "marker": ".",
    "linestyle": ":" if emulated else "-",
  }


def _reservations(run: Run) -> list[str]:
  """What a title must say of some of the lines."""
  rows = [row for of in _usual(run).values() for row in of.values()]
  emulated = ["dotted: A4Q, emulated"] if any(map(is_emulated, rows)) else []
  unmasked = any("no mask" in row["data"] for row in rows)
  return emulated + (["cuDNN's chunks and tails without their mask"] if unmasked else [])


def _figure(count: int, run: Run, what: str):
  from matplotlib.figure import Figure

  columns = min(_PANELS, count)
  rows = -(-count // columns)
  inches = max(4 * columns, _TITLE_WIDTH), 3.2 * rows + 1
  figure = Figure(figsize=inches, layout="constrained")
  panels = list(figure.subplots(rows, columns, squeeze=False).flat)
  figure.suptitle(f"{run.heading}\n{what}")
  return figure, panels


def _key_lengths(panel, at: dict[int, dict], title: str) -> None:
  from matplotlib.ticker import NullFormatter

  panel.set_title(title)
  panel.set_xticks(list(at), [f"{kv // 1024}K" if kv >= 1024 else str(kv) for kv in at])
  panel.tick_params(axis="x", which="minor", bottom=False)
  panel.xaxis.set_minor_formatter(NullFormatter())


def _save(figure, panels, path: pathlib.Path) -> bool:
  handles = {}
  for panel in panels:
    drawn, names = panel.get_legend_handles_labels()
    handles |= dict(zip(names, drawn, strict=True))
    if not panel.lines:
      panel.set_axis_off()
  names = [name for name in COLUMNS if name in handles]
  figure.legend(
    [handles[name] for name in names], names, loc="outside lower center", ncols=len(names)
  )
  figure.savefig(path)
  return True
