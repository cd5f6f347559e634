"""The recent window: which tokens of a sequence are wide, and where they lie.

Almost all that an FP4 cache costs in quality comes from the newest tokens, which every query reads
most. With a window of W tokens and pages of P, a sequence of n tokens has

    [0, start)   in the pages, in the cache's formats
    [start, n)   in its ring, bfloat16            start = floor(max(n - W, 0) / P) * P

so that W to W + P - 1 tokens are wide, pages are written whole, once, and can be shared as soon as
they are. `starts` in the cache remembers start, which never falls: a sequence that begins with
shared pages has no wide copy of them, and one that gives up some of its newest tokens (rejected
drafts) still finds the others where they are, as long as it does not become shorter than its
longest length minus W. One that must, begins anew behind whole pages (open_rings).

A ring is ring_pages = ceil(W / P) + 1 pages of a bf16 pool. It can be read as a paged cache of its
own, whose page table `ring_table` makes: attention over all tokens is attention over the pages
merged by lse with attention over the ring.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from nvfp4_pallas import debug
from nvfp4_pallas.batch import RaggedBatch, token_places
from nvfp4_pallas.cache import PagedKVCache, RecentWindow, check_cache, put, take
from nvfp4_pallas.explicit import in_auto_mode


@dataclasses.dataclass(frozen=True)
class Spans:
  """What of each sequence is where; int32 [num_seqs].

  Attributes:
    ring: its ring, num_rings where it has none.
    start: the first token that is not in the pages.
    end: the tokens there are.
  """

  ring: jax.Array
  start: jax.Array
  end: jax.Array


def past_spans(recent: RecentWindow, batch: RaggedBatch) -> Spans:
  """Of the tokens before this step, whether they were appended already or not."""
  # A sequence that begins has no past, whatever the ring's last one left in `starts`.
  return _spans(recent, batch, jnp.maximum(batch.kv_lens - batch.q_lens, 0))


def spans(recent: RecentWindow, batch: RaggedBatch) -> Spans:
  """Of all tokens, once this step's are appended."""
  return _spans(recent, batch, batch.kv_lens)


def _spans(recent: RecentWindow, batch: RaggedBatch, end: jax.Array) -> Spans:
  ids = batch.ring_ids
  if ids is None:
    starts = recent.starts[: batch.num_seqs]
    return Spans(jnp.arange(batch.num_seqs, dtype=jnp.int32), jnp.minimum(starts, end), end)
  has_ring = (ids >= 0) & (ids < recent.num_rings)
  starts = recent.starts.at[ids].get(mode="clip")
  start = jnp.where(has_ring, jnp.minimum(starts, end), end)
  return Spans(jnp.where(has_ring, ids, recent.num_rings), start, end)


def check_rings(recent: RecentWindow | None, batch: RaggedBatch) -> None:
  """Raises ValueError where a batch has too few rings, or known ring_ids name one twice; inside jit
  the latter under debug_checks() only."""
  if recent is None:
    return
  if batch.ring_ids is None:
    if batch.num_seqs > recent.num_rings:
      raise ValueError(
        f"batch.ring_ids must be given for {batch.num_seqs} sequences and {recent.num_rings} rings"
      )
    return
  debug.check_ring_ids("ring_ids", batch.ring_ids, recent.num_rings)


def ring_cache(recent: RecentWindow) -> PagedKVCache:
  """The rings as a paged cache."""
  return PagedKVCache(recent.k, recent.v)


def ring_table(recent: RecentWindow, where: Spans) -> jax.Array:
  """int32 [num_seqs, ring_pages]: the ring's page of token start + i * page_size."""
  count = recent.ring_pages
  first = where.start // recent.k.page_size
  index = (first[:, None] + jnp.arange(count, dtype=jnp.int32)[None]) % count
  return where.ring[:, None] * count + index


def ring_batch(recent: RecentWindow, batch: RaggedBatch, where: Spans) -> RaggedBatch:
  """The batch as it reads the rings: the keys from start to end, this step's rows the newest."""
  return RaggedBatch(ring_table(recent, where), where.end - where.start, batch.cu_q_lens)


@dataclasses.dataclass(frozen=True)
class Moves:
  """Where an append writes; slots are page * page_size + offset, -1 for nowhere.

  Attributes:
    leaving: int32 [tokens of all rings], for each place of the rings, in the order of their pages:
      the slot of the pages to which its token moves.
    to_pages: int32 [tokens], new rows that go to the pages at once.
    to_rings: int32 [tokens], slots in the rings of the others.
    starts: int32 [num_rings], afterwards.
  """

  leaving: jax.Array
  to_pages: jax.Array
  to_rings: jax.Array
  starts: jax.Array


