"""Device and shared memory of emulated PTX programs, and the instructions that read and write them.

Every access is checked for bounds and alignment. Device memory also knows which bytes may be read
and written; shared memory knows for each byte who touched it last, and whether the warp that
touches it now has synchronised with that one since.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nvfp4_pallas.kernels.ptx import Reg
from tests.ptx_registers import LANES, PtxError, Registers, Step

BASE = 0x7F00_0000_0000  # of device memory: 32 bits do not hold an address
SHARED_BASE = 1024
ALIGNMENT = 256
GUARD, UNWRITTEN, SHARED_POISON, IN_FLIGHT = 0xA5, 0xEE, 0xFF, 0xFF
SIZES = (1, 2, 4, 8, 16)


def _views(data: np.ndarray, unit: int = 1) -> dict[int, np.ndarray]:
  """The same bytes as items of each size (of each size times `unit`, for arrays of items)."""
  return {
    size: data.view(f"u{size * unit}" if size * unit <= 8 else f"V{size * unit}") for size in SIZES
  }


def _item(size: int, value: int, dtype: Any) -> Any:
  """`size` equal values as one item of `_views`."""
  array = np.full(size, value, dtype)
  width = array.nbytes
  return array.view(f"u{width}" if width <= 8 else f"V{width}")[0]


_ZEROS = {size: _item(size, 0, np.uint8) for size in SIZES}
_ONES = {size: _item(size, 1, np.uint8) for size in SIZES}


class Memory:
  """Device memory that holds named arrays, 256-byte aligned, with bytes between that guard them.

  Inputs cannot be written. Outputs cannot be read before they are written, and start as bytes 0xEE.
  What one block of a launch has written, another may neither read nor write in the same launch.
  """

  def __init__(
    self,
    inputs: Mapping[str, Any] | None = None,
    outputs: Mapping[str, Any] | None = None,
    in_place: Mapping[str, Any] | None = None,
    readable: Mapping[str, Any] | None = None,
    copies_read_all: bool = True,
  ):
    """Lays the arrays out.

    Args:
      inputs: name to array.
      outputs: name to anything with a shape and a dtype.
      in_place: name to array, which the program may change.
      readable: name to a mask, which broadcasts to the array: loads elsewhere are errors.
      copies_read_all: asynchronous copies may read what loads may not (whole tiles with padding).
    """
    in_place = in_place or {}
    given = {k: np.asarray(v) for k, v in {**(inputs or {}), **in_place}.items()}
    self._types = {k: (v.shape, np.dtype(v.dtype)) for k, v in given.items()}
    self._types |= {k: (tuple(v.shape), np.dtype(v.dtype)) for k, v in (outputs or {}).items()}
    self._start: dict[str, int] = {}
    end = 0
    for name, (shape, dtype) in self._types.items():
      end = (end // ALIGNMENT + 2) * ALIGNMENT  # at least one guard of ALIGNMENT bytes
      self._start[name] = end
      end += int(np.prod(shape)) * dtype.itemsize
    end = (end // ALIGNMENT + 2) * ALIGNMENT
    self.data = np.full(end, GUARD, np.uint8)
    self.inside, self.loadable, self.storable = (np.zeros(end, np.uint8) for _ in range(3))
    self.writer = np.full(end, -1)
    self._copies_read_all = copies_read_all
    for name in self._types:
      where = self._slice(name)
      self.inside[where] = 1
      self.storable[where] = name not in (inputs or {})
      if name not in given:
        self.data[where] = UNWRITTEN
        continue
      array = np.ascontiguousarray(given[name])
      self.data[where] = array.reshape(-1).view(np.uint8)
      mask = np.broadcast_to((readable or {}).get(name, True), array.shape)
      self.loadable[where] = np.repeat(mask.reshape(-1), array.itemsize)
    self.items, self._loadable, self._storable = map(
      _views, (self.data, self.loadable, self.storable)
    )
    self._log: list[tuple[int, np.ndarray]] = []

  def _slice(self, name: str) -> slice:
    shape, dtype = self._types[name]
    start = self._start[name]
    return slice(start, start + int(np.prod(shape)) * dtype.itemsize)

  def address(self, name: str) -> int:
    return BASE + self._start[name]

  def array(self, name: str) -> np.ndarray:
    """A copy of what it holds now."""
    shape, dtype = self._types[name]
    return self.data[self._slice(name)].copy().view(dtype).reshape(shape)

  def written(self, name: str) -> np.ndarray:
    """The elements of which some byte was written."""
    shape, dtype = self._types[name]
    written = self.writer[self._slice(name)] >= 0
    return written.reshape(*shape, dtype.itemsize).any(-1)

  # A launch.

  def begin(self) -> None:
    self.writer[:] = -1

  def end_block(self, program: int) -> None:
    """Takes what the block wrote away from the others."""
    for size, index in self._log:
      self._loadable[size][index] = self._storable[size][index] = _ZEROS[size]
      self.writer.reshape(-1, size)[index] = program
    self._log.clear()

  def end(self) -> None:
    written = self.writer >= 0
    self.loadable[written] = self.storable[written] = 1

  # Accesses by lanes: items of `size` bytes.

  def load(self, size: int, index: np.ndarray) -> np.ndarray:
    try:
      allowed = self._loadable[size].take(index)
    except IndexError:
      self._fail("load", size, index)
    if allowed.tobytes() != b"\1" * (size * len(index)):
      self._fail("load", size, index)
    return self.items[size].take(index)

  def store(self, size: int, index: np.ndarray, items: np.ndarray) -> None:
    try:
      allowed = self._storable[size].take(index)
    except IndexError:
      self._fail("store", size, index)
    if allowed.tobytes() != b"\1" * (size * len(index)):
      self._fail("store", size, index)
    self.items[size][index] = items
    if self.items[size].take(index).tobytes() != items.tobytes():
      raise PtxError("lanes store different values to one address of device memory")
    self._loadable[size][index] = _ONES[size]
    self._log.append((size, index))

  def atomic_add(self, at: int, value: int) -> int:
    """What the word was. Written by another block or not, but in this launch by atomics alone."""
    if not 0 <= at < len(self.data) - 3 or at % 4 or not self._loadable[4].take(at // 4).all():
      self._fail("load", 4, np.array([at // 4]))
    word = self.data[at : at + 4].view(np.uint32)
    old = int(word[0])
    word[0] = (old + value) % 2**32
    return old

  def copy_source(self, address: int, size: int) -> np.ndarray:
    """The bytes that an asynchronous copy brings."""
    start = address - BASE
    allowed = self.inside if self._copies_read_all else self.loadable
    index = np.arange(start, start + size)
    if start < 0 or start + size > len(self.data) or not allowed[start : start + size].all():
      self._fail("copy", 1, index, allowed)
    return self.data[start : start + size].copy()

  def prefetch(self, address: int, size: int) -> None:
    """Brings bytes nearer, whatever they are; they must be an array's."""
    start = address - BASE
    if start < 0 or start + size > len(self.data) or not self.inside[start : start + size].all():
      self._fail("copy", 1, np.arange(start, start + size), self.inside)

  def _fail(self, what: str, size: int, index: np.ndarray, allowed: Any = None):
    if allowed is None:
      allowed = self.loadable if what == "load" else self.storable
    for lane, i in enumerate(index):
      for at in range(int(i) * size, int(i) * size + size):
        if not 0 <= at < len(self.data) or not allowed[at]:
          where = f"active lane {lane} of the {what}" if what != "copy" else "the copy"
          raise PtxError(f"{where} touches {self._describe(at, what)}")
    raise AssertionError("an access failed for no reason")

  def _describe(self, at: int, what: str) -> str:
    def distance(name):
      where = self._slice(name)
      return max(where.start - at, at - where.stop + 1, 0)

    if not self._types:
      return f"byte {at}, and there are no arrays"
    name = min(self._types, key=distance)
    offset = at - self._start[name]
    shape, dtype = self._types[name]
    text = f"byte {offset} of {name}"
    if distance(name):
      size = int(np.prod(shape)) * dtype.itemsize
      return f"{text}, which has {size} bytes: out of bounds by {distance(name)}"
    if self.writer[at] >= 0:
      return f"{text}, which block {self.writer[at]} wrote in this launch"
    if what == "store":
      return f"{text}, which is an input"
    return f"{text}, which was never written or is marked as not readable"


