"""Prefill of long queries over NVFP4 caches on Hopper. PTX in Pallas kernels.

    nvfp4_repack                `dense_widen` (dense_widen.py) makes float16 tiles of all keys in a
                                workspace, `dense_attend` (dense_attend.py) attends to them
    nvfp4_dequant, nvfp4_a4q    `fused_attend` (fused_attend.py) widens as it goes: no workspace

The workspace has room for all pages of the page table, 512 bytes a token and KV head:
`workspace_bytes`. A4Q is emulated: its numbers, not its speed.

Limits that the definition does not have are those of tail_mosaic_sm90.py, with one difference: when
V of a key is not finite (a faulty block), rows that do not see the key also become NaN in the
columns concerned if their query tile of 128 rows reaches the key's tile, of 128 keys in the
workspace and 64 without.

Run on a CPU by an emulator of its instructions and compiled ahead of time for sm_90a in the tests;
run on an H200 as the rows of benchmarks/results say, which name the hash of these sources.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from nvfp4_pallas.batch import RaggedBatch
from nvfp4_pallas.cache import PagedKVCache
from nvfp4_pallas.kernels import dense_attend, dense_widen, fused_attend, tail_mosaic_sm90
from nvfp4_pallas.kernels.decode_mosaic_sm90 import MULTIPROCESSORS, inputs, nothing_seen
from nvfp4_pallas.kernels.ptx import WARPGROUP
from nvfp4_pallas.kernels.ptx_launch import Kernel
from nvfp4_pallas.kernels.whole_attend import CONSUMERS, QUERY_ROWS
from nvfp4_pallas.kernels.wide_layout import HEAD_DIM, SHARED_TILE, WARPS, Dense, Fused
from nvfp4_pallas.read_paths import AttentionSpec

TILE = 128  # keys, in the workspace
SLOTS = 2, 2
STAGES = 4
READ_PATHS = ("nvfp4_repack", "nvfp4_dequant", "nvfp4_a4q")


def workspace_bytes(num_seqs: int, kv_heads: int, max_keys: int) -> int:
  """Of device memory, while a call of nvfp4_repack runs."""
  return num_seqs * kv_heads * -(-max_keys // TILE) * TILE * HEAD_DIM * 2 * 2


def attention(
  q: jax.Array,
  cache: PagedKVCache,
  batch: RaggedBatch,
  spec: AttentionSpec,
  *,
  out_dtype: Any = None,
  blocks: int = MULTIPROCESSORS,
) -> tuple[jax.Array, jax.Array]:
  """Attention of ragged queries; ops.prefill is the definition.

  Args:
    q: [tokens, num_q_heads, head_dim] of any float type; it is rounded to bf16 first.
    cache, batch, spec: as in ops.prefill. All of the batch is data.
    out_dtype: bfloat16, float16 or float32; None for q's.
    blocks: that stay on the GPU, one a multiprocessor.

  Returns:
    out [tokens, num_q_heads, head_dim], lse float32 [tokens, num_q_heads].
  """
  out_dtype = q.dtype if out_dtype is None else out_dtype
  if 0 in (q.shape[0], batch.num_seqs, batch.max_pages):
    return nothing_seen(q.shape, out_dtype)
  widen, attend = kernels(q, cache, batch, spec, out_dtype, blocks)
  arrays = inputs(q, cache, batch, spec) | {"cu_q_lens": batch.cu_q_lens}
  if widen is not None:
    arrays |= widen.launch(arrays)
  # Blocks take items by a counter, which begins at 0.
  counter = jax.new_ref(arrays.get("counter", jnp.zeros((1,), jnp.int32)))
  made = attend.launch(arrays | {"counter": counter})
  return made["out"], made["lse"]


def kernels(
  q, cache: PagedKVCache, batch: RaggedBatch, spec: AttentionSpec, out_dtype: Any, blocks: int
) -> tuple[Kernel | None, Kernel]:
  """The program that widens, where it is one of its own, and the one that attends."""
  group = q.shape[1] // cache.num_kv_heads
  pages: dict[str, Any] = {
    "page_size": cache.page_size,
    "num_pages": cache.num_pages,
    "max_pages": batch.max_pages,
  }
  operands = spec.q_levels if spec.read_path == "nvfp4_a4q" else 1
  # Windows and caps leave no registers for q.
  plain = spec.window is None and spec.soft_cap is None
  whole: dict[str, Any] = {
    "group": group,
    "width": QUERY_ROWS // group,
    "q_operands": operands,
    "q_in_registers": plain and operands == 1,
    "causal": spec.causal,
    "sm_scale": spec.sm_scale,
    "window": spec.window,
    "soft_cap": spec.soft_cap,
    "out_dtype": jnp.dtype(out_dtype).name,
    "slots": SLOTS,
    "consumers": CONSUMERS,
    "num_seqs": batch.num_seqs,
    "kv_heads": cache.num_kv_heads,
    "tokens": q.shape[0],
  }
  makes = {
    "out": jax.ShapeDtypeStruct(q.shape, out_dtype),
    "lse": jax.ShapeDtypeStruct(q.shape[:2], jnp.float32),
  }
  if spec.read_path != "nvfp4_repack":
    fused = Fused(tile=SHARED_TILE, producers=WARPS, stages=STAGES, **whole, **pages)
    attend = Kernel(
      name="fused_attend",
      program=fused_attend.attend(fused, blocks),
      blocks=blocks,
      threads=fused_attend.WARPGROUPS * WARPGROUP,
      smem_bytes=fused.smem_bytes,
      makes=makes,
    )
    return None, attend
  max_tiles = -(-batch.max_pages * cache.page_size // TILE)
  dense = Dense(tile=TILE, producers=1, max_tiles=max_tiles, **whole)
  tiles = dense_widen.blocks(dense)
  widen = Kernel(
    name="dense_widen",
    program=dense_widen.widen(dense, **pages),
    blocks=tiles,
    smem_bytes=0,
    makes={
      "wide": jax.ShapeDtypeStruct((tiles, dense.slot // 2), jnp.float16),
      "counter": jax.ShapeDtypeStruct((1,), jnp.int32),
    },
  )
  attend = Kernel(
    name="dense_attend",
    program=dense_attend.attend(dense, blocks),
    blocks=blocks,
    threads=dense_attend.WARPGROUPS * WARPGROUP,
    smem_bytes=dense.smem_bytes,
    makes=makes,
  )
  return widen, attend


def fills_gpu(request: Any) -> bool:
  """Whether nearly every multiprocessor gets a query tile that is more than half full."""
  tokens = request.num_tokens / max(request.num_seqs, 1)
  width = QUERY_ROWS // max(request.group, 1)
  if width == 0 or 2 * tokens <= width:
    return False
  items = request.num_seqs * request.num_kv_heads * tokens / width
  return items >= 0.9 * MULTIPROCESSORS


def unsupported(request: Any) -> str | None:
  """Why the kernel cannot run a request (ops.request.AttentionRequest), or None if it can."""
  if request.spec.read_path not in READ_PATHS:
    return f"the kernel has the read paths {', '.join(READ_PATHS)}, not {request.spec.read_path}"
  return tail_mosaic_sm90.unsupported_shape(request, QUERY_ROWS)
