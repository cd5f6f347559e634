"""A model of the block-scaled FP4 product of tensor cores, in integers; shares no code with the
package.

    D = C + sum_k A_ik a_scale(i, k / 16) B_kj b_scale(j, k / 16)       m16n8k64, scale_vec::4X

(mma.sync with .kind::mxf4nvf4.block_scale.scale_vec::4X, PTX ISA 8.7; tcgen05.mma has the same
numbers.) A and B are E2M1, the scales E4M3 without sign, C and D float32. Twice an E2M1 and 2^9
times an E4M3 are whole numbers, so that every product is one times 2^-20, below 2^44, and a sum of
64 of them is exact even in float64: the model adds exactly, and rounds to float32 once for each
instruction, to the nearest, ties to even.

PTX leaves the rounding inside an instruction open. Hardware that cuts the terms of a sum short, as
Hopper's FP8 product does (WORKSPACE_NOTES), would differ from this in the last of float32's bits,
or in more of them. So this proves what the product means, not the last bits of a device.
"""

from __future__ import annotations

import numpy as np

STEP = 64  # of k, in one instruction
BLOCK = 16
_TWICE_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float64)
_UNIT = 2.0**-20


def _e4m3_whole() -> np.ndarray:
  """2^9 times each E4M3 by its byte: subnormal ones are m, others (8 + m) 2^(e - 1)."""
  byte = np.arange(128)
  exponent, mantissa = byte >> 3, byte & 7
  normal = (8 + mantissa) << np.maximum(exponent - 1, 0)
  return np.where(exponent == 0, mantissa, normal).astype(np.float64)


_WHOLE = _e4m3_whole()
NAN = 0x7F


def multiply(
  a: np.ndarray, a_scale: np.ndarray, b: np.ndarray, b_scale: np.ndarray, c: np.ndarray
) -> np.ndarray:
  """c + A B^T, an instruction after the other for 64 of k each.

  Args:
    a, b: uint8 [m, k / 2], [n, k / 2], two codes a byte, the even k in the low nibble.
    a_scale, b_scale: bytes of E4M3, uint8 [m, k / 16], [n, k / 16].
    c: float32 [m, n], whole numbers times 2^-20, such as 0 or another result.

  Returns: float32 [m, n]; NaN where a scale is NaN, or c.
  """
  faulty = (a_scale == NAN).any(axis=1)[:, None] | (b_scale == NAN).any(axis=1)[None, :]
  total = np.asarray(c, np.float32)
  for first in range(0, 2 * a.shape[1], STEP):
    left = _scaled(a, a_scale, first)
    right = _scaled(b, b_scale, first)
    known = np.where(np.isfinite(total), total, np.float32(0)).astype(np.float64)
    # c is a whole number of units as well, if it came from here; a sum then rounds once.
    whole = (left @ right.T).astype(np.int64) + np.rint(known / _UNIT).astype(np.int64)
    total = np.where(np.isfinite(total), whole.astype(np.float32) * np.float32(_UNIT), total)
  return np.where(faulty, np.float32(np.nan), total)


def exact(a, a_scale, b, b_scale) -> np.ndarray:
  """2^20 A B^T, int64 [m, n], for scales without NaN."""
  k = 2 * a.shape[1]
  parts = [_scaled(a, a_scale, i) @ _scaled(b, b_scale, i).T for i in range(0, k, STEP)]
  return np.sum(parts, axis=0).astype(np.int64)


def _scaled(codes, scales, first):
  """2^10 times the values of columns first .. first + 63."""
  nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
  value = _TWICE_E2M1[nibbles[:, first : first + STEP]]
  scale = _WHOLE[scales[:, first // BLOCK : (first + STEP) // BLOCK] & 0x7F]
  return value * np.repeat(scale, BLOCK, axis=1)
