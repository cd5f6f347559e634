"""The warpgroup that attends: a query tile's rows times wide tiles of K and V. PTX.

    S = q K^T    P = exp2(c S + r)    O += P V    c = sm_scale k_global_scale / ln 2

q and P are left operands in registers, K and V lie in the slots that others fill (wide_slots.py),
as in FlashAttention-3 (arXiv 2407.08608):

    tensor cores   S of tile i    | O of i - 1, still  |  S of i + 1, O of i   | ...
    warps                         | P of i             |                       | P of i + 1 ...

While P is made, another warpgroup's products run. The exponents of a row are taken against a
reference (softmax.py) that hardly ever changes, so hardly ever anything is rescaled. float16 has
full precision down to 2^-14: keys that weigh 2^-18 of the tile's largest have all its digits.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

from nvfp4_pallas.kernels import wgmma
from nvfp4_pallas.kernels.mma_fragments import NvFp4Fragments
from nvfp4_pallas.kernels.ptx import Mem, Ptx, Reg
from nvfp4_pallas.kernels.q_operands import in_order, load_tile
from nvfp4_pallas.kernels.results import NEG_INF, store_piece, store_result
from nvfp4_pallas.kernels.softmax import (
  FIRST_P,
  LATER_P,
  MOST_P,
  NO_REFERENCE,
  cap,
  factor_of_scores,
)
from nvfp4_pallas.kernels.wide_layout import HEAD_DIM, PARTS, ROWS, THREADS, WARPS, Wide
from nvfp4_pallas.kernels.wide_slots import Slots

ROWS_OF_LANE = range(2)  # of the 16 that a warp has of a product: g and g + 8


class Consumer:
  """Written where the warpgroup's program goes."""

  work: Any  # a QueryTile; a QueryWalk where its keys may be cut into pieces

  def __init__(
    self,
    p: Ptx,
    wide: Wide,
    smem: Reg,
    warp: Reg,
    lane: Reg,
    *,
    index: Reg | int = 0,
    pieces: bool = True,
  ):
    """
    Args:
      index: which of the consumers it is.
      pieces: whether a query tile's keys may be cut.
    """
    self.pieces = pieces
    self.p, self.wide = p, wide
    self.first_row = index * ROWS
    self.q_smem = smem + index * wide.q_bytes
    self.reduction = smem + (index * 16 + wide.reduction)
    self.warp, self.g, self.c = warp, lane >> 2, lane & 3
    self.first_lane = lane.eq(0)
    self.codes = NvFp4Fragments(HEAD_DIM)
    self.keys, self.values = (Slots(p, wide, smem, pool) for pool in range(2))
    yes = p.u32(0)
    self.yes, self.no = yes.eq(0), yes.ne(0)

  def _row(self, half: int) -> Reg:
    """Of the query tile, one of the lane's two rows."""
    return self.warp * 16 + self.g + (self.first_row + 8 * half)

  def segment(self, work: Any) -> None:
    p, wide = self.p, self.wide
    self.work = work
    self._load_q()
    self.out = [p.f32(0.0) for _ in range(HEAD_DIM // 2)]
    self.sums = [p.f32(0.0) for _ in ROWS_OF_LANE]
    self.references = [p.f32(NO_REFERENCE) for _ in ROWS_OF_LANE]
    self.limits = [p.f32(NEG_INF) for _ in ROWS_OF_LANE]
    self.scores = p.registers("f", self.wide.tile // 2)
    self.weights = p.registers("r", self.wide.tile // 4)  # P, pairs of keys
    p.emit("fence.proxy.async.shared::cta")
    p.sync(THREADS)
    self.q = self._load_fragments() if wide.q_in_registers else None

    key = p.u32(work.first_tile * self.wide.tile)
    end = key + work.count * self.wide.tile
    self.keys.wait_full()
    self._multiply_keys()
    wgmma.wait(p, 0)
    self.keys.tell_empty(self.first_lane)
    self._finish_scores(key)
    self._set_references(self._tops(), FIRST_P)
    is_first = p.u32(1)
    with p.loop() as tiles:
      self._make_weights()
      with p.when(is_first.eq(0)):
        self.values.tell_empty(self.first_lane)
      p.set(is_first, 0)
      p.set(key, key + self.wide.tile)
      tiles.leave_if(key >= end)
      self.keys.wait_full()
      self._multiply_keys()
      self.values.wait_full()
      self._multiply_values()
      wgmma.wait(p, 1)  # S
      self.keys.tell_empty(self.first_lane)
      self._finish_scores(key)
    self.values.wait_full()
    self._multiply_values()
    wgmma.wait(p, 0)
    self.values.tell_empty(self.first_lane)
    self._finish()

  # q, in shared memory.

  def _load_q(self) -> None:
    """q to shared memory: a left operand that lies as right ones do, columns in K's order."""
    p, wide = self.p, self.wide
    quarters, unit = load_tile(
      p,
      self.work,
      rows=ROWS,
      first_row=self.first_row,
      operands=wide.q_operands,
      dim=HEAD_DIM,
      negate=wide.sm_scale < 0,
      largest_of_warps=self._largest_of_warps,
    )
    for quarter in quarters:
      for operand, words in enumerate(quarter.operands):
        pairs = in_order(p, words, self.codes.word_pairs())
        row, part = quarter.row, self.q_smem + (quarter.c >> 1) * (ROWS * wgmma.ROW)
        for j in range(4):
          piece = (quarter.c & 1) * 64 + 16 * j
          at = part + (row * wgmma.ROW + wgmma.place(row, piece))
          to = Mem(at, wide.q_place(operand, 0))
          p.store("shared", to, pairs[4 * j : 4 * j + 4])
    self.scale = factor_of_scores(p, self.work.head, wide.sm_scale, unit * self.codes.unit)

  def _largest_of_warps(self, of_warp: Reg) -> Reg:
    """Once all warps are here, and so past the last segment's q."""
    p = self.p
    p.store("shared", Mem(self.reduction + self.warp * 4), [of_warp], when=self.first_lane)
    p.sync(THREADS)
    return p.max_of(p.load("shared", Mem(self.reduction), WARPS))

  def _load_fragments(self) -> list[list[Reg]]:
    """The warp's rows of q as left operands in registers, which spares shared memory their reads.

    Matrix m of four: rows 8 of (m % 2), columns 8 of (m / 2).
    """
    p, fragments = self.p, []
    row = self.warp * 16 + (p.thread & 15)
    at = self.q_smem + row * wgmma.ROW
    for part in range(PARTS):
      for step in range(0, wgmma.ROW, wgmma.STEP):
        # Its second 16 bytes for the upper lanes.
        piece = ((row & 7) * 16) ^ ((p.thread & 16) ^ step)
        four = p.registers("r", 4)
        where = Mem(at + piece, self.wide.q_place(0, part))
        p.emit("ldmatrix.sync.aligned.m8n8.x4.shared.b16", four, where)
        fragments.append(four)
    return fragments

  # One tile.

  def _multiply_keys(self) -> None:
    """Starts S of the tile that K's slot holds."""
    p, wide = self.p, self.wide
    q, k = wgmma.descriptor(self.q_smem), wgmma.descriptor(self.keys.address)
    wgmma.begin(p)
    for i in range(HEAD_DIM // 16):
      part, step = divmod(i * wgmma.STEP, wgmma.ROW)
      b = wgmma.right(p, k, part * wide.part + step)
      if self.q is not None:
        wgmma.multiply(p, self.scores, self.q[i], b, self.yes if i else self.no)
        continue
      for operand in range(wide.q_operands):
        a = wgmma.right(p, q, wide.q_place(operand, part) + step)
        wgmma.multiply_shared(p, self.scores, a, b, self.yes if i or operand else self.no)
    wgmma.commit(p)

  def _multiply_values(self) -> None:
    """Starts O += P V of the tile that V's slot holds."""
    p = self.p
    v = wgmma.across(wgmma.descriptor(self.values.address), self.wide.part)
    wgmma.begin(p)
    for i in range(self.wide.tile // 16):
      b = wgmma.right(p, v, i * 16 * wgmma.ROW)
      a = self.weights[4 * i : 4 * i + 4]
      wgmma.multiply(p, self.out, a, b, self.yes, rows_of_k=True)
    wgmma.commit(p)

  def _finish_scores(self, key: Reg) -> None:
    """Scores as they come from the product become those that P is made of."""
    p, soft_cap = self.p, self.wide.soft_cap
    if soft_cap is not None:
      for x in self.scores:
        p.set(x, cap(p, x, self.scale, soft_cap))
    with p.when(self.work.is_partial(key, self.wide.tile)):
      mine = key + self.c * 2
      for half in ROWS_OF_LANE:
        unseen = self.work.unseen_by(self._row(half))
        for j, pair in enumerate(self._scores_of(half)):
          for k, x in enumerate(pair):
            p.set(x, p.select(unseen(mine + (8 * j + k)), NEG_INF, x))

  def _scores_of(self, half: int) -> list[list[Reg]]:
    """Pairs of a row's scores: keys 8 j + 2 c and the next."""
    return [
      self.scores[4 * j + 2 * half : 4 * j + 2 * half + 2] for j in range(self.wide.tile // 8)
    ]

  @property
  def _factor(self) -> Reg:
    """What brings scores to log2 units; with a cap they are in them."""
    return self.scale if self.wide.soft_cap is None else self.p.f32(1.0)

  def _tops(self) -> list[Reg]:
    """The lane's largest scores of its rows."""
    return [self.p.max_of(_flat(self._scores_of(half))) for half in ROWS_OF_LANE]

  def _set_references(self, tops: list[Reg], largest_p: float) -> None:
    """References of the lane's rows from their largest scores in a tile; O and sums follow."""
    p, factor = self.p, self._factor
    for half, (top, reference) in enumerate(zip(tops, self.references, strict=True)):
      for step in (1, 2):  # over the lanes that have the row
        top = p.maximum(top, p.shuffle_xor(top, step))
      new = p.minimum(p.fma(top, factor * -1.0, largest_p), reference)
      shrink = p.exp2(new - reference)
      of_row = [self.out[4 * j + 2 * half + k] for j in range(HEAD_DIM // 8) for k in range(2)]
      for x in (self.sums[half], *of_row):
        p.set(x, x * shrink)
      p.set(reference, new)
      p.set(self.limits[half], (p.f32(MOST_P) - new) * p.reciprocal(factor))

  def _make_weights(self) -> None:
    """P of the tile, and its sums. Waits for O of the tile before, which reads the last P."""
    p, factor = self.p, self._factor
    tops = self._tops()
    above = [top > limit for top, limit in zip(tops, self.limits, strict=True)]
    with p.when(p.any_lane(functools.reduce(operator.or_, above))):
      wgmma.wait(p, 0)
      self._set_references(tops, LATER_P)
    for half, (reference, total) in enumerate(zip(self.references, self.sums, strict=True)):
      scores = _flat(self._scores_of(half))
      for x in scores:
        p.set(x, p.exp2(p.fma(x, factor, reference)))
      p.set(total, total + _sum(scores))
    wgmma.wait(p, 0)
    for half in ROWS_OF_LANE:
      for j, (x, y) in enumerate(self._scores_of(half)):
        p.emit("cvt.rn.f16x2.f32", self.weights[2 * j + half], y, x)

  # The end of a segment.

  def _finish(self) -> None:
    p = self.p
    at = p.address(p.pointer("v_global"), self.work.head, 4)
    (v_global,) = p.load("global.nc", Mem(at), kind="f")
    out_scale = v_global * self.codes.unit
    slot = self.work.tell_pieces(p.thread) if self.pieces else None
    for half in ROWS_OF_LANE:
      total = self.sums[half]
      for step in (1, 2):
        total = total + p.shuffle_xor(total, step)
      empty = total.eq(0.0)
      factor = p.select(empty, 0.0, p.reciprocal(total) * out_scale)
      lse = p.select(empty, NEG_INF, p.log2(total) - self.references[half])
      row = self._row(half)
      real = self.work.is_row(row)
      whole = real if slot is None else real & self.work.is_whole
      out_row = self.work.q_row(self.work.row_or_last(row))
      for first in range(0, HEAD_DIM // 8, 4):
        values = [x * factor for x in self._columns(first, half)]
        column = (self.c + first) * 8
        store_result(p, self.wide.out_dtype, HEAD_DIM, out_row, column, values, lse, whole)
        if slot is not None:
          piece = real & ~self.work.is_whole
          store_piece(p, HEAD_DIM, slot * ROWS + row, column, values, lse, piece)

  def _columns(self, first: int, half: int) -> list[Reg]:
    """Eight neighbouring columns of the lane's row, from 8 (first + c) on.

    Of each eight columns the lane c has c and c + 4, so four lanes exchange those of four eights.
    """
    columns = []
    for k in range(2):
      of_eights = [self.out[4 * (first + i) + 2 * half + k] for i in range(4)]
      columns += _transpose(self.p, of_eights, self.c)
    return columns


def _flat(pairs: list[list[Reg]]) -> list[Reg]:
  return [x for pair in pairs for x in pair]


def _sum(values: list[Reg]) -> Reg:
  """By a tree, which is short."""
  while len(values) > 1:
    values = [a + b for a, b in zip(values[::2], values[1::2], strict=True)]
  return values[0]


def _transpose(p: Ptx, values: list[Reg], c: Reg) -> list[Reg]:
  """Four lanes, four values each: value i of lane c becomes value c of lane i."""
  for bit in (1, 2):
    upper = (c & bit).ne(0)
    values = list(values)
    for i in (i for i in range(4) if not i & bit):
      mine, other = values[i], values[i + bit]
      # A lower lane gives its upper value and gets the upper lane's lower one.
      got = p.shuffle_xor(p.select(upper, mine, other), bit)
      values[i], values[i + bit] = p.select(upper, got, mine), p.select(upper, other, got)
  return values
