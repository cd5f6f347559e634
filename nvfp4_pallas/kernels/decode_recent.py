"""Decode's program where the newest tokens are bfloat16 in rings (nvfp4_pallas/recent.py). PTX.

What decode_attend.py does, and then the same once more with other formats. In the line of work a
(sequence, head) has, after the tiles of its pages, those of its ring, of 16 keys: about as many
bytes as a tile of 64 keys in NVFP4, so that even cuts stay even.

    tiles of a pair    pages  0 1 2 ... T-1   ring  T T+1 ...
    a warp's           0       4       8 ...        T+1      T+5

A warp goes through its tiles of pages, brings its state to the ring's units, loads q anew, as K's
operands are bfloat16 now, and goes on with its tiles of the ring: one maximum, sum and O for both.
The copies of the ring's tiles begin while it is still at the pages'.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from nvfp4_pallas.kernels import copies
from nvfp4_pallas.kernels.decode_attend import Attend
from nvfp4_pallas.kernels.decode_layout import WARPS, Problem, RingPages
from nvfp4_pallas.kernels.decode_work import Cut
from nvfp4_pallas.kernels.ptx import Mem, Ptx, Reg
from nvfp4_pallas.kernels.work_walk import WorkWalk


def attend(problem: Problem, cut: Cut, slots: int) -> Ptx:
  """The program; its pointers are Problem.inputs and decode_attend.POINTERS_OUT."""
  return RecentAttend(problem, cut, slots).p


class RecentWalk(WorkWalk):
  """WorkWalk where a sequence has tiles of its ring too; kv_len are the tokens in its pages.

  Attributes:
    paged_tiles: tiles of the pages, of each pair.
    ring: the sequence's ring.
    newest: tokens in it.
  """

  paged_tiles: Reg
  ring: Reg
  newest: Reg

  def __init__(self, p: Ptx, cut: Cut, lane: Reg, scope, pages: RingPages, num_seqs: int):
    self._pages, self._num_seqs = pages, num_seqs
    super().__init__(p, cut, lane, scope)

  def _spans(self, seq: Reg, kv_len: Reg) -> tuple[Reg, Reg]:
    """A sequence's ring, and how many of its tokens are in the pages."""
    p, rings = self._p, self._pages.num_rings
    ring = seq
    if not self._pages.by_number:
      (ring,) = p.load("global.nc", Mem(p.address(p.pointer("ring_ids"), seq, 4)))
    has_ring = ring < rings  # unsigned: negative numbers are none either
    ring = p.minimum(ring, rings - 1)
    (start,) = p.load("global.nc", Mem(p.address(p.pointer("starts"), ring, 4)))
    return ring, p.select(has_ring, p.minimum(start, kv_len), kv_len)

  def _tiles_of(self, paged: Reg, kv_len: Reg) -> Reg:
    newest = self._p.cdiv(kv_len - paged, self._pages.tile)
    return self._cut.tiles(self._p, paged) + newest

  def _units_of(self, seq: Reg, kv_len: Reg) -> Reg:
    p = self._p
    _, paged = self._spans(p.minimum(seq, self._num_seqs - 1), kv_len)
    return p.cdiv(self._tiles_of(paged, kv_len), self._cut.unit)

  def _make_seq(self) -> None:
    p = self._p
    self.paged_tiles, self.ring, self.newest = p.u32(0), p.u32(0), p.u32(0)

  def _load_seq(self) -> None:
    p = self._p
    (kv_len,) = p.load("global.nc", Mem(p.address(p.pointer("kv_lens"), self.seq, 4)))
    ring, paged = self._spans(self.seq, kv_len)
    p.set(self.kv_len, paged)
    p.set(self.paged_tiles, self._cut.tiles(p, paged))
    p.set(self.ring, ring)
    p.set(self.newest, kv_len - paged)
    p.set(self._units, p.cdiv(self._tiles(), self._cut.unit))

  def _tiles(self) -> Reg:
    return self.paged_tiles + self._p.cdiv(self.newest, self._pages.tile)


