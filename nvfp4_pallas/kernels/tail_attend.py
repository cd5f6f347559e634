"""The main program for short queries over long caches: a few query tokens a sequence, NVFP4. PTX.

    S^T = K q^T    P^T = exp2(c S^T + r)    O^T += V^T P^T    c = sm_scale k_global_scale / ln 2

A block is one warpgroup and takes a query tile, the rows of one KV head for up to 64 / group
consecutive tokens of a sequence, through its run of key tiles (decode_work.py's line of units, with
a query tile and head where decode has a head). K and V become left operands in registers, float16,
and q and P are right operands in shared memory, so that a value of the cache is widened once for
all rows:

    S^T [64 keys, rows]       warp w has keys 16 w to 16 w + 15
    O^T [128 columns, rows]   warp w has columns 32 w to 32 w + 31, two products of 64

    tensor cores   O of tile i - 1  | S of tile i + 1     | O of tile i     | ...
    warps          P of tile i      | widen K of i + 1    | widen V of i    | P of tile i + 1 ...

The exponents of a row are taken against a reference r that its first tile sets, so that the
largest P of that tile is 2^10, and that stays: no maximum, no rescaling. A tile where P reached
2^15 sets a new reference and is done again. float16 has full precision down to 2^-14, so keys that
weigh 2^-24 of the first tile's largest (an attention sink) have all its digits, and at 2^-30 still
five bits.

Registers: 64 for O, 32 for S, 32 each for K and V in flight, at 64 rows.
"""

from __future__ import annotations

import functools

from nvfp4_pallas.kernels import copies
from nvfp4_pallas.kernels.decode_work import Cut
from nvfp4_pallas.kernels.mma_fragments import Lane, NvFp4Fragments, e2m1_as_f16
from nvfp4_pallas.kernels.page_walk import Pages, PageWalk
from nvfp4_pallas.kernels.ptx import Mem, Ptx, Reg
from nvfp4_pallas.kernels.q_operands import (
  Q_EXPONENT,
  in_order,
  largest_of,
  load_quarters,
  to_f16,
  unit_for,
)
from nvfp4_pallas.kernels.query_walk import QueryWalk
from nvfp4_pallas.kernels.results import LOG2_E, NEG_INF, store_piece, store_result
from nvfp4_pallas.kernels.tail_layout import (
  ALIGNMENT,
  CODES,
  HEAD_DIM,
  P_BUFFERS,
  SCALES,
  STAGE,
  THREADS,
  TILE,
  V_SCALE_BYTES,
  WARPS,
  Tail,
)

