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
from benchmarks.records import Row, q_quantisation, write
from benchmarks.trace import KernelTimes, kernel_times
from nvfp4_pallas import format as nvfp4
from nvfp4_pallas.dispatch import current_target
from nvfp4_pallas.read_paths import READ_PATHS, AttentionSpec, round_q

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


FORMATS = ("nvfp4", "fp8", "bf16")


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


# ------------------------------------------------------------------------------------- checks


def check_definition() -> str:
  """The definition's rounding, compiled for the GPU, equals the same on the CPU bit for bit."""
  x = jnp.asarray(np.random.default_rng(2).standard_normal((4096, 128)), jnp.float32)
  wrong = {}
  for levels, search in ((1, "amax"), (1, "four_over_six"), (2, "amax")):
    encode = functools.partial(nvfp4.encode, levels=levels, scale_search=search)
    for g in (1.0, 0.37):
      rounded = lambda x, g=g, encode=encode: encode(x, g)
      wrong[f"encode {levels} {search} {g}"] = count_different(
        jax.jit(rounded)(x), on_cpu(rounded, x)
      )
  for path in READ_PATHS:
    rounded = functools.partial(round_q, spec=AttentionSpec(path, True, 1.0))
    wrong[f"round_q {path}"] = count_different(jax.jit(rounded)(x), on_cpu(rounded, x))
  if any(wrong.values()):
    raise AssertionError(f"values that differ: {wrong}")
  return "check definition: rounded the same on the GPU and on the CPU"


def check_pack() -> str:
  """Every kind of block under three global scales, on the GPU and by the definition on the CPU."""
  r = np.random.default_rng(0)
  x = r.standard_normal((4099, 48)) * np.exp(r.uniform(-9, 9, (4099, 1)))
  x[::7, 3], x[5::31, 17], x[9::53, 40], x[11::40] = 0, np.nan, np.inf, 0
  wrong = 0
  for dtype in ("bfloat16", "float32", "float16"):
    values = jnp.asarray(x, dtype)
    for scale in (1.0, 0.37, 2.0**-6):
      got = jax.jit(lambda v, s=scale: nv.pack(v, s, implementation="mosaic_sm90"))(values)
      want = on_cpu(lambda v, s=scale: nvfp4.encode(v, s), values)
      wrong += count_different(got, want)
      back = jax.jit(lambda a: nv.unpack(a, jnp.float32, implementation="mosaic_sm90"))(got)
      wrong += count_different(back, on_cpu(lambda a: nvfp4.decode(a, jnp.float32), want))
  if wrong:
    raise AssertionError(f"{wrong} values differ from the definition")
  return "check pack and unpack: every byte equals the definition"


def append_by(implementation: str):
  return lambda cache, k, v, slots: nv.append(
    cache, k, v, slot_mapping=slots, implementation=implementation
  )


def check_append() -> str:
  r = np.random.default_rng(1)
  wrong = 0
  for k_format, v_format in (("nvfp4", "nvfp4"), ("fp8", "nvfp4"), ("bf16", "bf16")):
    scale = 1.0 if k_format == "bf16" else jnp.asarray([0.3, 1.0, 2.7])
    cache = nv.PagedKVCache.create(
      num_pages=9,
      page_size=16,
      num_kv_heads=3,
      head_dim=96,
      v_head_dim=64,
      k_format=k_format,
      v_format=v_format,
      k_global_scale=scale,
    )
    cache = jax.tree.map(
      lambda a: (
        a
        if a.dtype == jnp.float32
        else jnp.asarray(
          r.integers(0, 255, a.nbytes, dtype=np.uint8).view(a.dtype).reshape(a.shape)
        )
      ),
      cache,
    )
    k, v = (jnp.asarray(r.standard_normal((70, 3, d)), jnp.bfloat16) for d in (96, 64))
    slots = jnp.asarray(np.where(r.random(70) < 0.2, -1, r.permutation(200)[:70]), jnp.int32)
    got = jax.jit(append_by("mosaic_sm90"))(cache, k, v, slots)
    wrong += count_different(got, on_cpu(append_by("xla"), cache, k, v, slots))
  if wrong:
    raise AssertionError(f"{wrong} values differ from the definition")
  return "check append: every byte of the cache equals the definition"


def check_attention(inputs: small.Inputs) -> str:
  errors = {}
  for variant in small.VARIANTS:
    try:
      error = small.attention_row(inputs, variant, "mosaic_sm90").kernel_error
    except NotImplementedError:
      continue  # the timing table names the reason
    errors[f"{variant.read_path} {variant.k_format} K, {variant.q_levels} levels"] = error
  # Weights are rounded to bfloat16, 2^-8 at most; 5e-3 is the contract's limit for the mean.
  bad = {name: error for name, error in errors.items() if not error <= 5e-3}
  if bad:
    raise AssertionError(f"{inputs.phase}, {inputs.data}: relative errors {bad}")
  worst = max(errors.values())
  return f"check {inputs.phase}, {inputs.data}: {len(errors)} kernels, worst mean error {worst:.1e}"


def check_repeats() -> str:
  inputs = small.gaussian("chunk", 3, 40, 700)
  cache, batch = small.filled_cache(inputs, small.Variant("nvfp4_dequant", "nvfp4", "nvfp4"))
  q = inputs.q.reshape(-1, *inputs.q.shape[2:])
  run = jax.jit(functools.partial(nv.prefill, read_path="nvfp4_dequant"))
  first = run(q, cache, batch)
  for _ in range(100):
    if count_different(run(q, cache, batch), first):
      raise AssertionError("the same inputs gave other bits")
  return "check repeats: 100 times the same bits"


CHECKS = (
  check_definition,
  check_pack,
  check_append,
  *(functools.partial(check_attention, i) for i in small.small_shapes() + small.real_layers()),
  check_repeats,
)


def on_cpu(function, *arguments):
  device = jax.devices("cpu")[0]
  with jax.default_device(device):
    return jax.jit(function)(*jax.device_put(arguments, device))


def count_different(a, b) -> int:
  """Values that differ in a bit; any NaN equals any other, devices make different ones."""
  count = 0
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    x, y = np.asarray(x), np.asarray(y)
    both_nan = np.isnan(x.astype(np.float32)) & np.isnan(y.astype(np.float32))
    different = x.reshape(-1).view(f"u{x.itemsize}") != y.reshape(-1).view(f"u{x.itemsize}")
    count += int((different.reshape(x.shape) & ~both_nan).sum())
  return count


# ------------------------------------------------------------------------------------- timing


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
