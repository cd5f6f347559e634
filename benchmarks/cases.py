"""The matrix's cases: which workload by which read path and implementation, and in what order.

Cases of one workload follow each other, so that a run that is cut short has compared what it
timed. What every case has in common with the usual one is not said; `varied` says the rest, which
is one thing at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks import workloads as w
from benchmarks.attention_cases import known_fields
from benchmarks.peers import PEERS
from benchmarks.small import Variant
from benchmarks.workloads import Workload
from nvfp4_pallas.cache import KV_FORMATS
from nvfp4_pallas.dispatch import IMPLEMENTATIONS

NVFP4 = Variant("nvfp4_dequant", "nvfp4", "nvfp4")
VARIANTS = (
  Variant("bf16", "bf16", "bf16"),
  Variant("fp8", "fp8", "fp8"),
  NVFP4,
  Variant("nvfp4_repack", "nvfp4", "nvfp4"),
  Variant("nvfp4_a4q", "nvfp4", "nvfp4", q_levels=1),
  Variant("nvfp4_a4q", "nvfp4", "nvfp4", q_levels=2),
  Variant("nvfp4_a8q", "nvfp4", "nvfp4"),
)
# A4Q is emulated or has a card of its own; between the shapes that it is timed at nothing changes.
GRID_VARIANTS = tuple(v for v in VARIANTS if v.read_path != "nvfp4_a4q")
PAGE_VARIANTS = tuple(v for v in GRID_VARIANTS if v.read_path != "nvfp4_a8q")
ANY_SCALE = 0.0123  # a global scale that is no power of two
PARTS = (
  *("full", "chunk", "tail", "decode"),
  *("append", "pack", "definition", "geometries", "pages", "levers", "grid"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """One row to be.

  Attributes:
    part: one of PARTS.
    kind: `attention`, `append`, `step` and `prompt` (appends by a batch: of a token of each
      sequence, and of all of one), `pack`, or a name of PEERS.
    variant: of attention.
    options: of the kind's `prepare`, beside those that all have.
    of_any_batch: whether the batch was asked for, instead of the shape's own.
  """

  part: str
  kind: str
  workload: Workload
  implementation: str
  variant: Variant | None = None
  options: tuple[tuple[str, Any], ...] = ()
  of_any_batch: bool = False

  @property
  def fields(self) -> dict[str, Any]:
    """What a row says before anything has run."""
    work, options = self.workload, dict(self.options)
    heads = work.heads
    fields: dict[str, Any] = {
      "part": self.part,
      "phase": work.phase,
      "data": "gaussian",
      "batch": work.batch,
      "q_len": work.q_len,
      "kv_len": work.kv_len,
      "page_size": work.page_size,
      "layout": work.layout,
      "geometry": work.geometry,
      "num_q_heads": heads.num_q_heads,
      "num_kv_heads": heads.num_kv_heads,
      "head_dim": heads.head_dim,
      "implementation": self.implementation,
      "read_path": None,
      "levers": _levers(options),
    }
    if self.variant is not None:
      fields |= known_fields(self.variant)
      if work.phase == "decode" and self.kind == "attention":
        fields["batch_invariant"] = options.get("batch_invariant", False)
    else:
      format = options.get("format", "nvfp4")
      fields |= {"k_format": format, "v_format": format}
      if format == "nvfp4":
        fields |= {"q_group": 16, "q_rounding": "nearest, ties to even"}
      fields["data"] = f"gaussian, global scale {options.get('scale', 1.0)}"
      if self.kind in _BY_BATCH:
        fields["data"] = _BY_BATCH[self.kind]
    if self.kind in PEERS:
      fields |= PEERS[self.kind].fields(work)
    asked = {"batch": work.batch} if self.of_any_batch else {}
    fields["varied"] = asked | _varied(work, options) or None
    return fields


def _levers(options: dict[str, Any]) -> str | None:
  names = []
  if options.get("recent_window"):
    names.append(f"w{options['recent_window']}")
  if options.get("scale_search", "amax") != "amax":
    names.append("4/6")
  if options.get("k_rotation"):
    names.append("hadK")
  if options.get("v_rotation"):
    names.append("hadV")
  if options.get("k_mean"):
    names.append("mean")
  if options.get("new_kv"):
    names.append("new_kv")
  return " ".join(names) or None


def _varied(work: Workload, options: dict[str, Any]) -> dict[str, Any]:
  usual = Workload(phase=work.phase, batch=work.batch, q_len=work.q_len, kv_len=work.kv_len)
  names = "geometry", "page_size", "layout"
  changed = {n: getattr(work, n) for n in names if getattr(work, n) != getattr(usual, n)}
  more = {name: options[name] for name in _USUAL if options.get(name, _USUAL[name]) != _USUAL[name]}
  return changed | more


_USUAL = {
  "scale": 1.0,
  "scale_search": "amax",
  "batch_invariant": False,
  "recent_window": 0,
  "k_rotation": None,
  "v_rotation": None,
  "k_mean": False,
  "new_kv": False,
}
_BY_BATCH = {"step": "a step of a batch", "prompt": "a prompt of a batch"}


# What tells a row from every other of a run.
KEY = (
  *("phase", "data", "batch", "q_len", "kv_len", "page_size", "layout"),
  *("num_q_heads", "num_kv_heads", "head_dim", "k_format", "v_format"),
  *("read_path", "q_levels", "implementation", "batch_invariant", "levers"),
)


def key(fields: dict[str, Any]) -> tuple:
  return tuple(fields.get(name) for name in KEY)


@dataclasses.dataclass(frozen=True)
class Device:
  """What decides which cases there are.

  Attributes:
    architecture: as dispatch.Target has it.
    small: whether it is to run shapes that a CPU can do.
  """

  architecture: str
  small: bool

  @property
  def own(self) -> str:
    """The implementation that is timed."""
    ending = "_" + self.architecture.replace("_", "")
    return next((name for name in IMPLEMENTATIONS if name.endswith(ending)), "xla")


def default(device: Device, implementations: tuple[str, ...] = ()) -> list[Case]:
  """All cases in order, each once.

  Args:
    implementations: to time everything by; else the device's own, and once for each phase and read
      path the others, whose rows say why they cannot run.
  """
  made = _small(device, implementations) if device.small else _full(device, implementations)
  return once(made)


def once(cases: Iterable[Case]) -> list[Case]:
  """Of cases whose rows would be the same the first."""
  found: dict[tuple, Case] = {}
  for case in cases:
    found.setdefault(key(case.fields), case)
  return list(found.values())


def _full(device: Device, implementations) -> Iterator[Case]:
  by = implementations or (device.own,)
  main = {"full": w.FULL, "chunk": w.CHUNK, "tail": w.TAILS, "decode": w.DECODE}
  for part, shapes in main.items():
    for i, shape in enumerate(shapes):
      others = _others(device) if i == 0 and not implementations else ()
      yield from _attention(part, w.attention(*shape), VARIANTS, (*by, *others), PEERS)
  more = {"full": w.PREFILLS, "tail": w.SHORT_TAILS}
  for part, shapes in more.items():
    for shape in shapes:
      yield from _attention(part, w.attention(*shape), GRID_VARIANTS, by, ("cudnn",))
  yield from _storage(w.APPEND_TOKENS, w.PACK_ROWS, "8b", by)
  if not implementations:
    yield from _definition()
  for geometry in ("70b-tp8", "30b-moe", "smollm2"):
    for shape in w.ONE_OF_EACH:
      work = w.attention(*shape, geometry=geometry)
      yield from _attention("geometries", work, VARIANTS, by, ("cudnn",))
  for page_size in w.PAGE_SIZES:
    for shape in w.ONE_OF_EACH:
      work = w.attention(*shape, page_size=page_size)
      yield from _attention("pages", work, PAGE_VARIANTS, by)
  other_layout = w.attention(*w.ONE_OF_EACH[-1], layout="token_major")
  yield from _attention("pages", other_layout, (NVFP4,), by)
  for implementation in by:
    yield from _lever_cases(implementation)
  for shape in w.grid():
    yield from _attention("grid", w.attention(*shape), GRID_VARIANTS, by)


def _definition() -> Iterator[Case]:
  for shape in w.DEFINITION:
    yield from _attention("definition", w.attention(*shape), VARIANTS, ("xla",))
  for tokens in (64, 8192):
    yield _append("definition", "append", tokens, "8b", "xla", format="nvfp4", scale=1.0)
  for phase in ("pack", "unpack"):
    yield _pack("definition", phase, w.PACK_ROWS, "8b", "xla", scale=1.0)


def _small(device: Device, implementations) -> Iterator[Case]:
  by = implementations or (device.own,)
  seen = set()
  for shape in w.SMALL_ATTENTION:
    work = w.attention(*shape, geometry="small")
    first = work.phase not in seen and not implementations
    seen.add(work.phase)
    part = "full" if work.phase == "prefill" else work.phase
    others = _others(device) if first else ()
    yield from _attention(part, work, VARIANTS, (*by, *others), PEERS if first else ())
  yield from _storage(w.SMALL_APPEND_TOKENS, w.SMALL_PACK_ROWS, "small", by)


def _others(device: Device) -> tuple[str, ...]:
  return tuple(name for name in IMPLEMENTATIONS if name not in (device.own, "xla"))


def _attention(
  part: str, work: Workload, variants, implementations, peers=(), **options
) -> Iterator[Case]:
  more = tuple(options.items())
  for implementation in implementations:
    for variant in variants:
      yield Case(
        part=part,
        kind="attention",
        workload=work,
        implementation=implementation,
        variant=variant,
        options=more,
      )
  for name in peers:
    peer = PEERS[name]
    for variant in peer.variants if work.phase in peer.phases else ():
      yield Case(part=part, kind=name, workload=work, implementation=name, variant=variant)


def _storage(append_tokens, pack_rows: int, geometry: str, implementations) -> Iterator[Case]:
  formats = [{"format": format, "scale": 1.0} for format in KV_FORMATS]
  formats.append({"format": "nvfp4", "scale": ANY_SCALE})
  for tokens in append_tokens:
    for implementation in implementations:
      for options in formats:
        yield _append("append", "append", tokens, geometry, implementation, **options)
  for phase in ("pack", "unpack"):
    for implementation in implementations:
      for scale in (1.0, ANY_SCALE):
        yield _pack("pack", phase, pack_rows, geometry, implementation, scale=scale)


def _pack(part, phase, rows: int, geometry: str, implementation: str, **options) -> Case:
  work = Workload(phase=phase, batch=1, q_len=rows, kv_len=1, geometry=geometry)
  return _case(part, "pack", work, implementation, options)


def _append(part, kind, tokens: int, geometry: str, implementation: str, **options) -> Case:
  work = Workload(phase="append", batch=tokens, q_len=1, kv_len=1, geometry=geometry)
  return _case(part, kind, work, implementation, options)


def _case(part, kind, work: Workload, implementation: str, options: dict[str, Any]) -> Case:
  return Case(
    part=part,
    kind=kind,
    workload=work,
    implementation=implementation,
    options=tuple(options.items()),
  )


WINDOWS = (64, 96)
# As README has it, on pages of 16; reading does not see how scales were found.
RECOMMENDED: dict[str, Any] = {"recent_window": 96, "k_rotation": "hadamard"}
RECOMMENDED_PAGE = 16


def _lever_cases(implementation: str) -> Iterator[Case]:
  """What a cache's options cost, beside the same without them."""
  attention = lambda shape, variant=NVFP4, page_size=w.PAGE_SIZE, **options: _attention(
    "levers", w.attention(*shape, page_size=page_size), (variant,), (implementation,), **options
  )
  wide_batch, some, short, one = (64, 1, 8192), (16, 1, 8192), (64, 1, 2048), (1, 1, 32768)
  prompt, chunks = (1, 8192, 8192), ((4, 128, 2048), (1, 2048, 8192))
  repack = VARIANTS[3]
  yield from attention(wide_batch, batch_invariant=True)
  for window in WINDOWS:
    for shape in (wide_batch, some, short, one, (1, 1, 2048)):
      yield from attention(shape, recent_window=window)
    yield from attention(some, page_size=16, recent_window=window)
  yield from attention(some, recent_window=96, k_rotation="hadamard")
  yield from attention(wide_batch, batch_invariant=True, recent_window=64)
  yield from attention(some, variant=VARIANTS[1], recent_window=64)
  levers: tuple[dict[str, Any], ...]
  levers = {"k_rotation": "hadamard"}, {"v_rotation": "hadamard"}, {"k_mean": True}
  for options in levers:
    yield from attention(some, **options)
    yield from attention(prompt, variant=repack, **options)
  for shape in (wide_batch, some, (1, 1, 2048)):
    yield from attention(shape, page_size=RECOMMENDED_PAGE)
    yield from attention(shape, page_size=RECOMMENDED_PAGE, **RECOMMENDED)
  for shape in chunks:
    for options in ({}, {"new_kv": True}, {"new_kv": True, **RECOMMENDED}):
      yield from attention(shape, variant=repack, page_size=RECOMMENDED_PAGE, **options)
  four_over_six = {"scale_search": "four_over_six"}
  for tokens in (64, 8192):
    more = {"format": "nvfp4", "scale": 1.0, **four_over_six}
    yield _append("levers", "append", tokens, "8b", implementation, **more)
  for sequences in w.STEP_SEQUENCES:
    for window in (0, *WINDOWS):
      yield _append("levers", "step", sequences, "8b", implementation, recent_window=window)
  recommended = RECOMMENDED | four_over_six
  for sequences in w.STEP_SEQUENCES:
    yield _by_batch("step", sequences, 1, implementation, recommended)
  for options in ({}, {"recent_window": 96}, recommended):
    yield _by_batch("prompt", 1, w.PROMPT_TOKENS, implementation, options)


def _by_batch(kind, sequences: int, tokens: int, implementation: str, options) -> Case:
  """An append on the pages of the recommended cache."""
  work = Workload(
    phase="append", batch=sequences, q_len=tokens, kv_len=tokens, page_size=RECOMMENDED_PAGE
  )
  return _case("levers", kind, work, implementation, options)
