"""wgmma of emulated PTX programs: products of four warps, with results that arrive when waited for.

bf16, f16 or e4m3. B lies in shared memory and is given by a descriptor, with the 128-byte swizzle:
its rows are columns of the product, or with the transposing flag they are k. A is in registers, or
lies in shared memory with rows that are rows of the product.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import numpy as np

from nvfp4_pallas.kernels.ptx import Instruction, Reg
from tests import ptx_numbers as numbers
from tests.ptx_barriers import At, Wait, one_value
from tests.ptx_lanes import fragment
from tests.ptx_memory import SHARED_BASE
from tests.ptx_registers import LANE, POISON, PtxError, immediate, uniform

_OP = re.compile(
  r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)(k16\.f32\.b?f16|k32\.f32\.e4m3)\.(b?f16|e4m3)"
)
SWIZZLE_128 = 1
_E4M3 = numbers.F16.take(numbers.FROM_E4M3)  # of all bits


@dataclasses.dataclass
class _Product:
  """A wgmma that nobody has waited for yet, and what it reads."""

  result: tuple[int, ...]  # rows of registers
  a: list[int]  # likewise; none where A is in shared memory
  a_values: np.ndarray
  items: np.ndarray  # of 16 bytes in shared memory
  values: bytes


class Wgmma:
  """The products that a warp has in flight."""

  def __init__(self):
    self.groups: list[list[_Product]] = []
    self.open: list[_Product] = []
    self.values: dict[tuple[int, ...], np.ndarray] = {}  # the sums in flight
    self.fenced: np.ndarray | None = None  # the registers at the last wgmma.fence

  def in_flight(self) -> bool:
    return bool(self.groups or self.open)


def descriptor_items(descriptor: int, n: int, rows_of_k: bool = False) -> np.ndarray:
  """The items of 16 bytes of an operand: [n, 2], or [16, n / 8] where rows are k."""
  start, stride = (descriptor & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
  leading = (descriptor >> 16 & 0x3FFF) << 4
  base_offset, swizzle = descriptor >> 49 & 7, descriptor >> 62
  if swizzle != SWIZZLE_128 or base_offset:
    raise NotImplementedError(f"the shared memory descriptor {descriptor:#x}")
  row = np.arange(16 if rows_of_k else n)[:, None]
  piece = np.arange(n // 8 if rows_of_k else 2)
  at = start + row // 8 * stride + row % 8 * 128 + piece // 8 * leading + 16 * (piece % 8)
  return ((at ^ (at >> 7 & 7) << 4) - SHARED_BASE >> 4).ravel()


def make_wgmma(machine, i: Instruction, number: int) -> Callable[[], Wait | None]:
  if i.when is not None:
    raise NotImplementedError(f"{i.op} with a guard")
  if i.op == "wgmma.fence.sync.aligned":
    return lambda: _fence(machine)
  if i.op == "wgmma.commit_group.sync.aligned":
    return lambda: _commit(machine.warp.wgmma)
  if i.op == "wgmma.wait_group.sync.aligned":
    left = immediate(i.args[0])
    return lambda: _wait(machine, left)
  match = _OP.fullmatch(i.op)
  if (
    not match
    or not match[2].endswith("." + match[3])
    or not 8 <= int(match[1]) <= 256
    or int(match[1]) % 8
  ):
    raise NotImplementedError(i.op)
  type_ = {"bf16": numbers.BF16, "f16": numbers.F16, "e4m3": _E4M3}[match[3]]
  return _make_product(machine, i, number, int(match[1]), type_)


def _fence(machine) -> None:
  machine.warp.wgmma.fenced = machine.r.words.copy()


def _commit(wgmma: Wgmma) -> None:
  wgmma.groups.append(wgmma.open)
  wgmma.open = []


def _make_product(
  machine, i: Instruction, number: int, n: int, type_: np.ndarray
) -> Callable[[], Wait]:
  r, block, shared = machine.r, machine.block, machine.block.shared
  results, a, descriptor, keep, scale_a, scale_b, *transposed = i.args
  in_shared = isinstance(a, Reg)
  if len(results) != n // 2 or not (in_shared or len(a) == 4):
    raise TypeError(f"{i.op} of {len(results)} results, {len(a)} registers of A")
  bits = np.uint8 if type_ is _E4M3 else np.uint16
  k = 32 // bits().itemsize
  if (
    len(transposed) != (0 if bits is np.uint8 else 1 + in_shared)
    or set(transposed) - {0, 1}
    or in_shared
    and any(transposed[:1])
    or {scale_a, scale_b} - {1, -1}
  ):
    raise NotImplementedError(f"{i.op} with {i.args[4:]}")
  rows_of_k = bool(transposed and transposed[-1])
  if block.warps % 4:
    raise PtxError(f"wgmma in a block of {block.warps} warps")
  rows = tuple(r.row(x) for x in results)
  a_rows = [] if in_shared else [r.row(x, "r") for x in a]
  a_descriptor = r.u64(a) if in_shared else None
  a_index = None if in_shared else _fragment(a_rows, k)
  registers = r.bytes if bits is np.uint8 else r.halves
  target, floats, descriptor = list(rows), r.words.view(np.float32), r.u64(descriptor)
  sign = float(scale_a * scale_b)
  v = np.arange(n // 2)[:, None]
  order = (LANE // 4 + 8 * (v % 4 // 2)) * n + 8 * (v // 4) + 2 * (LANE % 4) + v % 2

  def start():
    group = machine.warp.index // 4
    name = f"the wgmma of instruction {number} by warpgroup {group}"
    meeting = block.meet(("wgmma", group), name, 4)
    if meeting.name != name:
      raise PtxError(f"other warps of the warpgroup are at {meeting.name}")
    return At(meeting, multiply)

  def multiply():
    wgmma = machine.warp.wgmma
    accumulates = uniform(r.pred(keep)) if isinstance(keep, Reg) else immediate(keep) != 0
    _check_registers(machine, target if accumulates else [], a_rows, rows)
    items = descriptor_items(one_value(descriptor), n, rows_of_k)
    stored = shared.read(machine.warp.index, 16, items).view(bits)
    b = type_.take(stored.reshape(k, n) if rows_of_k else stored.reshape(n, k).T)
    if a_descriptor is None:
      left = registers.take(a_index)
    else:
      of_warp = slice(32 * (machine.warp.index % 4), 32 * (machine.warp.index % 4) + 32)
      of_left = descriptor_items(one_value(a_descriptor), 64)[of_warp]
      left = shared.read(machine.warp.index, 16, of_left).view(bits).reshape(16, k)
      items = np.concatenate([items, of_left])
    value = (type_.take(left) @ b).take(order) * sign
    if accumulates:
      value += wgmma.values.get(rows, floats[target])
    value = value.astype(np.float32)
    value.view(np.uint32)[np.isnan(value)] = numbers.F32_NAN
    wgmma.values[rows] = value
    values = shared.read(machine.warp.index, 16, items).tobytes()
    wgmma.open.append(_Product(rows, a_rows, r.words[a_rows], items, values))
    r.words[target] = POISON

  return start


def _fragment(rows: list[int], k: int) -> np.ndarray:
  """Where the left operand [16, k] lies in the registers, counted in its values."""
  if k == 16:
    return fragment(rows, (16, 16))
  row, column = np.arange(16)[:, None], np.arange(32)
  register = np.asarray(rows)[row // 8 + 2 * (column // 16)]
  return register * 128 + 16 * (row % 8) + column % 16


def _check_registers(
  machine, accumulators: list[int], a: list[int], results: tuple[int, ...]
) -> None:
  wgmma, words = machine.warp.wgmma, machine.r.words
  for rows in wgmma.values:
    if rows != results and set(rows) & {*results, *a}:
      raise PtxError("registers that another wgmma in flight writes")
  if results in wgmma.values:
    if (words[list(results)] != POISON).any():
      raise PtxError("the accumulators changed while a wgmma was in flight")
    accumulators = []
  rows = [*a, *accumulators]
  if wgmma.fenced is None or (words[rows] != wgmma.fenced[rows]).any():
    raise PtxError("registers of the wgmma changed since the last wgmma.fence")


def _wait(machine, left: int) -> None:
  wgmma, shared, words = machine.warp.wgmma, machine.block.shared, machine.r.words
  while len(wgmma.groups) > left:
    for product in wgmma.groups.pop(0):
      if (words[product.a] != product.a_values).any():
        raise PtxError("registers of A changed while the wgmma was in flight")
      if shared.read(machine.warp.index, 16, product.items).tobytes() != product.values:
        raise PtxError("an operand changed in shared memory while the wgmma was in flight")
      later = [p.result for group in (*wgmma.groups, wgmma.open) for p in group]
      if product.result in later or product.result not in wgmma.values:
        continue
      rows = list(product.result)
      if (words[rows] != POISON).any():
        raise PtxError("the accumulators changed while the wgmma was in flight")
      value = wgmma.values.pop(product.result).view(np.uint32)
      words[rows] = value
      if wgmma.fenced is not None:
        wgmma.fenced[rows] = value
