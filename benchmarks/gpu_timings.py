"""The timed cases of `python3 -m benchmarks gpu`, by phase.

Each row names its floor: the bytes a call must move over the copy bandwidth of the same run, or its
FLOPs over the BF16 rate, whichever is longer. A case that finds its data in the L2 cache would not
be one of a server, so inputs rotate over more memory than it holds.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import nvfp4_pallas as nv
from benchmarks.records import Row, q_quantisation
from benchmarks.small import Variant
from benchmarks.trace import KernelTimes, joined, kernel_times
from nvfp4_pallas.cache import ring_pages
from nvfp4_pallas.ops.decode import resolve_decode
from nvfp4_pallas.ops.prefill import resolve_prefill
from nvfp4_pallas.ops.prefill_sm90 import workspace_bytes
from nvfp4_pallas.ops.request import attention_request, attention_spec

HEADS, GROUP, DIM, PAGE_SIZE = 8, 4, 128, 64
BF16_FLOPS = 800e12  # measured dense BF16 rate of an H200 on random data
COPIES = 3  # of inputs of pack and append
ROTATED_BYTES = 256 * 2**20  # of a cache, some times the L2 cache of 60 MB
PACK_ROWS = 2**26 // DIM
ANY_SCALE = 0.0123  # a global scale that is no power of two
CALLS = 12
TURNS = 4

NVFP4 = Variant("nvfp4_dequant", "nvfp4", "nvfp4")
REPACK = Variant("nvfp4_repack", "nvfp4", "nvfp4")
A8Q = Variant("nvfp4_a8q", "nvfp4", "nvfp4")
A4Q = tuple(Variant("nvfp4_a4q", "nvfp4", "nvfp4", levels) for levels in (1, 2))
WIDE = Variant("fp8", "fp8", "fp8"), Variant("bf16", "bf16", "bf16")
# (batch, q_len, kv_len)
DECODE = (
  (64, 1, 8192),
  (16, 1, 8192),
  (64, 1, 2048),
  (1, 1, 32768),
  (1, 1, 2048),
  (64, 1, 32768),
)
TAILS = (16, 16, 16384), (16, 8, 16384), (1, 16, 16384), (16, 4, 16384), (1, 4, 16384)
CHUNK = (4, 128, 2048)
PREFILL = (1, 8192, 8192)
LONG_PREFILL = (1, 32768, 32768)
PREFILLS = (4, 2048, 2048)
APPEND_TOKENS = (64, 8192, 1, 512)


def copy_bandwidth() -> tuple[float, Row]:
  """Bytes read plus written per second by an elementwise copy of 1 GiB."""
  # 32-bit elements: XLA's kernels for narrower ones do not reach the memory's speed.
  x = [jnp.full((2**28,), i, jnp.uint32) for i in range(COPIES)]
  flip = jax.jit(lambda a: a ^ jnp.uint32(1))
  times = kernel_times([functools.partial(flip, a) for a in x * 4])
  nbytes = 2 * x[0].nbytes
  row = bare_row("copy", "random", 1, 1, "bf16", nbytes, None, times, implementation="xla")
  return nbytes / (statistics.median(times.calls) * 1e-6), row


def timed_row(phase: str, times: KernelTimes | None, **fields) -> Row:
  """A row of the shapes that all cases share; without `times`, of what cannot run."""
  shared = {"page_size": PAGE_SIZE, "read_path": None, "implementation": "mosaic_sm90"}
  heads = {"num_q_heads": HEADS * GROUP, "num_kv_heads": HEADS, "head_dim": DIM}
  seen = {} if times is None else times.row_fields()
  return Row(phase=phase, **shared | heads | fields, **seen)


def bare_row(phase, data, batch, q_len, format, nbytes, floor, times: KernelTimes, **who) -> Row:
  """Of what is no attention."""
  shape = {"batch": batch, "q_len": q_len, "kv_len": 1, "k_format": format, "v_format": format}
  return timed_row(phase, times, data=data, bytes=nbytes, floor_us=floor, **shape, **who)


def pack_times(scale: float, copy_rate: float) -> Row:
  return _pack_times("pack", lambda x: (_pack, x, jnp.float32(scale)), scale, copy_rate)


def unpack_times(scale: float, copy_rate: float) -> Row:
  unpack = jax.jit(functools.partial(nv.unpack, implementation="mosaic_sm90"))
  return _pack_times("unpack", lambda x: (unpack, _pack(x, jnp.float32(scale))), scale, copy_rate)


_pack = jax.jit(functools.partial(nv.pack, implementation="mosaic_sm90"))


def _pack_times(phase: str, call, scale: float, copy_rate: float) -> Row:
  """Of `call`, which makes a function and its arguments of values."""
  x = [jax.random.normal(jax.random.key(i), (PACK_ROWS, DIM), jnp.bfloat16) for i in range(COPIES)]
  times = kernel_times([functools.partial(*call(a)) for a in x] * 4)
  nbytes = x[0].size * 2 + x[0].size * 9 // 16
  data, floor = f"gaussian, global scale {scale}", 1e6 * nbytes / copy_rate
  return bare_row(phase, data, 1, PACK_ROWS, "nvfp4", nbytes, floor, times)


def append_times(
  tokens: int, format: str, scale: float, copy_rate: float, scale_search: str = "amax"
) -> Row:
  pages = 2 * max(tokens // PAGE_SIZE, 64)
  cache = nv.PagedKVCache.create(
    num_pages=pages,
    page_size=PAGE_SIZE,
    num_kv_heads=HEADS,
    head_dim=DIM,
    k_format=format,
    k_global_scale=scale,
    v_global_scale=scale,
    scale_search=scale_search,
  )
  state = [cache]
  append = jax.jit(
    lambda cache, k, v, slots: nv.append(
      cache, k, v, slot_mapping=slots, implementation="mosaic_sm90"
    ),
    donate_argnums=0,
  )
  r = np.random.default_rng(0)
  if tokens <= 64:  # one a sequence: each somewhere else
    slots = r.permutation(pages * PAGE_SIZE)[:tokens]
  else:  # a prompt: whole pages in any order
    order = r.permutation(pages)[: tokens // PAGE_SIZE]
    slots = (order[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(-1)
  slots = jnp.asarray(slots, jnp.int32)
  new = [
    jax.random.normal(jax.random.key(i), (2, tokens, HEADS, DIM), jnp.bfloat16)
    for i in range(COPIES)
  ]
  new = [(kv[0], kv[1]) for kv in new]

  def call(kv):
    state[0] = append(state[0], *kv, slots)

  calls = [functools.partial(call, kv) for kv in new * 4]
  times = kernel_times(calls, wait=lambda _: jax.block_until_ready(state[0]))
  nbytes = int(tokens * (HEADS * DIM * 4 + state[0].bytes_per_token))
  data, floor = f"gaussian, global scale {scale}", 1e6 * nbytes / copy_rate
  levers = None if scale_search == "amax" else "4/6"
  return bare_row("append", data, tokens, 1, format, nbytes, floor, times, levers=levers)


def step_times(seqs: int, recent_window: int, copy_rate: float) -> Row:
  """An append of a decoding step by the batch: what finding the slots costs is in it.

  Sequences are anywhere in their pages, so that with a window a few of them give one up.
  """
  pages, steps = 4, CALLS
  options: dict[str, Any] = {}
  if recent_window:
    options = {"recent_window": recent_window, "num_rings": seqs}
  cache = nv.PagedKVCache.create(
    num_pages=seqs * pages,
    page_size=PAGE_SIZE,
    num_kv_heads=HEADS,
    head_dim=DIM,
    **options,
  )
  state = [cache]
  r = np.random.default_rng(0)
  table = jnp.asarray(r.permutation(seqs * pages).reshape(seqs, pages), jnp.int32)
  lens = r.integers(2 * PAGE_SIZE, 3 * PAGE_SIZE, seqs)
  append = jax.jit(functools.partial(nv.append, implementation="mosaic_sm90"), donate_argnums=0)
  k, v = jax.random.normal(jax.random.key(0), (2, seqs, HEADS, DIM), jnp.bfloat16)
  first = nv.RaggedBatch.for_decode(table, jnp.asarray(lens, jnp.int32))
  fill = jnp.zeros((seqs * int(lens.max()), HEADS, DIM), jnp.bfloat16)
  whole = dataclasses.replace(first, cu_q_lens=jnp.asarray(np.cumsum([0, *lens]), jnp.int32))
  state[0] = append(state[0], fill, fill, whole)

  batches = [
    dataclasses.replace(first, kv_lens=first.kv_lens + step) for step in range(1, 1 + steps)
  ]

  def call(batch):
    state[0] = append(state[0], k, v, batch)

  calls = [functools.partial(call, batch) for batch in batches]
  times = kernel_times(calls, wait=lambda _: jax.block_until_ready(state[0]))
  levers = f"w{recent_window}" if recent_window else None
  return bare_row("append", "a step of a batch", seqs, 1, "nvfp4", None, None, times, levers=levers)


@functools.lru_cache(maxsize=1)
def random_cache(k_format: str, v_format: str, batch: int, kv_len: int, page_size: int):
  """A cache of random values, made on the device, and page tables over different parts of it."""
  wanted = batch * kv_len // page_size
  token_bytes = {"nvfp4": 72, "fp8": 128, "bf16": 256}
  nbytes = batch * kv_len * HEADS * (token_bytes[k_format] + token_bytes[v_format])
  tables = max(1, -(-ROTATED_BYTES // nbytes))
  pages = tables * wanted

  def pool(format, key):
    shape = (pages, HEADS, page_size)
    ones = jnp.ones((HEADS,), jnp.float32)
    if format == "nvfp4":
      codes = jax.random.bits(key, (*shape, DIM // 2), jnp.uint8)
      # Scales 1 to 1.9, so that scores stay in a range where softmax is not one-hot.
      scales = jax.random.bits(key, (*shape, DIM // 16), jnp.uint8) % jnp.uint8(8) + jnp.uint8(0x38)
      scales = jax.lax.bitcast_convert_type(scales, jnp.float8_e4m3fn)
      return nv.PagePool(codes, scales, ones, format)
    values = jax.random.normal(key, (*shape, DIM), jnp.bfloat16)
    if format == "bf16":
      return nv.PagePool(values, None, None, format)
    return nv.PagePool(values.astype(jnp.float8_e4m3fn), None, ones, format)

  make = jax.jit(
    lambda: nv.PagedKVCache(
      k=pool(k_format, jax.random.key(0)), v=pool(v_format, jax.random.key(1))
    )
  )
  order = np.random.default_rng(0).permutation(pages).reshape(tables, batch, -1)
  return make(), [jnp.asarray(table, jnp.int32) for table in order]


def random_rings(cache: nv.PagedKVCache, lens: jax.Array, tokens: int) -> nv.RecentWindow:
  """A ring for each sequence, as after appends."""
  page_size, (batch,) = cache.page_size, lens.shape
  shape = (batch * ring_pages(tokens, page_size), HEADS, page_size, DIM)
  k, v = (
    nv.PagePool(jax.random.normal(jax.random.key(i), shape, jnp.bfloat16), None, None, "bf16")
    for i in range(2)
  )
  starts = jnp.maximum(lens - tokens, 0) // page_size * page_size
  return nv.RecentWindow(k, v, starts, tokens)


@dataclasses.dataclass(frozen=True)
class Timed:
  """Equal calls on different memory, and the row that their times make."""

  calls: list[Callable[[], Any]]
  row: Callable[[KernelTimes | None], Row]


def attention_times(phase: str, variant: Variant, shape, copy_rate: float, **options) -> Row:
  """Of one shape; a row with the reason and no times where the kernels lack the case."""
  timed = attention_case(phase, variant, shape, copy_rate, **options)
  return timed.row(kernel_times(timed.calls) if timed.calls else None)


def attention_case(
  phase: str,
  variant: Variant,
  shape: tuple[int, int, int],
  copy_rate: float,
  *,
  page_size: int = PAGE_SIZE,
  batch_invariant: bool = False,
  calls: int | None = None,
  recent_window: int = 0,
  k_rotation: str | None = None,
) -> Timed:
  batch, q_len, kv_len = shape
  if calls is None:
    calls = CALLS if batch * q_len * kv_len < 2**24 else CALLS // 2
  cache, tables = random_cache(variant.k_format, variant.v_format, batch, kv_len, page_size)
  lens = jnp.full((batch,), kv_len, jnp.int32)
  levers = None
  if recent_window:
    levers = f"w{recent_window}"
    # So that sequences are anywhere in their pages, some of them are shorter, by up to a page.
    lens = lens - jnp.arange(batch, dtype=jnp.int32) * 37 % page_size
    cache = dataclasses.replace(cache, recent=random_rings(cache, lens, recent_window))
  if k_rotation:
    levers = "hadK"
    cache = dataclasses.replace(cache, k=dataclasses.replace(cache.k, rotation=k_rotation))
  cu_q_lens = jnp.arange(batch + 1, dtype=jnp.int32) * q_len
  q_shape = (batch * q_len, HEADS * GROUP, DIM)
  q = [jax.random.normal(jax.random.key(i), q_shape, jnp.bfloat16) for i in range(COPIES)]
  numerics = {"read_path": variant.read_path, "q_levels": variant.q_levels}
  spec = attention_spec(q[0], causal=True, sm_scale=None, window=None, soft_cap=None, **numerics)
  pages = tables[0].shape[1]
  request = attention_request(q[0], cache, spec, num_seqs=batch, max_pages=pages)
  operation, resolve = nv.prefill, resolve_prefill
  if q_len == 1:
    operation = functools.partial(nv.decode, batch_invariant=batch_invariant)
    resolve = resolve_decode
  run = jax.jit(functools.partial(operation, implementation="mosaic_sm90", **numerics))
  batches = [nv.RaggedBatch(table, lens, cu_q_lens) for table in tables]
  functions = [
    functools.partial(run, q[i % COPIES], cache, batches[i % len(batches)]) for i in range(calls)
  ]
  try:
    reason, workspace = resolve(request, "mosaic_sm90").reason, None
    if q_len > 1:
      workspace = workspace_bytes(request)
  except NotImplementedError as error:
    functions, reason, workspace = [], str(error), None
  nbytes = int(batch * kv_len * cache.bytes_per_token) + 2 * q[0].nbytes
  if cache.recent is not None:
    wide = int(jnp.sum(lens - cache.recent.starts))
    wide_bytes = 2 * HEADS * DIM * 2
    nbytes += int(wide * (wide_bytes - cache.bytes_per_token))
  bytes_per_token = cache.bytes_per_token

  def row(times: KernelTimes | None) -> Row:
    return timed_row(
      phase,
      times,
      data="random",
      batch=batch,
      q_len=q_len,
      kv_len=kv_len,
      page_size=page_size,
      k_format=variant.k_format,
      v_format=variant.v_format,
      read_path=variant.read_path,
      **q_quantisation(variant.read_path, variant.q_levels),
      batch_invariant=batch_invariant if q_len == 1 else None,
      levers=levers,
      **attention_speed(variant.read_path, attention_flops(shape), nbytes, copy_rate, times),
      bytes_per_token=bytes_per_token,
      workspace_bytes=workspace,
      reason=reason,
    )

  return Timed(functions, row)


def attention_flops(shape: tuple[int, int, int], *, causal: bool = True) -> float:
  """Of both products, over the keys that each query sees."""
  batch, q_len, kv_len = shape
  seen = kv_len - (q_len - 1) / 2 if causal else kv_len  # by a query, on average
  return 4 * DIM * HEADS * GROUP * batch * q_len * seen


def attention_speed(
  read_path: str, flops: float, nbytes: int, copy_rate: float, times: KernelTimes | None
) -> dict[str, Any]:
  """A row's words for how fast a call could be, and was.

  The floor is what moving the bytes or multiplying takes, whichever is more. Tensor cores multiply
  FP8 twice as fast, which is what A8Q does with Q and K, half of all products.
  """
  multiplying = flops / BF16_FLOPS * (0.75 if read_path == "nvfp4_a8q" else 1.0)
  return {
    "bytes": nbytes,
    "floor_us": 1e6 * max(nbytes / copy_rate, multiplying),
    "tflops": 1e-6 * flops / statistics.median(times.calls) if times else None,
  }


def cudnn_times(phase: str, shape: tuple[int, int, int], copy_rate: float) -> Row:
  timed = cudnn_case(phase, shape, copy_rate)
  return timed.row(kernel_times(timed.calls))


def cudnn_case(phase: str, shape: tuple[int, int, int], copy_rate: float) -> Timed:
  """cuDNN's BF16 attention over contiguous keys, in the same run.

  JAX can have it align a causal mask with the first key only, and the queries of a chunk stand at
  the end of their keys. A bias could say which of them a query sees, but reading it takes time, so
  a chunk is timed without a mask, and the row says so. One token sees all keys anyway.
  """
  batch, q_len, kv_len = shape
  causal = 1 < q_len == kv_len
  mask = "" if q_len in (1, kv_len) else ", no mask"
  make = lambda key, n, heads: jax.random.normal(key, (batch, n, heads, DIM), jnp.bfloat16)
  tables = max(1, -(-ROTATED_BYTES // (batch * kv_len * HEADS * DIM * 4)))
  keys = jax.random.split(jax.random.key(0), 2 * tables + 1)
  kv = [(make(a, kv_len, HEADS), make(b, kv_len, HEADS)) for a, b in keys[:-1].reshape(-1, 2)]
  q = make(keys[-1], q_len, HEADS * GROUP)
  attend = jax.jit(
    lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")
  )
  nbytes = batch * kv_len * HEADS * DIM * 4 + 2 * q.nbytes

  def row(times: KernelTimes | None) -> Row:
    return timed_row(
      phase,
      times,
      data=f"gaussian, contiguous keys{mask}",
      batch=batch,
      q_len=q_len,
      kv_len=kv_len,
      page_size=kv_len,
      k_format="bf16",
      v_format="bf16",
      read_path="bf16",
      implementation="cudnn",
      **attention_speed("bf16", attention_flops(shape, causal=causal), nbytes, copy_rate, times),
    )

  return Timed([functools.partial(attend, q, *kv[i % tables]) for i in range(CALLS)], row)


def taking_turns(cases: tuple[Callable[[float], Timed], ...], index: int, copy_rate: float) -> Row:
  """One of the rows of cases that are timed in turns, a few calls each, and all at once.

  Long calls heat the GPU until it slows down: whoever came first would look fastest.
  """
  row = _rows_in_turns(cases, copy_rate)[index]
  if isinstance(row, Exception):
    raise row
  return row


@functools.lru_cache(maxsize=1)
def _rows_in_turns(
  cases: tuple[Callable[[float], Timed], ...], copy_rate: float
) -> list[Row | Exception]:
  turns = [_Turns(case, copy_rate) for case in cases]
  for turn in range(TURNS):
    for case in turns:
      case.take(turn)
  return [case.result() for case in turns]


class _Turns:
  """A case's, each with calls of other memory than the last one's; or what went wrong."""

  def __init__(self, case: Callable[[float], Timed], copy_rate: float):
    self._times: list[KernelTimes] = []
    self._error: Exception | None = None
    self._timed: Any = self._try(lambda: case(copy_rate))

  def take(self, turn: int) -> None:
    if self._error is not None or not self._timed.calls:
      return
    calls = self._timed.calls
    if turn == 0:
      self._try(lambda: jax.block_until_ready([call() for call in calls[-2:]]))
    two = [calls[(2 * turn + i) % len(calls)] for i in range(2)]
    times = self._try(lambda: kernel_times(two, warm_up=0))
    if times is not None:
      self._times.append(times)

  def result(self) -> Row | Exception:
    return self._error or self._timed.row(joined(self._times) if self._times else None)

  def _try(self, action: Callable[[], Any]) -> Any:
    try:
      return action()
    except Exception as error:  # noqa: BLE001 - the other cases go on
      self._error = error
      return None


_case = functools.partial


def _in_turns(phase: str, shape, variants: tuple[Variant, ...]) -> tuple[functools.partial, ...]:
  cases = (
    *(_case(attention_case, phase, variant, shape) for variant in variants),
    _case(cudnn_case, phase, shape),
  )
  return tuple(_case(taking_turns, cases, i) for i in range(len(cases)))


_w64 = functools.partial(_case, attention_times, "decode", recent_window=64)
GROUPS = {
  # What a cache's options cost, beside the same without them.
  "levers": (
    *(_case(attention_times, "decode", NVFP4, shape) for shape in DECODE[:2]),
    *(_w64(NVFP4, shape) for shape in DECODE),
    _w64(NVFP4, DECODE[1], page_size=16),
    _w64(NVFP4, DECODE[1], page_size=32),
    _w64(NVFP4, DECODE[0], batch_invariant=True),
    _w64(WIDE[0], DECODE[1]),
    _case(attention_times, "decode", NVFP4, DECODE[1], k_rotation="hadamard"),
    *(_case(append_times, n, "nvfp4", 1.0, scale_search="four_over_six") for n in (64, 8192)),
    *(_case(step_times, seqs, window) for seqs in (16, 64) for window in (0, 64)),
  ),
  "decode": (
    *(_case(attention_times, "decode", NVFP4, shape) for shape in DECODE),
    _case(attention_times, "decode", NVFP4, DECODE[0], batch_invariant=True),
    *(_case(attention_times, "decode", v, shape) for v in WIDE for shape in DECODE),
    *(_case(cudnn_times, "decode", shape) for shape in DECODE[:2]),
    *(_case(attention_times, "decode", NVFP4, DECODE[1], page_size=size) for size in (16, 32, 128)),
  ),
  "append": tuple(
    _case(append_times, n, *format)
    for n in APPEND_TOKENS
    for format in (("nvfp4", 1.0), ("nvfp4", ANY_SCALE), ("fp8", 1.0), ("bf16", 1.0))
  ),
  "pack": tuple(_case(f, g) for f in (pack_times, unpack_times) for g in (1.0, ANY_SCALE)),
  "tail": (
    *(_case(attention_times, "tail", NVFP4, shape) for shape in TAILS),
    *(_case(attention_times, "tail", NVFP4, TAILS[0], page_size=size) for size in (16, 32, 128)),
  ),
  # Each shape's in turns with cuDNN.
  "prefill": (
    *_in_turns("prefill", PREFILL, (REPACK, A8Q, NVFP4, *WIDE)),
    *_in_turns("chunk", CHUNK, (NVFP4, A8Q, *WIDE)),
    *_in_turns("prefill", LONG_PREFILL, (REPACK, A8Q, NVFP4, *WIDE)),
    *_in_turns("prefill", PREFILLS, (REPACK, A8Q, NVFP4)),
    *(_case(attention_times, "prefill", v, PREFILL) for v in A4Q),
    _case(attention_times, "chunk", A4Q[1], CHUNK),
  ),
}
