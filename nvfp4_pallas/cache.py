"""The paged KV cache: a functional pytree over page pools of three formats.

Layout `head_major`, version 1. For K and for V, `pages` of `page_size` tokens:

    bf16    data        bfloat16       [num_pages, num_kv_heads, page_size, head_dim]
    fp8     data        float8_e4m3fn  [num_pages, num_kv_heads, page_size, head_dim]
    nvfp4   data        uint8          [num_pages, num_kv_heads, page_size, head_dim / 2]
            block_scale float8_e4m3fn  [num_pages, num_kv_heads, page_size, head_dim / 16]

One head's page is contiguous, so that a copy engine can fetch the 8-byte scale rows of a page at
once; both K and V have their scales in this linear order, per token. The decoded value is
`data`, `data * global_scale`, or `e2m1(code) * block_scale * global_scale`; `global_scale` is
float32 [num_kv_heads]. K and V choose their formats independently, and head_dim may differ.

A pool may keep its rows rotated, and K's without a mean (rotation.py): that is a property of the
pool, so that append, prefill and decode cannot disagree. Its pages then hold other numbers than
the k and v that were appended.

Which page belongs to whom is the caller's business: a page table (batch.py) names pages, and a
free list lives outside, on the host.

With `recent_window`, the newest tokens of each sequence are not in the pages yet: they stay
bfloat16 in a ring (recent.py says which).
"""

from __future__ import annotations

import dataclasses
import functools
import numbers

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from nvfp4_pallas import format as nvfp4
from nvfp4_pallas.explicit import in_auto_mode
from nvfp4_pallas.rotation import check_rotation

KV_FORMATS = ("bf16", "fp8", "nvfp4")
LAYOUT = "head_major"
LAYOUT_VERSION = 1
PAGE_SIZES = (16, 32, 64, 128, 256)
HEAD_DIM_MIN, HEAD_DIM_MAX = 64, 256
MAX_RECENT_WINDOW = 2**16


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["data", "block_scale", "global_scale", "mean"],
  meta_fields=["format", "scale_search", "rotation"],
)
@dataclasses.dataclass(frozen=True)
class PagePool:
  """The pages of K or of V in one format (see the module's table).

  Attributes:
    data: values or codes, [num_pages, num_kv_heads, page_size, bytes or values of a row].
    block_scale: nvfp4 only, else None.
    global_scale: float32 [num_kv_heads], the decode multiplier; None for bf16.
    format: `bf16`, `fp8` or `nvfp4` (static).
    mean: K only: float32 [num_kv_heads, head_dim], taken off rows before they are stored, or None.
    scale_search: how nvfp4 rows are rounded, see format.encode (static).
    rotation: of the rows, None or `hadamard` (static).
  """

  data: jax.Array
  block_scale: jax.Array | None
  global_scale: jax.Array | None
  format: str
  mean: jax.Array | None = None
  scale_search: str = "amax"
  rotation: str | None = None

  @property
  def num_pages(self) -> int:
    return self.data.shape[-4]

  @property
  def num_kv_heads(self) -> int:
    return self.data.shape[-3]

  @property
  def page_size(self) -> int:
    return self.data.shape[-2]

  @property
  def head_dim(self) -> int:
    per_element = nvfp4.E2M1_PER_BYTE if self.format == "nvfp4" else 1
    return self.data.shape[-1] * per_element

  @property
  def decode_scale(self) -> jax.Array:
    """float32 [num_kv_heads]: global_scale, or ones for bf16, which has none."""
    if self.global_scale is None:
      return jnp.ones((self.num_kv_heads,), jnp.float32)
    return self.global_scale

  @property
  def nbytes(self) -> int:
    """Bytes of pages (data and block scales), from the arrays themselves."""
    return sum(a.size * a.dtype.itemsize for a in (self.data, self.block_scale) if a is not None)


@functools.partial(
  jax.tree_util.register_dataclass, data_fields=["k", "v", "starts"], meta_fields=["tokens"]
)
@dataclasses.dataclass(frozen=True)
class RecentWindow:
  """The newest tokens of sequences, bfloat16, a ring of a few pages for each (see recent.py).

  Attributes:
    k, v: bf16 pools; ring r has the pages r * ring_pages .. (r + 1) * ring_pages - 1, and position
      p of its sequence lies in page (p // page_size) % ring_pages of them, row p % page_size.
    starts: int32 [num_rings], the first position that is in the ring and not in the pages; a
      multiple of page_size.
    tokens: the window, as in PagedKVCache.create (static).
  """

  k: PagePool
  v: PagePool
  starts: jax.Array
  tokens: int

  @property
  def num_rings(self) -> int:
    return self.starts.shape[-1]

  @property
  def ring_pages(self) -> int:
    return ring_pages(self.tokens, self.k.page_size)

  @property
  def nbytes(self) -> int:
    return self.k.nbytes + self.v.nbytes

  @property
  def bytes_per_ring(self) -> int:
    """Bytes of K and V that one sequence's ring takes in this layer."""
    return self.nbytes // self.num_rings


