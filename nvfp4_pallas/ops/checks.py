"""Argument checks that prefill, decode and append share. ValueError: argument, rule, value."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from nvfp4_pallas import cache as cache_lib
from nvfp4_pallas.batch import RaggedBatch, check_batch
from nvfp4_pallas.cache import PagedKVCache
from nvfp4_pallas.format import check_global_scale
from nvfp4_pallas.read_paths import Q_LEVELS, AttentionSpec, check_read_path

FLOAT_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def check_cache(cache: PagedKVCache) -> None:
  if cache.layout != cache_lib.LAYOUT or cache.version != cache_lib.LAYOUT_VERSION:
    raise ValueError(
      f"cache must have layout {cache_lib.LAYOUT!r} version {cache_lib.LAYOUT_VERSION}, "
      f"got {cache.layout!r} version {cache.version}"
    )
  for name, pool in (("k", cache.k), ("v", cache.v)):
    _check_pool(name, pool)
  for axis in ("num_pages", "num_kv_heads", "page_size"):
    k, v = getattr(cache.k, axis), getattr(cache.v, axis)
    if k != v:
      raise ValueError(f"cache's K and V must have the same {axis}, got {k} and {v}")
  cache_lib.check_page_size(cache.page_size)


def _check_pool(name, pool) -> None:
  if pool.format not in cache_lib.KV_FORMATS:
    raise ValueError(
      f"cache.{name}.format must be one of {cache_lib.KV_FORMATS}, got {pool.format!r}"
    )
  if pool.data.ndim != 4:
    raise ValueError(
      f"cache.{name}.data must be [pages, heads, page_size, row], got {pool.data.shape}; "
      "use vmap or scan over a layer axis"
    )
  expected = {"bf16": jnp.bfloat16, "fp8": jnp.float8_e4m3fn, "nvfp4": jnp.uint8}[pool.format]
  if pool.data.dtype != expected:
    raise ValueError(
      f"cache.{name}.data of format {pool.format} must be {jnp.dtype(expected).name}, "
      f"got {pool.data.dtype}"
    )
  cache_lib.check_head_dim(f"cache.{name}'s head_dim", pool.head_dim)
  if pool.format != "bf16":
    if pool.global_scale is None:
      raise ValueError(f"cache.{name}.global_scale must be float32 [num_kv_heads], got None")
    check_global_scale(pool.global_scale, (pool.num_kv_heads,), f"cache.{name}.global_scale")
  if pool.format == "nvfp4":
    shape = (*pool.data.shape[:-1], pool.head_dim // 16)
    if pool.block_scale is None or pool.block_scale.shape != shape:
      got = None if pool.block_scale is None else pool.block_scale.shape
      raise ValueError(f"cache.{name}.block_scale must have shape {shape}, got {got}")
    if pool.block_scale.dtype != jnp.float8_e4m3fn:
      raise ValueError(
        f"cache.{name}.block_scale must be float8_e4m3fn, got {pool.block_scale.dtype}"
      )


def check_rows(name: str, x: jax.Array, heads: int, head_dim: int) -> None:
  """x must be [tokens, heads, head_dim] of a float dtype."""
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
  if spec.window is not None and spec.window < 1:
    raise ValueError(f"window must be at least 1, got {spec.window}")
  if spec.soft_cap is not None and not spec.soft_cap > 0:
    raise ValueError(f"soft_cap must be positive, got {spec.soft_cap}")
  if not np.isfinite(spec.sm_scale):
    raise ValueError(f"sm_scale must be finite, got {spec.sm_scale}")
  if spec.q_levels not in Q_LEVELS:
    raise ValueError(f"q_levels must be one of {Q_LEVELS}, got {spec.q_levels}")
  if sinks is not None and (sinks.shape != (q.shape[1],) or sinks.dtype not in FLOAT_DTYPES):
    raise ValueError(
      f"sinks must be a float array of shape ({q.shape[1]},), got {sinks.dtype} {sinks.shape}"
    )
