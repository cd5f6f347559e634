"""The definition of decode, which runs anywhere."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax

from nvfp4_pallas import attention, recent
from nvfp4_pallas.ops.merge import merge_splits
from nvfp4_pallas.read_paths import round_q


def decode(q, cache, batch, spec, num_splits, batch_invariant, sinks):
  """ops.decode.decode without its checks: out in float32, and lse.

  Sequence by sequence, each in arrays of its own: always batch invariant.
  """
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
    out, lse = attention.add_sinks(state, attention.sinks_of_heads(sinks, cache.num_kv_heads))
    return out.reshape(q.shape[1], -1), lse.reshape(q.shape[1])

  return lax.map(of_sequence, jnp.arange(batch.num_seqs, dtype=jnp.int32))


def _attend(q_row, position, keys, spec, tiles):
  return attention.attend(q_row[None], position[None], keys, spec, tiles)