def ring_pages(tokens: int, page_size: int) -> int:
  """Pages that hold a window of `tokens` and the page that is leaving it."""
  return -(-tokens // page_size) + 1


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["k", "v", "recent"],
  meta_fields=["layout", "version"],
)
@dataclasses.dataclass(frozen=True)
class PagedKVCache:
  """Keys and values of one layer. A leading layer axis on every leaf is fine under vmap or scan.

  Attributes:
    k, v: the page pools; equal num_pages, num_kv_heads and page_size.
    recent: the newest tokens in wide form, or None where all tokens are in the pages.
    layout, version: what the bytes mean (static); code refuses what it does not know.
  """

  k: PagePool
  v: PagePool
  recent: RecentWindow | None = None
  layout: str = LAYOUT
  version: int = LAYOUT_VERSION

  @property
  def num_pages(self) -> int:
    return self.k.num_pages

  @property
  def num_kv_heads(self) -> int:
    return self.k.num_kv_heads

  @property
  def page_size(self) -> int:
    return self.k.page_size

  @property
  def formats(self) -> tuple[str, str]:
    return self.k.format, self.v.format

  @property
  def nbytes(self) -> int:
    """Bytes of pages, without rings."""
    return self.k.nbytes + self.v.nbytes

  @property
  def bytes_per_token(self) -> float:
    """Bytes of K and V one token takes in this layer's pages, all heads, scales included."""
    return self.nbytes / (self.num_pages * self.page_size)

  @classmethod
  def create(
    cls,
    *,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    k_format: str = "nvfp4",
    v_format: str | None = None,
    v_head_dim: int | None = None,
    k_global_scale: jax.Array | float = 1.0,
    v_global_scale: jax.Array | float = 1.0,
    recent_window: int = 0,
    num_rings: int | None = None,
    scale_search: str = "amax",
    k_rotation: str | None = None,
    v_rotation: str | None = None,
    k_mean: jax.Array | None = None,
  ) -> PagedKVCache:
    """An empty cache (zeros).

    Args:
      num_pages: pages in the pool, shared by all sequences.
      page_size: tokens of a page: 16, 32, 64, 128 or 256.
      num_kv_heads: KV heads of this layer (on this device).
      head_dim: K's head dim, a multiple of 16 from 64 to 256.
      k_format, v_format: `bf16`, `fp8` or `nvfp4`; V's defaults to K's.
      v_head_dim: V's head dim; defaults to K's.
      k_global_scale, v_global_scale: decode multipliers, a number or float32 [num_kv_heads].
      recent_window: the newest tokens of a sequence that stay bfloat16; a page is written in the
        cache's formats when all of it has left the window. 0: none.
      num_rings: sequences that can have such a window at a time; needed with recent_window.
      scale_search: `amax`, or `four_over_six` for what is in nvfp4: see format.encode.
      k_rotation, v_rotation: None, or `hadamard`: rows are stored rotated (rotation.py).
      k_mean: float32 [num_kv_heads, head_dim], taken off every key; not for use with soft_cap.

    Raises:
      ValueError: an argument breaks a rule above (message: argument, rule, value).
    """
    v_format = k_format if v_format is None else v_format
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    for name, count in (("num_pages", num_pages), ("num_kv_heads", num_kv_heads)):
      check_whole(name, count)
      if count < 1:
        raise ValueError(f"{name} must be at least 1, got {count}")
    check_whole("recent_window", recent_window)
    check_page_size(page_size)
    check_head_dim("head_dim", head_dim)
    check_head_dim("v_head_dim", v_head_dim)
    check_rotation("k_rotation", k_rotation)
    check_rotation("v_rotation", v_rotation)
    _check_scale_search("scale_search", scale_search, k_format, v_format)
    if k_mean is not None:
      _check_mean("k_mean", k_mean, (num_kv_heads, head_dim))
      k_mean = jnp.array(k_mean, copy=True)  # for the reason in _empty_pool
    shape = (num_pages, num_kv_heads, page_size)
    k = _empty_pool("k", k_format, shape, head_dim, k_global_scale, scale_search)
    v = _empty_pool("v", v_format, shape, v_head_dim, v_global_scale, scale_search)
    cache = cls(
      k=dataclasses.replace(k, rotation=k_rotation, mean=k_mean),
      v=dataclasses.replace(v, rotation=v_rotation),
    )
    if not recent_window and num_rings is None:
      return cache
    return dataclasses.replace(cache, recent=_empty_rings(cache, recent_window, num_rings))


