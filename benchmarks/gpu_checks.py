"""Are the kernels right on this GPU: bits against the definition, numbers against float64.

The definition itself is compiled for the GPU too and must round there as on the CPU.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import nvfp4_pallas as nv
from benchmarks import oracle, small
from benchmarks.gpu_large import NUM_PAGES, check_large_cache
from benchmarks.gpu_repeats import repeated
from nvfp4_pallas import format as nvfp4
from nvfp4_pallas.kernels import attention_mosaic_sm90, prefill_mosaic_sm90, tail_mosaic_sm90
from nvfp4_pallas.kernels.tail_mosaic_sm90 import TailConfig
from nvfp4_pallas.read_paths import READ_PATHS, AttentionSpec, round_q


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
      # No constant of the call, which XLA copies from where initcheck saw nobody write it.
      pack = jax.jit(lambda v, s: nv.pack(v, s, implementation="mosaic_sm90"))
      got = repeated(pack, values, jnp.float32(scale))
      want = on_cpu(lambda v, s=scale: nvfp4.encode(v, s), values)
      wrong += count_different(got, want)
      unpack = jax.jit(lambda a: nv.unpack(a, jnp.float32, implementation="mosaic_sm90"))
      back = repeated(unpack, got)
      wrong += count_different(back, on_cpu(lambda a: nvfp4.decode(a, jnp.float32), want))
  if wrong:
    raise AssertionError(f"{wrong} values differ from the definition")
  return "check pack and unpack: every byte equals the definition"


RECENT: tuple[tuple[int, int, tuple[str, str], dict[str, Any]], ...] = (
  # Window, page size, formats, options of the cache.
  (40, 16, ("nvfp4", "nvfp4"), {"scale_search": "four_over_six"}),
  (64, 64, ("nvfp4", "nvfp4"), {}),
  (64, 32, ("fp8", "nvfp4"), {}),
)


# New tokens of five sequences; in the last step the place of the second one is free.
RECENT_STEPS = ((500, 0, 70, 33, 1), (130, 9, 1, 90, 64), (1,) * 5, (8,) * 5, (1,) * 5, (1,) * 5)


def check_recent() -> str:
  """Steps over a cache with a recent window: every byte as by the definition on the CPU, and
  attention over pages, rings and new rows against float64."""
  worst, heads, group, dim = 0.0, 2, 4, 128
  for window, page_size, formats, options in RECENT:
    r = np.random.default_rng(7)
    seqs, pages = 5, -(-800 // page_size)
    create = functools.partial(
      nv.PagedKVCache.create,
      num_pages=seqs * pages,
      page_size=page_size,
      num_kv_heads=heads,
      head_dim=dim,
      k_format=formats[0],
      v_format=formats[1],
      recent_window=window,
      num_rings=seqs,
      **options,
    )
    table = jnp.asarray(r.permutation(seqs * pages).reshape(seqs, pages), jnp.int32)
    ids = jnp.asarray([3, 0, -1, 1, 4], jnp.int32)
    cache, lens = create(), np.zeros(seqs, np.int64)
    append = jax.jit(functools.partial(nv.append, implementation="mosaic_sm90"))
    by_definition = functools.partial(nv.append, implementation="xla")
    for step, q_lens in enumerate(RECENT_STEPS, 1):
      lens += q_lens
      if step == len(RECENT_STEPS):
        lens[1] = 0
      starts = jnp.asarray(np.cumsum([0, *q_lens]), jnp.int32)
      batch = nv.RaggedBatch(table, jnp.asarray(lens, jnp.int32), starts, ids)
      k, v = jnp.asarray(r.standard_normal((2, sum(q_lens), heads, dim)), jnp.bfloat16)
      q = jnp.asarray(r.standard_normal((sum(q_lens), heads * group, dim)), jnp.bfloat16)
      name = f"window {window}, pages of {page_size}, {formats}, steps {q_lens}"
      if lens[1]:  # with new_kv a free place may have no row
        worst = max(worst, _attention_row(name, nv.prefill, q, cache, batch, new_kv=(k, v)))
      after = repeated(append, cache, k, v, batch)
      wrong = count_different(after, on_cpu(by_definition, cache, k, v, batch))
      if wrong:
        raise AssertionError(f"{name}: {wrong} values differ from the definition")
      cache = after
      if max(q_lens) == 1:
        worst = max(worst, _attention_row(name, nv.decode, q, cache, batch))
      elif sum(q_lens) <= window:
        worst = max(worst, _attention_row(name, nv.prefill, q, cache, batch))
  return f"check recent window: appends equal the definition in every byte; worst row {worst:.1e}"


def _attention_row(name: str, operation, q, cache, batch, **options) -> float:
  run = functools.partial(
    operation, read_path="nvfp4_dequant", implementation="mosaic_sm90", **options
  )
  exact = oracle.attention(
    q,
    cache,
    batch.page_table,
    batch.kv_lens,
    batch.cu_q_lens,
    read_path="nvfp4_dequant",
    ring_ids=batch.ring_ids,
    **options,
  )
  results = repeated(jax.jit(run), q, cache, batch)
  return worst_row(f"{operation.__name__}, {name}", results, exact)


def check_four_over_six() -> str:
  """Rows of every kind of block, by the PTX of append, on the GPU and by the definition."""
  r = np.random.default_rng(8)
  x = r.standard_normal((600, 4, 128)) * np.exp(r.uniform(-9, 9, (600, 4, 1)))
  x[::7, 1, 3], x[5::31, 2, 17], x[9::53, 0, 40] = 0, np.nan, np.inf
  k = jnp.asarray(x, jnp.bfloat16)
  slots = jnp.asarray(r.permutation(640)[:600], jnp.int32)
  wrong = 0
  for scale in (1.0, jnp.asarray([0.3, 1.0, 2.7, 2.0**-6], jnp.float32)):
    cache = nv.PagedKVCache.create(
      num_pages=10,
      page_size=64,
      num_kv_heads=4,
      head_dim=128,
      k_global_scale=scale,
      scale_search="four_over_six",
    )
    got = repeated(jax.jit(append_by("mosaic_sm90")), cache, k, -k, slots)
    wrong += count_different(got, on_cpu(append_by("xla"), cache, k, -k, slots))
  if wrong:
    raise AssertionError(f"{wrong} values differ from the definition")
  return "check four over six: every byte equals the definition"


def check_levers() -> str:
  """Rotation and mean: the kernels over the same stored rows as the definition on this GPU."""
  r, worst = np.random.default_rng(9), 0.0
  lens, q_lens = (300, 41), (33, 41)
  cache = nv.PagedKVCache.create(
    num_pages=12,
    page_size=64,
    num_kv_heads=2,
    head_dim=128,
    k_rotation="hadamard",
    v_rotation="hadamard",
    k_mean=jnp.asarray(r.standard_normal((2, 128)), jnp.float32),
  )
  table = jnp.asarray(r.permutation(12).reshape(2, 6), jnp.int32)
  whole = nv.RaggedBatch(
    table, jnp.asarray(lens, jnp.int32), jnp.asarray(np.cumsum([0, *lens]), jnp.int32)
  )
  k, v = jnp.asarray(r.standard_normal((2, sum(lens), 2, 128)), jnp.bfloat16)
  cache = jax.jit(nv.append)(cache, k, v, whole)
  q = jnp.asarray(r.standard_normal((sum(q_lens), 8, 128)), jnp.bfloat16)
  batch = nv.RaggedBatch(table, whole.kv_lens, jnp.asarray(np.cumsum([0, *q_lens]), jnp.int32))
  for operation, rows, step in (
    (nv.prefill, q, batch),
    (nv.decode, q[:2], nv.RaggedBatch.for_decode(table, whole.kv_lens)),
  ):
    run: Any = functools.partial(operation, rows, cache, step, read_path="nvfp4_dequant")
    with jax.default_matmul_precision("float32"):
      (got, got_lse), (want, want_lse) = (
        repeated(jax.jit(functools.partial(run, implementation=who)))
        for who in ("mosaic_sm90", "xla")
      )
    got, want = (np.asarray(a, np.float32) for a in (got, want))
    error = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
    lse_error = float(np.abs(np.asarray(got_lse) - np.asarray(want_lse)).max())
    # Both round out to bfloat16, by 2^-9 in the mean; the kernels' own limit is 1e-2 a row.
    if not (error.max() <= 1.4e-2 and lse_error <= 1e-3):
      raise AssertionError(f"{operation.__name__}: errors {error.max()}, lse {lse_error}")
    worst = max(worst, float(error.max()))
  return f"check rotations and mean: as the definition, worst row {worst:.1e}"


def append_by(implementation: str):
  return lambda cache, k, v, slots: nv.append(
    cache, k, v, slot_mapping=slots, implementation=implementation
  )


def check_append() -> str:
  r = np.random.default_rng(1)
  wrong = 0
  for k_format, v_format, scale_search in (
    ("nvfp4", "nvfp4", "amax"),
    ("nvfp4", "nvfp4", "four_over_six"),
    ("fp8", "nvfp4", "amax"),
    ("bf16", "bf16", "amax"),
  ):
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
      scale_search=scale_search,
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
    got = repeated(jax.jit(append_by("mosaic_sm90")), cache, k, v, slots)
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


DECODE: tuple[tuple[str, tuple[str, str], dict[str, Any]], ...] = (
  # Read path, formats of K and V, options.
  ("nvfp4_dequant", ("nvfp4", "nvfp4"), {}),
  ("nvfp4_dequant", ("nvfp4", "nvfp4"), {"window": 300, "soft_cap": 30.0}),
  ("nvfp4_a4q", ("nvfp4", "fp8"), {"q_levels": 2}),
  ("fp8", ("fp8", "fp8"), {}),
  ("bf16", ("bf16", "bf16"), {}),
)


def check_decode() -> str:
  """Ragged lengths over bytes of all kinds, against float64; then equal bits."""
  lens = (5000, 0, 1, 777, 64, 2345)  # some longer than what batch_invariant leaves whole
  worst = 0.0
  for read_path, formats, options in DECODE:
    q, cache, batch = ragged_decode(lens, *formats)
    numerics: dict[str, Any] = {"read_path": read_path, **options}
    run = functools.partial(nv.decode, implementation="mosaic_sm90", **numerics)
    exact = oracle.attention(q, cache, batch.page_table, batch.kv_lens, batch.cu_q_lens, **numerics)
    results = repeated(jax.jit(run), q, cache, batch)
    worst = max(worst, worst_row(f"{numerics} {formats}", results, exact))
  check_decode_bits(*ragged_decode(lens, "nvfp4", "nvfp4"))
  return f"check decode: {len(DECODE)} kernels, worst row {worst:.1e}; alone, same bits"


TAILS = (
  TailConfig("mma", width=4, stages=6, blocks=264, join_warps=1),
  TailConfig("wgmma", width=8, stages=6, blocks=264, join_warps=4),
  TailConfig("teams", width=16, stages=3, blocks=264, join_warps=4),
)
TAIL_OPTIONS: tuple[dict[str, Any], ...] = (
  {},
  {"window": 300, "soft_cap": 30.0},
  {"causal": False},
  {"read_path": "nvfp4_a4q", "q_levels": 2},
)


def check_tails() -> str:
  """Every program for short queries, ragged queries over ragged lengths, against float64."""
  lens, q_lens = (5000, 0, 1, 777, 64, 2345), (16, 0, 1, 13, 16, 7)
  q, cache, batch = ragged_prefill(lens, q_lens)
  worst = 0.0
  for options in TAIL_OPTIONS:
    runs = {
      f"{config.engine} {options}": functools.partial(tail_mosaic_sm90.attention, config=config)
      for config in TAILS
    }
    worst = max(worst, worst_of(runs, q, cache, batch, **options))
  return (
    f"check tails: {len(TAILS)} programs, {len(TAIL_OPTIONS)} masks and paths, worst {worst:.1e}"
  )


# Read path, whether keys are widened ahead, formats, shapes, options.
WHOLE: tuple[tuple[str, bool, tuple[str, str], dict[str, int], dict[str, Any]], ...] = (
  ("nvfp4_dequant", False, ("nvfp4", "nvfp4"), {}, {}),
  ("nvfp4_repack", True, ("nvfp4", "nvfp4"), {}, {}),
  ("nvfp4_a8q", True, ("nvfp4", "nvfp4"), {}, {}),
  ("nvfp4_a4q", False, ("nvfp4", "nvfp4"), {}, {"q_levels": 1}),
  ("nvfp4_a4q", False, ("nvfp4", "nvfp4"), {}, {"q_levels": 2}),
  ("nvfp4_dequant", False, ("nvfp4", "nvfp4"), {}, {"window": 90, "soft_cap": 30.0}),
  ("nvfp4_a8q", True, ("nvfp4", "nvfp4"), {}, {"window": 90, "soft_cap": 30.0}),
  ("nvfp4_repack", True, ("nvfp4", "nvfp4"), {}, {"causal": False}),
  ("fp8", True, ("fp8", "fp8"), {}, {}),
  ("bf16", True, ("bf16", "bf16"), {}, {}),
  ("nvfp4_repack", True, ("bf16", "nvfp4"), {}, {}),
  *(
    (path, path != "nvfp4_dequant", ("nvfp4", "nvfp4"), {"dim": dim}, {})
    for path in ("nvfp4_dequant", "nvfp4_repack", "nvfp4_a8q")
    for dim in (64, 256)
  ),
  ("nvfp4_dequant", False, ("nvfp4", "nvfp4"), {"dim": 256}, {"window": 90, "soft_cap": 30.0}),
  ("nvfp4_a4q", False, ("nvfp4", "nvfp4"), {"dim": 64, "v_dim": 256}, {"q_levels": 2}),
  ("nvfp4_dequant", False, ("nvfp4", "nvfp4"), {"page_size": 16, "group": 1}, {}),
  ("nvfp4_a8q", True, ("nvfp4", "nvfp4"), {"page_size": 32, "group": 7, "v_dim": 64}, {}),
  ("nvfp4_repack", True, ("nvfp4", "fp8"), {"page_size": 256, "group": 100}, {}),
)


def check_whole_tiles() -> str:
  """The programs for whole query tiles, with padding rows, against float64; and sequences alone."""
  worst = 0.0
  for path, ahead, formats, shape, options in WHOLE:
    q, cache, batch = ragged_prefill(
      (500, 0, 1, 333), (90, 0, 1, 70), formats, padding_rows=3, **shape
    )
    run = functools.partial(prefill_mosaic_sm90.attention, ahead=ahead)
    name = f"{path} {formats} {shape} {options}"
    worst = max(worst, worst_of({name: run}, q, cache, batch, read_path=path, **options))
    spec = AttentionSpec(**{"read_path": path, "causal": True, "sm_scale": 0.1} | options)
    check_alone(name, jax.jit(functools.partial(run, spec=spec)), q, cache, batch)
  return f"check whole query tiles: {len(WHOLE)} kernels, worst row {worst:.1e}; alone, same bits"


def check_alone(name: str, run, q, cache, batch) -> None:
  """Each sequence alone has the bits that it has in the batch."""
  together, starts = run(q, cache, batch), np.asarray(batch.cu_q_lens)
  for s, (first, last) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
    if first == last:
      continue
    one, lens = slice(s, s + 1), jnp.asarray([0, last - first], jnp.int32)
    alone = nv.RaggedBatch(batch.page_table[one], batch.kv_lens[one], lens)
    results = run(q[first:last], cache, alone)
    if count_different(results, [a[first:last] for a in together]):
      raise AssertionError(f"{name}: sequence {s} alone has other bits than in the batch")


PLAIN = functools.partial(
  attention_mosaic_sm90.attention, spec=AttentionSpec("nvfp4_dequant", True, 0.1)
)
PLAIN_READS: tuple[tuple[str, tuple[str, str], dict[str, Any]], ...] = (
  ("nvfp4_dequant", ("nvfp4", "nvfp4"), {"window": 90, "soft_cap": 30.0}),
  ("nvfp4_dequant", ("fp8", "nvfp4"), {}),
  ("nvfp4_a4q", ("nvfp4", "nvfp4"), {"q_levels": 2}),
  ("bf16", ("bf16", "bf16"), {}),
)


def check_plain() -> str:
  """The kernel that takes every other shape, by a head dim that no other takes."""
  worst = 0.0
  for path, formats, options in PLAIN_READS:
    q, cache, batch = ragged_prefill(
      (500, 0, 1, 333), (90, 0, 1, 70), formats, padding_rows=3, dim=96
    )
    runs = {f"plain {path} {formats} {options}": attention_mosaic_sm90.attention}
    worst = max(worst, worst_of(runs, q, cache, batch, read_path=path, **options))
  return f"check the plain kernel: {len(PLAIN_READS)} read paths, worst row {worst:.1e}"


def check_new_kv() -> str:
  """This step's keys in wide form, the past from the cache, sinks too, by the operation."""
  worst = 0.0
  for path, options in (("nvfp4_repack", {}), ("nvfp4_dequant", {"window": 90}), ("nvfp4_a8q", {})):
    q, cache, batch = ragged_prefill((500, 7, 1, 333), (90, 0, 1, 150), ("nvfp4", "nvfp4"))
    new_kv = jax.random.normal(jax.random.key(0), (2, len(q), 2, 128), jnp.bfloat16)
    numerics: dict[str, Any] = {"read_path": path, "new_kv": (new_kv[0], new_kv[1]), **options}
    numerics |= {"sinks": jnp.linspace(-1, 2, 8, dtype=jnp.float32)}
    run = jax.jit(functools.partial(nv.prefill, implementation="mosaic_sm90", **numerics))
    exact = oracle.attention(q, cache, batch.page_table, batch.kv_lens, batch.cu_q_lens, **numerics)
    bound = LSE_OF_FP8_PRODUCTS if path == "nvfp4_a8q" else 1e-3
    worst = max(worst, worst_row(f"new_kv {path}", repeated(run, q, cache, batch), exact, bound))
  return f"check new_kv: 3 read paths, worst row {worst:.1e}"


