"""How long attention of a step takes, by measurements of kernels.

Prefill is looked up by query and key length, decode by the sequences of a batch and the keys that
it reads together, append by tokens. Between measured shapes the logarithm of

    prefill   the time of a pair of a query and a key that it sees, in the logarithms of q_len and
              kv_len. That varies by less than the time does, and near full prefill, where a log-log
              line of times is off by half, hardly
    decode    the time, in those of the sequences and of all their keys: batches that read as many
              keys together differ by up to 8 %
    append    the time, in that of the tokens

is interpolated. Beyond what was measured the last time of a pair, key or token holds upwards, and
the last time downwards; a batch's time falls on below its fewest keys as it did above, down to the
least that any took. Sequences that prefill in one step are summed: what was measured is one at
a time, so that several short ones are overestimated.

The mixed format, fp8 K with nvfp4 V, was not measured. Its decode and append are taken as the mean
of both formats', which they are if bytes decide; its prefill as fp8's, whose kernels it takes.

Short chunks over long caches have kernels of their own in this package for NVFP4 alone (tails, and
the fused ones): fp8 and bf16 take up to twelve times as long there, which says nothing about the
formats. The costs called `alike` therefore take chunks of up to 512 tokens to last as long in every
format as in NVFP4.

    alike     measured, but for short chunks: see above
    measured  as it is
    equal     every format as long as fp8 with `alike`: what pages alone are worth
    seeds     the two articles' kernels
    ratios    the articles' fp8 kernels, and other formats as much faster or slower as in `alike`
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from benchmarks.measured import QUALITY, RESULTS, is_stale
from benchmarks.records import read
from benchmarks.serve_formats import BASELINE, FORMATS, Format, Heads
from benchmarks.serve_model import ModelCosts
from benchmarks.serve_scheduler import Step
from nvfp4_pallas.policy import Cost, CostTable

LEAST_SHAPES = 4  # of prefill by one read path
SHORT = 512  # tokens of a chunk, up to which kernels for short queries are the fastest
TABLE_HEADS = Heads(1, 32, 8, 128)  # of the rows that are used


class LayerCosts(Protocol):
  """Seconds of one layer's kernels."""

  def prefill(self, q_len: int, kv_len: int) -> float:
    """Of one sequence; kv_len counts the new tokens."""
    ...

  def decode(self, sequences: int, keys: int) -> float:
    """Of a batch of so many sequences that reads so many keys together."""
    ...

  def append(self, tokens: int) -> float: ...


@dataclasses.dataclass
class Times:
  """Seconds of a step, or of many, by what was done. `other` is the model and the host."""

  prefill: float = 0.0
  decode: float = 0.0
  append: float = 0.0
  other: float = 0.0

  @property
  def total(self) -> float:
    return self.prefill + self.decode + self.append + self.other

  def __iadd__(self, more: Times) -> Times:
    self.prefill += more.prefill
    self.decode += more.decode
    self.append += more.append
    self.other += more.other
    return self

  def __add__(self, more: Times) -> Times:
    total = dataclasses.replace(self)
    total += more
    return total


@dataclasses.dataclass(frozen=True)
class StepCosts:
  """Of all layers and the model."""

  layer: LayerCosts
  layers: int
  model: ModelCosts

  def times(self, step: Step) -> Times:
    prefill = sum(self.layer.prefill(n, before + n) for _, before, n in step.chunks)
    decode = self.layer.decode(len(step.decodes), step.context) if step.decodes else 0.0
    decodes, read = len(step.decodes), step.chunk_tokens
    written = decodes + sum(before + n == r.tokens for r, before, n in step.chunks)
    return Times(
      self.layers * prefill,
      self.layers * decode,
      self.layers * self.layer.append(read + decodes),
      self.model.seconds(read, decodes, written),
    )


