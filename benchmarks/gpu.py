"""`python3 -m benchmarks gpu`: are the kernels right on this machine's GPU, and how fast are they.

First the checks: packing and appending bit for bit against the definition run on the CPU, and
attention against float64 on the same bytes, on Gaussian data and on SmolLM2's activations, twice
for equal bits. Then device times by trace, every kernel of a call summed, over rotating memory, in
one run with the device's copy bandwidth. Each row names its floor: the bytes a call must move over
that bandwidth, or its FLOPs over the BF16 rate, whichever is longer.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import nvfp4_pallas as nv
from benchmarks import small
from benchmarks.gpu_checks import CHECKS, append_by
from benchmarks.records import Row, q_quantisation, write
from benchmarks.trace import KernelTimes, kernel_times
from nvfp4_pallas.dispatch import current_target

HEADS, GROUP, DIM, PAGE_SIZE = 8, 4, 128, 64
BF16_FLOPS = 800e12  # measured dense BF16 rate of an H200 on random data
COPIES = 3  # of inputs, so that a call does not find them in the L2 cache

# (phase, batch, q_len, kv_len)
ATTENTION = (
  ("decode", 64, 1, 8192),
  ("decode", 16, 1, 8192),
  ("decode", 1, 1, 32768),
  ("decode", 1, 1, 2048),
  ("tail", 16, 16, 16384),
  ("chunk", 4, 128, 2048),
  ("prefill", 1, 8192, 8192),
)
FORMATS = ("nvfp4", "fp8", "bf16")
APPEND_TOKENS = (1, 64, 512, 8192)
PACK_ROWS = 2**26 // DIM


def main(argv: list[str]) -> int:
  parser = argparse.ArgumentParser(prog="python3 -m benchmarks gpu", description=__doc__)
  parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/gpu.jsonl"))
  path = parser.parse_args(argv).out
  target = current_target()
  if not target.architecture.startswith("sm_"):
    print(f"this needs a GPU, JAX sees only {target.architecture}", file=sys.stderr)
    return 1
  started = time.monotonic()

  def say(text: str) -> None:
    print(f"[{time.monotonic() - started:5.0f} s] {text}", flush=True)

  failures = run_all(CHECKS, say)
  copy_rate, copy_row = copy_bandwidth()
  say(f"device copy {copy_rate / 1e9:.0f} GB/s")
  rows = [copy_row]
  cases = [functools.partial(pack_times, copy_rate), functools.partial(unpack_times, copy_rate)]
  cases += [
    functools.partial(append_times, copy_rate, n, f) for f in FORMATS for n in APPEND_TOKENS
  ]
  cases += [
    functools.partial(attention_times, copy_rate, variant, *shape)
    for shape in ATTENTION
    for variant in small.VARIANTS
  ]
  failures += run_all(cases, say, rows)
  write(rows, path)
  say(f"rows: {path}; {len(failures)} failures")
  for failure in failures:
    print(f"FAILED: {failure}")
  return 1 if failures else 0


def run_all(cases, say, rows: list[Row] | None = None) -> list[str]:
  """Runs each; a failing one is named and the rest goes on."""
  failures = []
  for case in cases:
    try:
      result = case()
    except Exception as error:  # noqa: BLE001 - any fault of one case is reported, not raised
      name = getattr(case, "__name__", None) or f"{case.func.__name__}{case.args[1:]}"
      failures.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
      say(failures[-1])
      continue
    if isinstance(result, Row):
      rows.append(result)
      say(describe(result))
    else:
      say(result)
  return failures


def describe(row: Row) -> str:
  shape = f"{row.phase} {row.batch}/{row.q_len}/{row.kv_len} {row.k_format} {row.read_path or ''}"
  if row.us_median is None:
    return f"{shape}: {row.reason}"
  share = f", {row.us_median / row.floor_us:.1f} x its floor" if row.floor_us else ""
  return f"{shape} {row.implementation}: {row.us_median:.1f} us{share}"


def copy_bandwidth() -> tuple[float, Row]:
  """Bytes read plus written per second by an elementwise copy of 1 GiB."""
  # 32-bit elements: XLA's kernels for narrower ones do not reach the memory's speed.
  x = [jnp.full((2**28,), i, jnp.uint32) for i in range(COPIES)]
  flip = jax.jit(lambda a: a ^ jnp.uint32(1))
  times = kernel_times([functools.partial(flip, a) for a in x * 4])
  nbytes = 2 * x[0].nbytes
  row = bare_row("copy", 1, 1, 1, "bf16", nbytes, None, times, "xla")
  return nbytes / (statistics.median(times.calls) * 1e-6), row


def bare_row(phase, batch, q_len, kv_len, format, nbytes, floor, times: KernelTimes, who) -> Row:
  return Row(
    phase=phase,
    data="random",
    batch=batch,
    q_len=q_len,
    kv_len=kv_len,
    page_size=PAGE_SIZE,
    num_q_heads=HEADS * GROUP,
    num_kv_heads=HEADS,
    head_dim=DIM,
    k_format=format,
    v_format=format,
    read_path=None,
    implementation=who,
    bytes=nbytes,
    floor_us=floor,
    **times.row_fields(),
  )


def pack_times(copy_rate: float) -> Row:
  x = [jax.random.normal(jax.random.key(i), (PACK_ROWS, DIM), jnp.bfloat16) for i in range(COPIES)]
  pack = jax.jit(functools.partial(nv.pack, implementation="mosaic_sm90"))
  times = kernel_times([functools.partial(pack, a) for a in x * 4])
  nbytes = x[0].size * 2 + x[0].size * 9 // 16
  floor = 1e6 * nbytes / copy_rate
  return bare_row("pack", 1, PACK_ROWS, 1, "nvfp4", nbytes, floor, times, "mosaic_sm90")


def unpack_times(copy_rate: float) -> Row:
  x = [jax.random.normal(jax.random.key(i), (PACK_ROWS, DIM), jnp.bfloat16) for i in range(COPIES)]
  packed = [jax.jit(functools.partial(nv.pack, implementation="mosaic_sm90"))(a) for a in x]
  unpack = jax.jit(functools.partial(nv.unpack, implementation="mosaic_sm90"))
  times = kernel_times([functools.partial(unpack, a) for a in packed * 4])
  nbytes = x[0].size * 2 + x[0].size * 9 // 16
  floor = 1e6 * nbytes / copy_rate
  return bare_row("unpack", 1, PACK_ROWS, 1, "nvfp4", nbytes, floor, times, "mosaic_sm90")


def append_times(copy_rate: float, tokens: int, format: str) -> Row:
  pages = 2 * max(tokens // PAGE_SIZE, 64)
  state = [
    nv.PagedKVCache.create(
      num_pages=pages, page_size=PAGE_SIZE, num_kv_heads=HEADS, head_dim=DIM, k_format=format
    )
  ]
  append = jax.jit(append_by("mosaic_sm90"), donate_argnums=0)
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
  floor = 1e6 * nbytes / copy_rate
  return bare_row("append", tokens, 1, 1, format, nbytes, floor, times, "mosaic_sm90")


@functools.lru_cache(maxsize=1)
def random_cache(k_format: str, v_format: str, batch: int, kv_len: int):
  """A cache of random values and a permuted page table, made on the device."""
  pages = batch * kv_len // PAGE_SIZE

  def pool(format, key):
    shape = (pages, HEADS, PAGE_SIZE)
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
  table = np.random.default_rng(0).permutation(pages).reshape(batch, -1)
  return make(), jnp.asarray(table, jnp.int32)


def attention_times(copy_rate, variant: small.Variant, phase, batch, q_len, kv_len) -> Row:
  cache, table = random_cache(variant.k_format, variant.v_format, batch, kv_len)
  lens = jnp.full((batch,), kv_len, jnp.int32)
  ragged = nv.RaggedBatch(table, lens, jnp.arange(batch + 1, dtype=jnp.int32) * q_len)
  shape = (batch * q_len, HEADS * GROUP, DIM)
  q = [jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(COPIES)]
  fields = {
    "phase": phase,
    "data": "random",
    "batch": batch,
    "q_len": q_len,
    "kv_len": kv_len,
    "page_size": PAGE_SIZE,
    "num_q_heads": HEADS * GROUP,
    "num_kv_heads": HEADS,
    "head_dim": DIM,
    "k_format": variant.k_format,
    "v_format": variant.v_format,
    "read_path": variant.read_path,
    **q_quantisation(variant.read_path, variant.q_levels),
  }
  operation = nv.decode if q_len == 1 else nv.prefill
  run = jax.jit(
    functools.partial(
      operation,
      read_path=variant.read_path,
      q_levels=variant.q_levels,
      implementation="mosaic_sm90",
    )
  )
  try:
    times = kernel_times([functools.partial(run, a, cache, ragged) for a in q * 2])
  except NotImplementedError as reason:
    return Row(**fields, implementation="mosaic_sm90", reason=str(reason))
  nbytes = int(batch * kv_len * cache.bytes_per_token) + 2 * q[0].nbytes
  pairs = batch * q_len * (kv_len - (q_len - 1) / 2)
  flops = 4 * DIM * HEADS * GROUP * pairs
  return Row(
    **fields,
    implementation="mosaic_sm90",
    bytes=nbytes,
    bytes_per_token=cache.bytes_per_token,
    floor_us=1e6 * max(nbytes / copy_rate, flops / BF16_FLOPS),
    **times.row_fields(),
  )
