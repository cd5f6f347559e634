"""A4Q over a paged cache on sm_100 (B200), prefill and decode: plain Pallas Mosaic GPU.

    S = cap(Q' K^T * sm_scale * k_global_scale)      -inf where a row does not see a key
    P = exp(S - max)      O = P V * v_global_scale / sum(P)      lse = max + log sum(P)

over tiles of KEYS keys with a running maximum (online softmax, arXiv:2205.14135). Q' K^T is one
block-scaled FP4 product for each level of Q,

    tcgen05.mma...kind::mxf4nvf4.block_scale.scale_vec::4X      UTCOMMA.4X in machine code

of codes and E4M3 block scales as the cache holds them; P V is a product in bfloat16 of V widened.
Tensor memory holds S, O and the scales of both operands.

A block of threads is one warpgroup and has a tile of ROWS query rows, one KV head and one split of
the keys. It fetches its own pages, a tile ahead, and for each tile i

    copies         tile i + 1
    tensor cores   O += P V of tile i - 1, then S = Q K^T of tile i    | .
    threads        widen V of tile i                                   | mask, P, shrink O

so that tensor cores wait while P is made: a simple schedule, not a fast one. The order that tensor
memory wants of scales (`arranged`) is made outside, of K's for all pages that the page table names:
a ninth of the bytes that the kernel reads of K.

    head_dim, levels, V      shared memory    registers
    64, 1, NVFP4             92 KiB           209
    128, 2, NVFP4            155 KiB          195
    128, 2, BF16             200 KiB          195

Nothing that a row does not see can change it, with the exception that attention_mosaic_sm90.py
names: a faulty V of a key that other rows of the query tile see.

COMPILED, NOT RUN: no such GPU was at hand. The tests read the instructions out of PTX and machine
code, and interpret all of it on a CPU but two calls, the FP4 product and the copy of its scales,
which are modelled there (block_scaled_mma.py). How hardware rounds sums of products, and every
speed, are not known.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from nvfp4_pallas import format as nvfp4
from nvfp4_pallas.batch import RaggedBatch
from nvfp4_pallas.cache import PagedKVCache, pool_arrays
from nvfp4_pallas.kernels import blackwell
from nvfp4_pallas.kernels.block_scaled_mma import Modelled, Tcgen05
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
from nvfp4_pallas.kernels.query_tiles import QueryTiles, Work
from nvfp4_pallas.read_paths import AttentionSpec

READ_PATHS = ("nvfp4_a4q",)
ROWS = blackwell.MAX_ROWS  # of a query tile: the M of the product
PIECE = 32  # columns of O that are in registers at a time
MULTIPROCESSORS = 148  # of a B200
LOG2_E = math.log2(math.e)
NEG_INF = float("-inf")
E2M1, E4M3 = jnp.float4_e2m1fn, jnp.float8_e4m3fn
WORD = 4  # scales that tensor memory takes in a word: those of 64 columns

# Register layouts of [ROWS, n] and of [ROWS].
SCORES = plgpu.Layout.TCGEN05
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
    max_q_len: static; what no q_len exceeds, if that is known (decode: 1).
    interpret: Mosaic GPU interpret parameters, to run on a CPU.

  Returns:
    out float32 [tokens, num_q_heads, v_head_dim], lse float32 [tokens, num_q_heads]; with more
    than one split a leading axis of splits, for the caller to merge. Where a row sees no key, out
    is 0 and lse -inf.
  """
  tokens, num_q_heads, _ = q.shape
  v_loader = loaders(cache.formats, cache.k.head_dim, cache.v.head_dim)[1]
  if 0 in (tokens, batch.num_seqs, batch.max_pages):
    out = jnp.zeros((num_splits, tokens, num_q_heads, v_loader.head_dim), jnp.float32)
    lse = jnp.full(out.shape[:-1], NEG_INF, jnp.float32)
  else:
    tiles = _query_tiles(batch, tokens, num_q_heads // cache.num_kv_heads, max_q_len)
    q_codes, q_scales = _q_operands(q, spec, tiles, batch)
    k_scales = _k_scales(cache, batch)
    work = tiles.work(batch, spec, num_splits, KEYS)
    out, lse = _run(
      q_codes, q_scales, k_scales, work, batch.page_table, cache, spec, tiles.group, interpret
    )
    out = v_loader.join(tiles.unpack(out, 0.0))
    lse = tiles.unpack(lse[:, :, :, None, :, None], NEG_INF)[..., 0, 0]
  return (out[0], lse[0]) if num_splits == 1 else (out, lse)


def unsupported(request: Any) -> str | None:
  """Why the kernel cannot run a request (ops.request.AttentionRequest), or None if it can."""
  return blackwell.unsupported(request, READ_PATHS)


def arranged(scales: jax.Array) -> jax.Array:
  """Bytes of block scales [..., 128, n] as tensor memory wants them, e4m3 [..., n / 4, 32, 16].

  Scale (r, c) goes to (c // 4, r % 32, r // 32 * 4 + c % 4): JAX's layout SCALES_LAYOUT for 128
  rows, and what PTX's tcgen05.cp.32x128b.warpx4 brings to where .scale_vec::4X reads it.
  """
  *lead, rows, n = scales.shape
  x = scales.reshape(*lead, rows // 32, 32, n // WORD, WORD)
  x = jnp.moveaxis(x, len(lead), len(lead) + 2).swapaxes(len(lead), len(lead) + 1)
  x = x.reshape(*lead, n // WORD, 32, rows // 32 * WORD)
  return lax.bitcast_convert_type(x, E4M3)


def _query_tiles(batch, tokens, group, max_q_len) -> QueryTiles:
  """Tiles of up to ROWS rows. (QueryTiles.of makes them of half as many, by the group.)"""
  width = ROWS // group if max_q_len is None else max(1, min(ROWS // group, max_q_len))
  return dataclasses.replace(QueryTiles.of(batch, tokens, 1, width), group=group)


def _q_operands(q: jax.Array, spec: AttentionSpec, tiles: QueryTiles, batch: RaggedBatch):
  """Q' by its levels: codes E2M1 [num_tiles, kv_heads, levels, ROWS, head_dim], and scales."""
  packed = nvfp4.encode(nvfp4.through(q, jnp.bfloat16), levels=spec.q_levels)
  levels = [packed] if packed.residual is None else [packed, packed.residual]

  def pack(bytes_of_levels):
    x = tiles.pack(jnp.stack(bytes_of_levels, axis=2), batch)
    return jnp.pad(x, [(0, 0)] * 3 + [(0, ROWS - x.shape[3]), (0, 0)])

  codes = pack([level.codes for level in levels])
  scales = pack([lax.bitcast_convert_type(level.block_scale, jnp.uint8) for level in levels])
  return _as_e2m1(codes), arranged(scales)


def _as_e2m1(codes: jax.Array) -> jax.Array:
  """uint8 [..., n / 2], two codes a byte, as [..., n]."""
  return lax.bitcast_convert_type(codes, E2M1).reshape(*codes.shape[:-1], 2 * codes.shape[-1])


def _k_scales(cache: PagedKVCache, batch: RaggedBatch) -> jax.Array:
  """K's block scales by key tile: e4m3 [num_seqs, key_tiles, kv_heads, n / 4, 32, 16]."""
  scales = lax.bitcast_convert_type(pool_arrays(cache.k)[1], jnp.uint8)
  rows = scales.at[batch.page_table].get(mode="clip")
  seqs, pages, heads, page, n = rows.shape
  rows = jnp.swapaxes(rows, 2, 3).reshape(seqs, pages * page, heads, n)
  tiles = pl.cdiv(pages * page, KEYS)
  rows = jnp.pad(rows, ((0, 0), (0, tiles * KEYS - pages * page), (0, 0), (0, 0)))
  return arranged(jnp.swapaxes(rows.reshape(seqs, tiles, KEYS, heads, n), 2, 3))


def _run(
  q_codes, q_scales, k_scales, work, page_table, cache: PagedKVCache, spec, group, interpret
):
  """Runs the kernel on tiles.

  Returns out float32 [num_splits, num_tiles, kv_heads, 2, ROWS, half] and lse float32 [num_splits,
  num_tiles, kv_heads, ROWS].
  """
  num_tiles, kv_heads, levels, _, head_dim = q_codes.shape
  num_splits, max_pages = work.shape[0], page_table.shape[1]
  page_size, num_pages = cache.page_size, cache.num_pages
  v_loader = loaders(cache.formats, head_dim, cache.v.head_dim)[1]
  v_pages, half = v_loader.pages(cache.v), v_loader.half
  scales = jnp.stack([cache.k.decode_scale * spec.sm_scale, cache.v.decode_scale])
  run_keys = min(page_size, KEYS)  # keys of a tile that lie in one page
  grid = {"split": num_splits, "kv_head": kv_heads, "tile": num_tiles}
  fp4 = Tcgen05 if interpret is None else Modelled

  def kernel(
    work_gmem, table_gmem, scales_gmem, q_gmem, q_scale_gmem, k_gmem, k_scale_gmem, *refs, **scratch
  ):
    v_gmem, (out_gmem, lse_gmem) = refs[:-2], refs[-2:]
    q_smem, q_scale_smem, q_scale_tmem = scratch["q"], scratch["q_scale"], scratch["q_scale_tmem"]
    k_smem, k_scale_smem, k_scale_tmem = scratch["k"], scratch["k_scale"], scratch["k_scale_tmem"]
    v_raw, v_smem, (p_smem, out_smem) = scratch["v_raw"], scratch["v"], scratch["p_or_out"]
    s_tmem, o_tmem, row_smem = scratch["s"], scratch["o"], scratch["row"]
    q_ready, tile_ready = scratch["q_ready"], scratch["tile_ready"]
    s_done, o_done = scratch["s_done"], scratch["o_done"]
    split, kv_head, tile = (lax.axis_index(name) for name in grid)
    item = Work(*(work_gmem[split, tile, i] for i in range(len(Work._fields))))

    def fetch(key_tile):
      slot = lax.rem(key_tile, STAGES)
      ready = tile_ready.at[slot]
      arranged_scales = k_scale_gmem.at[item.seq, key_tile, kv_head]
      plgpu.copy_gmem_to_smem(arranged_scales, k_scale_smem.at[slot, 0], ready)
      for first in range(0, KEYS, run_keys):
        key = key_tile * KEYS + first
        # Past the last page the table holds anything, but some page has to be fetched.
        entry = jnp.minimum(lax.div(key, page_size), max_pages - 1)
        page = jnp.clip(table_gmem[item.seq, entry], 0, num_pages - 1)
        place = Place(page, kv_head, lax.rem(key, page_size), slot, first, run_keys, ready)
        rows = k_gmem.at[page, kv_head, pl.ds(place.offset, run_keys)]
        plgpu.copy_gmem_to_smem(rows, k_smem.at[slot, pl.ds(first, run_keys)], ready)
        v_loader.fetch(v_gmem, 0, v_raw, place)

    def start_scores(slot):
      fp4.copy_scales(k_scale_smem.at[slot], k_scale_tmem)
      for level in range(levels):
        fp4.multiply(
          s_tmem,
          q_smem.at[level],
          k_smem.at[slot],
          q_scale_tmem[level],
          k_scale_tmem,
          accumulate=level > 0,
        )
      plgpu.tcgen05_commit_arrive(s_done)

    def finished_scores():
      plgpu.barrier_wait(s_done)
      s = plgpu.async_load_tmem(s_tmem, layout=SCORES)
      plgpu.wait_load_tmem()
      return s

    def masked(s, key_tile):
      """S / log 2, that exp2 gives P."""
      s = s * scales_gmem[0, kv_head]
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

    def shrink_out(shrink):
      for first in range(0, 2 * half, PIECE):
        piece = o_tmem.at[:, pl.ds(first, PIECE)]
        o = plgpu.async_load_tmem(piece, layout=SCORES)
        plgpu.wait_load_tmem()
        plgpu.async_store_tmem(piece, o * along(shrink, o))
      plgpu.commit_tmem()

    def step(key_tile, row_max):
      slot = lax.rem(key_tile, STAGES)
      later = key_tile > item.tile_begin

      @pl.when(key_tile + 1 < item.tile_end)
      def _():
        fetch(key_tile + 1)

      plgpu.barrier_wait(tile_ready.at[slot])
      start_scores(slot)
      # P is 0 where a row does not see a key, but 0 * NaN is not.
      key = key_tile * KEYS + plgpu.broadcasted_iota(jnp.int32, (KEYS,), 0, layout=KEY)
      live = (key >= item.key_begin) & (key < item.key_end)
      v_loader.widen(v_raw, slot, 0, live, v_smem.at[slot])
      s = masked(finished_scores(), key_tile)
      new_max = jnp.maximum(row_max, jnp.max(s, axis=1))
      # A row that has seen nothing yet has maximum -inf; 0 in its place keeps exp2 from NaN.
      anchor = jnp.where(new_max == NEG_INF, 0.0, new_max)
      shrink = jnp.exp2(row_max - anchor)
      p = jnp.exp2(s - along(anchor, s))
      row_smem[...] = _load_rows(row_smem) * shrink + jnp.sum(p, axis=1)

      @pl.when(later)
      def _():
        plgpu.barrier_wait(o_done)  # of the last tile, whose P is overwritten now
        shrink_out(shrink)

      p_smem[...] = p.astype(jnp.bfloat16)
      plgpu.commit_smem()
      for i in range(2):
        columns = o_tmem.at[:, pl.ds(i * half, half)]
        plgpu.tcgen05_mma(columns, p_smem, v_smem.at[slot, i], accumulate=later)
      plgpu.tcgen05_commit_arrive(o_done)
      return new_max

    for level in range(levels):
      plgpu.copy_gmem_to_smem(q_gmem.at[tile, kv_head, level], q_smem.at[level], q_ready)
      q_scales_of_level = q_scale_gmem.at[tile, kv_head, level]
      plgpu.copy_gmem_to_smem(q_scales_of_level, q_scale_smem.at[level, 0], q_ready)

    some = item.tile_begin < item.tile_end

    @pl.when(some)
    def _():
      fetch(item.tile_begin)

    row_smem[...] = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), ROW)
    row_max = plgpu.layout_cast(jnp.full((ROWS,), NEG_INF, jnp.float32), ROW)
    plgpu.barrier_wait(q_ready)
    for level in range(levels):
      fp4.copy_scales(q_scale_smem.at[level], q_scale_tmem[level])
    row_max = lax.fori_loop(item.tile_begin, item.tile_end, step, row_max)

    @pl.when(some)
    def _():
      plgpu.barrier_wait(o_done)

    row_sum = _load_rows(row_smem)
    empty = row_sum == 0.0
    factor = jnp.where(empty, 0.0, scales_gmem[1, kv_head] / jnp.where(empty, 1.0, row_sum))
    row_smem[...] = jnp.where(empty, NEG_INF, row_max / LOG2_E + jnp.log(row_sum))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(row_smem, lse_gmem.at[split, tile, kv_head])
    for i in range(2):
      for first in range(0, half, PIECE):
        o = plgpu.async_load_tmem(o_tmem.at[:, pl.ds(i * half + first, PIECE)], layout=SCORES)
        # Where no tile was multiplied, tensor memory holds anything.
        out_smem[:, pl.ds(first, PIECE)] = jnp.where(along(empty, o), 0.0, o * along(factor, o))
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(out_smem, out_gmem.at[split, tile, kv_head, i])
      plgpu.wait_smem_to_gmem(0)

  lead = (num_splits, num_tiles, kv_heads)
  return plgpu.kernel(
    kernel,
    out_type=(
      jax.ShapeDtypeStruct((*lead, 2, ROWS, half), jnp.float32),
      jax.ShapeDtypeStruct((*lead, ROWS), jnp.float32),
    ),
    grid=tuple(grid.values()),
    grid_names=tuple(grid),
    scratch_types=_scratch(levels, head_dim, v_loader, page_size),
    kernel_name="sm100_attend",
    interpret=interpret,
  )(work, page_table, scales, q_codes, q_scales, _as_e2m1(cache.k.data), k_scales, *v_pages)


def _scratch(levels: int, head_dim: int, v_loader: Loader, page_size: int) -> dict[str, Any]:
  copies = 1 + pl.cdiv(KEYS, page_size) * (1 + v_loader.copies)
  span = head_dim // 2  # bytes of a row of codes, which one swizzle spans
  codes = plgpu.TilingTransform((8, head_dim)), plgpu.SwizzleTransform(span)
  words, half = head_dim // nvfp4.SCALE_BLOCK // WORD, v_loader.half
  of_scales = lambda: plgpu.TMEM((ROWS, words * WORD), E4M3, layout=plgpu.TMEMLayout.SCALES_LAYOUT)
  return dict(
    q=plgpu.SMEM((levels, ROWS, head_dim), E2M1, transforms=codes),
    q_scale=plgpu.SMEM((levels, 1, words, 32, 16), E4M3),
    q_scale_tmem=[of_scales() for _ in range(levels)],
    k=plgpu.SMEM((STAGES, KEYS, head_dim), E2M1, transforms=codes),
    k_scale=plgpu.SMEM((STAGES, 1, words, 32, 16), E4M3),
    k_scale_tmem=of_scales(),
    v_raw=v_loader.raw(),
    v=swizzled((STAGES, 2, KEYS, half), jnp.bfloat16, v_loader.columns),
    # Half of O's columns at a time, when P is done with.
    p_or_out=plgpu.RefUnion(
      swizzled((ROWS, KEYS), jnp.bfloat16, 64), swizzled((ROWS, half), jnp.float32, PIECE)
    ),
    row=plgpu.SMEM((ROWS,), jnp.float32),  # the sums of P, and at the end lse
    s=plgpu.TMEM((ROWS, KEYS), jnp.float32),
    o=plgpu.TMEM((ROWS, 2 * half), jnp.float32),
    q_ready=plgpu.Barrier(num_arrivals=2 * levels),
    tile_ready=plgpu.Barrier(num_arrivals=copies, num_barriers=STAGES),
    s_done=plgpu.Barrier(orders_tensor_core=True),
    o_done=plgpu.Barrier(orders_tensor_core=True),
  )


def _load_rows(ref) -> jax.Array:
  return plgpu.load(ref, layout=ROW, optimized=False)
