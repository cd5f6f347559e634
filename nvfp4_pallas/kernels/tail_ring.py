"""The tail kernel's ring of key tiles in shared memory, of all warps of a block. PTX.

A stage holds K's codes and scales and V's of a tile; each of the four is one warp's to copy.
"""

from __future__ import annotations

from nvfp4_pallas.kernels import copies
from nvfp4_pallas.kernels.page_walk import Pages, PageWalk
from nvfp4_pallas.kernels.ptx import Mem, Ptx, Reg
from nvfp4_pallas.kernels.tail_layout import CODES, SCALES, STAGE, THREADS, TILE, WARPS, Tail
from nvfp4_pallas.kernels.work_walk import WorkWalk


class TailRing:
  """The ring; registers.

  Attributes:
    slot, phase: of the stage that is read, and of its barrier.
    issued: tiles of the segment whose copies have been started.
  """

  issued: Reg

  def __init__(self, p: Ptx, tail: Tail, kv_heads: int, smem: Reg, warp: Reg, lane: Reg):
    """`smem`: an address, from which `tail` counts."""
    self._p, self._tail, self._smem, self._lane = p, tail, smem, lane
    self._pages = Pages(tail.page_size, tail.num_pages, kv_heads, TILE, stride=1)
    self._is_copier = lane.eq(0)
    self.slot, self.phase, self._issue_slot = p.u32(0), p.u32(0), p.u32(0)
    self._barriers = smem + tail.barriers
    first_thread = warp.eq(0) & lane.eq(0)
    copies.make_barriers(p, self._barriers, tail.stages, WARPS, first_thread)
    p.sync(THREADS)
    # What this warp copies: its array, bytes of a tile, place in a stage.
    self._array = p.new("d", "mov.b64", p.pointer("k"))
    self._bytes, self._place = p.u32(CODES), p.u32(0)
    of_others = (
      ("k_scale", SCALES, 2 * CODES),
      ("v", CODES, CODES),
      ("v_scale", SCALES, 2 * CODES + SCALES),
    )
    for i, (name, nbytes, place) in enumerate(of_others):
      mine = warp.eq(i + 1)
      p.set(self._array, p.pointer(name), when=mine)
      p.set(self._bytes, nbytes, when=mine)
      p.set(self._place, place, when=mine)

  def start(self, work: WorkWalk) -> None:
    """The first copies of a segment."""
    p = self._p
    self._work = work
    row = p.address(p.pointer("table"), work.seq, 4 * self._tail.max_pages)
    self._walk = PageWalk(
      p, self._pages, self._lane, row=row, kv_len=work.kv_len, first_tile=work.first_tile
    )
    self.issued = p.u32(0)
    with p.loop() as filling:
      filling.leave_if(self.issued >= p.minimum(work.count, self._tail.stages))
      self.issue()

  def issue(self) -> None:
    """Starts this warp's copy for the next tile."""
    p = self._p
    self._walk.reach(self.issued)
    policy = copies.evict_first(p)  # made anew each time, as registers are short
    barrier = self.barrier(self._issue_slot)
    copies.announce(p, barrier, self._bytes, self._is_copier)
    copied = self._bytes // self._pages.of_tile
    target = self.stage(self._issue_slot) + self._place
    for i, run in enumerate(self._walk.runs(self.issued, self._work.head)):
      target = target + copied if i else target
      source = p.new("d", "mad.wide.u32", run, copied, self._array)
      copies.start_copy(p, Mem(target), source, copied, barrier, policy, self._is_copier)
    p.set(self.issued, self.issued + 1)
    p.set(self._issue_slot, self._after(self._issue_slot))

  def stage(self, slot: Reg) -> Reg:
    return self._p.mad(slot, STAGE, self._smem + self._tail.ring)

  def barrier(self, slot: Reg) -> Mem:
    """Its phase is over when the stage is full."""
    return Mem(self._barriers + slot * 8)

  def next(self) -> tuple[Reg, Reg]:
    """Slot and phase after this one."""
    flips = self.slot.eq(self._tail.stages - 1)
    return self._after(self.slot), self._p.select(flips, self.phase ^ 1, self.phase)

  def advance(self) -> None:
    """To the next stage."""
    slot, phase = self.next()
    self._p.set(self.phase, phase)
    self._p.set(self.slot, slot)

  def _after(self, slot: Reg) -> Reg:
    return self._p.select(slot.eq(self._tail.stages - 1), 0, slot + 1)
