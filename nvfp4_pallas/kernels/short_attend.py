"""Decode's program for a few query tokens a sequence: up to 32 columns of S^T, NVFP4. PTX.

What decode_attend.py does, with three differences. A column is a query head of one of the tokens of
a query tile; each sees other keys, so masks are by column, and a column may see none of a tile. The
line of work counts query tiles and heads where decode has heads. And q lies in shared memory, as
its fragments would take the registers that O needs: 128 for 32 columns.
"""

from __future__ import annotations

import dataclasses

from nvfp4_pallas.kernels.decode_attend import (
  LOG2_E,
  NEG_INF,
  ROWS,
  Attend,
  q_as_f16,
  store_out,
)
from nvfp4_pallas.kernels.decode_layout import COLUMNS, THREADS, WARPS, Problem
from nvfp4_pallas.kernels.decode_work import Cut, find_run
from nvfp4_pallas.kernels.mma_fragments import NvFp4Fragments
from nvfp4_pallas.kernels.ptx import Mem, Ptx, Reg
from nvfp4_pallas.kernels.q_operands import in_order

MAX_COLUMNS = COLUMNS * WARPS  # a warp brings q of eight columns


@dataclasses.dataclass(frozen=True)
class Short(Problem):
  """Problem with query tiles of `width` tokens; `causal` as in AttentionSpec."""

  keys: NvFp4Fragments
  values: NvFp4Fragments
  causal: bool = True

  @property
  def inputs(self) -> tuple[str, ...]:
    return (*super().inputs, "cu_q_lens")

  @property
  def q_bytes(self) -> int:
    """q's fragments in shared memory."""
    return self.column_tiles * self.q_operands * COLUMNS * self.keys.head_dim * 2

  def smem_bytes(self, ring_bytes: int) -> int:
    """Of a block: the ring, q, and of each column its unit."""
    return q_offset(ring_bytes) + self.q_bytes + 4 * MAX_COLUMNS


