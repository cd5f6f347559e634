"""Argument checks that prefill, decode and append share. ValueError: argument, rule, value."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from nvfp4_pallas.batch import RaggedBatch, check_batch
from nvfp4_pallas.cache import PagedKVCache, check_cache
from nvfp4_pallas.read_paths import Q_LEVELS, AttentionSpec, check_read_path

FLOAT_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def check_is_array(name: str, x) -> None:
  if not hasattr(x, "dtype"):
    raise ValueError(f"{name} must be an array, got {type(x).__name__}")


def as_jax(*trees):
  """The same pytrees with jax arrays for numpy ones; done after the checks of their dtypes."""
  return jax.tree.map(jnp.asarray, trees)


def check_rows(name: str, x: jax.Array, heads: int, head_dim: int) -> None:
  """x must be [tokens, heads, head_dim] of a float dtype."""
  check_is_array(name, x)
  if x.ndim != 3 or x.shape[1:] != (heads, head_dim):
    raise ValueError(f"{name} must be [tokens, {heads}, {head_dim}], got {x.shape}")
  if x.dtype not in FLOAT_DTYPES:
    raise ValueError(f"{name} must be bfloat16, float16 or float32, got {x.dtype}")


def check_kv(k: jax.Array, v: jax.Array, cache: PagedKVCache, prefix: str = "") -> None:
  check_rows(f"{prefix}k", k, cache.num_kv_heads, cache.k.head_dim)
  check_rows(f"{prefix}v", v, cache.num_kv_heads, cache.v.head_dim)
  if k.shape[0] != v.shape[0]:
    raise ValueError(
      f"{prefix}k and {prefix}v must have equally many tokens, got {k.shape[0]} and {v.shape[0]}"
    )


def check_attention(
  q: jax.Array, cache: PagedKVCache, batch: RaggedBatch, spec: AttentionSpec, sinks
) -> None:
  check_cache(cache)
  check_read_path(spec.read_path, cache)
  if q.ndim != 3 or q.shape[2] != cache.k.head_dim:
    raise ValueError(f"q must be [tokens, num_q_heads, {cache.k.head_dim}], got {q.shape}")
  check_rows("q", q, q.shape[1], cache.k.head_dim)
  if q.shape[1] % cache.num_kv_heads or q.shape[1] == 0:
    raise ValueError(
      f"num_q_heads must be a multiple of num_kv_heads {cache.num_kv_heads}, got {q.shape[1]}"
    )
  check_batch(batch, num_tokens=q.shape[0], page_size=cache.page_size)
  if spec.window is not None and not 1 <= spec.window <= 2**30:
    raise ValueError(f"window must be at least 1 and at most 2^30, got {spec.window}")
  if spec.soft_cap is not None and not spec.soft_cap > 0:
    raise ValueError(f"soft_cap must be positive, got {spec.soft_cap}")
  if spec.soft_cap is not None and cache.k.mean is not None:
    raise ValueError(
      "soft_cap must be None for a cache with k_mean: stored scores are shifted, and a cap is no "
      f"longer the same after a shift, got {spec.soft_cap}"
    )
  if not np.isfinite(spec.sm_scale):
    raise ValueError(f"sm_scale must be finite, got {spec.sm_scale}")
  if spec.q_levels not in Q_LEVELS:
    raise ValueError(f"q_levels must be one of {Q_LEVELS}, got {spec.q_levels}")
  if sinks is not None:
    check_is_array("sinks", sinks)
  if sinks is not None and (sinks.shape != (q.shape[1],) or sinks.dtype not in FLOAT_DTYPES):
    raise ValueError(
      f"sinks must be a float array of shape ({q.shape[1]},), got {sinks.dtype} {sinks.shape}"
    )
