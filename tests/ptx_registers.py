"""Registers of emulated warps: rows of 32 lanes, float32 kept as its bits.

`make` turns an instruction of registers alone (ptx_arithmetic.py, ptx_halves.py, ptx_lanes.py) into
a function without arguments that is bound to these rows. One warp at a time has them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nvfp4_pallas.kernels.ptx import Instruction, Mem, Ptx, Reg

LANES = 32
Step = Callable[[], Any]
POISON = 0xFFFFEEEE  # of registers never written: a NaN, and far outside of every array
NONE, ALL = bytes(LANES), b"\1" * LANES

LANE = np.arange(LANES)


class PtxError(Exception):
  """The emulated program does something that PTX does not define, or that hangs."""


def immediate(arg: Any) -> int:
  """The 32 bits of an immediate."""
  if isinstance(arg, float):
    return int(np.float32(arg).view(np.uint32))
  if isinstance(arg, str) and arg[:2] == "0f":
    return int(arg[2:], 16)
  if isinstance(arg, str):
    return int(arg, 0)
  if isinstance(arg, (int, np.integer)) and not isinstance(arg, bool):
    if not -(2**31) <= arg < 2**32:
      raise PtxError(f"{arg} does not fit into 32 bits")
    return int(arg) & 0xFFFFFFFF
  raise TypeError(f"not an operand: {arg!r}")


def flat(args: Any) -> list[Any]:
  return [x for a in args for x in (a if isinstance(a, (list, tuple)) else (a,))]


class Layout:
  """Which row of a warp's arrays each register and immediate of a program has."""

  def __init__(self, program: Ptx, specials: Sequence[str]):
    self.rows: dict[str, dict[Any, int]] = {"w": {}, "h": {}, "d": {}, "p": {}}
    for kind, i in itertools.product("rhfdp", range(2)):
      self._add(guarded(kind, i))
    immediates: dict[tuple[type, Any], int] = {}
    for instruction in program.instructions:
      for arg in (instruction.when, *flat(instruction.args)):
        if isinstance(arg, (Reg, Mem)):
          self._add(arg if isinstance(arg, Reg) else arg.base)
        elif isinstance(arg, str) and arg[:1] == "%" and not instruction.op.startswith("mov."):
          raise TypeError(f"{instruction.op} of a special register")
        elif arg is not None and (type(arg), arg) not in immediates:
          try:
            immediates[type(arg), arg] = immediate(arg)
          except (TypeError, ValueError, PtxError):
            pass  # another kind of operand; using it as an immediate fails
    self.registers = {kind: len(rows) for kind, rows in self.rows.items()}
    words = self.rows["w"]
    for name in (*specials, *immediates.values()):
      words.setdefault(name, len(words))

  def _add(self, register: Reg) -> None:
    rows = self.rows["w" if register.kind in "rf" else register.kind]
    rows.setdefault(register.name, len(rows))


def guarded(kind: str, i: int) -> Reg:
  """Where a guarded instruction leaves its results first."""
  return Reg(None, kind, f"guarded {kind}{i}")  # type: ignore


