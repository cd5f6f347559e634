"""A block's way over query tiles, what their rows see, and where their results belong. PTX.

A query tile is up to `width` consecutive tokens of a sequence, and its rows for a KV head are the
query heads of that head, token by token. The line of work (decode_work.py) has a sequence's query
tiles where decode has the sequence, and in each the heads:

    units      s0t0h0 s0t0h0 s0t0h1 s0t0h1 s0t1h0 ...
"""

from __future__ import annotations

from collections.abc import Callable

from nvfp4_pallas.kernels.decode_work import Cut
from nvfp4_pallas.kernels.ptx import Mem, Ptx, Reg, Scope
from nvfp4_pallas.kernels.work_walk import WorkWalk


class QueryWalk(WorkWalk):
  """WorkWalk for query tiles; registers.

  Attributes:
    first_token, tokens: of the segment's query tile, counted in the sequence's new ones.
    position: of its first token among the sequence's keys, signed.
  """

  q_len: Reg
  first_token: Reg
  tokens: Reg
  position: Reg

  def __init__(
    self, p: Ptx, cut: Cut, lane: Reg, scope: Scope, *, width: int, group: int, causal: bool
  ):
    self._width, self._group, self._causal = width, group, causal
    super().__init__(p, cut, lane, scope)

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

  # What rows see: the keys up to their own, or all, and of those a window.

  def unseen_by(self, row: Reg) -> Callable[[Reg], Reg]:
    """Which keys a row does not see."""
    position = self.position + row // self._group
    newest = position if self._causal else self.kv_len - 1
    if self._cut.window is None:
      return lambda key: key.above(newest)
    before = self._cut.window - 1
    return lambda key: key.above(newest) | (position - before).above(key)

  def unseen_by_all(self) -> Callable[[Reg], Reg]:
    """Which keys no row sees."""
    end = self.kv_len
    if self._causal:
      end = self._p.new("r", "min.s32", end, self.position + self.tokens)
    if self._cut.window is None:
      return lambda key: (key + 1).above(end)
    oldest = self.position - (self._cut.window - 1)  # of what the first row sees
    return lambda key: (key + 1).above(end) | oldest.above(key)

  def is_partial(self, key: Reg) -> Reg:
    """Whether the tile that begins with a key has keys that some row does not see."""
    newest = self.position if self._causal else self.kv_len - 1  # of what the first row sees
    partial = (key + (self._cut.tile - 1)).above(newest)
    if self._cut.window is None:
      return partial
    latest = self.position + self.tokens - self._cut.window  # where the last row's window begins
    return partial | latest.above(key)

  # Where results belong.

  def is_row(self, row: Reg) -> Reg:
    """Whether the query tile has the row."""
    return row < self.tokens * self._group

  def row_or_last(self, row: Reg) -> Reg:
    return self._p.minimum(row, self.tokens * self._group - 1)

  def q_row(self, row: Reg) -> Reg:
    """Which row of q and out, counted in query heads, a row is."""
    token = row // self._group
    head = row - token * self._group + self.head * self._group
    return (self._q_begin + self.first_token + token) * (self._cut.kv_heads * self._group) + head

  def tell_pieces(self, thread: Reg) -> Reg:
    """The segment's slot; its first piece also tells the join, for each token, where pieces are."""
    p = self._p
    slot, pieces = self.piece()
    token = self._q_begin + self.first_token + thread
    at = Mem(p.address(p.pointer("piece_slots"), token * self._cut.kv_heads + self.head, 16))
    info = [slot, pieces, thread * self._group, p.u32(0)]
    p.store("global", at, info, when=self.is_first & (thread < self.tokens))
    return slot
