"""One number of the quality benchmark as a row of data: of what, by whom, on what."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import math
import pathlib
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from benchmarks.measured import QUALITY, RESULTS
from benchmarks.quality_configs import CalibratedOn, QualityConfig
from benchmarks.records import git_revision
from benchmarks.sources import definition_hash

COMMITTED = RESULTS / QUALITY
LEVELS = ("format", "attention", "model")


@dataclasses.dataclass(frozen=True, kw_only=True)
class QualityRow:
  """One metric of one config on one piece of data.

  Attributes:
    level: `format` (values packed and unpacked), `attention` (one layer), `model` (a whole one).
    config: how K, V and Q were treated.
    operation: who produced it: pack, prefill, decode, or what a model did.
    data: the distribution, pattern, layer or text.
    context: keys of a query, or tokens of a text; values of a row of head_dim at level format.
    metric: its name; `value` is what was measured, `ci_low` and `ci_high` bound its 95 % interval
      where there is one.
    bits_per_value: of the cache at this context (quality_configs.bits_per_value).
    calibrated_on: where the config's means and global scales are from, for one that has any.
    implementation: who ran the operation.
    source_hash: of the definition, and for kernels of those too (sources.definition_hash).
  """

  level: str
  config: QualityConfig
  operation: str
  data: str
  context: int
  head_dim: int
  metric: str
  value: float
  ci_low: float | None = None
  ci_high: float | None = None
  bits_per_value: float | None = None
  calibrated_on: CalibratedOn | None = None
  implementation: str = "xla"
  git_revision: str = dataclasses.field(default_factory=git_revision)
  source_hash: str | None = None
  jax_version: str = jax.__version__
  device: str = dataclasses.field(default_factory=lambda: jax.devices()[0].device_kind)
  time: str = dataclasses.field(
    default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
  )

  def __post_init__(self):
    if self.level not in LEVELS:
      raise ValueError(f"level must be one of {LEVELS}, got {self.level!r}")
    if self.source_hash is None:
      object.__setattr__(self, "source_hash", definition_hash(self.implementation))

  @property
  def stale(self) -> bool:
    """Whether the sources that made the number have changed since."""
    return self.source_hash != definition_hash(self.implementation)


# Of a row's own; what else it says, it shares with the other numbers of its case.
_OWN = ("metric", "value", "ci_low", "ci_high", "time")


def to_json(rows: Sequence[QualityRow]) -> str:
  """One line: a case and its numbers, each metric's value or [value, ci_low, ci_high].

  Fields that are None, and a config's that are its class's defaults, are left out; numbers keep six
  digits. The time is the first row's.
  """
  fields: dict[str, Any] = _shared(rows[0]) | {"time": rows[0].time}
  if fields["bits_per_value"] is not None:
    fields["bits_per_value"] = _written(fields["bits_per_value"])
  fields["config"] = {
    f.name: fields["config"][f.name]
    for f in dataclasses.fields(QualityConfig)
    if fields["config"][f.name] != f.default
  }
  fields["numbers"] = {row.metric: _number(row) for row in rows}
  return json.dumps({n: f for n, f in fields.items() if f is not None}, allow_nan=False)


def _shared(row: QualityRow) -> dict[str, Any]:
  return {n: f for n, f in dataclasses.asdict(row).items() if n not in _OWN}


def _number(row: QualityRow) -> float | str | list[float | str]:
  if row.ci_low is None or row.ci_high is None:
    return _written(row.value)
  return [_written(x) for x in (row.value, row.ci_low, row.ci_high)]


def _written(number: float) -> float | str:
  """JSON has no infinity and no NaN: those are written as text."""
  number = float(number)
  return float(f"{number:.6g}") if math.isfinite(number) else str(number)


def from_json(line: str) -> list[QualityRow]:
  fields = json.loads(line)
  numbers, config = fields.pop("numbers"), QualityConfig(**fields.pop("config"))
  if "calibrated_on" in fields:  # rows of before it was written have none
    fields["calibrated_on"] = CalibratedOn(**fields["calibrated_on"])
  rows = []
  for metric, written in numbers.items():
    three = written if isinstance(written, list) else [written]
    own = dict(zip(("value", "ci_low", "ci_high"), map(float, three), strict=False))
    rows.append(QualityRow(**fields, config=config, metric=metric, **own))
  return rows


def write(rows: Iterable[QualityRow], path: pathlib.Path) -> None:
  """Rows of a case that follow each other share a line."""
  path.parent.mkdir(parents=True, exist_ok=True)
  cases = itertools.groupby(rows, key=_shared)
  path.write_text("".join(to_json(list(of_case)) + "\n" for _, of_case in cases))


def read(path: pathlib.Path) -> list[QualityRow]:
  """All rows of a file. Raises ValueError for a line that is none (message: file, line, value)."""
  rows = []
  for number, line in enumerate(path.read_text().splitlines(), 1):
    if not line:
      continue
    try:
      rows += from_json(line)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
      raise ValueError(
        f"{path.name}, line {number}, must be a case of the quality benchmark as JSON, got "
        f"{textwrap.shorten(line, 60)!r}: {type(error).__name__}: {error}"
      ) from error
  return rows
