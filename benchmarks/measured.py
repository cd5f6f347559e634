"""Measured rows: which files, which of them are stale, and which may stand beside each other.

Rows are compared if they are of one run, which is one card, revision and timer, and of equal work.
So no time of a CPU ever stands beside one of a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Iterable

from benchmarks.records import definition_of, read
from benchmarks.sources import ROOT, kernel_hash
from benchmarks.workloads import GEOMETRIES, PAGE_SIZE
from nvfp4_pallas.dispatch import IMPLEMENTATIONS

RESULTS = ROOT / "benchmarks" / "results"
QUALITY = "quality.jsonl"  # rows of another kind, see quality_rows.py
# The columns of tables and the lines of plots: what attends, in order.
COLUMNS = (
  *("bf16", "fp8", "dequant", "repack", "a4q x1", "a4q x2", "a8q"),
  *("cuDNN", "JAX", "FI bf16", "FI fp8", "FI nvfp4"),
)
NVFP4 = ("dequant", "repack", "a4q x1", "a4q x2", "a8q")
_PEERS = {"cudnn": "cuDNN", "jax_paged": "JAX"}


def is_stale(row: dict) -> bool:
  """Whether the sources have changed since, of its kernels or, where none ran, the definition."""
  if row["phase"] == "copy":
    return False
  definition = definition_of(row["implementation"], row["kernel_hash"])
  changed = row["kernel_hash"] != kernel_hash(row["kernel_names"])
  return changed or row["definition_hash"] != definition


def files(paths: Iterable[pathlib.Path] = (), folder: pathlib.Path = RESULTS) -> list[pathlib.Path]:
  """The named ones, else those with timings that are committed in `folder`."""
  committed = (path for path in sorted(folder.glob("*.jsonl")) if path.name != QUALITY)
  return list(paths) or list(committed)


@dataclasses.dataclass(frozen=True)
class Shape:
  """The work of an attention row, whoever did it."""

  geometry: str
  page_size: int
  phase: str
  batch: int
  q_len: int
  kv_len: int

  @property
  def lengths(self) -> str:
    return f"{self.batch}/{self.q_len}/{self.kv_len}"


@dataclasses.dataclass(frozen=True)
class Run:
  """Rows that may be compared.

  Attributes:
    device, revision, jax_version, timer: of all of them.
    rows: in the order of their files.
  """

  device: str
  revision: str
  jax_version: str
  timer: str
  rows: tuple[dict, ...]

  @property
  def heading(self) -> str:
    stale = sum(map(is_stale, self.rows))
    days = sorted({row["time"][:10] for row in self.rows})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    kind = "device time" if self.timer == "trace" else "wall time"
    return (
      f"{self.device}, {self.revision}, jax {self.jax_version}, {when}, {kind}: "
      f"{len(self.rows)} rows, {stale} of them stale"
    )

  @property
  def is_of_kernels(self) -> bool:
    """Whether its times are those of kernels; wall times of the definition compare nothing."""
    return self.timer == "trace"

  @functools.cached_property
  def attention(self) -> dict[Shape, dict[str, dict]]:
    """The timed row of each of COLUMNS at each shape, without options of the cache; where kernels
    were timed, those of kernels.

    What has no pages stands beside pages of every size.
    """
    found: dict[Shape, dict[str, dict]] = {}
    paged = [row for row in self.rows if is_timed_attention(row) and not is_optional(row)]
    if self.is_of_kernels:
      paged = [row for row in paged if row["implementation"] != "xla"]
    for row in self.newest_last(paged):
      if row["layout"] != "contiguous" and row["implementation"] != "cudnn":
        found.setdefault(shape_of(row), {})[column(row)] = row
    for row in self.newest_last(paged):
      if row["implementation"] == "cudnn":
        pageless = shape_of(row)
        same = [
          s for s in found if dataclasses.replace(s, page_size=pageless.page_size) == pageless
        ]
        for shape in same or [dataclasses.replace(pageless, page_size=PAGE_SIZE)]:
          found.setdefault(shape, {})[column(row)] = row
    return dict(sorted(found.items(), key=lambda item: _order(item[0])))

  def of_phase(self, *phases: str) -> list[dict]:
    """Timed rows."""
    return [row for row in self.rows if row["phase"] in phases and row["us_median"] is not None]

  @staticmethod
  def newest_last(rows: list[dict]) -> list[dict]:
    """And current ones after stale ones: of two rows of a case the later stands."""
    return sorted(rows, key=lambda row: (not is_stale(row), row["time"]))


def runs(paths: Iterable[pathlib.Path], *, stale: bool = True) -> list[Run]:
  """Of the files' rows, those of most rows first.

  Args:
    stale: also rows of other kernel sources than these.
  """
  found: dict[tuple, list[dict]] = {}
  for path in paths:
    rows = [row for row in read(path) if stale or not is_stale(row)]
    timers = {row["timer"] for row in rows} - {None}
    for row in rows:
      # What was not run has no timer, and belongs to those that were.
      timer = row["timer"] or next(iter(sorted(timers)), "wall")
      of = row["device"], row["git_revision"], row["jax_version"], timer
      found.setdefault(of, []).append(row)
  made = [Run(*of, rows=tuple(rows)) for of, rows in found.items()]
  return sorted(made, key=lambda run: -len(run.rows))


def shape_of(row: dict) -> Shape:
  heads = row["num_q_heads"], row["num_kv_heads"], row["head_dim"]
  by_heads = {(g.num_q_heads, g.num_kv_heads, g.head_dim): name for name, g in GEOMETRIES.items()}
  geometry = by_heads.get(heads) or "/".join(map(str, heads))
  return Shape(geometry, row["page_size"], row["phase"], row["batch"], row["q_len"], row["kv_len"])


_PHASES = ("prefill", "chunk", "tail", "decode")


def _order(shape: Shape) -> tuple:
  geometries = list(GEOMETRIES)
  known = geometries.index(shape.geometry) if shape.geometry in geometries else len(geometries)
  page = shape.page_size != PAGE_SIZE, shape.page_size
  phase = _PHASES.index(shape.phase)
  return known, shape.geometry, page, phase, shape.batch, shape.q_len, shape.kv_len


def is_timed_attention(row: dict) -> bool:
  return row["phase"] in _PHASES and row["us_median"] is not None


def is_optional(row: dict) -> bool:
  """Whether it is of a cache or a call with something beyond the usual."""
  return bool(row["levers"] or row["batch_invariant"])


def column(row: dict) -> str:
  """Which of COLUMNS a row of attention belongs to."""
  who, path = row["implementation"], row["read_path"]
  if who in _PEERS:
    return _PEERS[who]
  if who == "flashinfer":
    return f"FI {row['k_format']}"
  name = path.removeprefix("nvfp4_")
  if name == "a4q":
    name += f" x{row['q_levels']}"
  if row["k_format"] != row["v_format"]:
    name += f" {row['k_format']}+{row['v_format']}"
  return name


def is_emulated(row: dict) -> bool:
  """A4Q's numbers on tensor cores that have no FP4: its time is not A4Q's."""
  return row["read_path"] == "nvfp4_a4q" and row["implementation"] == "mosaic_sm90"


EXACT = ("dequant", "repack")  # equal as numbers; the others round Q, and A8Q rounds K


def is_ours(row: dict) -> bool:
  return row["implementation"] in IMPLEMENTATIONS


def fastest_nvfp4(of: dict[str, dict]) -> str | None:
  """Of EXACT the faster column; None where neither was timed."""
  return min((n for n in EXACT if n in of), key=lambda n: of[n]["us_median"], default=None)


def ratio(of: dict[str, dict], name: str | None, to: str) -> float | None:
  """Of two columns' times; None where one is lacking or they are of different kernel sources."""
  if name not in of or to not in of or is_stale(of[name]) != is_stale(of[to]):
    return None
  return of[name]["us_median"] / of[to]["us_median"]
