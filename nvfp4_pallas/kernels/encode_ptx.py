"""format.py's rounding of bfloat16, in PTX: what one thread does with sixteen values. Bit for bit.

Not a division per value. The code of x is the number of steps of E2M1 that |x| has passed, and a
bfloat16 passes a step where it exceeds one bfloat16 that depends on the block only (`barriers`).
Three comparisons of two values at a time count the coarse steps, a fourth, whose barrier depends on
that count, the fine one. Integer multiplications put barriers and codes together: they run beside
the comparisons, on units that would idle.

`common.encode` is the same in JAX, for other dtypes and for interpret mode; tests compare both, and
both with format.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from nvfp4_pallas import format as nvfp4
from nvfp4_pallas.kernels.ptx import Ptx, Reg

BOTH = 0x00010001  # times a number of 16 bits: it in both halves of a word
OCTAVE = 0x80 * BOTH  # added to two bfloat16: their doubles


def encode_block(p: Ptx, words: list[Reg], global_scale: Reg) -> tuple[list[Reg], Reg]:
  """format.encode of a block.

  Args:
    words: its sixteen bfloat16 values, two a word, the even one in the low half.
    global_scale: float32.

  Returns:
    Two words of codes, and the byte of the block scale.
  """
  amax = largest_magnitude(p, words)
  scale = block_scale(p, amax, p.multiply(global_scale, nvfp4.E2M1_MAX))
  codes = block_codes(p, words, step_of(p, scale, global_scale))
  # Neither of scale 0, whose codes are defined to be 0, nor of NaN.
  live = (scale - 1) < nvfp4.E4M3_NAN - 1
  return [p.select(live, word, 0) for word in codes], scale


def largest_magnitude(p: Ptx, words: list[Reg]) -> Reg:
  """The largest of a block, float32; NaN where a value is not finite."""
  largest = words
  while len(largest) > 1:
    pairs = zip(largest[::2], largest[1::2], strict=True)
    largest = [p.max_magnitude_bf16x2(a, b) for a, b in pairs]
  (word,) = largest
  word = p.max_magnitude_bf16x2(word, p.permute(word, word, 0x1032))
  amax = p.absolute(p.as_f32(word << 16))
  return p.fma(amax, 0.0, amax)  # infinities become NaN


def block_scale(p: Ptx, amax: Reg, divisor: Reg) -> Reg:
  """The byte e4m3(fl(amax / divisor)), the divisor being fl(largest code * global_scale)."""
  inverse = inverse_above(p, divisor)
  # From some 2^20 on, however far, all are 448; the bound keeps inf - inf out.
  quotient = p.minimum(p.multiply(amax, inverse), 2.0**20)
  missing = p.fma(p.negative(divisor), quotient, amax)
  return p.widen(p.e4m3x2(p.fma(missing, inverse, quotient), 0.0))


def inverse_above(p: Ptx, divisor: Reg) -> Reg:
  """1 / divisor, rounded upwards: for the quotients of bfloat16 that become E4M3.

  With r this inverse, q = fl(x r) and e = x - q d, fl(q + e r) may differ from fl(x / d) in its
  last bit. But not where E4M3 would notice, at a midpoint m of its values, if x has 8 bits:

  r is off by less than 2^-23 of itself, so q by less than 2.5 of its units and q + e r by less than
  2^-21 units. fl(x / d) compares with m as it should unless x / d is as near as that to m plus or
  minus half a unit. In integers, with D and A the significands of d and x (D of 24 bits), M < 32
  that of m (odd: a midpoint) and f = floor(log2 M), nearness means

      A 2^j = M 2^(24 - f) D + s1 D + N,   s1 = 1 or -1, |N| <= 15

  with j >= 40, so D = 2^20 t - s1 N and

      A 2^j = 2^20 (2^(24 - f) M t - 2^(4 - f) M s1 N + s1 t).

  The first term in brackets is at least 2^27, and with only 8 bits in A the rest of it, below 2^9,
  must vanish: t = 2^(4 - f) M N >= 16 |N|. D has 24 bits, so t <= 16, and only N = 1, t = 16 is
  left: d is the largest of its exponent and m = x / d but for half a unit, M = 1. Rounded upwards,
  r is exactly what fl(x / d) then needs (rounded to nearest it might be 1, one unit too small).
  """
  guess = p.reciprocal(divisor)
  missing = p.fma(p.negative(divisor), guess, 1.0)
  return p.new("f", "fma.rp.f32", missing, guess, guess)


def step_of(p: Ptx, scale: Reg, global_scale: Reg) -> Reg:
  """fl(block scale * global_scale). The bits of E4M3 in float32's place are its value * 2^-120."""
  return p.multiply(p.multiply(p.as_f32(scale << 20), 2.0**120), global_scale)


@dataclasses.dataclass(frozen=True)
class Barriers:
  """Largest bfloat16 whose code is below 1, 2, 4 and 6, in both halves; and what leads from 1 to 3.

  A multiplier: see `masks_times`.
  """

  one: Reg
  two: Reg
  four: Reg
  six: Reg
  from_one_to_three: Reg


