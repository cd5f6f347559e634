"""How append, prefill and decode meet a cache whose rows are rotated or lack their mean.

Callers pass plain q, k and v. What is stored is k' = R (k - mean) and v' = R v, each with its
pool's rotation R (or none), so that

    sm_scale * (R q) . k'_j = sm_scale * q . k_j - sm_scale * q . mean      for every key j
    R (sum_j p_j v'_j) = sum_j p_j v_j

Implementations see R q and stored rows, all the same ones, and know nothing of this. Their lse
lacks sm_scale * q . mean, which is the same for all keys of a row. Sinks are logits beside plain
scores, so with a mean they join after that was put back.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from nvfp4_pallas import attention
from nvfp4_pallas.cache import PagedKVCache
from nvfp4_pallas.format import through
from nvfp4_pallas.read_paths import AttentionSpec
from nvfp4_pallas.rotation import rotate, transform_rows


def stored_rows(cache: PagedKVCache, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
  """New rows as the cache stores them, before its formats round: in their dtypes."""
  return (
    transform_rows(k, cache.k.rotation, cache.k.mean),
    transform_rows(v, cache.v.rotation, cache.v.mean),
  )


def attend(
  function: Callable, q: jax.Array, cache: PagedKVCache, batch, spec: AttentionSpec, *options, sinks
) -> tuple[jax.Array, jax.Array]:
  """function(q, cache, batch, spec, *options, sinks) for plain q: plain out and lse.

  Returns:
    out as the function gives it, or float32 where something was left to do, and lse.
  """
  mean = cache.k.mean
  rotated = transform_rows(q, cache.k.rotation)
  early_sinks = sinks if mean is None else None
  out, lse = function(rotated, cache, batch, spec, *options, early_sinks)
  if mean is not None:
    # A row that sees no key keeps its -inf, whatever its q holds.
    lse = jnp.where(jnp.isneginf(lse), lse, lse + spec.sm_scale * _dot_mean(q, mean))
    out, lse = attention.add_sinks((out, lse), sinks)
  return (out if cache.v.rotation is None else rotate(out, cache.v.rotation)), lse


def out_dtype(q: jax.Array, cache: PagedKVCache, sinks: jax.Array | None):
  """What kernels are to round out to: q's dtype, or float32 where it is not the result yet."""
  done = sinks is None and cache.k.mean is None and cache.v.rotation is None
  return q.dtype if done else jnp.float32


def _dot_mean(q: jax.Array, mean: jax.Array) -> jax.Array:
  """float32 [tokens, num_q_heads]: each query's product with its KV head's mean.

  Of q as it came, rounded to bfloat16 as every read path does, not of what its rotation was rounded
  to: the product with the mean, often larger than those with what is left of the keys, then has no
  error of the rotation.
  """
  heads = mean.shape[0]
  grouped = through(q, jnp.bfloat16).reshape(q.shape[0], heads, q.shape[1] // heads, q.shape[2])
  return jnp.einsum("thgd,hd->thg", grouped, mean, precision="highest").reshape(q.shape[:2])
