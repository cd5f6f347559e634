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

LANES = 32


class ItemWalk(QueryTile):
  def __init__(self, p: Ptx, whole: Whole, lane: Reg):
    self._p, self._num_seqs, self._lane = p, whole.num_seqs, lane
    self._width, self._tile = whole.width, whole.tile
    self._queries_after = whole.queries_after
    # What comes after all keys is causal without a mask.
    causal = whole.causal and not whole.queries_after
    self._describe(group=whole.group, kv_heads=whole.kv_heads, causal=causal, window=whole.window)
    # Each lane has one of the next LANES sequences: its items and those before it among them.
    self._first_seq, self._items_before = p.u32(0), p.u32(0)
    self._items_up_to, self._keys_of = p.u32(0), p.u32(0)
    self._load_seqs()

  def find(self, item: Reg, scope: Scope) -> None:
    """To an item, which is after the last one; leaves the scope when there is no such."""
    p = self._p
    with p.loop() as sequences:
      all_items = p.from_lane(self._items_up_to, LANES - 1)
      sequences.leave_if(item - self._items_before < all_items)
      p.set(self._items_before, self._items_before + all_items)
      p.set(self._first_seq, self._first_seq + LANES)
      scope.leave_if(self._first_seq >= self._num_seqs)
      self._load_seqs()
    item = item - self._items_before
    of_lanes = p.count_lanes(self._items_up_to <= item)  # sequences that end before it
    self.seq = self._first_seq + of_lanes
    self.kv_len = p.from_lane(self._keys_of, of_lanes)
    before = p.from_lane(self._items_up_to, p.maximum(of_lanes, 1) - 1)
    item = item - p.select(of_lanes.eq(0), 0, before)
    at = p.address(p.pointer("cu_q_lens"), self.seq, 4)
    (self._q_begin,), (end,) = p.load("global.nc", Mem(at)), p.load("global.nc", Mem(at, 4))
    self.q_len = end - self._q_begin
    rank = item // self._kv_heads
    self.head = item - rank * self._kv_heads
    self.first_token = (p.cdiv(self.q_len, self._width) - 1 - rank) * self._width
    self.tokens = p.minimum(self.q_len - self.first_token, self._width)
    self.position = self.kv_len + self.first_token
    if not self._queries_after:
      self.position = self.position - self.q_len
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

  def _load_seqs(self) -> None:
    p, seq = self._p, self._first_seq + self._lane
    real = seq < self._num_seqs
    begin, end, keys = (p.u32(0) for _ in range(3))
    at = p.address(p.pointer("cu_q_lens"), seq, 4)
    p.load_into([begin], "global.nc", Mem(at), when=real)
    p.load_into([end], "global.nc", Mem(at, 4), when=real)
    at = p.address(p.pointer("kv_lens"), seq, 4)
    p.load_into([keys], "global.nc", Mem(at), when=real)
    p.set(self._keys_of, keys)
    p.set(self._items_up_to, p.cdiv(end - begin, self._width) * self._kv_heads)
    for step in (1, 2, 4, 8, 16):
      lower = p.shuffle_up(self._items_up_to, step)
      p.set(self._items_up_to, self._items_up_to + lower, when=self._lane >= step)
