"""Caches to time: pools of pages that hold the same wide values in each format.

A pool is made once for its heads and page size and serves every shape, which gets page tables over
as much of it as the shape needs: at least ROTATED_BYTES, so that calls that take turns with the
tables never find their keys in the L2 cache, and in any order. All formats have the same tables,
so that they are asked for the same tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import nvfp4_pallas as nv
from benchmarks import oracle
from benchmarks.workloads import Workload
from nvfp4_pallas.cache import encode_rows, pool_arrays, with_arrays
from nvfp4_pallas.policy import Geometry

ROTATED_BYTES = 256 * 2**20  # of the smallest format, some times the L2 cache of 60 MB
CHUNK_VALUES = 2**26  # made at a time
# Of the device's memory, for the pools of one geometry in all formats.
SHARE = 0.4


@dataclasses.dataclass(frozen=True)
class Tables:
  """Page tables int32 [batch, pages of a sequence] over different parts of the first pages."""

  tables: tuple[jax.Array, ...]
  pages: int  # that they are over


@dataclasses.dataclass(frozen=True)
class Sequence:
  """K or V of one head, on the host.

  Attributes:
    values: float64 [keys, head_dim], decoded.
    largest_scale: of its blocks, nvfp4 only.
  """

  values: np.ndarray
  largest_scale: float | None

  @classmethod
  def of(cls, pool: nv.PagePool, pages: np.ndarray, head: int) -> Sequence:
    padded = np.zeros(max(len(pages), LEAST_PAGES), np.int32)
    padded[: len(pages)] = pages
    rows = _rows_of_head(pool_arrays(pool), jnp.asarray(padded), jnp.int32(head))
    keys = len(pages) * pool.page_size
    data, *scales = (np.asarray(a).reshape(-1, a.shape[-1])[:keys] for a in rows)
    if not scales:
      return cls(data.astype(np.float64), None)
    return cls(oracle.decode(data, scales[0]), float(scales[0].astype(np.float64).max()))


@dataclasses.dataclass
class Pools:
  """Of one geometry and page size; `cache` makes a format's pages when they are first asked for.

  Attributes:
    geometry, page_size: of all pages.
    num_pages: of each pool.
  """

  geometry: Geometry
  page_size: int
  num_pages: int

  def __post_init__(self):
    chunk = max(1, CHUNK_VALUES // (self._page_values))
    self._chunks = math.ceil(self.num_pages / chunk)
    self.num_pages = self._chunks * min(chunk, self.num_pages)
    self._made: dict[str, nv.PagePool] = {}
    self._last: tuple | None = None
    self._sequences: dict[tuple[str, str], Sequence] = {}

  @property
  def _page_values(self) -> int:
    return self.geometry.num_kv_heads * self.page_size * self.geometry.head_dim

  def cache(self, k_format: str, v_format: str) -> nv.PagedKVCache:
    return nv.PagedKVCache(k=self._pool("k", k_format), v=self._pool("v", v_format))

  def _pool(self, side: str, format: str) -> nv.PagePool:
    name = f"{side} {format}"
    if name not in self._made:
      if format == "bf16":
        self._made[name] = self._wide(side)
      else:
        self._made[name] = _encoded(self._pool(side, "bf16"), format, self._chunks)
    return self._made[name]

  def _wide(self, side: str) -> nv.PagePool:
    shape = self.geometry.num_kv_heads, self.page_size, self.geometry.head_dim
    chunk = (self.num_pages // self._chunks, *shape)
    some = lambda key: jax.random.normal(key, chunk, jnp.bfloat16)
    whole = jax.jit(lambda keys: lax.map(some, keys).reshape(self.num_pages, *shape))
    keys = jax.random.split(jax.random.key("kv".index(side)), self._chunks)
    return nv.PagePool(whole(keys), None, None, "bf16")

  def sequence(self, side: str, format: str, pages: np.ndarray, head: int) -> Sequence:
    """What one head of the pages holds; kept until other pages are asked for."""
    of = pages.tobytes(), head
    if self._last != of:
      self._last, self._sequences = of, {}
    if (side, format) not in self._sequences:
      pool = self._pool(side, format)
      self._sequences[side, format] = Sequence.of(pool, pages, head)
    return self._sequences[side, format]


@functools.partial(jax.jit, static_argnames=("format", "chunks"))
def _encoded(wide: nv.PagePool, format: str, chunks: int) -> nv.PagePool:
  """The pages in another format, by the definition, some at a time."""
  pages, heads, page_size, dim = wide.data.shape
  empty = nv.PagedKVCache.create(
    num_pages=1, page_size=page_size, num_kv_heads=heads, head_dim=dim, k_format=format
  ).k

  def encode(some):
    rows = jnp.swapaxes(some, 1, 2).reshape(-1, heads, dim)
    back = lambda a: jnp.swapaxes(a.reshape(-1, page_size, heads, a.shape[-1]), 1, 2)
    return tuple(back(a) for a in encode_rows(empty, rows))

  arrays = lax.map(encode, wide.data.reshape(chunks, pages // chunks, heads, page_size, dim))
  return with_arrays(empty, tuple(a.reshape(pages, *a.shape[2:]) for a in arrays))


def tables_for(workload: Workload, rotated_bytes: int = ROTATED_BYTES) -> Tables:
  """Of the shape; the same ones for every format."""
  wanted = workload.batch * math.ceil(workload.kv_len / workload.page_size)
  pages = pages_for(workload, rotated_bytes)
  order = np.random.default_rng(0).permutation(pages).reshape(pages // wanted, workload.batch, -1)
  return Tables(tuple(jnp.asarray(table, jnp.int32) for table in order[:MOST_TABLES]), pages)


MOST_TABLES = 12  # that calls take turns with


def pages_for(workload: Workload, rotated_bytes: int = ROTATED_BYTES) -> int:
  """Pages that the shape's tables are over, which hold at least so many bytes in NVFP4."""
  wanted = workload.batch * math.ceil(workload.kv_len / workload.page_size)
  heads = workload.heads
  nvfp4_bytes = wanted * workload.page_size * heads.num_kv_heads * heads.head_dim * 9 // 8
  return wanted * max(1, math.ceil(rotated_bytes / nvfp4_bytes))


def most_pages(geometry: Geometry, page_size: int, memory: int | None) -> float:
  """That the pools of all formats may have each, on a device of so much memory, in bytes."""
  if memory is None:
    return math.inf
  token_bytes = 2 * geometry.num_kv_heads * geometry.head_dim * (2 + 1 + 9 / 16)
  return SHARE * memory // (token_bytes * page_size)


def device_memory() -> int | None:
  """Bytes that JAX may take of the device; None where it does not say."""
  stats = jax.devices()[0].memory_stats()
  return None if not stats else stats.get("bytes_limit")


LEAST_PAGES = 1024  # that are fetched, so that few shapes are compiled


@jax.jit
def _rows_of_head(arrays, pages, head):
  return tuple(a.at[pages, head].get(mode="clip") for a in arrays)