class Curve:
  """A positive function through measured points, straight in the logarithms of both axes."""

  def __init__(self, points: Mapping[int, float], *, above: float, falls: bool = False):
    """above: the slope beyond the last point; before the first one it is 0, or if the function
    `falls` that between the first two."""
    ordered = sorted(points.items())
    self._x = [math.log(x) for x, _ in ordered]
    self._y = [math.log(y) for _, y in ordered]
    self._above = above
    self._below = 0.0
    if falls and len(ordered) > 1:
      self._below = (self._y[1] - self._y[0]) / (self._x[1] - self._x[0])

  def __call__(self, x: float) -> float:
    return math.exp(self.log_at(math.log(x)))

  def log_at(self, x: float) -> float:
    place = bisect.bisect_left(self._x, x)
    if place == 0:
      return self._y[0] + self._below * (x - self._x[0])
    if place == len(self._x):
      return self._y[-1] + self._above * (x - self._x[-1])
    x0, x1 = self._x[place - 1 : place + 1]
    y0, y1 = self._y[place - 1 : place + 1]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def pairs(q_len: int, kv_len: int) -> float:
  """Of a query and a key that it sees, causal: the last query sees all kv_len keys."""
  return q_len * (kv_len - (q_len - 1) / 2)


class PrefillSurface:
  """Microseconds of one sequence's prefill by one read path, through measured shapes."""

  def __init__(self, measured: Mapping[tuple[int, int], float]):
    """measured: (q_len, kv_len) -> microseconds."""
    if len(measured) < LEAST_SHAPES:
      raise ValueError(f"measured must be at least {LEAST_SHAPES} shapes, got {len(measured)}")
    columns: dict[int, dict[int, float]] = {}
    for (q_len, kv_len), us in measured.items():
      columns.setdefault(q_len, {})[kv_len] = us / pairs(q_len, kv_len)
    self._q_lens = sorted(columns)
    self._columns = [Curve(columns[q], above=0.0) for q in self._q_lens]
    self._least = min(measured.values())

  def __call__(self, q_len: int, kv_len: int) -> float:
    q_len = max(q_len, self._q_lens[0])  # fewer queries take the same tile
    kv_len = max(kv_len, q_len)
    log_us = _between(self._q_lens, self._columns, q_len, kv_len)
    return max(math.exp(log_us) * pairs(q_len, kv_len), self._least)


class DecodeSurface:
  """Microseconds of a batch's decode, through measured shapes."""

  def __init__(self, measured: Mapping[tuple[int, int], float]):
    """measured: (sequences, keys of all of them) -> microseconds."""
    columns: dict[int, dict[int, float]] = {}
    for (sequences, keys), us in measured.items():
      columns.setdefault(sequences, {})[keys] = us
    self._sequences = sorted(columns)
    self._columns = [Curve(columns[n], above=1.0, falls=True) for n in self._sequences]
    self._least = min(measured.values())

  def __call__(self, sequences: float, keys: float) -> float:
    sequences = min(max(sequences, self._sequences[0]), self._sequences[-1])
    return max(math.exp(_between(self._sequences, self._columns, sequences, keys)), self._least)


def _between(places: Sequence[int], columns: Sequence[Curve], place: float, x: float) -> float:
  """The logarithm at x between the columns of two places, or beyond the last that of the last."""
  log_x = math.log(x)
  after = bisect.bisect_left(places, place)
  if after == len(places):
    return columns[-1].log_at(log_x)
  if places[after] == place:
    return columns[after].log_at(log_x)
  low, high = places[after - 1], places[after]
  share = math.log(place / low) / math.log(high / low)
  below, above = (column.log_at(log_x) for column in columns[after - 1 : after + 1])
  return below + share * (above - below)


