"""format.decode to bfloat16, in PTX: what one thread does with eight codes. Bit for bit.

A block has eight magnitudes, so it has a table of eight bfloat16, and `prmt`, which picks bytes by
the digits of a number, looks four codes up at once.
"""

from __future__ import annotations

from nvfp4_pallas import format as nvfp4
from nvfp4_pallas.kernels import encode_ptx
from nvfp4_pallas.kernels.encode_ptx import OCTAVE
from nvfp4_pallas.kernels.ptx import Ptx, Reg

BF16_NAN = 0x7FC0


def decode_word(p: Ptx, codes: Reg, scale: Reg, global_scale: Reg) -> list[Reg]:
  """Eight values of a block, two bfloat16 a word, from a word of codes.

  Args:
    codes: eight codes.
    scale: the byte of the block scale; never negative.
    global_scale: float32.
  """
  low, high = _tables(p, scale, global_scale)
  index, shifted = codes & 0x77777777, codes << 4
  words = []
  for half, signs in enumerate((0x5140, 0x7362)):
    digits = index >> 16 * half
    low_bytes, high_bytes = (p.new("r", "prmt.b32", *table, digits) for table in (low, high))
    # Bit 3 of each code, at the top of a byte: of even codes in `shifted`, of odd ones in place.
    high_bytes = (p.permute(shifted, codes, signs) & 0x80808080) | high_bytes
    words += [p.permute(low_bytes, high_bytes, pair) for pair in (0x5140, 0x7362)]
  return words


def _tables(p: Ptx, scale: Reg, global_scale: Reg) -> tuple[list[Reg], list[Reg]]:
  """The low and the high bytes of the eight magnitudes, four a word.

  Only two are computed: fl(1 s g) and fl(1.5 s g), both rounded to bfloat16. Nothing here leaves
  the normal range, so the others are these times powers of two, with the same roundings:

      index   0     1     2     3      4      5      6      7
      value   0     .5    1     1.5    2      3      4      6
      from          1/2   1     1      2      2      4      4    times that of 1 or 1.5
  """
  one = encode_ptx.step_of(p, scale, global_scale)
  three_halves = p.multiply(encode_ptx.step_of(p, scale, p.f32(1.5)), global_scale)
  pair = p.pack("bf16", one, three_halves)
  half = p.mad(pair, 1 << 16, 2**32 - (OCTAVE & 0xFFFF0000))  # beside the 0
  magnitudes = [half, pair, pair + OCTAVE, pair + 2 * OCTAVE]
  # Scale 0 makes zeros, NaN makes NaN, and both make them of all codes.
  ordinary = (scale - 1) < nvfp4.E4M3_NAN - 1
  other = p.select(scale.eq(nvfp4.E4M3_NAN), BF16_NAN * encode_ptx.BOTH, 0)
  magnitudes = [p.select(ordinary, word, other) for word in magnitudes]
  low, high = (
    [p.permute(*magnitudes[i : i + 2], selector) for i in (0, 2)] for selector in (0x6420, 0x7531)
  )
  return low, high
