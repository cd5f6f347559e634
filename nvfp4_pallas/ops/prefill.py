"""prefill: attention of a ragged batch of query tokens over their sequences' cached keys."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from nvfp4_pallas import attention
from nvfp4_pallas.batch import RaggedBatch, token_places
from nvfp4_pallas.cache import PagedKVCache
from nvfp4_pallas.dispatch import Entry, Resolved, current_target, resolve
from nvfp4_pallas.ops.checks import check_attention, check_kv
from nvfp4_pallas.ops.request import AttentionRequest, attention_request, default_sm_scale
from nvfp4_pallas.read_paths import AttentionSpec, round_q

ROWS_PER_TILE = 32


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
      `new_kv` only those before this step.
    batch: which rows belong to which sequence and where its pages are.
    read_path: the numerics: `bf16`, `fp8`, `nvfp4_dequant`, `nvfp4_repack`, `nvfp4_a4q`,
      `nvfp4_a8q`.
    implementation: who runs it; None lets `dispatch.resolve` choose.
    causal: False lets every query see all keys of its sequence.
    sm_scale: factor on the scores; None is 1 / sqrt(head_dim).
    window: see only the newest `window` keys up to the own position, that one included.
    soft_cap: scores become soft_cap * tanh(score / soft_cap).
    sinks: float [num_q_heads], one more logit per head in the softmax's denominator.
    q_levels: NVFP4 levels of Q for `nvfp4_a4q`: 1, or 2 with a packed residual.
    new_kv: this step's (k, v) [tokens, num_kv_heads, dim] in wide form: they are attended to as
      bfloat16 with a bfloat16 Q, and only the keys before this step are read from the cache.

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
  sm_scale = default_sm_scale(q) if sm_scale is None else sm_scale
  spec = AttentionSpec(read_path, causal, sm_scale, window, soft_cap, q_levels)
  check_attention(q, cache, batch, spec, sinks)
  if new_kv is not None:
    check_kv(*new_kv, cache, prefix="new_kv's ")
    if new_kv[0].shape[0] != q.shape[0]:
      raise ValueError(f"new_kv must have q's {q.shape[0]} tokens, got {new_kv[0].shape[0]}")
  request = attention_request(q, cache, spec, new_kv=new_kv is not None)
  out, lse = resolve_prefill(request, implementation).function(q, cache, batch, spec, new_kv)
  out, lse = attention.add_sinks((out, lse), sinks)
  return out.astype(q.dtype), lse


def resolve_prefill(request: AttentionRequest, implementation: str | None = None) -> Resolved:
  return resolve(_PREFILL, request, implementation)


def _prefill_xla(q, cache, batch, spec, new_kv):
  if new_kv is None:
    return _tiles_of_rows(round_q(q, spec), batch, spec, _cached_source(cache, batch, spec))
  past_spec, past = spec, _cached_source(cache, batch, spec, past_only=True)
  wide_spec = dataclasses.replace(spec, read_path="bf16")
  return attention.merge_two(
    _tiles_of_rows(round_q(q, past_spec), batch, past_spec, past),
    _tiles_of_rows(round_q(q, wide_spec), batch, wide_spec, _wide_source(new_kv, batch)),
  )


def _cached_source(cache, batch, spec, past_only=False):
  """seq -> Keys in the cache; with `past_only`, those before this step."""
  counts = jnp.maximum(batch.kv_lens - batch.q_lens, 0) if past_only else batch.kv_lens
  a8q = spec.read_path == "nvfp4_a8q"
  scales = attention.k_e4m3_scales(cache, batch.page_table, counts) if a8q else None

  def keys(seq):
    scale = None if scales is None else scales[seq]
    return attention.cached_keys(cache, batch.page_table[seq], counts[seq], scale)

  return keys


def _wide_source(new_kv, batch):
  """seq -> Keys among this step's rows."""
  k, v = new_kv
  tile = max(1, min(k.shape[0], attention.KEYS_PER_TILE))

  def keys(seq):
    first = batch.kv_lens[seq] - batch.q_lens[seq]
    return attention.wide_keys(k, v, batch.cu_q_lens[seq], batch.q_lens[seq], first, tile)

  return keys


def _tiles_of_rows(q, batch: RaggedBatch, spec: AttentionSpec, source):
  """Attention tile of rows by tile of rows, so that a long batch never stands side by side.

  A tile holds rows of one sequence. tokens // ROWS_PER_TILE + num_seqs tiles are enough for every
  ragged split of `tokens` rows; those past the last one needed have no rows and cost nothing.
  """
  tokens, num_q_heads, _ = q.shape
  rows = ROWS_PER_TILE
  if tokens == 0 or batch.num_seqs == 0:
    v_dim = jax.eval_shape(lambda: source(jnp.int32(0)).load(jnp.int32(0))[1]).shape[-1]
    empty = jnp.zeros((tokens, num_q_heads, v_dim), jnp.float32)
    return empty, jnp.full((tokens, num_q_heads), attention.NEG_INF)
  tiles_of_seq = (batch.q_lens + rows - 1) // rows
  last_tile = jnp.cumsum(tiles_of_seq)
  first_tile = last_tile - tiles_of_seq
  q_padded = jnp.pad(q, ((0, rows), (0, 0), (0, 0)))

  def one_tile(tile):
    seq = jnp.searchsorted(last_tile, tile, side="right").astype(jnp.int32)
    seq = jnp.minimum(seq, batch.num_seqs - 1)
    row = (tile - first_tile[seq]) * rows
    start = batch.cu_q_lens[seq] + row
    last = jnp.minimum(row + rows, batch.q_lens[seq]) - 1
    offset = batch.kv_lens[seq] - batch.q_lens[seq]
    keys = source(seq)
    begin, end = attention.visible_tiles(keys, offset + row, offset + last, spec)
    end = jnp.where(tile < last_tile[-1], end, begin)
    positions = offset + row + jnp.arange(rows, dtype=jnp.int32)
    q_tile = lax.dynamic_slice_in_dim(q_padded, start, rows)
    return attention.attend(q_tile, positions, keys, spec, (begin, end))

  num_tiles = tokens // rows + batch.num_seqs
  out, lse = lax.map(one_tile, jnp.arange(num_tiles, dtype=jnp.int32))
  seq, _, real = token_places(batch, tokens)
  row_in_seq = jnp.arange(tokens, dtype=jnp.int32) - batch.cu_q_lens[seq]
  tile, offset = first_tile[seq] + row_in_seq // rows, row_in_seq % rows
  out = jnp.where(real[:, None, None], out[tile, offset], 0.0)
  return out, jnp.where(real[:, None], lse[tile, offset], attention.NEG_INF)


def _prefill_mosaic_sm90(q, cache, batch, spec, new_kv):
  from nvfp4_pallas.kernels import attention_mosaic_sm90 as kernel

  return kernel.attention(q, cache, batch, spec, interpret=current_target().interpret)


def _prefill_mosaic_sm90_unsupported(request: AttentionRequest) -> str | None:
  from nvfp4_pallas.kernels import attention_mosaic_sm90 as kernel

  return kernel.unsupported(request)


_PREFILL = {
  "mosaic_sm90": Entry(_prefill_mosaic_sm90, _prefill_mosaic_sm90_unsupported),
  "xla": Entry(_prefill_xla),
}