class TableCosts:
  """LayerCosts of a format from measured rows, scaled to other heads by their number."""

  def __init__(
    self,
    format: Format,
    heads: Heads,
    table: CostTable,
    appends: Mapping[str, Mapping[int, float]],
    *,
    short: Format | None = None,
  ):
    """
    Args:
      appends: of bf16, fp8 and nvfp4, tokens -> microseconds.
      short: whose prefill is taken for chunks of up to SHORT tokens; None: the format's own.

    Raises:
      ValueError: rows are missing (message: of what).
    """
    self._q = heads.num_q_heads * heads.head_dim / (TABLE_HEADS.num_q_heads * TABLE_HEADS.head_dim)
    kv = TABLE_HEADS.num_kv_heads * TABLE_HEADS.head_dim
    self._kv = heads.num_kv_heads * heads.head_dim / kv
    parts = [FORMATS[f] for f in dict.fromkeys((format.k_format, format.v_format))]
    self._long = _surfaces(table, format if len(parts) == 1 else BASELINE)
    self._short = self._long if short is None else _surfaces(table, short)
    self._decode = [_decode_surface(table, f) for f in parts]
    self._append = [_append_curve(appends, f) for f in parts]

  def prefill(self, q_len: int, kv_len: int) -> float:
    surfaces = self._short if q_len <= SHORT else self._long
    return 1e-6 * self._q * min(surface(q_len, kv_len) for surface in surfaces)

  def decode(self, sequences: int, keys: int) -> float:
    """With half the heads it is as if of half as many sequences."""
    at = self._kv * sequences, self._kv * keys
    return 1e-6 * _mean([surface(*at) for surface in self._decode])

  def append(self, tokens: int) -> float:
    return 1e-6 * _mean([curve(self._kv * tokens) for curve in self._append])


def _mean(values: Sequence[float]) -> float:
  return sum(values) / len(values)


def _emulated(row: Cost) -> bool:
  """Times of A4Q on 16-bit tensor cores say nothing of what it takes on FP4 ones."""
  return row.read_path == "nvfp4_a4q" and row.implementation == "mosaic_sm90"


def _rows(table: CostTable, phase: str, format: Format, path: str) -> Iterable[Cost]:
  for row in table.rows:
    if (
      (row.phase, row.read_path) == (phase, path)
      and not _emulated(row)
      and (row.k_format, row.v_format) == (format.k_format, format.v_format)
      and row.geometry.num_q_heads == TABLE_HEADS.num_q_heads
      and row.geometry.num_kv_heads == TABLE_HEADS.num_kv_heads
      and row.geometry.head_dim == TABLE_HEADS.head_dim
    ):
      yield row


def _surfaces(table: CostTable, format: Format) -> list[PrefillSurface]:
  return [_surface(table, format, path) for path in format.prefill_paths]


def _surface(table: CostTable, format: Format, path: str) -> PrefillSurface:
  rows = [row for row in _rows(table, "prefill", format, path) if row.batch == 1]
  try:
    return PrefillSurface({(row.q_len, row.kv_len): row.us for row in rows})
  except ValueError as error:
    raise ValueError(f"costs of {table.device}, prefill by {path}: {error}") from None


def _decode_surface(table: CostTable, format: Format) -> DecodeSurface:
  rows = _rows(table, "decode", format, format.decode_path)
  measured = {(row.batch, row.batch * row.kv_len): row.us for row in rows}
  if not measured:
    raise ValueError(
      f"costs of {table.device} must have rows of decode by {format.decode_path} over "
      f"{format.k_format}, got none"
    )
  return DecodeSurface(measured)


def _append_curve(appends: Mapping[str, Mapping[int, float]], format: Format) -> Curve:
  measured = appends.get(format.k_format)
  if not measured:
    raise ValueError(f"appends must have rows of {format.k_format}, got {sorted(appends)}")
  return Curve(measured, above=1.0)


def committed_appends() -> dict[str, dict[int, float]]:
  """Of benchmarks/results: format -> tokens -> microseconds, of plain caches with scale 1; those
  of other kernel sources only where there are no others."""
  paths = [path for path in sorted(RESULTS.glob("*.jsonl")) if path.name != QUALITY]
  rows = filter(_is_append, itertools.chain.from_iterable(map(read, paths)))
  found: dict[str, dict[int, float]] = {}
  for row in sorted(rows, key=lambda row: (not is_stale(row), row["time"])):
    found.setdefault(row["k_format"], {})[row["batch"] * row["q_len"]] = row["us_median"]
  return found