def q_offset(ring_bytes: int) -> int:
  return -(-ring_bytes // 16) * 16


def attend(problem: Short, cut: Cut, slots: int) -> Ptx:
  """The program; its pointers are Short.inputs and decode_attend.POINTERS_OUT."""
  return _Attend(problem, cut, slots).p


class _Attend(Attend):
  problem: Short

  # Work: query tiles and heads of sequences.

  def _find_work(self, scope) -> None:
    p, cut = self.p, self.cut

    def units_of(seq, kv_len):
      begin, end, real = p.u32(0), p.u32(0), seq < cut.num_seqs
      at = p.address(p.pointer("cu_q_lens"), seq, 4)
      p.load_into([begin], "global.nc", Mem(at), when=real)
      p.load_into([end], "global.nc", Mem(at, 4), when=real)
      q_len = end - begin
      units = p.cdiv(self._tiles_of(kv_len, q_len), cut.unit)
      return units * p.cdiv(q_len, self.problem.width)

    kv_lens = p.pointer("kv_lens")
    self.run = find_run(p, cut, p.program, self.lane.index, kv_lens, scope, units_of)
    self.unit, self.seq = p.u32(self.run.begin), p.u32(self.run.seq)
    self.kv_len, self.q_begin, self.q_len = p.u32(0), p.u32(0), p.u32(0)
    self.units = p.u32(0)
    self._load_seq()
    inside = self.run.begin - self.run.seq_begin
    # A sequence's query tiles and heads, tile by tile; `unit_of_head` counts units of one.
    self.pair, self.unit_of_head = p.u32(inside // self.units), p.u32(inside % self.units)

  def _load_seq(self) -> None:
    p = self.p
    at = p.address(p.pointer("cu_q_lens"), self.seq, 4)
    (begin,), (end,) = p.load("global.nc", Mem(at)), p.load("global.nc", Mem(at, 4))
    p.set(self.kv_len, self._load_len(self.seq))
    p.set(self.q_begin, begin)
    p.set(self.q_len, end - begin)
    p.set(self.units, p.cdiv(self._tiles(), self.cut.unit))

  def _next_head(self) -> None:
    p = self.p
    with p.when(self.unit_of_head >= self.units):
      p.set(self.unit_of_head, 0)
      p.set(self.pair, self.pair + 1)
      pairs = p.cdiv(self.q_len, self.problem.width) * self.cut.kv_heads
      with p.when(self.pair >= pairs):
        p.set(self.pair, 0)
        with p.loop() as empty:
          p.set(self.seq, self.seq + 1)
          self._load_seq()
          empty.leave_if(self.units.ne(0) & self.q_len.ne(0))

  def _first_tile_of(self, kv_len: Reg, q_len: Reg) -> Reg | None:
    """Of the keys that the sequence's first new token sees."""
    if self.problem.window is None:
      return None
    unseen = kv_len + 1 - q_len - self.problem.window  # negative: none
    return self.p.select(unseen.above(0), unseen, 0) // self.cut.tile

  def _tiles_of(self, kv_len: Reg, q_len: Reg) -> Reg:
    tiles, first = self.p.cdiv(kv_len, self.cut.tile), self._first_tile_of(kv_len, q_len)
    return tiles if first is None else tiles - first

  def _first_tile(self) -> Reg | None:
    return self._first_tile_of(self.kv_len, self.q_len)

  def _tiles(self) -> Reg:
    return self._tiles_of(self.kv_len, self.q_len)

  def _segment(self) -> None:
    p = self.p
    query_tile = self.pair // self.cut.kv_heads
    self.head = self.pair - query_tile * self.cut.kv_heads
    self.first_token = query_tile * self.problem.width  # of the sequence's
    self.tokens = p.minimum(self.q_len - self.first_token, self.problem.width)
    self.position = self.kv_len - self.q_len + self.first_token  # signed; of the first token
    super()._segment()

  # q in shared memory: of each k-step the two words of every lane.

  def _load_q(self) -> None:
    p, problem = self.p, self.problem
    dim = problem.keys.head_dim
    self.q_smem = p.smem + q_offset(self.ring.smem_bytes)
    units = self.q_smem + problem.q_bytes
    with p.when(self.warp < problem.column_tiles):
      column = self.warp * COLUMNS + self.lane.g
      # Columns past the last one compute it again; nobody reads them.
      row = self._out_row(p.minimum(column, self.tokens * problem.group - 1))
      operands = []
      for operand in range(problem.q_operands):
        at = p.address(
          p.pointer("q"), (row * problem.q_operands + operand) * 4 + self.lane.c, dim // 4 * 2
        )
        words = []
        for start in range(0, dim // 4 * 2, 16):
          words += p.load("global.nc", Mem(at, start), 4)
        if problem.sm_scale < 0:
          words = [word ^ "0x80008000" for word in words]
        operands.append(words)
      operands, unit = q_as_f16(p, operands)
      p.store("shared", Mem(units + column * 4), [unit], when=self.lane.c.eq(0))
      for operand, words in enumerate(operands):
        pairs = in_order(p, words, problem.keys.word_pairs())
        for step in range(0, len(pairs), 2):
          place = self._q_place(operand, step // 2)
          at = self.q_smem + (self.warp * (self._q_tile_bytes) + self.lane.index * 8)
          p.store("shared", Mem(at, place), pairs[step : step + 2])
    p.sync(THREADS)
    self.q_units = [
      p.load("shared", Mem(units + self.lane.c * 8, 4 * (COLUMNS * tile + parity)), kind="f")[0]
      for tile in range(problem.column_tiles)
      for parity in range(2)
    ]

  @property
  def _q_tile_bytes(self) -> int:
    return self.problem.q_bytes // self.problem.column_tiles

  def _q_place(self, operand: int, step: int) -> int:
    return (operand * (self.problem.keys.head_dim // ROWS) + step) * 256

  def _out_row(self, column: Reg) -> Reg:
    """Which row of q and out, counted in query heads, a column is."""
    group = self.problem.group
    token = column // group
    head = column - token * group + self.head * group
    return (self.q_begin + self.first_token + token) * (self.cut.kv_heads * group) + head

  # One tile.

  def _scores(self, codes: Reg, scales: Reg) -> list[list[list[Reg]]]:
    """As decode's, word of codes by word of codes, as registers are short."""
    p, problem = self.p, self.problem
    q = self.q_smem + self.lane.index * 8
    all_scores = []
    for first in range(0, self.cut.tile, ROWS):
      top, bottom = (
        problem.keys.key_words(p, self.lane, codes, scales, first + half) for half in (0, 8)
      )
      of_rows = [[p.f32(0.0) for _ in range(4)] for _ in range(problem.column_tiles)]
      for word, (near, far) in enumerate(zip(top, bottom, strict=True)):
        near, far = problem.keys.widen_word(p, *near), problem.keys.widen_word(p, *far)
        for i in (0, 2):
          a = [near[i], far[i], near[i + 1], far[i + 1]]
          for tile, acc in enumerate(of_rows):
            for operand in range(problem.q_operands):
              place = tile * self._q_tile_bytes + self._q_place(operand, 2 * word + i // 2)
              p.mma(problem.keys.operand, acc, a, p.load("shared", Mem(q, place), 2))
      all_scores.append(
        [
          [self._score(x, 2 * tile + i % 2) for i, x in enumerate(acc)]
          for tile, acc in enumerate(of_rows)
        ]
      )
    return all_scores

  def _visibility(self, tile: Reg):
    """Whether any column sees a key of the tile, and whether any does not."""
    p, problem = self.p, self.problem
    self.key = tile * self.cut.tile
    newest = self.position if problem.causal else self.kv_len - 1  # of what the first token sees
    partial = (self.key + (self.cut.tile - 1)).above(newest)
    end = self.kv_len
    if problem.causal:
      end = p.new("r", "min.s32", end, self.position + self.tokens)
    if problem.window is None:
      return lambda token: end.above(self.key + token), partial
    # The last token's window begins latest.
    partial = partial | (self.position + self.tokens - problem.window).above(self.key)
    oldest = self.position - problem.window  # what the first token just does not see

    def seen(token: Reg) -> Reg:
      key = self.key + token
      return end.above(key) & key.above(oldest)

    return seen, partial

  def _mask(self, scores, seen) -> None:
    del seen
    p, problem = self.p, self.problem
    for column in range(2 * problem.column_tiles):
      tile, parity = divmod(column, 2)
      token = (self.lane.c * 2 + (COLUMNS * tile + parity)) // problem.group
      position = self.position + token
      end = position if problem.causal else self.kv_len - 1
      for i, of_rows in enumerate(scores):
        for half in range(2):
          key = self.key + self.lane.slot_token + (i * ROWS + 8 * half)
          unseen = key.above(end)
          if problem.window is not None:
            unseen = unseen | (position - (problem.window - 1)).above(key)
          x = of_rows[tile][parity + 2 * half]
          p.set(x, p.select(unseen, NEG_INF, x))

  def _finite(self, top: Reg) -> Reg:
    """A maximum that scores can be taken against: 0 where a column has seen nothing yet."""
    return self.p.select(top.eq(NEG_INF), 0.0, top)

  def _add_values(self, scores, codes: Reg, scales: Reg) -> None:
    p, values = self.p, self.problem.values
    for i, of_rows in enumerate(scores):
      b = [
        [p.transpose(p.pack("f16", acc[2 * half], acc[2 * half + 1])) for half in range(2)]
        for acc in of_rows
      ]
      near, far = (
        values.value_words(p, self.lane, codes, scales, i * ROWS + half) for half in (0, 8)
      )
      for word, (top, bottom) in enumerate(zip(near, far, strict=True)):
        top, bottom = values.widen_word(p, *top), values.widen_word(p, *bottom)
        for j in (0, 2):
          a = [top[j], top[j + 1], bottom[j], bottom[j + 1]]
          for tile, of_tile in enumerate(b):
            p.mma("f16", self.out[tile][2 * word + j // 2], a, of_tile)

  # The end of a segment.

  def _slot(self, pair: Reg) -> Reg:
    """The piece's slot; the first piece also tells the join, for each token, where pieces are."""
    del pair
    p, run = self.p, self.run
    slot = p.program * 2 + p.select(self.is_first, 1, 0)
    last = run.block_of(p, self.unit + self.units - 1)
    pieces = p.select(self.is_whole, 1, last - p.program + 1)
    mine = self.is_first & (self.thread < self.tokens)
    token = self.q_begin + self.first_token + self.thread
    at = Mem(p.address(p.pointer("piece_slots"), token * self.cut.kv_heads + self.head, 16))
    first_row = self.thread * self.problem.group
    p.store("global", at, [slot, pieces, first_row, p.u32(0)], when=mine)
    return slot

  def _store(self, pair, slot, head, column, out, lse, real) -> None:
    del pair
    p, dim = self.p, self.problem.values.head_dim
    inside = head < self.tokens * self.problem.group
    inside = inside if real is None else inside & real
    whole, piece = self.is_whole & inside, inside & ~self.is_whole
    first = column.eq(0)
    out = p.select(lse.eq(NEG_INF), 0.0, out)  # where no key is seen it is 0 / 0
    row = self._out_row(head)
    store_out(p, self.problem.out_dtype, row * dim + column, out, whole)
    at = Mem(p.address(p.pointer("lse"), row, 4))
    p.store("global", at, [lse * (1.0 / LOG2_E)], when=whole & first)
    row = slot * self.problem.columns + head
    at = Mem(p.address(p.pointer("pieces"), row * dim + column, 4))
    p.store("global", at, [out], when=piece)
    p.store("global", Mem(p.address(p.pointer("piece_lse"), row, 4)), [lse], when=piece & first)