def plan_append(
  recent: RecentWindow, batch: RaggedBatch, page_slots: jax.Array, page_size: int
) -> Moves:
  """What an append of this step's rows moves.

  Args:
    page_slots: int32 [tokens], batch.slot_mapping of the pages.
  """
  past, start = past_spans(recent, batch), start_after(recent, batch, page_size)
  has_ring = past.ring < recent.num_rings

  # Ring to pages: tokens past.start .. min(start, past.end) of each sequence.
  table = ring_table(recent, past)
  position = past.start[:, None, None] + jnp.arange(
    recent.ring_pages * page_size, dtype=jnp.int32
  ).reshape(1, recent.ring_pages, page_size)
  leaves = has_ring[:, None, None] & (position < jnp.minimum(start, past.end)[:, None, None])
  page = jnp.take_along_axis(
    batch.page_table,
    jnp.clip(position[:, :, 0] // page_size, 0, max(batch.max_pages - 1, 0)),
    axis=1,
  )
  offset = position % page_size
  in_reach = (page >= 0) & (page < (2**31 - 1) // page_size)
  target = jnp.where(leaves & in_reach[..., None], page[..., None] * page_size + offset, -1)
  nowhere = jnp.full((recent.k.num_pages, page_size), -1, jnp.int32)
  # A sequence without a ring names pages past the last one, which are dropped.
  leaving = nowhere.at[table].set(target, mode="drop").reshape(-1)

  seq, place, real = token_places(batch, page_slots.shape[0])
  stays = real & has_ring[seq] & (place >= start[seq])
  ring_page = past.ring[seq] * recent.ring_pages + place // page_size % recent.ring_pages
  return Moves(
    leaving=leaving,
    to_pages=jnp.where(stays, -1, page_slots),
    to_rings=jnp.where(stays, ring_page * page_size + place % page_size, -1),
    starts=with_starts(recent, batch, start),
  )


def start_after(recent: RecentWindow, batch: RaggedBatch, page_size: int) -> jax.Array:
  """int32 [num_seqs]: what of each sequence is in the pages once this step is appended."""
  past = past_spans(recent, batch)
  outside = jnp.maximum(batch.kv_lens - recent.tokens, 0) // page_size * page_size
  has_ring = past.ring < recent.num_rings
  return jnp.where(has_ring, jnp.maximum(past.start, outside), batch.kv_lens)


def with_starts(recent: RecentWindow, batch: RaggedBatch, start: jax.Array) -> jax.Array:
  """recent.starts with `start` int32 [num_seqs] for the rings of the batch."""
  ids = batch.ring_ids
  if ids is None:
    return recent.starts.at[: batch.num_seqs].set(start)
  return recent.starts.at[jnp.where(ids < 0, recent.num_rings, ids)].set(start, mode="drop")


def open_rings(cache: PagedKVCache, ring_ids: jax.Array, kv_lens: jax.Array) -> PagedKVCache:
  """Gives rings to sequences whose first kv_lens tokens are in pages already (a shared prefix).

  One that begins with its first token needs no call: append gives it its ring.

  Args:
    ring_ids: int32 [n], no ring twice; one that is no ring's number is skipped.
    kv_lens: int32 [n], multiples of page_size: whole pages only can be shared.

  Raises:
    ValueError: an argument breaks a rule (message: argument, rule, value). Values are checked where
      they are known, inside jit under debug_checks() only.
  """
  recent = _recent_of(cache)
  for name, array in (("ring_ids", ring_ids), ("kv_lens", kv_lens)):
    if not hasattr(array, "dtype"):
      raise ValueError(f"{name} must be an array, got {type(array).__name__}")
    if array.ndim != 1 or array.dtype != jnp.int32:
      raise ValueError(f"{name} must be int32 [n], got {array.dtype} {array.shape}")
  if ring_ids.shape != kv_lens.shape:
    raise ValueError(
      f"ring_ids and kv_lens must be equally long, got {ring_ids.shape=} {kv_lens.shape=}"
    )
  debug.check_ring_ids("ring_ids", ring_ids, recent.num_rings)
  debug.check_whole_pages(kv_lens, cache.page_size)

  def opened(starts, ring_ids, kv_lens):
    return starts.at[jnp.where(ring_ids < 0, len(starts), ring_ids)].set(kv_lens, mode="drop")

  starts = in_auto_mode(opened, lambda: recent.starts, recent.starts, ring_ids, kv_lens)
  return dataclasses.replace(cache, recent=dataclasses.replace(recent, starts=starts))


def copy_rings(cache: PagedKVCache, source: jax.Array, target: jax.Array) -> PagedKVCache:
  """Copies rings (fork): ring target[i] becomes what ring source[i] was.

  Args:
    cache: donated under jit; other rings are returned bit-identical.
    source, target: int32 [n], no target twice. A pair with either outside [0, num_rings) is
      skipped.

  Raises:
    ValueError: as open_rings.
  """
  recent = _recent_of(cache)
  for name, ids in (("source", source), ("target", target)):
    if not hasattr(ids, "dtype"):
      raise ValueError(f"{name} must be an array, got {type(ids).__name__}")
    if ids.ndim != 1 or ids.dtype != jnp.int32:
      raise ValueError(f"{name} must be int32 [n], got {ids.dtype} {ids.shape}")
  if source.shape != target.shape:
    raise ValueError(f"source and target must be equally long, got {source.shape=} {target.shape=}")
  debug.check_ring_ids("target", target, recent.num_rings)
  copied = in_auto_mode(_copy_rings, lambda: recent, recent, source, target)
  return dataclasses.replace(cache, recent=copied)


def _copy_rings(recent: RecentWindow, source: jax.Array, target: jax.Array) -> RecentWindow:
  known = (source >= 0) & (source < recent.num_rings) & (target >= 0)
  where = jnp.where(known, target, recent.num_rings)

  def pages(ids):
    first = ids[:, None] * recent.ring_pages
    return (first + jnp.arange(recent.ring_pages, dtype=jnp.int32)[None]).reshape(-1)

  def copy(pool):
    rows = take(pool.data, (pages(source),), mode="clip")
    return dataclasses.replace(pool, data=put(pool.data, (pages(where),), rows))

  starts = recent.starts.at[where].set(recent.starts.at[source].get(mode="clip"), mode="drop")
  return RecentWindow(copy(recent.k), copy(recent.v), starts, recent.tokens)


def _recent_of(cache: PagedKVCache) -> RecentWindow:
  check_cache(cache)
  if cache.recent is None:
    raise ValueError("cache must have a recent window, this one was created without")
  return cache.recent
