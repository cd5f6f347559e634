"""NVFP4 in Triton: rows of q become FP4 operands, stored codes BF16 ones. Device functions.

`encode` is format.py's with global scale 1, for what bfloat16 can hold or what a first level has
left of it. The definition divides, |x| / block_scale, and rounds to the nearest code; here |x| is
compared with the midpoints times block_scale, which are exact in float32. Both say the same: x and
such a product have at most 12 significant bits, so they are equal, or their quotient is too far
from the midpoint to be rounded to it.

In float32 and in bfloat16, sign, exponent and mantissa of a code put in their places give its value
times 2^-126. `widen` multiplies that by the block scale times 2^119, both exact in bfloat16, and so
is the product; its unit of 2^-7 is the caller's to put right.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(16)
NAN_SCALE = tl.constexpr(0x7F)
INFINITY_BITS = tl.constexpr(0x7F800000)  # of float32; those of NaN are above
TWO_119 = tl.constexpr(2.0**119)
WIDE_UNIT = tl.constexpr(2.0**7)


@triton.jit
def encode(x, ROWS: tl.constexpr, DIM: tl.constexpr):
  """float32 [ROWS, DIM] -> codes uint8 [ROWS, DIM / 2], block scales e4m3 [ROWS, DIM / 16]."""
  x = tl.reshape(x, (ROWS, DIM // BLOCK, BLOCK))
  # As integers, magnitudes are in the same order, and infinity and NaN are the largest.
  magnitude = x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF
  amax = tl.max(magnitude, axis=2)
  finite = amax < INFINITY_BITS
  amax = tl.where(finite, amax, 0).to(tl.float32, bitcast=True)
  scale = tl.div_rn(amax, 6.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
  scale = tl.where(finite, scale, NAN_SCALE).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
  step = scale.to(tl.float32)[:, :, None]
  y = magnitude.to(tl.float32, bitcast=True)
  # A value halfway between two codes gets the even one.
  code = (y > 0.25 * step).to(tl.uint32) + (y >= 0.75 * step).to(tl.uint32)
  code += (y > 1.25 * step).to(tl.uint32) + (y >= 1.75 * step).to(tl.uint32)
  code += (y > 2.5 * step).to(tl.uint32) + (y >= 3.5 * step).to(tl.uint32)
  code += (y > 5.0 * step).to(tl.uint32)
  code |= (x.to(tl.uint32, bitcast=True) >> 28) & 8
  code = tl.where(step > 0.0, code, 0).to(tl.uint8)  # all zeros where the scale is 0 or NaN
  even, odd = tl.split(tl.reshape(code, (ROWS, DIM // 2, 2)))
  return even | (odd << 4), scale


@triton.jit
def decode(codes, scale, ROWS: tl.constexpr, DIM: tl.constexpr):
  """The inverse, exact: float32 [ROWS, DIM]."""
  code = tl.reshape(tl.join(codes & 15, codes >> 4), (ROWS, DIM // BLOCK, BLOCK)).to(tl.uint32)
  tiny = ((code * 0x10400000) & 0x81C00000).to(tl.float32, bitcast=True)
  wide = tiny * TWO_119 * (scale.to(tl.float32) * WIDE_UNIT)[:, :, None]
  return tl.reshape(wide, (ROWS, DIM))


# For four bytes, two at a time: the codes in their low nibbles, $0 and $1, and in their high ones.
_WIDEN = tl.constexpr("""{
  .reg .b32 two, t;
  prmt.b32 two, $4, 0, 0x4140;
  and.b32 t, two, 0x000f000f;
  mul.lo.u32 t, t, 0x1040;
  and.b32 t, t, 0x81c081c0;
  mul.rn.bf16x2 $0, t, $5;
  and.b32 t, two, 0x00f000f0;
  mul.lo.u32 t, t, 0x104;
  and.b32 t, t, 0x81c081c0;
  mul.rn.bf16x2 $2, t, $5;
  prmt.b32 two, $4, 0, 0x4342;
  and.b32 t, two, 0x000f000f;
  mul.lo.u32 t, t, 0x1040;
  and.b32 t, t, 0x81c081c0;
  mul.rn.bf16x2 $1, t, $6;
  and.b32 t, two, 0x00f000f0;
  mul.lo.u32 t, t, 0x104;
  and.b32 t, t, 0x81c081c0;
  mul.rn.bf16x2 $3, t, $6;
}""")


@triton.jit
def widen(codes, scale, ROWS: tl.constexpr, DIM: tl.constexpr):
  """codes uint8 [ROWS, DIM / 2], block scales [ROWS, DIM / 16] -> value * 2^-7, the even columns
  and the odd ones, each bfloat16 [ROWS, DIM / 2].

  Assembly, as the compiler would handle bytes one by one; and not pure, lest it move this behind
  the exchange between warps, where each warp would do the same work.
  """
  scale = (scale.to(tl.float32) * TWO_119).to(tl.bfloat16)[:, :, None]
  scale = tl.broadcast_to(scale, (ROWS, DIM // BLOCK, BLOCK // 2))
  return tl.inline_asm_elementwise(
    _WIDEN,
    "=&r,=&r,=&r,=&r,r,r,r",
    [codes, tl.reshape(scale, (ROWS, DIM // 2))],
    dtype=(tl.bfloat16, tl.bfloat16),
    is_pure=False,
    pack=4,
  )


@triton.jit
def made_here(x):
  """bfloat16 x, not to be moved: for the second reason of `widen`."""
  return tl.inline_asm_elementwise(
    "mov.b32 $0, $1;", "=r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=2
  )
