"""append: quantise new keys and values and write them to their pages, in place when donated."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from nvfp4_pallas import debug, recent
from nvfp4_pallas.batch import RaggedBatch, check_batch
from nvfp4_pallas.batch import slot_mapping as batch_slots
from nvfp4_pallas.cache import PagedKVCache, PagePool, encode_rows, pool_arrays, put, with_arrays
from nvfp4_pallas.dispatch import Entry, Resolved, current_target, resolve
from nvfp4_pallas.explicit import in_auto_mode
from nvfp4_pallas.ops.checks import as_jax, check_cache, check_is_array, check_kv
from nvfp4_pallas.ops.transforms import stored_rows


@dataclasses.dataclass(frozen=True)
class AppendRequest:
  """What an implementation must know to say whether it can run."""

  formats: tuple[str, str]
  head_dims: tuple[int, int]
  num_kv_heads: int
  num_pages: int
  page_size: int
  num_tokens: int
  dtypes: tuple[str, str]
  scale_searches: tuple[str, str]
  recent_window: int = 0


def append(
  cache: PagedKVCache,
  k: jax.Array,
  v: jax.Array,
  batch: RaggedBatch | None = None,
  *,
  slot_mapping: jax.Array | None = None,
  implementation: str | None = None,
) -> PagedKVCache:
  """Writes new K and V rows to their pages, in the formats of the cache.

  Equivalent to, for each row t with slot s >= 0 inside the pool:
      cache[s // page_size, :, s % page_size] = encode(k[t], v[t])
  with the rounding of `format.encode` (nvfp4), saturating E4M3 of x / global_scale (fp8), or
  round to nearest (bf16). Where the cache has a rotation or a mean, rows are transformed first.

  With a recent window (recent.py) rows go to the ring of their sequence instead, as bfloat16, and
  the pages that have left the window are written from there; of a chunk that is longer than the
  window, rows that are outside already go to the pages at once.

  Args:
    cache: donate it under jit, then no copy of it is made. Bytes that no slot names are returned
      bit-identical.
    k: bfloat16, float16 or float32 [tokens, num_kv_heads, head_dim], rotary embedding applied.
    v: the same with V's head dim.
    batch: rows are the newest tokens of its sequences; kv_lens must already count them.
    slot_mapping: instead of `batch`: int32 [tokens], slot = page * page_size + offset. A row
      whose slot is negative or past the pool is skipped. What two rows with one slot leave there
      is not promised.
    implementation: who runs it; None lets `dispatch.resolve` choose.

  Returns:
    The cache with the rows written.

  Raises:
    ValueError: an argument contradicts the cache or breaks a rule; raised before any write.
    NotImplementedError: the named implementation cannot run (message: why).

  Source: the slot semantics of FlashInfer's and vLLM's append with slot_mapping.
  """
  check_cache(cache)
  check_kv(k, v, cache)
  if (batch is None) == (slot_mapping is None):
    raise ValueError("exactly one of batch and slot_mapping must be given")
  if batch is None and cache.recent is not None:
    raise ValueError("batch must be given, not slot_mapping, for a cache with a recent window")
  if batch is not None:
    check_batch(batch, num_tokens=k.shape[0], page_size=cache.page_size, appends=True)
    recent.check_rings(cache.recent, batch)
    slot_mapping = batch_slots(batch, cache.page_size, k.shape[0])
  check_is_array("slot_mapping", slot_mapping)
  if slot_mapping.shape != k.shape[:1] or slot_mapping.dtype != jnp.int32:
    raise ValueError(
      f"slot_mapping must be int32 [{k.shape[0]}], got {slot_mapping.dtype} {slot_mapping.shape}"
    )
  cache, k, v, slots, batch = as_jax(cache, k, v, slot_mapping, batch)
  run = functools.partial(_append, implementation=implementation)
  return in_auto_mode(run, lambda: cache, cache, k, v, slots, batch)


def _append(cache, k, v, slots, batch, *, implementation) -> PagedKVCache:
  """append after the checks of its arguments, all of them jax arrays."""
  debug.check_append(cache, batch, slots, k.shape[0])
  k, v = stored_rows(cache, k, v)
  if cache.recent is not None and 0 not in (k.shape[0], batch.num_seqs, batch.max_pages):
    # A page's bits must not depend on whether a row came by way of the ring.
    k, v = k.astype(jnp.bfloat16), v.astype(jnp.bfloat16)
    resolved = resolve_append(append_request(cache, k, v), implementation)
    return resolved.function(cache, k, v, slots, batch)
  pages = dataclasses.replace(cache, recent=None)
  pages = resolve_append(append_request(pages, k, v), implementation).function(pages, k, v, slots)
  return dataclasses.replace(pages, recent=cache.recent)


def append_request(cache: PagedKVCache, k: jax.Array, v: jax.Array) -> AppendRequest:
  return AppendRequest(
    formats=cache.formats,
    head_dims=(cache.k.head_dim, cache.v.head_dim),
    num_kv_heads=cache.num_kv_heads,
    num_pages=cache.num_pages,
    page_size=cache.page_size,
    num_tokens=k.shape[0],
    dtypes=(str(k.dtype), str(v.dtype)),
    scale_searches=(cache.k.scale_search, cache.v.scale_search),
    recent_window=0 if cache.recent is None else cache.recent.tokens,
  )


def resolve_append(request: AppendRequest, implementation: str | None = None) -> Resolved:
  return resolve(_APPEND_RECENT if request.recent_window else _APPEND, request, implementation)


def _append_xla(cache: PagedKVCache, k, v, slots) -> PagedKVCache:
  num_slots = cache.num_pages * cache.page_size
  inside = (slots >= 0) & (slots < num_slots)
  page = jnp.where(inside, slots // cache.page_size, cache.num_pages)  # past the end: dropped
  offset = slots % cache.page_size

  def write(pool: PagePool, x) -> PagePool:
    rows = encode_rows(pool, x)
    written = (
      put(a, (page, slice(None), offset), r) for a, r in zip(pool_arrays(pool), rows, strict=True)
    )
    return with_arrays(pool, tuple(written))

  return dataclasses.replace(cache, k=write(cache.k, k), v=write(cache.v, v))


def _append_mosaic_sm90(cache: PagedKVCache, k, v, slots) -> PagedKVCache:
  from nvfp4_pallas.kernels import append_mosaic_sm90 as kernel

  return kernel.append(cache, k, v, slots, interpret=current_target().interpret)


def _recent_xla(cache: PagedKVCache, k, v, slots, batch) -> PagedKVCache:
  def move(cache, source, slots):
    rows = lambda pool: jnp.swapaxes(pool.data, 1, 2).reshape(-1, pool.num_kv_heads, pool.head_dim)
    return _append_xla(cache, rows(source.k), rows(source.v), slots)

  return _by_moves(cache, k, v, slots, batch, _append_xla, move)


def _recent_mosaic_sm90(cache: PagedKVCache, k, v, slots, batch) -> PagedKVCache:
  from nvfp4_pallas.kernels import append_mosaic_sm90 as kernel

  interpret = current_target().interpret
  if not kernel.step_supported(cache, k.shape[0], interpret):
    move = functools.partial(kernel.move, interpret=interpret)
    return _by_moves(cache, k, v, slots, batch, _append_mosaic_sm90, move)
  window = cache.recent
  assert window is not None
  cache, start = kernel.append_step(cache, k, v, batch)
  assert cache.recent is not None
  starts = recent.with_starts(window, batch, start)
  return dataclasses.replace(cache, recent=dataclasses.replace(cache.recent, starts=starts))


def _by_moves(cache: PagedKVCache, k, v, slots, batch, write, move) -> PagedKVCache:
  """In three calls: from the rings to the pages, new rows to the pages, and to the rings.

  Args:
    write: an append to pages, of (cache, k, v, slots).
    move: the same of (cache, a cache of bf16 pages, a slot for each of their tokens).
  """
  window = cache.recent
  assert window is not None
  moves = recent.plan_append(window, batch, slots, cache.page_size)
  rings = recent.ring_cache(window)
  pages = move(cache, rings, moves.leaving)
  # Rings are read before they are written. XLA sees no order between the two calls, and where it
  # takes the other one it copies the rings.
  (k_pool, v_pool), rings = lax.optimization_barrier(((pages.k, pages.v), rings))
  pages = dataclasses.replace(pages, k=k_pool, v=v_pool)
  # With rings for all and no more rows than the window, none is outside already.
  if k.shape[0] > window.tokens or batch.ring_ids is not None:
    pages = write(pages, k, v, moves.to_pages)
  rings = write(rings, k, v, moves.to_rings)
  window = dataclasses.replace(window, k=rings.k, v=rings.v, starts=moves.starts)
  return dataclasses.replace(pages, recent=window)


def _mosaic_sm90_unsupported(request: AppendRequest) -> str | None:
  from nvfp4_pallas.kernels import append_mosaic_sm90 as kernel

  return kernel.unsupported(request, current_target().interpret)


_APPEND = {
  "mosaic_sm90": Entry(_append_mosaic_sm90, _mosaic_sm90_unsupported),
  "xla": Entry(_append_xla),
}
_APPEND_RECENT = {
  "mosaic_sm90": Entry(_recent_mosaic_sm90, _mosaic_sm90_unsupported),
  "xla": Entry(_recent_xla),
}
