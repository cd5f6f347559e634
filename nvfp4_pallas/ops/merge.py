"""merge_states: joins attention over disjoint sets of keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from nvfp4_pallas.attention import merge_two
from nvfp4_pallas.ops.checks import FLOAT_DTYPES, as_jax


def merge_states(
  first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
  """(out, lse) over the union of two disjoint sets of keys.

  lse = log(exp(lse_a) + exp(lse_b)), out = out_a exp(lse_a - lse) + out_b exp(lse_b - lse). A state
  that saw no key (out 0, lse -inf) changes nothing; two such give another one. Sinks belong into
  one of the two states only.

  Args:
    first, second: out [..., v_head_dim] of equal shape and dtype, lse float32 [...].

  Returns:
    out in the dtype of the inputs, lse float32.

  Raises:
    ValueError: shapes or dtypes do not match (message: argument, rule, value).

  Source: FlashInfer's merge_state, here with natural logarithms.
  """
  for name, (out, lse) in (("first", first), ("second", second)):
    if lse.shape != out.shape[:-1] or lse.dtype != jnp.float32:
      raise ValueError(
        f"{name}'s lse must be float32 {out.shape[:-1]}, got {lse.dtype} {lse.shape}"
      )
  if first[0].shape != second[0].shape or first[0].dtype != second[0].dtype:
    raise ValueError(
      "first and second must have outs of equal shape and dtype, got "
      f"{first[0].dtype} {first[0].shape} and {second[0].dtype} {second[0].shape}"
    )
  first, second = as_jax(first, second)
  if first[0].dtype not in FLOAT_DTYPES:
    raise ValueError(f"first's out must be bfloat16, float16 or float32, got {first[0].dtype}")
  dtype = first[0].dtype
  out, lse = merge_two(
    (first[0].astype(jnp.float32), first[1]), (second[0].astype(jnp.float32), second[1])
  )
  return out.astype(dtype), lse


def merge_splits(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Joins along the leading axis, from the first split on: the order of sums is fixed."""
  state = out[0], lse[0]
  for split in range(1, out.shape[0]):
    state = merge_two(state, (out[split], lse[split]))
  return state
