"""The warpgroup that widens: NVFP4 tiles to float16 ones, for the warpgroup that attends. PTX.

A warp has a ring of its own in shared memory, into which bulk copies bring its share of each tile,
16 keys of K and of V, which always lie in one page. It stores them as right operands of wgmma
(wgmma.py): a row of a part is 64 columns of a key. Columns are in the order in which codes come
out of their words, (0, 4), (1, 5), (2, 6), (3, 7) of each eight.

A lane takes a quarter of a key's columns, 16 bytes of codes, and stores 16 bytes for each of its
four words. Lanes with the same quarter of an even and an odd key and those of the other part must
not meet in a bank, so the upper quarters take their words in the order 2, 3, 0, 1:

    16-byte piece of the row    ((c & 1) 4 + (j ^ (c & 2))) ^ (key & 7)    c: quarter, j: turn

    eight lanes store at once   key 2 m: 0 4 2 6 (^ j ^ 2 m); key 2 m + 1: 1 5 3 7 (^ j ^ 2 m)
"""

from __future__ import annotations

from nvfp4_pallas.kernels import copies, wgmma
from nvfp4_pallas.kernels.mma_fragments import e2m1_as_f16
from nvfp4_pallas.kernels.page_walk import Pages, PageWalk
from nvfp4_pallas.kernels.ptx import Mem, Ptx, Reg
from nvfp4_pallas.kernels.query_walk import QueryWalk
from nvfp4_pallas.kernels.wide_layout import (
  CODES,
  PART,
  SCALES,
  SHARE,
  STAGE,
  WARPS,
  Wide,
)
from nvfp4_pallas.kernels.wide_slots import Slots

_ROW = CODES // SHARE  # bytes of a key's codes
_BLOCKS = SCALES // SHARE  # of a key, a byte each
_AT_ONCE = 8  # keys


class Producer:
  """Written where the warpgroup's program goes."""

  def __init__(self, p: Ptx, wide: Wide, kv_heads: int, smem: Reg, warp: Reg, lane: Reg):
    self._p, self._wide, self._lane = p, wide, lane
    self._warp, self._first_lane = warp, lane.eq(0)
    self._pages = Pages(wide.page_size, wide.num_pages, kv_heads, SHARE, stride=WARPS)
    self._ring = smem + self._warp * (wide.stages * STAGE) + wide.ring
    self._barriers = smem + self._warp * (8 * wide.stages) + wide.ring_barriers
    self._policy = copies.evict_first(p)
    self._slots = Slots(p, wide, smem, 0), Slots(p, wide, smem, 1)
    self._stage, self._phase, self._issue_stage = p.u32(0), p.u32(0), p.u32(0)
    key, c = lane >> 2, lane & 3
    upper = c & 2
    # Of the lane's first key; that of its second is 8 keys, 1024 bytes, on.
    piece = ((c & 1) * 4) ^ upper ^ key
    row = warp * (SHARE * wgmma.ROW) + key * wgmma.ROW
    self._target = (upper >> 1) * PART + row + piece * 16
    self._source = key * _ROW + c * 16 + upper * 4  # the words of turns 0 and 1
    self._source_then = key * _ROW + c * 16 + (upper ^ 2) * 4
    self._scales = key * _BLOCKS + c * 2
    # What makes a word of two scales one of the first, or the second, of the turns.
    swapped = upper.ne(0)
    self._selectors = (
      p.select(swapped, p.u32(0x3232), p.u32(0x1010)),
      p.select(swapped, p.u32(0x1010), p.u32(0x3232)),
    )

  def segment(self, work: QueryWalk) -> None:
    p = self._p
    self._work = work
    row = p.address(p.pointer("table"), work.seq, 4 * self._wide.max_pages)
    first = work.first_tile * WARPS + self._warp
    self._walk = PageWalk(
      p, self._pages, self._lane, row=row, kv_len=work.kv_len, first_tile=first
    )
    self._issued, done = p.u32(0), p.u32(0)
    with p.loop() as filling:
      filling.leave_if(self._issued >= p.minimum(work.count, self._wide.stages))
      self._issue()
    unseen = work.unseen_by_all()
    with p.loop() as tiles:
      copies.wait(p, Mem(self._barriers + self._stage * 8), self._phase)
      at = p.mad(self._stage, STAGE, self._ring)
      key = (work.first_tile + done) * (SHARE * WARPS) + (self._warp * SHARE + (self._lane >> 2))
      for pool, slots in enumerate(self._slots):
        slots.wait_empty()
        for keys in range(0, SHARE, _AT_ONCE):
          hidden = unseen(key + keys) if pool == 1 else None
          self._widen(at, pool, keys, slots.address, hidden)
        p.emit("fence.proxy.async.shared::cta")
        slots.tell_full(self._first_lane)
      self._advance()
      with p.when(self._issued < work.count):
        self._issue()
      p.set(done, done + 1)
      tiles.leave_if(done >= work.count)

  def _issue(self) -> None:
    """Starts the copies of the warp's share of the next tile."""
    p = self._p
    self._walk.reach(self._issued)
    barrier = Mem(self._barriers + self._issue_stage * 8)
    copies.announce(p, barrier, STAGE, self._first_lane)
    (run,) = self._walk.runs(self._issued, self._work.head)
    target, place = p.mad(self._issue_stage, STAGE, self._ring), 0
    for name, nbytes in (("k", CODES), ("v", CODES), ("k_scale", SCALES), ("v_scale", SCALES)):
      source = p.address(p.pointer(name), run, nbytes)
      where = Mem(target, place)
      copies.start_copy(p, where, source, nbytes, barrier, self._policy, self._first_lane)
      place += nbytes
    p.set(self._issued, self._issued + 1)
    p.set(self._issue_stage, self._after(self._issue_stage))

  def _widen(self, stage: Reg, pool: int, keys: int, slot: Reg, hidden: Reg | None) -> None:
    """Eight keys of a share, each a quarter of a lane's. `hidden`: nobody sees the key."""
    p = self._p
    codes, scales = pool * CODES + keys * _ROW, 2 * CODES + pool * SCALES + keys * _BLOCKS
    words = [
      word
      for source in (self._source, self._source_then)
      for word in p.load("shared", Mem(stage + source, codes), 2)
    ]
    (both,) = p.load("shared", Mem(stage + self._scales, scales), size=2)
    if hidden is not None:
      both = p.select(hidden, 0, both)  # so that P, which is 0, does not meet a NaN
    factors = p.e4m3_to_f16(p.halves(both)[0])
    of_turns = [p.new("r", "prmt.b32", factors, 0, selector) for selector in self._selectors]
    target = slot + self._target
    for j, word in enumerate(words):
      pairs = [p.mul_f16x2(pair, of_turns[j // 2]) for pair in e2m1_as_f16(p, word)]
      at = target ^ (16 * j) if j else target
      p.store("shared", Mem(at, keys * wgmma.ROW), pairs)

  def _advance(self) -> None:
    """The stage has been read."""
    p = self._p
    p.sync_warp()
    p.set(self._phase, self._phase ^ 1, when=self._stage.eq(self._wide.stages - 1))
    p.set(self._stage, self._after(self._stage))

  def _after(self, stage: Reg) -> Reg:
    return self._p.select(stage.eq(self._wide.stages - 1), 0, stage + 1)


def make_barriers(p: Ptx, wide: Wide, smem: Reg, when: Reg) -> None:
  copies.make_barriers(p, smem + wide.ring_barriers, WARPS * wide.stages, 1, when)
