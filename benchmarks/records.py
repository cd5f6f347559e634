"""A measurement as a row of data: what was run, by whom, on what, and what came out."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import math
import pathlib
import subprocess
from typing import Any

import jax

from benchmarks.sources import ROOT, definition_hash, kernel_hash
from benchmarks.workloads import attention
from nvfp4_pallas.dispatch import IMPLEMENTATIONS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One case. A field that does not apply is None; `us_*` are microseconds of `timer`.

  Attributes:
    phase: copy, pack, unpack, append, step, prefill, chunk, tail or decode.
    part: of the matrix.
    geometry: a name of workloads.GEOMETRIES.
    layout: of the pages.
    varied: what of the workload or the cache is not the matrix's usual.
    data: gaussian, or the layer of a model.
    batch, q_len, kv_len: sequences, and query and key tokens of each.
    read_path, implementation: the two axes; append and pack have no read path.
    q_levels, q_group, q_rounding, q_residual_scale: how Q was quantised, where it was.
    kernel_names: device kernels seen in the trace, or what ran in their place.
    operand_dtypes, products: of each kernel of the compiled call, see program.py.
    bytes: what a call must move at least; floor_us: that over the copy bandwidth, or FLOPs over
      their rate, whichever is longer.
    floor_fraction: floor_us / us_median, which is 1 at the floor.
    tflops: of attention: 4 * head_dim FLOPs for each query head and each key that it sees, over
      us_median, in 1e12 a second.
    batch_invariant: of decode, whether it was asked for.
    levers: what of the cache is not the usual: `w64` is a recent window, `4/6` the scale search,
      `hadK` a rotation.
    workspace_bytes: of device memory, that a call takes beside its results.
    us_by_kernel: the median of each kernel's time in a call, all its launches summed.
    copy_gbs: copy bandwidth of the same run, in 1e9 bytes a second.
    clocks: of the GPU right after the timed calls, see clocks.py.
    timer: `trace` is device time of all kernels of a call; `wall` is host time around it.
    kernel_error: mean over rows of relative L2 against float64 on the same decoded bytes.
    format_error: the same against wide inputs.
    snr_db: signal to noise of K, V and Q as stored or used, against wide.
    q_error_ratio: format_error over the same with Q in bfloat16.
    reason: why a case has no result, or why this implementation ran.
    error: what went wrong with a case that should have run.
    version: of the library that ran it, where that is a peer.
    seconds: of the host, that the case took in all.
    kernel_hash: of the sources of the kernels seen; empty where none is this package's.
    definition_hash: of the sources that an implementation of this package has its numbers from,
      where none of its kernels was seen.
  """

  phase: str
  data: str
  batch: int
  q_len: int
  kv_len: int
  page_size: int
  num_q_heads: int
  num_kv_heads: int
  head_dim: int
  k_format: str
  v_format: str
  read_path: str | None
  implementation: str
  part: str | None = None
  geometry: str | None = None
  layout: str | None = None
  varied: dict[str, Any] | None = None
  q_levels: int | None = None
  q_group: int | None = None
  q_rounding: str | None = None
  q_residual_scale: str | None = None
  kernel_names: tuple[str, ...] = ()
  operand_dtypes: dict[str, list[str]] | None = None
  products: dict[str, list[str]] | None = None
  bytes: int | None = None
  floor_us: float | None = None
  floor_fraction: float | None = None
  tflops: float | None = None
  batch_invariant: bool | None = None
  levers: str | None = None
  us_median: float | None = None
  us_min: float | None = None
  us_max: float | None = None
  us_count: int | None = None
  us_by_kernel: dict[str, float] | None = None
  copy_gbs: float | None = None
  clocks: dict[str, float] | None = None
  timer: str | None = None
  bytes_per_token: float | None = None
  workspace_bytes: int | None = None
  kernel_error: float | None = None
  format_error: float | None = None
  snr_db: dict[str, float] | None = None
  q_error_ratio: float | None = None
  reason: str | None = None
  error: str | None = None
  version: str | None = None
  seconds: float | None = None
  git_revision: str = dataclasses.field(default_factory=lambda: git_revision())
  kernel_hash: str | None = None
  definition_hash: str | None = None
  device: str = dataclasses.field(default_factory=lambda: jax.devices()[0].device_kind)
  jax_version: str = jax.__version__
  time: str = dataclasses.field(
    default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
  )

  def __post_init__(self):
    if self.kernel_hash is None:
      object.__setattr__(self, "kernel_hash", kernel_hash(self.kernel_names))
    if self.definition_hash is None:
      sources = definition_of(self.implementation, self.kernel_hash)
      object.__setattr__(self, "definition_hash", sources)


