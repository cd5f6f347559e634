"""Decode's program for a few query tokens a sequence: up to 16 columns of S^T, NVFP4. PTX.

What decode_attend.py does, with three differences. A column is a query head of one of the tokens of
a query tile; each sees other keys, so masks are by column, and a column may see none of a tile. The
line of work counts query tiles and heads where decode has heads. And q lies in shared memory, as
O takes 64 registers for 16 columns.
"""

from __future__ import annotations

import dataclasses

from nvfp4_pallas.kernels.decode_attend import ROWS, Attend
from nvfp4_pallas.kernels.decode_layout import COLUMNS, THREADS, Problem
from nvfp4_pallas.kernels.decode_work import Cut
from nvfp4_pallas.kernels.mma_fragments import NvFp4Fragments
from nvfp4_pallas.kernels.ptx import Mem, Ptx, Reg
from nvfp4_pallas.kernels.query_walk import QueryWalk
from nvfp4_pallas.kernels.results import NEG_INF, store_piece, store_result

MAX_COLUMNS = 2 * COLUMNS  # a warp brings q of eight


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
  work: QueryWalk

  def _find_work(self, scope) -> QueryWalk:
    problem = self.problem
    return QueryWalk(
      self.p,
      self.cut,
      self.lane.index,
      scope,
      width=problem.width,
      group=problem.group,
      causal=problem.causal,
    )

  # q in shared memory: of each k-step the two words of every lane.

  def _load_q(self) -> None:
    p, problem = self.p, self.problem
    self.q_smem = p.smem + q_offset(self.ring.smem_bytes)
    units = self.q_smem + problem.q_bytes
    with p.when(self.warp < problem.column_tiles):
      column = self.warp * COLUMNS + self.lane.g
      # Columns past the last one compute it again; nobody reads them.
      row = self.work.q_row(self.work.row_or_last(column))
      operands, unit = self._load_row(row, self.lane.c)
      p.store("shared", Mem(units + column * 4), [unit], when=self.lane.c.eq(0))
      for operand, pairs in enumerate(operands):
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
    self.key = tile * self.cut.tile
    unseen = self.work.unseen_by_all()
    return lambda token: ~unseen(self.key + token), self.work.is_partial(self.key, self.cut.tile)

  def _mask(self, scores, seen) -> None:
    del seen
    p = self.p
    for column in range(2 * self.problem.column_tiles):
      tile, parity = divmod(column, 2)
      unseen = self.work.unseen_by(self.lane.c * 2 + (COLUMNS * tile + parity))
      for i, of_rows in enumerate(scores):
        for half in range(2):
          key = self.key + self.lane.slot_token + (i * ROWS + 8 * half)
          x = of_rows[tile][parity + 2 * half]
          p.set(x, p.select(unseen(key), NEG_INF, x))

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

  def _slot(self) -> Reg:
    return self.work.tell_pieces(self.thread)

  def _store(self, slot, head, column, out, lse, real) -> None:
    p, problem, dim = self.p, self.problem, self.problem.values.head_dim
    inside = self.work.is_row(head)
    inside = inside if real is None else inside & real
    whole, piece = self.work.is_whole & inside, inside & ~self.work.is_whole
    out = p.select(lse.eq(NEG_INF), 0.0, out)  # where no key is seen it is 0 / 0
    row = self.work.q_row(head)
    store_result(p, problem.out_dtype, dim, row, column, [out], lse, whole)
    store_piece(p, dim, slot * problem.columns + head, column, [out], lse, piece)
