"""A block's way along its run of units (decode_work.py), segment by segment. PTX.

What the line counts, a head of a sequence here and a query tile and head in query_walk.py, is a
pair: its units lie side by side.
"""

from __future__ import annotations

from nvfp4_pallas.kernels.decode_work import Cut, Run, find_run
from nvfp4_pallas.kernels.ptx import Mem, Ptx, Reg, Scope


class WorkWalk:
  """Where the block is; registers.

  Attributes:
    seq, kv_len: the sequence.
    q_len: its new tokens, None for one of each.
    head, first_tile, count: the segment's KV head, and its tiles of keys.
    is_first, is_whole: whether the segment begins its pair, and whether it is all of it.
  """

  q_len: Reg | None = None
  head: Reg
  first_tile: Reg
  count: Reg
  is_first: Reg
  is_whole: Reg

  def __init__(self, p: Ptx, cut: Cut, lane: Reg, scope: Scope):
    """To the run's first unit; leaves the scope when there is none."""
    self._p, self._cut = p, cut
    self._run: Run = find_run(p, cut, lane, scope, self._units_of)
    self._unit, self.seq = p.u32(self._run.begin), p.u32(self._run.seq)
    self.kv_len, self._units = p.u32(0), p.u32(0)  # units: of each pair of the sequence
    self._make_seq()
    self._load_seq()
    inside = self._run.begin - self._run.seq_begin
    self._pair, self._unit_of_pair = p.u32(inside // self._units), p.u32(inside % self._units)

  def start_segment(self) -> None:
    p, cut = self._p, self._cut
    self._locate()
    tiles = self._tiles()
    self._segment_units = p.u32(1)
    if not cut.batch_invariant:
      left = self._units - self._unit_of_pair
      self._segment_units = p.minimum(self._run.end - self._unit, left)
    first = self._unit_of_pair * cut.unit
    self.count = p.minimum(tiles - first, self._segment_units * cut.unit)
    self.is_first, self.is_whole = self._unit_of_pair.eq(0), self.count.eq(tiles)
    of_window = cut.first_tile(p, self.kv_len, self.q_len)
    self.first_tile = first if of_window is None else first + of_window

  def end_segment(self) -> None:
    p = self._p
    p.set(self._unit, self._unit + self._segment_units)
    p.set(self._unit_of_pair, self._unit_of_pair + self._segment_units)

  @property
  def at_end(self) -> Reg:
    return self._unit >= self._run.end

  def next_pair(self) -> None:
    """To the next pair that has keys, where this one is done."""
    p = self._p
    with p.when(self._unit_of_pair >= self._units):
      p.set(self._unit_of_pair, 0)
      p.set(self._pair, self._pair + 1)
      with p.when(self._pair >= self._pairs()):
        p.set(self._pair, 0)
        with p.loop() as empty:
          p.set(self.seq, self.seq + 1)
          self._load_seq()
          empty.leave_if(self._has_work())

  def piece(self) -> tuple[Reg, Reg]:
    """Before the segment's end, its slot as a piece; and how many pieces the pair has."""
    p = self._p
    if self._cut.batch_invariant:
      return self._unit, p.select(self.is_whole, 1, self._units)
    slot = p.program * 2 + p.select(self.is_first, 1, 0)
    last = self._run.block_of(p, self._unit + self._units - 1)
    return slot, p.select(self.is_whole, 1, last - p.program + 1)

  # Of a sequence. query_walk.py and decode_recent.py have their own.

  def _units_of(self, seq: Reg, kv_len: Reg) -> Reg:
    """Units that a KV head of a sequence has in the line; the sequence may be one past the last."""
    del seq
    return self._cut.units(self._p, kv_len)

  def _make_seq(self) -> None:
    """Registers for what else a sequence has."""

  def _load_seq(self) -> None:
    p = self._p
    p.set(self.kv_len, p.load("global.nc", Mem(p.address(p.pointer("kv_lens"), self.seq, 4)))[0])
    p.set(self._units, self._cut.units(p, self.kv_len, self.q_len))

  def _tiles(self) -> Reg:
    """Of each pair of the sequence."""
    return self._cut.tiles(self._p, self.kv_len, self.q_len)

  def _pairs(self) -> Reg | int:
    return self._cut.kv_heads

  def _has_work(self) -> Reg:
    return self._units.ne(0)

  def _locate(self) -> None:
    """What the segment's pair is."""
    self.head = self._pair
