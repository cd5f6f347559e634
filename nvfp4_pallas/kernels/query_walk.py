"""A block's way over query tiles (query_tile.py) of which keys are cut. PTX.

The line of work (decode_work.py) has a sequence's query tiles where decode has the sequence, and in
each the heads:

    units      s0t0h0 s0t0h0 s0t0h1 s0t0h1 s0t1h0 ...
"""

from __future__ import annotations

from nvfp4_pallas.kernels.decode_work import Cut
from nvfp4_pallas.kernels.ptx import Mem, Ptx, Reg, Scope
from nvfp4_pallas.kernels.query_tile import QueryTile
from nvfp4_pallas.kernels.work_walk import WorkWalk


class QueryWalk(QueryTile, WorkWalk):
  """WorkWalk for query tiles."""

  def __init__(
    self, p: Ptx, cut: Cut, lane: Reg, scope: Scope, *, width: int, group: int, causal: bool
  ):
    self._p, self._width = p, width
    self._describe(group=group, kv_heads=cut.kv_heads, causal=causal, window=cut.window)
    WorkWalk.__init__(self, p, cut, lane, scope)

  # The walk.

  def _units_of(self, seq: Reg, kv_len: Reg) -> Reg:
    p = self._p
    begin, end, real = p.u32(0), p.u32(0), seq < self._cut.num_seqs
    at = p.address(p.pointer("cu_q_lens"), seq, 4)
    p.load_into([begin], "global.nc", Mem(at), when=real)
    p.load_into([end], "global.nc", Mem(at, 4), when=real)
    q_len = end - begin
    return self._cut.units(p, kv_len, q_len) * p.cdiv(q_len, self._width)

  def _make_seq(self) -> None:
    self._q_begin, self.q_len = self._p.u32(0), self._p.u32(0)

  def _load_seq(self) -> None:
    p = self._p
    at = p.address(p.pointer("cu_q_lens"), self.seq, 4)
    (begin,), (end,) = p.load("global.nc", Mem(at)), p.load("global.nc", Mem(at, 4))
    p.set(self._q_begin, begin)
    p.set(self.q_len, end - begin)
    super()._load_seq()

  def _pairs(self) -> Reg:
    return self._p.cdiv(self.q_len, self._width) * self._cut.kv_heads

  def _has_work(self) -> Reg:
    return super()._has_work() & self.q_len.ne(0)

  def _locate(self) -> None:
    query_tile = self._pair // self._cut.kv_heads
    self.head = self._pair - query_tile * self._cut.kv_heads
    self.first_token = query_tile * self._width
    self.tokens = self._p.minimum(self.q_len - self.first_token, self._width)
    self.position = self.kv_len - self.q_len + self.first_token

  def tell_pieces(self, thread: Reg) -> Reg:
    """The segment's slot; its first piece also tells the join, for each token, where pieces are."""
    p = self._p
    slot, pieces = self.piece()
    token = self._q_begin + self.first_token + thread
    at = Mem(p.address(p.pointer("piece_slots"), token * self._cut.kv_heads + self.head, 16))
    info = [slot, pieces, thread * self._group, p.u32(0)]
    p.store("global", at, info, when=self.is_first & (thread < self.tokens))
    return slot
