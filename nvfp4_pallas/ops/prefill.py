"""prefill: attention of a ragged batch of query tokens over their sequences' cached keys."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from nvfp4_pallas import attention, debug, recent
from nvfp4_pallas.batch import RaggedBatch, check_batch, token_places
from nvfp4_pallas.cache import PagedKVCache
from nvfp4_pallas.dispatch import Entry, Resolved, current_target, resolve
from nvfp4_pallas.ops import mosaic_sm100, prefill_recent, transforms, triton_sm120
from nvfp4_pallas.ops.checks import as_jax, check_attention, check_kv
from nvfp4_pallas.ops.request import (
  AttentionRequest,
  attention_request,
  attention_spec,
  whole,
)
from nvfp4_pallas.policy import MAX_WORKSPACE_BYTES
from nvfp4_pallas.read_paths import round_q

ROWS_PER_TILE = 32
# New tokens of a sequence, on average, up to which the kernel for short queries may run. It was
# timed up to 16, and at 128, where 4 sequences take it 59 us and whole query tiles 45. Which is
# faster in between is a guess.
MAX_TAIL = 128


def prefill(
  q: jax.Array,
  cache: PagedKVCache,
  batch: RaggedBatch,
  *,
  read_path: str,
  implementation: str | None = None,
  causal: bool = True,
  sm_scale: float | None = None,
  window: int | None = None,
  soft_cap: float | None = None,
  sinks: jax.Array | None = None,
  q_levels: int = 2,
  new_kv: tuple[jax.Array, jax.Array] | None = None,
  max_workspace_bytes: int = MAX_WORKSPACE_BYTES,
) -> tuple[jax.Array, jax.Array]:
  """out_i = sum_j softmax_j(sm_scale * q'_i . k'_j) v_j over the keys that row i sees.

  Query i of a sequence with q_len queries stands at position kv_len - q_len + i (bottom-right
  alignment) and, when causal, sees the keys up to there. attention.py states the equations,
  read_paths.py what q' and k' are.

  Args:
    q: bfloat16, float16 or float32 [tokens, num_q_heads, head_dim], ragged by batch.cu_q_lens.
      num_q_heads is a multiple of the cache's num_kv_heads; query head h reads KV head
      h // (num_q_heads / num_kv_heads).
    cache: holds all kv_lens tokens of every sequence, this step's included (append first); with
      `new_kv` only those before this step. With a recent window and `new_kv`, call prefill before
      append: afterwards less of what came before this step is wide.
    batch: which rows belong to which sequence and where its pages are.
    read_path: the numerics: `bf16`, `fp8`, `nvfp4_dequant`, `nvfp4_repack`, `nvfp4_a4q`,
      `nvfp4_a8q`.
    implementation: who runs it; None lets `dispatch.resolve` choose.
    causal: False lets every query see all keys of its sequence.
    sm_scale: factor on the scores; None is 1 / sqrt(head_dim).
    window: see only the newest `window` keys up to the own position, that one included.
    soft_cap: scores become soft_cap * tanh(score / soft_cap). Not for a cache with a k_mean.
    sinks: float [num_q_heads], one more logit per head in the softmax's denominator.
    q_levels: NVFP4 levels of Q for `nvfp4_a4q`: 1, or 2 with a packed residual.
    new_kv: this step's (k, v) [tokens, num_kv_heads, dim] in wide form: they are attended to as
      bfloat16 with a bfloat16 Q, and only the keys before this step are read from the cache.
      kv_lens count them all the same, as for `append`.
    max_workspace_bytes: of device memory that the call may take for wide keys and values, beside
      its results. Kernels that would need more do not run: nvfp4_repack then widens tile by tile.

  Returns:
    out [tokens, num_q_heads, v_head_dim] in q's dtype, and lse float32 [tokens, num_q_heads], the
    natural log of the softmax's denominator, sinks included. A row that sees no key, padding
    included, has out 0 and lse -inf.

  Raises:
    ValueError: an argument breaks a rule (message: argument, rule, value).
    NotImplementedError: the named implementation cannot run (message: why).

  Source: FlashAttention arXiv:2205.14135; ragged layout as FlashInfer's batch prefill; A4Q after
  the dual-level query of flashinfer issue 4269.
  """
  spec = attention_spec(
    q,
    read_path,
    causal=causal,
    sm_scale=sm_scale,
    window=window,
    soft_cap=soft_cap,
    q_levels=q_levels,
  )
  check_attention(q, cache, batch, spec, sinks)
  recent.check_rings(cache.recent, batch)
  if new_kv is not None:
    if not isinstance(new_kv, (tuple, list)) or len(new_kv) != 2:
      raise ValueError(f"new_kv must be a pair (k, v), got {type(new_kv).__name__}")
    check_kv(*new_kv, cache, prefix="new_kv's ")
    check_batch(batch, num_tokens=q.shape[0], page_size=cache.page_size, appends=True)
    if new_kv[0].shape[0] != q.shape[0]:
      raise ValueError(f"new_kv must have q's {q.shape[0]} tokens, got {new_kv[0].shape[0]}")
  max_workspace_bytes = whole("max_workspace_bytes", max_workspace_bytes)
  if max_workspace_bytes < 0:
    raise ValueError(f"max_workspace_bytes must not be negative, got {max_workspace_bytes}")
  q, cache, batch, sinks, new_kv = as_jax(q, cache, batch, sinks, new_kv)
  debug.check_attention(cache, batch, spec, q.shape[0], new_kv=new_kv is not None)
  request = attention_request(
    q,
    cache,
    spec,
    new_kv=new_kv is not None,
    num_seqs=batch.num_seqs,
    max_pages=batch.max_pages,
    max_workspace_bytes=max_workspace_bytes,
  )
  resolved = resolve_prefill(request, implementation)
  if new_kv is not None:
    new_kv = transforms.stored_rows(cache, *new_kv)
  out, lse = transforms.attend(resolved.function, q, cache, batch, spec, new_kv, sinks=sinks)
  return out.astype(q.dtype), lse


def resolve_prefill(request: AttentionRequest, implementation: str | None = None) -> Resolved:
  """Who runs it; the reason also names the kernel where an implementation has two."""
  return resolve(_PREFILL, request, implementation)


def choose_kernel(request: AttentionRequest) -> tuple[Callable, str]:
  """Which of mosaic_sm90's kernels runs what one of them can, and why.

  tail_mosaic_sm90.py cuts the keys of few queries over the whole GPU: PTX.
  prefill_mosaic_sm90.py gives blocks whole query tiles: PTX.
  attention_mosaic_sm90.py, plain Pallas, takes every other shape, and can be interpreted.
  """
  chosen, why = _choose_kernel(request)
  return chosen, why + request.emulation


def _choose_kernel(request: AttentionRequest) -> tuple[Callable, str]:
  if request.recent_window:
    parts = [_choose_kernel(part) for part in prefill_recent.part_requests(request)]
    run = functools.partial(prefill_recent.attend, runs=[run for run, _ in parts])
    return run, f"pages and ring apart, merged by lse; pages {parts[0][1]}"
  from nvfp4_pallas.kernels import tail_mosaic_sm90 as tail
  from nvfp4_pallas.ops import prefill_choice as whole_tiles

  not_tail = tail.unsupported(request)
  if not_tail is None and request.num_tokens > MAX_TAIL * request.num_seqs:
    not_tail = f"sequences have more than {MAX_TAIL} new tokens on average"
  if not_tail is None and whole_tiles.fills_gpu(request):
    not_tail = "query tiles fill the GPU without cutting their keys"
  not_whole = whole_tiles.unsupported(request)
  if current_target().interpret is not None:
    not_tail = not_whole = "its PTX cannot be interpreted"
  if not_tail is None:
    shape = request.num_tokens, request.num_seqs, request.num_kv_heads, request.group
    return _prefill_tail, f"by the kernel for short queries, {tail.choose_config(*shape)[1]}"
  if not_whole is None:
    ahead, how = whole_tiles.widens_ahead(request)
    run = functools.partial(_prefill_whole, ahead=ahead)
    where = "by the kernel for whole query tiles, not the one for short queries"
    return run, f"{where}: {not_tail}; {how}"
  return _prefill_attention, f"by the plain kernel, not the one for whole query tiles: {not_whole}"


def workspace_bytes(request: AttentionRequest) -> int:
  """Of device memory, that mosaic_sm90 takes for wide keys and values while a call runs."""
  from nvfp4_pallas.ops import prefill_choice

  chosen, _ = choose_kernel(request)
  by_it = getattr(chosen, "func", None) is _prefill_whole
  return prefill_choice.workspace_bytes(request) if by_it else 0


def _prefill_xla(q, cache, batch, spec, new_kv, sinks):
  if 0 in (q.shape[0], batch.num_seqs, batch.max_pages):  # no row sees a key
    out = jnp.zeros((*q.shape[:2], cache.v.head_dim), jnp.float32)
    return out, jnp.full(q.shape[:2], attention.NEG_INF, jnp.float32)
  wide = dataclasses.replace(spec, read_path="bf16")
  q_pages, q_wide = round_q(q, spec), round_q(q, wide)
  counts = batch.kv_lens if new_kv is None else jnp.maximum(batch.kv_lens - batch.q_lens, 0)
  parts = []
  if cache.recent is not None:
    where = recent.spans if new_kv is None else recent.past_spans
    where = where(cache.recent, batch)
    counts = where.start
    parts.append((q_wide, wide, attention.ring_keys(cache.recent, where)))
  parts.append((q_pages, spec, _cached_source(cache, batch, spec, counts)))
  if new_kv is not None:
    parts.append((q_wide, wide, _wide_source(new_kv, batch)))
  return _tiles_of_rows(parts, batch, sinks)


def _cached_source(cache, batch, spec, counts):
  """seq -> its first counts[seq] keys in the pages."""
  a8q = spec.read_path == "nvfp4_a8q"
  scales = attention.k_e4m3_scales(cache, batch.page_table, counts) if a8q else None

  def keys(seq):
    scale = None if scales is None else scales[seq]
    return attention.cached_keys(cache, batch.page_table[seq], counts[seq], scale)

  return keys


def _wide_source(new_kv, batch):
  """seq -> Keys among this step's rows."""
  k, v = new_kv

  def keys(seq):
    first = batch.kv_lens[seq] - batch.q_lens[seq]
    return attention.wide_keys(k, v, batch.cu_q_lens[seq], batch.q_lens[seq], first)

  return keys


