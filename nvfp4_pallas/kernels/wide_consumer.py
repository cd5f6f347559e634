"""The warpgroup that attends: a query tile's rows times wide tiles of K and V. PTX.

    S = q K^T    P = exp2(c S + r)    O += P V    c = sm_scale k_global_scale / ln 2

P is a left operand in registers, q in registers or in shared memory, and K and V lie in the slots
that others fill (wide_slots.py), as in FlashAttention-3 (arXiv 2407.08608):

    tensor cores   S of tile i    | O of i - 1, still  |  S of i + 1, O of i   | ...
    warps                         | P of i             |                       | P of i + 1 ...

While P is made, another warpgroup's products run. The exponents of a row are taken against a
reference (softmax.py) that hardly ever changes, so hardly ever anything is rescaled. P has the type
of V. float16 has full precision down to 2^-14: keys that weigh 2^-18 of the tile's largest have all
its digits.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

from nvfp4_pallas.kernels import wgmma
from nvfp4_pallas.kernels.ptx import Mem, Ptx, Reg
from nvfp4_pallas.kernels.q_operands import load_tile
from nvfp4_pallas.kernels.results import (
  NEG_INF,
  is_half,
  pack_pair,
  store_piece,
  store_result,
  store_words,
)
from nvfp4_pallas.kernels.softmax import (
  FIRST_P,
  LATER_P,
  MOST_P,
  NO_REFERENCE,
  cap,
  factor_of_scores,
)
from nvfp4_pallas.kernels.wide_layout import ROWS, THREADS, WARPS, Wide
from nvfp4_pallas.kernels.wide_slots import Slots
from nvfp4_pallas.kernels.wide_tiles import Tiles

TURNS = 8  # the barrier of the first of two consumers; the other's is the next one
ROWS_OF_LANE = range(2)  # of the 16 that a warp has of a product: g and g + 8


@dataclasses.dataclass(frozen=True)
class _Row:
  """A row of the query tile at its end; registers.

  Attributes:
    row, real: its number, and whether there is such.
    out_row: of the results.
    factor: of O.
    lse: in log2 units.
  """

  row: Reg
  real: Reg
  out_row: Reg
  factor: Reg
  lse: Reg


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
    self.first_row, self.q_units = index * ROWS, smem + (index * (4 * ROWS) + wide.q_units(0))
    self.q_smem = smem + index * wide.q_bytes
    self.reduction = smem + (index * 16 + wide.reduction)
    self.warp, self.g, self.c = warp, lane >> 2, lane & 3
    self.first_lane = lane.eq(0)
    self.keys, self.values = (Slots(p, wide, smem, pool) for pool in range(2))
    yes = p.u32(0)
    self.yes, self.no = yes.eq(0), yes.ne(0)

  def _row(self, half: int) -> Reg:
    """Of the query tile, one of the lane's two rows."""
    return self.warp * 16 + self.g + (self.first_row + 8 * half)

  def segment(self, work: Any) -> None:
    p, wide = self.p, self.wide
    self.work = work
    self.k_global = self._global_scale("k", wide.keys)
    self._load_q()
    self.out = [p.f32(0.0) for _ in range(wide.values.head_dim // 2)]
    self.sums = [p.f32(0.0) for _ in ROWS_OF_LANE]
    self.references = [p.f32(NO_REFERENCE) for _ in ROWS_OF_LANE]
    self.limits = [p.f32(NEG_INF) for _ in ROWS_OF_LANE]
    self.scores = p.registers("f", self.wide.tile // 2)
    self.weights = p.registers("r", self.wide.tile // 4)  # P, pairs of keys
    if not wide.q_in_registers:
      p.emit("fence.proxy.async.shared::cta")
    p.sync(THREADS)
    self.q = self._load_fragments() if wide.q_in_registers else None
    self.scales = self._scales()

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
      self.values.wait_full()
      self._take_turn()
      self._multiply_keys()
      self._multiply_values()
      self._give_turn()
      wgmma.wait(p, 1)  # S
      self.keys.tell_empty(self.first_lane)
      self._finish_scores(key)
    self.values.wait_full()
    self._multiply_values()
    rows = self._close_rows(self._global_scale("v", wide.values))
    wgmma.wait(p, 0)
    self.values.tell_empty(self.first_lane)
    self._store(rows)

  # Turns of two consumers, whose products then do not mix: while one's run, the other makes P.

  def first_turn(self) -> None:
    """Before all segments: the first consumer's."""
    self._meet("bar.arrive", self.p.role.eq(1), 0)

  def last_turn(self) -> None:
    """After all: nobody may be left at a barrier."""
    self._meet("bar.sync", self.p.role.eq(0), 0)

  def _take_turn(self) -> None:
    if self.wide.in_turns:
      self.p.emit("bar.sync", self.p.role + TURNS, 2 * THREADS)

  def _give_turn(self) -> None:
    if self.wide.in_turns:
      self.p.emit("bar.arrive", (self.p.role ^ 1) + TURNS, 2 * THREADS)

  def _meet(self, op: str, who: Reg, turn: int) -> None:
    if self.wide.in_turns:
      with self.p.when(who):
        self.p.emit(op, TURNS + turn, 2 * THREADS)

  def _global_scale(self, name: str, tiles: Tiles) -> Reg:
    """Of the head; 1 where the pool has none. Asked for early, as the answer takes a while."""
    p = self.p
    if not tiles.has_global_scale:
      return p.f32(1.0)
    at = p.address(p.pointer(f"{name}_global"), self.work.head, 4)
    return p.load("global.nc", Mem(at), kind="f")[0]

  # q, in shared memory.

  def _load_q(self) -> None:
    """q to shared memory: a left operand that lies as right ones do, columns in K's order."""
    p, wide, keys = self.p, self.wide, self.wide.keys
    quarters, self.unit = load_tile(
      p,
      self.work,
      rows=ROWS,
      first_row=self.first_row,
      dim=keys.head_dim,
      operand=keys.operand,
      order=keys.order,
      levels=wide.q_levels,
      negate=wide.sm_scale < 0,
      largest_of_warps=self._largest_of_warps,
    )
    nbytes = keys.row_bytes // 4  # of a quarter
    for quarter in quarters:
      row, first = quarter.row, quarter.c * nbytes
      part = self.q_smem + (row * wgmma.ROW + (first // wgmma.ROW) * (ROWS * wgmma.ROW))
      for operand, words in enumerate(quarter.operands):
        for start in range(0, nbytes, 16):
          at = part + wgmma.place(row, (first + start) % wgmma.ROW)
          words_of_piece = words[start // 4 : start // 4 + 4]
          p.store("shared", Mem(at, wide.q_place(operand, 0)), words_of_piece)
      if quarter.unit is not None:
        p.store("shared", Mem(self.q_units + row * 4), [quarter.unit], when=quarter.c.eq(0))

  def _scales(self) -> list[Reg]:
    """c of the lane's two rows."""
    p, wide, work = self.p, self.wide, self.work
    if not wide.keys.as_e4m3:
      unit = self.unit * wide.keys.unit
      return [factor_of_scores(p, self.k_global, wide.sm_scale, unit)] * 2
    at = p.address(p.pointer("k_units"), work.pair(), 4)
    (k_unit,) = p.load("global.nc", Mem(at), kind="f")
    scales = []
    for half in ROWS_OF_LANE:
      at = Mem(self.q_units + (self.warp * 16 + self.g) * 4, 32 * half)
      (q_unit,) = p.load("shared", at, kind="f")
      scales.append(factor_of_scores(p, self.k_global, wide.sm_scale, k_unit * q_unit))
    return scales

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
    for part, step in self.wide.keys.steps:
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
    keys = wide.keys
    wgmma.begin(p)
    for i, (part, step) in enumerate(keys.steps):
      b = wgmma.right(p, k, part * keys.part + step)
      for operand in range(wide.q_operands):
        a = self.q[i] if self.q else wgmma.right(p, q, wide.q_place(operand, part) + step)
        accumulate = self.yes if i or operand else self.no
        wgmma.multiply(p, keys.operand, self.scores, a, b, accumulate)
    wgmma.commit(p)

  def _multiply_values(self) -> None:
    """Starts O += P V of the tile that V's slot holds."""
    p, values = self.p, self.wide.values
    v = wgmma.across(wgmma.descriptor(self.values.address), values.part)
    wgmma.begin(p)
    for i in range(self.wide.tile // 16):
      b = wgmma.right(p, v, i * 16 * wgmma.ROW)
      a = self.weights[4 * i : 4 * i + 4]
      wgmma.multiply(p, values.operand, self.out, a, b, self.yes, rows_of_k=True)
    wgmma.commit(p)

  def _finish_scores(self, key: Reg) -> None:
    """Scores as they come from the product become those that P is made of."""
    p, soft_cap = self.p, self.wide.soft_cap
    if soft_cap is not None:
      for half, scale in enumerate(self.scales):
        for x in _flat(self._scores_of(half)):
          p.set(x, cap(p, x, scale, soft_cap))
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

  def _factor(self, half: int) -> Reg:
    """What brings scores of a row to log2 units; with a cap they are in them."""
    return self.scales[half] if self.wide.soft_cap is None else self.p.f32(1.0)

  def _tops(self) -> list[Reg]:
    """The lane's largest scores of its rows."""
    return [self.p.max_of(_flat(self._scores_of(half))) for half in ROWS_OF_LANE]

  def _set_references(self, tops: list[Reg], largest_p: float) -> None:
    """References of the lane's rows from their largest scores in a tile; O and sums follow."""
    p = self.p
    for half, (top, reference) in enumerate(zip(tops, self.references, strict=True)):
      factor = self._factor(half)
      for step in (1, 2):  # over the lanes that have the row
        top = p.maximum(top, p.shuffle_xor(top, step))
      new = p.minimum(p.fma(top, factor * -1.0, largest_p), reference)
      shrink = p.exp2(new - reference)
      of_row = [self.out[4 * j + 2 * half + k] for j in range(len(self.out) // 4) for k in range(2)]
      for x in (self.sums[half], *of_row):
        p.set(x, x * shrink)
      p.set(reference, new)
      p.set(self.limits[half], (p.f32(MOST_P) - new) * p.reciprocal(factor))

  def _make_weights(self) -> None:
    """P of the tile, and its sums. Waits for O of the tile before, which reads the last P."""
    p = self.p
    tops = self._tops()
    above = [top > limit for top, limit in zip(tops, self.limits, strict=True)]
    with p.when(p.any_lane(functools.reduce(operator.or_, above))):
      wgmma.wait(p, 0)
      self._set_references(tops, LATER_P)
    for half, (reference, total) in enumerate(zip(self.references, self.sums, strict=True)):
      scores, factor = _flat(self._scores_of(half)), self._factor(half)
      for x in scores:
        p.set(x, p.exp2(p.fma(x, factor, reference)))
      p.set(total, total + _sum(scores))
    wgmma.wait(p, 0)
    for half in ROWS_OF_LANE:
      for j, (x, y) in enumerate(self._scores_of(half)):
        p.emit(f"cvt.rn.{self.wide.values.operand}x2.f32", self.weights[2 * j + half], y, x)

  # The end of a segment.

  def _close_rows(self, v_global: Reg) -> list[_Row]:
    """Of the lane's two rows; while the last product runs."""
    p, rows = self.p, []
    out_scale = v_global * self.wide.values.unit
    for half in ROWS_OF_LANE:
      total = self.sums[half]
      for step in (1, 2):
        total = total + p.shuffle_xor(total, step)
      empty = total.eq(0.0)
      factor = p.select(empty, 0.0, p.reciprocal(total) * out_scale)
      lse = p.select(empty, NEG_INF, p.log2(total) - self.references[half])
      row = self._row(half)
      out_row = self.work.q_row(self.work.row_or_last(row))
      rows.append(_Row(row, self.work.is_row(row), out_row, factor, lse))
    return rows

  def _store(self, rows: list[_Row]) -> None:
    p, wide, dim = self.p, self.wide, self.wide.values.head_dim
    slot = self.work.tell_pieces(p.thread) if self.pieces else None
    for half, row in enumerate(rows):
      for first in range(0, dim // 8, 4):
        of_eights = [
          [self.out[4 * (first + i) + 2 * half + k] * row.factor for k in range(2)]
          for i in range(4)
        ]
        column = (self.c + first) * 8
        place = p, wide.out_dtype, dim, row.out_row, column
        if slot is None and is_half(wide.out_dtype):
          store_words(*place, self._packed_columns(of_eights), row.lse, row.real)
          continue
        columns = self._columns(of_eights)
        whole = row.real if slot is None else row.real & self.work.is_whole
        store_result(*place, columns, row.lse, whole)
        if slot is not None:
          piece = row.real & ~self.work.is_whole
          store_piece(p, dim, slot * ROWS + row.row, column, columns, row.lse, piece)

  # Of each eight columns in V's order the lane c has those at 2 c and 2 c + 1; four lanes exchange
  # those of four eights, and the lane c has all of the eight c.

  def _columns(self, of_eights: list[list[Reg]]) -> list[Reg]:
    """Eight neighbouring columns of the lane's row."""
    sides = [_transpose(self.p, list(side), self.c) for side in zip(*of_eights, strict=True)]
    return [sides[place % 2][place // 2] for place in self._places()]

  def _packed_columns(self, of_eights: list[list[Reg]]) -> list[Reg]:
    """The same as words, exchanged two at a time."""
    p, places = self.p, self._places()
    words = [pack_pair(p, self.wide.out_dtype, *pair) for pair in of_eights]
    words = _transpose(p, words, self.c)
    if places == list(range(8)):
      return words
    halves = (0x10, 0x32), (0x5400, 0x7600)  # of the first and of the second word
    return [
      p.permute(words[a // 2], words[b // 2], halves[0][a % 2] | halves[1][b % 2])
      for a, b in zip(places[::2], places[1::2], strict=True)
    ]

  def _places(self) -> list[int]:
    """Where each of eight neighbouring columns stands in V's order."""
    order = self.wide.values.order
    columns = [
      start + column for start in range(0, 8, 2 * len(order)) for pair in order for column in pair
    ]
    return [columns.index(column) for column in range(8)]


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
