"""Calls of kernels that change their operands, made safe from XLA's fusions.

A kernel that changes an array in place has that array as operand and as result, in one buffer.
Where an operand of such a call is a slice, or a result becomes a part of something larger, as in a
scan over layers, XLA for GPUs (jax 0.11.2) fuses the slicing into the call ("dynamic slice
fusion"), and the fused call's operands and results have buffers of their own: the kernel then
changes the operand's, and the result keeps what was in it. Between the two a fence holds, at the
price of copying what was sliced.
"""

from __future__ import annotations

from jax import lax


def fence[T](arrays: T) -> T:
  """The same arrays, into which XLA does not look: operands before a call, results after it."""
  return lax.optimization_barrier(arrays)
