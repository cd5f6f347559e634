"""PTX instructions between the lanes of a warp, for ptx_emulator.py: shuffles, votes, matrices."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from nvfp4_pallas.kernels.ptx import Reg
from tests import ptx_numbers as numbers
from tests.ptx_registers import LANE, LANES, family, immediate, ops

partial = functools.partial


def _all_lanes(op, mask):
  if immediate(mask) != 0xFFFFFFFF:
    raise NotImplementedError(f"{op} of some lanes")


@family("shfl")
def _shfl(r, op, d, a, b, c, mask):
  _all_lanes(op, mask)
  name, c = op.split(".")[2], immediate(c)
  if op != f"shfl.sync.{name}.b32":
    raise NotImplementedError(op)
  segment, clamp = c >> 8 & 31, c & 31
  least = LANE & segment
  most = least | clamp & ~segment
  move = {
    "up": lambda b: (LANE - b, LANE - b >= most),
    "down": lambda b: (LANE + b, LANE + b <= most),
    "bfly": lambda b: (LANE ^ b, (LANE ^ b) <= most),
    "idx": lambda b: (least | b & ~segment, (least | b & ~segment) <= most),
  }[name]
  row, target = r.row(a), r.b32(d)

  def index(b):
    source, valid = move(b & 31)
    return np.where(valid, source, LANE) + row * LANES

  if not isinstance(b, Reg):
    return partial(r.lanes.take, index(immediate(b)), None, target, "clip")
  b = r.u32(b)
  return lambda: r.lanes.take(index(b.astype(np.int64)), None, target, "clip")


_REDUCTIONS = {
  "add": np.add,
  "min": np.minimum,
  "max": np.maximum,
  "and": np.bitwise_and,
  "or": np.bitwise_or,
  "xor": np.bitwise_xor,
}


@family("redux")
def _redux(r, op, d, a, mask):
  _all_lanes(op, mask)
  _, _, name, type_ = op.split(".")
  view = {"u32": r.u32, "s32": r.s32, "b32": r.u32}[type_]
  d, a, ufunc = view(d), view(a), _REDUCTIONS[name]
  return lambda: d.fill(ufunc.reduce(a, dtype=a.dtype))


@family("vote")
def _vote(r, op, d, p, mask):
  _all_lanes(op, mask)
  p = r.pred(p)
  if op == "vote.sync.ballot.b32":
    d = r.b32(d)
    return lambda: d.fill(np.packbits(p, bitorder="little").view(np.uint32)[0])
  function = {"vote.sync.any.pred": np.any, "vote.sync.all.pred": np.all}.get(op)
  if function is None:
    raise NotImplementedError(op)
  d = r.pred(d)
  return lambda: d.fill(function(p))


# Matrices. In a fragment, lane 4 * i + j has values 2 * j and 2 * j + 1 of row i.
_I, _J = LANE // 4, LANE % 4


@ops("movmatrix.sync.aligned.m8n8.trans.b16")
def _movmatrix(r, op, d, a):
  # Value h of lane (i, j) is element (2 * j + h, i): in lane 4 * (2 * j + h) + i // 2.
  h = np.arange(2)
  index = r.row(a, "r") * 64 + 2 * (4 * (2 * _J[:, None] + h) + _I[:, None] // 2) + _I[:, None] % 2
  return partial(r.halves.take, index.ravel(), None, r.u16x2(d), "clip")


def fragment(rows: Sequence[int], shape: tuple[int, int]) -> np.ndarray:
  """Where elements lie among the halves of `rows`: blocks of 8 by 8, column by column."""
  block, offset = _blocks(shape)
  return np.array(rows)[block] * 64 + offset


@functools.cache
def _blocks(shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
  """(block, place in it) of each element."""
  m, k = np.indices(shape)
  return m // 8 + shape[0] // 8 * (k // 8), 2 * (4 * (m % 8) + k % 8 // 2) + k % 2


@ops(*(f"mma.sync.aligned.m16n8k16.row.col.f32.{t}.{t}.f32" for t in ("bf16", "f16")))
def _mma(r, op, d, a, b, c):
  a = fragment([r.row(x, "r") for x in a], (16, 16))
  b = fragment([r.row(x, "r") for x in b], (8, 16)).T.copy()
  # Value v of lane (i, j) is element (i + 8 * (v // 2), 2 * j + v % 2).
  v = np.arange(4)[:, None]
  order = (_I + 8 * (v // 2)) * 8 + 2 * _J + v % 2
  targets = [r.f32(x) for x in d]
  block = r.consecutive(d, "rf")
  target = None if block is None else block.view(np.float32)
  start = [r.row(x) for x in c]
  table = numbers.BF16 if ".bf16." in op else numbers.F16
  floats, halves = r.words.view(np.float32), r.halves
  nan = np.empty((4, LANES), bool)
  whole = nan.size * b"\0"

  def step():
    product = table.take(halves.take(a)) @ table.take(halves.take(b))
    value = product.take(order)
    value += floats[start]
    value = value.astype(np.float32)
    np.isnan(value, nan)
    if nan.tobytes() != whole:
      value.view(np.uint32)[nan] = numbers.F32_NAN
    if target is not None:
      target[...] = value
    else:
      for x, y in zip(targets, value, strict=True):
        x[...] = y

  return step


@family("createpolicy")
def _createpolicy(r, op, d, *fraction):
  return partial(r.u64(d).fill, 0)