def barriers(p: Ptx, step: Reg) -> Barriers:
  """Where codes begin.

  |x| / s, rounded to float32, becomes the code above a midpoint m when it exceeds m; or, where a
  tie goes to the even code above, when it reaches m. With half a unit of float32 at m,
  h = 2^(floor(log2 m) - 24), that is (common.reach has the rule with proof)

      codes 1, 3, 5, 7 (m = .25, 1.25, 2.5, 5):  |x| >  m s + h s
      codes 2, 4, 6    (m = .75, 1.75, 3.5):     |x| >= m s - h s

  Equality cannot be: m + h and m - h are odd numbers of 24 or 25 bits times powers of two, and
  would have to divide the 8 bits of x. So the second line says > as well, and for bfloat16 x,
  |x| > y is |x| > y cut to bfloat16. Scaled by powers of two the seven are four:

      code      1         2                 3, 5, 7               4, 6
      barrier   s + u     1.5 s - u         1.25 s + u            1.75 s - u      u = 2^-24 s
      times     1/4       1/2               1, 2, 4               1, 2
  """
  u = p.multiply(step, 2.0**-24)
  minus_u = p.negative(u)

  def cut(m: float, h: Reg) -> Reg:
    return p.permute(p.bits(p.new("f", "fma.rz.f32", step, m, h)), 0, 0x3232)

  one, two = cut(1.0, u) - 2 * OCTAVE, cut(1.5, minus_u) - OCTAVE
  three, four = cut(1.25, u), cut(1.75, minus_u)
  # Both halves are equal, so BOTH times the distance is the difference of words.
  from_one_to_three = (one + OCTAVE) - three
  return Barriers(one, two, four, four + OCTAVE, from_one_to_three)


def masks_times(factor: int) -> int:
  """A multiplier that turns the masks of two comparisons into `factor` where they are true.

  As integers, with b and a the high and low comparison (0 or 1), two masks of 16 ones are
  -2^16 b + (2^16 - 1) a, and modulo 2^32

      (2^16 (a - b) - a) (-BOTH factor) = factor (2^16 b + a).

  It is linear: sums of masks become counts.
  """
  return -BOTH * factor % 2**32


def block_codes(p: Ptx, words: list[Reg], step: Reg) -> list[Reg]:
  """Codes of sixteen values, two words; `step` is normal.

  coarse steps passed (of codes 2, 4, 6)   0      1      2      3
  barrier of the odd code above            of 1   of 3   of 5   of 7
  code                                     0, 1   2, 3   4, 5   6, 7
  """
  at = barriers(p, step)

  def add_codes(word: Reg, place: int, codes: Reg | int) -> Reg:
    magnitude = p.new("r", "abs.bf16x2", word)
    passed_two = p.exceeds_bf16x2(magnitude, at.two)
    coarse = passed_two + p.exceeds_bf16x2(magnitude, at.four)
    coarse = coarse + p.exceeds_bf16x2(magnitude, at.six)
    # From 3 on the barriers are octaves apart; from 1 to 3 it is some more.
    barrier = p.mad(passed_two, at.from_one_to_three, at.one)
    barrier = p.mad(coarse, masks_times(0x80), barrier)
    fine = p.exceeds_bf16x2(magnitude, barrier)
    return p.mad(fine, masks_times(place), p.mad(coarse, masks_times(2 * place), codes))

  def two_words(first: Reg, second: Reg) -> Reg:
    """Codes in bytes: even and even, odd and odd."""
    codes = add_codes(second, 0x100, add_codes(first, 1, 0))
    signs = p.permute(first, second, 0xFBD9)  # the sign of each half, as a byte
    return (signs & 0x08080808) | codes

  def four_words(four: list[Reg]) -> Reg:
    low, high = two_words(*four[:2]), two_words(*four[2:])
    even, odd = p.permute(low, high, 0x5410), p.permute(low, high, 0x7632)
    return p.mad(odd, 16, even)

  return [four_words(words[:4]), four_words(words[4:])]


def encode_fp8(p: Ptx, words: list[Reg], global_scale: Reg) -> list[Reg]:
  """E4M3 of fl(x / global_scale): saturating, NaN where that is not finite. Half as many words.

  The quotient is computed 256 times smaller, so that it overflows only when it is multiplied by
  256, exactly where fl(x / global_scale) does.
  """

  def finite(q: Reg) -> Reg:
    q = p.multiply(q, 256.0)
    return p.fma(q, 0.0, q)  # infinities become NaN

  return e4m3_quotients(p, words, p.multiply(global_scale, 256.0), finite)


def e4m3_quotients(
  p: Ptx, words: list[Reg], divisor: Reg, finish: Callable[[Reg], Reg] = lambda q: q
) -> list[Reg]:
  """E4M3 of finish(fl(x / divisor)), NaN where x or the divisor is not finite.

  The divisor, its inverse and x over it must be normal numbers.
  """
  inverse = inverse_above(p, divisor)

  def quotient(x: Reg) -> Reg:
    q = p.multiply(x, inverse)
    # Subtracted the other way round: a zero then keeps its sign.
    surplus = p.fma(divisor, q, p.negative(x))
    return finish(p.fma(p.negative(surplus), inverse, q))

  halves = [
    p.e4m3x2(quotient(p.as_f32(word << 16)), quotient(p.as_f32(word & 0xFFFF0000)))
    for word in words
  ]
  return [p.pair(a, b) for a, b in zip(halves[::2], halves[1::2], strict=True)]
