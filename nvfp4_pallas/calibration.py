"""Global scales and K's mean of a layer, from keys and values that a model made.

    stats = KVStatistics.create(num_kv_heads=8, head_dim=128)
    for k, v in texts:  # what append would get
      stats = observe(stats, k, v)
    found = calibrate(stats)
    cache = PagedKVCache.create(..., k_global_scale=found.k_global_scale, ...)

A rotation or a mean changes what is rounded, so statistics for such a cache are made with the same
options: first without a mean, whose `k_mean` then goes into the statistics of a second run, and
with their scales into the cache. Layers go under vmap, as everywhere.

**The window of the block scales.** A block of sixteen has the scale amax_block / (6 g), an E4M3
number: all its digits from 2^-6 to 448, fewer below, and zero from 2^-10 down. calibrate sets

    g = amax * headroom / (6 * 448)

    amax_block                                     its block scale
    above amax * headroom                          448: the block's largest values are cut
    amax * headroom / 28672 .. amax * headroom     exact to one part in 16
    amax * headroom / 458752 .. that               less exact, the smaller the worse
    below                                          zero, and so is all of the block

What is below the window is small beside everything else of its head; what is above it is wrong by
as much as it is above. So headroom is cheap: a factor of two costs one of the window's 15 octaves.
Two is the default: a text may have keys twice as large as any that were observed, and
`four_over_six`, whose scales are half as large again, keeps its choice in the largest blocks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from nvfp4_pallas import format as nvfp4
from nvfp4_pallas.rotation import check_rotation, transform_rows

HEADROOM = 2.0


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["count", "k_sum", "k_amax", "v_amax", "k_least", "v_least", "k_mean"],
  meta_fields=["k_rotation", "v_rotation"],
)
@dataclasses.dataclass(frozen=True)
class KVStatistics:
  """What was seen of a layer's keys and values.

  Attributes:
    count: int32 [], tokens.
    k_sum: float32 [num_kv_heads, head_dim], of plain keys.
    k_amax, v_amax: float32 [num_kv_heads], the largest magnitude of rows as a cache stores them:
      without the mean, rotated. NaN if one of them is not finite.
    k_least, v_least: float32 [num_kv_heads], of those rows the smallest amax of a block of sixteen
      that is not all zeros; infinity if there was none.
    k_mean: what is taken off keys, or None.
    k_rotation, v_rotation: of the cache that this is for (static).
  """

  count: jax.Array
  k_sum: jax.Array
  k_amax: jax.Array
  v_amax: jax.Array
  k_least: jax.Array
  v_least: jax.Array
  k_mean: jax.Array | None = None
  k_rotation: str | None = None
  v_rotation: str | None = None

  @classmethod
  def create(
    cls,
    *,
    num_kv_heads: int,
    head_dim: int,
    k_rotation: str | None = None,
    v_rotation: str | None = None,
    k_mean: jax.Array | None = None,
  ) -> KVStatistics:
    """Of nothing yet. The arguments are those of PagedKVCache.create.

    Raises:
      ValueError: an argument breaks a rule (message: argument, rule, value).
    """
    for name, size in (("num_kv_heads", num_kv_heads), ("head_dim", head_dim)):
      if not isinstance(size, int) or size < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {size!r}")
    if head_dim % nvfp4.SCALE_BLOCK:
      raise ValueError(f"head_dim must be a multiple of {nvfp4.SCALE_BLOCK}, got {head_dim}")
    check_rotation("k_rotation", k_rotation)
    check_rotation("v_rotation", v_rotation)
    if k_mean is not None:
      _check_mean(k_mean, (num_kv_heads, head_dim))
    nothing, no_block = jnp.zeros((num_kv_heads,)), jnp.full((num_kv_heads,), jnp.inf)
    return cls(
      count=jnp.zeros((), jnp.int32),
      k_sum=jnp.zeros((num_kv_heads, head_dim)),
      k_amax=nothing,
      v_amax=nothing,
      k_least=no_block,
      v_least=no_block,
      k_mean=k_mean,
      k_rotation=k_rotation,
      v_rotation=v_rotation,
    )


class Calibration(NamedTuple):
  """Arguments of PagedKVCache.create, and where in the window the smallest blocks lie.

  Attributes:
    k_global_scale, v_global_scale: float32 [num_kv_heads], decode multipliers.
    k_mean: float32 [num_kv_heads, head_dim], the mean of plain keys.
    k_least_scale, v_least_scale: float32 [num_kv_heads], of nvfp4 the block scale, not yet rounded,
      of the smallest block that was seen: from 2^-6 on it has all digits, up to 2^-10 it becomes
      zero.
  """

  k_global_scale: jax.Array
  v_global_scale: jax.Array
  k_mean: jax.Array
  k_least_scale: jax.Array
  v_least_scale: jax.Array


def observe(stats: KVStatistics, k: jax.Array, v: jax.Array) -> KVStatistics:
  """The statistics with more rows; jittable.

  Args:
    k: bfloat16, float16 or float32 [tokens, num_kv_heads, head_dim], as for append; every row
      counts, so there must be no padding.
    v: the same with V's head dim.

  Raises:
    ValueError: k or v is not so (message: argument, rule, value).
  """
  if not isinstance(stats, KVStatistics):
    raise ValueError(f"stats must be KVStatistics, got {type(stats).__name__}")
  for name, x in (("k", k), ("v", v)):
    if not hasattr(x, "dtype"):
      raise ValueError(f"{name} must be an array, got {type(x).__name__}")
  _check_rows("k", k, stats.k_sum.shape)
  _check_rows("v", v, (*stats.v_amax.shape, v.shape[-1]))
  if k.shape[0] != v.shape[0]:
    raise ValueError(f"k and v must have as many tokens, got {k.shape[0]} and {v.shape[0]}")
  k_amax, k_least = _extremes(transform_rows(k, stats.k_rotation, stats.k_mean))
  v_amax, v_least = _extremes(transform_rows(v, stats.v_rotation))
  new = dataclasses.replace(
    stats,
    count=jnp.int32(k.shape[0]),
    k_sum=jnp.sum(k.astype(jnp.float32), axis=0),
    k_amax=k_amax,
    v_amax=v_amax,
    k_least=k_least,
    v_least=v_least,
  )
  return merge(stats, new)


def merge(first: KVStatistics, second: KVStatistics) -> KVStatistics:
  """Of both sets of tokens.

  Raises:
    ValueError: they were made with different options (message: which).
  """
  for name in ("k_rotation", "v_rotation"):
    of_each = getattr(first, name), getattr(second, name)
    if of_each[0] != of_each[1]:
      raise ValueError(f"first and second must have the same {name}, got {of_each}")
  if first.k_sum.shape != second.k_sum.shape:
    shapes = first.k_sum.shape, second.k_sum.shape
    raise ValueError(f"first and second must be of the same heads and head_dim, got {shapes}")
  if (first.k_mean is None) != (second.k_mean is None):
    raise ValueError(
      "first and second must both have a k_mean or none, got one with and one without"
    )
  means = first.k_mean, second.k_mean
  if None not in means and not any(isinstance(mean, Tracer) for mean in means):
    if not np.array_equal(np.asarray(means[0]), np.asarray(means[1])):
      raise ValueError("first and second must have the same k_mean, got two different ones")
  return dataclasses.replace(
    first,
    count=first.count + second.count,
    k_sum=first.k_sum + second.k_sum,
    k_amax=jnp.maximum(first.k_amax, second.k_amax),
    v_amax=jnp.maximum(first.v_amax, second.v_amax),
    k_least=jnp.minimum(first.k_least, second.k_least),
    v_least=jnp.minimum(first.v_least, second.v_least),
  )


def calibrate(
  stats: KVStatistics,
  headroom: float = HEADROOM,
  *,
  k_format: str = "nvfp4",
  v_format: str = "nvfp4",
) -> Calibration:
  """Global scales that leave room for values `headroom` times as large as any seen.

      global_scale = amax * headroom / largest number of the format

  which is 6 * 448 for nvfp4, a code times a block scale, 448 for fp8, and nothing for bf16, whose
  scale is 1. A head of zeros only gets the scale 1.

  Args:
    k_format, v_format: those of the cache that the scales are for.

  Raises:
    ValueError: headroom is no finite number of at least 1, a format is unknown, or where values are
      known: nothing was observed, or something that is not finite.
  """
  if not isinstance(stats, KVStatistics):
    raise ValueError(f"stats must be KVStatistics, got {type(stats).__name__}")
  for name, format in (("k_format", k_format), ("v_format", v_format)):
    if format not in _LARGEST:
      raise ValueError(f"{name} must be one of {tuple(_LARGEST)}, got {format!r}")
  if (
    isinstance(headroom, bool)
    or not isinstance(headroom, numbers.Real)
    or not 1 <= headroom < math.inf
  ):
    raise ValueError(f"headroom must be a finite number of at least 1, got {headroom!r}")
  if not isinstance(stats.count, Tracer):
    _check_seen(stats)
  k_global_scale = _global_scale(stats.k_amax, headroom, k_format)
  v_global_scale = _global_scale(stats.v_amax, headroom, v_format)
  return Calibration(
    k_global_scale=k_global_scale,
    v_global_scale=v_global_scale,
    k_mean=stats.k_sum / jnp.maximum(stats.count, 1).astype(jnp.float32),
    k_least_scale=stats.k_least / (nvfp4.E2M1_MAX * k_global_scale),
    v_least_scale=stats.v_least / (nvfp4.E2M1_MAX * v_global_scale),
  )


def _extremes(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
  """(largest, smallest that is not 0) amax of blocks of [tokens, heads, dim], float32 [heads]."""
  shape = (*rows.shape[:-1], rows.shape[-1] // nvfp4.SCALE_BLOCK, nvfp4.SCALE_BLOCK)
  blocks = jnp.max(jnp.abs(rows.astype(jnp.float32)).reshape(shape), axis=-1)
  least = jnp.min(jnp.where(blocks == 0, jnp.inf, blocks), axis=(0, 2), initial=jnp.inf)
  amax = jnp.max(blocks, axis=(0, 2), initial=0.0)
  # XLA on a CPU may lose a NaN in a maximum over an axis.
  return jnp.where(jnp.all(jnp.isfinite(rows), axis=(0, 2)), amax, jnp.nan), least


# Of each format, the largest number before it is multiplied by the global scale.
_LARGEST = {"nvfp4": nvfp4.E2M1_MAX * nvfp4.E4M3_MAX, "fp8": nvfp4.E4M3_MAX, "bf16": None}


def _global_scale(amax: jax.Array, headroom: float, format: str) -> jax.Array:
  largest = _LARGEST[format]
  if largest is None:
    return jnp.ones_like(amax)
  scale = amax * (headroom / largest)
  scale = jnp.clip(scale, nvfp4.GLOBAL_SCALE_MIN, nvfp4.GLOBAL_SCALE_MAX)
  return jnp.where(amax == 0, 1.0, scale)


def _check_rows(name: str, x: jax.Array, of_token: tuple[int, ...]) -> None:
  if str(x.dtype) not in nvfp4.INPUT_DTYPES:
    raise ValueError(f"{name} must have one of the dtypes {nvfp4.INPUT_DTYPES}, got {x.dtype}")
  if x.ndim != 3 or x.shape[1:] != of_token or x.shape[-1] % nvfp4.SCALE_BLOCK:
    heads, dim = of_token
    raise ValueError(f"{name} must be [tokens, {heads}, {dim}] of whole blocks, got {x.shape}")


def _check_mean(mean: jax.Array, shape: tuple[int, int]) -> None:
  if not hasattr(mean, "dtype") or mean.dtype != jnp.float32 or mean.shape != shape:
    found = f"{mean.dtype} {mean.shape}" if hasattr(mean, "dtype") else type(mean).__name__
    raise ValueError(f"k_mean must be float32 {shape}, got {found}")


def _check_seen(stats: KVStatistics) -> None:
  if not np.all(np.asarray(stats.count) > 0):
    raise ValueError("stats must have seen tokens, got none")
  for name in ("k_amax", "v_amax"):
    values = np.asarray(getattr(stats, name))
    if not np.isfinite(values).all():
      raise ValueError(f"stats.{name} must be finite, got {values}: some row was not")
