"""The main program for short queries over long caches: a few query tokens a sequence, NVFP4. PTX.

    S^T = K q^T    P^T = exp2(c S^T + r)    O^T += V^T P^T    c = sm_scale k_global_scale / ln 2

A block is one warpgroup and takes a query tile, the rows of one KV head for up to 48 / group
consecutive tokens of a sequence, through its run of key tiles (decode_work.py's line of units, with
a query tile and head where decode has a head). K and V become left operands in registers, float16,
and q and P are right operands in shared memory, so that a value of the cache is widened once for
all rows:

    S^T [64 keys, rows]       warp w has keys 16 w to 16 w + 15
    O^T [128 columns, rows]   warp w has columns 32 w to 32 w + 31, two products of 64

    tensor cores   O of tile i - 1  | S of tile i + 1     | O of tile i     | ...
    warps          P of tile i      | widen K of i + 1    | widen V of i    | P of tile i + 1 ...

The exponents of a row are taken against a reference (softmax.py): no maximum, no rescaling. A tile
where P reached 2^15 sets new references and is done again. float16 has full precision down to
2^-14, so keys that weigh 2^-24 of the first tile's largest (an attention sink) have all its digits,
and at 2^-30 still five bits; after a tile was done again these are 2^-18 and 2^-24 of its largest.

Registers: 48 for O, 24 for S, 32 each for K and V in flight, at 48 rows.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

from nvfp4_pallas.kernels import copies, wgmma
from nvfp4_pallas.kernels.decode_work import Cut
from nvfp4_pallas.kernels.mma_fragments import Lane, NvFp4Fragments, e2m1_as_f16
from nvfp4_pallas.kernels.ptx import Mem, Ptx, Reg
from nvfp4_pallas.kernels.q_operands import load_tile
from nvfp4_pallas.kernels.query_walk import QueryWalk
from nvfp4_pallas.kernels.results import NEG_INF, store_piece, store_result
from nvfp4_pallas.kernels.softmax import FIRST_P, LATER_P, NO_REFERENCE, cap, factor_of_scores
from nvfp4_pallas.kernels.tail_layout import (
  CODES,
  HEAD_DIM,
  P_BUFFERS,
  SCALES,
  THREADS,
  TILE,
  V_SCALE_BYTES,
  WARPS,
  Tail,
)
from nvfp4_pallas.kernels.tail_ring import TailRing

POINTERS_IN = ("q", "table", "kv_lens", "cu_q_lens", "k_global", "v_global")
POOL_POINTERS = ("k", "k_scale", "v", "v_scale")
POINTERS_OUT = ("out", "lse", "pieces", "piece_lse", "piece_slots")


def attend(tail: Tail, cut: Cut) -> Ptx:
  """The program; its pointers are POINTERS_IN, POOL_POINTERS and POINTERS_OUT."""
  return _Attend(tail, cut).p


class _Attend:
  def __init__(self, tail: Tail, cut: Cut):
    self.tail, self.cut = tail, cut
    self.p = Ptx((*POINTERS_IN, *POOL_POINTERS, *POINTERS_OUT))
    with self.p.scope() as scope:
      self._run(scope)

  def _run(self, scope) -> None:
    p, cut, tail = self.p, self.cut, self.tail
    self.smem = (p.smem + (wgmma.ALIGNMENT - 1)) & ~(wgmma.ALIGNMENT - 1) % 2**32
    self.thread = p.thread
    self.warp = p.from_lane(self.thread >> 5, 0)
    index = self.thread & 31
    g, c = index >> 2, index & 3
    # Keys in their own order: their rows are loaded by pairs that lie side by side.
    self.lane = Lane(index, g, c, g, (c * 2, c * 2 + 1))
    self.first_lane = index.eq(0)
    self.keys = NvFp4Fragments(HEAD_DIM)
    self.ring = TailRing(p, tail, cut.kv_heads, self.smem, self.warp, index)

    yes = p.u32(0)
    self.yes, self.no = yes.eq(0), yes.ne(0)
    self.work = QueryWalk(
      p, cut, index, scope, width=tail.width, group=tail.group, causal=tail.causal
    )
    with p.loop() as segments:
      self._segment()
      segments.leave_if(self.work.at_end)
      p.emit("fence.proxy.async.shared::cta")
      p.sync(THREADS)
      self.work.next_pair()

  def _segment(self) -> None:
    p, tail = self.p, self.tail
    self.work.start_segment()
    self.first_tile, self.count = self.work.first_tile, self.work.count
    self.ring.start(self.work)
    self._load_q()
    rows = tail.rows
    self.out = [[p.f32(0.0) for _ in range(rows // 2)] for _ in range(2)]
    self.sum = [p.f32(0.0) for _ in range(rows // 4)]
    self.tile_sums = p.registers("f", rows // 4)
    self.scores = p.registers("f", rows // 2)
    p.emit("fence.proxy.async.shared::cta")
    p.sync(THREADS)

    self.done, self.p_index = p.u32(0), p.u32(0)
    copies.wait(p, self.ring.barrier(self.ring.slot), self.ring.phase)
    self._multiply_keys(self.scores, self.ring.stage(self.ring.slot))
    wgmma.wait(p, 0)
    self._finish_scores(self.scores, self.first_tile * TILE)
    self._set_references(self.scores, FIRST_P)
    with p.loop() as tiles_left:
      self._tile()
      p.set(self.done, self.done + 1)
      tiles_left.leave_if(self.done >= self.count)
    wgmma.wait(p, 0)
    self._finish()
    self.work.end_segment()

  # q, in shared memory.

  def _load_q(self) -> None:
    """q to shared memory, its columns in the order in which K comes out of its words.

    Each thread takes a quarter of a row, of columns the quarter that the lane c has of K: k-step i
    of 16 columns has the pairs 2 i and 2 i + 1 of it at 2 c and 2 c + 8.
    """
    p, tail = self.p, self.tail
    quarters, unit = load_tile(
      p,
      self.work,
      rows=tail.rows,
      dim=HEAD_DIM,
      operand=self.keys.operand,
      order=self.keys.word_pairs(),
      levels=tail.q_levels,
      negate=tail.sm_scale < 0,
      largest_of_warps=self._largest_of_warps,
    )
    for quarter in quarters:
      for operand, pairs in enumerate(quarter.operands):
        self._store_q_row(operand, quarter.row, quarter.c, pairs, quarter.inside)
    at = p.address(p.pointer("k_global"), self.work.head, 4)
    (k_global,) = p.load("global.nc", Mem(at), kind="f")
    self.scale = factor_of_scores(p, k_global, tail.sm_scale, unit * self.keys.unit)
    for start in range(0, tail.reference_stride, THREADS):
      place = Mem(self.smem + (self.thread + start) * 4, tail.references)
      real = self.thread + start < tail.reference_stride
      p.store("shared", place, [p.f32(NO_REFERENCE)], when=real)

  def _largest_of_warps(self, of_warp: Reg) -> Reg:
    p, reduction = self.p, self.tail.reduction
    place = Mem(self.smem + self.warp * 4, reduction)
    p.store("shared", place, [of_warp], when=self.first_lane)
    p.sync(THREADS)
    return p.max_of(p.load("shared", Mem(self.smem, reduction), WARPS))

  def _store_q_row(self, operand: int, row: Reg, c: Reg, pairs: list[Reg], inside) -> None:
    base = self.smem + (row * wgmma.ROW + c * 4)
    for i, pair in enumerate(pairs):
      part, k_bytes = divmod(16 * i, wgmma.ROW)
      at = Mem(base + wgmma.place(row, k_bytes), self.tail.q_place(operand, part))
      self.p.store("shared", at, [pair], when=inside)

  # One tile.

  def _multiply_keys(self, scores: list[Reg], stage: Reg) -> None:
    """Starts S of the tile in a stage, each word of codes as soon as it is wide."""
    p, tail = self.p, self.tail
    codes = stage + self.warp * (CODES // WARPS)
    scales = stage + (self.warp * (SCALES // WARPS) + 2 * CODES)
    top, bottom = (self.keys.key_words(p, self.lane, codes, scales, half) for half in (0, 8))
    low = wgmma.descriptor(self.smem)
    fresh = True
    for word in range(HEAD_DIM // 4 // 8):
      pairs = [self.keys.widen_word(p, *of_row[word]) for of_row in (top, bottom)]
      wgmma.begin(p)
      for step in range(2):
        i = 2 * word + step  # of 16 columns
        near, far = (of_row[2 * step : 2 * step + 2] for of_row in pairs)
        for operand in range(tail.q_operands):
          part, k_bytes = divmod(i * wgmma.STEP, wgmma.ROW)
          b = wgmma.right(p, low, tail.q_place(operand, part) + k_bytes)
          a = [near[0], far[0], near[1], far[1]]
          wgmma.multiply(p, "f16", scores, a, b, self.no if fresh else self.yes)
          fresh = False
    wgmma.commit(p)

  def _tile(self) -> None:
    p, ring = self.p, self.ring
    key = (self.first_tile + self.done) * TILE
    stage = ring.stage(ring.slot)
    # S of the next tile comes first; of the last one once more where there is none.
    last = (self.done + 1) >= self.count
    next_slot, next_phase = (
      p.select(last, now, then)
      for now, then in zip((ring.slot, ring.phase), ring.next(), strict=True)
    )
    next_full = ring.barrier(next_slot)
    is_full = copies.is_over(p, next_full, next_phase)  # asked early, as the answer takes a while

    raw_v_scales = self._load_v_scales(stage, key)
    self._store_probabilities(self.scores)
    self._convert_v_scales(raw_v_scales)
    p.emit("fence.proxy.async.shared::cta")
    p.sync_warp()
    with p.when(is_full, unless=True):
      copies.wait(p, next_full, next_phase)
    self._multiply_keys(self.scores, ring.stage(next_slot))
    # P is there, and all warps are past the stage before this one.
    with p.when(p.sync_any(THREADS, self.too_large)):
      self._do_again(stage, key)
    v_words, v_scales = self._load_v_words(stage), self._load_v_factors()
    for total, of_tile in zip(self.sum, self.tile_sums, strict=True):
      p.set(total, total + of_tile)
    wgmma.wait(p, 1)  # O of the tile before: its V may go
    self._multiply_values(v_words, v_scales)
    with p.when(self.done.ne(0) & (ring.issued < self.count)):
      ring.issue()
    wgmma.wait(p, 1)  # S of the next tile
    self._finish_scores(self.scores, p.select(last, key, key + TILE))
    ring.advance()
    p.set(self.p_index, p.select(self.p_index.eq(P_BUFFERS - 1), 0, self.p_index + 1))

  def _finish_scores(self, scores: list[Reg], key: Reg) -> None:
    """Scores as they come from the product become those that P is made of."""
    if self.tail.soft_cap is not None:
      for x in scores:
        self.p.set(x, cap(self.p, x, self.scale, self.tail.soft_cap))
    self._mask(scores, key)

  def _do_again(self, stage: Reg, key: Reg) -> None:
    """P of a tile with new references. Its scores are gone, those of the next tile are there."""
    p = self.p
    wgmma.wait(p, 0)
    scores = p.registers("f", self.tail.rows // 2)
    self._multiply_keys(scores, stage)
    wgmma.wait(p, 0)
    self._finish_scores(scores, key)
    self._set_references(scores, LATER_P)
    self._store_probabilities(scores)
    p.emit("fence.proxy.async.shared::cta")
    p.sync(THREADS)

  @property
  def _factor(self) -> Reg:
    """What brings scores to log2 units; with a cap they are in them."""
    return self.scale if self.tail.soft_cap is None else self.p.f32(1.0)

  def _references(self, offset: int, count: int) -> list[Reg]:
    at = Mem(self.smem + self.lane.c * self.tail.reference_stride, self.tail.references + offset)
    return self.p.load("shared", at, count, kind="f")

  def _store_probabilities(self, scores: list[Reg]) -> None:
    """P of the scores to shared memory; sums of the lane's, and whether one is too large."""
    p, tail = self.p, self.tail
    buffer = self.p_index * (tail.rows * TILE * 2)
    # Matrix m of four: rows 8 of (m / 2), keys 8 of (m % 2).
    row, matrix = self.lane.index & 7, self.lane.index >> 3
    chunk = (self.warp * 2 + (matrix & 1)) ^ row
    at = self.smem + buffer + ((matrix >> 1) * 1024 + row * 128 + chunk * 16)
    factor, rows = self._factor, tail.rows
    references = [r for j in range(0, rows // 8, 2) for r in self._references(8 * j, 4)]
    # All of a step before the next one: a lone warp waits for each result.
    shifted = [p.fma(x, factor, references[2 * (i // 4) + i % 2]) for i, x in enumerate(scores)]
    values = [p.exp2(x) for x in shifted]
    packed = [p.pack("f16", *values[i : i + 2]) for i in range(0, rows // 2, 2)]
    op = "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
    for j in range(0, rows // 8, 2):
      p.emit(op, Mem(at, tail.p_offset + 1024 * j), packed[2 * j : 2 * j + 4])
    for i, total in enumerate(self.tile_sums):
      first = 4 * (i // 2) + i % 2
      p.set(total, values[first] + values[first + 2])
    largest = functools.reduce(p.max_f16x2, packed)
    # 2^15 or more, or NaN: the upper four bits of the exponent are ones, and one more carries over.
    self.too_large = (((largest & 0x78007800) + 0x08000800) & 0x80008000).ne(0)

  def _mask(self, scores: list[Reg], key: Reg) -> None:
    """-inf where a row does not see a key, in tiles that have such."""
    p, tail = self.p, self.tail
    mine = key + self.warp * 16 + self.lane.g
    with p.when(self.work.is_partial(key, TILE)):
      for j in range(tail.rows // 8):
        for k in range(2):
          unseen = self.work.unseen_by(self.lane.c * 2 + (8 * j + k))
          for half in range(2):
            x = scores[4 * j + 2 * half + k]
            p.set(x, p.select(unseen(mine + 8 * half if half else mine), NEG_INF, x))

  def _set_references(self, scores: list[Reg], largest_p: float) -> None:
    """References of the rows, from their largest in this tile; O and sums follow."""
    p, tail = self.p, self.tail
    wgmma.wait(p, 0)
    columns = self._columns
    tops = [p.maximum(scores[4 * j + k], scores[4 * j + 2 + k]) for j, k in columns]
    self._meet(tops, p.maximum)
    references = []
    for j, k in columns:
      (old,) = self._references(4 * (2 * j + k), 1)
      new = p.minimum(p.fma(p.max_of(self._of_warps(j, k)), self._factor * -1.0, largest_p), old)
      shrink = p.exp2(new - old)
      for x in [self.sum[2 * j + k], *(o[4 * j + k + half] for o in self.out for half in (0, 2))]:
        p.set(x, x * shrink)
      references.append(new)
    p.sync(THREADS)
    one = self.lane.g.eq(0) & self.warp.eq(0)
    at = self.smem + self.lane.c * tail.reference_stride
    for (j, k), new in zip(columns, references, strict=True):
      p.store("shared", Mem(at, tail.references + 4 * (2 * j + k)), [new], when=one)
    p.sync(THREADS)

  @property
  def _columns(self) -> list[tuple[int, int]]:
    """(j, k) for the lane's columns of S, which are the rows 8 j + 2 c + k."""
    return [(j, k) for j in range(self.tail.rows // 8) for k in range(2)]

  def _meet(self, of_columns: list[Reg], combine: Callable[[Reg, Reg], Reg]) -> None:
    """What each warp has of all columns, for _of_warps."""
    p, tail = self.p, self.tail
    mine = self.smem + self.lane.c * 8 + self.warp * (4 * tail.rows)
    for (j, k), x in zip(self._columns, of_columns, strict=True):
      for step in (4, 8, 16):  # over the keys, which lanes with one c share
        x = combine(x, p.shuffle_xor(x, step))
      at = Mem(mine, tail.reduction + 4 * (8 * j + k))
      p.store("shared", at, [x], when=self.lane.g.eq(0))
    p.sync(THREADS)

  def _of_warps(self, j: int, k: int) -> list[Reg]:
    p, at, first = self.p, self.smem + self.lane.c * 8, self.tail.reduction + 4 * (8 * j + k)
    places = [Mem(at, first + 4 * warp * self.tail.rows) for warp in range(WARPS)]
    return [p.load("shared", place, kind="f")[0] for place in places]

  def _load_v_scales(self, stage: Reg, key: Reg) -> list[Reg]:
    """Scales of the warp's two blocks of V, of two keys for each lane; 0 where no row sees them."""
    p = self.p
    at = stage + (self.lane.index * 16 + self.warp * 2)
    unseen, of_keys = self.work.unseen_by_all(), []
    for i in range(2):
      (both,) = p.load("shared", Mem(at, 2 * CODES + SCALES + 8 * i), size=2)
      of_key = key + self.lane.index * 2 + i if i else key + self.lane.index * 2
      of_keys.append(p.select(unseen(of_key), 0, both))
    return of_keys

  def _convert_v_scales(self, of_keys: list[Reg]) -> None:
    """The lane 4 m + c has the keys 8 m + 2 c and the next: of block b at word (4 b + c) 8 + m."""
    p = self.p
    table = self.smem + self.warp * V_SCALE_BYTES
    place = table + ((self.lane.index & 3) * 32 + (self.lane.index >> 2) * 4)
    for b, selector in enumerate((0x7740, 0x7751)):
      both = p.permute(of_keys[0], of_keys[1], selector)
      word = p.e4m3_to_f16(p.halves(both)[0])
      p.store("shared", Mem(place, self.tail.v_scales + 128 * b), [word])

  def _load_v_factors(self) -> list[Reg]:
    """Scales of the lane's block, g 0 to 3 or 4 to 7, of the keys 8 m + 2 c and the next."""
    p, table = self.p, self.smem + self.warp * V_SCALE_BYTES
    place = table + ((self.lane.g >> 2) * 128 + self.lane.c * 32)
    return [
      *p.load("shared", Mem(place, self.tail.v_scales), 4),
      *p.load("shared", Mem(place, self.tail.v_scales + 16), 4),
    ]

  def _load_v_words(self, stage: Reg) -> list[Reg]:
    """The codes of V's tile, of 8 keys after 8.

    A matrix of 8 keys by 16 bytes of codes, transposed, gives the lane (g, c) the codes of four
    columns, 4 g and on of the warp's 32, for the keys 2 c and 2 c + 1 in a word's halves.
    """
    p, words = self.p, []
    at = stage + (self.lane.index * (HEAD_DIM // 2) + self.warp * 16)
    for keys in (0, 32):
      four = p.registers("r", 4)
      op = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
      p.emit(op, four, Mem(at, CODES + keys * (HEAD_DIM // 2)))
      words += four
    return words

  def _multiply_values(self, words: list[Reg], scales: list[Reg]) -> None:
    """Starts O += of a tile, of each 16 keys as soon as they are wide.

    The rows g and g + 8 of the first product are the columns 4 g and 4 g + 1, of the second the
    next two.
    """
    p, tail = self.p, self.tail
    low = wgmma.descriptor(self.smem + (self.p_index * (tail.rows * TILE * 2) + tail.p_offset))
    for step in range(TILE // 16):
      near, far = (
        [p.mul_f16x2(pair, scales[i]) for pair in e2m1_as_f16(p, words[i])]
        for i in (2 * step, 2 * step + 1)
      )
      b = wgmma.right(p, low, step * wgmma.STEP)
      wgmma.begin(p)
      for product, out in enumerate(self.out):
        i = 2 * product
        wgmma.multiply(p, "f16", out, [near[i], near[i + 1], far[i], far[i + 1]], b, self.yes)
    wgmma.commit(p)

  # The end of a segment.

  def _finish(self) -> None:
    p = self.p
    self._meet(self.sum, operator.add)
    (v_global,) = p.load(
      "global.nc", Mem(p.address(p.pointer("v_global"), self.work.head, 4)), kind="f"
    )
    out_scale = v_global * self.keys.unit
    slot = self.work.tell_pieces(self.thread)
    for j, k in self._columns:
      sums = self._of_warps(j, k)
      total = (sums[0] + sums[1]) + (sums[2] + sums[3])
      (reference,) = self._references(4 * (2 * j + k), 1)
      empty = total.eq(0.0)
      factor = p.select(empty, 0.0, p.reciprocal(total) * out_scale)
      lse = p.select(empty, NEG_INF, p.log2(total) - reference)
      values = [o[4 * j + k + half] * factor for o in self.out for half in (0, 2)]
      self._store_row(self.lane.c * 2 + (8 * j + k), slot, values, lse)

  def _store_row(self, row: Reg, slot: Reg, values: list[Reg], lse: Reg) -> None:
    """Four columns of a row, 32 w + 4 g and on."""
    p, tail = self.p, self.tail
    real = self.work.is_row(row)
    whole, piece = real & self.work.is_whole, real & ~self.work.is_whole
    column = self.warp * 32 + self.lane.g * 4
    out_row = self.work.q_row(row)
    store_result(p, tail.out_dtype, HEAD_DIM, out_row, column, values, lse, whole)
    store_piece(p, HEAD_DIM, slot * tail.rows + row, column, values, lse, piece)