def ragged_prefill(
  lens, q_lens, formats=("nvfp4", "nvfp4"), *, padding_rows: int = 0, group: int = 4, **shape: int
):
  """ragged_decode's caches with q_lens new tokens."""
  _, cache, decode = ragged_decode(lens, *formats, **shape)
  starts = np.cumsum([0, *q_lens])
  q_heads = group * cache.num_kv_heads
  q = jnp.asarray(
    np.random.default_rng(4).standard_normal(
      (starts[-1] + padding_rows, q_heads, cache.k.head_dim)
    ),
    jnp.bfloat16,
  )
  starts = jnp.asarray(starts, jnp.int32)
  return q, cache, nv.RaggedBatch(decode.page_table, decode.kv_lens, starts)


def worst_of(runs, q, cache, batch, **options) -> float:
  """The worst row of kernels (by name, functions that take a spec), each run many times."""
  numerics = {"read_path": "nvfp4_dequant", "causal": True, "sm_scale": 0.1} | options
  exact = oracle.attention(q, cache, batch.page_table, batch.kv_lens, batch.cu_q_lens, **numerics)
  worst = 0.0
  for name, run in runs.items():
    run = jax.jit(functools.partial(run, spec=AttentionSpec(**numerics)))
    try:
      results = repeated(run, q, cache, batch)
    except AssertionError as error:
      raise AssertionError(f"{name}: {error}") from None
    bound = LSE_OF_FP8_PRODUCTS if numerics["read_path"] == "nvfp4_a8q" else 1e-3
    worst = max(worst, worst_row(name, results, exact, bound))
  return worst


