"""Paged attention on Hopper, for prefill and decode: plain Pallas Mosaic GPU, no inline assembly.

    S = cap(Q' K^T * sm_scale * k_global_scale)      -inf where a row does not see a key
    P = exp(S - max)      O = P V * v_global_scale / sum(P)      lse = max + log sum(P)

over tiles of KEYS keys with a running maximum (online softmax, arXiv:2205.14135). Both products
run on the tensor cores in bf16 with float32 accumulation. K and V, without their global scales,
are exact in bf16, and so is every level of an NVFP4 Q': A4Q's Q' K^T is the sum of one product per
level, exactly what block-scaled FP4 tensor cores would add up. P is rounded to bf16; everything
else is float32.

A block of threads is one warpgroup and has one query tile (query_tiles.py), one KV head, one split
of the keys, and all columns of V, or of more than 128 a half, so that O fits into registers. It
fetches its own pages, one tile ahead, by page numbers read from the table as they are needed:

    copies    Q, tile 0 | tile 1                                     | tile 2
    threads   .         | widen K | S = Q K^T, mask, P | widen V | O | ...

What is fetched lies in STAGES slots of shared memory; "widen" makes bf16 operands of it
(kv_loaders.py). They are never needed at the same time, so K, V and at the end O share one buffer.

    head_dim, nvfp4 K and V, page 64     shared memory    registers
    64                                    63 KiB          186
    128                                  105 KiB          242
    256                                  175 KiB          235 to 255
    a second level of Q: 8, 16, 32 KiB more

A key tile of head_dim 128: 18 KiB fetched, 32768 values widened, 2.1 MFLOP for P V and for each
level of Q, whatever part of the 64 rows is in use.

Nothing that a row does not see can change it, NaN in unused slots, scales, pages or table entries
included, with one exception: when V of a key is not finite (a faulty block), rows of the same
query tile that do not see the key also become NaN in the columns concerned if other rows of
the tile do see it. For decode there are no such rows.

Interpreted on a CPU and compiled ahead of time for sm_90a in the tests; run on an H200 as the rows
of benchmarks/results say, which name the hash of these sources.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from nvfp4_pallas import format as nvfp4
from nvfp4_pallas.batch import RaggedBatch
from nvfp4_pallas.cache import PagedKVCache, PagePool
from nvfp4_pallas.kernels.kv_loaders import (
  KEY,
  KEYS,
  STAGES,
  Loader,
  Place,
  along,
  loaders,
  swizzled,
)
from nvfp4_pallas.kernels.query_tiles import ROWS, QueryTiles, Work
from nvfp4_pallas.read_paths import AttentionSpec

READ_PATHS = ("bf16", "fp8", "nvfp4_dequant", "nvfp4_repack", "nvfp4_a4q")
SMEM_BYTES = 227 * 1024
MAX_OUT_WIDTH = 160  # columns of O in a block; with more the compiler spills registers
LOG2_E = math.log2(math.e)
NEG_INF = float("-inf")

# Register layouts of [ROWS, n] and of [ROWS].
SCORES = plgpu.Layout.WGMMA
ROW = SCORES.reduce(1)


def attention(
  q: jax.Array,
  cache: PagedKVCache,
  batch: RaggedBatch,
  spec: AttentionSpec,
  *,
  num_splits: int = 1,
  max_q_len: int | None = None,
  interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
  """Attention of ragged queries over a paged cache; attention.py is the definition.

  Args:
    q: [tokens, num_q_heads, head_dim] of any float type; it is rounded to bf16 first.
    cache, batch, spec: as in ops.prefill. All of the batch is data.
    num_splits: parts into which the key tiles of a sequence are cut, by its kv_len alone.
    max_q_len: static; what no q_len exceeds, if that is known. It makes tiles smaller in device
      memory (decode: 1). A wrong value costs time, the result stays the same.
    interpret: Mosaic GPU interpret parameters, to run on a CPU.

  Returns:
    out float32 [tokens, num_q_heads, v_head_dim], lse float32 [tokens, num_q_heads]; with more
    than one split a leading axis of splits, for the caller to merge. Where a row sees no key, out
    is 0 and lse -inf.
  """
  tokens, num_q_heads, _ = q.shape
  k_loader, v_loader = loaders(cache.formats, cache.k.head_dim, cache.v.head_dim)
  if 0 in (tokens, batch.num_seqs, batch.max_pages):
    out = jnp.zeros((num_splits, tokens, num_q_heads, v_loader.head_dim), jnp.float32)
    lse = jnp.full(out.shape[:-1], NEG_INF, jnp.float32)
  else:
    tiles = QueryTiles.of(batch, tokens, num_q_heads // cache.num_kv_heads, max_q_len)
    q_tiles = tiles.pack(_q_operands(q, spec, k_loader), batch)
    work = tiles.work(batch, spec, num_splits, KEYS)
    out, lse = _run(q_tiles, work, batch.page_table, cache, spec, tiles.group, interpret)
    out = v_loader.join(tiles.unpack(out, 0.0))
    lse = tiles.unpack(lse[:, :, :, None, :, None], NEG_INF)[..., 0, 0]
  return (out[0], lse[0]) if num_splits == 1 else (out, lse)


def unsupported(request: Any) -> str | None:
  """Why the kernel cannot run a request (ops.request.AttentionRequest), or None if it can."""
  if request.spec.read_path not in READ_PATHS:
    return f"the kernel has the read paths {', '.join(READ_PATHS)}, not {request.spec.read_path}"
  if request.new_kv:
    return "the kernel reads all keys from the cache, so new_kv must be appended first"
  if request.group > ROWS:
    return f"the kernel takes up to {ROWS} query heads a KV head, got {request.group}"
  for name, dim in (("head_dim", request.head_dim), ("v_head_dim", request.v_head_dim)):
    if dim % 32:
      return f"the kernel's operands are halves of 16 n columns, got {name} {dim}"
  k_loader, v_loader = loaders(request.formats, request.head_dim, request.v_head_dim)
  if v_loader.width > MAX_OUT_WIDTH:
    return f"an output of v_head_dim {request.v_head_dim} does not fit into the registers"
  levels = request.spec.q_levels if request.spec.read_path == "nvfp4_a4q" else 1
  needed = _smem_bytes(_scratch(k_loader, v_loader, 2 * levels, request.page_size))
  if needed > SMEM_BYTES:
    return f"the kernel would need {needed} bytes of shared memory, there are {SMEM_BYTES}"
  return None


def _q_operands(q: jax.Array, spec: AttentionSpec, k_loader: Loader) -> jax.Array:
  """Q' as bf16 operands to be added up, [tokens, num_q_heads, 2 * levels, half]."""
  q = nvfp4.through(q, jnp.bfloat16)  # as read_paths.round_q begins
  levels = [q]
  if spec.read_path == "nvfp4_a4q":
    packed = nvfp4.encode(q, levels=spec.q_levels)
    packed = [packed] if packed.residual is None else [packed, packed.residual]
    levels = [nvfp4.decode_unscaled(level.codes, level.block_scale) for level in packed]
  halves = [k_loader.split(level.astype(jnp.bfloat16)) for level in levels]
  return jnp.concatenate(halves, axis=-2)


