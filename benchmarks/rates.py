"""`python3 -m benchmarks rates`: how many cycles an instruction keeps a warp scheduler busy.

What budgets of kernels are made of: each case repeats a few instructions in four warps a scheduler,
on registers that depend on each other only after a dozen instructions, and the time of the whole
GPU gives cycles for each repetition. Instructions of different pipes that overlap cost less
together than apart; tensor core ones that keep others from being issued cost the sum.
"""

from __future__ import annotations

import collections
import functools
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks.trace import kernel_times
from nvfp4_pallas.dispatch import current_target
from nvfp4_pallas.kernels import wgmma
from nvfp4_pallas.kernels.ptx import Mem, Ptx, Reg
from nvfp4_pallas.kernels.ptx_launch import launch

MULTIPROCESSORS, SCHEDULERS = 132, 4  # of an H200
CLOCK_HZ = 1.98e9
THREADS, BLOCKS = 128, 4  # of a block, and of them on a multiprocessor
REGISTERS, REPEATS = 12, 64  # that take turns, and rounds of a loop
INSTRUCTIONS = 384  # of a round, about
SMEM = 32 * 1024


class _Case:
  """A program that is being written: registers that take turns, and some that stay."""

  def __init__(self, p: Ptx, constant: Reg):
    self.p, self.constant = p, constant
    self.values = [p.u32(constant + i) for i in range(REGISTERS)]
    self.floats = [p.f32(0.0) for _ in range(REGISTERS)]
    self.sums = [[p.f32(0.0) for _ in range(32)] for _ in range(2)]
    self.operands = [p.u32(constant + i) for i in range(4)]
    yes = p.u32(0)
    self.yes = yes.eq(0)
    self.turn = 0

  def value(self) -> Reg:
    self.turn += 1
    return self.values[self.turn % REGISTERS]


def _plain(op: str, *more: str) -> Callable[[_Case], None]:
  """An instruction on a register, the constant for each "k" and other arguments as they are."""

  def emit(case: _Case) -> None:
    v = case.value()
    case.p.emit(op, v, v, *(case.constant if a == "k" else a for a in more))

  return emit


def _float(op: str, *more: str) -> Callable[[_Case], None]:
  """The same on a float register."""

  def emit(case: _Case) -> None:
    case.turn += 1
    v = case.floats[case.turn % REGISTERS]
    case.p.emit(op, v, v, *(1.5 if a == "k" else a for a in more))

  return emit


def _from_e4m3(case: _Case) -> None:
  v = case.value()
  case.p.set(v, case.p.e4m3_to_f16(case.p.halves(v)[1]))


