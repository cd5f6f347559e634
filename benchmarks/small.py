"""The main command: every phase and read path on small shapes, with errors and bytes.

Two judgements stand apart in every row. The kernel error compares with float64 attention over the
*same decoded bytes*: it is the arithmetic's. The format error compares with float64 attention over
the inputs before they were stored: it is the format's. Inputs are Gaussian, and q, k, v of three
layers of SmolLM2-135M on text (data/README.md).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import nvfp4_pallas as nv
from benchmarks import activations, capacity, oracle, table
from benchmarks.metrics import dense_attention, row_error, snr_db
from benchmarks.progress import Progress
from benchmarks.records import Row, q_quantisation, write
from nvfp4_pallas.cache import KV_FORMATS
from nvfp4_pallas.ops import append as append_op
from nvfp4_pallas.ops import decode as decode_op
from nvfp4_pallas.ops import pack as pack_op
from nvfp4_pallas.ops import prefill as prefill_op
from nvfp4_pallas.ops.request import attention_request, attention_spec

PAGE_SIZE = 64
REPEATS = 3


@dataclasses.dataclass(frozen=True)
class Variant:
  """A read path over a cache of given formats."""

  read_path: str
  k_format: str
  v_format: str
  q_levels: int = 2


VARIANTS = (
  Variant("bf16", "bf16", "bf16"),
  Variant("fp8", "fp8", "fp8"),
  Variant("nvfp4_dequant", "fp8", "nvfp4"),
  Variant("nvfp4_dequant", "nvfp4", "nvfp4"),
  Variant("nvfp4_repack", "nvfp4", "nvfp4"),
  Variant("nvfp4_a4q", "nvfp4", "nvfp4", q_levels=1),
  Variant("nvfp4_a4q", "nvfp4", "nvfp4", q_levels=2),
  Variant("nvfp4_a8q", "nvfp4", "nvfp4"),
)


@dataclasses.dataclass(frozen=True, eq=False)
class Inputs:
  """Wide inputs of equal sequences: q [batch, q_len, heads, dim], k and v [batch, kv_len, ...]."""

  phase: str
  data: str
  q: jax.Array
  k: jax.Array
  v: jax.Array


def gaussian(phase: str, batch: int, q_len: int, kv_len: int) -> Inputs:
  keys = jax.random.split(jax.random.key(q_len + kv_len), 3)
  make = lambda key, n, heads: jax.random.normal(key, (batch, n, heads, 128), jnp.bfloat16)
  return Inputs(phase, "gaussian", make(keys[0], q_len, 8), *(make(k, kv_len, 2) for k in keys[1:]))


def small_shapes() -> list[Inputs]:
  return [
    gaussian("prefill", 1, 192, 192),
    gaussian("chunk", 2, 32, 192),
    gaussian("tail", 1, 8, 512),
    gaussian("decode", 4, 1, 448),
  ]


def real_layers() -> list[Inputs]:
  return [
    Inputs("prefill", f"smollm2 layer {a.layer}", a.q[None], a.k[None], a.v[None])
    for a in activations.load()
  ]


def filled_cache(inputs: Inputs, variant: Variant) -> tuple[nv.PagedKVCache, nv.RaggedBatch]:
  """A cache that holds k and v, its pages in random order, and the batch that asks with q."""
  batch, kv_len, heads, dim = inputs.k.shape
  pages = -(-kv_len // PAGE_SIZE)
  order = np.random.default_rng(0).permutation(batch * pages).reshape(batch, pages)
  cache = nv.PagedKVCache.create(
    num_pages=batch * pages,
    page_size=PAGE_SIZE,
    num_kv_heads=heads,
    head_dim=dim,
    k_format=variant.k_format,
    v_format=variant.v_format,
  )
  page_table = jnp.asarray(order, jnp.int32)
  kv_lens = jnp.full((batch,), kv_len, jnp.int32)
  starts = lambda n: jnp.arange(batch + 1, dtype=jnp.int32) * n
  flat = lambda x: x.reshape(batch * kv_len, heads, dim)
  everything = nv.RaggedBatch(page_table, kv_lens, starts(kv_len))
  cache = jax.jit(nv.append)(cache, flat(inputs.k), flat(inputs.v), everything)
  return cache, nv.RaggedBatch(page_table, kv_lens, starts(inputs.q.shape[1]))


def timed(f, *arguments) -> tuple[Any, dict]:
  """The result, and wall time of some calls after the first."""
  result = jax.block_until_ready(f(*arguments))
  times = []
  for _ in range(REPEATS):
    start = time.perf_counter()
    jax.block_until_ready(f(*arguments))
    times.append(1e6 * (time.perf_counter() - start))
  return result, {
    "us_median": float(np.median(times)),
    "us_min": min(times),
    "us_max": max(times),
    "us_count": REPEATS,
    "timer": "wall",
  }


@functools.cache
def operation(read_path: str, q_levels: int, one_token: bool, implementation: str | None):
  """The jitted operation; one object for all inputs, so that equal shapes compile once."""
  function = nv.decode if one_token else nv.prefill
  return jax.jit(
    functools.partial(
      function, read_path=read_path, q_levels=q_levels, implementation=implementation
    )
  )


def attention_row(inputs: Inputs, variant: Variant, implementation: str | None = None) -> Row:
  batch, q_len, num_q_heads, dim = inputs.q.shape
  cache, ragged = filled_cache(inputs, variant)
  q = inputs.q.reshape(batch * q_len, num_q_heads, dim).astype(jnp.float32)
  run = operation(variant.read_path, variant.q_levels, q_len == 1, implementation)
  (out, _), times = timed(run, q, cache, ragged)

  options = {"causal": True, "sm_scale": None, "window": None, "soft_cap": None}
  spec = attention_spec(q, variant.read_path, q_levels=variant.q_levels, **options)
  request = attention_request(q, cache, spec, num_seqs=batch, max_pages=ragged.max_pages)
  resolve = decode_op.resolve_decode if q_len == 1 else prefill_op.resolve_prefill
  resolved = resolve(request, implementation)

  out = np.asarray(out).reshape(batch, q_len, num_q_heads, -1)
  same_bytes, wide, stored_k, stored_v = references(inputs, variant, cache, ragged)
  used_q = oracle.round_q(inputs.q, variant.read_path, variant.q_levels)
  return Row(
    **shape_fields(inputs, variant),
    read_path=variant.read_path,
    implementation=resolved.implementation,
    **q_quantisation(variant.read_path, variant.q_levels),
    **times,
    bytes=int(batch * inputs.k.shape[1] * cache.bytes_per_token),
    bytes_per_token=cache.bytes_per_token,
    kernel_error=row_error(same_bytes, out),
    format_error=row_error(wide, out),
    snr_db={
      "k": snr_db(inputs.k, stored_k),
      "v": snr_db(inputs.v, stored_v),
      "q": snr_db(inputs.q, used_q),
    },
    reason=resolved.reason,
  )


def references(inputs: Inputs, variant: Variant, cache, ragged):
  """float64 attention over the decoded bytes and over the wide inputs, and the decoded K and V."""
  kv_len, dim = inputs.k.shape[1], inputs.q.shape[-1]
  q = oracle.round_q(inputs.q, variant.read_path, variant.q_levels)
  pages = np.asarray(ragged.page_table)

  def stored(pool):
    values = oracle.decode_pool(pool)[pages]  # [batch, pages, heads, page_size, dim]
    return np.swapaxes(values, 2, 3).reshape(len(pages), -1, pool.num_kv_heads, pool.head_dim)

  k, v = (stored(pool)[:, :kv_len] for pool in (cache.k, cache.v))
  used_k = k
  if variant.read_path == "nvfp4_a8q":
    scales = np.asarray(cache.k.block_scale).view(np.uint8)
    used_k = np.empty_like(k)
    for b, h in np.ndindex(k.shape[0], k.shape[2]):
      used_k[b, :, h] = oracle.round_k_to_e4m3(k[b, :, h], scales[pages[b], h], 1.0)
  f64 = lambda x: np.asarray(x).astype(np.float64)

  def attend(*qkv):
    return np.stack([dense_attention(q, k, v, dim**-0.5) for q, k, v in zip(*qkv, strict=True)])

  return attend(q, used_k, v), attend(*map(f64, (inputs.q, inputs.k, inputs.v))), k, v


def shape_fields(inputs: Inputs, variant: Variant) -> dict:
  batch, q_len, num_q_heads, dim = inputs.q.shape
  return {
    "phase": inputs.phase,
    "data": inputs.data,
    "batch": batch,
    "q_len": q_len,
    "kv_len": inputs.k.shape[1],
    "page_size": PAGE_SIZE,
    "num_q_heads": num_q_heads,
    "num_kv_heads": inputs.k.shape[2],
    "head_dim": dim,
    "k_format": variant.k_format,
    "v_format": variant.v_format,
  }


def append_row(format: str) -> Row:
  inputs = gaussian("append", 8, 1, 64)
  variant = Variant("none", format, format)
  cache, batch = filled_cache(inputs, variant)
  k, v = inputs.k[:, -1], inputs.v[:, -1]
  _, times = timed(jax.jit(nv.append), cache, k, v, batch)
  resolved = append_op.resolve_append(append_op.append_request(cache, k, v))
  return Row(
    **shape_fields(inputs, variant),
    read_path=None,
    implementation=resolved.implementation,
    **times,
    bytes=int(k.shape[0] * (cache.bytes_per_token + k[0].size * 2 * 2)),
    bytes_per_token=cache.bytes_per_token,
    reason=resolved.reason,
  )


def pack_row(levels: int, scale_search: str) -> Row:
  """512 Ki values packed and unpacked; the kernel error is against the slow oracle's decoding."""
  x = jax.random.normal(jax.random.key(0), (4096, 128), jnp.bfloat16)
  pack = jax.jit(lambda x: nv.pack(x, levels=levels, scale_search=scale_search))
  packed, times = timed(pack, x)
  unpacked = nv.unpack(packed, jnp.float32)
  exact = oracle.decode(packed.codes, packed.block_scale)
  if packed.residual is not None:
    exact = exact + oracle.decode(packed.residual.codes, packed.residual.block_scale)
  request = pack_op.PackRequest(x.shape, str(x.dtype), levels, scale_search, False)
  resolved = pack_op.resolve_pack(request)
  return Row(
    phase="pack",
    data="gaussian",
    batch=1,
    q_len=4096,
    kv_len=4096,
    page_size=0,
    num_q_heads=1,
    num_kv_heads=1,
    head_dim=128,
    k_format="nvfp4",
    v_format="nvfp4",
    read_path=None,
    q_levels=levels,
    q_group=16,
    q_rounding=f"nearest, ties to even; {scale_search}",
    q_residual_scale="e4m3 per group" if levels == 2 else None,
    implementation=resolved.implementation,
    **times,
    bytes=x.nbytes + sum(a.nbytes for a in jax.tree.leaves(packed) if a.ndim),
    kernel_error=row_error(exact, unpacked),
    format_error=row_error(x, unpacked),
    snr_db={"x": snr_db(x, unpacked)},
    reason=resolved.reason,
  )