def _run(q_tiles, work, page_table, cache: PagedKVCache, spec: AttentionSpec, group, interpret):
  """Runs the kernel on tiles.

  Returns out float32 [num_splits, num_tiles, kv_heads, 2 * parts, rows, half] and lse float32
  [num_splits, num_tiles, kv_heads, rows].
  """
  num_tiles, kv_heads, operands, rows, _ = q_tiles.shape
  num_splits, max_pages = work.shape[0], page_table.shape[1]
  page_size, num_pages = cache.page_size, cache.num_pages
  k_loader, v_loader = loaders(cache.formats, cache.k.head_dim, cache.v.head_dim)
  k_pages, v_pages = k_loader.pages(cache.k), v_loader.pages(cache.v)
  scales = jnp.stack([_global_scale(cache.k) * spec.sm_scale, _global_scale(cache.v)])
  run_keys = min(page_size, KEYS)  # keys of a tile that lie in one page
  grid = {"split": num_splits, "part": v_loader.parts, "kv_head": kv_heads, "tile": num_tiles}

  def kernel(work_gmem, table_gmem, scales_gmem, q_gmem, *refs, **scratch):
    k_gmem, v_gmem = refs[: len(k_pages)], refs[len(k_pages) : -2]
    out_gmem, lse_gmem = refs[-2:]
    q_smem, p_smem, row_smem = scratch["q"], scratch["p"], scratch["row"]
    k_smem, v_smem, out_smem = scratch["wide"]
    k_raw, v_raw = scratch["k_raw"], scratch["v_raw"]
    q_ready, tile_ready = scratch["q_ready"], scratch["tile_ready"]
    split, part, kv_head, tile = (lax.axis_index(name) for name in grid)
    item = Work(*(work_gmem[split, tile, i] for i in range(len(Work._fields))))

    def fetch(key_tile):
      slot = lax.rem(key_tile, STAGES)
      for first in range(0, KEYS, run_keys):
        key = key_tile * KEYS + first
        # Past the last page the table holds anything, but some page has to be fetched.
        entry = jnp.minimum(lax.div(key, page_size), max_pages - 1)
        page = jnp.clip(table_gmem[item.seq, entry], 0, num_pages - 1)
        offset = lax.rem(key, page_size)
        place = Place(page, kv_head, offset, slot, first, run_keys, tile_ready.at[slot])
        k_loader.fetch(k_gmem, 0, k_raw, place)
        v_loader.fetch(v_gmem, part, v_raw, place)

    def masked_scores(key_tile):
      """S / log 2, that exp2 gives P."""

      def q_k(acc):
        # A loop, as unrolled all its descriptors would be kept in registers.
        @pl.loop(0, operands)
        def _(i):
          plgpu.wgmma(acc, q_smem.at[i], k_smem.at[lax.rem(i, 2)].transpose((1, 0)))

        return acc[...]

      s = pl.run_scoped(q_k, plgpu.ACC((ROWS, KEYS), jnp.float32)) * scales_gmem[0, kv_head]
      if spec.soft_cap is not None:
        s = spec.soft_cap * jnp.tanh(s / spec.soft_cap)
      key = key_tile * KEYS + plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=SCORES)
      visible = key < item.key_end
      if spec.causal or spec.window is not None:
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW)
        query = along(item.position + lax.div(row, group), s)
        if spec.causal:
          visible &= key <= query
        if spec.window is not None:
          visible &= key > query - spec.window
      return jnp.where(visible, s * LOG2_E, NEG_INF)

    def p_v(half):
      def product(acc):
        plgpu.wgmma(acc, p_smem, v_smem.at[half])
        return acc[...]

      return pl.run_scoped(product, plgpu.ACC((ROWS, v_loader.half), jnp.float32))

    def step(key_tile, state):
      row_max, out = state
      slot = lax.rem(key_tile, STAGES)

      @pl.when(key_tile + 1 < item.tile_end)
      def _():
        fetch(key_tile + 1)

      plgpu.barrier_wait(tile_ready.at[slot])
      k_loader.widen(k_raw, slot, 0, None, k_smem)
      s = masked_scores(key_tile)

      new_max = jnp.maximum(row_max, jnp.max(s, axis=1))
      # A row that has seen nothing yet has maximum -inf; 0 in its place keeps exp2 from NaN.
      anchor = jnp.where(new_max == NEG_INF, 0.0, new_max)
      shrink = jnp.exp2(row_max - anchor)
      p = jnp.exp2(s - along(anchor, s))
      # Kept in a register, the sum would be put off until after P V, and all of P kept for it.
      row_smem[...] = _load_rows(row_smem) * shrink + jnp.sum(p, axis=1)
      p_smem[...] = p.astype(jnp.bfloat16)

      # P is 0 where a row does not see a key, but 0 * NaN is not.
      key = key_tile * KEYS + plgpu.broadcasted_iota(jnp.int32, (KEYS,), 0, layout=KEY)
      live = (key >= item.key_begin) & (key < item.key_end)
      v_loader.widen(v_raw, slot, part, live, v_smem)
      out = tuple(o * along(shrink, o) + p_v(half) for half, o in enumerate(out))
      return new_max, out

    for i in range(operands):
      plgpu.copy_gmem_to_smem(q_gmem.at[tile, kv_head, i], q_smem.at[i, pl.ds(0, rows)], q_ready)

    @pl.when(item.tile_begin < item.tile_end)
    def _():
      fetch(item.tile_begin)

    row_smem[...] = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), ROW)
    row_max = plgpu.layout_cast(jnp.full((ROWS,), NEG_INF, jnp.float32), ROW)
    zeros = plgpu.layout_cast(jnp.zeros((ROWS, v_loader.half), jnp.float32), SCORES)
    plgpu.barrier_wait(q_ready)
    row_max, out = lax.fori_loop(item.tile_begin, item.tile_end, step, (row_max, (zeros, zeros)))

    row_sum = _load_rows(row_smem)
    empty = row_sum == 0.0
    factor = jnp.where(empty, 0.0, scales_gmem[1, kv_head] / jnp.where(empty, 1.0, row_sum))
    for half, o in enumerate(out):
      out_smem[half] = o * along(factor, o)
    row_smem[...] = jnp.where(empty, NEG_INF, row_max / LOG2_E + jnp.log(row_sum))
    plgpu.commit_smem()
    for half in range(2):
      plgpu.copy_smem_to_gmem(
        out_smem.at[half, pl.ds(0, rows)], out_gmem.at[split, tile, kv_head, 2 * part + half]
      )

    @pl.when(part == 0)
    def _():
      plgpu.copy_smem_to_gmem(row_smem.at[pl.ds(0, rows)], lse_gmem.at[split, tile, kv_head])

    plgpu.wait_smem_to_gmem(0)

  lead = (num_splits, num_tiles, kv_heads)
  return plgpu.kernel(
    kernel,
    out_type=(
      jax.ShapeDtypeStruct((*lead, 2 * v_loader.parts, rows, v_loader.half), jnp.float32),
      jax.ShapeDtypeStruct((*lead, rows), jnp.float32),
    ),
    grid=tuple(grid.values()),
    grid_names=tuple(grid),
    scratch_types=_scratch(k_loader, v_loader, operands, page_size),
    interpret=interpret,
  )(work, page_table, scales, q_tiles, *k_pages, *v_pages)


