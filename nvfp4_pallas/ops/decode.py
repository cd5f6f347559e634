"""decode: one query token a sequence over its cached keys, split over the keys where that helps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from nvfp4_pallas import attention, debug, recent
from nvfp4_pallas.batch import RaggedBatch, check_one_token_each
from nvfp4_pallas.cache import PagedKVCache
from nvfp4_pallas.dispatch import Entry, Resolved, current_target, resolve
from nvfp4_pallas.ops import mosaic_sm100, transforms, triton_sm120
from nvfp4_pallas.ops.checks import as_jax, check_attention
from nvfp4_pallas.ops.merge import merge_splits
from nvfp4_pallas.ops.request import AttentionRequest, attention_request, attention_spec
from nvfp4_pallas.read_paths import round_q


def decode(
  q: jax.Array,
  cache: PagedKVCache,
  batch: RaggedBatch,
  *,
  read_path: str,
  implementation: str | None = None,
  sm_scale: float | None = None,
  window: int | None = None,
  soft_cap: float | None = None,
  sinks: jax.Array | None = None,
  q_levels: int = 2,
  num_splits: int | None = None,
  batch_invariant: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """out_s = sum_j softmax_j(sm_scale * q'_s . k'_j) v_j over the kv_len keys of sequence s.

  The same contract as `prefill` with one query token a sequence, the newest: row s of q belongs to
  sequence s. A sequence with kv_len 0 is a free place: out 0, lse -inf.

  Args:
    q: bfloat16, float16 or float32 [num_seqs, num_q_heads, head_dim].
    cache, batch, read_path, implementation, sm_scale, window, soft_cap, sinks, q_levels: as in
      `prefill`. batch.cu_q_lens must be 0, 1, ..., num_seqs (RaggedBatch.for_decode).
    num_splits: parts into which the keys of a sequence are cut, each attended to on its own and
      joined by lse; None leaves it to the implementation, which is faster. Counts agree to
      rounding.
    batch_invariant: cut by the sequence alone, so that its result is bit for bit the same in any
      batch; with a cache that is rotated or lacks a mean, to rounding.

  Returns:
    out [num_seqs, num_q_heads, v_head_dim] in q's dtype, lse float32 [num_seqs, num_q_heads].

  Raises:
    ValueError: an argument breaks a rule (message: argument, rule, value).
    NotImplementedError: the named implementation cannot run (message: why).

  Source: split-KV after FlashDecoding (arXiv:2311.01282).
  """
  spec = attention_spec(
    q,
    read_path,
    causal=True,  # or not: one newest token sees all keys
    sm_scale=sm_scale,
    window=window,
    soft_cap=soft_cap,
    q_levels=q_levels,
  )
  _check_one_token_each(q, batch)
  recent.check_rings(cache.recent, batch)
  check_attention(q, cache, batch, spec, sinks)
  if num_splits is not None and (not isinstance(num_splits, int) or num_splits < 1):
    raise ValueError(f"num_splits must be a whole number of at least 1, got {num_splits}")
  q, cache, batch, sinks = as_jax(q, cache, batch, sinks)
  debug.check_attention(cache, batch, spec, q.shape[0], one_token_each=True)
  request = attention_request(q, cache, spec, num_splits=num_splits, max_pages=batch.max_pages)
  resolved = resolve_decode(request, implementation)
  options = num_splits, batch_invariant
  out, lse = transforms.attend(resolved.function, q, cache, batch, spec, *options, sinks=sinks)
  return out.astype(q.dtype), lse


def resolve_decode(request: AttentionRequest, implementation: str | None = None) -> Resolved:
  """Who runs it; the reason also names the kernel where an implementation has two."""
  return resolve(_DECODE, request, implementation)


def choose_kernel(request: AttentionRequest) -> tuple[Callable, str]:
  """Which of mosaic_sm90's kernels runs what one of them can, and why.

  decode_mosaic_sm90.py is made for decode: PTX that cuts the batch as it likes.
  attention_mosaic_sm90.py, prefill's kernel in plain Pallas, takes other shapes and split counts,
  and can be interpreted.
  """
  from nvfp4_pallas.kernels import decode_mosaic_sm90 as split_kv

  why_not = split_kv.unsupported(request)
  plain = _decode_attention if not request.recent_window else _decode_parts
  if request.num_splits is not None:
    why_not = "it cuts the batch itself, and num_splits is given"
  elif current_target().interpret is not None:
    why_not = "its PTX cannot be interpreted"
  if why_not is None:
    return _decode_split_kv, "by the split-KV kernel" + request.emulation
  why = f"by prefill's kernel, not the split-KV kernel: {why_not}"
  return plain, why + request.emulation


def _check_one_token_each(q, batch: RaggedBatch) -> None:
  if q.shape[0] != batch.num_seqs:
    raise ValueError(
      f"q must have one row for each of {batch.num_seqs} sequences, got {q.shape[0]}"
    )
  check_one_token_each(batch)


def _decode_xla(q, cache, batch, spec, num_splits, batch_invariant, sinks):
  """Sequence by sequence, each in arrays of its own: always batch invariant."""
  del batch_invariant
  num_splits = 1 if num_splits is None else num_splits
  if 0 in (batch.num_seqs, batch.max_pages):
    out = jnp.zeros((*q.shape[:2], cache.v.head_dim), jnp.float32)
    return out, jnp.full(q.shape[:2], attention.NEG_INF, jnp.float32)
  wide = dataclasses.replace(spec, read_path="bf16")
  counts, ring_keys = batch.kv_lens, None
  if cache.recent is not None:
    where = recent.spans(cache.recent, batch)
    counts, ring_keys = where.start, attention.ring_keys(cache.recent, where)
  scales = None
  if spec.read_path == "nvfp4_a8q":
    scales = attention.k_e4m3_scales(cache, batch.page_table, counts)
  q_pages, q_wide = round_q(q, spec), round_q(q, wide)

  def of_sequence(seq):
    position = batch.kv_lens[seq] - 1
    scale = None if scales is None else scales[seq]
    keys = attention.cached_keys(cache, batch.page_table[seq], counts[seq], scale)
    begin, end = attention.visible_tiles(keys, position, position, spec)
    step = (end - begin + num_splits - 1) // num_splits

    def of_split(split):
      first = jnp.minimum(begin + split * step, end)
      tiles = first, jnp.minimum(first + step, end)
      return _attend(q_pages[seq], position, keys, spec, tiles)

    state = merge_splits(*lax.map(of_split, jnp.arange(num_splits, dtype=jnp.int32)))
    if ring_keys is not None:
      newest = ring_keys(seq)
      tiles = attention.visible_tiles(newest, position, position, wide)
      state = attention.merge_two(state, _attend(q_wide[seq], position, newest, wide, tiles))
    return attention.add_sinks(state, sinks)

  return lax.map(of_sequence, jnp.arange(batch.num_seqs, dtype=jnp.int32))


def _attend(q_row, position, keys, spec, tiles):
  out, lse = attention.attend(q_row[None], position[None], keys, spec, tiles)
  return out[0], lse[0]


def _decode_split_kv(q, cache, batch, spec, num_splits, batch_invariant, sinks):
  from nvfp4_pallas.kernels import decode_mosaic_sm90 as kernel

  del num_splits  # none was given
  out_dtype = transforms.out_dtype(q, cache, sinks)
  state = kernel.decode(q, cache, batch, spec, batch_invariant=batch_invariant, out_dtype=out_dtype)
  return attention.add_sinks(state, sinks)


def _decode_attention(q, cache, batch, spec, num_splits, batch_invariant, sinks):
  from nvfp4_pallas.kernels import attention_mosaic_sm90 as kernel

  if num_splits is None:
    num_splits = 8 if batch_invariant else _splits_to_fill_a_gpu(cache, batch)
  out, lse = kernel.attention(
    q,
    cache,
    batch,
    spec,
    num_splits=num_splits,
    max_q_len=1,
    interpret=current_target().interpret,
  )
  state = (out, lse) if num_splits == 1 else merge_splits(out, lse)
  return attention.add_sinks(state, sinks)


def _decode_parts(q, cache, batch, spec, num_splits, batch_invariant, sinks):
  """Pages and ring apart, merged by lse."""
  where = recent.spans(cache.recent, batch)
  paged = dataclasses.replace(batch, kv_lens=where.start)
  pages = dataclasses.replace(cache, recent=None)
  rings, ringed = recent.ring_cache(cache.recent), recent.ring_batch(cache.recent, batch, where)
  wide = dataclasses.replace(spec, read_path="bf16")
  states = (
    _decode_attention(q, pages, paged, spec, num_splits, batch_invariant, None),
    _decode_attention(q, rings, ringed, wide, num_splits, batch_invariant, None),
  )
  return attention.add_sinks(attention.merge_two(*states), sinks)


def _splits_to_fill_a_gpu(cache: PagedKVCache, batch: RaggedBatch) -> int:
  """Splits for two programs a multiprocessor, none shorter than a few key tiles can be."""
  programs = batch.num_seqs * cache.num_kv_heads
  longest = batch.max_pages * cache.page_size
  return max(1, min(-(-2 * _MULTIPROCESSORS // max(programs, 1)), longest // 512, 32))


def _mosaic_sm90_unsupported(request: AttentionRequest) -> str | None:
  from nvfp4_pallas.kernels import attention_mosaic_sm90 as kernel

  if choose_kernel(request)[0] is _decode_split_kv:
    return None
  if request.recent_window and request.spec.window is not None:
    return "the kernels count a sliding window from a sequence's last page, not from its ring"
  return request.too_large or kernel.unsupported(request)


_MULTIPROCESSORS = 132  # of an H100 SXM or H200
_DECODE = {
  "mosaic_sm90": Entry(_decode_split_kv, _mosaic_sm90_unsupported, choose_kernel),
  "mosaic_sm100": mosaic_sm100.DECODE,
  "triton_sm120": triton_sm120.DECODE,
  "xla": Entry(_decode_xla),
}
