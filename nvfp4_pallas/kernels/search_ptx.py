"""format.py's `four_over_six` of bfloat16, in PTX: what one thread does with sixteen values.

Both candidates are encoded, with amax as code 6 and as code 4, and the one with the smaller error
is kept. The definition says how the errors are rounded, and so that all implementations keep the
same one this does it operation by operation: a decoded value, its distance from x, that over the
global scale, the square, and the sum of sixteen as a tree. Bit for bit; the instructions for it are
some four times those of `encode_ptx.encode_block`, most of them for the divisions.
"""

from __future__ import annotations

import dataclasses

from nvfp4_pallas import format as nvfp4
from nvfp4_pallas.kernels import encode_ptx
from nvfp4_pallas.kernels.ptx import Ptx, Reg

LARGEST_CODES = (6.0, 4.0)  # values; the first is kept on a tie
# The pattern of an index 1 .. 7 of E2M1, moved to the top of a float32's significand and the bottom
# of its exponent, is that of its value times 2^-126: the index is that number's E2M1.
INDEX_UNIT = 2.0**126
# A block scale times INDEX_UNIT would overflow; so much of it is left to the global scale, which
# has room, and a power of two changes no rounding.
LATER = 2.0**26


@dataclasses.dataclass(frozen=True)
class Inverse:
  """1 / divisor in two float32: the nearest one, and what that lacks."""

  high: Reg
  low: Reg


def encode_block(p: Ptx, words: list[Reg], global_scale: Reg) -> tuple[list[Reg], Reg]:
  """format.encode of a block with scale_search `four_over_six`.

  Args:
    words: its sixteen bfloat16 values, two a word, the even one in the low half.
    global_scale: float32.

  Returns:
    Two words of codes, and the byte of the block scale.
  """
  amax = encode_ptx.largest_magnitude(p, words)
  values = magnitudes(p, words)
  inverse = inverse_of(p, global_scale)
  candidates = []
  for largest_code in LARGEST_CODES:
    scale = encode_ptx.block_scale(p, amax, p.multiply(global_scale, largest_code))
    codes = encode_ptx.block_codes(p, words, encode_ptx.step_of(p, scale, global_scale))
    live = scale.ne(0)  # else the codes are defined to be 0
    codes = [p.select(live, word, 0) for word in codes]
    error = squared_error(p, values, codes, scale, global_scale, inverse)
    candidates.append((codes, scale, error))
  (codes, scale, error), (other_codes, other_scale, other_error) = candidates
  better = other_error < error
  finite = scale.ne(nvfp4.E4M3_NAN)  # of both, or of none
  codes = [
    p.select(finite, p.select(better, other, word), 0)
    for word, other in zip(codes, other_codes, strict=True)
  ]
  return codes, p.select(better, other_scale, scale)


def magnitudes(p: Ptx, words: list[Reg]) -> list[Reg]:
  """|x| of a block's values in their order, float32."""
  return [
    p.as_f32(bits) for word in words for bits in ((word << 16) & 0x7FFFFFFF, word & 0x7FFF0000)
  ]


def squared_error(
  p: Ptx, values: list[Reg], codes: list[Reg], scale: Reg, global_scale: Reg, inverse: Inverse
) -> Reg:
  """format._squared_error: the sum of fl(fl(x - decoded) / global_scale)^2.

  Of magnitudes: a code has its value's sign, and nothing here depends on it. Squares that overflow,
  or a NaN after them, occur only where both candidates saturate, whose scales and codes are then
  the same; squares that underflow, only where the values are zero in both.
  """
  # E4M3's bits in float32's place are its value times 2^-120.
  unit = p.multiply(p.multiply(p.as_f32(scale << 20), 2.0**120), INDEX_UNIT / LATER)
  later = p.multiply(global_scale, LATER)
  squares = []
  for i, x in enumerate(values):
    index = _shifted(codes[i // 8], 22 - i % 8 * 4) & (7 << 22)
    exact = p.multiply(p.as_f32(index), unit)
    # Not fused: the decoded value is rounded before it is taken off.
    miss = p.new("f", "sub.rn.f32", x, p.multiply(exact, later))
    quotient = divide(p, miss, global_scale, inverse)
    squares.append(p.multiply(quotient, quotient))
  while len(squares) > 1:
    half = len(squares) // 2
    pairs = zip(squares[:half], squares[half:], strict=True)
    squares = [p.new("f", "add.rn.f32", a, b) for a, b in pairs]
  return squares[0]


def inverse_of(p: Ptx, divisor: Reg) -> Inverse:
  high = p.new("f", "rcp.rn.f32", divisor)
  missing = p.fma(p.negative(divisor), high, 1.0)
  return Inverse(high, p.multiply(missing, high))


def divide(p: Ptx, x: Reg, divisor: Reg, inverse: Inverse) -> Reg:
  """fl(x / divisor).

  With both parts of the inverse the first quotient is within .51 of a unit, and from such a one its
  exact remainder leads to the nearest, the first part being the nearest to 1 / divisor (Markstein,
  1990). It holds where the remainder, some 2^-46 of x, is a float32.
  """
  quotient = p.fma(x, inverse.high, p.multiply(x, inverse.low))
  missing = p.fma(p.negative(divisor), quotient, x)
  return p.fma(missing, inverse.high, quotient)


def _shifted(word: Reg, left: int) -> Reg:
  return word << left if left >= 0 else word >> -left
