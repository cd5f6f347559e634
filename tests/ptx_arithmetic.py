"""PTX instructions whose lanes work alone, for ptx_emulator.py: integers, bits, numbers."""

from __future__ import annotations

import functools

import numpy as np

from nvfp4_pallas.kernels.ptx import Reg
from tests import ptx_numbers as numbers
from tests.ptx_registers import LANE, LANES, NONE, POISON, Registers, family, immediate, ops

partial = functools.partial


def _ufunc(ufunc, view):
  """An instruction that is one function of numpy."""

  def maker(r, op, *args):
    d, *sources = (view(r, x) for x in args)
    return partial(ufunc, *sources, out=d)

  return maker


_U, _S, _B, _D, _P = Registers.u32, Registers.s32, Registers.b32, Registers.u64, Registers.pred

for _name, _function in {"add": np.add, "sub": np.subtract, "mul.lo": np.multiply}.items():
  ops(f"{_name}.u32", f"{_name}.s32")(_ufunc(_function, _U))
  ops(f"{_name}.u64", f"{_name}.s64")(_ufunc(_function, _D))
for _name, _function in {
  "and": np.bitwise_and,
  "or": np.bitwise_or,
  "xor": np.bitwise_xor,
  "not": np.bitwise_not,
}.items():
  ops(f"{_name}.b32")(_ufunc(_function, _B))
  ops(f"{_name}.b64")(_ufunc(_function, _D))
  ops(f"{_name}.pred")(_ufunc(_function, _P))
for _name, _function in {"min": np.minimum, "max": np.maximum}.items():
  ops(f"{_name}.u32")(_ufunc(_function, _U))
  ops(f"{_name}.s32")(_ufunc(_function, _S))
ops("shl.b32")(_ufunc(np.left_shift, _B))
ops("shr.u32", "shr.b32")(_ufunc(np.right_shift, _B))
ops("mov.u32", "mov.s32")(_ufunc(np.positive, _U))
ops("popc.b32")(lambda r, op, d, a: partial(np.bitwise_count, _B(r, a), _U(r, d)))


@ops("mov.b32")
def _mov_b32(r, op, d, a):
  """Also two registers of 16 bits to or from one of 32."""
  if isinstance(d, (list, tuple)):
    (low, high), a = map(r.u16, d), r.b32(a).view(np.uint16)

    def unpack():
      low[...], high[...] = a[0::2], a[1::2]

    return unpack
  d = r.b32(d)
  if isinstance(a, (list, tuple)):
    halves, (low, high) = d.view(np.uint16), map(r.u16, a)

    def pack():
      halves[0::2], halves[1::2] = low, high

    return pack
  return partial(np.copyto, d, r.b32(a))


@ops("mov.b16", "mov.u16")
def _mov_b16(r, op, d, a):
  return partial(np.copyto, r.u16(d), r.u16(a))


@ops("mov.pred")
def _mov_pred(r, op, d, a):
  return partial(np.copyto, r.pred(d), r.pred(a))


@ops("mov.f32")
def _mov_f32(r, op, d, a):
  r.f32(a)  # checks the operand
  return partial(np.copyto, r.b32(d), r.b32(a))


@ops("mov.b64", "mov.u64")
def _mov_b64(r, op, d, a):
  if isinstance(d, (list, tuple)):
    low, high, a = r.b32(d[0]), r.b32(d[1]), r.u64(a)

    def unpack():
      words = a.copy().view(np.uint32)
      low[...], high[...] = words[0::2], words[1::2]

    return unpack
  d = r.u64(d)
  if isinstance(a, (list, tuple)):
    words, low, high = d.view(np.uint32), r.b32(a[0]), r.b32(a[1])

    def pack():
      words[0::2], words[1::2] = low, high

    return pack
  return partial(np.copyto, d, r.u64(a))


@ops("mad.lo.u32", "mad.lo.s32")
def _mad(r, op, d, a, b, c):
  d, a, b, c = map(r.u32, (d, a, b, c))

  def step():
    np.add(a * b, c, d)

  return step


