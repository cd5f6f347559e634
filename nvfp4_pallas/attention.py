"""The definition of attention over a paged cache, in plain jnp: what every kernel is judged by.

For query row i of a sequence with kv_len keys, all in float32:

    s_ij  = cap(sm_scale * q'_i . k'_j)           cap(s) = soft_cap * tanh(s / soft_cap), or s
    j is visible to i when  j < kv_len,  and causal: j <= p_i,  and window: j > p_i - window,
    where p_i = kv_len - q_len + i is the position of the query (bottom-right alignment)
    lse_i = log sum_j exp(s_ij),    out_i = sum_j exp(s_ij - lse_i) v_j

q' and k' depend on the read path (read_paths.py), v is the decoded cache. A row that sees no key
has out 0 and lse -inf. What a row does not see cannot change it, be it NaN.

It walks over tiles of keys with a running maximum (online softmax, arXiv:2205.14135), so that
nothing larger than one tile of queries against one tile of keys is ever made.

Heads stand side by side, and how XLA on a CPU sums and takes exponents depends on shapes: a head's
last bits in float32 may depend on how many others there are. To make that rare, heads come first in
all arrays from scores to results, and one head is computed beside a copy of itself. A loop over
heads would forbid it, but XLA then moves each head to all devices where it divides them itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from nvfp4_pallas import recent
from nvfp4_pallas.cache import (
  PagedKVCache,
  PagePool,
  RecentWindow,
  decode_rows,
  pool_arrays,
  take,
)
from nvfp4_pallas.format import through
from nvfp4_pallas.read_paths import AttentionSpec, k_scale_for_e4m3, round_e4m3_signed

KEYS_PER_TILE = 512
NEG_INF = float("-inf")
TileRange = tuple[jax.Array, jax.Array]


class Keys(NamedTuple):
  """The keys and values one sequence reads.

  Attributes:
    load: tile number -> (k f32 [tile, heads, head_dim], v f32 [tile, heads, v_head_dim]), without
      their global scales; rows past `count` may hold anything.
    tile: keys of a tile (static).
    first: position in the sequence of key 0.
    count: keys there are.
    k_scale, v_scale: float32 [heads], the global scales.
  """

  load: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
  tile: int
  first: jax.Array
  count: jax.Array
  k_scale: jax.Array
  v_scale: jax.Array


def attend(
  q: jax.Array, positions: jax.Array, keys: Keys, spec: AttentionSpec, tiles: TileRange
) -> tuple[jax.Array, jax.Array]:
  """Attention of some rows of one sequence over the key tiles [tiles[0], tiles[1]).

  Args:
    q: Q' float32 [rows, num_q_heads, head_dim].
    positions: int32 [rows], each row's position in the sequence.
    keys: what to read.
    spec: the numerics.
    tiles: two int32 scalars.

  Returns:
    out float32 [heads, group, rows, v_head_dim], lse float32 [heads, group, rows].
  """
  rows, num_q_heads, head_dim = q.shape
  heads = keys.k_scale.shape[0]
  if heads == 1:
    out, lse = attend(_twice(q, 1), positions, _with_a_copy(keys), spec, tiles)
    return out[:1], lse[:1]
  group = num_q_heads // heads
  q = q.reshape(rows, heads, group, head_dim)
  scale = (keys.k_scale * spec.sm_scale)[:, None, None, None]
  v_dim = jax.eval_shape(keys.load, jax.ShapeDtypeStruct((), jnp.int32))[1].shape[-1]

  def body(tile, state):
    old_max, old_sum, old_out = state
    k, v = keys.load(tile)
    index = tile * keys.tile + jnp.arange(keys.tile, dtype=jnp.int32)
    visible = _visible(index, positions, keys, spec)  # [rows, tile]
    s = jnp.einsum("rhgd,thd->hgrt", q, k, precision="highest") * scale
    if spec.soft_cap is not None:
      s = spec.soft_cap * jnp.tanh(s / spec.soft_cap)
    s = jnp.where(visible[None, None], s, NEG_INF)
    new_max = jnp.maximum(old_max, jnp.max(s, axis=-1))
    # A row that has seen nothing yet has maximum -inf; 0 in its place keeps exp() from NaN.
    anchor = jnp.where(new_max == NEG_INF, 0.0, new_max)
    p = jnp.exp(s - anchor[..., None])
    shrink = jnp.exp(old_max - anchor)
    new_sum = old_sum * shrink + jnp.sum(p, axis=-1)
    new_out = old_out * shrink[..., None] + _weighted_values(p, v, visible)
    return new_max, new_sum, new_out

  shape = (heads, group, rows)
  state = (
    jnp.full(shape, NEG_INF, jnp.float32),
    jnp.zeros(shape, jnp.float32),
    jnp.zeros((*shape, v_dim), jnp.float32),
  )
  row_max, row_sum, out = lax.fori_loop(*tiles, body, state)
  out = out * keys.v_scale[:, None, None, None] / jnp.where(row_sum == 0, 1.0, row_sum)[..., None]
  return out, row_max + jnp.log(row_sum)


def _with_a_copy(keys: Keys) -> Keys:
  """Two heads that are the one of `keys`."""

  def load(tile):
    k, v = keys.load(tile)
    return _twice(k, 1), _twice(v, 1)

  scales = _twice(keys.k_scale, 0), _twice(keys.v_scale, 0)
  return keys._replace(load=load, k_scale=scales[0], v_scale=scales[1])


def _twice(x: jax.Array, axis: int) -> jax.Array:
  return jnp.concatenate([x, x], axis)


def _visible(index, positions, keys, spec) -> jax.Array:
  """bool [rows, tile]: which keys of a tile each row sees."""
  key, query = (keys.first + index)[None, :], positions[:, None]
  visible = jnp.broadcast_to((index < keys.count)[None, :], (query.shape[0], key.shape[1]))
  if spec.causal:
    visible &= key <= query
  if spec.window is not None:
    visible &= key > query - spec.window
  return visible


def _weighted_values(p, v, visible) -> jax.Array:
  """sum_t p[h, g, r, t] v[t, h, d] over what row r sees; 0 * NaN, or inf, of the rest must not
  count. A row that sees infinities has them, or NaN where their signs differ."""
  v = jnp.where(jnp.any(visible, axis=0)[:, None, None], v, 0.0)

  def product(v):
    return jnp.einsum("hgrt,thd->hgrd", p, v, precision="highest")

  if p.shape[2] == 1:  # one row: what it does not see is already zero
    return product(v)

  def product_beside_faults(v):
    def sees(fault):
      count = jnp.einsum("rt,thd->hrd", visible.astype(jnp.float32), fault.astype(jnp.float32))
      return (count > 0)[:, None]

    finite = product(jnp.where(jnp.isfinite(v), v, 0.0))
    up = jnp.where(sees(v == jnp.inf), jnp.inf, 0.0)
    down = jnp.where(sees(v == NEG_INF), NEG_INF, 0.0)
    return jnp.where(sees(jnp.isnan(v)), jnp.nan, finite + (up + down))

  return lax.cond(jnp.all(jnp.isfinite(v)), product, product_beside_faults, v)


def cached_keys(
  cache: PagedKVCache, page_row: jax.Array, count: jax.Array, k_e4m3_scale: jax.Array | None = None
) -> Keys:
  """The first `count` keys of the sequence whose pages stand in `page_row` [max_pages].

  With `k_e4m3_scale` float32 [heads], K is rounded to E4M3 against it (read path nvfp4_a8q).
  """
  max_pages = page_row.shape[0]
  pages = max(1, min(max_pages, KEYS_PER_TILE // cache.page_size))

  def load(tile):
    slots = tile * pages + jnp.arange(pages, dtype=jnp.int32)
    ids = page_row.at[slots].get(mode="fill", fill_value=0)
    k, v = _read(cache.k, ids), _read(cache.v, ids)
    if k_e4m3_scale is not None:
      scale = k_e4m3_scale[None, :, None]
      k = round_e4m3_signed(k / scale) * scale
    return k, v

  return Keys(
    load=load,
    tile=pages * cache.page_size,
    first=jnp.int32(0),
    count=count,
    k_scale=cache.k.decode_scale,
    v_scale=cache.v.decode_scale,
  )


def _read(pool: PagePool, page_ids: jax.Array) -> jax.Array:
  """Decoded pages as float32 [len(page_ids) * page_size, heads, head_dim]."""
  rows = tuple(take(a, (page_ids,), mode="clip") for a in pool_arrays(pool))
  values = decode_rows(pool, rows)  # [pages, heads, page_size, head_dim]
  return jnp.swapaxes(values, 1, 2).reshape(-1, pool.num_kv_heads, pool.head_dim)


def ring_keys(window: RecentWindow, where: recent.Spans) -> Callable[[jax.Array], Keys]:
  """Of a sequence's number: the keys in its ring, from where.start to where.end."""
  rings, table = recent.ring_cache(window), recent.ring_table(window, where)

  def keys(seq):
    start = where.start[seq]
    return cached_keys(rings, table[seq], where.end[seq] - start)._replace(first=start)

  return keys