def _mma(case: _Case) -> None:
  case.turn += 1
  acc = case.sums[case.turn % 2][4 * (case.turn // 2 % 8) : 4 * (case.turn // 2 % 8) + 4]
  case.p.mma("f16", acc, case.operands, case.operands[:2])


def _wgmma(rows: int, left_in_registers: bool = True) -> Callable[[_Case], None]:
  """m64 n `rows` k16: four, then a wait for the four before."""

  def emit(case: _Case) -> None:
    p = case.p
    b = wgmma.right(p, wgmma.descriptor(p.smem), 0)
    acc = case.sums[case.turn % 2][: rows // 2]
    case.turn += 1
    wgmma.begin(p)
    for _ in range(4):
      wgmma.multiply(p, "f16", acc, case.operands if left_in_registers else b, b, case.yes)
    wgmma.commit(p)
    wgmma.wait(p, 1)

  return emit


OPS: dict[str, Callable[[_Case], None]] = {
  "lop3": _plain("lop3.b32", "k", "0x5a5a5a5a", "0x6a"),
  "prmt": _plain("prmt.b32", "k", "0x6240"),
  "imad": _plain("mad.lo.u32", "k", "k"),
  "imad.hi": _plain("mul.hi.u32", "k"),
  "hmul2": _plain("mul.rn.f16x2", "k"),
  "hset2": _plain("set.ge.u32.f16x2", "k"),
  "e4m3": _from_e4m3,
  "movm": _plain("movmatrix.sync.aligned.m8n8.trans.b16"),
  "shfl": _plain("shfl.sync.bfly.b32", "4", "31", "0xffffffff"),
  "ffma": _float("fma.rn.f32", "k", "k"),
  "fmax": _float("max.f32", "k"),
  "ex2": _float("ex2.approx.ftz.f32"),
  "mma": _mma,
  "4xwgmma32": _wgmma(32),
  "4xwgmma64": _wgmma(64),
  "4xwgmma64ss": _wgmma(64, left_in_registers=False),
}
# A word of NVFP4 codes, from codes to scaled float16.
_WORD = ("lop3 " * 8 + "imad " * 4 + "hmul2 " * 4).strip()
CASES = (
  *OPS,
  "lop3 imad",
  "lop3 e4m3",
  _WORD,
  f"mma {_WORD}",
  f"4xwgmma32 {_WORD}",
  f"4xwgmma32 {_WORD} {_WORD} {_WORD} {_WORD}",
  f"4xwgmma64 {_WORD}",
  f"4xwgmma64 {_WORD} {_WORD} {_WORD} {_WORD}",
  "4xwgmma64 " + ("ffma ex2 " * 8).strip(),
  f"4xwgmma64ss {_WORD} {_WORD} {_WORD} {_WORD}",
  "4xwgmma64ss " + ("ffma ex2 " * 8).strip(),
)


def program(case: str) -> tuple[Ptx, int]:
  """A case's program, and how often it repeats the case in a round."""
  ops = case.split()
  p = Ptx(("x", "out"))
  thread = p.new("r", "mov.u32", "%tid.x")
  (constant,) = p.load("global", Mem(p.address(p.pointer("x"), thread, 4)))
  state, done = _Case(p, constant), p.u32(0)
  # wgmma come by the four and take long, to run and for the compiler.
  count = max(1, INSTRUCTIONS // len(ops) // (16 if "wgmma" in case else 1))
  with p.loop() as rounds:
    for _ in range(count):
      for op in ops:
        OPS[op](state)
    p.set(done, done + 1)
    rounds.leave_if(done >= REPEATS)
  p.emit("wgmma.wait_group.sync.aligned", 0)
  total = state.values[0]
  for value in state.values[1:]:
    total = total ^ value
  for x in (x for acc in (state.floats, *state.sums) for x in acc):
    bits = p.register("r")
    p.emit("mov.b32", bits, x)
    total = total ^ bits
  p.store("global", Mem(p.address(p.pointer("out"), thread, 4)), [total])
  return p, count


def cycles(case: str) -> float:
  """That one repetition of a case takes a scheduler, of each of its four warps."""
  code, count = program(case)
  run = launch(
    code,
    name="rates",
    programs=MULTIPROCESSORS * BLOCKS,
    smem_bytes=SMEM,
    out_type=(jax.ShapeDtypeStruct((THREADS,), jnp.uint32),),
  )
  call = functools.partial(jax.jit(run), jnp.arange(THREADS, dtype=jnp.uint32))
  seconds = min(kernel_times([call] * 4).calls) * 1e-6
  warps = BLOCKS * THREADS // 32 // SCHEDULERS
  return seconds * CLOCK_HZ / (warps * REPEATS * count)


def main(argv: list[str]) -> int:
  if argv or not current_target().architecture.startswith("sm_90"):
    print("python3 -m benchmarks rates takes no arguments and needs a Hopper GPU", file=sys.stderr)
    return 1
  print(f"cycles a repetition and warp, at {CLOCK_HZ / 1e9} GHz")
  for case in CASES:
    counts = collections.Counter(case.split())
    name = " ".join(f"{n} {op}" for op, n in counts.items())
    print(f"{cycles(case):8.2f}  {name}", flush=True)
  return 0
