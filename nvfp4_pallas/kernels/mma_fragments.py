"""Keys and values in shared memory as tensor core operands in registers, whatever their format.

Both products of attention have the cache as their left operand, so that it goes from registers
straight into the tensor core and a query row is a column:

    S^T = K q^T        K [16 tokens, 16 columns]     in A of mma.m16n8k16
    O^T = V^T P^T      V^T [16 columns, 16 tokens]

The lane (g, c) = (lane / 4, lane % 4) holds of A the rows g and g + 8, and of each row the pairs
2 c, 2 c + 1 and 2 c + 8, 2 c + 9. Which columns of the head a row or a pair of A stands for is
free, as long as q and O follow. So each lane takes columns that lie side by side in memory:

    of K, the columns c * head_dim / 4 and on of its tokens;
    of V, the columns g * head_dim / 8 and on of its tokens, two tokens in one register.

Tokens: row g of eight stands for the token TOKEN_OF_SLOT[g] of eight, which spreads both kinds of
loads over the banks of shared memory: lanes next to each other read an even and an odd token.

    nvfp4   float16    value * 2^-14, a code times its scale, exact (see e2m1_as_f16)
    fp8     float16    value, exact
    bf16    bfloat16   value

float16 holds all products of a code and a block scale, 0 to 2688 in steps of 2^-10, times 2^-14 as
well, and the GPU converts E4M3 to it, NaN included, two values an instruction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from nvfp4_pallas import format as nvfp4
from nvfp4_pallas.kernels.ptx import Mem, Ptx, Reg

TOKEN_OF_SLOT = (0, 5, 1, 4, 2, 7, 3, 6)  # slot 2 i: token i; slot 2 i + 1: token (i ^ 1) + 4


@dataclasses.dataclass(frozen=True)
class Lane:
  """What a lane of a warp is in fragments: registers."""

  index: Reg
  g: Reg
  c: Reg
  slot_token: Reg  # TOKEN_OF_SLOT[g]
  pair_tokens: tuple[Reg, Reg]  # TOKEN_OF_SLOT[2 c], TOKEN_OF_SLOT[2 c + 1]

  @classmethod
  def of(cls, p: Ptx, thread: Reg) -> Lane:
    lane = thread & 31
    g, c = lane >> 2, lane & 3
    odd = ((g >> 1) ^ 1) + 4
    slot_token = p.select((g & 1).ne(0), odd, g >> 1)
    return cls(lane, g, c, slot_token, (c, (c ^ 1) + 4))


@dataclasses.dataclass(frozen=True)
class Fragments:
  """How one pool's rows become fragments; the base of the formats.

  Attributes:
    head_dim: 64, 128 or 256.
  """

  head_dim: int

  bits = 16  # of a value
  scale_bytes = 0  # of a token
  operand = "bf16"  # what the fragments are made of
  unit = 1.0  # a fragment holds values times 1 / unit
  has_global_scale = False

  @property
  def row_bytes(self) -> int:
    """Of a token, without its scales."""
    return self.head_dim * self.bits // 8

  @property
  def token_bytes(self) -> int:
    return self.row_bytes + self.scale_bytes

  def word_pairs(self) -> list[tuple[int, int]]:
    """The pairs of columns that a word of K gives, in order."""
    return [(0, 1)]

  def key_pairs(self, p: Ptx, lane: Lane, codes: Reg, scales: Reg, token: int) -> list[Reg]:
    """A lane's columns of K, of one token of eight, as bf16 pairs.

    Args:
      codes, scales: addresses of the tile's rows in shared memory.
      token: the first of the eight in the tile.
    """
    at = self._key_address(lane, codes)
    words = _load_words(p, Mem(at, token * self.row_bytes), self.row_bytes // 4)
    return self._widen_keys(p, words, lane, scales, token)

  def value_pairs(self, p: Ptx, lane: Lane, codes: Reg, scales: Reg, token: int) -> list[Reg]:
    """A lane's columns of V, each of two tokens of eight, as pairs."""
    return self._widen_values(p, self._value_rows(p, lane, codes, token), lane, scales, token)

  def _value_rows(self, p: Ptx, lane: Lane, codes: Reg, token: int) -> list[list[Reg]]:
    share = self.row_bytes // 8
    rows = []
    for of_pair in lane.pair_tokens:
      at = codes + (of_pair * self.row_bytes + lane.g * share)
      rows.append(_load_words(p, Mem(at, token * self.row_bytes), share))
    return rows

  def _key_address(self, lane: Lane, codes: Reg) -> Reg:
    return codes + (lane.slot_token * self.row_bytes + lane.c * (self.row_bytes // 4))

  def _widen_keys(self, p, words, lane, scales, token) -> list[Reg]:
    return words

  def _widen_values(self, p, rows, lane, scales, token) -> list[Reg]:
    pairs = []
    for x, y in zip(*rows, strict=True):
      pairs += [p.permute(x, y, 0x5410), p.permute(x, y, 0x7632)]
    return pairs


class Fp8Fragments(Fragments):
  bits = 8
  operand = "f16"
  has_global_scale = True

  def word_pairs(self) -> list[tuple[int, int]]:
    return [(0, 1), (2, 3)]

  def _widen_keys(self, p, words, lane, scales, token):
    return [p.e4m3_to_f16(half) for word in words for half in p.halves(word)]

  def _widen_values(self, p, rows, lane, scales, token):
    return [
      p.e4m3_to_f16(half) for x, y in zip(*rows, strict=True) for half in _alternate_bytes(p, x, y)
    ]


class NvFp4Fragments(Fragments):
  bits = 4
  operand = "f16"
  unit = 2.0**14
  has_global_scale = True

  @property
  def scale_bytes(self) -> int:
    return self.head_dim // nvfp4.SCALE_BLOCK

  def word_pairs(self) -> list[tuple[int, int]]:
    return [(0, 4), (1, 5), (2, 6), (3, 7)]

  def key_words(
    self, p: Ptx, lane: Lane, codes: Reg, scales: Reg, token: int
  ) -> list[tuple[Reg, Reg]]:
    """What key_pairs widens: words of codes, each with its scale twice in a word."""
    at = self._key_address(lane, codes)
    words = _load_words(p, Mem(at, token * self.row_bytes), self.row_bytes // 4)
    factors = self._key_scales(p, lane, scales, token)
    return [(word, factors[i // 2]) for i, word in enumerate(words)]

  def widen_word(self, p: Ptx, word: Reg, factor: Reg) -> list[Reg]:
    return [p.mul_f16x2(pair, factor) for pair in e2m1_as_f16(p, word)]

  def key_pairs(self, p: Ptx, lane: Lane, codes: Reg, scales: Reg, token: int) -> list[Reg]:
    words = self.key_words(p, lane, codes, scales, token)
    return [pair for of_word in words for pair in self.widen_word(p, *of_word)]

  def _key_scales(self, p: Ptx, lane: Lane, scales: Reg, token: int) -> list[Reg]:
    """Of the blocks of the lane's columns, each twice in a word."""
    count = self.scale_bytes // 4  # 1, 2 or 4
    at = scales + (lane.slot_token * self.scale_bytes + lane.c * count)
    (raw,) = p.load("shared", Mem(at, token * self.scale_bytes), size=count)
    factors = []
    for half in p.halves(raw)[: max(count // 2, 1)]:
      low, high = p.halves(p.e4m3_to_f16(half))
      factors += [p.pair(low, low), p.pair(high, high)]
    return factors

  def value_words(
    self, p: Ptx, lane: Lane, codes: Reg, scales: Reg, token: int
  ) -> Iterator[tuple[Reg, Reg]]:
    """What value_pairs widens: words of codes, each with its scales in a word."""
    yield from self._value_words(p, self._value_rows(p, lane, codes, token), lane, scales, token)

  def _widen_values(self, p, rows, lane, scales, token):
    words = self._value_words(p, rows, lane, scales, token)
    return [pair for of_word in words for pair in self.widen_word(p, *of_word)]

  def _value_words(self, p, rows, lane, scales, token) -> Iterator[tuple[Reg, Reg]]:
    factors = self._value_scales(p, lane, scales, token)
    words_of_block = nvfp4.SCALE_BLOCK // 8
    for i, (x, y) in enumerate(zip(*rows, strict=True)):
      factor = factors[i // words_of_block]
      for selector in (0x5410, 0x7632):  # a half of a's word and the same of b's
        yield p.permute(x, y, selector), factor

  def _value_scales(self, p: Ptx, lane: Lane, scales: Reg, token: int) -> list[Reg]:
    """For each block of the lane's columns its scales of the lane's two tokens, in a word.

    A lane loads scales of the token of slot g, and transposing the matrix [slot, block] brings
    those of block g and slots 2 c, 2 c + 1 to the lane (g, c). The lane's columns are half a
    block, one block or two, so column j of the matrix is block j / 2, block j, or blocks 2 j and,
    in a second matrix, 2 j + 1.
    """
    count = self.scale_bytes // 4
    at = scales + (lane.slot_token * self.scale_bytes + lane.c * count)
    (raw,) = p.load("shared", Mem(at, token * self.scale_bytes), size=count)
    if count != 2:
      raw = p.permute(raw, 0, 0x0000 if count == 1 else 0x3120)
    halves = p.halves(raw)[: max(count // 2, 1)]
    return [p.transpose(p.e4m3_to_f16(half)) for half in halves]


def fragments(format: str, head_dim: int) -> Fragments:
  return {"nvfp4": NvFp4Fragments, "fp8": Fp8Fragments, "bf16": Fragments}[format](head_dim)


def e2m1_as_f16(p: Ptx, word: Reg) -> list[Reg]:
  """Eight E2M1 codes as four float16 pairs of 2^-14 times their values: codes (j, j + 4) in pair j.

  A code's sign goes to the sign, and its other three bits to the last two bits of the exponent and
  the first of the fraction, which is its value up to the difference of the exponent biases, 14;
  subnormals are subnormals.

      code s e e m       ->      s . . . e e m . . . . . . . . .
                            bit 15      11  9

      code            0    1    2    3    4    5    6    7
      exponent field  0    0    1    1    2    2    3    3
      fraction        0    .5   0    .5   0    .5   0    .5
      times 2^14      0    .5   1    1.5  2    3    4    6

  For codes with room above them one multiplication makes both copies, n 2^12 for the sign and n 2^9
  for the rest, of which the mask leaves what is wanted. They meet in bit 12, where the second one's
  sign would carry n = 15 over: 2^12 is taken away again, which leaves the sign bit of n - 1 + sign,
  that of the code, but for 0, which becomes -0. (The constant does that in both halves, with 2^16
  for what the lower one may borrow.) The code two places on, or back, may stay in the word: its
  copies lie in bits 17 to 23, or below bit 9.

  Nine instructions besides the scales' multiplications: this is most of what decode does.
  """
  fields, no_carry = 0x8E008E00, p.constant((2**16 - 2**12 - 2**28) % 2**32)
  even, odd = word & 0x0F0F0F0F, word & 0xF0F0F0F0
  pairs = [
    p.mad(codes, 0x1200 >> 4 * j, no_carry) & fields for j, codes in enumerate((even, odd, even))
  ]
  return [*pairs, (word & 0x80008000) | ((word >> 3) & 0x0E000E00)]


def _alternate_bytes(p: Ptx, x: Reg, y: Reg) -> list[Reg]:
  """Bytes x0 y0, x1 y1, x2 y2, x3 y3, in halves."""
  return [*p.halves(p.permute(x, y, 0x5140)), *p.halves(p.permute(x, y, 0x7362))]


def _load_words(p: Ptx, at: Mem, nbytes: int) -> list[Reg]:
  """The words of `nbytes` bytes of shared memory, in loads of up to 16."""
  size = min(nbytes, 16)
  words = []
  for start in range(0, nbytes, size):
    words += p.load("shared", Mem(at.base, at.offset + start), size // 4)
  return words
