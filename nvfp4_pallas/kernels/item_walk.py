"""The way over whole query tiles (query_tile.py), in each sequence those with most keys first. PTX.

Items are query tiles and KV heads: sequence by sequence, in it from the last query tile to the
first, which sees the fewest keys, and in each the heads. Blocks take items as they come free
(item_feed.py), so what is left for the end is short. Which block has an item does not change what
comes out.
"""

from __future__ import annotations

from nvfp4_pallas.kernels.ptx import Mem, Ptx, Reg, Scope
from nvfp4_pallas.kernels.query_tile import QueryTile
from nvfp4_pallas.kernels.wide_layout import Whole


class ItemWalk(QueryTile):
  def __init__(self, p: Ptx, whole: Whole):
    self._p, self._num_seqs = p, whole.num_seqs
    self._width, self._tile = whole.width, whole.tile
    self._describe(
      group=whole.group, kv_heads=whole.kv_heads, causal=whole.causal, window=whole.window
    )
    self.seq, self._items_before = p.u32(0), p.u32(0)
    self._q_begin, self.q_len, self.kv_len = p.u32(0), p.u32(0), p.u32(0)
    self._query_tiles = p.u32(0)
    self._load_seq()

  def find(self, item: Reg, scope: Scope) -> None:
    """To an item, which is after the last one; leaves the scope when there is no such."""
    p = self._p
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
