"""Wide tiles of K and V in shared memory, between those who fill slots and those who attend. PTX.

A pool's tiles go around its slots. A slot's phase of `full` is over when all that fill it have done
their part, its phase of `empty` when all warps that attend have read it.
"""

from __future__ import annotations

from nvfp4_pallas.kernels import copies
from nvfp4_pallas.kernels.ptx import Mem, Ptx, Reg
from nvfp4_pallas.kernels.wide_layout import WARPS, Wide


def make_barriers(p: Ptx, wide: Wide, smem: Reg, when: Reg) -> None:
  for pool in range(2):
    for empty in (False, True):
      first = smem + wide.barriers(pool, empty)
      arrivals = WARPS * wide.consumers if empty else wide.producers
      copies.make_barriers(p, first, wide.slots[pool], arrivals, when)


class Slots:
  """A warp's way around the slots of K (pool 0) or V (pool 1); registers."""

  def __init__(self, p: Ptx, wide: Wide, smem: Reg, pool: int):
    assert wide.slots[pool] <= 2
    self._p, self._count, self._bytes = p, wide.slots[pool], wide.pools[pool].nbytes
    self._first = smem + wide.slots_of(pool)
    self._full, self._empty = (smem + wide.barriers(pool, empty) for empty in (False, True))
    self._slot, self._phase = p.u32(0), p.u32(0)

  @property
  def address(self) -> Reg:
    """Of the slot; in a uniform register, where descriptors made from it then are too."""
    return self._p.mad(self._p.uniform_bit(self._slot.ne(0)), self._bytes, self._first)

  def wait_full(self) -> None:
    copies.wait(self._p, self._barrier(self._full), self._phase)

  def wait_empty(self) -> None:
    """At once the first time around: a barrier that was never used has an odd phase behind it."""
    copies.wait(self._p, self._barrier(self._empty), self._phase ^ 1)

  def tell_full(self, first_lane: Reg) -> None:
    """The warp's share is stored; on to the next slot."""
    self._tell(self._full, first_lane)

  def tell_empty(self, first_lane: Reg) -> None:
    """The warp has read the slot; on to the next one."""
    self._tell(self._empty, first_lane)

  def _tell(self, barriers: Reg, first_lane: Reg) -> None:
    self._p.sync_warp()
    copies.arrive(self._p, self._barrier(barriers), first_lane)
    self._advance()

  def copy(self, source: Reg, policy: Reg, when: Reg) -> None:
    """Starts the copy that makes the slot full; on to the next one."""
    p, barrier = self._p, self._barrier(self._full)
    copies.announce(p, barrier, self._bytes, when)
    copies.start_copy(p, Mem(self.address), source, self._bytes, barrier, policy, when)
    self._advance()

  def _advance(self) -> None:
    p = self._p
    last = self._slot.eq(self._count - 1)
    p.set(self._phase, self._phase ^ 1, when=last)
    p.set(self._slot, p.select(last, 0, self._slot + 1))

  def _barrier(self, first: Reg) -> Mem:
    return Mem(first + self._slot * 8)