def definition_of(implementation: str, kernel_hash: str | None) -> str | None:
  """A row's `definition_hash` by the sources of now."""
  ours = implementation in IMPLEMENTATIONS
  return definition_hash(implementation) if ours and not kernel_hash else None


def q_quantisation(read_path: str, q_levels: int) -> dict:
  """The row's words for what a read path does to Q."""
  if read_path == "nvfp4_a4q":
    return {
      "q_levels": q_levels,
      "q_group": 16,
      "q_rounding": "nearest, ties to even",
      "q_residual_scale": "e4m3 per group" if q_levels == 2 else None,
    }
  if read_path == "nvfp4_a8q":
    return {"q_levels": 1, "q_rounding": "e4m3, nearest, ties to even; scale amax / 448 per row"}
  return {"q_rounding": "bfloat16"}


@functools.cache
def git_revision() -> str:
  """The commit, with `+` when the tree differs from it; `unknown` outside a checkout."""
  try:
    run = functools.partial(subprocess.check_output, cwd=ROOT, text=True, stderr=subprocess.DEVNULL)
    revision = run(["git", "rev-parse", "--short=12", "HEAD"]).strip()
    return revision + ("+" if run(["git", "status", "--porcelain", "-uno"]).strip() else "")
  except (OSError, subprocess.CalledProcessError):
    return "unknown"


NOT_FINITE = "output is not finite"


def is_finite(row: Row) -> bool:
  """Whether its output was, as far as it was judged."""
  errors = row.kernel_error, row.format_error, row.q_error_ratio
  return all(error is None or math.isfinite(error) for error in errors)


def write(rows: list[Row], path: pathlib.Path) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("".join(line(row) for row in rows))


def line(row: Row) -> str:
  """Of a file of rows. What does not apply is left out, `read` fills it in."""
  return line_of(_finite(row))


def line_of(fields: dict) -> str:
  """The same of a row that was read."""
  known = {name: _short(value) for name, value in fields.items() if value is not None}
  return json.dumps(known, allow_nan=False) + "\n"


def _short(value: Any) -> Any:
  """With seven digits of a float, which is more than any of them has."""
  if isinstance(value, float):
    return float(f"{value:.7g}")
  if isinstance(value, dict):
    return {name: _short(of) for name, of in value.items()}
  return value


def _finite(row: Row) -> dict:
  """The row, with what follows from it, and null for infinity, which JSON cannot say."""
  fields = dataclasses.asdict(row)
  if row.floor_us and row.us_median:
    fields["floor_fraction"] = row.floor_us / row.us_median
  if row.snr_db:
    fields["snr_db"] = {k: v if math.isfinite(v) else None for k, v in row.snr_db.items()}
  return fields


def read(path: pathlib.Path) -> list[dict]:
  """Rows with all fields; ValueError, which names the line, where one is none."""
  return parse(path.read_text(encoding="utf-8"), path)


def parse(lines: str, path: pathlib.Path) -> list[dict]:
  """The same of the lines of that file."""
  rows = []
  for number, text in enumerate(lines.splitlines(), 1):
    if text:
      try:
        rows.append(_as_now(_DEFAULTS | json.loads(text)))
      except (json.JSONDecodeError, TypeError) as error:
        raise ValueError(f"{path}, line {number} is no row: {error}") from None
  return rows


def _as_now(row: dict) -> dict:
  """Rows of before the matrix had a phase of their own for its grid. TypeError without a field
  that all rows have."""
  lacking = [name for name in _NEEDED if row[name] is None]
  if lacking:
    raise TypeError(f"it has no {', '.join(lacking)}")
  if row["phase"] == "sweep":
    lengths = row["batch"], row["q_len"], row["kv_len"]
    row |= {"phase": attention(*lengths).phase, "part": "grid"}
  return row


_DEFAULTS = {
  field.name: None if field.default is dataclasses.MISSING else field.default
  for field in dataclasses.fields(Row)
}
_DEFAULTS["kernel_names"] = []
_NEEDED = (
  *(
    f.name
    for f in dataclasses.fields(Row)
    if f.default is f.default_factory and "None" not in str(f.type)
  ),
  *("git_revision", "device", "jax_version", "time"),
)
