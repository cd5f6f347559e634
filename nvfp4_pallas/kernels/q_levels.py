"""Rows of q quantised to NVFP4 by a kernel, for A4Q (read_paths.py): levels that add up to q. PTX.

The arithmetic of a block-scaled product on tensor cores that have none: a level is codes times
their block's scale, exactly, as float16 in units of UNIT, and its columns are in the order in which
codes come out of their words, as those of NVFP4 keys (mma_fragments.py).

The second level is what the first leaves of each value, r = x - v. Here x has 8 significant bits,
and r is a bfloat16 again, so that both levels are rounded by encode_ptx.py. With s = m 2^e, m in
[1, 2), the block's scale and v = c s:

    c             0    .5      1       1.5     2       3       4       6
    |x| / s from  0    .25     .75     1.25    1.75    2.5     3.5     5
    |r| up to     |x|  .25 s   .25 s   .25 s   .5 s    .5 s    s       see below
    v multiple of      2^e-4   2^e-3   2^e-4   2^e-2   2^e-3   2^e-1   2^e-2
    x multiple of      2^e-9   2^e-8   2^e-7   2^e-7   2^e-6   2^e-6   2^e-5
    bits of r     8    8       7       6       7       6       7       8 or fewer

With c = 6, |x| is at most 9 s, as a scale that is rounded down is at least 2/3 of the largest
|x| / 6, and |r| is up to 3 s < 2^(e+3) and a multiple of 2^(e-5). Or s is 448, the largest, and |x|
larger: r is a multiple of x's last bit and has 8 bits up to |x| = 2^15. From there on it is far
above 2688, and its code 6 and its scale 448 however it is rounded.
"""

from __future__ import annotations

from nvfp4_pallas.kernels.encode_ptx import encode_block
from nvfp4_pallas.kernels.mma_fragments import NvFp4Fragments, e2m1_as_f16
from nvfp4_pallas.kernels.ptx import Ptx, Reg

UNIT = NvFp4Fragments.unit
BLOCK_WORDS = 8  # sixteen values, two a word


def nvfp4_operands(p: Ptx, words: list[Reg], levels: int) -> list[list[Reg]]:
  """For each level, pairs of columns, float16 in units of UNIT.

  Args:
    words: neighbouring columns of a row of q as bf16 pairs, whole blocks.
  """
  operands: list[list[Reg]] = [[] for _ in range(levels)]
  for first in range(0, len(words), BLOCK_WORDS):
    block = words[first : first + BLOCK_WORDS]
    for level, operand in enumerate(operands):
      codes, scale = encode_block(p, block, p.f32(1.0))
      factor = p.halves(p.e4m3_to_f16(p.halves(scale)[0]))[0]
      twice = p.pair(factor, factor)
      pairs = [p.mul_f16x2(pair, twice) for word in codes for pair in e2m1_as_f16(p, word)]
      operand += pairs
      if level + 1 < levels:
        block = _what_is_left(p, block, pairs)
  return operands


def _what_is_left(p: Ptx, words: list[Reg], pairs: list[Reg]) -> list[Reg]:
  """words minus the level that `pairs` is, columns (0, 4), (1, 5), ... of each eight."""
  left = []
  for eight in range(0, len(words), 4):
    halves = [p.halves(pair) for pair in pairs[eight : eight + 4]]
    level = [p.f16_to_f32(half) for side in range(2) for half in (pair[side] for pair in halves)]
    for i, word in enumerate(words[eight : eight + 4]):
      values = p.as_f32(word << 16), p.as_f32(word & 0xFFFF0000)
      rest = [p.fma(v, -UNIT, x) for v, x in zip(level[2 * i : 2 * i + 2], values, strict=True)]
      left.append(p.pack("bf16", *rest))
  return left