def _tiles_of_rows(parts, batch: RaggedBatch, sinks):
  """Attention tile of rows by tile of rows, so that a long batch never stands side by side.

  A tile holds rows of one sequence. tokens // ROWS_PER_TILE + num_seqs tiles are enough for every
  ragged split of `tokens` rows; those past the last one needed have no rows and cost nothing.
  Everything that touches a row happens inside its tile, whose shape is fixed: a sequence alone
  gives the same bits as in a batch.

  Args:
    parts: (Q' [tokens, num_q_heads, head_dim], spec, seq -> Keys) for disjoint sets of keys.
    sinks: as in prefill.
  """
  tokens, rows = parts[0][0].shape[0], ROWS_PER_TILE
  tiles_of_seq = (batch.q_lens + rows - 1) // rows
  last_tile = jnp.cumsum(tiles_of_seq)
  first_tile = last_tile - tiles_of_seq
  padded = [jnp.pad(q, ((0, rows), (0, 0), (0, 0))) for q, _, _ in parts]

  def one_tile(tile):
    seq = jnp.sum(tile >= last_tile, dtype=jnp.int32)
    seq = jnp.minimum(seq, batch.num_seqs - 1)
    row = (tile - first_tile[seq]) * rows
    start = batch.cu_q_lens[seq] + row
    last = jnp.minimum(row + rows, batch.q_lens[seq]) - 1
    offset = batch.kv_lens[seq] - batch.q_lens[seq]
    positions = offset + row + jnp.arange(rows, dtype=jnp.int32)
    states = []
    for q, (_, spec, source) in zip(padded, parts, strict=True):
      keys = source(seq)
      begin, end = attention.visible_tiles(keys, offset + row, offset + last, spec)
      end = jnp.where(tile < last_tile[-1], end, begin)
      q_tile = lax.dynamic_slice_in_dim(q, start, rows)
      states.append(attention.attend(q_tile, positions, keys, spec, (begin, end)))
    return attention.add_sinks(functools.reduce(attention.merge_two, states), sinks)

  num_tiles = tokens // rows + batch.num_seqs
  out, lse = lax.map(one_tile, jnp.arange(num_tiles, dtype=jnp.int32))
  seq, _, real = token_places(batch, tokens)
  row_in_seq = jnp.arange(tokens, dtype=jnp.int32) - batch.cu_q_lens[seq]
  tile, offset = first_tile[seq] + row_in_seq // rows, row_in_seq % rows
  out = jnp.where(real[:, None, None], out[tile, offset], 0.0)
  return out, jnp.where(real[:, None], lse[tile, offset], attention.NEG_INF)


