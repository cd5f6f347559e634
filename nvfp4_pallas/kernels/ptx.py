"""A small writer of PTX: instructions are built as a list, so that a CPU can run them too.

For the few kernels whose warps must work independently of each other, which Pallas' Mosaic GPU
cannot say: there a program is a warpgroup and moves in step. `Ptx` collects instructions, `text`
prints them as the body of one inline assembly statement, and tests/ptx_emulator.py runs the same
list on a CPU. Values are `Reg`, with the operators of Python:

    x = (word & 0x000F000F) * 0x1040        and.b32, mul.lo.u32
    with p.when(x < limit): ...             setp, bra

Numbers in place of registers are immediates. A warp must agree on the predicates of `when` and
`leave_if`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

TYPES = {"r": "b32", "h": "b16", "f": "f32", "d": "b64", "p": "pred"}  # register classes
ALL_LANES = "0xffffffff"
WARPGROUP = 128  # threads


@dataclasses.dataclass(frozen=True, eq=False)
class Reg:
  """A register: r is 32 bits (unsigned), h is 16, f is float32, d is 64 bits, p is a predicate."""

  program: Ptx
  kind: str
  name: str

  def _new(self, kind, op, *args):
    return self.program.new(kind, op, *args)

  def _arithmetic(self, op, other):
    if self.kind == "p":
      return self._new("p", f"{op}.pred", self, other)
    if op in ("and", "or", "xor"):
      return self._new(self.kind, f"{op}.b32", self, other)
    type_ = {"r": "u32", "f": "f32", "d": "u64"}[self.kind]
    return self._new(self.kind, f"{op}.{type_}", self, other)

  def __add__(self, other):
    return self._arithmetic("add", other)

  def __sub__(self, other):
    return self._arithmetic("sub", other)

  def __mul__(self, other):
    if self.kind == "f":
      return self._new("f", "mul.f32", self, other)
    if isinstance(other, int) and other & (other - 1) == 0:
      return self << other.bit_length() - 1
    return self._new("r", "mul.lo.u32", self, other)

  def __floordiv__(self, other):
    if isinstance(other, int) and other & (other - 1) == 0:
      return self >> other.bit_length() - 1
    return self._new("r", "div.u32", self, other)

  def __mod__(self, other):
    if isinstance(other, int) and other & (other - 1) == 0:
      return self & other - 1
    return self._new("r", "rem.u32", self, other)

  def __and__(self, other):
    return self._arithmetic("and", other)

  def __or__(self, other):
    return self._arithmetic("or", other)

  def __xor__(self, other):
    return self._arithmetic("xor", other)

  def __invert__(self):
    return self._new("p", "not.pred", self)

  def __lshift__(self, count):
    return self if count == 0 else self._new("r", "shl.b32", self, count)

  def __rshift__(self, count):
    return self if count == 0 else self._new("r", "shr.u32", self, count)

  def _compare(self, op, other, type_=None):
    type_ = type_ or {"r": "u32", "f": "f32"}[self.kind]
    return self._new("p", f"setp.{op}.{type_}", self, other)

  def __lt__(self, other):
    return self._compare("lt", other)

  def __le__(self, other):
    return self._compare("le", other)

  def __gt__(self, other):
    return self._compare("gt", other)

  def __ge__(self, other):
    return self._compare("ge", other)

  def eq(self, other):
    return self._compare("eq", other)

  def ne(self, other):
    return self._compare("ne", other)

  def above(self, other):
    """Greater, both taken as signed."""
    return self._compare("gt", other, "s32")


@dataclasses.dataclass(frozen=True)
class Mem:
  """An address: register plus bytes."""

  base: Reg
  offset: int = 0


@dataclasses.dataclass(frozen=True)
class Instruction:
  op: str
  args: tuple[Any, ...]
  when: Reg | None = None  # runs only where it is true
  unless: bool = False  # where it is false instead


class Scope:
  """A loop or a part of the program that is being written, and can be left."""

  def __init__(self, program: Ptx, end: str):
    self._program, self._end = program, end

  def leave_if(self, condition: Reg) -> None:
    self._program.emit("bra.uni", self._end, when=condition)


class Ptx:
  """The instructions of one program, in order.

  Attributes:
    parameters: names of its parameters, in the order of the assembly's operands.
    instructions: the list.
    thread: %tid.x, or what it is in the thread's warpgroup.
    role: which warpgroup of its team it is, where there are several.
    smem, program: the shared memory's address and the block's number, or the team's own.
  """

  role: Reg

  def __init__(
    self, pointers: tuple[str, ...], *, teams: int = 1, roles: int = 1, smem_bytes: int = 0
  ):
    """Declares parameters: `pointers`, then `smem`, the shared memory's address, and `program`.

    Args:
      teams: of a block, each of which is a block to all that follows. ptxas gives a thread of a
        block of n warpgroups 512 / n registers; this is how it learns that several are to share a
        multiprocessor.
      roles: warpgroups of a team: first those of role 0 of all teams, then those of role 1, ...
      smem_bytes: that each of several teams has.
    """
    self._begin()
    self.parameters = (*pointers, "smem", "program")
    self._pointers = {name: self.new("d", "mov.b64", f"${i}") for i, name in enumerate(pointers)}
    self.smem = self.new("r", "mov.b32", f"${len(pointers)}")
    self.program = self.new("r", "mov.b32", f"${len(pointers) + 1}")
    self._barrier: Reg | int = 0
    if teams * roles > 1:
      group = self.from_lane(self.thread // WARPGROUP, 0)  # so that it is known to be uniform
      self.thread, self._barrier = self.thread % WARPGROUP, group
      self.role, team = group // teams, group % teams
      self.smem = self.mad(team, smem_bytes, self.smem)
      self.program = self.mad(self.program, teams, team)

  @functools.cached_property
  def thread(self) -> Reg:
    return self.new("r", "mov.u32", "%tid.x")

  def _begin(self) -> None:
    self.instructions: list[Instruction] = []
    self._counts = dict.fromkeys(TYPES, 0)
    self._labels = 0
    self._constants: dict[int, Reg] = {}

  # What everything below is made of.

  def register(self, kind: str) -> Reg:
    self._counts[kind] += 1
    return Reg(self, kind, f"{kind}{self._counts[kind] - 1}")

  def registers(self, kind: str, count: int) -> list[Reg]:
    return [self.register(kind) for _ in range(count)]

  def emit(self, op: str, *args: Any, when: Reg | None = None, unless: bool = False) -> None:
    self.instructions.append(Instruction(op, args, when, unless))

  def new(self, kind: str, op: str, *args: Any) -> Reg:
    """The result of an instruction in a new register."""
    result = self.register(kind)
    self.emit(op, result, *args)
    return result

  def text(self) -> str:
    """The body of an inline assembly statement."""
    lines = ["{"]
    for kind, count in self._counts.items():
      if count:
        lines.append(f".reg .{TYPES[kind]} {kind}<{count}>;")
    for i in self.instructions:
      if i.op == "label":
        lines.append(f"{i.args[0]}:")
        continue
      guard = "" if i.when is None else f"@{'!' if i.unless else ''}{i.when.name} "
      lines.append(f"{guard}{i.op} {', '.join(map(_format, i.args))};".replace(" ;", ";"))
    return "\n".join([*lines, "}"])

  def pointer(self, name: str) -> Reg:
    return self._pointers[name]

  def constant(self, value: int) -> Reg:
    """A register set once, at the program's start: for operands that may not be immediates."""
    if value not in self._constants:
      register = self._constants[value] = self.register("r")
      self.instructions.insert(0, Instruction("mov.b32", (register, f"0x{value:08x}")))
    return self._constants[value]

  # Registers that change.

  def u32(self, value: Reg | int) -> Reg:
    """A new variable."""
    return self.new("r", "mov.b32", value)

  def f32(self, value: Reg | float) -> Reg:
    """A new variable."""
    return self.new("f", "mov.f32", value)

  def set(self, variable: Reg, value: Any, when: Reg | None = None) -> None:
    op = {"r": "mov.b32", "f": "mov.f32", "d": "mov.b64"}[variable.kind]
    self.emit(op, variable, value, when=when)

  # Arithmetic without an operator.

  def select(self, condition: Reg, yes: Any, no: Any) -> Reg:
    kind = (
      "f" if any(isinstance(x, float) or getattr(x, "kind", "") == "f" for x in (yes, no)) else "r"
    )
    return self.new(kind, {"r": "selp.b32", "f": "selp.f32"}[kind], yes, no, condition)

  def minimum(self, a: Reg, b: Any) -> Reg:
    return self.new(a.kind, {"r": "min.u32", "f": "min.f32"}[a.kind], a, b)

  def maximum(self, a: Reg, b: Any) -> Reg:
    return self.new(a.kind, {"r": "max.u32", "f": "max.f32"}[a.kind], a, b)

  def max_of(self, values: list[Reg]) -> Reg:
    """By a tree, which is short."""
    while len(values) > 1:
      pairs = zip(values[::2], values[1::2], strict=False)
      values = [self.maximum(a, b) for a, b in pairs] + values[len(values) // 2 * 2 :]
    return values[0]

  def fma(self, a: Reg, b: Any, c: Any) -> Reg:
    return self.new("f", "fma.rn.f32", a, b, c)

  def exp2(self, x: Reg) -> Reg:
    return self.new("f", "ex2.approx.ftz.f32", x)

  def log2(self, x: Reg) -> Reg:
    return self.new("f", "lg2.approx.f32", x)

  def reciprocal(self, x: Reg) -> Reg:
    return self.new("f", "rcp.approx.ftz.f32", x)

  def mad(self, a: Reg, b: Any, c: Any) -> Reg:
    return self.new("r", "mad.lo.u32", a, b, c)

  def address(self, base: Reg, index: Any, size: int) -> Reg:
    """base + index * size of device memory, in 64 bits."""
    return self.new("d", "mad.wide.u32", index, size, base)

  def cdiv(self, x: Reg, y: int) -> Reg:
    return (x + (y - 1)) // y

  def permute(self, low: Reg, high: Any, selector: int) -> Reg:
    """Bytes of the eight (low: 0 to 3, high: 4 to 7), one for each hexadecimal digit."""
    return self.new("r", "prmt.b32", low, high, f"0x{selector:04x}")

  def halves(self, x: Reg) -> list[Reg]:
    """The low and the high half of a word."""
    parts = self.registers("h", 2)
    self.emit("mov.b32", parts, x)
    return parts

  def pair(self, low: Reg, high: Reg) -> Reg:
    """A word of two halves."""
    return self.new("r", "mov.b32", [low, high])

  def widen(self, half: Reg) -> Reg:
    """A word with zeros above the half."""
    return self.new("r", "cvt.u32.u16", half)

  def pack(self, dtype: str, low: Any, high: Any) -> Reg:
    """Two float32 rounded to "bf16" or "f16", `low` in the low half."""
    return self.new("r", f"cvt.rn.{dtype}x2.f32", high, low)

  def e4m3_to_f16(self, bytes_: Reg) -> Reg:
    """Two E4M3 in 16 bits as two float16."""
    return self.new("r", "cvt.rn.f16x2.e4m3x2", bytes_)

  def f16_to_f32(self, half: Reg) -> Reg:
    return self.new("f", "cvt.f32.f16", half)

  def f16_to_e4m3(self, x: Reg) -> Reg:
    """16 bits of two float16 rounded to E4M3, at most 448, NaN as NaN."""
    return self.new("h", "cvt.rn.satfinite.e4m3x2.f16x2", x)

  def max_f16x2(self, a: Reg, b: Reg) -> Reg:
    """NaN where either is."""
    return self.new("r", "max.NaN.f16x2", a, b)

  def mul_f16x2(self, a: Reg, b: Any) -> Reg:
    return self.new("r", "mul.rn.f16x2", a, b)

  def max_magnitude_bf16x2(self, a: Reg, b: Reg) -> Reg:
    """The larger magnitude of each half, with some sign; NaN if either is."""
    return self.new("r", "max.NaN.xorsign.abs.bf16x2", a, b)

  def exceeds_bf16x2(self, a: Reg, b: Reg) -> Reg:
    """16 ones in each half where a > b, else zeros."""
    return self.new("r", "set.gt.u32.bf16x2", a, b)

  def multiply(self, a: Reg, b: Any) -> Reg:
    """a * b that is rounded: the compiler must not fuse it with a sum."""
    return self.new("f", "mul.rn.f32", a, b)

  def negative(self, x: Reg) -> Reg:
    return self.new("f", "neg.f32", x)

  def absolute(self, x: Reg) -> Reg:
    return self.new("f", "abs.f32", x)

  def bits(self, x: Reg) -> Reg:
    return self.new("r", "mov.b32", x)

  def as_f32(self, bits: Reg) -> Reg:
    return self.new("f", "mov.b32", bits)

  def e4m3x2(self, low: Any, high: Any) -> Reg:
    """16 bits of two float32 rounded to E4M3, at most 448, NaN as NaN; `low` in the low byte."""
    return self.new("h", "cvt.rn.satfinite.e4m3x2.f32", high, low)

  # Between the lanes of a warp.

  def shuffle_xor(self, x: Reg, mask: int) -> Reg:
    return self.new(x.kind, "shfl.sync.bfly.b32", x, mask, 31, ALL_LANES)

  def shuffle_up(self, x: Reg, count: int) -> Reg:
    return self.new(x.kind, "shfl.sync.up.b32", x, count, 0, ALL_LANES)

  def from_lane(self, x: Reg, lane: Any) -> Reg:
    return self.new(x.kind, "shfl.sync.idx.b32", x, lane, 31, ALL_LANES)

  def sum_lanes(self, x: Reg) -> Reg:
    return self.new("r", "redux.sync.add.u32", x, ALL_LANES)

  def max_lanes(self, x: Reg) -> Reg:
    return self.new("r", "redux.sync.max.u32", x, ALL_LANES)

  def count_lanes(self, condition: Reg) -> Reg:
    ballot = self.new("r", "vote.sync.ballot.b32", condition, ALL_LANES)
    return self.new("r", "popc.b32", ballot)

  def uniform_bit(self, condition: Reg) -> Reg:
    """1 where a condition that the warp agrees on is true, or 0.

    ptxas lets a vote's result stand in a uniform register, and with it what is computed from it: a
    descriptor of wgmma, which must be there, otherwise takes four more instructions a product.
    """
    return self.new("r", "vote.sync.ballot.b32", condition, ALL_LANES) & 1

  def any_lane(self, condition: Reg) -> Reg:
    return self.new("p", "vote.sync.any.pred", condition, ALL_LANES)

  def transpose(self, x: Reg) -> Reg:
    """Transposes an 8 by 8 matrix of 16-bit values, two of a row in each lane."""
    return self.new("r", "movmatrix.sync.aligned.m8n8.trans.b16", x)

  def sync_warp(self) -> None:
    self.emit("bar.warp.sync", ALL_LANES)

  def sync(self, threads: int) -> None:
    self.emit("bar.sync", self._barrier, threads)

  def sync_any(self, threads: int, condition: Reg) -> Reg:
    """sync(); whether the condition holds in any of the threads."""
    return self.new("p", "bar.red.or.pred", self._barrier, threads, condition)

  def mma(self, dtype: str, acc: list[Reg], a: list[Reg], b: list[Reg]) -> None:
    """acc [16, 8] += a [16, 16] b [16, 8], "bf16" or "f16", in the fragments of mma.m16n8k16."""
    op = f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32"
    self.emit(op, acc, a, b, acc)

  # Memory.

  def load(
    self, space: str, at: Mem, count: int = 1, size: int = 4, kind: str = "r", when=None
  ) -> list[Reg]:
    """`count` values of `size` bytes side by side. Where not `when`, they are not defined."""
    values = self.registers(kind, count)
    self.load_into(values, space, at, size, when)
    return values

  def load_into(self, values: list[Reg], space: str, at: Mem, size: int = 4, when=None) -> None:
    type_ = "f32" if values[0].kind == "f" else f"u{8 * size}"
    vector = "" if len(values) == 1 else f".v{len(values)}"
    target = values[0] if len(values) == 1 else values
    self.emit(f"ld.{space}{vector}.{type_}", target, at, when=when)

  def store(self, space: str, at: Mem, values: list[Any], size: int = 4, when=None) -> None:
    type_ = "f32" if getattr(values[0], "kind", "r") == "f" else f"u{8 * size}"
    vector = "" if len(values) == 1 else f".v{len(values)}"
    source = values[0] if len(values) == 1 else values
    self.emit(f"st.{space}{vector}.{type_}", at, source, when=when)

  # Flow.

  def _label(self) -> str:
    self._labels += 1
    return f"L{self._labels}"

  @contextlib.contextmanager
  def when(self, condition: Reg, unless: bool = False) -> Iterator[None]:
    """What is written inside runs where the warp's `condition` is true (or false: `unless`)."""
    end = self._label()
    self.emit("bra.uni", end, when=condition, unless=not unless)
    yield
    self.emit("label", end)

  @contextlib.contextmanager
  def scope(self) -> Iterator[Scope]:
    """What is written inside runs once and can be left early."""
    end = self._label()
    yield Scope(self, end)
    self.emit("label", end)

  @contextlib.contextmanager
  def loop(self) -> Iterator[Scope]:
    """What is written inside runs again and again until it is left."""
    start, end = self._label(), self._label()
    self.emit("label", start)
    yield Scope(self, end)
    self.emit("bra.uni", start)
    self.emit("label", end)


def _format(arg: Any) -> str:
  if isinstance(arg, Reg):
    return arg.name
  if isinstance(arg, Mem):
    return f"[{arg.base.name}{f'+{arg.offset}' if arg.offset else ''}]"
  if isinstance(arg, (list, tuple)):
    return "{" + ", ".join(map(_format, arg)) + "}"
  if isinstance(arg, float):
    return f"0f{np.float32(arg).view(np.uint32):08X}"
  return str(arg)