@ops("mul.hi.u32")
def _mul_hi(r, op, d, a, b):
  d, a, b = map(r.u32, (d, a, b))

  def step():
    d[...] = np.multiply(a, b, dtype=np.uint64) >> np.uint64(32)

  return step


@ops("mul.wide.u32")
def _mul_wide(r, op, d, a, b):
  return partial(np.multiply, r.u32(a), r.u32(b), r.u64(d), dtype=np.uint64)


@ops("mad.wide.u32")
def _mad_wide(r, op, d, a, b, c):
  d, a, b, c = r.u64(d), r.u32(a), r.u32(b), r.u64(c)

  def step():
    np.add(np.multiply(a, b, dtype=np.uint64), c, d)

  return step


@ops("div.u32", "rem.u32")
def _divide(r, op, d, a, b):
  d, a, b = map(r.u32, (d, a, b))
  ufunc = np.floor_divide if op == "div.u32" else np.remainder

  def step():
    zero = b == 0
    value = ufunc(a, b | zero)
    d[...] = np.where(zero, POISON, value)  # not specified

  return step


@ops("shr.s32")
def _shr_s32(r, op, d, a, b):
  d, a, b = r.s32(d), r.s32(a), r.u32(b)
  return lambda: np.right_shift(a, np.minimum(b, 31).view(np.int32), d)


@ops("clz.b32", "bfind.u32")
def _leading(r, op, d, a):
  d, a = r.u32(d), r.b32(a)

  def step():
    length = np.frexp(a.astype(np.float64))[1].astype(np.uint32)
    d[...] = np.uint32(32) - length if op == "clz.b32" else length - np.uint32(1)

  return step


_COMPARISONS = {
  "lt": np.less,
  "le": np.less_equal,
  "gt": np.greater,
  "ge": np.greater_equal,
  "eq": np.equal,
  "ne": np.not_equal,
}
_NEGATED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}


def _ordered_ne(a, b, out=None):
  return np.logical_or(a < b, a > b, out)


FLOAT_COMPARISONS = _COMPARISONS | {"ne": _ordered_ne}  # false with NaN
FLOAT_COMPARISONS |= {
  f"{name}u": (
    lambda a, b, out=None, f=FLOAT_COMPARISONS[_NEGATED[name]]: np.logical_not(f(a, b), out)
  )
  for name in _COMPARISONS
}
FLOAT_COMPARISONS |= {
  "num": lambda a, b, out=None: np.logical_and(a == a, b == b, out),
  "nan": lambda a, b, out=None: np.logical_or(a != a, b != b, out),
}


@family("setp")
def _setp(r, op, d, a, b):
  _, name, type_ = op.split(".")
  if type_ == "f32" and name in FLOAT_COMPARISONS:
    return partial(FLOAT_COMPARISONS[name], r.f32(a), r.f32(b), r.pred(d))
  view = {"u32": r.u32, "s32": r.s32, "b32": r.b32, "u64": r.u64}.get(type_)
  if type_[0] == "b" and name not in ("eq", "ne"):
    raise NotImplementedError(op)
  if type_[0] == "u":
    name = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(name, name)
  if view is None or name not in _COMPARISONS:
    raise NotImplementedError(op)
  return partial(_COMPARISONS[name], view(a), view(b), r.pred(d))


@ops(*(f"set.{name}.u32.{type_}" for name in FLOAT_COMPARISONS for type_ in ("u32", "f32")))
def _set(r, op, d, a, b):
  """All bits where it is true."""
  _, name, _, type_ = op.split(".")
  if type_ == "u32" and name not in _COMPARISONS:
    raise NotImplementedError(op)
  compare, view = (_COMPARISONS, r.u32) if type_ == "u32" else (FLOAT_COMPARISONS, r.f32)
  compare, d, a, b = compare[name], r.u32(d), view(a), view(b)
  return lambda: np.multiply(compare(a, b), np.uint32(0xFFFFFFFF), d)


