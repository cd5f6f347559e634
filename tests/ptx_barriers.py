"""Waiting in emulated PTX programs: bar, mbarrier and the asynchronous copies that it counts.

Makers take a machine (ptx_emulator.py): the registers `r` and the `warp` that is in them, and the
`block`. Makers of instructions that may wait return functions that return None to go on, or a Wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nvfp4_pallas.kernels.ptx import Instruction
from tests.ptx_memory import SHARED_BASE, Shared
from tests.ptx_registers import LANE, LANES, PtxError, Step, immediate, uniform


class Wait:
  """ready() is true when the warp may go on, with result(). This one only passes its turn."""

  def ready(self) -> bool:
    return True

  def result(self) -> None:
    pass

  def describe(self) -> str:
    return ""


class Meeting(Wait):
  """`count` warps that wait for each other."""

  def __init__(self, name: str, count: int):
    self.name, self.count, self.warps = name, count, 0
    self.known: list[np.ndarray] = []  # what they have synchronised with
    self.any = False  # of their predicates

  def ready(self):
    return self.warps == self.count

  def describe(self):
    return f"{self.name}, where {self.warps} of {self.count} warps are"


class At(Wait):
  """A warp at a meeting."""

  def __init__(self, meeting: Meeting, result: Callable[[], None]):
    self.ready, self.describe, self.result = meeting.ready, meeting.describe, result


class PhaseWait(Wait):
  """A warp at an mbarrier."""

  def __init__(self, barrier: Mbarrier, parity: int, result: Callable[[], None]):
    self.barrier, self.parity, self.result = barrier, parity, result

  def ready(self):
    return self.barrier.parity != self.parity or self.barrier.complete(deliver=True)

  def describe(self):
    return f"parity {self.parity} of {self.barrier.describe()}"


class Mbarrier:
  """The arrivals and bytes that a phase still waits for. A warp that waits gets the copies.

  Attributes:
    made: the event (ptx_memory.Shared) of its initialisation.
    event: of the phase's copies.
  """

  def __init__(self, shared: Shared, address: int, count: int, made: int):
    self.shared, self.address, self.count, self.made = shared, address, count, made
    self.pending, self.bytes, self.parity = count, 0, 0
    self.copies: list[tuple[slice, np.ndarray, int]] = []  # target, data, bytes that count
    self.deferred = 0  # arrivals that happen after copies
    self.known = np.zeros(1, bool)
    self.event = self._new_event()

  def _new_event(self) -> int:
    return self.shared.new_event(f"a copy of the mbarrier at byte {self.address - SHARED_BASE}")

  def learn(self, known: np.ndarray) -> None:
    if len(known) > len(self.known):
      self.known = np.pad(self.known, (0, len(known) - len(self.known)))
    self.known[: len(known)] |= known

  def arrive(self, count: int = 1, deferred: bool = False) -> None:
    missing = self.pending - self.deferred
    if missing < count:
      raise PtxError(f"{count} arrivals, but {missing} are missing: {self.describe()}")
    if deferred:
      self.deferred += count
    else:
      self.pending -= count
    self.complete()

  def complete(self, deliver: bool = False) -> bool:
    """Ends the phase if nothing is missing but, with `deliver`, the copies."""
    if self.pending != self.deferred or self.bytes != sum(c[2] for c in self.copies):
      return False
    if (self.copies or self.deferred) and not deliver:
      return False
    for where, data, _ in self.copies:
      self.shared.data[where] = data
    self.learn(np.zeros(self.event + 1, bool))
    self.known[self.event] = True
    self.event = self._new_event()
    self.copies.clear()
    self.pending, self.deferred, self.bytes, self.parity = self.count, 0, 0, self.parity ^ 1
    return True

  def describe(self) -> str:
    copied = sum(c[2] for c in self.copies)
    missing = self.pending - self.deferred
    text = (
      f"the mbarrier at byte {self.address - SHARED_BASE} of shared memory (parity {self.parity}: "
      f"{missing} of {self.count} arrivals missing, {self.bytes} bytes expected, {copied} copied"
    )
    if self.bytes > copied:
      text += f", {self.bytes - copied} too few"
    if self.bytes < copied:
      text += f", {copied - self.bytes} too many"
    return text + ")"


def one_value(lanes: np.ndarray) -> int:
  """Of all lanes."""
  if (lanes != lanes[0]).any():
    raise PtxError(f"the lanes of the warp disagree: {lanes}")
  return int(lanes[0])


def _lanes(machine, i: Instruction) -> Callable[[], np.ndarray]:
  """The active lanes."""
  mask = machine.r.mask(i)
  return (lambda: LANE) if mask is None else (lambda: np.flatnonzero(mask()))


def _address(machine, mem: Any) -> Callable[[], np.ndarray]:
  """The addresses in shared memory of all lanes."""
  base, offset = machine.r.u32(mem.base), np.uint32(mem.offset % 2**32)
  return lambda: base + offset


def _plain(op: str) -> str:
  """Without the state space and semantics that are the default."""
  for part in (".shared::cta", ".release", ".acquire", ".relaxed", ".cta"):
    op = op.replace(part, "")
  return op


# Barriers of warps.


def make_barrier(machine, i: Instruction) -> Callable[[], Wait | None]:
  r, block, shared, mask = machine.r, machine.block, machine.block.shared, machine.r.mask(i)
  if i.op not in (
    "bar.sync",
    "barrier.sync",
    "barrier.sync.aligned",
    "bar.arrive",
    "bar.red.or.pred",
  ):
    raise NotImplementedError(i.op)
  target, *args = i.args if "red" in i.op else (None, *i.args)
  number = r.u32(args[0])
  threads = immediate(args[1]) if len(args) > 1 else block.threads
  if threads % LANES:
    raise PtxError(f"{threads} threads are not whole warps")
  value = None if target is None else r.pred(args[2])
  target = None if target is None else r.pred(target)

  def wait():
    if mask is not None and not uniform(mask()):
      return None
    key = one_value(number)
    meeting = block.meet(key, f"barrier {key}", threads // LANES)
    meeting.known.append(shared.release(machine.warp.index))
    meeting.any |= value is not None and bool(value.any())

    def done():
      for known in meeting.known:
        shared.acquire(machine.warp.index, known)
      if target is not None:
        target.fill(meeting.any)

    return None if i.op == "bar.arrive" else At(meeting, done)

  return wait


# mbarrier.


def find(machine, address: int) -> Mbarrier:
  barrier = machine.block.mbarriers.get(address)
  if barrier is None:
    raise PtxError(f"no mbarrier at byte {address - SHARED_BASE} of shared memory")
  if not machine.block.shared.known[machine.warp.index, barrier.made]:
    raise PtxError(f"race: another warp made {barrier.describe()}, without synchronisation since")
  return barrier


def make_try_wait(machine, i: Instruction) -> Callable[[], Wait | None]:
  """Fails once if it has to wait."""
  if _plain(i.op) not in ("mbarrier.try_wait.parity.b64", "mbarrier.test_wait.parity.b64"):
    raise NotImplementedError(i.op)
  target, address, parity = (
    machine.r.pred(i.args[0]),
    _address(machine, i.args[1]),
    machine.r.u32(i.args[2]),
  )
  mask = machine.r.mask(i)

  def wait():
    if mask is not None and not uniform(mask()):
      return None
    barrier, phase = find(machine, one_value(address())), one_value(parity)
    if phase > 1:
      raise PtxError(f"a parity of {phase}")
    if barrier.parity == phase and machine.warp.denied != (barrier.address, phase):
      machine.warp.denied = barrier.address, phase
      target.fill(False)
      return Wait()

    def done():
      machine.warp.denied = None
      machine.block.shared.acquire(machine.warp.index, barrier.known)
      target.fill(True)

    return PhaseWait(barrier, phase, done)

  return wait


def make_mbarrier(machine, i: Instruction) -> Step:
  block, shared, lanes, name = machine.block, machine.block.shared, _lanes(machine, i), _plain(i.op)
  if name == "mbarrier.init.b64":
    address, count = _address(machine, i.args[0]), machine.r.u32(i.args[1])

    def init():
      for lane in lanes():
        at = int(address()[lane])
        if at % 8:
          raise PtxError("an mbarrier's address is a multiple of 8")
        if at in block.mbarriers:
          raise PtxError(f"it exists already: {block.mbarriers[at].describe()}")
        shared.claim(machine.warp.index, at, 8, shared.new_event("an mbarrier"))
        made = shared.event[machine.warp.index]
        block.mbarriers[at] = Mbarrier(shared, at, int(count[lane]), made)

    return init
  args = i.args
  if name in ("mbarrier.arrive.expect_tx.b64", "mbarrier.arrive.b64"):
    if args[0] != "_":
      raise NotImplementedError(f"{i.op} with a result")
    args = args[1:]
  elif name != "mbarrier.expect_tx.b64":
    raise NotImplementedError(i.op)
  address = _address(machine, args[0])
  extra = machine.r.u32(args[1]) if len(args) > 1 else None
  expects, arrives = "expect_tx" in name, ".arrive" in name

  def arrive():
    known = shared.release(machine.warp.index)
    for lane in lanes():
      barrier = find(machine, int(address()[lane]))
      value = 1 if extra is None else int(extra[lane])
      if expects:
        barrier.bytes += value
      if arrives:
        barrier.learn(known)
        barrier.arrive(1 if expects else value)

  return arrive


# Copies.

_COPIES = {
  "bulk.shared::cluster.global.mbarrier::complete_tx::bytes": 4,
  "bulk.shared::cta.global.mbarrier::complete_tx::bytes": 4,
  "cg.shared.global": 3,
  "ca.shared.global": 3,
}


def make_copy(machine, i: Instruction) -> Step:
  """cp.async, which is the warp's until it lets an mbarrier wait for it, and cp.async.bulk."""
  block, shared, lanes = machine.block, machine.block.shared, _lanes(machine, i)
  if _plain(i.op) in (
    "cp.async.mbarrier.arrive.noinc.b64",
    "cp.async.mbarrier.arrive.noinc.shared.b64",
  ):
    return _make_copies_arrive(machine, i)
  if i.op == "cp.async.bulk.prefetch.L2.global":
    return _make_prefetch(machine, i)
  modifiers = [m for m in i.op.split(".")[2:] if m[:4] not in ("L2::", "L1::")]
  name = ".".join(modifiers)
  operands = _COPIES.get(name) or _COPIES.get(name.replace("shared::cta", "shared"))
  if operands is None or len(i.args) != operands + ("L2::cache_hint" in i.op):
    raise NotImplementedError(f"{i.op} with {len(i.args)} operands")
  target, source, offset = (
    _address(machine, i.args[0]),
    machine.r.u64(i.args[1].base),
    i.args[1].offset,
  )
  size, bulk = machine.r.u32(i.args[2]), operands == 4
  address = _address(machine, i.args[3]) if bulk else None

  def copy():
    for lane in lanes():
      to, start, nbytes = int(target()[lane]), int(source[lane]) + offset, int(size[lane])
      multiple = 16 if bulk else nbytes
      for what, value in {"target": to, "source": start, "size": nbytes}.items():
        if value % multiple:
          raise PtxError(f"the {what} of this copy is a multiple of {multiple}, and {value} is not")
      if not bulk and nbytes not in ((16,) if ".cg." in i.op else (4, 8, 16)):
        raise PtxError(f"a copy of {nbytes} bytes")
      data = block.memory.copy_source(start, nbytes)
      if address is not None:
        barrier = find(machine, int(address()[lane]))
        where = shared.claim(machine.warp.index, to, nbytes, barrier.event)
        barrier.copies.append((where, data, nbytes))
      else:
        where = shared.claim(machine.warp.index, to, nbytes, shared.new_event("a cp.async"))
        machine.warp.copies.append((where, data))

  return copy


def _make_prefetch(machine, i: Instruction) -> Step:
  """Moves nothing; but the bytes must be an array's."""
  lanes, source, offset = _lanes(machine, i), machine.r.u64(i.args[0].base), i.args[0].offset
  size = machine.r.u32(i.args[1])

  def prefetch():
    for lane in lanes():
      start, nbytes = int(source[lane]) + offset, int(size[lane])
      if start % 16 or nbytes % 16:
        raise PtxError(f"a prefetch of {nbytes} bytes from {start}: not multiples of 16")
      machine.block.memory.prefetch(start, nbytes)

  return prefetch


def _make_copies_arrive(machine, i: Instruction) -> Step:
  lanes, address, shared = _lanes(machine, i), _address(machine, i.args[0]), machine.block.shared

  def arrive():
    known = shared.release(machine.warp.index)
    copies = machine.warp.copies
    for lane in lanes():
      barrier = find(machine, int(address()[lane]))
      for where, data in copies:
        shared.last_write[where] = barrier.event
        barrier.copies.append((where, data, 0))
      copies = []
      barrier.learn(known)
      barrier.arrive(deferred=True)
    machine.warp.copies = copies

  return arrive