def _is_append(row: dict) -> bool:
  return (
    row["phase"] == "append"
    and row["data"].endswith("global scale 1.0")
    and row["k_format"] == row["v_format"]
    and row["us_median"] is not None
    and row["implementation"] == "mosaic_sm90"
    and not row.get("levers")
  )


@dataclasses.dataclass(frozen=True)
class SeedCosts:
  """The two articles' kernels on an RTX PRO 5000, as far as they are told.

  A 16K prompt takes 11.1 ms a layer in FP8, 21.0 in NVFP4 and 18.0 with A4Q; decode 12.35 and 9.63
  microseconds a call, of which the number of keys is not told: its ratio is applied to FP8's bytes
  at BYTES_PER_SECOND; append 3.01 and 8.39 a call.
  """

  format: Format
  heads: Heads

  BYTES_PER_SECOND = 1.0e12  # of 1.344e12: an assumption
  PREFILL = {"fp8": 11.1e-3, "nvfp4_dequant": 21.0e-3, "nvfp4_a4q": 18.0e-3}
  DECODE = {"fp8": 1.0, "nvfp4_dequant": 9.63 / 12.35}
  APPEND = {"fp8": 3.01e-6, "nvfp4": 8.39e-6}

  def __post_init__(self):
    if not set(self.format.prefill_paths) & self.PREFILL.keys():
      raise ValueError(f"format must be read by one of {tuple(self.PREFILL)}, got {self.format}")

  def prefill(self, q_len: int, kv_len: int) -> float:
    times = [self.PREFILL[path] for path in self.format.prefill_paths if path in self.PREFILL]
    return min(times) * pairs(q_len, kv_len) / pairs(2**14, 2**14)

  def decode(self, sequences: int, keys: int) -> float:
    fp8 = self.heads.token_bytes(BASELINE) / self.heads.layers / self.BYTES_PER_SECOND
    return fp8 * keys * self.DECODE[self.format.decode_path]

  def append(self, tokens: int) -> float:
    return self.APPEND[self.format.k_format]


@dataclasses.dataclass(frozen=True)
class ScaledCosts:
  """What one server would take if its kernels stood to each other as another's do.

  Attributes:
    base: of the first server, in the baseline's format.
    of, to: of the second one: in some format, and in the baseline's.
  """

  base: LayerCosts
  of: LayerCosts
  to: LayerCosts

  def prefill(self, q_len: int, kv_len: int) -> float:
    ratio = self.of.prefill(q_len, kv_len) / self.to.prefill(q_len, kv_len)
    return self.base.prefill(q_len, kv_len) * ratio

  def decode(self, sequences: int, keys: int) -> float:
    base, of, to = (costs.decode(sequences, keys) for costs in (self.base, self.of, self.to))
    return base * of / to

  def append(self, tokens: int) -> float:
    return self.base.append(tokens) * self.of.append(tokens) / self.to.append(tokens)


COSTS = ("alike", "measured", "equal", "seeds", "ratios")


def layer_costs(
  kind: str,
  format: Format,
  heads: Heads,
  table: CostTable | None = None,
  appends: Mapping[str, Mapping[int, float]] | None = None,
) -> LayerCosts:
  """Of one of COSTS (see the module).

  Args:
    table, appends: measured; None: the shipped table, and the committed rows.

  Raises:
    ValueError: there are no such costs of the format.
  """
  if kind not in COSTS:
    raise ValueError(f"kind must be one of {COSTS}, got {kind!r}")
  if kind == "seeds":
    return SeedCosts(format, heads)
  table = CostTable.h200() if table is None else table
  appends = committed_appends() if appends is None else appends
  short = None if kind == "measured" else FORMATS["nvfp4"]
  ours = lambda of: TableCosts(of, heads, table, appends, short=short)
  if kind == "ratios":
    return ScaledCosts(SeedCosts(BASELINE, heads), ours(format), ours(BASELINE))
  return ours(BASELINE if kind == "equal" else format)