def _prefill_attention(q, cache, batch, spec, new_kv, sinks):
  from nvfp4_pallas.kernels import attention_mosaic_sm90 as kernel

  state = kernel.attention(q, cache, batch, spec, interpret=current_target().interpret)
  return attention.add_sinks(state, sinks)


def _prefill_tail(q, cache, batch, spec, new_kv, sinks):
  from nvfp4_pallas.kernels import tail_mosaic_sm90 as kernel

  return _with_sinks(kernel.attention, q, cache, batch, spec, sinks)


def _prefill_whole(q, cache, batch, spec, new_kv, sinks, *, ahead):
  from nvfp4_pallas.kernels import prefill_mosaic_sm90 as kernel

  run = functools.partial(kernel.attention, ahead=ahead)
  if new_kv is None:
    return _with_sinks(run, q, cache, batch, spec, sinks)
  past = dataclasses.replace(batch, kv_lens=jnp.maximum(batch.kv_lens - batch.q_lens, 0))
  states = (
    run(q, cache, past, spec, queries_after=True, out_dtype=jnp.float32),
    kernel.attention_to_rows(q, new_kv, batch, spec, out_dtype=jnp.float32),
  )
  return attention.add_sinks(attention.merge_two(*states), sinks)


def _with_sinks(run, q, cache, batch, spec, sinks):
  state = run(q, cache, batch, spec, out_dtype=transforms.out_dtype(q, cache, sinks))
  return attention.add_sinks(state, sinks)


