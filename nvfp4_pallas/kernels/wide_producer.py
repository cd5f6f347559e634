"""The warpgroup that widens: NVFP4 tiles to float16 ones, for the warpgroup that attends. PTX.

A warp has a ring of its own in shared memory, into which bulk copies bring its share of each tile,
16 keys of K and of V, which always lie in one page. It stores them as right operands of wgmma
(wgmma.py): a row of a part is 64 columns of a key. Columns are in the order in which codes come
out of their words, (0, 4), (1, 5), (2, 6), (3, 7) of each eight.

A lane takes a quarter c of a key's columns, 16 bytes of codes, and stores 16 bytes for each of its
four words. Eight lanes, which load or store at once, have two keys: an even one and an odd one, of
which the upper two quarters are of keys two on, or back. So loads and stores both meet all banks:

    lane           0    1    2    3    4    5    6    7
    key, quarter   0 0  0 1  2 2  2 3  1 0  1 1  3 2  3 3
    loads at       0    16   160  176  64   80   224  240    key 64 + c 16, of 128 bytes of banks
    stores to      0    4    2    6    1    5    3    7      ((c & 1) 4 + j) ^ (key & 7), j = 0 here
"""

from __future__ import annotations

from nvfp4_pallas.kernels import copies, wgmma
from nvfp4_pallas.kernels.mma_fragments import e2m1_as_f16
from nvfp4_pallas.kernels.page_walk import Pages, PageWalk
from nvfp4_pallas.kernels.ptx import Mem, Ptx, Reg
from nvfp4_pallas.kernels.query_tile import QueryTile
from nvfp4_pallas.kernels.wide_layout import CODES, SCALES, SHARE, WARPS, Fused, Rings, Teams
from nvfp4_pallas.kernels.wide_slots import Slots

_ROW = CODES // SHARE  # bytes of a key's codes
_BLOCKS = SCALES // SHARE  # of a key, a byte each
_KEYS = range(0, SHARE, 8)  # of a lane: its own of eight, and of the next eight


