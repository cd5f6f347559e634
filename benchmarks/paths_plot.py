"""The sweep drawn: time over key length, a panel for each query length, a line a read path."""

from __future__ import annotations

import itertools
import pathlib

from nvfp4_pallas.read_paths import READ_PATHS

COLUMNS = 4
_STYLES = ("-", "--", ":")  # of batches


def draw(by_shape: dict[tuple[int, int, int], dict[str, dict]], title: str, path: pathlib.Path):
  """Writes the figure.

  Args:
    by_shape: the timed row of each read path at each (batch, q_len, kv_len).

  Raises:
    ImportError: matplotlib is not installed.
  """
  from matplotlib.figure import Figure  # without pyplot, which would look for a display

  q_lens = sorted({q_len for _, q_len, _ in by_shape})
  kv_lens = sorted({kv_len for _, _, kv_len in by_shape})
  batches = sorted({batch for batch, _, _ in by_shape})
  rows = -(-len(q_lens) // COLUMNS)
  figure = Figure(figsize=(4 * COLUMNS, 3.5 * rows), layout="constrained")
  panels = figure.subplots(rows, COLUMNS, sharex=True, squeeze=False).flat
  drawn = {}
  for q_len, panel in zip(q_lens, panels, strict=False):
    for batch, style in zip(batches, itertools.cycle(_STYLES), strict=False):
      for i, read_path in enumerate(READ_PATHS):
        points = _points(by_shape, batch, q_len, read_path)
        if points:
          (drawn[i, batch],) = panel.loglog(*zip(*points, strict=True), f".{style}C{i}")
    panel.set_title(f"q_len {q_len}")
    panel.set_xticks(kv_lens, [str(n) for n in kv_lens])
    panel.tick_params(axis="x", which="minor", bottom=False)
  for panel in panels:  # the places that are left
    panel.set_axis_off()
  figure.suptitle(f"{title}\nmicroseconds a call, over kv_len")
  lines = [drawn[key] for key in sorted(drawn)]  # a read path's batches below each other
  labels = [f"{READ_PATHS[i]}, batch {batch}" for i, batch in sorted(drawn)]
  ncols = len({i for i, _ in drawn})
  figure.legend(lines, labels, loc="outside lower center", ncols=ncols)
  figure.savefig(path)


def _points(by_shape, batch: int, q_len: int, read_path: str) -> list[tuple[int, float]]:
  """(kv_len, microseconds) of a line."""
  return [
    (kv_len, of[read_path]["us_median"])
    for (of_batch, of_q_len, kv_len), of in by_shape.items()
    if (of_batch, of_q_len) == (batch, q_len) and read_path in of
  ]
