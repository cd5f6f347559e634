"""Which read path is fastest for a shape, as predicted from times that were measured on a device.

A prediction is log-log interpolation, linear in each of log(batch * num_kv_heads), log(query rows
of a KV head: q_len * group) and log(kv_len), between the nearest measured shapes of the same read
path. Where the measured grid has holes, those neighbours count that leave least to extrapolate.
Beyond what was measured the last slope goes on, kept between 0 and 1, as time grows with the work
and no faster; from a single measurement it is 1 upwards and 0 downwards, which can only
overestimate. The reason says which axes are extrapolated.

Nothing here looks at a device or a cache: costs are data (`CostTable`). The one shipped is of an
H200; `python3 -m benchmarks costs` makes one of any run of `python3 -m benchmarks matrix`, and
`use_costs` lets `read_path="auto"` choose by it (ops/auto.py).

Limits: it does not know which kernel runs, so between two measured shapes it is blind to where that
changes, and a last slope from two close shapes may be far too small. Paths that were measured at
different shapes are extrapolated from different ones: measure all of them where a choice matters.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import json
import math
import operator
import pathlib
from collections.abc import Iterator, Mapping

from nvfp4_pallas.cache import KV_FORMATS
from nvfp4_pallas.read_paths import READ_PATHS, formats_lacking

PHASES = ("prefill", "decode")
# Those whose numbers are attention to the decoded cache with a bfloat16 Q.
EXACT_PATHS = ("bf16", "fp8", "nvfp4_dequant", "nvfp4_repack")
MAX_WORKSPACE_BYTES = 16 * 2**30  # prefill's too, unless the caller says otherwise
WORKSPACE_KEYS = 128  # a workspace is made of tiles of so many keys
# Times within this factor count as equal, and the smaller workspace decides: one kernel timed twice
# differs by that much (nvfp4_repack and nvfp4_dequant of few queries are one; below 10 us by 4 %).
AS_FAST = 1.02
USUAL_HEAD_DIM = 128
H200_COSTS = pathlib.Path(__file__).parent / "data" / "h200_costs.json"


@dataclasses.dataclass(frozen=True)
class Geometry:
  """Of one attention layer, as the device holds it."""

  num_q_heads: int
  num_kv_heads: int
  head_dim: int

  def __post_init__(self):
    for field in dataclasses.fields(self):
      _at_least(field.name, getattr(self, field.name), 1)
    if self.num_q_heads % self.num_kv_heads:
      raise ValueError(
        f"num_q_heads must be a multiple of num_kv_heads {self.num_kv_heads}, "
        f"got {self.num_q_heads}"
      )

  @property
  def group(self) -> int:
    return self.num_q_heads // self.num_kv_heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
  """One measurement: microseconds of device time, and device memory beside the results."""

  phase: str
  read_path: str
  k_format: str
  v_format: str
  implementation: str
  num_q_heads: int
  num_kv_heads: int
  head_dim: int
  batch: int
  q_len: int
  kv_len: int
  us: float
  workspace_bytes: int

  def __post_init__(self):
    check_one_of("phase", self.phase, PHASES)
    check_one_of("read_path", self.read_path, READ_PATHS)
    check_one_of("k_format", self.k_format, KV_FORMATS)
    check_one_of("v_format", self.v_format, KV_FORMATS)
    for name in ("batch", "q_len", "kv_len"):
      _at_least(name, getattr(self, name), 1)
    _at_least("workspace_bytes", self.workspace_bytes, 0)
    if not isinstance(self.us, int | float) or not 0 < self.us < math.inf:
      raise ValueError(f"us must be positive and finite, got {self.us}")
    _ = self.geometry  # which has rules of its own

  @property
  def geometry(self) -> Geometry:
    return Geometry(self.num_q_heads, self.num_kv_heads, self.head_dim)

  @property
  def shape(self) -> tuple[int, int, int]:
    return self.batch, self.q_len, self.kv_len


@dataclasses.dataclass(frozen=True)
class CostTable:
  """Measurements of one device.

  Attributes:
    device: its name, as `jax.Device.device_kind` has it.
    revision: the commits that were measured.
    kernel_hashes: of the sources of the measured kernels, with the names of those kernels
      (benchmarks/sources.py): other hashes mean that the costs are of other kernels.
    rows: what was measured.
  """

  device: str
  revision: str
  kernel_hashes: Mapping[str, tuple[str, ...]]
  rows: tuple[Cost, ...]

  @classmethod
  def load(cls, path: str | pathlib.Path) -> CostTable:
    """Of a file that `save` wrote; ValueError, which names the file, where it is none."""
    text = pathlib.Path(path).read_text(encoding="utf-8")
    try:
      fields = json.loads(text)
      columns = fields.pop("columns")
      rows = tuple(Cost(**dict(zip(columns, row, strict=True))) for row in fields.pop("rows"))
      hashes = {key: tuple(names) for key, names in fields.pop("kernel_hashes").items()}
      return cls(**fields, kernel_hashes=hashes, rows=rows)
    except KeyError as error:
      raise ValueError(f"{path} must be a table of costs, it has no {error}") from None
    except (AttributeError, TypeError, ValueError) as error:
      raise ValueError(f"{path} must be a table of costs: {error}") from None

  def save(self, path: str | pathlib.Path) -> None:
    """As JSON, a measurement a line."""
    columns = [field.name for field in dataclasses.fields(Cost)]
    head = {
      "device": self.device,
      "revision": self.revision,
      "kernel_hashes": self.kernel_hashes,
      "columns": columns,
    }
    members = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    rows = [json.dumps([getattr(row, name) for name in columns]) for row in self.rows]
    members.append('"rows": [\n' + ",\n".join(rows) + "\n]")
    pathlib.Path(path).write_text("{" + ",\n".join(members) + "}\n", encoding="utf-8")

  def knows(self, phase: str, formats: tuple[str, str]) -> bool:
    """Whether any exact path of the phase was measured over such K and V."""
    return any(_is_of(row, phase, path, formats) for path in EXACT_PATHS for row in self.rows)

  @classmethod
  @functools.cache
  def h200(cls) -> CostTable:
    """The shipped one."""
    return cls.load(H200_COSTS)


_costs: contextvars.ContextVar[CostTable | None] = contextvars.ContextVar("costs", default=None)


@contextlib.contextmanager
def use_costs(costs: CostTable) -> Iterator[None]:
  """`read_path="auto"` chooses by these costs, on whatever device.

  It acts while a function is traced and is no part of jit's cache key: trace a fresh function.
  """
  token = _costs.set(costs)
  try:
    yield
  finally:
    _costs.reset(token)


def costs_for(device: str) -> CostTable | None:
  """Those of `use_costs`, or the shipped ones if they are of this device (`device_kind`)."""
  given = _costs.get()
  if given is None and device == CostTable.h200().device:
    return CostTable.h200()
  return given


@dataclasses.dataclass(frozen=True)
class Choice:
  """The read path predicted to be fastest.

  Attributes:
    read_path: what to pass to `prefill` or `decode`.
    implementation: who ran it where it was measured, nearest to this shape; None where nothing
      measured led to the choice.
    workspace_bytes: of device memory beside the results; None likewise.
    predicted_us: device time of the call; None likewise.
    reason: one sentence: against which others, and whether anything was extrapolated.
  """

  read_path: str
  implementation: str | None
  workspace_bytes: int | None
  predicted_us: float | None
  reason: str


def choose_read_path(
  phase: str,
  q_len: int,
  kv_len: int,
  batch: int,
  geometry: Geometry,
  device: str,
  costs: CostTable | None = None,
  *,
  formats: tuple[str, str] = ("nvfp4", "nvfp4"),
  allowed: tuple[str, ...] = EXACT_PATHS,
  max_workspace_bytes: int = MAX_WORKSPACE_BYTES,
) -> Choice:
  """Of the read paths that may be taken, the one with the least predicted time.

  Of those within AS_FAST of it, the one with the smallest workspace.

  Args:
    phase: `prefill`, or `decode` with its one query token a sequence.
    q_len, kv_len: query tokens and keys of each sequence, the new ones included; of a ragged batch
      the averages, rounded.
    batch: sequences.
    geometry: heads on one device and their dimension. KV heads count as sequences do, query heads
      of one KV head as query tokens (in decode they cost nothing).
    device: what will run it, as `jax.Device.device_kind` names it.
    costs: measured times; None takes the shipped ones, which are of an H200 alone. Of another
      device than `device`, they stand for it, and the reason says so.
    formats: of the cache's K and V.
    allowed: paths to choose from, those that the formats have no use for being left out. The rest
      of READ_PATHS changes numbers (read_paths.py), so it must be asked for.
    max_workspace_bytes: as for `prefill`.

  Raises:
    ValueError: an argument breaks a rule, nothing of `allowed` was measured, or nothing fits
      (message: argument, rule, value).
  """
  check_one_of("phase", phase, PHASES)
  for name, value in (("q_len", q_len), ("kv_len", kv_len), ("batch", batch)):
    _at_least(name, value, 1)
  if phase == "decode" and q_len != 1:
    raise ValueError(f"q_len must be 1 for decode, got {q_len}")
  if q_len > kv_len:
    raise ValueError(f"q_len must be at most kv_len {kv_len}, which counts new tokens, got {q_len}")
  _at_least("max_workspace_bytes", max_workspace_bytes, 0)
  paths = _paths(formats, allowed)
  _of_type("geometry", geometry, Geometry)
  if costs is not None:
    _of_type("costs", costs, CostTable)
  else:
    costs = CostTable.h200()
    if device != costs.device:
      raise ValueError(
        f"costs must be given for a device other than {costs.device}, got {device!r}"
      )

  shape = batch, q_len, kv_len
  predicted = [
    _predict(rows, phase, shape, geometry)
    for path in paths
    if (rows := [row for row in costs.rows if _is_of(row, phase, path, formats)])
  ]
  if not predicted:
    raise ValueError(
      f"costs must have rows of {phase} by one of {paths} over K {formats[0]} and V {formats[1]}, "
      f"those of {costs.device} have none"
    )
  fitting = [one for one in predicted if one.workspace_bytes <= max_workspace_bytes]
  if not fitting:
    least = min(one.workspace_bytes for one in predicted)
    raise ValueError(
      f"max_workspace_bytes must be at least {least} for any of {paths}, got {max_workspace_bytes}"
    )
  fastest = min(one.us for one in fitting)
  as_fast = [one for one in fitting if one.us <= AS_FAST * fastest]
  best = min(as_fast, key=lambda one: (one.workspace_bytes, one.us))
  return Choice(
    best.read_path,
    best.implementation,
    best.workspace_bytes,
    best.us,
    _reason(best, predicted, paths, max_workspace_bytes, device, costs),
  )


def _paths(formats: tuple[str, str], allowed: tuple[str, ...]) -> tuple[str, ...]:
  if not isinstance(formats, tuple | list) or len(formats) != 2:
    raise ValueError(f"formats must be a pair, of K and V, got {formats!r}")
  for format in formats:
    check_one_of("formats", format, KV_FORMATS)
  if not isinstance(allowed, tuple | list):
    raise ValueError(f"allowed must be a tuple of read paths, got {allowed!r}")
  for path in allowed:
    check_one_of("allowed", path, READ_PATHS)
  paths = tuple(path for path in allowed if formats_lacking(path, formats) is None)
  if not paths:
    k, v = formats
    raise ValueError(f"allowed must have a read path for K {k} and V {v}, got {tuple(allowed)}")
  return paths


def _is_of(row: Cost, phase: str, path: str, formats: tuple[str, str]) -> bool:
  return (row.phase, row.read_path, row.k_format, row.v_format) == (phase, path, *formats)


@dataclasses.dataclass(frozen=True)
class _Prediction:
  """Of one read path; `notes` says what in it is no interpolation."""

  read_path: str
  implementation: str
  us: float
  workspace_bytes: int
  notes: tuple[str, ...]


def _predict(rows: list[Cost], phase: str, shape, geometry: Geometry) -> _Prediction:
  head_dims = {row.head_dim for row in rows}
  head_dim = geometry.head_dim
  notes = []
  if head_dim not in head_dims:
    near = lambda dim: (dim != USUAL_HEAD_DIM, abs(dim - geometry.head_dim), dim)
    head_dim = min(head_dims, key=near)
    notes.append(f"head_dim {head_dim}'s costs stand for {geometry.head_dim}")
  rows = [row for row in rows if row.head_dim == head_dim]
  place = _place(phase, shape, geometry)
  found = _estimate({_place(phase, row.shape, row.geometry): row for row in rows}, place)
  for axis, bound in sorted(found.beyond.items()):
    at, towards = place[axis], "down" if place[axis] < bound else "up"
    notes.append(f"extrapolated to {_AXES[axis]} {at}, measured {towards} to {bound}")
  # All keys of a sequence are widened, or none: where neighbours differ it is the larger number.
  per_key = max(
    cost.workspace_bytes / (cost.batch * cost.num_kv_heads * cost.kv_len) for cost in found.costs
  )
  keys = -(-shape[2] // WORKSPACE_KEYS) * WORKSPACE_KEYS
  workspace = math.ceil(per_key * geometry.head_dim / head_dim * place[0] * keys)
  nearest = found.costs[0]
  us = math.exp(found.log_us)
  return _Prediction(nearest.read_path, nearest.implementation, us, workspace, tuple(notes))


_AXES = ("batch x KV heads", "query rows a KV head", "kv_len")


def _place(phase: str, shape, geometry: Geometry) -> tuple[int, int, int]:
  """Where a shape stands on _AXES. Decode waits for the memory, whatever the group."""
  batch, q_len, kv_len = shape
  rows = 1 if phase == "decode" else q_len * geometry.group
  return batch * geometry.num_kv_heads, rows, kv_len


@dataclasses.dataclass(frozen=True)
class _Estimate:
  """A time at one place.

  Attributes:
    beyond: of each axis that is extrapolated, the last value before.
    distance: how far, summed over axes, in the log.
    costs: the measurements it is made of, the nearest first.
  """

  log_us: float
  beyond: Mapping[int, int]
  distance: float
  costs: tuple[Cost, ...]


def _estimate(measured: Mapping[tuple[int, ...], Cost], place, axis: int = 0) -> _Estimate:
  """At `place`, from measurements that agree on the axes before `axis`."""
  if axis == len(place):
    (cost,) = measured.values()
    return _Estimate(math.log(cost.us), {}, 0.0, (cost,))
  slices: dict[int, dict] = {}
  for other, cost in measured.items():
    slices.setdefault(other[axis], {})[other] = cost
  at = {value: _estimate(part, place, axis + 1) for value, part in slices.items()}
  value = place[axis]
  values = _least_extrapolated(at, value)
  if value in values:
    return at[value]
  below = [other for other in values if other < value]
  above = [other for other in values if other > value]
  if below and above:
    return _between(at[below[-1]], at[above[0]], _share(below[-1], value, above[0]))
  last, before = (above[0], above[1:2]) if above else (below[-1], below[-2:-1])
  slope = float(value > last)
  if before:
    rise = (at[last].log_us - at[before[0]].log_us) / math.log(last / before[0])
    slope = min(max(rise, 0.0), 1.0)
  farther = math.log(value / last)
  return _Estimate(
    at[last].log_us + slope * farther,
    {**at[last].beyond, axis: last},
    at[last].distance + abs(farther),
    at[last].costs,
  )


def _least_extrapolated(at: Mapping[int, _Estimate], value: int) -> list[int]:
  """Of the values of an axis, in order, those whose estimates leave least to extrapolate to."""
  options = []
  for limit in {round(estimate.distance, 9) for estimate in at.values()}:
    values = sorted(x for x, estimate in at.items() if estimate.distance <= limit + 1e-9)
    outside = max(values[0] / value, value / values[-1], 1.0)
    options.append((round(limit + math.log(outside), 9), limit, values))
  return min(options)[-1]


def _share(low: int, value: int, high: int) -> float:
  return math.log(value / low) / math.log(high / low)


def _between(low: _Estimate, high: _Estimate, share: float) -> _Estimate:
  near, far = (low, high) if share <= 0.5 else (high, low)
  return _Estimate(
    (1 - share) * low.log_us + share * high.log_us,
    {**far.beyond, **near.beyond},
    max(low.distance, high.distance),
    near.costs + far.costs,
  )


def _reason(best, predicted, paths, limit: int, device: str, costs: CostTable) -> str:
  said = [f"{best.us:.4g} us predicted", *best.notes]
  for one in sorted(predicted, key=lambda one: one.us):
    if one is not best:
      said.append(f"{one.read_path} {one.us:.4g} us")
      if one.workspace_bytes > limit:
        said[-1] += f", but a workspace of {one.workspace_bytes} bytes, more than {limit}"
      if one.notes:
        said[-1] += f" ({', '.join(one.notes)})"
  known = {one.read_path for one in predicted}
  said += [f"{path} was not measured" for path in paths if path not in known]
  measured = f"measured on {costs.device}"
  said.append(measured if device == costs.device else f"{measured}, which stands for {device}")
  return "; ".join(said)


def check_one_of(name: str, value, known: tuple[str, ...]) -> None:
  if value not in known:
    raise ValueError(f"{name} must be one of {known}, got {value!r}")


def _of_type(name: str, value, known: type) -> None:
  if not isinstance(value, known):
    raise ValueError(f"{name} must be a {known.__name__}, got {value!r}")


def _at_least(name: str, value, least: int) -> None:
  try:
    if operator.index(value) < least:
      raise ValueError(f"{name} must be at least {least}, got {value}")
  except TypeError:
    raise ValueError(f"{name} must be a whole number, got {value!r}") from None
