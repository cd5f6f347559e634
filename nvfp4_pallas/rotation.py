"""What a cache does to rows before it stores them: a mean taken off, a Hadamard rotation.

A few channels of keys are often much larger than the rest. Sixteen neighbours share one block
scale, so such a channel takes the digits of the fifteen beside it. The rotation replaces a row by
sums and differences of all its channels: an outlier is then spread evenly over the scale blocks of
the row. A mean, which all keys of a head share, moves all scores of a query alike and so nothing in
their softmax; without it less is left to quantise.

Both are exact but for rounding: with H orthonormal, (H q) . (H k) = q . k, and the weighted sum of
rotated values is the rotated sum. One thing is lost: a value that is not finite makes NaN of all
that it is added to, not of its block of sixteen alone.

Source: QuaRot, arXiv:2404.00456.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ROTATIONS = ("hadamard",)


def hadamard(x: jax.Array) -> jax.Array:
  """The orthonormal Walsh-Hadamard transform along the last axis; its own inverse, to rounding.

      y[i] = sum_j (-1)^popcount(i & j) x[j] / sqrt(n)

  within blocks of n, the largest power of two that divides the axis: 128 of 128, 32 of 96.

  It is a product with a matrix of ones and minus ones, which every float type holds exactly, in
  x's dtype with float32 sums. Their order is the device's: the last bits of a row may depend on how
  many rows there are.

  Args:
    x: bfloat16, float16 or float32 [..., d].

  Returns:
    float32 [..., d]; callers round.
  """
  d = x.shape[-1]
  n = d & -d
  signs = jnp.asarray(_signs(n), x.dtype)
  blocks = x.reshape(*x.shape[:-1], d // n, n)
  y = jnp.einsum(
    "...i,ij->...j", blocks, signs, precision="highest", preferred_element_type=jnp.float32
  )
  return (y * jnp.float32(1 / math.sqrt(n))).reshape(x.shape)


def rotate(x: jax.Array, rotation: str | None) -> jax.Array:
  """x in float32, rotated as `rotation` says; the inverse too."""
  return x.astype(jnp.float32) if rotation is None else hadamard(x)


def transform_rows(x: jax.Array, rotation: str | None, mean: jax.Array | None = None) -> jax.Array:
  """Rows as a cache stores them: rotate(x - mean) in float32, rounded once to x's dtype.

  Args:
    x: bfloat16, float16 or float32 [tokens, heads, d].
    rotation: None or one of ROTATIONS.
    mean: float32 [heads, d], or None.
  """
  if rotation is None and mean is None:
    return x
  moved = x if mean is None else x.astype(jnp.float32) - mean[None]
  # The barrier keeps the rounding: XLA on a GPU drops a conversion down and up again.
  return lax.optimization_barrier(rotate(moved, rotation).astype(x.dtype))


def _signs(n: int) -> np.ndarray:
  index = np.arange(n)
  return 1 - 2 * (np.bitwise_count(index[:, None] & index[None, :]) % 2).astype(np.int32)


def check_rotation(name: str, rotation: str | None) -> None:
  if rotation is not None and rotation not in ROTATIONS:
    raise ValueError(f"{name} must be None or one of {ROTATIONS}, got {rotation!r}")
