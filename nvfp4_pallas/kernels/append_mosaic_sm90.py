"""Writes new K and V rows into a paged cache, in the cache's formats, on Hopper.

    nvfp4:  block_scale = e4m3(amax / (6 * global_scale))
            codes       = e2m1(|x| / (block_scale * global_scale)), with the sign of x
            or both with 4 for 6, where scale_search is four_over_six and the error is less
    fp8:    data        = e4m3(x / global_scale)
    bf16:   data        = x

bit for bit as cache.encode_rows rounds. One launch for K and V, in place.

Rows of bfloat16 are written by a PTX program (append_ptx.py): neighbouring threads store to the
pages of several tokens, which Pallas' stores of whole tiles cannot say. Rows of other dtypes, pools
of more than 2^32 scale blocks, and where the kernel is interpreted, which inline assembly cannot
be, are left to plain Pallas: a program is one warpgroup and writes the row of one token, all heads,
of K or of V. It reads the token's slot, leaves if there is none, and otherwise encodes one block of
sixteen values a thread (common.py). A row's stores are a few plain vector stores with the strides
of the pages; the 4 to 16 scale bytes of a head, too few for a TMA copy, are single bytes. It does
not search scales: the definition's errors are quotients, and its compiler divides otherwise.

Bytes moved per value: 2 (bfloat16 rows) read, and .5625 (nvfp4), 1 (fp8) or 2 (bf16) written.

Interpreted on a CPU and compiled ahead of time for sm_90a in the tests, the PTX emulated there; run
on an H200 as the rows of benchmarks/results say, which name the hash of these sources.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from nvfp4_pallas import cache as kv_cache
from nvfp4_pallas import format as nvfp4
from nvfp4_pallas.batch import RaggedBatch
from nvfp4_pallas.kernels import append_ptx, append_recent_ptx, common, ptx_launch
from nvfp4_pallas.kernels.common import u32
from nvfp4_pallas.kernels.in_place import fence


def append(
  cache: kv_cache.PagedKVCache, k: jax.Array, v: jax.Array, slots: jax.Array, *, interpret=None
) -> kv_cache.PagedKVCache:
  """Writes rows to their slots, in the pools' formats.

  Equivalent to, for each token t, for K and for V:
      page, row = divmod(slots[t], page_size)
      pool[page, :, row] = encode_rows(pool, x)[t]

  Args:
    cache: donated under jit, it is updated in place; what no slot names stays bit-identical.
    k, v: bfloat16, float16 or float32 [tokens, num_kv_heads, head_dim], each with its own
      head_dim.
    slots: int32 [tokens]. A slot below 0 or past the last page skips its token. What two tokens
      with one slot leave there is not promised.
    interpret: Mosaic GPU interpret parameters, to run on a CPU.
  """
  if slots.shape[0] == 0:
    return cache
  rows = tuple(page_rows(pool) for pool in (cache.k, cache.v))
  in_ptx = _not_in_ptx(rows, (str(k.dtype), str(v.dtype)), interpret) is None
  run = _append_in_ptx if in_ptx else partial(_append_in_pallas, interpret=interpret)
  return fence(run(*fence((cache, k, v, slots))))


def move(
  cache: kv_cache.PagedKVCache, source: kv_cache.PagedKVCache, slots: jax.Array, *, interpret=None
) -> kv_cache.PagedKVCache:
  """Writes tokens of bf16 pages to slots of another cache, in its formats.

  Args:
    cache: as in append.
    source: bf16 pages; not donated.
    slots: int32 [source.num_pages * page_size], as in append; -1 for most.
  """
  if interpret is None and all(
    append_ptx.supports(page_rows(pool)) for pool in (cache.k, cache.v, source.k, source.v)
  ):
    arrays = fence((cache, source.k.data, source.v.data, slots))
    return fence(_append_in_ptx(*arrays, from_pages=True))

  def rows(pool):
    return jnp.swapaxes(pool.data, 1, 2).reshape(-1, pool.num_kv_heads, pool.head_dim)

  return append(cache, rows(source.k), rows(source.v), slots, interpret=interpret)


def append_step(
  cache: kv_cache.PagedKVCache, k: jax.Array, v: jax.Array, batch: RaggedBatch
) -> tuple[kv_cache.PagedKVCache, jax.Array]:
  """Rows of a step to the rings, and what leaves those to the pages; see append_recent_ptx.py.

  Args:
    cache: with a recent window; donated under jit, it is updated in place.
    k, v: bfloat16 [tokens, num_kv_heads, head_dim], no more than the window's tokens.

  Returns:
    The cache but for recent.starts, and of each sequence what is in its pages now, int32
    [num_seqs].
  """
  cache, k, v, batch = fence((cache, k, v, batch))
  window = cache.recent
  assert window is not None
  step = append_recent_ptx.Step(
    tokens=window.tokens,
    num_rings=window.num_rings,
    of_ring=window.ring_pages,
    num_seqs=batch.num_seqs,
    max_pages=batch.max_pages,
    by_number=batch.ring_ids is None,
  )
  program, programs = append_recent_ptx.append_program(page_rows(cache.k), page_rows(cache.v), step)
  arrays = {
    "kv_lens": batch.kv_lens,
    "cu_q_lens": batch.cu_q_lens,
    "starts": window.starts,
    "table": batch.page_table,
  }
  if batch.ring_ids is not None:
    arrays["ring_ids"] = batch.ring_ids
  refs = {}
  for name, pool, ring, x in (("k", cache.k, window.k, k), ("v", cache.v, window.v, v)):
    pages = zip(("data", "block_scale"), kv_cache.pool_arrays(pool), strict=False)
    mine = {f"{name}_{array}": jax.new_ref(a) for array, a in pages}
    mine[f"{name}_ring"] = jax.new_ref(ring.data)
    refs |= mine
    arrays |= mine | {f"{name}_rows": x}
    if pool.global_scale is not None:
      arrays[f"{name}_global_scale"] = pool.global_scale
  start = jax.ShapeDtypeStruct((batch.num_seqs,), jnp.int32)
  kernel = ptx_launch.Kernel(
    "kv_append_step",
    program,
    programs,
    smem_bytes=0,
    makes={"start": start},
    threads=append_recent_ptx.THREADS,
  )
  made = kernel.launch(arrays)
  written = {name: jax.freeze(ref) for name, ref in refs.items()}

  def pool_of(name: str, pool: kv_cache.PagePool) -> kv_cache.PagePool:
    names = (f"{name}_{array}" for array in ("data", "block_scale"))
    return kv_cache.with_arrays(pool, tuple(written[n] for n in names if n in written))

  rings = {
    name: dataclasses.replace(pool, data=written[f"{name}_ring"])
    for name, pool in (("k", window.k), ("v", window.v))
  }
  cache = dataclasses.replace(
    cache,
    k=pool_of("k", cache.k),
    v=pool_of("v", cache.v),
    recent=dataclasses.replace(window, **rings),
  )
  return fence((cache, made["start"]))


def step_supported(cache: kv_cache.PagedKVCache, tokens: int, interpret) -> bool:
  """Whether append_step can run a step of so many rows."""
  window = cache.recent
  assert window is not None
  return (
    interpret is None
    and tokens <= window.tokens
    and all(append_ptx.supports(page_rows(p)) for p in (cache.k, cache.v, window.k, window.v))
  )


def unsupported(request, interpret) -> str | None:
  """Why the kernel cannot run a request (ops.append.AppendRequest), or None if it can."""
  searches = set(request.scale_searches) - {"amax"}
  pools = zip(request.formats, request.head_dims, strict=True)
  rows = tuple(
    append_ptx.Rows(format, request.num_kv_heads, dim, request.num_pages, request.page_size)
    for format, dim in pools
  )
  why_not = _not_in_ptx(rows, request.dtypes, interpret)
  if not searches or why_not is None:
    return None
  return f"only its PTX searches scales by {searches.pop()}, and {why_not}"


def _not_in_ptx(
  rows: tuple[append_ptx.Rows, ...], dtypes: tuple[str, ...], interpret
) -> str | None:
  """Why rows of these dtypes are left to plain Pallas, or None where they are not."""
  if interpret is not None:
    return "PTX cannot be interpreted"
  if set(dtypes) != {"bfloat16"}:
    return f"that takes rows of bfloat16, got {' and '.join(dtypes)}"
  if not all(map(append_ptx.supports, rows)):
    return "that counts up to 2^32 scale blocks of a pool"
  return None


def _append_in_ptx(
  cache,
  k,
  v,
  slots,
  *,
  tuning: append_ptx.Tuning = append_ptx.DEFAULT,
  from_pages: bool = False,
):
  """See append_ptx.py."""
  pools = (cache.k, cache.v)
  k_rows, v_rows = map(page_rows, pools)
  program, programs = append_ptx.append_program(
    k_rows, v_rows, slots.shape[0], tuning, from_pages=from_pages
  )
  pages = tuple(tuple(map(jax.new_ref, kv_cache.pool_arrays(pool))) for pool in pools)
  arguments = []
  for pool, refs, x in zip(pools, pages, (k, v), strict=True):
    scales = () if pool.global_scale is None else (pool.global_scale,)
    arguments += [x, *refs, *scales]
  run = ptx_launch.launch(
    program,
    name="kv_append",
    programs=programs,
    threads=tuning.threads,
    smem_bytes=0,
    out_type=(),
  )
  run(*arguments, slots)
  k_pool, v_pool = (
    kv_cache.with_arrays(pool, tuple(map(jax.freeze, refs)))
    for pool, refs in zip(pools, pages, strict=True)
  )
  return dataclasses.replace(cache, k=k_pool, v=v_pool)


def page_rows(pool: kv_cache.PagePool) -> append_ptx.Rows:
  return append_ptx.Rows(
    pool.format,
    pool.num_kv_heads,
    pool.head_dim,
    pool.num_pages,
    pool.page_size,
    pool.scale_search,
  )


def _append_in_pallas(cache, k, v, slots, *, interpret):
  """A program a row; see _write_row."""
  tokens, page_size = slots.shape[0], cache.page_size
  pools, new = (cache.k, cache.v), (k, v)
  rows = tuple(_view_rows(pool, x) for pool, x in zip(pools, new, strict=True))
  pages = tuple(tuple(map(jax.new_ref, _view_pages(pool))) for pool in pools)

  def kernel(pages_gmem, rows_gmem, global_scale_gmem, slots_gmem):
    which, token = lax.axis_index("k_or_v"), lax.axis_index("token")
    slot = slots_gmem[token]
    page, row = lax.div(slot, jnp.int32(page_size)), lax.rem(slot, jnp.int32(page_size))

    @pl.when((slot >= 0) & (page < cache.num_pages))
    def _():
      for i, pool in enumerate(pools):

        @pl.when(which == i)
        def _(i=i, pool=pool):
          _write_row(
            partial(_WRITE_TILE[pool.format], new[i].dtype),
            rows_gmem[i].at[token],
            global_scale_gmem[i],
            [array.at[page, :, row] for array in pages_gmem[i]],
          )

  plgpu.kernel(
    kernel,
    grid=(len(pools), tokens),
    grid_names=("k_or_v", "token"),
    compiler_params=common.COMPILER_PARAMS,
    kernel_name="kv_append",
    interpret=interpret,
  )(pages, rows, tuple(pool.global_scale for pool in pools), slots)
  k_pool, v_pool = (
    _from_views(pool, tuple(map(jax.freeze, refs))) for pool, refs in zip(pools, pages, strict=True)
  )
  return dataclasses.replace(cache, k=k_pool, v=v_pool)


def _view_rows(pool: kv_cache.PagePool, x: jax.Array) -> jax.Array:
  """x as [tokens, heads, blocks, ...]: pairs in words for nvfp4, else values."""
  if pool.format == "nvfp4":
    return common.view_pairs(x)
  return x.reshape(*x.shape[:-1], -1, nvfp4.SCALE_BLOCK)


def _view_pages(pool: kv_cache.PagePool) -> tuple[jax.Array, ...]:
  """The pool's arrays with their last axis split by scale block: [..., blocks, ...]."""
  blocks = pool.head_dim // nvfp4.SCALE_BLOCK
  return tuple(
    a if a is pool.block_scale else a.reshape(*a.shape[:-1], blocks, -1)
    for a in kv_cache.pool_arrays(pool)
  )


