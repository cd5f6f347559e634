"""How ragged queries become tiles of equal shape: plain jnp around the attention kernel.

A tile holds up to ROWS rows of one KV head: the query heads of its group, for some consecutive
tokens of one sequence. Row r is query head `head * group + r % group` of the tile's token
`r // group`, whatever the group's size; what is left of the 64 rows is computed and thrown away.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from nvfp4_pallas.batch import RaggedBatch, token_places
from nvfp4_pallas.read_paths import AttentionSpec

ROWS = 64  # of a tile: the M of one WGMMA


class Work(NamedTuple):
  """What one block of threads has to do, scalars or arrays of them.

  Attributes:
    seq: the sequence.
    position: of the tile's first token in it.
    key_begin, key_end: the keys that any token of the tile sees.
    tile_begin, tile_end: the key tiles of this split among them.
  """

  seq: jax.Array
  position: jax.Array
  key_begin: jax.Array
  key_end: jax.Array
  tile_begin: jax.Array
  tile_end: jax.Array


@dataclasses.dataclass(frozen=True)
class QueryTiles:
  """The tokens of a batch, cut into tiles of up to `width` tokens.

  Attributes:
    width, group: tokens of a tile and query heads of a KV head (static).
    seq, first, count: int32 [num_tiles]: each tile's sequence, how many of its tokens of this
      step come before the tile, and how many are in it (0 for a tile that is not needed).
    tile, slot: int32 [tokens], where each row of q went.
    real: bool [tokens], whether it belongs to a sequence.
  """

  width: int
  group: int
  seq: jax.Array
  first: jax.Array
  count: jax.Array
  tile: jax.Array
  slot: jax.Array
  real: jax.Array

  @classmethod
  def of(cls, batch: RaggedBatch, tokens: int, group: int, max_q_len: int | None) -> QueryTiles:
    width = ROWS // group if max_q_len is None else max(1, min(ROWS // group, max_q_len))
    # No tile is empty, and only the last one of a sequence is not full.
    num_tiles = min(tokens, (tokens + batch.num_seqs * (width - 1)) // width)
    tiles_of_seq = pl.cdiv(batch.q_lens, width)
    ends = jnp.cumsum(tiles_of_seq)
    begins = ends - tiles_of_seq

    tiles = jnp.arange(num_tiles, dtype=jnp.int32)
    seq = jnp.searchsorted(ends, tiles, side="right", method="compare_all")
    needed = seq < batch.num_seqs
    seq = jnp.minimum(seq, batch.num_seqs - 1).astype(jnp.int32)
    first = (jnp.arange(num_tiles, dtype=jnp.int32) - begins[seq]) * width
    count = jnp.where(needed, jnp.minimum(batch.q_lens[seq] - first, width), 0)

    token_seq, _, real = token_places(batch, tokens)
    local = jnp.arange(tokens, dtype=jnp.int32) - batch.cu_q_lens[token_seq]
    tile = begins[token_seq] + local // width
    return cls(width, group, seq, first, count, tile, local % width, real)

  @property
  def rows(self) -> int:
    """Rows of a tile in device memory: of a swizzled tile, eight are copied at a time."""
    return pl.cdiv(self.width * self.group, 8) * 8

  def work(
    self, batch: RaggedBatch, spec: AttentionSpec, num_splits: int, tile_keys: int
  ) -> jax.Array:
    """int32 [num_splits, num_tiles, fields of Work].

    Splits are runs of the key tiles of the whole sequence: they depend on nothing but its length.
    """
    kv_len = batch.kv_lens[self.seq]
    position = kv_len - batch.q_lens[self.seq] + self.first
    key_end = position + self.count if spec.causal else kv_len
    key_end = jnp.where(self.count > 0, jnp.clip(key_end, 0, kv_len), 0)
    key_begin = jnp.zeros_like(key_end)
    if spec.window is not None:
      key_begin = jnp.clip(position - (spec.window - 1), 0, key_end)
    step = pl.cdiv(pl.cdiv(kv_len, tile_keys), num_splits)[None]
    split = jnp.arange(num_splits, dtype=jnp.int32)[:, None]
    tile_begin = jnp.maximum(split * step, key_begin[None] // tile_keys)
    tile_end = jnp.minimum((split + 1) * step, pl.cdiv(key_end, tile_keys)[None])
    work = Work(self.seq, position, key_begin, key_end, tile_begin, tile_end)
    return jnp.stack([jnp.broadcast_to(field, tile_end.shape) for field in work], axis=-1)

  def pack(self, q: jax.Array, batch: RaggedBatch) -> jax.Array:
    """[tokens, num_q_heads, operands, n] -> [num_tiles, kv_heads, operands, rows, n]."""
    _, num_q_heads, operands, n = q.shape
    first_token = batch.cu_q_lens[self.seq] + self.first
    token = first_token[:, None] + jnp.arange(self.width, dtype=jnp.int32)[None]
    q = q.at[token].get(mode="clip")
    q = q.reshape(-1, self.width, num_q_heads // self.group, self.group, operands, n)
    q = jnp.transpose(q, (0, 2, 4, 1, 3, 5))
    q = q.reshape(*q.shape[:3], self.width * self.group, n)
    return jnp.pad(q, [(0, 0)] * 3 + [(0, self.rows - q.shape[3]), (0, 0)])

  def unpack(self, x: jax.Array, padding: float) -> jax.Array:
    """[splits, num_tiles, kv_heads, parts, rows, n] -> [splits, tokens, num_q_heads, parts, n]."""
    splits, num_tiles, kv_heads, parts, _, n = x.shape
    x = x[:, :, :, :, : self.width * self.group]
    x = x.reshape(splits, num_tiles, kv_heads, parts, self.width, self.group, n)
    x = jnp.transpose(x, (0, 1, 4, 2, 5, 3, 6))[:, self.tile, self.slot]
    x = jnp.where(self.real[None, :, None, None, None, None], x, padding)
    return x.reshape(splits, -1, kv_heads * self.group, parts, n)