class Registers:
  """The registers of the warp whose turn it is, as views of rows.

  Attributes:
    words: every register and immediate of 32 bits, uint32 [rows, 32].
  """

  def __init__(self, layout: Layout):
    self._layout = layout
    rows = layout.rows
    self.words = np.zeros((len(rows["w"]), LANES), np.uint32)
    self._doubles = np.zeros((len(rows["d"]), LANES), np.uint64)
    self._shorts = np.zeros((len(rows["h"]), LANES), np.uint16)
    self._predicates = np.zeros((len(rows["p"]), LANES), bool)
    self.halves = self.words.view(np.uint16).ravel()
    self.bytes = self.words.view(np.uint8).ravel()
    self.lanes = self.words.ravel()
    for value, row in rows["w"].items():
      if isinstance(value, int):
        self.words[row] = value

  def _parts(self) -> list[np.ndarray]:
    """What differs between warps and over time."""
    count = self._layout.registers["w"]
    return [self.words[:count], self._shorts, self._doubles, self._predicates]

  def poison(self) -> None:
    words, shorts, doubles, predicates = self._parts()
    words[:], shorts[:], doubles[:] = POISON, POISON & 0xFFFF, POISON << 32 | POISON
    predicates[:] = LANE % 2 == 0  # disagrees with itself

  def save(self) -> list[np.ndarray]:
    return [part.copy() for part in self._parts()]

  def restore(self, saved: list[np.ndarray]) -> None:
    for part, values in zip(self._parts(), saved, strict=True):
      part[...] = values

  def row(self, arg: Any, kinds: str = "rf") -> int:
    rows = self._layout.rows["w"]
    if isinstance(arg, Reg):
      if arg.kind not in kinds:
        raise TypeError(f"{arg.name} is not a register of kind {' or '.join(kinds)}")
      return rows[arg.name]
    if isinstance(arg, str) and arg in rows:
      return rows[arg]
    if isinstance(arg, str) and arg[0] in "%$":
      raise NotImplementedError(arg)
    return rows[immediate(arg)]

  def b32(self, arg: Any) -> np.ndarray:
    return self.words[self.row(arg)]

  def u32(self, arg: Any) -> np.ndarray:
    return self.words[self.row(arg, "r")]

  def s32(self, arg: Any) -> np.ndarray:
    return self.u32(arg).view(np.int32)

  def f32(self, arg: Any) -> np.ndarray:
    if isinstance(arg, (int, np.integer)):
      raise TypeError(f"the immediate {arg} of a float32 instruction is an integer")
    return self.b32(arg).view(np.float32)

  def u16x2(self, arg: Any) -> np.ndarray:
    return self.u32(arg).view(np.uint16)

  def u16(self, arg: Any) -> np.ndarray:
    if not isinstance(arg, Reg) or arg.kind != "h":
      raise TypeError(f"not a register of 16 bits: {arg!r}")
    return self._shorts[self._layout.rows["h"][arg.name]]

  def u64(self, arg: Any) -> np.ndarray:
    if isinstance(arg, Reg):
      if arg.kind != "d":
        raise TypeError(f"{arg.name} does not have 64 bits")
      return self._doubles[self._layout.rows["d"][arg.name]]
    if isinstance(arg, str) and arg[0] == "$":
      raise NotImplementedError(arg)
    value = int(arg, 0) if isinstance(arg, str) else int(arg)
    return np.full(LANES, value & 0xFFFFFFFFFFFFFFFF, np.uint64)

  def pred(self, arg: Any) -> np.ndarray:
    if not isinstance(arg, Reg) or arg.kind != "p":
      raise TypeError(f"not a predicate: {arg!r}")
    return self._predicates[self._layout.rows["p"][arg.name]]

  def any(self, register: Reg) -> np.ndarray:
    return {"h": self.u16, "d": self.u64, "p": self.pred}.get(register.kind, self.b32)(register)

  def consecutive(self, registers: list[Any], kinds: str) -> np.ndarray | None:
    """The rows of `registers`, where they lie side by side."""
    rows = [self.row(r, kinds) for r in registers]
    if rows != list(range(rows[0], rows[0] + len(rows))):
      return None
    return self.words[rows[0] : rows[0] + len(rows)]

  def mask(self, instruction: Instruction) -> Callable[[], np.ndarray] | None:
    """The lanes that run a guarded instruction."""
    if instruction.when is None:
      return None
    p = self.pred(instruction.when)
    return functools.partial(np.logical_not, p) if instruction.unless else lambda: p


def uniform(mask: np.ndarray) -> bool:
  """The one value of a predicate in all lanes."""
  data = mask.tobytes()
  if data == ALL:
    return True
  if data == NONE:
    return False
  raise PtxError(f"the lanes of the warp disagree: {mask.astype(int)}")


# Makers: functions of (registers, op, *args). Some ops have one of their own, others one that
# belongs to the name before the first point.
MAKERS: dict[str, Callable[..., Step]] = {}
FAMILIES: dict[str, Callable[..., Step]] = {}


def ops(*names):
  def register(maker):
    MAKERS.update(dict.fromkeys(names, maker))
    return maker

  return register


def family(name):
  def register(maker):
    FAMILIES[name] = maker
    return maker

  return register


def make(r: Registers, instruction: Instruction) -> Step:
  """The instruction as a function; NotImplementedError names what is not known."""
  op, args = instruction.op, instruction.args
  maker = MAKERS.get(op) or FAMILIES.get(op.split(".")[0])
  if maker is None:
    raise NotImplementedError(op)
  mask = r.mask(instruction)
  if mask is None:
    return maker(r, op, *args)
  if ".sync" in op:
    step = maker(r, op, *args)
    return lambda: step() if uniform(mask()) else None
  targets = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
  scratch = [guarded(t.kind, i) for i, t in enumerate(targets)]
  first = scratch if isinstance(args[0], (list, tuple)) else scratch[0]
  step = maker(r, op, first, *args[1:])
  pairs = [(r.any(t), r.any(s)) for t, s in zip(targets, scratch, strict=True)]

  def run():
    step()
    where = mask()
    for target, value in pairs:
      np.copyto(target, value, where=where)

  return run
