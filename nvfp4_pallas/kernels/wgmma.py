"""Products of a warpgroup: the left operand in registers, the right one in shared memory. PTX.

    D [64, columns] += A [64, k] B^T [columns, k]    float32 sums, 32 bytes of k at a time

Operands are "f16", "bf16" or "e4m3", both the same. A right operand lies K-major from a multiple of
ALIGNMENT on: of 128 bytes of k each column has a row, columns one after the other, and then follow
those of the next 128 bytes of k. The
16-byte piece i of row r is at i ^ (r % 8) in it, so that a column of pieces meets all banks.

Source: matrix descriptors and 128-byte swizzling in the PTX ISA's chapter on wgmma.
"""

from __future__ import annotations

from nvfp4_pallas.kernels.ptx import Ptx, Reg

ROW = 128  # bytes of k
STEP = 32  # bytes of k of a product
ALIGNMENT = 8 * ROW  # what the swizzle spans


def place(row: Reg, k_bytes: Reg | int) -> Reg:
  """Where in its ROW bytes a row has the 16-byte piece that begins at k_bytes."""
  return ((row & 7) * 16) ^ k_bytes


def descriptor(address: Reg) -> Reg:
  """The low word of the descriptor of a right operand at an address in shared memory."""
  return ((address & 0x3FFFF) >> 4) | 0x10000


def right(p: Ptx, low: Reg, offset: int) -> Reg:
  """The descriptor of what lies `offset` bytes after descriptor()'s address."""
  low = low + (offset >> 4) if offset else low
  swizzle_128_bytes, from_8_rows_to_next = 1 << 30, ALIGNMENT >> 4
  return p.new("d", "mov.b64", [low, swizzle_128_bytes | from_8_rows_to_next])


def begin(p: Ptx) -> None:
  """Before products of which an operand or the sum was written by instructions."""
  p.emit("wgmma.fence.sync.aligned")


def across(low: Reg, part: int) -> Reg:
  """The low word of the descriptor of an operand whose rows are k, 128 bytes of columns in each.

  Args:
    low: descriptor()'s.
    part: bytes from those columns to the next.
  """
  return (low & 0xFFFF) | (part >> 4) << 16


def multiply(
  p: Ptx,
  operand: str,
  acc: list[Reg],
  a: list[Reg] | Reg,
  b: Reg,
  accumulate: Reg,
  rows_of_k: bool = False,
) -> None:
  """Starts acc += a b of one STEP, or acc = a b; the columns are two to a register of acc.

  Args:
    operand: the type of a and b.
    a: registers; or a descriptor, of 64 rows that lie in shared memory as right()'s columns do.
    rows_of_k: of b, which is across()'s; not of e4m3.
  """
  k = STEP if operand == "e4m3" else STEP // 2
  op = f"wgmma.mma_async.sync.aligned.m64n{2 * len(acc)}k{k}.f32.{operand}.{operand}"
  transposed = [0] if isinstance(a, Reg) else []
  transposed = [] if operand == "e4m3" else [*transposed, int(rows_of_k)]
  p.emit(op, acc, a, b, accumulate, 1, 1, *transposed)


def commit(p: Ptx) -> None:
  """Products since the last one are a group."""
  p.emit("wgmma.commit_group.sync.aligned")


def wait(p: Ptx, groups: int) -> None:
  """Until at most the last `groups` groups are not done."""
  p.emit("wgmma.wait_group.sync.aligned", groups)