class Shared:
  """Shared memory of a block, and what each of its warps has synchronised with.

  An event is a stretch of one warp's work between two releases (bar.sync, arriving at an mbarrier),
  or the copies of one phase of an mbarrier. Bytes remember the event of their last write and of
  each warp's last read. A warp knows its own events, and others' through what it acquires.

  Attributes:
    known: bool [warps, events].
    event: of each warp, now.
  """

  def __init__(self, size: int, warps: int, races: bool):
    size = -(-size // 16) * 16
    self.size, self._warps, self._races = size, warps, races
    self.data = np.empty(size, np.uint8)
    self.items = _views(self.data)
    self.last_write = np.empty(size, np.uint32)
    self.last_read = np.empty((warps, size), np.uint32)
    self._write_views = _views(self.last_write, 4)
    self._read_views = [_views(row, 4) for row in self.last_read]
    self.known = np.zeros((warps, 1024), bool)

  def reset(self) -> None:
    self.data[:] = SHARED_POISON
    self.last_write[:] = 0
    self.last_read[:] = 0
    self.known[:] = False
    self.known[:, 0] = True  # the start
    self._names = ["the start"]
    self.event = [0] * self._warps
    self._stamps: list[dict[int, Any]] = [{} for _ in range(self._warps)]
    for warp in range(self._warps):
      self.release(warp)

  # Events.

  def new_event(self, name: str) -> int:
    self._names.append(name)
    if len(self._names) > self.known.shape[1]:
      self.known = np.pad(self.known, ((0, 0), (0, self.known.shape[1])))
    return len(self._names) - 1

  def release(self, warp: int) -> np.ndarray:
    """What the warp knows so far; its further accesses belong to another event."""
    known = self.known[warp].copy()
    self.event[warp] = event = self.new_event(f"warp {warp}")
    self.known[warp, event] = True
    self._stamps[warp] = {}
    return known

  def acquire(self, warp: int, known: np.ndarray) -> None:
    self.known[warp, : len(known)] |= known

  def _stamp(self, warp: int, size: int) -> Any:
    """The warp's event, for each byte of an item."""
    stamps = self._stamps[warp]
    if size not in stamps:
      stamps[size] = _item(size, self.event[warp], np.uint32)
    return stamps[size]

  # Accesses by lanes: items of `size` bytes.

  def read(self, warp: int, size: int, index: np.ndarray) -> np.ndarray:
    try:
      items = self.items[size].take(index)
    except IndexError:
      self._out_of_bounds(size, index)
    if self._races:
      events = self._write_views[size].take(index).view(np.uint32)
      if b"\0" in self.known[warp].take(events).tobytes():
        self._race(warp, "reads", "written", size, index, self.last_write)
      self._read_views[warp][size][index] = self._stamp(warp, size)
    return items

  def write(self, warp: int, size: int, index: np.ndarray, items: np.ndarray) -> None:
    try:
      events = self._write_views[size].take(index).view(np.uint32)
    except IndexError:
      self._out_of_bounds(size, index)
    if self._races:
      known = self.known[warp]
      if b"\0" in known.take(events).tobytes():
        self._race(warp, "writes", "written", size, index, self.last_write)
      for other in range(self._warps):
        events = self._read_views[other][size].take(index).view(np.uint32)
        if b"\0" in known.take(events).tobytes():
          self._race(warp, "writes", "read", size, index, self.last_read[other])
      self._write_views[size][index] = self._stamp(warp, size)
    self.items[size][index] = items
    if self.items[size].take(index).tobytes() != items.tobytes():
      raise PtxError("lanes store different values to one address of shared memory")

  def claim(self, warp: int, address: int, size: int, event: int) -> slice:
    """Gives bytes to a copy that is in flight, or to an mbarrier: to an event that none knows."""
    start = address - SHARED_BASE
    where, index = slice(start, start + size), np.arange(start, start + size)
    if start < 0 or start + size > self.size:
      self._out_of_bounds(1, index)
    if self._races:
      known = self.known[warp]
      if not known[self.last_write[where]].all():
        self._race(warp, "overwrites", "written", 1, index, self.last_write)
      for row in self.last_read:
        if not known[row[where]].all():
          self._race(warp, "overwrites", "read", 1, index, row)
    self.last_write[where] = event
    self.data[where] = IN_FLIGHT
    return where

  def deliver(self, where: slice, data: np.ndarray) -> None:
    self.data[where] = data

  def _out_of_bounds(self, size: int, index: np.ndarray):
    bad = [(lane, int(i)) for lane, i in enumerate(index) if not 0 <= i < self.size // size]
    lane, i = bad[0]
    at = (i * size + 2**31) % 2**32 - 2**31
    raise PtxError(
      f"active lane {lane} touches byte {at} of shared memory, which has {self.size} bytes"
    )

  def _race(self, warp: int, does: str, done: str, size: int, index: np.ndarray, last: np.ndarray):
    for i in index:
      for at in range(int(i) * size, int(i) * size + size):
        if not self.known[warp, last[at]]:
          who = self._names[last[at]]
          raise PtxError(
            f"race: warp {warp} {does} byte {at} of shared memory, {done} by {who} without "
            "synchronisation since"
          )
    raise AssertionError("a race for no reason")


# Loads and stores. Makers take a machine (ptx_emulator.py).

_IGNORED = {"nc", "ca", "cg", "cs", "cv", "lu", "wb", "wt", "cta", "gpu", "weak", "relaxed"}


def _parse(op: str) -> tuple[str, int, int, str, bool]:
  """(space, values, bytes of each, register kinds, has a cache policy) of a load or store."""
  _, *modifiers, type_ = op.replace("shared::cta", "shared").split(".")
  space, count, policy = "", 1, False
  for m in modifiers:
    if m in ("global", "shared"):
      space = m
    elif m in ("v2", "v4"):
      count = int(m[1])
    elif m == "L2::cache_hint":
      policy = True
    elif m not in _IGNORED and not m.startswith(("L1::", "L2::")):
      raise NotImplementedError(op)
  if not space or type_ not in ("u8", "u16", "u32", "b8", "b16", "b32", "f32"):
    raise NotImplementedError(op)
  size = int(type_[1:]) // 8
  if size * count > 16:
    raise NotImplementedError(op)
  return space, count, size, "r" if type_[0] == "u" else "rf", policy


def address_of(r: Registers, mem: Any, space: str):
  """A function that gives the byte offsets of all lanes, and the alignment check of `size`."""
  if space == "global":
    base, offset = r.u64(mem.base), np.uint64((mem.offset - BASE) % 2**64)
  else:
    base, offset = r.u32(mem.base), np.uint32((mem.offset - SHARED_BASE) % 2**32)
  return lambda: base + offset


def aligned_items(offsets: np.ndarray, size: int) -> np.ndarray:
  """Which items of `size` bytes lie at the offsets."""
  if size > 1:
    rest = offsets & offsets.dtype.type(size - 1)
    if np.count_nonzero(rest):
      lane = int(np.flatnonzero(rest)[0])
      raise PtxError(f"active lane {lane}: the address is not a multiple of {size}")
    offsets = offsets >> offsets.dtype.type(size.bit_length() - 1)
  return offsets.view(np.int64) if offsets.itemsize == 8 else offsets.astype(np.int64)


def _row(r: Registers, register: Any, size: int, kinds: str) -> np.ndarray:
  is_short = size == 2 and isinstance(register, Reg) and register.kind == "h"
  return r.u16(register) if is_short else r.words[r.row(register, kinds)]


def _values(r: Registers, op: str, operand: Any, policy: list[Any]):
  """The registers that are loaded or stored, their rows, and (space, count, size, kinds)."""
  *access, has_policy = _parse(op)
  _, count, size, kinds = access
  if len(policy) != has_policy:
    raise NotImplementedError(f"{op} with {2 + len(policy)} operands")
  registers = list(operand) if isinstance(operand, (list, tuple)) else [operand]
  if len(registers) != count:
    raise TypeError(f"{op} of {len(registers)} registers")
  return registers, [_row(r, register, size, kinds) for register in registers], access


def make_load(machine, instruction) -> Step:
  r, memory, shared = machine.r, machine.block.memory, machine.block.shared
  target, mem, *policy = instruction.args
  targets, rows, (space, count, size, kinds) = _values(r, instruction.op, target, policy)
  block = None if rows[0].itemsize == 2 else r.consecutive(targets, kinds)
  address, mask, total = address_of(r, mem, space), r.mask(instruction), size * count
  dtype = f"u{size}"
  load = memory.load
  if space == "shared":
    load = lambda size, index: shared.read(machine.warp.index, size, index)

  if mask is None and block is not None:
    whole = block.T if count > 1 else block[0]

    def step():
      items = load(total, aligned_items(address(), total)).view(dtype)
      whole[...] = items.reshape(LANES, count) if count > 1 else items

    return step

  def masked_step():
    lanes = slice(None) if mask is None else np.flatnonzero(mask())
    offsets = address()[lanes]
    if len(offsets):
      items = load(total, aligned_items(offsets, total)).view(dtype).reshape(-1, count)
      for i, row in enumerate(rows):
        row[lanes] = items[:, i]

  return masked_step


def make_store(machine, instruction) -> Step:
  r, memory, shared = machine.r, machine.block.memory, machine.block.shared
  mem, source, *policy = instruction.args
  _, rows, (space, count, size, _) = _values(r, instruction.op, source, policy)
  address, mask, total = address_of(r, mem, space), r.mask(instruction), size * count
  dtype = memory.items[total].dtype

  def step():
    lanes = slice(None) if mask is None else np.flatnonzero(mask())
    offsets = address()[lanes]
    if not len(offsets):
      return
    values = np.stack([row[lanes] for row in rows], 1).astype(f"u{size}")
    items = values.reshape(-1).view(dtype)
    index = aligned_items(offsets, total)
    if space == "global":
      memory.store(total, index, items)
    else:
      shared.write(machine.warp.index, total, index, items)

  return step


def make_atomic(machine, instruction) -> Step:
  """atom.global.add.u32, which all blocks may do: only the sum counts."""
  r, memory = machine.r, machine.block.memory
  if instruction.op != "atom.global.add.u32":
    raise NotImplementedError(instruction.op)
  target, mem, value = instruction.args
  target, value = r.u32(target), r.u32(value)
  address, mask = address_of(r, mem, "global"), r.mask(instruction)

  def step():
    for lane in range(LANES) if mask is None else np.flatnonzero(mask()):
      target[lane] = memory.atomic_add(int(address()[lane]), int(value[lane]))

  return step


def make_matrix(machine, instruction) -> Step:
  """ldmatrix and stmatrix: 8 by 8 halves, of which lane 8 * n + i names row i of matrix n."""
  r, shared = machine.r, machine.block.shared
  name, *modifiers = instruction.op.replace("shared::cta", "shared").split(".")
  transposed = "trans" in modifiers
  rest = [m for m in modifiers if m != "trans"]
  count = next((n for n in (1, 2, 4) if rest == f"sync aligned m8n8 x{n} shared b16".split()), 0)
  if not count:
    raise NotImplementedError(instruction.op)
  if instruction.when is not None:
    raise NotImplementedError(f"{instruction.op} with a guard")
  mem, registers = instruction.args if name == "stmatrix" else instruction.args[::-1]
  if not isinstance(registers, (list, tuple)) or len(registers) != count:
    raise TypeError(f"{instruction.op} of {registers}")
  rows = [r.words[r.row(x, "r")] for x in registers]
  address = address_of(r, mem, "shared")

  def index():
    return aligned_items(address()[: 8 * count], 16)

  def load():
    matrices = shared.read(machine.warp.index, 16, index()).view(np.uint16).reshape(count, 8, 8)
    if transposed:
      matrices = matrices.transpose(0, 2, 1)
    words = np.ascontiguousarray(matrices).view(np.uint32).reshape(count, LANES)
    for row, value in zip(rows, words, strict=True):
      row[...] = value

  def store():
    matrices = np.stack(rows).view(np.uint16).reshape(count, 8, 8)
    if transposed:
      matrices = matrices.transpose(0, 2, 1)
    items = np.ascontiguousarray(matrices).reshape(8 * count, 8).view("V16").ravel()
    shared.write(machine.warp.index, 16, index(), items)

  return load if name == "ldmatrix" else store
