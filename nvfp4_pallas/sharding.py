"""A cache over several devices: by KV heads, and one sequence's pages by context.

    tensor axis    KV heads, and with them query heads: shards share nothing (mesh.py: the bits)
    context axis   pages: each shard attends to the keys in its own pages, and merge_over puts the
                   states together by lse

    data axis      sequences: each shard has pages (and rings) of its own, with numbers of its own

mesh.py has the operations made of these.

    specs = cache_specs(cache, heads="tensor")
    decode = jax.shard_map(
      functools.partial(nv.decode, read_path="nvfp4_dequant"),
      mesh=mesh,
      in_specs=(P(None, "tensor"), specs, P()),
      out_specs=(P(None, "tensor"), P(None, "tensor")),
      check_vma=False,
    )
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from nvfp4_pallas.cache import PagedKVCache, PagePool


def cache_specs(
  cache: PagedKVCache,
  *,
  heads: str | None = None,
  pages: str | None = None,
  sequences: str | None = None,
) -> PagedKVCache:
  """The cache's PartitionSpecs, as a tree of its own kind, for shard_map or NamedSharding.

  Args:
    heads, pages, sequences: names of mesh axes, None where there is none. num_kv_heads is divided
      over the first, num_pages over the others together, and rings over that of sequences.

  Raises:
    ValueError: a cache with a recent window over a `pages` axis: each device would add the rings.
  """

  page_axes = tuple(axis for axis in (sequences, pages) if axis is not None)

  def specs(pool: PagePool) -> PagePool:
    by_page = PartitionSpec(page_axes or None, heads)
    return dataclasses.replace(
      pool,
      data=by_page,
      block_scale=None if pool.block_scale is None else by_page,
      global_scale=None if pool.global_scale is None else PartitionSpec(heads),
      mean=None if pool.mean is None else PartitionSpec(heads),
    )

  recent = cache.recent
  if recent is not None:
    if pages is not None:
      raise ValueError(f"pages must be None for a cache with a recent window, got {pages!r}")
    recent = dataclasses.replace(
      recent, k=specs(recent.k), v=specs(recent.v), starts=PartitionSpec(sequences)
    )
  return dataclasses.replace(cache, k=specs(cache.k), v=specs(cache.v), recent=recent)


def merge_over(axis: str, out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Attention states of disjoint keys, one on each device of a mesh axis, as one on all of them.

      lse = log sum_i exp(lse_i)        out = sum_i exp(lse_i - lse) out_i

  Two reductions of [rows, heads] and one of [rows, heads, dim] go between devices, never the cache.

  Args:
    axis: the mesh axis' name, inside shard_map.
    out: [rows, heads, dim] of any float type; it is summed in float32.
    lse: float32 [rows, heads], natural log; -inf where the device's keys are not seen.

  Returns:
    out in its dtype and lse; 0 and -inf where no device sees a key. The order of the sums is the
    collective's, so results of other device counts agree to rounding.
  """
  largest = lax.pmax(lse, axis)
  finite = jnp.where(jnp.isneginf(largest), 0.0, largest)
  weight = jnp.exp(lse - finite)
  total = lax.psum(weight, axis)
  merged = lax.psum(out.astype(jnp.float32) * weight[..., None], axis)
  merged = merged / jnp.where(total == 0, 1.0, total)[..., None]
  return merged.astype(out.dtype), jnp.where(total == 0, -jnp.inf, finite + jnp.log(total))
