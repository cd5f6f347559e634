"""Prefill of long queries on Hopper. PTX in Pallas kernels.

    fused    `fused_attend` (fused_attend.py) widens NVFP4 pages as it goes: no workspace
    ahead    `dense_widen` (dense_widen.py) makes wide tiles of all keys in a workspace, and
             `dense_attend` (dense_attend.py) attends to them

    nvfp4_dequant, nvfp4_a4q    fused
    nvfp4_repack                fused, each tile widened once for the query rows and heads of a
                                block; or ahead, once for all, where many blocks read a tile
    nvfp4_a8q                   ahead, K as E4M3; `k_scan` (k_units.py) finds its scales
    bf16, fp8, mixed formats    ahead

`new_kv`, this step's keys in wide form, are a pass of their own over rows instead of pages: ahead.

The workspace has room for all pages of the page table; ops/prefill_choice_sm90.py has its size, and
which of the two runs. A4Q is emulated: its numbers, not its speed.

Limits that the definition does not have:
- Scores must be below 9e7 = 2^27 ln 2 in magnitude: the exponents' references are float32, and past
  that their rounding is more than what they leave above P. Beyond, a row may come out as NaN or 0.
- Where K is not bf16, q of a query tile and KV head has one unit (a row's own with A8Q, none with
  A4Q): a row 2^-31 as large as the tile's largest still has all of bfloat16's digits, one 2^-39 as
  large has none left.
- FP8 products (A8Q) are cut at 2^-13 of the largest of those that are summed together: scores of
  keys with one channel far above the others have some 13 bits of that channel's product.
- When V of a key is not finite (a faulty block), rows that do not see the key also become NaN in
  the columns concerned: fused, if other rows of their query tile of up to 128 do see it; ahead, if
  their query tile reaches the key's tile of up to 128 keys.

Run on a CPU by an emulator of its instructions and compiled ahead of time for sm_90a in the tests;
run on an H200 as the rows of benchmarks/results say, which name the hash of these sources.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from nvfp4_pallas.batch import RaggedBatch
from nvfp4_pallas.cache import PagedKVCache
from nvfp4_pallas.kernels import dense_attend, dense_widen, fused_attend, k_units
from nvfp4_pallas.kernels.decode_mosaic_sm90 import MULTIPROCESSORS, inputs, nothing_seen
from nvfp4_pallas.kernels.dense_widen import Pages
from nvfp4_pallas.kernels.in_place import fence
from nvfp4_pallas.kernels.ptx import WARPGROUP
from nvfp4_pallas.kernels.ptx_launch import Kernel
from nvfp4_pallas.kernels.whole_attend import CONSUMERS, QUERY_ROWS
from nvfp4_pallas.kernels.wide_layout import SMEM_BYTES, WARPS, Dense, Fused
from nvfp4_pallas.kernels.wide_tiles import Tiles
from nvfp4_pallas.read_paths import AttentionSpec

HEAD_DIMS = (64, 128, 256)
FUSED_PATHS = ("nvfp4_dequant", "nvfp4_a4q")
# Slots of K and of V, and stages of a widening warp's ring: the first that have room.
SLOTS = (2, 2), (2, 1), (1, 1)
STAGES = 4, 3, 2, 1
# A consumer's registers that are not scores, P, O or q.
OTHER_REGISTERS = 48


def tiles_of(spec: AttentionSpec, formats: tuple[str, str], dims: tuple[int, int], ahead: bool):
  """Wide tiles of K and V."""
  masked = spec.window is not None or spec.soft_cap is not None
  # What masks take leaves no registers for scores of as many keys where another warpgroup widens.
  keys = (64 if max(dims) > 128 else 128) // (2 if masked and not ahead else 1)
  as_e4m3 = spec.read_path == "nvfp4_a8q"
  return Tiles(formats[0], dims[0], keys, as_e4m3), Tiles(formats[1], dims[1], keys)


def attention(
  q: jax.Array,
  cache: PagedKVCache,
  batch: RaggedBatch,
  spec: AttentionSpec,
  *,
  ahead: bool,
  queries_after: bool = False,
  out_dtype: Any = None,
  blocks: int = MULTIPROCESSORS,
) -> tuple[jax.Array, jax.Array]:
  """Attention of ragged queries; ops.prefill is the definition.

  Args:
    q: [tokens, num_q_heads, head_dim] of any float type; it is rounded to bf16 first.
    cache, batch, spec: as in ops.prefill. All of the batch is data.
    ahead: widen all keys into a workspace first.
    queries_after: the queries come after all of kv_lens keys, instead of being the last of them.
    out_dtype: bfloat16, float16 or float32; None for q's.
    blocks: that stay on the GPU, one a multiprocessor.

  Returns:
    out [tokens, num_q_heads, v_head_dim], lse float32 [tokens, num_q_heads].
  """
  out_dtype = q.dtype if out_dtype is None else out_dtype
  if 0 in (q.shape[0], batch.num_seqs, batch.max_pages):
    return nothing_seen((*q.shape[:2], cache.v.head_dim), out_dtype)
  launched = kernels(q, cache, batch, spec, out_dtype, blocks, ahead, queries_after)
  return _run(launched, inputs(q, cache, batch) | {"cu_q_lens": batch.cu_q_lens})


def attention_to_rows(
  q: jax.Array,
  new_kv: tuple[jax.Array, jax.Array],
  batch: RaggedBatch,
  spec: AttentionSpec,
  *,
  out_dtype: Any = None,
  blocks: int = MULTIPROCESSORS,
) -> tuple[jax.Array, jax.Array]:
  """Attention to this step's keys in wide form, `new_kv` of ops.prefill; else as attention()."""
  k, v = new_kv
  out_dtype = q.dtype if out_dtype is None else out_dtype
  if 0 in (q.shape[0], batch.num_seqs):
    return nothing_seen((*q.shape[:2], v.shape[-1]), out_dtype)
  launched = row_kernels(q, new_kv, batch, spec, out_dtype, blocks)
  return _run(launched, row_inputs(q, new_kv, batch, spec))


