"""Runs programs of nvfp4_pallas/kernels/ptx.py on a CPU, as the kernel tests' stand-in for a GPU.

    memory = Memory(inputs={"x": x}, outputs={"y": jax.ShapeDtypeStruct((8, 128), jnp.bfloat16)})
    run(program, memory, programs=range(8), smem_bytes=4096)
    y = memory.array("y")

Numbers are PTX's: all round once, subnormals stay unless .ftz, NaN are the canonical
ones; ex2, lg2 and rcp, which PTX approximates, are rounded to nearest. mma and wgmma sum in float64
and round once; hardware rounds more coarsely.

Blocks run one after the other. The warps of a block take turns: each runs until it has to wait, for
a barrier, an mbarrier or the other warps of a wgmma. `reverse` gives the turns in the other order.

Errors (PtxError, with the instruction):
- an access out of bounds, misaligned, or of bytes that may not be read or written;
- lanes that store different values to one address;
- lanes of a warp that disagree on a branch or on the guard of a .sync instruction;
- two warps that touch a byte of shared memory, one of them writing, with no bar or mbarrier between
  them, or one that touches what a copy in flight will write;
- a block that reads or writes what an earlier block of the same launch wrote to device memory;
- an mbarrier used without knowing of its initialisation, arrived at too often, or whose bytes do
  not add up; any other hang; a block that ends with copies or a wgmma in flight;
- registers or shared memory that change while a wgmma uses them, or after the last wgmma.fence.

Shared memory and registers start as poison, and so are the targets of copies and of wgmma until
somebody has waited for them. A try_wait that has to wait fails once first, so that a missing loop
shows.

Not modelled: time; bank conflicts; the order of accesses within a warp (a missing bar.warp.sync),
and in device memory within a block; an earlier block's read of what a later one writes; proxies, so
fences do nothing; cache hints; the contraction of mul.f32 and add.f32 into fma, which ptxas may do
unless they are written with .rn.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import operator
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

import numpy as np

from nvfp4_pallas.kernels.ptx import Instruction, Ptx
from tests import (
  ptx_arithmetic,
  ptx_barriers,
  ptx_halves,
  ptx_lanes,
  ptx_memory,
  ptx_registers,
  ptx_wgmma,
)
from tests.ptx_barriers import Mbarrier, Meeting, Wait
from tests.ptx_memory import Memory, Shared
from tests.ptx_registers import LANES, PtxError, Registers, Step, uniform

__all__ = ["Memory", "PtxError", "Run", "run"]

OF_REGISTERS = (ptx_arithmetic, ptx_halves, ptx_lanes)  # they fill the table of ptx_registers
SPECIALS = ("%tid.x", "%laneid", "%warpid", "%ntid.x", "%ctaid.x")


@dataclasses.dataclass(frozen=True)
class Run:
  """What ran.

  Attributes:
    instructions: of all warps together.
    counts: the same by op.
  """

  instructions: int
  counts: collections.Counter[str]


def run(
  program: Ptx,
  memory: Memory,
  names: Mapping[str, str] | None = None,
  *,
  programs: Iterable[int] = range(1),
  threads: int = 128,
  smem_bytes: int = 0,
  races: bool = True,
  reverse: bool = False,
  limit: int = 10**7,
) -> Run:
  """Runs the blocks `programs` of one launch.

  Args:
    program: its parameters are addresses of arrays, then `smem` and `program`.
    memory: holds the arrays, and the results afterwards.
    names: parameter to name of an array, where they are not the same.
    programs: block numbers.
    threads: of a block.
    smem_bytes: shared memory of a block.
    races: looks for races in shared memory.
    reverse: warps take turns in the opposite order.
    limit: most instructions of a warp.
  """
  pointers = [memory.address((names or {}).get(p, p)) for p in program.parameters[:-2]]
  warps = threads // LANES
  block = _Block(program, memory, pointers, threads, smem_bytes, races, limit)
  order = range(warps)[::-1] if reverse else range(warps)
  memory.begin()
  with np.errstate(all="ignore"):
    for number in programs:
      block.run(number, order)
      memory.end_block(number)
  memory.end()
  counts: collections.Counter[str] = collections.Counter()
  for stretch in block.stretches:
    for i in range(stretch.start, stretch.stop):
      counts[program.instructions[i].op] += stretch.runs
  del counts["label"]
  return Run(counts.total(), counts)


@dataclasses.dataclass
class _Stretch:
  """Instructions without a wait or a branch before the last one."""

  start: int
  stop: int
  runs: int = 0


class _Block:
  """Blocks of the program, one after the other."""

  def __init__(self, program, memory, pointers, threads, smem_bytes, races, limit):
    self.program, self.memory, self.pointers = program, memory, pointers
    self.threads, self.warps, self.limit = threads, threads // LANES, limit
    if threads % LANES:
      raise ValueError(f"{threads} threads are not whole warps")
    self.shared = Shared(smem_bytes, self.warps, races)
    self.stretches: list[_Stretch] = []
    self.labels: dict[str, int] = {}
    start = 0
    for i, instruction in enumerate(program.instructions):
      if instruction.op == "label":
        if i > start:
          self.stretches.append(_Stretch(start, i))
          start = i
        self.labels[instruction.args[0]] = len(self.stretches)
      if _is_control(instruction.op):
        self.stretches.append(_Stretch(start, i + 1))
        start = i + 1
    self.stretches.append(_Stretch(start, len(program.instructions)))
    self.machine = _Machine(self)

  def run(self, number: int, order: Iterable[int]) -> None:
    self.shared.reset()
    self.mbarriers: dict[int, Mbarrier] = {}
    self.meetings: dict[Any, Meeting] = {}
    machine = self.machine
    machine.begin(number)
    warps = [_Warp(w) for w in order]
    turns = {warp: machine.run(warp) for warp in warps}
    waits = {warp: Wait() for warp in warps}
    while turns:
      progress = False
      for warp in list(turns):
        if not waits[warp].ready():
          continue
        progress = True
        machine.switch(warp)
        try:
          waits[warp] = next(turns[warp])
        except StopIteration:
          del turns[warp], waits[warp]
          machine.warp = None
      if not progress:
        stuck = "; ".join(f"warp {w.index} waits for {waits[w].describe()}" for w in turns)
        raise PtxError(f"block {number} hangs: {stuck}")
    for meeting in self.meetings.values():
      raise PtxError(f"block {number} ends at {meeting.describe()}")
    for barrier in self.mbarriers.values():
      if barrier.copies:
        raise PtxError(f"block {number} ends with copies in flight: {barrier.describe()}")
    for warp in warps:
      if warp.copies or warp.wgmma.in_flight():
        what = "cp.async" if warp.copies else "wgmma"
        raise PtxError(f"warp {warp.index} of block {number} ends with {what} in flight")

  def meet(self, key: Any, name: str, count: int) -> Meeting:
    """A warp comes to a meeting; the last one ends it."""
    meeting = self.meetings.setdefault(key, Meeting(name, count))
    if meeting.count != count:
      raise PtxError(f"{name} of {count} warps, which has {meeting.count} for others")
    meeting.warps += 1
    if meeting.ready():
      del self.meetings[key]
    return meeting


_CONTROL = ("bra", "bar.sync", "bar.arrive", "bar.red", "barrier", "wgmma", "exit")
_NOTHING = (
  "label",
  "fence",
  "membar",
  "bar.warp.sync",
  "prefetch",
  "cp.async.bulk.prefetch",
  "setmaxnreg",
)


@functools.cache
def _is_control(op: str) -> bool:
  """The warp may be elsewhere afterwards, or has waited."""
  return op.startswith(_CONTROL) or op.startswith("mbarrier.") and "_wait" in op


@functools.cache
def _is_nothing(op: str) -> bool:
  return op.startswith(_NOTHING)


@dataclasses.dataclass(eq=False)
class _Warp:
  """What a warp has of its own.

  Attributes:
    registers: while it is not its turn; None at the start.
    denied: address and parity of the wait that failed last.
    copies: of cp.async that no mbarrier waits for yet.
  """

  index: int
  executed: int = 0
  registers: list[np.ndarray] | None = None
  denied: tuple[int, int] | None = None
  copies: list[tuple[slice, np.ndarray]] = dataclasses.field(default_factory=list)
  wgmma: ptx_wgmma.Wgmma = dataclasses.field(default_factory=ptx_wgmma.Wgmma)


class _Machine:
  """Every instruction of a program, bound to the registers of the warp whose turn it is."""

  def __init__(self, block: _Block):
    self.block = block
    self.warp: Any = None  # None when no registers are to be kept
    parameters = [f"${i}" for i in range(len(block.pointers) + 2)]
    self.r = Registers(ptx_registers.Layout(block.program, (*SPECIALS, *parameters)))
    self._set("%laneid", np.arange(LANES))
    self._set("%ntid.x", block.threads)
    self._set(parameters[-2], ptx_memory.SHARED_BASE)
    self.steps: list[list[Step]] = []
    self.ends: list[Callable[[], Any] | None] = []
    for position, stretch in enumerate(block.stretches):
      steps, end = [], None
      for i in range(stretch.start, stretch.stop):
        instruction = block.program.instructions[i]
        if _is_nothing(instruction.op):
          continue
        try:
          if _is_control(instruction.op):
            end = self._control(instruction, position, i)
          else:
            steps.append(self._step(instruction))
        except (PtxError, TypeError, ValueError, KeyError, NotImplementedError) as error:
          error.add_note(f"instruction {i}: {self._text(i)}")
          raise
      self.steps.append(steps)
      self.ends.append(end)

  def _set(self, name: str, value: Any) -> None:
    self.r.words[self.r.row(name)] = value

  def begin(self, number: int) -> None:
    """A block."""
    self.warp = None
    self._set("%ctaid.x", number)
    self._set(f"${len(self.block.pointers) + 1}", number)

  def switch(self, warp: _Warp) -> None:
    """It is another warp's turn."""
    if self.warp is warp:
      return
    if self.warp is not None:
      self.warp.registers = self.r.save()
    self.warp = warp
    if warp.registers is None:
      self.r.poison()
    else:
      self.r.restore(warp.registers)
    self._set("%warpid", warp.index)
    self._set("%tid.x", warp.index * LANES + np.arange(LANES))

  def run(self, warp: _Warp) -> Generator[Wait, None, None]:
    """A warp's instructions. Yields whenever it has to wait."""
    stretches, position = self.block.stretches, 0
    while position < len(stretches):
      stretch, steps = stretches[position], self.steps[position]
      stretch.runs += 1
      warp.executed += stretch.stop - stretch.start
      remaining = iter(steps)
      end = self.ends[position]
      try:
        if warp.executed > self.block.limit:
          raise PtxError(f"more than {self.block.limit} instructions")
        for step in remaining:
          step()
        remaining = None
        next_position = position + 1
        if end is not None:
          outcome = end()
          if isinstance(outcome, int):
            next_position = outcome
          elif outcome is not None:
            yield outcome
            outcome.result()
      except PtxError as error:
        done = len(steps) if remaining is None else len(steps) - operator.length_hint(remaining) - 1
        self._annotate(error, warp, position, done)
        raise
      position = next_position

  def _annotate(self, error: PtxError, warp: _Warp, position: int, done: int) -> None:
    stretch = self.block.stretches[position]
    instructions = self.block.program.instructions
    bound = [i for i in range(stretch.start, stretch.stop) if not _is_nothing(instructions[i].op)]
    i = bound[min(done, len(bound) - 1)] if bound else stretch.start
    block = int(self.r.words[self.r.row("%ctaid.x")][0])
    where = f"warp {warp.index} of block {block}, instruction {i}: {self._text(i)}"
    error.args = (f"{error.args[0]} [{where}]",)

  def _text(self, i: int) -> str:
    lines = self.block.program.text().splitlines()[:-1]
    return lines[i - len(self.block.program.instructions)]

  # Instructions that leave the registers.

  def _step(self, i: Instruction) -> Step:
    r = self.r
    if i.op.startswith("ld."):
      return ptx_memory.make_load(self, i)
    if i.op.startswith("st."):
      return ptx_memory.make_store(self, i)
    if i.op.startswith("atom."):
      return ptx_memory.make_atomic(self, i)
    if i.op.startswith(("ldmatrix.", "stmatrix.")):
      return ptx_memory.make_matrix(self, i)
    if i.op.startswith("mbarrier."):
      return ptx_barriers.make_mbarrier(self, i)
    if i.op.startswith("cp.async."):
      return ptx_barriers.make_copy(self, i)
    if i.op in ("mov.b64", "mov.u64") and isinstance(i.args[1], str) and i.args[1][0] == "$":
      value = np.uint64(self.block.pointers[int(i.args[1][1:])])
      target = r.u64(i.args[0])
      return lambda: target.fill(value)
    return ptx_registers.make(r, i)

  # Instructions after which a warp may be elsewhere, or has waited.

  def _control(self, i: Instruction, position: int, number: int) -> Callable[[], Any]:
    block, mask = self.block, self.r.mask(i)
    if i.op in ("bra", "bra.uni"):
      target, fall = block.labels[i.args[0]], position + 1
      if mask is None:
        return lambda: target
      return lambda: target if uniform(mask()) else fall
    if i.op == "exit":
      end = len(block.stretches)
      return lambda: end if mask is None or uniform(mask()) else None
    if i.op.startswith("mbarrier."):
      return ptx_barriers.make_try_wait(self, i)
    if i.op.startswith("bar"):
      return ptx_barriers.make_barrier(self, i)
    if i.op.startswith("wgmma"):
      return ptx_wgmma.make_wgmma(self, i, number)
    raise NotImplementedError(i.op)
