"""Where paged keys and values lie, and tiles of them as operands, in Triton. Device functions.

A wide tile comes in two halves of its columns: of NVFP4 the even and the odd ones, as two share a
byte, of other formats the first and the last ones. Products with K add up over both, and out has a
half for each of V's.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from nvfp4_pallas.kernels.triton_fp4 import BLOCK, WIDE_UNIT, made_here, widen


@triton.jit
def first_half(FORMAT: tl.constexpr, DIM: tl.constexpr):
  """int32 [DIM / 2]: the columns of the first half."""
  c = tl.arange(0, DIM // 2)
  return 2 * c if FORMAT == "nvfp4" else c


@triton.jit
def to_second_half(FORMAT: tl.constexpr, DIM: tl.constexpr):
  """How far the columns of the second half are from those of the first."""
  return 1 if FORMAT == "nvfp4" else DIM // 2


@triton.jit
def unit(FORMAT: tl.constexpr):
  """What the values of a wide tile lack as a factor, beside the global scale."""
  return WIDE_UNIT if FORMAT == "nvfp4" else 1.0


@triton.jit
def rows_of_pool(
  key, page_row, max_pages, num_pages, head, HEADS: tl.constexpr, PAGE: tl.constexpr
):
  """int64: the rows of a pool [num_pages, HEADS, PAGE, ...] that hold keys of one head.

  Past a sequence's last page the table may hold anything, but some page has to be read.
  """
  page = tl.load(page_row + tl.minimum(key // PAGE, max_pages - 1))
  page = tl.minimum(tl.maximum(page, 0), num_pages - 1).to(tl.int64)
  return (page * HEADS + head) * PAGE + key % PAGE


@triton.jit
def scale_tile(scales, row, live, FORMAT: tl.constexpr, DIM: tl.constexpr):
  """Block scales e4m3 [len(row), DIM / 16], 0 for what is not live: what is times that is 0 too.
  Nothing for other formats."""
  if FORMAT == "nvfp4":
    at = scales + row[:, None] * (DIM // BLOCK) + tl.arange(0, DIM // BLOCK)[None, :]
    return tl.load(at, mask=live[:, None], other=0.0)
  else:
    return 0


@triton.jit
def wide_tile(
  data, scale, row, live, FORMAT: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr
):
  """Two bfloat16 [len(row), DIM / 2], 0 for what is not live."""
  c = tl.arange(0, DIM // 2)
  if FORMAT == "nvfp4":
    return widen(tl.load(data + row[:, None] * (DIM // 2) + c[None, :]), scale, row.shape[0], DIM)
  else:
    at = data + row[:, None] * DIM + c[None, :]
    if MASKED:
      first = tl.load(at, mask=live[:, None], other=0.0)
      last = tl.load(at + DIM // 2, mask=live[:, None], other=0.0)
    else:
      first = tl.load(at)
      last = tl.load(at + DIM // 2)
    if FORMAT == "fp8":  # by way of float32, as there is no direct conversion
      first = made_here(first.to(tl.float32).to(tl.bfloat16))
      last = made_here(last.to(tl.float32).to(tl.bfloat16))
    return first, last


@triton.jit
def codes_tile(data, row, DIM: tl.constexpr):
  """NVFP4 codes as they are, two a byte: uint8 [DIM / 2, len(row)], a right operand."""
  return tl.load(data + row[None, :] * (DIM // 2) + tl.arange(0, DIM // 2)[:, None])