def wide_keys(k: jax.Array, v: jax.Array, start, count, first) -> Keys:
  """`count` keys of this step from rows start.. of k, v [tokens, heads, dim], not yet quantised."""

  def load(number):
    rows = start + number * KEYS_PER_TILE + jnp.arange(KEYS_PER_TILE, dtype=jnp.int32)
    new_k, new_v = (through(a.at[rows].get(mode="clip"), jnp.bfloat16) for a in (k, v))
    return new_k, new_v

  ones = jnp.ones((k.shape[1],), jnp.float32)
  return Keys(load, KEYS_PER_TILE, first, count, ones, ones)


def visible_tiles(keys: Keys, first_position, last_position, spec: AttentionSpec) -> TileRange:
  """(begin, end) of the key tiles that rows at these positions can see."""
  end = keys.count
  if spec.causal:
    end = jnp.clip(last_position + 1 - keys.first, 0, end)
  begin = jnp.int32(0)
  if spec.window is not None:
    begin = jnp.clip(first_position - spec.window + 1 - keys.first, 0, end)
  return begin // keys.tile, (end + keys.tile - 1) // keys.tile


def k_e4m3_scales(cache: PagedKVCache, page_table: jax.Array, counts: jax.Array) -> jax.Array:
  """s_k of the A8Q path, float32 [num_seqs, heads]: from the block scales of the first counts[s]
  keys of sequence s."""

  def of_sequence(arguments):
    page_row, count = arguments
    scales = take(pool_arrays(cache.k)[1], (page_row,), mode="clip").astype(jnp.float32)
    position = jnp.arange(page_row.shape[0] * cache.page_size, dtype=jnp.int32)
    used = (position < count).reshape(page_row.shape[0], 1, cache.page_size, 1)
    known = used & jnp.isfinite(scales)  # a NaN block makes its row NaN whatever the scale
    return k_scale_for_e4m3(jnp.max(jnp.where(known, scales, 0.0), axis=(0, 2, 3), initial=0.0))

  return lax.map(of_sequence, (page_table, counts))