class RecentAttend(Attend):
  work: RecentWalk

  def __init__(self, problem: Problem, cut: Cut, slots: int):
    assert problem.rings is not None
    self.pages = problem.rings
    # What changes for the ring's part: formats, and keys of a tile.
    self._wide_problem = dataclasses.replace(
      problem, keys=self.pages.keys, values=self.pages.values, q_levels=0, rings=None
    )
    super().__init__(problem, cut, slots)

  def _find_work(self, scope) -> RecentWalk:
    return RecentWalk(self.p, self.cut, self.lane.index, scope, self.pages, self.cut.num_seqs)

  @contextlib.contextmanager
  def _in_ring(self) -> Iterator[None]:
    """While the ring's part is written."""
    paged = self.problem, self.cut
    self.problem = self._wide_problem
    self.cut = dataclasses.replace(self.cut, tile=self.pages.tile)
    yield
    self.problem, self.cut = paged

  def _start_pages(self) -> None:
    super()._start_pages()
    # Of this warp's tiles, those of pages.
    p, ahead = self.p, self.work.paged_tiles + (WARPS - 1)
    left = p.select(self.first_tile < self.work.paged_tiles, ahead - self.first_tile, 0)
    self.paged_count = p.minimum(left // WARPS, self.count)

  def _tiles(self) -> None:
    p = self.p
    done = self._tiles_until(self.paged_count, p.u32(0), self.first_tile)
    self._to_ring_units()
    with self._in_ring(), p.when(done < self.count):
      self._load_q()
      self._tiles_until(self.count, done, self.first_tile - self.work.paged_tiles)

  def _length(self) -> Reg:
    return self.work.newest if self.problem.rings is None else self.work.kv_len

  def _to_ring_units(self) -> None:
    """O times V's global scale, and maxima as scores of the ring's keys would have them.

    Scores keep their order, as both factors are positive. The maximum is rounded once more than
    where all keys are in pages: by 2^-24 of itself, as an lse would be.
    """
    p = self.p
    out_scale = self._global_scale("v", self.problem.values.unit)
    for acc in (acc for of_tile in self.out for acc in of_tile):
      for x in acc:
        p.set(x, x * out_scale)
    of_pages = self.scales
    with self._in_ring():
      self.q_units = []  # bfloat16 operands have none
      self._load_scale()
    if self.problem.soft_cap is None:  # else scores are in log2 units
      to_ring = p.reciprocal(self.scales[0])
      for top, scale in zip(self.max, of_pages, strict=True):
        p.set(top, top * scale * to_ring)

  def _out_scale(self) -> Reg:
    return self.p.f32(1.0)

  # The ring of copies.

  def _issue(self, pool: str) -> None:
    p = self.p
    with p.when(self.issued < self.count):
      if self.problem.rings is None:  # at the ring's part no more pages are to come
        self._copy_newest(pool)
      else:
        of_pages = self.issued < self.paged_count
        with p.when(of_pages):
          self._copy_pages(pool)
        with p.when(of_pages, unless=True):
          self._copy_newest(pool)
      self._end_issue(pool)

  def _copy_newest(self, pool: str) -> None:
    """K or V of the next tile of the ring."""
    p, pages, work = self.p, self.pages, self.work
    row_bytes = (pages.keys if pool == "k" else pages.values).row_bytes
    page_size = self.problem.page_size
    tile = self.first_tile + self.issued * WARPS - work.paged_tiles
    key = work.kv_len + tile * pages.tile
    page = work.ring * pages.of_ring + key // page_size % pages.of_ring
    run = p.mad(page, self.cut.kv_heads, work.head) * (page_size // pages.tile)
    run = run + key % page_size // pages.tile
    copied = pages.tile * row_bytes
    barrier = Mem(self.barriers + self.issue_slot * 8)
    copies.announce(p, barrier, copied, self.first_lane)
    source = p.address(p.pointer(f"newest_{pool}"), run, copied)
    target = Mem(self.slots + self.issue_slot * self.ring.slot_bytes)
    copies.start_copy(p, target, source, copied, barrier, self.policy, self.first_lane)
