"""The main program of decode: a block attends to its run of keys. PTX, for decode_mosaic_sm90.py.

    S^T = K q^T    P^T = exp2(c (S^T - max))    O^T += V^T P^T    c = sm_scale k_global_scale / ln 2

Every warp works alone, on every WARPS-th tile of a segment (decode_work.py), with a ring of its own
in shared memory, whose slots bulk copies fill with K and V of tiles in turn: nothing makes it wait
for another warp until the segment's end, where the warps of the block put their results together.

    copies   K0 V0 K1 |          V1           | K2    |          V2           | K3    | ...
    lanes    .        | S of tile 0, max, P   | O     | S of tile 1, max, P   | O     | ...

K and V become operands in registers as they are loaded (mma_fragments.py), P moves from the
result's fragment of the first product to the operand's of the second with `movmatrix`; shared
memory is written only by copies. O stays in registers: for head_dim 128, 32 of each 8 query heads.

What an H200 (1980 MHz) can afford at 4.3 TB/s of NVFP4: 4.4 instructions a value, of them 2.2 on
the pipe for logic and integers. The loop issues 2.8, and 1.3 on that pipe; a product of 16 by 16
values of the cache takes 6.7 cycles of issue on top, .8 instructions' worth a value.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

from nvfp4_pallas.kernels import copies
from nvfp4_pallas.kernels.decode_layout import COLUMNS, THREADS, WARPS, Problem, Ring
from nvfp4_pallas.kernels.decode_work import Cut
from nvfp4_pallas.kernels.mma_fragments import Lane
from nvfp4_pallas.kernels.page_walk import Pages, PageWalk
from nvfp4_pallas.kernels.ptx import Mem, Ptx, Reg
from nvfp4_pallas.kernels.q_operands import load_quarter, row_operands
from nvfp4_pallas.kernels.results import LOG2_E, NEG_INF, store_piece, store_result
from nvfp4_pallas.kernels.softmax import cap
from nvfp4_pallas.kernels.work_walk import WorkWalk

ROWS = 16  # of the left one: keys, or columns of V
MIN_NORMAL = 2.0**-126
P_EXPONENT = (
  14.0  # log2 of the largest P, so that small ones keep float16's digits; sums have it too
)
POINTERS_OUT = ("out", "lse", "pieces", "piece_lse", "piece_slots")


def attend(problem: Problem, cut: Cut, slots: int) -> Ptx:
  """The program; its pointers are Problem.inputs and POINTERS_OUT."""
  return Attend(problem, cut, slots).p


class Attend:
  """The program while it is written. short_attend.py writes its own of some parts."""

  def __init__(self, problem: Problem, cut: Cut, slots: int):
    self.problem, self.cut, self.ring = problem, cut, Ring(cut.tile, slots, problem)
    self.p = Ptx((*problem.inputs, *POINTERS_OUT))
    with self.p.scope() as scope:
      self._run(scope)

  def _run(self, scope) -> None:
    p = self.p
    self.thread = p.thread
    self.warp = p.from_lane(self.thread >> 5, 0)  # so that the compiler knows it uniform
    self.lane = Lane.of(p, self.thread)
    self.first_lane = self.lane.index.eq(0)
    self._make_ring()
    self.work = self._find_work(scope)
    with p.loop() as segments:
      self._segment()
      segments.leave_if(self.work.at_end)
      # The next copies may overwrite what other warps still read, and what this one wrote.
      p.emit("fence.proxy.async.shared::cta")
      p.sync(THREADS)
      self.work.next_pair()

  def _find_work(self, scope) -> WorkWalk:
    return WorkWalk(self.p, self.cut, self.lane.index, scope)

  def _segment(self) -> None:
    self.work.start_segment()
    self.first_tile = self.work.first_tile + self.warp
    self.count = (self.work.count + (WARPS - 1) - self.warp) // WARPS  # of this warp's tiles

    self._start_pages()
    for i in range(self.ring.slots):
      self._issue("kv"[i % 2])
    self._load_q()
    self._load_scale()
    self._reset()
    self._tiles()
    self._join_warps()
    self.work.end_segment()

  def _tiles(self) -> None:
    """All of this warp's tiles of the segment."""
    self._tiles_until(self.count, self.p.u32(0), self.first_tile)

  def _tiles_until(self, count: Reg, done: Reg, first_tile: Reg) -> Reg:
    """Those from the index `done`, which counts on, up to `count`; returns `done`."""
    with self.p.loop() as tiles_left:
      tiles_left.leave_if(done >= count)
      self._tile(first_tile + done * WARPS)
      self.p.set(done, done + 1)
    return done

  # The ring of copies.

  def _make_ring(self) -> None:
    p, ring = self.p, self.ring
    self.slot, self.phase, self.issue_slot = p.u32(0), p.u32(0), p.u32(0)
    self.slots = p.smem + self.warp * ring.warp_bytes
    self.barriers = p.smem + self.warp * (8 * ring.slots) + ring.barriers
    copies.make_barriers(p, self.barriers, ring.slots, 1, self.first_lane)
    p.sync_warp()
    self.policy = copies.evict_first(p)

  def _start_pages(self) -> None:
    p, problem, cut = self.p, self.problem, self.cut
    pages = Pages(
      page_size=problem.page_size,
      num_pages=problem.num_pages,
      kv_heads=cut.kv_heads,
      tile=cut.tile,
      stride=WARPS,
    )
    row = p.address(p.pointer("table"), self.work.seq, 4 * problem.max_pages)
    self.walk = PageWalk(
      p, pages, self.lane.index, row=row, kv_len=self.work.kv_len, first_tile=self.first_tile
    )
    self.run_keys = pages.run
    self.issued = p.u32(0)

  def _issue(self, pool: str) -> None:
    """Starts the copies of the next tile's K ("k") or, after those, V ("v"), if there is one."""
    p = self.p
    with p.when(self.issued < self.count):
      self._copy_pages(pool)
      self._end_issue(pool)

  def _end_issue(self, pool: str) -> None:
    self.p.set(self.issue_slot, self._after(self.issue_slot))
    if pool == "v":
      self.p.set(self.issued, self.issued + 1)

  def _copy_pages(self, pool: str) -> None:
    p = self.p
    if pool == "k":
      self.walk.reach(self.issued)
    arrays = {n: size for n, size in self.problem.pool_pointers.items() if n[0] == pool}
    barrier = Mem(self.barriers + self.issue_slot * 8)
    total = self.cut.tile * sum(arrays.values())
    copies.announce(p, barrier, total, self.first_lane)
    for i, run in enumerate(self.walk.runs(self.issued, self.work.head)):
      target = self.slots + self.issue_slot * self.ring.slot_bytes
      for name, nbytes in arrays.items():
        copied = self.run_keys * nbytes
        source = p.address(p.pointer(name), run, copied)
        place = Mem(target + i * copied)
        copies.start_copy(p, place, source, copied, barrier, self.policy, self.first_lane)
        target = target + self.cut.tile * nbytes

  def _after(self, slot: Reg) -> Reg:
    return self.p.select(slot.eq(self.ring.slots - 1), 0, slot + 1)

  def _wait(self) -> Reg:
    """Until the ring's slot is full; its address."""
    copies.wait(self.p, Mem(self.barriers + self.slot * 8), self.phase)
    return self.slots + self.slot * self.ring.slot_bytes

  def _release(self) -> None:
    """The slot has been read: on to the next one, and copies into this one."""
    p, slots = self.p, self.ring.slots
    p.sync_warp()
    p.set(self.phase, self.phase ^ 1, when=self.slot.eq(slots - 1))
    p.set(self.slot, self._after(self.slot))

  # One tile.

  def _load_q(self) -> None:
    """q [column tile][operand][16 columns of a head]: right operands, the lane's columns of K."""
    p, problem = self.p, self.problem
    heads = self._pair() * problem.group
    self.q, self.q_units = [], []  # of each of the lane's columns of S
    for tile in range(problem.column_tiles):
      # Columns past the group compute the last head again; nobody reads them.
      row = p.minimum(self.lane.g + tile * COLUMNS, problem.group - 1) + heads
      operands, unit = self._load_row(row, self.lane.c)
      if unit is not None:
        for parity in range(2):
          self.q_units.append(p.from_lane(unit, (self.lane.c * 2 + parity) * 4))
      self.q.append(operands)

  def _pair(self) -> Reg:
    """The (sequence, head)'s number."""
    return self.p.mad(self.work.seq, self.cut.kv_heads, self.work.head)

  def _load_row(self, row: Reg, quarter: Reg) -> tuple[list[list[Reg]], Reg | None]:
    """A quarter of a row of q as operands, and their unit."""
    p, keys, problem = self.p, self.problem.keys, self.problem
    negate = problem.sm_scale < 0
    words = load_quarter(p, row, quarter, dim=keys.head_dim, negate=negate)
    return row_operands(p, words, keys.operand, keys.word_pairs(), problem.q_levels)

  def _load_scale(self) -> None:
    """c of each column, which brings scores to log2 units; positive, to keep their order.

    Where it would be too small for float32, as in rows of zeros, the smallest normal number will
    do: the scores are nothing in log2 units either way, and -inf stays -inf.
    """
    p, problem = self.p, self.problem
    scale = self._global_scale("k", abs(problem.sm_scale) * LOG2_E * problem.keys.unit)
    columns = 2 * problem.column_tiles
    scales = [scale * unit for unit in self.q_units] or [scale] * columns
    self.scales = [self._normal(scale) for scale in scales]
    # With a cap, scores are in log2 units as soon as they are made.
    self.cap_scales = self.scales
    if problem.soft_cap is not None:
      self.scales = [p.f32(1.0)] * columns

  def _normal(self, scale: Reg) -> Reg:
    return self.p.new("f", "max.NaN.f32", scale, MIN_NORMAL)

  def _global_scale(self, pool: str, factor: float) -> Reg:
    """The head's, times a factor."""
    p, name = self.p, f"{pool}_global"
    if name not in self.problem.inputs:
      return p.f32(factor)
    (scale,) = p.load("global.nc", Mem(p.address(p.pointer(name), self.work.head, 4)), kind="f")
    return scale * factor

  def _reset(self) -> None:
    p, columns = self.p, 2 * self.problem.column_tiles
    self.max = [p.f32(NEG_INF) for _ in range(columns)]  # of scores
    self.sum = [p.f32(0.0) for _ in range(columns)]  # the lane's part
    self.out = [
      [[p.f32(0.0) for _ in range(4)] for _ in range(self.problem.values.head_dim // ROWS)]
      for _ in range(self.problem.column_tiles)
    ]

  def _tile(self, tile: Reg) -> None:
    # What a slot of the ring is filled with next, after K and after V.
    after_k, after_v = ("k", "v") if self.ring.slots % 2 == 0 else ("v", "k")
    seen, partial = self._visibility(tile)
    k = self._wait()
    scores = self._scores(k, k + self.cut.tile * self.problem.keys.row_bytes)
    self._release()
    self._issue(after_k)
    with self.p.when(partial):
      self._mask(scores, seen)
    self._soften(scores)
    v = self._wait()
    with self.p.when(partial):
      self._clear_values(seen, v)
    self._add_values(scores, v, v + self.cut.tile * self.problem.values.row_bytes)
    self._release()
    self._issue(after_v)

  def _scores(self, codes: Reg, scales: Reg) -> list[list[list[Reg]]]:
    """S^T, [16 keys][column tile][4]: keys g, g, g + 8, g + 8; columns 2 c, 2 c + 1."""
    p, problem = self.p, self.problem
    all_scores = []
    for first in range(0, self.cut.tile, ROWS):
      top, bottom = (
        problem.keys.key_pairs(p, self.lane, codes, scales, first + half) for half in (0, 8)
      )
      of_rows = []
      for tile, operands in enumerate(self.q):
        acc = [p.f32(0.0) for _ in range(4)]
        for q in operands:
          for i in range(0, len(top), 2):
            a = [top[i], bottom[i], top[i + 1], bottom[i + 1]]
            p.mma(problem.keys.operand, acc, a, [q[i], q[i + 1]])
        of_rows.append([self._score(x, 2 * tile + i % 2) for i, x in enumerate(acc)])
      all_scores.append(of_rows)
    return all_scores

  def _score(self, x: Reg, column: int) -> Reg:
    soft_cap = self.problem.soft_cap
    return x if soft_cap is None else cap(self.p, x, self.cap_scales[column], soft_cap)

  def _visibility(self, tile: Reg) -> tuple[Callable[[Reg], Reg], Reg]:
    """Whether a key of the tile is seen, and whether any is not.

    Keys past the sequence's end are not, nor are those before its window.
    """
    p, window = self.p, self.problem.window
    key = tile * self.cut.tile
    length = self._length()
    left = length - key  # keys of the tile that exist
    partial = left < self.cut.tile
    if window is None:
      return lambda token: token < left, partial
    oldest = p.select(length > window, length - window, 0)
    begin = p.select(oldest > key, oldest - key, 0)
    return lambda token: (token < left) & (token >= begin), partial | begin.ne(0)

  def _length(self) -> Reg:
    """The keys that tiles are counted in."""
    return self.work.kv_len

  def _mask(self, scores, seen) -> None:
    p = self.p
    for i, of_rows in enumerate(scores):
      for half in range(2):
        visible = seen(self.lane.slot_token + (i * ROWS + 8 * half))
        for acc in of_rows:
          for x in acc[2 * half : 2 * half + 2]:
            p.set(x, p.select(visible, x, NEG_INF))

  def _clear_values(self, seen, v: Reg) -> None:
    """Zeros in place of what makes V of unseen keys NaN: P is 0 there, but 0 * NaN is not."""
    p, values = self.p, self.problem.values
    first, nbytes = 0, values.row_bytes
    if values.scale_bytes:  # with scales of zero the codes do not matter
      first, nbytes = self.cut.tile * nbytes, values.scale_bytes
    size = min(nbytes, 16)
    zero, pieces = p.u32(0), self.cut.tile * nbytes // size
    for start in range(0, pieces, 32):
      piece = self.lane.index + start
      unseen = ~seen(piece // (nbytes // size))
      if pieces < 32:
        unseen = unseen & (piece < pieces)
      p.store("shared", Mem(v + piece * size, first), [zero] * (size // 4), when=unseen)
    p.emit("fence.proxy.async.shared::cta")  # before a later copy into the same place
    p.sync_warp()

  def _soften(self, scores) -> None:
    """Scores to probabilities, in place, against the running maximum; O and sums follow it."""
    p = self.p
    tops, rises = [], []
    for column, old in enumerate(self.max):
      tile, parity = divmod(column, 2)
      top = p.max_of([of_rows[tile][parity + 2 * half] for of_rows in scores for half in range(2)])
      for step in (4, 8, 16):  # over the keys, which lanes with one c share
        top = p.maximum(top, p.shuffle_xor(top, step))
      top = p.maximum(top, old)
      tops.append(top)
      rises.append(top > old)
    with p.when(p.any_lane(functools.reduce(operator.or_, rises))):
      for column, (top, old) in enumerate(zip(tops, self.max, strict=True)):
        tile, parity = divmod(column, 2)
        shrink = p.exp2((old - self._finite(top)) * self.scales[column])
        for x in [self.sum[column], *(acc[parity + h] for acc in self.out[tile] for h in (0, 2))]:
          p.set(x, x * shrink)
        p.set(old, top)
    references = [self._finite(top) for top in self.max]
    for of_rows in scores:
      for tile, acc in enumerate(of_rows):
        for i, x in enumerate(acc):
          column = 2 * tile + i % 2
          # Not c x - c max: of large scores c max is rounded by more than exp2 can bear.
          p.set(x, p.exp2(p.fma(x - references[column], self.scales[column], P_EXPONENT)))
        for parity in range(2):
          total = self.sum[2 * tile + parity]
          p.set(total, total + (acc[parity] + acc[parity + 2]))

  def _finite(self, top: Reg) -> Reg:
    """A maximum that scores can be taken against: here every column sees a key of every tile."""
    return top

  def _add_values(self, scores, codes: Reg, scales: Reg) -> None:
    p, dtype = self.p, self.problem.values.operand
    for i, of_rows in enumerate(scores):
      near, far = (
        self.problem.values.value_pairs(p, self.lane, codes, scales, i * ROWS + half)
        for half in (0, 8)
      )
      for tile, acc in enumerate(of_rows):
        b = [p.transpose(p.pack(dtype, acc[2 * half], acc[2 * half + 1])) for half in range(2)]
        for j, out in enumerate(self.out[tile]):
          p.mma(dtype, out, [near[2 * j], near[2 * j + 1], far[2 * j], far[2 * j + 1]], b)

  # The end of a segment.

  def _join_warps(self) -> None:
    """Adds up what the warps have, and stores the result or a piece.

    The ring is empty now and holds for each warp O, by query head, and their maxima and sums.
    """
    p, problem, ring = self.p, self.problem, self.ring
    dim, columns, lane = problem.values.head_dim, problem.columns, self.lane
    share = dim // 8  # of the columns of V, which the lane has
    stats = columns * dim * 4
    for column, total in enumerate(self.sum):
      for step in (4, 8, 16):
        total = total + p.shuffle_xor(total, step)
      tile, parity = divmod(column, 2)
      head = lane.c * 2 + (tile * COLUMNS + parity)
      real = head < columns
      at = self.slots + (head * (dim * 4) + lane.g * (share * 4))
      # The rows g and g + 8 of a result are neighbouring columns of V.
      row = [acc[parity + half] for acc in self.out[tile] for half in (0, 2)]
      for start in range(0, share, 4):
        p.store("shared", Mem(at, 4 * start), row[start : start + 4], when=real)
      at = Mem(self.slots + head * 8, stats)
      one = real & lane.g.eq(0)
      reference = p.fma(self.max[column], self.scales[column], -P_EXPONENT)
      p.store("shared", at, [reference, total], when=one)
    p.sync(THREADS)

    out_scale = self._out_scale()
    slot = self._slot()
    for start in range(0, columns * dim, THREADS):
      element = self.thread + start
      head, column = element // dim, element % dim
      real = element < columns * dim if start + THREADS > columns * dim else None
      head = head if real is None else p.minimum(head, columns - 1)
      states = [
        p.load("shared", Mem(p.smem + head * 8, w * ring.warp_bytes + stats), 2, kind="f")
        for w in range(WARPS)
      ]
      top = self._finite(p.max_of([maximum for maximum, _ in states]))
      total, out = p.f32(0.0), p.f32(0.0)
      at = p.smem + (head * dim + column) * 4
      for w, (maximum, of_warp) in enumerate(states):
        weight = p.exp2(maximum - top)
        (x,) = p.load("shared", Mem(at, w * ring.warp_bytes), kind="f")
        p.set(total, p.fma(weight, of_warp, total))
        p.set(out, p.fma(weight, x, out))
      out = out * (p.reciprocal(total) * out_scale)
      lse = top + p.log2(total)
      self._store(slot, head, column, out, lse, real)

  def _out_scale(self) -> Reg:
    """Of O as it is now."""
    return self._global_scale("v", self.problem.values.unit)

  def _slot(self) -> Reg:
    """The piece's slot; the first piece also tells the join where the pieces are."""
    p = self.p
    slot, pieces = self.work.piece()
    at = Mem(p.address(p.pointer("piece_slots"), self._pair(), 8))
    p.store("global", at, [slot, pieces], when=self.work.is_first & self.thread.eq(0))
    return slot

  def _store(self, slot, head, column, out, lse, real) -> None:
    p, group, dim = self.p, self.problem.group, self.problem.values.head_dim
    whole, piece = self.work.is_whole, ~self.work.is_whole
    if real is not None:
      whole, piece = whole & real, piece & real
    row = self._pair() * group + head
    store_result(p, self.problem.out_dtype, dim, row, column, [out], lse, whole)
    store_piece(p, dim, slot * group + head, column, [out], lse, piece)
