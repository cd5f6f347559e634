"""The warpgroup that widens: NVFP4 tiles to float16 ones, for the warpgroups that attend. PTX.

A warp has a ring of its own in shared memory, into which bulk copies bring its share of a tile, 16
or 32 keys of K, of V or of both, in runs of keys that lie in one page. It stores them as right
operands of wgmma (wgmma.py): a row of a part is 64 columns of a key. Columns are in the order in
which codes come out of their words, (0, 4), (1, 5), (2, 6), (3, 7) of each eight.

A lane takes a quarter c of a key's columns, and stores 16 bytes for each of its words of codes: of
128 columns four. Eight lanes, which load or store at once, have two keys: an even one and an odd
one, of which the upper two quarters are of keys two on, or back. So of 128 columns loads and stores
both meet all banks:

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
from nvfp4_pallas.kernels.wide_layout import WARPS, Fused, Rings, Teams
from nvfp4_pallas.kernels.wide_slots import Slots

_PIECES = wgmma.ROW // 16  # of a row


class Producer:
  """Written where the warpgroup's program goes."""

  def __init__(
    self, p: Ptx, wide: Teams | Fused, kv_heads: int, smem: Reg, warp: Reg, lane: Reg, index: int
  ):
    """
    Args:
      index: which of the warpgroups that widen it is.
    """
    self._p, self._wide, self._lane = p, wide, lane
    self._warp, self._first_lane = warp, lane.eq(0)
    self._rings = rings = wide.rings
    self._pools, self._stage_bytes = rings.pools(index), rings.stage(index)
    self._share = rings.share
    self._keys = range(0, self._share, 8)  # of a lane: its own of each eight
    self._pages = Pages(wide.page_size, wide.num_pages, kv_heads, self._share, stride=WARPS)
    self._ring = smem + self._warp * (rings.stages * self._stage_bytes) + rings.ring(index)
    self._barriers = smem + self._warp * (8 * rings.stages) + rings.barriers(index)
    self._policy = copies.evict_last(p) if wide.reused else copies.evict_first(p)
    self._find_arrays(rings.arrays(index))
    self._slots = [Slots(p, wide, smem, pool) for pool in self._pools]
    self._stage, self._phase, self._issue_stage = p.u32(0), p.u32(0), p.u32(0)
    self._c = lane & 3
    self._key = ((lane >> 2) & 1) | ((((lane >> 2) ^ lane) & 2) | ((lane >> 2) & 4))
    self._targets = [self._target(pool) for pool in self._pools]
    self._sources = [self._source(pool) for pool in self._pools]

  def _find_arrays(self, arrays: dict[str, int]) -> None:
    """Each of a few lanes copies a run of one: where the array is, bytes, and place in a stage."""
    p, self._places, place = self._p, {}, 0
    self._array = p.new("d", "mov.b64", p.pointer(next(iter(arrays))))
    self._bytes, self._place = p.u32(0), p.u32(0)
    runs, self._copiers = self._pages.of_tile, 0
    for name, nbytes in arrays.items():
      self._places[name] = place
      for _ in range(runs):
        mine = self._lane.eq(self._copiers)
        p.set(self._array, p.pointer(name), when=mine)
        p.set(self._bytes, nbytes // runs, when=mine)
        p.set(self._place, place, when=mine)
        place += nbytes // runs
        self._copiers += 1

  def _words(self, pool: int) -> int:
    """Of codes, of a quarter of a key."""
    return self._wide.pools[pool].head_dim // 32

  def _target(self, pool: int) -> Reg:
    """Of the lane's first word of its first key; those of its others are 8 keys, 1024 bytes, on."""
    words = self._words(pool)
    piece = self._c * words
    part = (piece // _PIECES) * self._wide.pools[pool].part
    row = (self._warp * self._share + self._key) * wgmma.ROW
    return part + row + (((piece & (_PIECES - 1)) ^ self._key) * 16)

  def _source(self, pool: int) -> tuple[Reg, Reg]:
    """In a stage: the lane's codes of its first key, and their scales."""
    words = self._words(pool)
    codes = self._key * (16 * words) + self._c * (4 * words)
    return codes, self._key * (2 * words) + self._c * (words // 2)

  def begin(self, work: QueryTile) -> None:
    """Starts the copies of a segment's first shares."""
    p = self._p
    self._work = work
    row = p.address(p.pointer("table"), work.seq, 4 * self._wide.max_pages)
    first_share = work.first_tile * WARPS + self._warp
    self._walk = PageWalk(
      p, self._pages, self._lane, row=row, kv_len=work.kv_len, first_tile=first_share
    )
    self._issued = p.u32(0)
    with p.loop() as filling:
      filling.leave_if(self._issued >= p.minimum(work.count, self._rings.stages))
      self._issue()

  def segment(self) -> None:
    p, work, done = self._p, self._work, self._p.u32(0)
    unseen = work.unseen_by_all()
    with p.loop() as tiles:
      first = (work.first_tile + done) * self._wide.tile
      key = first + (self._warp * self._share + self._key)
      copies.wait(p, Mem(self._barriers + self._stage * 8), self._phase)
      stage = p.mad(self._stage, self._stage_bytes, self._ring)
      raw = [
        [self._load(stage, i, keys, unseen(key + keys) if pool else None) for keys in self._keys]
        for i, pool in enumerate(self._pools)
      ]
      self._advance()
      with p.when(self._issued < work.count):
        self._issue()
      for slots, of_pool, target in zip(self._slots, raw, self._targets, strict=True):
        slots.wait_empty()
        target = slots.address + target
        for keys, words in zip(self._keys, of_pool, strict=True):
          self._widen(target, keys, *words)
        p.emit("fence.proxy.async.shared::cta")
        slots.tell_full(self._first_lane)
      p.set(done, done + 1)
      tiles.leave_if(done >= work.count)

  def _issue(self) -> None:
    """Starts the copies of the warp's next share."""
    p = self._p
    self._walk.reach(self._issued)
    barrier = Mem(self._barriers + self._issue_stage * 8)
    copies.announce(p, barrier, self._stage_bytes, self._first_lane)
    p.sync_warp()
    first, *others = self._walk.runs(self._issued, self._work.head)
    for i, other in enumerate(others, start=1):
      first = p.select((self._lane % self._pages.of_tile).eq(i), other, first)
    target = p.mad(self._issue_stage, self._stage_bytes, self._ring) + self._place
    source = p.new("d", "mad.wide.u32", first, self._bytes, self._array)
    copier = self._lane < self._copiers
    copies.start_copy(p, Mem(target), source, self._bytes, barrier, self._policy, copier)
    p.set(self._issued, self._issued + 1)
    p.set(self._issue_stage, self._after(self._issue_stage))

  def _load(self, stage: Reg, i: int, keys: int, hidden: Reg | None) -> tuple[list[Reg], list[Reg]]:
    """A quarter of one of eight keys: words of codes, and the scales of them.

    Args:
      i: of the pools in a stage.
      hidden: nobody sees the key.
    """
    p, pool = self._p, self._pools[i]
    count, name = self._words(pool), "kv"[pool]
    codes, scales = self._sources[i]
    words = []
    for start in range(0, count, 4):
      at = Mem(stage + codes, self._places[name] + keys * 16 * count + 4 * start)
      words += p.load("shared", at, min(count, 4))
    blocks = count // 2  # of the quarter, a byte each
    at = Mem(stage + scales, self._places[f"{name}_scale"] + keys * 2 * count)
    (raw,) = p.load("shared", at, size=blocks)
    if hidden is not None:
      raw = p.select(hidden, 0, raw)  # so that P, which is 0, does not meet a NaN
    factors = []
    for half in p.halves(raw)[: max(blocks // 2, 1)]:
      factors += p.halves(p.e4m3_to_f16(half))
    return words, [p.pair(factor, factor) for factor in factors]

  def _widen(self, target: Reg, keys: int, words: list[Reg], factors: list[Reg]) -> None:
    p = self._p
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