@ops("selp.b32", "selp.u32", "selp.f32", "selp.b64", "selp.u64")
def _selp(r, op, d, a, b, p):
  view = r.u64 if op.endswith("64") else r.f32 if op == "selp.f32" else r.b32
  d, a, b, p = view(d), view(a), view(b), r.pred(p)
  bits = f"u{d.itemsize}"
  d, a, b = d.view(bits), a.view(bits), b.view(bits)

  def step():
    d[...] = np.where(p, a, b)

  return step


# Bits and bytes.


@ops("prmt.b32")
def _prmt(r, op, d, a, b, selector):
  target = r.b32(d).view(np.uint8)
  if isinstance(selector, Reg):
    a, b, s = r.b32(a), r.b32(b), r.u32(selector)

    def step():
      source = np.stack([a, b], 1).view(np.uint8)
      digits = s[:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & np.uint32(15)
      value = np.take_along_axis(source, (digits & 7).astype(np.int64), 1)
      sign = (value.view(np.int8) >> 7).view(np.uint8)
      target.reshape(LANES, 4)[...] = np.where(digits & 8, sign, value)

    return step
  digits = [immediate(selector) >> 4 * k & 15 for k in range(4)]
  rows = [r.row(a), r.row(b)]
  index = np.stack([rows[n >> 2 & 1] * 128 + 4 * LANE + n % 4 for n in digits], 1).ravel()
  if not any(n & 8 for n in digits):
    return partial(r.bytes.take, index, None, target, "clip")
  signs = np.tile([n & 8 > 0 for n in digits], LANES)

  def step_signed():
    value = r.bytes.take(index)
    np.copyto(value, (value.view(np.int8) >> 7).view(np.uint8), where=signs)
    target[...] = value

  return step_signed


_BITS = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
_LOP3 = {
  int(g(f(*(np.uint8((0xF0, 0xCC, 0xAA)[i]) for i in order[:2])), (0xF0, 0xCC, 0xAA)[order[2]])): (
    f,
    g,
    order,
  )
  for f in _BITS.values()
  for g in _BITS.values()
  for order in ((0, 1, 2), (0, 2, 1), (1, 2, 0))
}


@ops("lop3.b32")
def _lop3(r, op, d, a, b, c, table):
  table = immediate(table)
  d, *sources = (r.b32(x) for x in (d, a, b, c))
  if table in _LOP3:
    f, g, (i, j, k) = _LOP3[table]
    x, y, z = sources[i], sources[j], sources[k]
    return lambda: g(f(x, y), z, d)

  def step():
    value = np.zeros(LANES, np.uint32)
    for i in range(8):
      if table >> i & 1:
        x, y, z = (s if i >> 2 - n & 1 else ~s for n, s in enumerate(sources))
        value |= x & y & z
    d[...] = value

  return step


# float32.


def _canonical(step, d):
  """NaN are 0x7fffffff."""
  bits, nan = d.view(np.uint32), np.empty(LANES, bool)

  def run():
    step()
    np.isnan(d, nan)
    if nan.tobytes() != NONE:
      bits[nan] = numbers.F32_NAN

  return run


def _rounding(op):
  """(rounding, flush) of an instruction of float32."""
  modifiers = op.split(".")[1:-1]
  unknown = set(modifiers) - {"rn", "rz", "rp", "rm", "ftz"}
  if unknown or op.split(".")[-1] != "f32":
    raise NotImplementedError(op)
  return next((m for m in modifiers if m[0] == "r"), "rn"), "ftz" in modifiers


def _float(function):
  """An instruction of float32 from a function of arrays and a rounding."""

  def maker(r, op, *args):
    rounding, ftz = _rounding(op)
    d, *sources = (r.f32(x) for x in args)

    def step():
      x = map(numbers.flush, sources) if ftz else sources
      y = function(*x, rounding)
      d[...] = numbers.flush(y) if ftz else y

    return _canonical(step, d)

  return maker


def _wide(x):
  return x.astype(np.float64)


_product = lambda a, b, rounding: numbers.to_f32(_wide(a) * _wide(b), rounding)
_sum = lambda a, b, rounding: numbers.sum_to_f32(_wide(a), _wide(b), rounding)
_difference = lambda a, b, rounding: numbers.sum_to_f32(_wide(a), -_wide(b), rounding)
family("fma")(
  _float(lambda a, b, c, rounding: numbers.sum_to_f32(_wide(a) * _wide(b), _wide(c), rounding))
)
for _name, _function, _slow in (
  ("add", np.add, _sum),
  ("sub", np.subtract, _difference),
  ("mul", np.multiply, _product),
):
  family(_name)(_float(_slow))
  ops(f"{_name}.f32", f"{_name}.rn.f32")(
    lambda r, op, d, a, b, ufunc=_function: _canonical(
      partial(ufunc, r.f32(a), r.f32(b), r.f32(d)), r.f32(d)
    )
  )
ops("div.rn.f32")(
  lambda r, op, d, a, b: _canonical(partial(np.divide, r.f32(a), r.f32(b), r.f32(d)), r.f32(d))
)
ops("abs.f32")(lambda r, op, d, a: partial(np.bitwise_and, _B(r, a), 0x7FFFFFFF, _B(r, d)))
ops("neg.f32")(lambda r, op, d, a: partial(np.bitwise_xor, _B(r, a), 0x80000000, _B(r, d)))


@ops("min.f32", "max.f32", "min.NaN.f32", "max.NaN.f32")
def _extremum(r, op, d, a, b):
  """A NaN loses, but with .NaN wins; -0 < +0."""
  nan_wins = ".NaN" in op
  ufunc = {"max": (np.fmax, np.maximum), "min": (np.fmin, np.minimum)}[op[:3]][nan_wins]
  zeros = np.bitwise_and if op[:3] == "max" else np.bitwise_or
  d, x, y = r.f32(d), r.f32(a), r.f32(b)
  bits, xb, yb = d.view(np.uint32), x.view(np.uint32), y.view(np.uint32)

  def step():
    equal = x == y
    if equal.tobytes() == NONE:
      ufunc(x, y, out=d)
    else:  # equal numbers have equal bits, but for zeros
      value = ufunc(x, y).view(np.uint32)
      bits[...] = np.where(equal, zeros(xb, yb), value)

  return _canonical(step, d)


def _approximation(function):
  def maker(r, op, d, a):
    ftz = ".ftz" in op
    d, a = r.f32(d), r.f32(a)

    def step():
      y = function(_wide(numbers.flush(a) if ftz else a)).astype(np.float32)
      d[...] = numbers.flush(y) if ftz else y

    return _canonical(step, d)

  return maker


ops("ex2.approx.ftz.f32", "ex2.approx.f32")(_approximation(np.exp2))
ops("lg2.approx.ftz.f32", "lg2.approx.f32")(_approximation(np.log2))
ops("rcp.approx.ftz.f32", "rcp.rn.f32")(_approximation(lambda x: 1 / x))


# Conversions.


@ops("cvt.u64.u32")
def _cvt_u64_u32(r, op, d, a):
  return partial(np.copyto, r.u64(d), r.u32(a))


@ops("cvt.u32.u16")
def _cvt_u32_u16(r, op, d, a):
  return partial(np.copyto, r.u32(d), r.u16(a))


@ops("cvt.u16.u32")
def _cvt_u16_u32(r, op, d, a):
  return partial(np.copyto, r.u16(d), r.u32(a), "unsafe")


@ops("cvt.u32.u64")
def _cvt_u32_u64(r, op, d, a):
  return partial(np.copyto, r.u32(d), r.u64(a), "unsafe")


@ops("cvt.rn.f32.u32", "cvt.rn.f32.s32")
def _cvt_f32_integer(r, op, d, a):
  return partial(np.copyto, r.f32(d), (r.u32 if op[-3] == "u" else r.s32)(a), "unsafe")