# The tensor cores of sm_90 seem to cut products of 8-bit floats at 2^-13 of the largest of a sum,
# by its exponent. Of the checks' 128 products none reaches 8 (|q| < 5, |k| < 12.8, sm_scale .1), so
# each is off by up to a unit of 2^-11: .06 if all were cut the same way, 2^-11 sqrt(128 / 3) =
# 3.2e-3 in the mean square, as signs vary. The bound is three times that.
LSE_OF_FP8_PRODUCTS = 1e-2


def worst_row(name: str, results, exact: oracle.Attention, lse_bound: float = 1e-3) -> float:
  """The largest relative error of a row; raises where one breaks the contract."""
  out, lse = (np.asarray(a).astype(np.float64) for a in results)
  sees = np.isfinite(exact.lse)
  if out[~sees].any() or not np.isneginf(lse[~sees]).all():
    raise AssertionError(f"{name}: a row that sees nothing is not 0 with lse -inf")
  size = np.linalg.norm(exact.out[sees], axis=-1)
  error = np.linalg.norm((out - exact.out)[sees], axis=-1) / size
  lse_error = np.abs(lse[sees] - exact.lse[sees])
  # The contract: 5e-3 for the mean, twice that for any row.
  if not (error.mean() <= 5e-3 and error.max() <= 1e-2 and lse_error.max() <= lse_bound):
    raise AssertionError(f"{name}: errors {error.max()}, lse {lse_error.max()}")
  return float(error.max())