def _scratch(k_loader: Loader, v_loader: Loader, operands: int, page_size: int) -> dict[str, Any]:
  copies = pl.cdiv(KEYS, page_size) * (k_loader.copies + v_loader.copies)
  k_columns, v_columns = k_loader.columns, v_loader.columns
  return dict(
    q=swizzled((operands, ROWS, k_loader.half), jnp.bfloat16, k_columns),
    p=swizzled((ROWS, KEYS), jnp.bfloat16, v_columns),
    wide=plgpu.RefUnion(
      swizzled((2, KEYS, k_loader.half), jnp.bfloat16, k_columns),
      swizzled((2, KEYS, v_loader.half), jnp.bfloat16, v_columns),
      swizzled((2, ROWS, v_loader.half), jnp.float32, v_columns),
    ),
    row=plgpu.SMEM((ROWS,), jnp.float32),  # the sums of P, and at the end lse
    k_raw=k_loader.raw(),
    v_raw=v_loader.raw(),
    q_ready=plgpu.Barrier(num_arrivals=operands),
    tile_ready=plgpu.Barrier(num_arrivals=copies, num_barriers=STAGES),
  )


def _smem_bytes(scratch: dict[str, Any]) -> int:
  """Bytes of shared memory: each reference rounded up to the alignment of a swizzled one, what the
  compiler takes for reductions, and barriers."""
  refs = [ref for ref in jax.tree.leaves(scratch) if not isinstance(ref, plgpu.Barrier)]
  sizes = [math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize for ref in refs]
  reductions = plgpu.CompilerParams().reduction_scratch_bytes
  return sum(pl.cdiv(size, 1024) * 1024 for size in sizes) + reductions + 1024


def _load_rows(ref) -> jax.Array:
  return plgpu.load(ref, layout=ROW, optimized=False)


def _global_scale(pool: PagePool) -> jax.Array:
  ones = jnp.ones((pool.num_kv_heads,), jnp.float32)
  return ones if pool.global_scale is None else pool.global_scale
