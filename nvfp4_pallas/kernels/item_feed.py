"""Which item a block takes next: a counter in device memory, shared by all blocks. PTX.

One warp of a block asks, an item ahead, and tells all through shared memory. A block's first item
is its own number; then the counter, which starts at 0, says how many more were taken.
"""

from __future__ import annotations

from nvfp4_pallas.kernels import copies
from nvfp4_pallas.kernels.ptx import Mem, Ptx, Reg

SLOTS = 2
BYTES = 8 * SLOTS * 3  # a number for each slot, whether it is full, and whether it is empty again


def make_barriers(p: Ptx, smem: Reg, readers: int, when: Reg) -> None:
  """`readers`: warps, the one that tells included."""
  copies.make_barriers(p, smem + 8 * SLOTS, SLOTS, 1, when)
  copies.make_barriers(p, smem + 16 * SLOTS, SLOTS, readers, when)


class ItemFeed:
  """A warp's way along what is fetched."""

  def __init__(self, p: Ptx, smem: Reg, first_lane: Reg, blocks: int):
    self._p, self._smem, self._first_lane, self._blocks = p, smem, first_lane, blocks
    self._slot, self._phase = p.u32(0), p.u32(0)
    self._taken = p.u32(p.program - blocks)  # by all, before the item that is to be told

  def tell(self) -> None:
    """In one warp, before next(): tells all the item that was asked for, or the first one."""
    p, first_lane = self._p, self._first_lane
    copies.wait(p, self._at(2), self._phase ^ 1)
    p.store("shared", self._at(0), [self._taken + self._blocks], when=first_lane)
    copies.arrive(p, self._at(1), first_lane)

  def ask(self) -> None:
    """In the same warp: for the next item. The answer takes a while; nobody waits until tell()."""
    p = self._p
    counter = Mem(p.address(p.pointer("counter"), p.u32(0), 4))
    p.emit("atom.global.add.u32", self._taken, counter, 1, when=self._first_lane)

  def next(self) -> Reg:
    p = self._p
    copies.wait(p, self._at(1), self._phase)
    (item,) = p.load("shared", self._at(0))
    p.sync_warp()
    copies.arrive(p, self._at(2), self._first_lane)
    last = self._slot.eq(SLOTS - 1)
    p.set(self._phase, self._phase ^ 1, when=last)
    p.set(self._slot, p.select(last, 0, self._slot + 1))
    return item

  def _at(self, array: int) -> Mem:
    return Mem(self._smem + self._slot * 8, 8 * SLOTS * array)