HEADROOM = 10.0  # log2 of the largest P of a row's first tile
NO_REFERENCE = 1e30

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
    self.smem = (p.smem + (ALIGNMENT - 1)) & ~(ALIGNMENT - 1) % 2**32
    self.thread = p.new("r", "mov.u32", "%tid.x")
    self.warp = p.from_lane(self.thread >> 5, 0)
    index = self.thread & 31
    g, c = index >> 2, index & 3
    # Keys in their own order: their rows are loaded by pairs that lie side by side.
    self.lane = Lane(index, g, c, g, (c * 2, c * 2 + 1))
    self.first_lane = index.eq(0)
    self.keys = NvFp4Fragments(HEAD_DIM)
    self._make_ring()

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
    self._start_pages()
    with p.loop() as filling:
      filling.leave_if(self.issued >= p.minimum(self.count, tail.stages))
      self._issue()
    self._load_q()
    rows = tail.rows
    self.out = [[p.f32(0.0) for _ in range(rows // 2)] for _ in range(2)]
    self.sum = [p.f32(0.0) for _ in range(rows // 4)]
    self.tile_sums = p.registers("f", rows // 4)
    self.scores = p.registers("f", rows // 2)
    p.emit("fence.proxy.async.shared::cta")
    p.sync(THREADS)

    self.done, self.p_index = p.u32(0), p.u32(0)
    copies.wait(p, Mem(self.barriers + self.slot * 8), self.phase)
    self._multiply_keys(self.scores, self._stage(self.slot))
    p.emit("wgmma.wait_group.sync.aligned", 0)
    self._finish_scores(self.scores, self.first_tile * TILE)
    self._set_references(self.scores)
    with p.loop() as tiles_left:
      self._tile()
      p.set(self.done, self.done + 1)
      tiles_left.leave_if(self.done >= self.count)
    p.emit("wgmma.wait_group.sync.aligned", 0)
    self._finish()
    self.work.end_segment()

  # The ring of copies: K's codes and scales and V's, each started by one warp.

  def _make_ring(self) -> None:
    p, stages = self.p, self.tail.stages
    self.slot, self.phase, self.issue_slot = p.u32(0), p.u32(0), p.u32(0)
    self.barriers = self.smem + self.tail.barriers
    first_thread = self.thread.eq(0)
    copies.make_barriers(p, self.barriers, stages, WARPS, first_thread)
    p.sync(THREADS)
    # What this warp copies: its array, bytes of a tile, place in a stage.
    self.array = p.new("d", "mov.b64", p.pointer("k"))
    self.array_bytes, self.array_place = p.u32(CODES), p.u32(0)
    for i, (name, nbytes, place) in enumerate(
      (
        ("k_scale", SCALES, 2 * CODES),
        ("v", CODES, CODES),
        ("v_scale", SCALES, 2 * CODES + SCALES),
      )
    ):
      mine = self.warp.eq(i + 1)
      p.set(self.array, p.pointer(name), when=mine)
      p.set(self.array_bytes, nbytes, when=mine)
      p.set(self.array_place, place, when=mine)

  def _stage(self, slot: Reg) -> Reg:
    return self.p.mad(slot, STAGE, self.smem + self.tail.ring)

  def _after(self, slot: Reg) -> Reg:
    return self.p.select(slot.eq(self.tail.stages - 1), 0, slot + 1)

  def _start_pages(self) -> None:
    p, tail = self.p, self.tail
    pages = Pages(tail.page_size, tail.num_pages, self.cut.kv_heads, TILE, stride=1)
    row = p.address(p.pointer("table"), self.work.seq, 4 * tail.max_pages)
    self.walk = PageWalk(
      p, pages, self.lane.index, row=row, kv_len=self.work.kv_len, first_tile=self.first_tile
    )
    self.pages_of_tile = pages.of_tile
    self.issued = p.u32(0)

  def _issue(self) -> None:
    """Starts this warp's copy for the next tile."""
    p = self.p
    self.walk.reach(self.issued)
    # Made anew each time, as registers are short.
    policy = copies.evict_first(p)
    barrier = Mem(self.barriers + self.issue_slot * 8)
    copies.announce(p, barrier, self.array_bytes, self.first_lane)
    copied = self.array_bytes // self.pages_of_tile
    target = self._stage(self.issue_slot) + self.array_place
    for i, run in enumerate(self.walk.runs(self.issued, self.work.head)):
      target = target + copied if i else target
      source = p.new("d", "mad.wide.u32", run, copied, self.array)
      copies.start_copy(p, Mem(target), source, copied, barrier, policy, self.first_lane)
    p.set(self.issued, self.issued + 1)
    p.set(self.issue_slot, self._after(self.issue_slot))

  # Right operands in shared memory: rows of 128 bytes, K-major, swizzled.

  def _descriptor(self, address: Reg) -> Reg:
    """The low word of a matrix descriptor: address / 16; of 8 rows, groups of which follow."""
    return ((address & 0x3FFFF) >> 4) | 0x10000

  def _matrix(self, low: Reg, offset: int) -> Reg:
    swizzle_128_bytes, group_stride = 1 << 30, (8 * 128) >> 4
    low = low + (offset >> 4) if offset else low
    return self.p.new("d", "mov.b64", [low, swizzle_128_bytes | group_stride])

  def _load_q(self) -> None:
    """q to shared memory, its columns in the order in which K comes out of its words.

    Each thread takes a quarter of a row, of columns the quarter that the lane c has of K: k-step i
    of 16 columns has the pairs 2 i and 2 i + 1 of it at 2 c and 2 c + 8.
    """
    p, tail = self.p, self.tail
    items = []
    for start in range(0, 4 * tail.rows, THREADS):
      item = self.thread + start if start else self.thread
      row, c = item >> 2, item & 3
      operands = load_quarters(
        p,
        self.work.q_row(self.work.row_or_last(row)),  # rows past the last one repeat it
        c,
        operands=tail.q_operands,
        dim=HEAD_DIM,
        negate=tail.sm_scale < 0,
      )
      items.append((row, c, operands, start))

    largest = p.u32(0)
    for _, _, operands, _ in items:
      of_item = largest_of(p, operands)
      # A row that is not finite must not set the unit of the others.
      p.set(largest, p.maximum(largest, p.select(of_item < 0x7F800000, of_item, 0)))
    place = self.smem + self.warp * 4
    p.store("shared", Mem(place, tail.reduction), [p.max_lanes(largest)], when=self.first_lane)
    p.sync(THREADS)
    of_warps = p.load("shared", Mem(self.smem, tail.reduction), WARPS)
    inverse, unit = unit_for(p, p.max_of(of_warps), Q_EXPONENT)
    for row, c, operands, start in items:
      inside = None if start + THREADS <= 4 * tail.rows else row < tail.rows
      for operand, words in enumerate(operands):
        pairs = in_order(p, to_f16(p, words, inverse), self.keys.word_pairs())
        self._store_q_row(operand, row, c, pairs, inside)

    (k_global,) = p.load(
      "global.nc", Mem(p.address(p.pointer("k_global"), self.work.head, 4)), kind="f"
    )
    scale = k_global * (abs(tail.sm_scale) * LOG2_E * self.keys.unit) * unit
    # Where it underflows, so do scores; but 0 times the -inf of a key that is not seen is NaN.
    self.scale = p.select(scale.eq(0.0), 2.0**-126, scale)
    for start in range(0, tail.reference_stride, THREADS):
      place = Mem(self.smem + (self.thread + start) * 4, tail.references)
      real = self.thread + start < tail.reference_stride
      p.store("shared", place, [p.f32(NO_REFERENCE)], when=real)

  def _store_q_row(self, operand: int, row: Reg, c: Reg, pairs: list[Reg], inside) -> None:
    p, tail = self.p, self.tail
    base = self.smem + (row * 128 + c * 4)
    swizzle = (row & 7) * 16
    for i, pair in enumerate(pairs):
      half, place = divmod(i * 16, 128)  # of 64 columns, and in its row of 128 bytes
      offset = operand * tail.rows * 256 + half * tail.rows * 128
      p.store("shared", Mem(base + (swizzle ^ place), offset), [pair], when=inside)

  # One tile.

  def _multiply_keys(self, scores: list[Reg], stage: Reg) -> None:
    """Starts S of the tile in a stage, each word of codes as soon as it is wide."""
    p, tail = self.p, self.tail
    codes = stage + self.warp * (CODES // WARPS)
    scales = stage + (self.warp * (SCALES // WARPS) + 2 * CODES)
    top, bottom = (self.keys.key_words(p, self.lane, codes, scales, half) for half in (0, 8))
    low = self._descriptor(self.smem)
    fresh = True
    for word in range(HEAD_DIM // 4 // 8):
      pairs = [self.keys.widen_word(p, *of_row[word]) for of_row in (top, bottom)]
      p.emit("wgmma.fence.sync.aligned")
      for step in range(2):
        i = 2 * word + step  # of 16 columns
        near, far = (of_row[2 * step : 2 * step + 2] for of_row in pairs)
        for operand in range(tail.q_operands):
          offset = operand * tail.rows * 256 + (i // 4) * tail.rows * 128 + (i % 4) * 32
          a = [near[0], far[0], near[1], far[1]]
          self._wgmma(scores, a, self._matrix(low, offset), accumulate=not fresh)
          fresh = False
    p.emit("wgmma.commit_group.sync.aligned")

  def _wgmma(self, acc: list[Reg], a: list[Reg], b: Reg, accumulate: bool = True) -> None:
    op = f"wgmma.mma_async.sync.aligned.m64n{self.tail.rows}k16.f32.f16.f16"
    self.p.emit(op, acc, a, b, self.yes if accumulate else self.no, 1, 1, 0)

  def _tile(self) -> None:
    p, tail = self.p, self.tail
    key = (self.first_tile + self.done) * TILE
    stage = self._stage(self.slot)
    # S of the next tile comes first; of the last one once more where there is none.
    last = (self.done + 1) >= self.count
    flips = self.slot.eq(tail.stages - 1)
    next_slot = p.select(last, self.slot, self._after(self.slot))
    next_phase = p.select(last, self.phase, p.select(flips, self.phase ^ 1, self.phase))
    next_full = Mem(self.barriers + next_slot * 8)
    is_full = copies.is_over(p, next_full, next_phase)  # asked early, as the answer takes a while

    raw_v_scales = self._load_v_scales(stage, key)
    self._store_probabilities(self.scores)
    self._convert_v_scales(raw_v_scales)
    p.emit("fence.proxy.async.shared::cta")
    p.sync_warp()
    with p.when(is_full, unless=True):
      copies.wait(p, next_full, next_phase)
    self._multiply_keys(self.scores, self._stage(next_slot))
    # P is there, and all warps are past the stage before this one.
    with p.when(p.new("p", "bar.red.or.pred", 0, THREADS, self.too_large)):
      self._do_again(stage, key)
    v_words, v_scales = self._load_v_words(stage), self._load_v_factors()
    for total, of_tile in zip(self.sum, self.tile_sums, strict=True):
      p.set(total, total + of_tile)
    p.emit("wgmma.wait_group.sync.aligned", 1)  # O of the tile before: its V may go
    self._multiply_values(v_words, v_scales)
    with p.when(self.done.ne(0) & (self.issued < self.count)):
      self._issue()
    p.emit("wgmma.wait_group.sync.aligned", 1)  # S of the next tile
    self._finish_scores(self.scores, p.select(last, key, key + TILE))
    p.set(self.phase, p.select(flips, self.phase ^ 1, self.phase))
    p.set(self.slot, self._after(self.slot))
    p.set(self.p_index, p.select(self.p_index.eq(P_BUFFERS - 1), 0, self.p_index + 1))

  def _finish_scores(self, scores: list[Reg], key: Reg) -> None:
    """Scores as they come from the product become those that P is made of."""
    if self.tail.soft_cap is not None:
      self._cap_scores(scores, self.tail.soft_cap)
    self._mask(scores, key)

  def _do_again(self, stage: Reg, key: Reg) -> None:
    """P of a tile with new references. Its scores are gone, those of the next tile are there."""
    p = self.p
    p.emit("wgmma.wait_group.sync.aligned", 0)
    scores = p.registers("f", self.tail.rows // 2)
    self._multiply_keys(scores, stage)
    p.emit("wgmma.wait_group.sync.aligned", 0)
    self._finish_scores(scores, key)
    self._set_references(scores)
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

  def _cap_scores(self, scores: list[Reg], cap: float) -> None:
    """cap tanh(s / cap) = cap - 2 cap / (1 + exp(2 s / cap)), in log2 units."""
    p = self.p
    for x in scores:
      power = p.exp2(x * self.scale * (2.0 / cap))
      p.set(x, p.fma(p.reciprocal(power + 1.0), -2.0 * cap * LOG2_E, cap * LOG2_E))

  def _mask(self, scores: list[Reg], key: Reg) -> None:
    """-inf where a row does not see a key, in tiles that have such."""
    p, tail = self.p, self.tail
    mine = key + self.warp * 16 + self.lane.g
    with p.when(self.work.is_partial(key)):
      for j in range(tail.rows // 8):
        for k in range(2):
          unseen = self.work.unseen_by(self.lane.c * 2 + (8 * j + k))
          for half in range(2):
            x = scores[4 * j + 2 * half + k]
            p.set(x, p.select(unseen(mine + 8 * half if half else mine), NEG_INF, x))

  def _set_references(self, scores: list[Reg]) -> None:
    """References of the rows, from their largest in this tile; O and sums follow."""
    p, tail = self.p, self.tail
    p.emit("wgmma.wait_group.sync.aligned", 0)
    first_key = self.lane.g.eq(0)
    columns = [(j, k) for j in range(tail.rows // 8) for k in range(2)]
    mine = self.smem + self.lane.c * 8 + self.warp * (4 * tail.rows)
    for j, k in columns:
      top = p.maximum(scores[4 * j + k], scores[4 * j + 2 + k])
      for step in (4, 8, 16):
        top = p.maximum(top, p.shuffle_xor(top, step))
      at = Mem(mine, tail.reduction + 4 * (8 * j + k))
      p.store("shared", at, [top], when=first_key)
    p.sync(THREADS)
    references = []
    for j, k in columns:
      at = self.smem + self.lane.c * 8
      tops = [
        p.load("shared", Mem(at, tail.reduction + 4 * (8 * j + k + w * tail.rows)), kind="f")[0]
        for w in range(WARPS)
      ]
      (old,) = self._references(4 * (2 * j + k), 1)
      new = p.minimum(p.fma(p.max_of(tops), self._factor * -1.0, HEADROOM), old)
      shrink = p.exp2(new - old)
      for x in [self.sum[2 * j + k], *(o[4 * j + k + half] for o in self.out for half in (0, 2))]:
        p.set(x, x * shrink)
      references.append(new)
    p.sync(THREADS)
    one = first_key & self.warp.eq(0)
    at = self.smem + self.lane.c * tail.reference_stride
    for (j, k), new in zip(columns, references, strict=True):
      p.store("shared", Mem(at, tail.references + 4 * (2 * j + k)), [new], when=one)
    p.sync(THREADS)

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
    low = self._descriptor(self.smem + (self.p_index * (tail.rows * TILE * 2) + tail.p_offset))
    for step in range(TILE // 16):
      near, far = (
        [p.mul_f16x2(pair, scales[i]) for pair in e2m1_as_f16(p, words[i])]
        for i in (2 * step, 2 * step + 1)
      )
      b = self._matrix(low, 32 * step)
      p.emit("wgmma.fence.sync.aligned")
      for product, out in enumerate(self.out):
        i = 2 * product
        self._wgmma(out, [near[i], near[i + 1], far[i], far[i + 1]], b)
    p.emit("wgmma.commit_group.sync.aligned")

  # The end of a segment.

  def _finish(self) -> None:
    p, tail = self.p, self.tail
    columns = [(j, k) for j in range(tail.rows // 8) for k in range(2)]
    at = self.smem + self.lane.c * 8
    for (j, k), total in zip(columns, self.sum, strict=True):
      for step in (4, 8, 16):
        total = total + p.shuffle_xor(total, step)
      place = Mem(at + self.warp * (4 * tail.rows), tail.reduction + 4 * (8 * j + k))
      p.store("shared", place, [total], when=self.lane.g.eq(0))
    p.sync(THREADS)
    (v_global,) = p.load(
      "global.nc", Mem(p.address(p.pointer("v_global"), self.work.head, 4)), kind="f"
    )
    out_scale = v_global * self.keys.unit
    slot = self.work.tell_pieces(self.thread)
    for j, k in columns:
      sums = [
        p.load("shared", Mem(at, tail.reduction + 4 * (8 * j + k + w * tail.rows)), kind="f")[0]
        for w in range(WARPS)
      ]
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
