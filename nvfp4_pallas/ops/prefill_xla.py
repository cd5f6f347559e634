"""The definition of prefill, which runs anywhere: tile of rows by tile of rows."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
from jax import lax

from nvfp4_pallas import attention, recent
from nvfp4_pallas.batch import RaggedBatch, token_places
from nvfp4_pallas.read_paths import round_q

ROWS_PER_TILE = 32


def prefill(q, cache, batch, spec, new_kv, sinks):
  """ops.prefill.prefill without its checks: out in float32, and lse."""
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
    parts.append((q_wide, wide, wide_source(new_kv, batch)))
  return tiles_of_rows(parts, batch, attention.sinks_of_heads(sinks, cache.num_kv_heads))


def _cached_source(cache, batch, spec, counts):
  """seq -> its first counts[seq] keys in the pages."""
  a8q = spec.read_path == "nvfp4_a8q"
  scales = attention.k_e4m3_scales(cache, batch.page_table, counts) if a8q else None

  def keys(seq):
    scale = None if scales is None else scales[seq]
    return attention.cached_keys(cache, batch.page_table[seq], counts[seq], scale)

  return keys


def wide_source(new_kv, batch):
  """seq -> Keys among this step's rows."""
  k, v = new_kv

  def keys(seq):
    first = batch.kv_lens[seq] - batch.q_lens[seq]
    return attention.wide_keys(k, v, batch.cu_q_lens[seq], batch.q_lens[seq], first)

  return keys


def tiles_of_rows(parts, batch: RaggedBatch, sinks):
  """Attention tile of rows by tile of rows, so that a long batch never stands side by side.

  A tile holds rows of one sequence. tokens // ROWS_PER_TILE + num_seqs tiles are enough for every
  ragged split of `tokens` rows; those past the last one needed have no rows and cost nothing.
  Everything that touches a row happens inside its tile, whose shape is fixed: a sequence alone
  gives the same bits as in a batch.

  Args:
    parts: (Q' [tokens, num_q_heads, head_dim], spec, seq -> Keys) for disjoint sets of keys.
    sinks: attention.sinks_of_heads.
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
  # out [tile, KV head, query head of it, row, dim]
  out, lse = lax.map(one_tile, jnp.arange(num_tiles, dtype=jnp.int32))
  seq, _, real = token_places(batch, tokens)
  row_in_seq = jnp.arange(tokens, dtype=jnp.int32) - batch.cu_q_lens[seq]
  tile, offset = first_tile[seq] + row_in_seq // rows, row_in_seq % rows
  out = out[tile, :, :, offset].reshape(tokens, -1, out.shape[-1])
  lse = lse[tile, :, :, offset].reshape(tokens, -1)
  out = jnp.where(real[:, None, None], out, 0.0)
  return out, jnp.where(real[:, None], lse, attention.NEG_INF)
