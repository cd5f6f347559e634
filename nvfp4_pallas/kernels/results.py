"""Rows of attention's result, or of pieces of it, to device memory. PTX.

Programs and pieces have lse in log2 units, the result has the natural one.
"""

from __future__ import annotations

import math

from nvfp4_pallas.kernels.ptx import Mem, Ptx, Reg

NEG_INF = float("-inf")
LOG2_E = math.log2(math.e)
_HALVES = {"bfloat16": "bf16", "float16": "f16"}


def is_half(dtype: str) -> bool:
  """Whether a word holds two columns of `out`."""
  return dtype in _HALVES


def pack_pair(p: Ptx, dtype: str, low: Reg, high: Reg) -> Reg:
  return p.pack(_HALVES[dtype], low, high)


def store_result(
  p: Ptx, dtype: str, dim: int, row: Reg, column: Reg, values: list[Reg], lse: Reg, when: Reg
) -> None:
  """Neighbouring columns, one or an even number, of a row of `out`; with column 0 its `lse`."""
  if is_half(dtype) and len(values) == 1:
    at = _column(p, dtype, dim, row, column)
    p.store("global", Mem(at), [p.pack(_HALVES[dtype], values[0], 0.0)], size=2, when=when)
    _store_lse(p, row, column, lse, when)
    return
  if is_half(dtype):
    values = [pack_pair(p, dtype, *x) for x in zip(values[::2], values[1::2], strict=True)]
  store_words(p, dtype, dim, row, column, values, lse, when)


def store_words(
  p: Ptx, dtype: str, dim: int, row: Reg, column: Reg, words: list[Reg], lse: Reg, when: Reg
) -> None:
  """The same of columns that are in words already."""
  _store(p, _column(p, dtype, dim, row, column), words, when)
  _store_lse(p, row, column, lse, when)


def _column(p: Ptx, dtype: str, dim: int, row: Reg, column: Reg) -> Reg:
  size = 2 if is_half(dtype) else 4
  return p.address(p.address(p.pointer("out"), row, dim * size), column, size)


def _store_lse(p: Ptx, row: Reg, column: Reg, lse: Reg, when: Reg) -> None:
  _store(p, p.address(p.pointer("lse"), row, 4), [lse * (1.0 / LOG2_E)], when & column.eq(0))


def store_piece(
  p: Ptx, dim: int, row: Reg, column: Reg, values: list[Reg], lse: Reg, when: Reg
) -> None:
  """Neighbouring columns of a row of `pieces`; with column 0 its `piece_lse`.

  Their elements are counted in 32 bits: there are a few pieces for each block.
  """
  _store(p, p.address(p.pointer("pieces"), row * dim + column, 4), values, when)
  _store(p, p.address(p.pointer("piece_lse"), row, 4), [lse], when & column.eq(0))


def _store(p: Ptx, at: Reg, words: list[Reg], when: Reg) -> None:
  for start in range(0, len(words), 4):
    p.store("global", Mem(at, 4 * start), words[start : start + 4], when=when)
