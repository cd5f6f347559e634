"""One number of the quality benchmark as a row of data: of what, by whom, on what."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import pathlib
from collections.abc import Iterable

import jax

from benchmarks.committed import QUALITY, RESULTS
from benchmarks.quality_configs import QualityConfig
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


_NUMBERS = ("value", "ci_low", "ci_high", "bits_per_value")


def to_json(row: QualityRow) -> str:
  """One line; fields that are None, and a config's that are its class's defaults, are left out;
  numbers keep six digits."""
  fields = dataclasses.asdict(row)
  fields["config"] = {
    f.name: fields["config"][f.name]
    for f in dataclasses.fields(row.config)
    if fields["config"][f.name] != f.default
  }
  for name in _NUMBERS:
    fields[name] = None if fields[name] is None else _written(float(fields[name]))
  return json.dumps({n: f for n, f in fields.items() if f is not None}, allow_nan=False)


def _written(number: float) -> float | str:
  """JSON has no infinity and no NaN: those are written as text."""
  return float(f"{number:.6g}") if math.isfinite(number) else str(number)


def from_json(line: str) -> QualityRow:
  fields = json.loads(line)
  for name in _NUMBERS:
    if name in fields:
      fields[name] = float(fields[name])
  return QualityRow(**fields | {"config": QualityConfig(**fields["config"])})


def write(rows: Iterable[QualityRow], path: pathlib.Path) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("".join(to_json(row) + "\n" for row in rows))


def read(path: pathlib.Path) -> list[QualityRow]:
  return [from_json(line) for line in path.read_text().splitlines() if line]