def _mosaic_sm90_unsupported(request: AttentionRequest) -> str | None:
  from nvfp4_pallas.kernels import attention_mosaic_sm90 as kernel

  if request.recent_window:
    why_not = prefill_recent.unsupported(request)
    parts = prefill_recent.part_requests(request)
    if why_not is None and request.new_kv:
      why_not = _rows_unsupported(parts[1])
    return why_not or next(filter(None, map(_mosaic_sm90_unsupported, parts)), None)
  chosen, why = choose_kernel(request)
  if chosen is not _prefill_attention:
    return None
  why_not = request.too_large or kernel.unsupported(request)
  return None if why_not is None else f"{why}; and {why_not}"


def _rows_unsupported(request: AttentionRequest) -> str | None:
  """Why the kernel for this step's rows cannot run."""
  from nvfp4_pallas.ops import prefill_choice

  if current_target().interpret is not None:
    return "PTX cannot be interpreted"
  return prefill_choice.unsupported(dataclasses.replace(request, new_kv=True))


_PREFILL = {
  "mosaic_sm90": Entry(_prefill_attention, _mosaic_sm90_unsupported, choose_kernel),
  "mosaic_sm100": mosaic_sm100.PREFILL,
  "triton_sm120": triton_sm120.PREFILL,
  "xla": Entry(_prefill_xla),
}
