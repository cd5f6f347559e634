"""Kernels around single device functions, for tests of those."""

import triton
import triton.language as tl

from nvfp4_pallas.kernels.triton_fp4 import decode, encode, widen


@triton.jit
def encode_twice(x, codes, scales, codes_left, scales_left, ROWS: tl.constexpr, DIM: tl.constexpr):
  r, c = tl.arange(0, ROWS)[:, None], tl.arange(0, DIM)[None, :]
  half, block = tl.arange(0, DIM // 2)[None, :], tl.arange(0, DIM // 16)[None, :]
  rows = tl.load(x + r * DIM + c)
  first, first_scale = encode(rows, ROWS, DIM)
  second, second_scale = encode(rows - decode(first, first_scale, ROWS, DIM), ROWS, DIM)
  tl.store(codes + r * (DIM // 2) + half, first)
  tl.store(scales + r * (DIM // 16) + block, first_scale.to(tl.uint8, bitcast=True))
  tl.store(codes_left + r * (DIM // 2) + half, second)
  tl.store(scales_left + r * (DIM // 16) + block, second_scale.to(tl.uint8, bitcast=True))


@triton.jit
def widen_rows(codes, scales, wide, ROWS: tl.constexpr, DIM: tl.constexpr):
  r, half = tl.arange(0, ROWS)[:, None], tl.arange(0, DIM // 2)[None, :]
  scale = tl.load(scales + r * (DIM // 16) + tl.arange(0, DIM // 16)[None, :])
  even, odd = widen(tl.load(codes + r * (DIM // 2) + half), scale, ROWS, DIM)
  at = wide + r * (DIM // 2) + half
  tl.store(at, even)
  tl.store(at + ROWS * (DIM // 2), odd)