def with_q_error_ratio(rows: list[Row]) -> list[Row]:
  """Fills in each A4Q and A8Q row's format error over that of the same case with Q in bfloat16."""
  case = lambda r: (r.phase, r.data, r.q_len, r.kv_len, r.k_format, r.v_format)
  with_bf16_q = {case(r): r.format_error for r in rows if r.read_path == "nvfp4_dequant"}

  def completed(row: Row) -> Row:
    if row.read_path not in ("nvfp4_a4q", "nvfp4_a8q"):
      return row
    error: Any = row.format_error
    return dataclasses.replace(row, q_error_ratio=error / with_bf16_q[case(row)])

  return [completed(row) for row in rows]


def main(argv: list[str]) -> int:
  parser = argparse.ArgumentParser(prog="python3 -m benchmarks", description=__doc__)
  parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/small.jsonl"))
  path = parser.parse_args(argv).out

  packs = [(1, "amax"), (1, "four_over_six"), (2, "amax")]
  cases = small_shapes() + real_layers()
  progress = Progress(len(packs) + len(KV_FORMATS) + len(cases) * len(VARIANTS))
  rows = []
  for levels, search in packs:
    progress.step(f"pack, {levels} level{'s' * (levels > 1)}, {search}")
    rows.append(pack_row(levels, search))
  for format in KV_FORMATS:
    progress.step(f"append, {format}")
    rows.append(append_row(format))
  for inputs in cases:
    for variant in VARIANTS:
      progress.step(f"{inputs.phase}, {inputs.data}, {variant.read_path}, {variant.k_format} K")
      rows.append(attention_row(inputs, variant))
  rows = with_q_error_ratio(rows)
  write(rows, path)
  print("\n".join(table.of_rows(rows)))
  print()
  print("\n".join(capacity.lines()))
  print()
  print(table.reading(rows))
  print(f"\nRows: {path}")
  return 0
