"""Rows of q as operands of products, in the order and the type of a pool's keys. PTX."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from nvfp4_pallas import format as nvfp4
from nvfp4_pallas.kernels.encode_ptx import e4m3_quotients
from nvfp4_pallas.kernels.ptx import WARPGROUP, Mem, Ptx, Reg
from nvfp4_pallas.kernels.q_levels import UNIT as LEVELS_UNIT
from nvfp4_pallas.kernels.q_levels import nvfp4_operands
from nvfp4_pallas.kernels.query_tile import QueryTile
from nvfp4_pallas.read_paths import LEAST_A8Q_AMAX

Q_EXPONENT = 14  # the largest value in a unit is 2^14 or more and below 2^15: float16's upper end


def load_quarter(p: Ptx, row: Reg, quarter: Reg, *, dim: int, negate: bool) -> list[Reg]:
  """A quarter of the columns of a row of q, bf16 pairs.

  Args:
    negate: where sm_scale is negative, as programs take scores to have the order of their scaled
      ones.
  """
  nbytes = dim // 4 * 2
  at, words = p.address(p.pointer("q"), row * 4 + quarter, nbytes), []
  for start in range(0, nbytes, 16):
    words += p.load("global.nc", Mem(at, start), 4)
  return [word ^ "0x80008000" for word in words] if negate else words


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


def largest_of(p: Ptx, words: list[Reg]) -> Reg:
  """The float32 pattern of the largest magnitude in a row, of which four lanes have quarters."""
  while len(words) > 1:
    pairs = zip(words[::2], words[1::2], strict=True)
    words = [p.max_magnitude_bf16x2(a, b) for a, b in pairs]
  (word,) = words
  for step in (1, 2):
    word = p.max_magnitude_bf16x2(word, p.shuffle_xor(word, step))
  return p.maximum(word & 0x7FFF0000, (word << 16) & 0x7FFF0000)


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


def row_operands(
  p: Ptx, words: list[Reg], operand: str, order: list[tuple[int, int]], levels: int
) -> tuple[list[list[Reg]], Reg | None]:
  """A lane's quarter of a row of q as operands that add up to it, columns in the order of K's.

  Args:
    words: load_quarter's.
    operand: what K's are, "bf16" or "f16".
    order: Fragments.word_pairs.
    levels: of A4Q, or 0.

  Returns:
    The operands, pairs of columns, and their unit: of float16 the row's largest value is 2^14 to
    2^15. None is 1.
  """
  if levels:
    return nvfp4_operands(p, words, levels), p.f32(LEVELS_UNIT)
  if operand == "bf16":
    return [in_order(p, words, order)], None
  inverse, unit = unit_for(p, largest_of(p, words), Q_EXPONENT)
  return [in_order(p, to_f16(p, words, inverse), order)], unit


def row_as_e4m3(p: Ptx, words: list[Reg], order: list[tuple[int, int]]) -> tuple[list[Reg], Reg]:
  """A lane's quarter of a row of q as E4M3, four columns a word, and the row's scale.

  e4m3(fl(q / s)) with s = fl(largest / 448): A8Q of read_paths.py, which says what is least.
  """
  # As integers NaN is above infinity, which is above all numbers.
  least = int(np.float32(LEAST_A8Q_AMAX).view(np.uint32))
  largest = p.as_f32(p.maximum(largest_of(p, words), least))
  scale = p.new("f", "div.rn.f32", largest, nvfp4.E4M3_MAX)
  return e4m3_quotients(p, in_order(p, words, order), scale), scale


@dataclasses.dataclass(frozen=True)
class Quarter:
  """What a thread has of a query tile.

  Attributes:
    row, c: the quarter c of the columns of a row.
    operands: words of them, in the order of K's columns.
    inside: whether the row is there; None where all threads' are.
    unit: of the row, where rows have their own.
  """

  row: Reg
  c: Reg
  operands: list[list[Reg]]
  inside: Reg | None
  unit: Reg | None


def load_tile(
  p: Ptx,
  work: QueryTile,
  *,
  rows: int,
  dim: int,
  operand: str,
  order: list[tuple[int, int]],
  levels: int,
  negate: bool,
  largest_of_warps: Callable[[Reg], Reg],
  first_row: Reg | int = 0,
) -> tuple[list[Quarter], Reg]:
  """The thread's part of a query tile as operands, and their unit, one for the tile.

  Args:
    rows: of the tile; those past its last one repeat it.
    operand, order, levels: as in row_operands, and "e4m3", with a unit for each row beside.
    first_row: of these.
    largest_of_warps: of a warp's number, all warps' largest.
  """
  loaded = []
  for start in range(0, 4 * rows, WARPGROUP):
    item = p.thread + start if start else p.thread
    row, c = item >> 2, item & 3
    q_row = work.q_row(work.row_or_last(row + first_row))
    inside = None if start + WARPGROUP <= 4 * rows else row < rows
    loaded.append((row, c, inside, load_quarter(p, q_row, c, dim=dim, negate=negate)))
  if operand != "f16" or levels:
    largest_of_warps(p.u32(0))  # the tile before this one has been read
    quarters = []
    for row, c, inside, words in loaded:
      if operand == "e4m3":
        bytes_, unit = row_as_e4m3(p, words, order)
        operands = [bytes_]
      else:
        operands, unit = row_operands(p, words, operand, order, levels)[0], None
      quarters.append(Quarter(row, c, operands, inside, unit))
    return quarters, p.f32(LEVELS_UNIT if levels else 1.0)
  largest = p.u32(0)
  for _, _, _, words in loaded:
    of_row = largest_of(p, words)
    # A row that is not finite must not set the unit of the others.
    p.set(largest, p.maximum(largest, p.select(of_row < 0x7F800000, of_row, 0)))
  inverse, unit = unit_for(p, largest_of_warps(p.max_lanes(largest)), Q_EXPONENT)
  quarters = [
    Quarter(row, c, [in_order(p, to_f16(p, words, inverse), order)], inside, None)
    for row, c, inside, words in loaded
  ]
  return quarters, unit
