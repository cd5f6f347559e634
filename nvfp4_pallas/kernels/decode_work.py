"""Which keys a block of threads attends to in decode: an even cut of a ragged batch, in PTX.

The work of all sequences and KV heads lies in one line of units, sequence by sequence and in it
head by head; a unit is a fixed number of tiles of keys, counted from the sequence's first. Each
block takes an equal run of units and visits them in segments, none of which goes over the end of a
(sequence, head), nor, if `batch_invariant`, of a unit:

    units      s0h0 s0h0 s0h0 s0h1 s0h1 s0h1 s1h0 s1h1 ...
    blocks     <- 0 ---> <- 1 ---> <- 2 ---> <- 3 -->
    segments   <------->  <-> <->   <-> <->  <-> ...

A segment that is all of its (sequence, head) is the result; the others are pieces, which the join
puts together. Piece i of a (sequence, head) lies in the slot first + i where units are segments,
and otherwise, as a block has at most one piece that continues a pair and one that begins one,
slots 2 w and 2 w + 1 of block w, in first, first + 1, first + 3, ... .
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from nvfp4_pallas.kernels.ptx import Mem, Ptx, Reg, Scope

LANES = 32
AT_ONCE = 4  # warps' worth of sequences that are looked at without waiting in between


@dataclasses.dataclass(frozen=True)
class Cut:
  """How the work is cut (static).

  Attributes:
    num_seqs, kv_heads: of the batch.
    tile: keys of a tile.
    blocks: of threads.
    window: keys that a token sees, or None for all.
    unit: tiles of a unit.
    batch_invariant: units are segments, so that another batch does not move their ends.
    more_tiles: of a pair at most, beside those of its page table.
  """

  num_seqs: int
  kv_heads: int
  tile: int
  blocks: int
  window: int | None
  unit: int
  batch_invariant: bool
  more_tiles: int = 0

  def slots(self, max_keys: int) -> int:
    """Of pieces, at most."""
    if not self.batch_invariant:
      return 2 * self.blocks
    keys = max_keys if self.window is None else min(max_keys, self.window + self.tile)
    units = -(-(-(-keys // self.tile) + self.more_tiles) // self.unit) + 1
    return self.num_seqs * self.kv_heads * units

  def first_tile(self, p: Ptx, kv_len: Reg, q_len: Reg | None = None) -> Reg | None:
    """Of the keys that the first of q_len new tokens sees (None: of one); None for 0."""
    if self.window is None:
      return None
    unseen = kv_len - self.window if q_len is None else kv_len + 1 - q_len - self.window
    return p.select(unseen.above(0), unseen, 0) // self.tile

  def tiles(self, p: Ptx, kv_len: Reg, q_len: Reg | None = None) -> Reg:
    """That a sequence needs, from the first in the window."""
    end = p.cdiv(kv_len, self.tile)
    first = self.first_tile(p, kv_len, q_len)
    return end if first is None else end - first

  def units(self, p: Ptx, kv_len: Reg, q_len: Reg | None = None) -> Reg:
    return p.cdiv(self.tiles(p, kv_len, q_len), self.unit)


@dataclasses.dataclass(frozen=True)
class Run:
  """A block's units [begin, end) and where they begin; registers.

  Attributes:
    seq: the sequence of the first unit.
    seq_begin: the first unit of that sequence.
    per_block, longer: every block has per_block units, and the first `longer` have one more.
  """

  begin: Reg
  end: Reg
  seq: Reg
  seq_begin: Reg
  per_block: Reg
  longer: Reg

  def block_of(self, p: Ptx, unit: Reg) -> Reg:
    """The block that has a unit."""
    long = self.per_block + 1
    of_longer = self.longer * long
    later = (unit - of_longer) // self.per_block + self.longer
    return p.select(unit < of_longer, unit // long, later)


def find_run(p: Ptx, cut: Cut, lane: Reg, scope: Scope, units_of: Callable[[Reg, Reg], Reg]) -> Run:
  """The block's run of units; leaves the scope when there are none.

  Args:
    units_of: the units of a KV head of a sequence, of its number, which may be one past the last,
      and its kv_len.
  """
  block, kv_lens = p.program, p.pointer("kv_lens")
  group = min(-(-cut.num_seqs // LANES), AT_ONCE)
  starts = range(0, cut.num_seqs, group * LANES)

  def counts(start: Reg | int) -> list[Reg]:
    """Units of a KV head of the sequence start + lane, of the one 32 on, ..."""
    found = []
    for i in range(group):
      seq = lane + start + i * LANES if i or not isinstance(start, int) or start else lane
      length = p.u32(0)
      at = p.address(kv_lens, seq, 4)
      p.load_into([length], "global.nc", Mem(at), when=seq < cut.num_seqs)
      found.append((seq, length))
    return [units_of(seq, length) for seq, length in found]

  def visit(body) -> None:
    """Calls body(start, counts) for all groups of sequences: once, or in a loop."""
    if len(starts) == 1:
      body(0, known)
      return
    start = p.u32(0)
    with p.loop() as loop:
      body(start, counts(start))
      p.set(start, start + group * LANES)
      loop.leave_if(start >= cut.num_seqs)

  known = counts(0) if len(starts) == 1 else []
  total = p.u32(0)

  def add(_, found):
    of_lane = found[0]
    for count in found[1:]:
      of_lane = of_lane + count
    p.set(total, total + p.sum_lanes(of_lane))

  visit(add)
  p.set(total, total * cut.kv_heads)

  blocks = p.minimum(total, cut.blocks)
  scope.leave_if(block >= blocks)
  per_block, longer = total // blocks, total % blocks
  begin = p.mad(block, per_block, p.minimum(block, longer))
  end = begin + per_block + p.select(block < longer, 1, 0)

  seq, before, seq_begin = p.u32(0), p.u32(0), p.u32(0)

  def locate(_, found):
    for count in found:
      upto = count
      for step in (1, 2, 4, 8, 16):
        upto = p.select(lane >= step, upto + p.shuffle_up(upto, step), upto)
      upto = (upto + before) * cut.kv_heads
      past = upto <= begin
      p.set(seq, seq + p.count_lanes(past))
      p.set(seq_begin, p.maximum(seq_begin, p.max_lanes(p.select(past, upto, 0))))
      p.set(before, before + p.sum_lanes(count))

  visit(locate)
  return Run(begin, end, seq, seq_begin, per_block, longer)