def _from_views(pool: kv_cache.PagePool, views: tuple[jax.Array, ...]) -> kv_cache.PagePool:
  arrays = zip(views, kv_cache.pool_arrays(pool), strict=True)
  return kv_cache.with_arrays(pool, tuple(view.reshape(a.shape) for view, a in arrays))


def _write_row(write_tile, row_gmem, global_scale_gmem, page_gmem) -> None:
  """Writes all heads of one row, tile after tile.

  Args:
    write_tile: a function of _WRITE_TILE, but for the dtype.
    row_gmem: the new row, [heads, blocks, ...].
    global_scale_gmem: float32 [heads], or None.
    page_gmem: the row's place in each array of the pool, [heads, blocks, ...].
  """
  heads, blocks = row_gmem.shape[:2]
  # Powers of two that divide both axes evenly, at most a block for each thread.
  tile_blocks = common.power_of_two_divisor(blocks, common.WARPGROUP)
  tile_heads = common.power_of_two_divisor(heads, common.WARPGROUP // tile_blocks)

  @pl.loop(0, heads // tile_heads)
  def _(i):
    @pl.loop(0, blocks // tile_blocks)
    def _(j):
      tile = common.Tile(i * tile_heads, tile_heads, j * tile_blocks, tile_blocks)
      write_tile(tile, row_gmem, global_scale_gmem, page_gmem)


def _write_nvfp4(dtype, tile, row_gmem, global_scale_gmem, page_gmem) -> None:
  codes_gmem, block_scale_gmem = page_gmem
  even, odd = common.load_pairs(tile, row_gmem, dtype)
  codes, scale = common.encode(even, odd, tile.load_rows(global_scale_gmem))
  tile.store(codes_gmem, codes.astype(jnp.uint8))
  tile.store(block_scale_gmem, common.as_e4m3(scale))


def _write_fp8(dtype, tile, row_gmem, global_scale_gmem, page_gmem) -> None:
  (data_gmem,) = page_gmem
  x = tile.load(row_gmem).astype(jnp.float32)
  byte = _fp8_byte(x, common.broadcast(tile.load_rows(global_scale_gmem), x.shape))
  tile.store(data_gmem, common.as_e4m3(byte))


def _fp8_byte(x: jax.Array, global_scale: jax.Array) -> jax.Array:
  """E4M3 of x / global_scale, saturating, NaN where that is not finite; a byte in uint32."""
  pattern, divisor = common.f32_bits(x), common.f32_bits(global_scale)
  magnitude = pattern & u32(common.F32_SIGN - 1)
  sign = (pattern ^ magnitude) >> u32(24)
  byte = common.quotient_to_e4m3(magnitude, divisor) | sign
  # No quotient of two float32 rounds up to 2^128, so the exponent shows where it overflows.
  exponent = common.quotient_exponent(magnitude, divisor)
  finite = (magnitude < u32(common.F32_INF)) & (exponent <= jnp.int32(common.F32_BIAS))
  return jnp.where(finite, byte, u32(nvfp4.E4M3_NAN))


def _write_bf16(dtype, tile, row_gmem, global_scale_gmem, page_gmem) -> None:
  (data_gmem,) = page_gmem
  tile.store(data_gmem, tile.load(row_gmem).astype(jnp.bfloat16))


_WRITE_TILE = {"nvfp4": _write_nvfp4, "fp8": _write_fp8, "bf16": _write_bf16}