def _run(launched: list[Kernel], arrays: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
  for kernel in launched[:-1]:
    arrays |= kernel.launch(arrays)
  # Blocks take items by a counter, which begins at 0.
  arrays.setdefault("counter", jnp.zeros((1,), jnp.int32))
  arrays = fence({n: arrays[n] for n in launched[-1].program.parameters if n in arrays})
  counter = jax.new_ref(arrays["counter"])
  made = launched[-1].launch(arrays | {"counter": counter})
  return fence((made["out"], made["lse"]))


def kernels(
  q,
  cache: PagedKVCache,
  batch: RaggedBatch,
  spec: AttentionSpec,
  out_dtype: Any,
  blocks: int,
  ahead: bool,
  queries_after: bool = False,
) -> list[Kernel]:
  """The programs in the order in which they run; the last one attends."""
  dims = cache.k.head_dim, cache.v.head_dim
  keys, values = tiles_of(spec, cache.formats, dims, ahead)
  num_seqs, kv_heads = batch.num_seqs, cache.num_kv_heads
  where = Pages(cache.page_size, cache.num_pages, batch.max_pages)
  whole = _whole(q, spec, keys, values, num_seqs, kv_heads, out_dtype, queries_after)
  if not ahead:
    return [_fused(whole, where, blocks)]
  max_tiles = -(-where.max_pages * where.page_size // keys.keys)
  launched = _dense(whole, where, num_seqs * max_tiles, max_tiles, blocks)
  if not keys.as_e4m3:
    return launched
  scan = k_units.Scan(num_seqs, kv_heads, keys.head_dim, **dataclasses.asdict(where))
  tops = (num_seqs * kv_heads, k_units.chunks(where) * WARPS)
  made = {"k_tops": jax.ShapeDtypeStruct(tops, jnp.float32)}
  return [Kernel("k_scan", k_units.scan(scan), scan.blocks, 0, made), *launched]


def row_kernels(q, new_kv, batch: RaggedBatch, spec: AttentionSpec, out_dtype: Any, blocks: int):
  """As kernels(), for keys that are this step's rows."""
  k, v = new_kv
  keys, values = _row_tile(new_kv, spec)
  whole = _whole(q, wide_spec(spec), keys, values, batch.num_seqs, k.shape[1], out_dtype, False)
  return _dense(whole, None, row_tiles(len(q), batch.num_seqs, keys), None, blocks)


def row_inputs(q, new_kv, batch: RaggedBatch, spec: AttentionSpec) -> dict[str, jax.Array]:
  """The arrays of row_kernels by name."""
  k, v = (x.astype(jnp.bfloat16) for x in new_kv)
  keys = _row_tile(new_kv, spec)[0]
  tiles = (batch.q_lens + (keys.keys - 1)) // keys.keys
  ends = jnp.cumsum(tiles)
  numbers = jnp.arange(row_tiles(len(q), batch.num_seqs, keys), dtype=jnp.int32)
  return {
    "q": q.astype(jnp.bfloat16),
    "k": k,
    "v": v,
    "kv_lens": batch.q_lens,
    "cu_q_lens": batch.cu_q_lens,
    "first_tiles": ends - tiles,
    "seqs_of_tiles": jnp.searchsorted(ends, numbers, side="right", method="compare_all").astype(
      jnp.int32
    ),
  }


def _row_tile(new_kv, spec: AttentionSpec) -> tuple[Tiles, Tiles]:
  k, v = new_kv
  return tiles_of(wide_spec(spec), ("bf16", "bf16"), (k.shape[-1], v.shape[-1]), ahead=True)


def row_tiles(tokens: int, num_seqs: int, keys: Tiles) -> int:
  """As many as any lengths of that many sequences take."""
  return tokens // keys.keys + num_seqs


def wide_spec(spec: AttentionSpec) -> AttentionSpec:
  """The numerics of keys that are this step's rows."""
  return dataclasses.replace(spec, read_path="bf16")


def _whole(q, spec, keys, values, num_seqs, kv_heads, out_dtype, queries_after) -> dict[str, Any]:
  """What both programs that attend are told."""
  group = q.shape[1] // kv_heads
  return {
    "keys": keys,
    "values": values,
    "group": group,
    "width": QUERY_ROWS // group,
    "q_levels": spec.q_levels if spec.read_path == "nvfp4_a4q" else 0,
    "causal": spec.causal,
    "sm_scale": spec.sm_scale,
    "window": spec.window,
    "soft_cap": spec.soft_cap,
    "out_dtype": jnp.dtype(out_dtype).name,
    "consumers": CONSUMERS,
    "num_seqs": num_seqs,
    "kv_heads": kv_heads,
    "tokens": q.shape[0],
    "queries_after": queries_after,
  }


def _q_fits(whole: dict[str, Any], registers: int) -> bool:
  """Whether a thread has registers for q; windows and caps leave none."""
  keys, values = whole["keys"], whole["values"]
  used = values.head_dim // 2 + keys.keys // 2 + keys.keys // 4 + 4 * len(keys.steps)
  plain = whole["window"] is None and whole["soft_cap"] is None
  return plain and whole["q_levels"] < 2 and used + OTHER_REGISTERS <= registers


def _fused(whole: dict[str, Any], pages: Pages, blocks: int) -> Kernel:
  # With 256 columns those who attend leave too few registers for two warpgroups that widen.
  widening = 2 if max(pool.head_dim for pool in (whole["keys"], whole["values"])) <= 128 else 1
  in_registers = _q_fits(whole, fused_attend.REGISTERS[widening][0])

  def make(slots, stages) -> Fused:
    return Fused(
      slots=slots,
      stages=stages,
      producers=WARPS,
      q_in_registers=in_registers,
      in_turns=True,
      widening=widening,
      reused=True,
      **whole,
      **dataclasses.asdict(pages),
    )

  fused = _first_with_room(make, STAGES)
  program = fused_attend.attend(fused, blocks)
  return _attending("fused_attend", program, fused, blocks, CONSUMERS + widening)


def _dense(
  whole: dict[str, Any], pages: Pages | None, num_tiles: int, max_tiles: int | None, blocks: int
) -> list[Kernel]:
  in_registers = _q_fits(whole, dense_attend.REGISTERS["attend"])

  def make(slots, _) -> Dense:
    return Dense(
      slots=slots,
      producers=1,
      q_in_registers=in_registers,
      in_turns=False,
      max_tiles=max_tiles,
      **whole,
    )

  dense = _first_with_room(make, (0,))
  num_tiles *= dense.kv_heads
  made = {
    "k_wide": jax.ShapeDtypeStruct((num_tiles, dense.keys.nbytes), jnp.uint8),
    "v_wide": jax.ShapeDtypeStruct((num_tiles, dense.values.nbytes), jnp.uint8),
    "counter": jax.ShapeDtypeStruct((1,), jnp.int32),
  }
  if dense.keys.as_e4m3:
    made["k_units"] = jax.ShapeDtypeStruct((dense.num_seqs * dense.kv_heads,), jnp.float32)
  widen = Kernel("dense_widen", dense_widen.widen(dense, pages), 2 * num_tiles, 0, made)
  program = dense_attend.attend(dense, blocks)
  return [widen, _attending("dense_attend", program, dense, blocks, dense_attend.WARPGROUPS)]


def _first_with_room(make: Callable[[tuple[int, int], int], Any], stages: tuple[int, ...]) -> Any:
  """The layout with the most slots, and then stages, that a multiprocessor has memory for."""
  layouts = (make(of_tiles, of_ring) for of_tiles in SLOTS for of_ring in stages)
  return next(layout for layout in layouts if layout.smem_bytes <= SMEM_BYTES)


def _attending(name: str, program, layout: Fused | Dense, blocks: int, warpgroups: int) -> Kernel:
  shape = (layout.tokens, layout.kv_heads * layout.group)
  return Kernel(
    name=name,
    program=program,
    blocks=blocks,
    threads=warpgroups * WARPGROUP,
    smem_bytes=layout.smem_bytes,
    makes={
      "out": jax.ShapeDtypeStruct((*shape, layout.values.head_dim), layout.out_dtype),
      "lse": jax.ShapeDtypeStruct(shape, jnp.float32),
    },
  )
