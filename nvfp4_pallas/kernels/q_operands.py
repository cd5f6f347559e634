"""Rows of q as operands of products, in the order and the type of a pool's keys. PTX."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from nvfp4_pallas.kernels.ptx import WARPGROUP, Mem, Ptx, Reg
from nvfp4_pallas.kernels.query_tile import QueryTile

Q_EXPONENT = 14  # the largest value in a unit is 2^14 or more and below 2^15: float16's upper end


def load_quarters(
  p: Ptx, row: Reg, quarter: Reg, *, operands: int, dim: int, negate: bool
) -> list[list[Reg]]:
  """A quarter of the columns of each operand of a row of q, bf16 pairs.

  Args:
    negate: where sm_scale is negative, as programs take scores to have the order of their scaled
      ones.
  """
  loaded, nbytes = [], dim // 4 * 2
  for operand in range(operands):
    at = p.address(p.pointer("q"), (row * operands + operand) * 4 + quarter, nbytes)
    words = []
    for start in range(0, nbytes, 16):
      words += p.load("global.nc", Mem(at, start), 4)
    loaded.append([word ^ "0x80008000" for word in words] if negate else words)
  return loaded


def in_order(p: Ptx, words: list[Reg], order: list[tuple[int, int]]) -> list[Reg]:
  """Neighbouring columns, two to a word, as the pairs of columns that K comes in.

  Args:
    order: Fragments.word_pairs.
  """
  halves = (0x10, 0x32), (0x5400, 0x7600)  # of the first and of the second word
  return [
    p.permute(words[a // 2], words[b // 2], halves[0][a % 2] | halves[1][b % 2])
    for first in range(0, 2 * len(words), 2 * len(order))
    for a, b in ((first + low, first + high) for low, high in order)
  ]


def largest_of(p: Ptx, operands: list[list[Reg]]) -> Reg:
  """The float32 pattern of the largest magnitude in bf16 pairs."""
  largest = p.u32(0)
  for word in (word for words in operands for word in words):
    for pattern in (word & 0x7FFF0000, (word << 16) & 0x7FFF0000):
      p.set(largest, p.maximum(largest, pattern))
  return largest


def unit_for(p: Ptx, largest: Reg, exponent: int) -> tuple[Reg, Reg]:
  """The power of two in units of which `largest` is between 2^exponent and twice that.

  float16 has more digits than bf16, but not its range, so q is kept in a unit.

  Returns:
    1 / unit and unit, float32; both are normal numbers.
  """
  bias = 127
  of_largest = p.minimum(p.maximum(largest >> 23, exponent + 1), 2 * bias)
  inverse, unit = p.register("f"), p.register("f")
  p.emit("mov.b32", inverse, (p.u32(2 * bias + exponent) - of_largest) << 23)
  p.emit("mov.b32", unit, (of_largest - exponent) << 23)
  return inverse, unit


def to_f16(p: Ptx, words: list[Reg], factor: Reg) -> list[Reg]:
  """bf16 pairs times a factor as float16 pairs."""

  def scaled(pattern: Reg) -> Reg:
    value = p.register("f")
    p.emit("mov.b32", value, pattern)
    return value * factor

  return [p.pack("f16", scaled(word << 16), scaled(word & 0xFFFF0000)) for word in words]


def q_as_f16(p: Ptx, operands: list[list[Reg]]) -> tuple[list[list[Reg]], Reg]:
  """A lane's quarter of a row of q, bf16 pairs, as float16 pairs in a unit of the row.

  Args:
    operands: what is added up to q; the row's largest value, of all, becomes 2^14 to 2^15.

  Returns:
    The operands in the unit, and the unit.
  """
  largest = largest_of(p, operands)
  for step in (1, 2):  # over the lanes that have the row
    largest = p.maximum(largest, p.shuffle_xor(largest, step))
  inverse, unit = unit_for(p, largest, Q_EXPONENT)
  return [to_f16(p, words, inverse) for words in operands], unit


@dataclasses.dataclass(frozen=True)
class Quarter:
  """What a thread has of a query tile.

  Attributes:
    row, c: the quarter c of the columns of a row.
    operands: its columns, float16 pairs.
    inside: whether the row is there; None where all threads' are.
  """

  row: Reg
  c: Reg
  operands: list[list[Reg]]
  inside: Reg | None


def load_tile(
  p: Ptx,
  work: QueryTile,
  *,
  rows: int,
  operands: int,
  dim: int,
  negate: bool,
  largest_of_warps: Callable[[Reg], Reg],
  first_row: Reg | int = 0,
) -> tuple[list[Quarter], Reg]:
  """The thread's part of a query tile as float16 in a unit of the tile, and the unit.

  Args:
    rows: of the tile; those past its last one repeat it.
    first_row: of these.
    largest_of_warps: of a warp's number, all warps' largest.
  """
  loaded = []
  for start in range(0, 4 * rows, WARPGROUP):
    item = p.thread + start if start else p.thread
    row, c = item >> 2, item & 3
    q_row = work.q_row(work.row_or_last(row + first_row))
    of_row = load_quarters(p, q_row, c, operands=operands, dim=dim, negate=negate)
    loaded.append((row, c, of_row, start))
  largest = p.u32(0)
  for _, _, of_row, _ in loaded:
    of_item = largest_of(p, of_row)
    for step in (1, 2):  # over the lanes that have the row
      of_item = p.maximum(of_item, p.shuffle_xor(of_item, step))
    # A row that is not finite must not set the unit of the others.
    p.set(largest, p.maximum(largest, p.select(of_item < 0x7F800000, of_item, 0)))
  inverse, unit = unit_for(p, largest_of_warps(p.max_lanes(largest)), Q_EXPONENT)
  quarters = [
    Quarter(
      row,
      c,
      [to_f16(p, words, inverse) for words in of_row],
      None if start + WARPGROUP <= 4 * rows else row < rows,
    )
    for row, c, of_row, start in loaded
  ]
  return quarters, unit
