"""PTX instructions of numbers with 16 bits or fewer, for ptx_emulator.py: bf16x2, f16x2, e4m3x2."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from tests import ptx_numbers as numbers
from tests.ptx_arithmetic import FLOAT_COMPARISONS
from tests.ptx_registers import ops

partial = functools.partial
_MAGNITUDE, _SIGN = np.uint16(0x7FFF), np.uint16(0x8000)


@dataclasses.dataclass(frozen=True)
class _Format:
  """A format of 16 bits.

  Attributes:
    values: of all bits, float64.
    round: from float64, exact or rounded to odd, to bits.
  """

  dtype: Any
  values: np.ndarray
  round: Callable[[np.ndarray], np.ndarray]
  infinity: int
  one: int


_FORMATS = {
  "bf16x2": _Format(ml_dtypes.bfloat16, numbers.BF16, numbers.to_bf16, 0x7F80, 0x3F80),
  "f16x2": _Format(np.float16, numbers.F16, numbers.to_f16, 0x7C00, 0x3C00),
}


def _ops(*names):
  """Registers makers of both formats, which get the format instead of the op as a whole."""

  def register(maker):
    for type_, format_ in _FORMATS.items():
      for name in names:
        ops(f"{name}.{type_}")(
          lambda r, op, *args, f=format_: maker(r, f, op.rpartition(".")[0], *args)
        )
    return maker

  return register


def _canonical(d):
  nan = np.isnan(d)
  if b"\1" in nan.tobytes():
    d.view(np.uint16)[nan] = numbers.HALF_NAN


_UFUNCS = {"mul": np.multiply, "add": np.add, "sub": np.subtract}


@_ops(*_UFUNCS, *(f"{name}.rn" for name in _UFUNCS))
def _binary(r, f, op, d, a, b):
  """In float32, which has products exactly; for sums rounding twice is harmless (24 >= 2 * 11 + 2).

  Products that underflow, too: the last bit of bf16's subnormals is 2^16 times float32's.
  """
  d, a, b = (r.u16x2(x).view(f.dtype) for x in (d, a, b))
  ufunc, bits, nan, none = _UFUNCS[op[:3]], d.view(np.uint16), np.empty(d.size, bool), bytes(d.size)

  def step():
    ufunc(a, b, d)
    np.isnan(d, nan)
    if nan.tobytes() != none:
      bits[nan] = numbers.HALF_NAN

  return step


@_ops("fma.rn")
def _fma(r, f, op, d, a, b, c):
  d, a, b, c = map(r.u16x2, (d, a, b, c))
  values = f.values

  def step():
    d[...] = f.round(numbers.sum_to_odd(values.take(a) * values.take(b), values.take(c)))

  return step


@_ops("abs")
def _abs(r, f, op, d, a):
  return partial(np.bitwise_and, r.u16x2(a), _MAGNITUDE, r.u16x2(d))


@_ops("neg")
def _neg(r, f, op, d, a):
  return partial(np.bitwise_xor, r.u16x2(a), _SIGN, r.u16x2(d))


_SUFFIXES = [nan + sign for nan in ("", ".NaN") for sign in ("", ".xorsign.abs")]


@_ops(*(name + suffix for name in ("min", "max") for suffix in _SUFFIXES))
def _extremum(r, f, op, d, a, b):
  """A NaN loses, but with .NaN wins; -0 < +0. xorsign: of magnitudes, with the product's sign."""
  d, a, b = map(r.u16x2, (d, a, b))
  ufunc = np.maximum if op[:3] == "max" else np.minimum
  of_magnitudes, nan_wins = ".xorsign" in op, ".NaN" in op
  none = bytes(d.size)

  def in_order(x):
    """Bits as integers in the order of numbers, and back."""
    x = x.view(np.int16)
    return x ^ (x >> 15 & 0x7FFF)

  def step():
    x, y = a & _MAGNITUDE, b & _MAGNITUDE
    x_nan, y_nan = x > f.infinity, y > f.infinity
    either = x_nan | y_nan
    if of_magnitudes:
      sign = (a ^ b) & _SIGN
      x, y, value = x | sign, y | sign, ufunc(x, y) | sign
    else:
      x, y, value = a, b, in_order(ufunc(in_order(a), in_order(b))).view(np.uint16)
    if either.tobytes() != none:
      value = np.where(x_nan, y, np.where(y_nan, x, value))
      value = np.where(either if nan_wins else x_nan & y_nan, numbers.HALF_NAN, value)
    d[...] = value

  return step


@_ops(*(f"set.{name}.{result}" for name in FLOAT_COMPARISONS for result in ("u32", *_FORMATS)))
def _set(r, f, op, d, a, b):
  """16 ones, or the number 1, in each half where it is true."""
  _, name, result = op.split(".")
  bits = r.u16x2(d)
  a, b = (r.u16x2(x).view(f.dtype) for x in (a, b))
  true = np.uint16(0xFFFF if result == "u32" else _FORMATS[result].one)
  compare = FLOAT_COMPARISONS[name]
  return lambda: np.multiply(compare(a, b), true, bits)


# Conversions.


@ops("cvt.rn.bf16x2.f32", "cvt.rn.f16x2.f32")
def _from_f32(r, op, d, high, low):
  d, high, low = r.u16x2(d), r.b32(high), r.b32(low)

  def step():
    x = np.stack([low, high], 1).ravel()
    d[...] = numbers.round_to_bf16(x) if ".bf16x2." in op else numbers.to_f16(x.view(np.float32))

  return step


@ops("cvt.rn.satfinite.e4m3x2.f32")
def _to_e4m3(r, op, d, high, low):
  """To 16 bits; in a register of 32, ptx.py widens them."""
  d, high, low = r.u16(d) if d.kind == "h" else r.u32(d), r.f32(high), r.f32(low)

  def step():
    d[...] = numbers.to_e4m3(np.stack([low, high], 1).ravel()).view(np.uint16)

  return step


@ops("cvt.rn.f16x2.e4m3x2")
def _from_e4m3(r, op, d, a):
  d, a = r.u16x2(d), r.u16(a)
  return lambda: numbers.FROM_E4M3.take(a.view(np.uint8), None, d, "clip")


@ops("cvt.rn.satfinite.e4m3x2.f16x2")
def _to_e4m3_from_f16(r, op, d, a):
  d, a = r.u16(d), r.u16x2(a)
  return lambda: np.copyto(d, numbers.to_e4m3(numbers.F16.take(a)).view(np.uint16))


@ops("cvt.f32.f16")
def _f16_to_f32(r, op, d, a):
  d, a = r.f32(d), r.u16(a)

  def step():
    d[...] = numbers.F16.take(a)
    d.view(np.uint32)[np.isnan(d)] = numbers.F32_NAN

  return step
