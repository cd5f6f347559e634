"""Rounding of the numbers that PTX computes with, for ptx_arithmetic.py: exact, then once."""

import ml_dtypes
import numpy as np

F32_NAN, HALF_NAN = np.uint32(0x7FFFFFFF), np.uint16(0x7FFF)  # what instructions return
_ONE = np.uint64(1)
_BEYOND_F32, _HALF_F32 = np.uint64(2**29 - 1), np.uint64(2**28)

with np.errstate(invalid="ignore"):
  BF16 = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32).astype(np.float64)
  F16 = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float64)  # of all bits


def sum_to_odd(a, b):
  """a + b of float64, rounded to odd: rounding it again to float32 or less rounds the exact sum."""
  s = a + b
  part = s - a
  error = (a - (s - part)) + (b - part)
  inexact = (error < 0) | (error > 0)
  if not inexact.any():
    return s
  bits = s.view(np.uint64)
  beyond = (error > 0) == (s > 0)
  odd = np.where(beyond, bits, bits - _ONE) | _ONE
  return np.where(inexact, odd, bits).view(np.float64)


def to_f32(s, rounding="rn"):
  """float64 to float32, to nearest, toward zero, up or down."""
  y = s.astype(np.float32)
  if rounding == "rn":
    return y
  wide = y.astype(np.float64)
  wrong, toward = {
    "rz": (np.abs(wide) > np.abs(s), 0),
    "rp": (wide < s, np.inf),
    "rm": (wide > s, -np.inf),
  }[rounding]
  return np.where(wrong, np.nextafter(y, np.float32(toward)), y)


def sum_to_f32(a, b, rounding="rn"):
  """a + b of float64 to float32, rounded once."""
  if rounding == "rn":
    s = a + b
    between = s.view(np.uint64) & _BEYOND_F32 == _HALF_F32  # where rounding twice may go wrong
    small = np.abs(s) < 2.0**-126
    if b"\1" not in between.tobytes() and not s[small].any():
      return s.astype(np.float32)
  y = to_f32(sum_to_odd(a, b), rounding)
  if rounding == "rm":  # an exact zero is negative then
    y = np.where((y == 0) & (a == -b) & (np.signbit(a) != np.signbit(b)), np.float32(-0.0), y)
  return y


def to_bf16(s):
  """float64 (exact, or rounded to odd) to the bits of bf16, to nearest even."""
  y = to_f32(s, "rz").view(np.uint32)
  y = y | (y.view(np.float32).astype(np.float64) != s)
  return round_to_bf16(y)


def round_to_bf16(bits):
  """Bits of float32 to those of bf16, to nearest even."""
  y = (bits + (((bits >> 16) & 1) + 0x7FFF) >> 16).astype(np.uint16)
  nan = np.isnan(bits.view(np.float32))
  return np.where(nan, HALF_NAN, y) if nan.any() else y


def flush(x):
  """Subnormal float32 become zeros of their sign."""
  return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def to_f16(x):
  """float32, or float64 that is exact or rounded to odd, to the bits of f16."""
  return np.where(np.isnan(x), HALF_NAN, x.astype(np.float16).view(np.uint16))


def to_e4m3(x):
  """float32 to the bits of e4m3, large values to the largest finite one."""
  y = np.clip(x, np.float32(-448), np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
  return np.where(np.isnan(x), np.uint8(0x7F), y.view(np.uint8))


# The bits of f16 for all of e4m3.
FROM_E4M3 = to_f16(np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32))