def check_decode_bits(q, cache, batch) -> None:
  """The same every time, and with batch_invariant each sequence alone as in the batch."""
  plain = functools.partial(nv.decode, read_path="nvfp4_dequant", implementation="mosaic_sm90")
  invariant = jax.jit(functools.partial(plain, batch_invariant=True))
  repeated(jax.jit(plain), q, cache, batch)
  together = repeated(invariant, q, cache, batch)
  for s in range(batch.num_seqs):
    one = slice(s, s + 1)
    alone = nv.RaggedBatch.for_decode(batch.page_table[one], batch.kv_lens[one])
    if count_different(invariant(q[one], cache, alone), [a[one] for a in together]):
      raise AssertionError(f"sequence {s} alone has other bits than in the batch")


def ragged_decode(
  lens, k_format: str, v_format: str, *, dim: int = 128, v_dim: int = 0, page_size: int = 64
):
  """(q, cache, batch): random bytes in random pages, and NaN wherever nothing may be read."""
  r = np.random.default_rng(3)
  heads = 2
  pages = [-(-n // page_size) for n in lens]
  num_pages = sum(pages) + 1
  order = np.split(r.permutation(num_pages)[: sum(pages)], np.cumsum(pages)[:-1])
  table = np.full((len(lens), max(pages) + 1), 2**30)
  live = np.zeros((num_pages, 1, page_size, 1), bool)
  for s, n in enumerate(lens):
    table[s, : pages[s]] = order[s]
    keys = np.arange(n)
    live[table[s, keys // page_size], 0, keys % page_size] = True

  def pool(format: str, dim: int) -> nv.PagePool:
    shape = (num_pages, heads, page_size)
    scale = None if format == "bf16" else jnp.asarray(r.uniform(0.4, 1.7, heads), jnp.float32)
    if format == "nvfp4":
      codes = r.integers(0, 256, (*shape, dim // 2), dtype=np.uint8)
      scales = r.integers(0, 0x3B, (*shape, dim // 16), dtype=np.uint8)  # up to 1.25
      scales = np.where(live, scales, np.uint8(0x7F)).view(jnp.float8_e4m3fn)
      return nv.PagePool(jnp.asarray(codes), jnp.asarray(scales), scale, format)
    values = np.where(live, r.standard_normal((*shape, dim)), np.nan)
    dtype = jnp.bfloat16 if format == "bf16" else jnp.float8_e4m3fn
    return nv.PagePool(jnp.asarray(values.astype(np.float32).astype(dtype)), None, scale, format)

  q = jnp.asarray(r.standard_normal((len(lens), 4 * heads, dim)), jnp.bfloat16)
  cache = nv.PagedKVCache(k=pool(k_format, dim), v=pool(v_format, v_dim or dim))
  batch = nv.RaggedBatch.for_decode(jnp.asarray(table, jnp.int32), jnp.asarray(lens, jnp.int32))
  return q, cache, batch


CHECKS = (
  check_definition,
  check_pack,
  check_append,
  *(functools.partial(check_attention, i) for i in small.small_shapes() + small.real_layers()),
  check_decode,
  check_tails,
  check_whole_tiles,
  check_new_kv,
  check_recent,
  check_four_over_six,
  check_levers,
  check_plain,
  *(
    functools.partial(check_large_cache, format, kernels=(PLAIN,) if format == "nvfp4" else ())
    for format in NUM_PAGES
  ),
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
