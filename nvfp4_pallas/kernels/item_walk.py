"""A block's way over whole query tiles (query_tile.py), those with most keys first. PTX.

Items are query tiles and KV heads: sequence by sequence, in it from the last query tile to the
first, which sees the fewest keys, and in each the heads. Blocks take them in rounds, every other one
backwards, so that a block with a long item in one round has a short one in the next:

    items     0  1  2  3 | 4  5  6  7 | 8  9 ...
    blocks    0  1  2  3 | 3  2  1  0 | 0  1 ...

Which block has an item does not change what comes out.
"""

from __future__ import annotations

from nvfp4_pallas.kernels.ptx import Mem, Ptx, Reg, Scope
from nvfp4_pallas.kernels.query_tile import QueryTile


class ItemWalk(QueryTile):
  def __init__(
    self,
    p: Ptx,
    *,
    blocks: int,
    num_seqs: int,
    kv_heads: int,
    width: int,
    group: int,
    causal: bool,
    window: int | None,
    tile: int,
  ):
    self._p, self._blocks, self._num_seqs = p, blocks, num_seqs
    self._width, self._tile = width, tile
    self._describe(group=group, kv_heads=kv_heads, causal=causal, window=window)
    self._round, self.seq, self._items_before = p.u32(0), p.u32(0), p.u32(0)
    self._q_begin, self.q_len, self.kv_len = p.u32(0), p.u32(0), p.u32(0)
    self._query_tiles = p.u32(0)
    self._load_seq()

  def find(self, scope: Scope) -> None:
    """To the block's next item; leaves the scope when there is none."""
    p = self._p
    backwards = (self._round & 1).ne(0)
    place = p.select(backwards, p.u32(self._blocks - 1) - p.program, p.program)
    item = self._round * self._blocks + place
    p.set(self._round, self._round + 1)
    with p.loop() as sequences:
      items = self._query_tiles * self._kv_heads
      sequences.leave_if(item - self._items_before < items)
      p.set(self._items_before, self._items_before + items)
      p.set(self.seq, self.seq + 1)
      scope.leave_if(self.seq >= self._num_seqs)
      self._load_seq()
    item = item - self._items_before
    rank = item // self._kv_heads
    self.head = item - rank * self._kv_heads
    self.first_token = (self._query_tiles - 1 - rank) * self._width
    self.tokens = p.minimum(self.q_len - self.first_token, self._width)
    self.position = self.kv_len - self.q_len + self.first_token
    self._find_keys()

  def _find_keys(self) -> None:
    """The tiles that some row sees a key of; one where there is none."""
    p = self._p
    end = self.kv_len
    if self._causal:
      end = p.new("r", "min.s32", end, self.position + self.tokens)
      end = p.new("r", "max.s32", end, 0)
    last_tiles = p.maximum(p.cdiv(end, self._tile), 1)
    self.first_tile = p.u32(0)
    if self._window is not None:
      oldest = self.position - (self._window - 1)
      oldest = p.select(oldest.above(0), oldest, 0)
      self.first_tile = p.minimum(oldest // self._tile, last_tiles - 1)
    self.count = last_tiles - self.first_tile

  def _load_seq(self) -> None:
    p = self._p
    at = p.address(p.pointer("cu_q_lens"), self.seq, 4)
    (begin,), (end,) = p.load("global.nc", Mem(at)), p.load("global.nc", Mem(at, 4))
    p.set(self._q_begin, begin)
    p.set(self.q_len, end - begin)
    p.set(self.kv_len, p.load("global.nc", Mem(p.address(p.pointer("kv_lens"), self.seq, 4)))[0])
    p.set(self._query_tiles, p.cdiv(self.q_len, self._width))