def _empty_rings(cache: PagedKVCache, tokens: int, num_rings: int | None) -> RecentWindow:
  if num_rings is not None:
    check_whole("num_rings", num_rings)
  if not 1 <= tokens <= MAX_RECENT_WINDOW:
    raise ValueError(
      f"recent_window must be from 1 to {MAX_RECENT_WINDOW} with rings, got {tokens}"
    )
  if num_rings is None or num_rings < 1:
    raise ValueError(f"num_rings must be at least 1 with a recent_window, got {num_rings}")
  if cache.formats == ("bf16", "bf16"):
    raise ValueError("recent_window must be 0 for a bf16 cache, whose pages are wide already")
  shape = (
    num_rings * ring_pages(tokens, cache.page_size),
    cache.num_kv_heads,
    cache.page_size,
  )
  return RecentWindow(
    k=_empty_pool("k", "bf16", shape, cache.k.head_dim, 1, "amax"),
    v=_empty_pool("v", "bf16", shape, cache.v.head_dim, 1, "amax"),
    starts=jnp.zeros((num_rings,), jnp.int32),
    tokens=tokens,
  )


def _empty_pool(name, format, shape, head_dim, global_scale, scale_search) -> PagePool:
  if format not in KV_FORMATS:
    raise ValueError(f"{name}_format must be one of {KV_FORMATS}, got {format!r}")
  nvfp4.check_global_scale(global_scale, shape[1:2], f"{name}_global_scale")
  # A copy: the cache is made to be donated, and what the caller gave must survive that.
  scale = jnp.array(jnp.broadcast_to(jnp.asarray(global_scale, jnp.float32), shape[1:2]), copy=True)
  if format == "bf16":
    if not isinstance(global_scale, (int, float)) or global_scale != 1:
      raise ValueError(f"{name}_global_scale must be 1 for a bf16 cache, got {global_scale}")
    return PagePool(jnp.zeros((*shape, head_dim), jnp.bfloat16), None, None, format)
  if format == "fp8":
    return PagePool(jnp.zeros((*shape, head_dim), jnp.float8_e4m3fn), None, scale, format)
  return PagePool(
    data=jnp.zeros((*shape, head_dim // nvfp4.E2M1_PER_BYTE), jnp.uint8),
    block_scale=jnp.zeros((*shape, head_dim // nvfp4.SCALE_BLOCK), jnp.float8_e4m3fn),
    global_scale=scale,
    format=format,
    scale_search=scale_search,
  )


def encode_rows(pool: PagePool, x: jax.Array) -> tuple[jax.Array, ...]:
  """New rows [tokens, num_kv_heads, head_dim] in the pool's format: (data,) or (data, scales).

  They are rotated already where the pool is, and without its mean.

  bf16: rounded to nearest. fp8: e4m3 of fl(x / global_scale), nearest, saturating at 448; a
  non-finite value becomes E4M3 NaN. nvfp4: format.encode with the pool's global scale and search.
  """
  if pool.format == "bf16":
    return (x.astype(jnp.bfloat16),)
  if pool.format == "fp8":
    scaled = nvfp4.divide(x.astype(jnp.float32), pool.decode_scale[None, :, None])
    rounded = jnp.clip(scaled, -nvfp4.E4M3_MAX, nvfp4.E4M3_MAX)
    return (jnp.where(jnp.isfinite(scaled), rounded, jnp.nan).astype(jnp.float8_e4m3fn),)
  scale = jnp.broadcast_to(pool.decode_scale, x.shape[:-1])
  packed = nvfp4.encode(x, scale, scale_search=pool.scale_search)
  return packed.codes, packed.block_scale


def decode_rows(pool: PagePool, rows: tuple[jax.Array, ...]) -> jax.Array:
  """The inverse without the global scale, exact in bfloat16: float32 [..., head_dim]."""
  if pool.format == "nvfp4":
    return nvfp4.decode_unscaled(*rows)
  return rows[0].astype(jnp.float32)


def pool_arrays(pool: PagePool) -> tuple[jax.Array, ...]:
  """The page arrays, in the order that encode_rows and decode_rows use."""
  return (pool.data,) if pool.block_scale is None else (pool.data, pool.block_scale)


def with_arrays(pool: PagePool, arrays: tuple[jax.Array, ...]) -> PagePool:
  scale = arrays[1] if len(arrays) == 2 else None
  return dataclasses.replace(pool, data=arrays[0], block_scale=scale)


def take(array: jax.Array, index: tuple, **mode) -> jax.Array:
  """array.at[index].get(**mode). 8-bit floats move as bytes: XLA on a CPU would widen the whole
  array to float16 first."""
  return _from_bytes(_as_bytes(array).at[index].get(**mode), array.dtype)


def put(array: jax.Array, index: tuple, rows: jax.Array) -> jax.Array:
  """array.at[index].set(rows), rows past the end dropped; 8-bit floats move as bytes.

  On a GPU that is in place when the array is donated; XLA on a CPU reinterprets 8-bit floats by
  writing them anew, so there an append passes over the E4M3 arrays of the pool once.
  """
  return _from_bytes(_as_bytes(array).at[index].set(_as_bytes(rows), mode="drop"), array.dtype)


def _as_bytes(a):
  return lax.bitcast_convert_type(a, jnp.uint8) if a.dtype == jnp.float8_e4m3fn else a


def _from_bytes(a, dtype):
  return lax.bitcast_convert_type(a, dtype) if dtype == jnp.float8_e4m3fn else a


def copy_pages(cache: PagedKVCache, source: jax.Array, target: jax.Array) -> PagedKVCache:
  """Copies whole pages, bytes as they are (fork, copy on write).

  Equivalent to: for i: every array a of the cache: a[target[i]] = a_before[source[i]].

  Args:
    cache: donated under jit; every page not named by `target` is returned bit-identical.
    source, target: int32 [n], pages. A pair with either page outside [0, num_pages) is skipped.
      A page that stands twice in `target` gets one of its sources, which one is not promised.
  """
  check_cache(cache)
  for name, ids in (("source", source), ("target", target)):
    if ids.ndim != 1 or ids.dtype != jnp.int32:
      raise ValueError(f"{name} must be int32 [n], got {ids.dtype} {ids.shape}")
  if source.shape != target.shape:
    raise ValueError(f"source and target must be equally long, got {source.shape=} {target.shape=}")
  return in_auto_mode(_copy_pages, lambda: cache, cache, source, target)


def _copy_pages(cache: PagedKVCache, source: jax.Array, target: jax.Array) -> PagedKVCache:
  known = (source >= 0) & (source < cache.num_pages) & (target >= 0)
  where = jnp.where(known, target, cache.num_pages)  # past the end: dropped

  def copy(pool):
    return with_arrays(
      pool, tuple(put(a, (where,), take(a, (source,), mode="clip")) for a in pool_arrays(pool))
    )

  return dataclasses.replace(cache, k=copy(cache.k), v=copy(cache.v))


def check_cache(cache: PagedKVCache) -> None:
  """Raises ValueError (argument, rule, value) for a cache that is not as this module says."""
  _check_alive(cache)
  if cache.layout != LAYOUT or cache.version != LAYOUT_VERSION:
    raise ValueError(
      f"cache must have layout {LAYOUT!r} version {LAYOUT_VERSION}, "
      f"got {cache.layout!r} version {cache.version}"
    )
  for name, pool in (("k", cache.k), ("v", cache.v)):
    _check_pool(name, pool)
  for axis in ("num_pages", "num_kv_heads", "page_size"):
    k, v = getattr(cache.k, axis), getattr(cache.v, axis)
    if k != v:
      raise ValueError(f"cache's K and V must have the same {axis}, got {k} and {v}")
  check_page_size(cache.page_size)
  if cache.recent is not None:
    _check_rings(cache, cache.recent)


def _check_alive(cache: PagedKVCache) -> None:
  for path, leaf in jax.tree_util.tree_leaves_with_path(cache):
    if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted():
      raise ValueError(
        "cache must be the one that the last call returned: this one was donated, got a deleted "
        f"cache{jax.tree_util.keystr(path)}"
      )


def _check_rings(cache: PagedKVCache, recent: RecentWindow) -> None:
  if recent.starts.ndim != 1 or recent.starts.dtype != jnp.int32:
    raise ValueError(
      "cache.recent.starts must be int32 [num_rings], "
      f"got {recent.starts.dtype} {recent.starts.shape}"
    )
  pages = recent.num_rings * recent.ring_pages
  for name, pool, like in (("k", recent.k, cache.k), ("v", recent.v, cache.v)):
    expected = (pages, like.num_kv_heads, like.page_size, like.head_dim)
    if pool.format != "bf16" or pool.data.shape != expected or pool.data.dtype != jnp.bfloat16:
      raise ValueError(
        f"cache.recent.{name} must be bf16 {expected}, got {pool.format} "
        f"{pool.data.dtype} {pool.data.shape}"
      )


def _check_pool(name, pool) -> None:
  if pool.format not in KV_FORMATS:
    raise ValueError(f"cache.{name}.format must be one of {KV_FORMATS}, got {pool.format!r}")
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
  check_head_dim(f"cache.{name}'s head_dim", pool.head_dim)
  scales = (*pool.data.shape[:-1], pool.head_dim // nvfp4.SCALE_BLOCK)
  expected_arrays = {
    "global_scale": (jnp.float32, (pool.num_kv_heads,)) if pool.format != "bf16" else None,
    "block_scale": (jnp.float8_e4m3fn, scales) if pool.format == "nvfp4" else None,
  }
  for array_name, wanted in expected_arrays.items():
    array = getattr(pool, array_name)
    found = None if array is None else (array.dtype, array.shape)
    if found != wanted:
      rule = "None" if wanted is None else f"{jnp.dtype(wanted[0]).name} {wanted[1]}"
      got = "None" if found is None else f"{found[0]} {found[1]}"
      raise ValueError(
        f"cache.{name}.{array_name} of format {pool.format} must be {rule}, got {got}"
      )
  if pool.global_scale is not None:
    nvfp4.check_global_scale(pool.global_scale, (pool.num_kv_heads,), f"cache.{name}.global_scale")
  check_rotation(f"cache.{name}.rotation", pool.rotation)
  _check_scale_search(f"cache.{name}.scale_search", pool.scale_search, pool.format)
  if pool.mean is not None:
    if name == "v":
      raise ValueError(f"cache.v.mean must be None, got {pool.mean.dtype} {pool.mean.shape}")
    _check_mean(f"cache.{name}.mean", pool.mean, (pool.num_kv_heads, pool.head_dim))


def _check_scale_search(name: str, scale_search: str, *formats: str) -> None:
  if scale_search not in nvfp4.SCALE_SEARCHES:
    raise ValueError(f"{name} must be one of {nvfp4.SCALE_SEARCHES}, got {scale_search!r}")
  if scale_search != "amax" and "nvfp4" not in formats:
    raise ValueError(f"{name} must be 'amax' without nvfp4, got {scale_search!r} for {formats}")


def _check_mean(name: str, mean: jax.Array, shape: tuple[int, int]) -> None:
  """float32 of this shape; finite, where values are known."""
  if not hasattr(mean, "dtype") or mean.dtype != jnp.float32 or mean.shape != shape:
    found = f"{mean.dtype} {mean.shape}" if hasattr(mean, "dtype") else type(mean).__name__
    raise ValueError(f"{name} must be float32 {shape}, got {found}")
  if not isinstance(mean, Tracer):
    check_finite(name, np.asarray(mean))


def check_finite(name: str, values: np.ndarray) -> None:
  bad = ~np.isfinite(values)
  if bad.any():
    place = np.argwhere(bad)[0].tolist()
    raise ValueError(f"{name} must be finite, got {values[bad][0]} at {place}")


def check_whole(name: str, count: int) -> None:
  """Raises ValueError for all but integers: sizes become parts of shapes."""
  if isinstance(count, bool) or not isinstance(count, numbers.Integral):
    raise ValueError(f"{name} must be a whole number, got {count!r}")


def check_page_size(page_size: int) -> None:
  check_whole("page_size", page_size)
  if page_size not in PAGE_SIZES:
    raise ValueError(f"page_size must be one of {PAGE_SIZES}, got {page_size}")


def check_head_dim(name: str, head_dim: int) -> None:
  check_whole(name, head_dim)
  if head_dim % nvfp4.SCALE_BLOCK or not HEAD_DIM_MIN <= head_dim <= HEAD_DIM_MAX:
    raise ValueError(
      f"{name} must be a multiple of {nvfp4.SCALE_BLOCK} from {HEAD_DIM_MIN} to {HEAD_DIM_MAX}, "
      f"got {head_dim}"
    )