def merge_two(first: tuple, second: tuple) -> tuple[jax.Array, jax.Array]:
  """Joins two states over disjoint keys, float32: out [..., d] and lse [...]."""
  (out_a, lse_a), (out_b, lse_b) = first, second
  top = jnp.maximum(lse_a, lse_b)
  anchor = jnp.where(top == NEG_INF, 0.0, top)
  weight_a, weight_b = jnp.exp(lse_a - anchor), jnp.exp(lse_b - anchor)
  total = weight_a + weight_b
  share = jnp.where(total == 0, 1.0, total)
  out = out_a * (weight_a / share)[..., None] + out_b * (weight_b / share)[..., None]
  return out, anchor + jnp.log(total)


def add_sinks(state: tuple, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
  """One more logit per query head in the softmax's denominator, with value 0; `sinks` broadcasts to
  lse.

  out' = out * exp(lse - lse'), lse' = log(exp(lse) + exp(sink)). A row that sees no key keeps
  out 0 and lse -inf.
  """
  out, lse = state
  if sinks is None:
    return out, lse
  joined = jnp.logaddexp(lse, jnp.broadcast_to(sinks.astype(jnp.float32), lse.shape))
  empty = lse == NEG_INF
  shrink = jnp.where(empty, 0.0, jnp.exp(lse - joined))
  return out * shrink[..., None], jnp.where(empty, NEG_INF, joined)


def sinks_of_heads(sinks: jax.Array | None, num_kv_heads: int) -> jax.Array | None:
  """[num_q_heads] as it broadcasts to `attend`'s lse: [num_kv_heads, group, 1]."""
  return None if sinks is None else sinks.reshape(num_kv_heads, -1, 1)