class Producer:
  """Written where the warpgroup's program goes."""

  def __init__(
    self,
    p: Ptx,
    wide: Teams | Fused,
    kv_heads: int,
    smem: Reg,
    warp: Reg,
    lane: Reg,
    *,
    pools: tuple[int, ...] = (0, 1),
    index: int = 0,
  ):
    """
    Args:
      pools: what it widens: K (0), V (1) or both.
      index: which of the producers it is.
    """
    self._p, self._wide, self._lane, self._pools = p, wide, lane, pools
    self._warp, self._first_lane = warp, lane.eq(0)
    self._rings = rings = wide.rings
    self._pages = Pages(wide.page_size, wide.num_pages, kv_heads, SHARE, stride=WARPS)
    self._ring = smem + self._warp * (rings.stages * rings.stage) + rings.ring(index)
    self._barriers = smem + self._warp * (8 * rings.stages) + rings.barriers(index)
    self._policy = copies.evict_first(p) if len(pools) == 2 else copies.evict_last(p)
    # Each of a few lanes copies one array: where it is, bytes of a share, place in a stage.
    names = [("k", "v")[pool] for pool in pools]
    arrays = [(name, CODES) for name in names] + [(f"{name}_scale", SCALES) for name in names]
    self._arrays = len(arrays)
    self._array = p.new("d", "mov.b64", p.pointer(arrays[0][0]))
    self._bytes, self._place = p.u32(CODES), p.u32(0)
    place = 0
    for i, (name, nbytes) in enumerate(arrays):
      mine = lane.eq(i)
      p.set(self._array, p.pointer(name), when=mine)
      p.set(self._bytes, nbytes, when=mine)
      p.set(self._place, place, when=mine)
      place += nbytes
    self._slots = [Slots(p, wide, smem, pool) for pool in pools]
    self._stage, self._phase, self._issue_stage = p.u32(0), p.u32(0), p.u32(0)
    c = lane & 3
    self._key = ((lane >> 2) & 1) | ((((lane >> 2) ^ lane) & 2) | ((lane >> 2) & 4))
    self._source = self._key * _ROW + c * 16
    self._scales = self._key * _BLOCKS + c * 2
    # Of the lane's first key; that of its second is 8 keys, 1024 bytes, on.
    piece = ((c & 1) * 4) ^ self._key
    self._target = (c >> 1) * wide.part + (warp * SHARE + self._key) * wgmma.ROW + piece * 16

  def segment(self, work: QueryTile) -> None:
    p = self._p
    self._work = work
    row = p.address(p.pointer("table"), work.seq, 4 * self._wide.max_pages)
    first = work.first_tile * WARPS + self._warp
    self._walk = PageWalk(p, self._pages, self._lane, row=row, kv_len=work.kv_len, first_tile=first)
    self._issued, done = p.u32(0), p.u32(0)
    with p.loop() as filling:
      filling.leave_if(self._issued >= p.minimum(work.count, self._rings.stages))
      self._issue()
    unseen = work.unseen_by_all()
    with p.loop() as tiles:
      key = (work.first_tile + done) * (SHARE * WARPS) + (self._warp * SHARE + self._key)
      copies.wait(p, Mem(self._barriers + self._stage * 8), self._phase)
      stage = p.mad(self._stage, self._rings.stage, self._ring)
      raw = [
        [self._load(stage, i, keys, unseen(key + keys) if pool else None) for keys in _KEYS]
        for i, pool in enumerate(self._pools)
      ]
      self._advance()
      with p.when(self._issued < work.count):
        self._issue()
      for slots, of_pool in zip(self._slots, raw, strict=True):
        slots.wait_empty()
        for keys, words in zip(_KEYS, of_pool, strict=True):
          self._widen(slots.address, keys, *words)
        p.emit("fence.proxy.async.shared::cta")
        slots.tell_full(self._first_lane)
      p.set(done, done + 1)
      tiles.leave_if(done >= work.count)

  def _issue(self) -> None:
    """Starts the copies of the warp's share of the next tile."""
    p = self._p
    self._walk.reach(self._issued)
    barrier = Mem(self._barriers + self._issue_stage * 8)
    copies.announce(p, barrier, self._rings.stage, self._first_lane)
    p.sync_warp()
    (run,) = self._walk.runs(self._issued, self._work.head)
    target = p.mad(self._issue_stage, self._rings.stage, self._ring) + self._place
    source = p.new("d", "mad.wide.u32", run, self._bytes, self._array)
    copier = self._lane < self._arrays
    copies.start_copy(p, Mem(target), source, self._bytes, barrier, self._policy, copier)
    p.set(self._issued, self._issued + 1)
    p.set(self._issue_stage, self._after(self._issue_stage))

  def _load(self, stage: Reg, i: int, keys: int, hidden: Reg | None) -> tuple[list[Reg], Reg]:
    """A quarter of one of eight keys: four words of codes, and the two scales of them.

    Args:
      i: of the pools in a stage.
      hidden: nobody sees the key.
    """
    p = self._p
    codes = i * CODES + keys * _ROW
    scales = len(self._pools) * CODES + i * SCALES + keys * _BLOCKS
    words = p.load("shared", Mem(stage + self._source, codes), 4)
    (both,) = p.load("shared", Mem(stage + self._scales, scales), size=2)
    if hidden is not None:
      both = p.select(hidden, 0, both)  # so that P, which is 0, does not meet a NaN
    return words, both

  def _widen(self, slot: Reg, keys: int, words: list[Reg], scales: Reg) -> None:
    """What was loaded, to a slot."""
    p = self._p
    factors = [p.pair(x, x) for x in p.halves(p.e4m3_to_f16(p.halves(scales)[0]))]
    target = slot + self._target
    for j, word in enumerate(words):
      pairs = [p.mul_f16x2(pair, factors[j // 2]) for pair in e2m1_as_f16(p, word)]
      at = target ^ (16 * j) if j else target
      p.store("shared", Mem(at, keys * wgmma.ROW), pairs)

  def _advance(self) -> None:
    """The stage has been read."""
    p = self._p
    p.sync_warp()
    p.set(self._phase, self._phase ^ 1, when=self._stage.eq(self._rings.stages - 1))
    p.set(self._stage, self._after(self._stage))

  def _after(self, stage: Reg) -> Reg:
    return self._p.select(stage.eq(self._rings.stages - 1), 0, stage + 1)


def make_barriers(p: Ptx, rings: Rings, smem: Reg, when: Reg) -> None:
  count = rings.producers * WARPS * rings.stages
  copies.make_barriers(p, smem + rings.barriers(0), count, 1, when)
