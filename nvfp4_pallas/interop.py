"""Pages of other engines, byte for byte, to a PagedKVCache and back: NVFP4 keys and values.

All engines agree with this library on what a row is: codes low nibble first, one E4M3 scale for 16
columns, value = e2m1(code) * scale * (decode) global scale. They differ in the order of rows and
scales, and have one global scale a layer where a cache has one a KV head.

    FlashInfer   K, V and their scales apart, [pages, page, head, ...] "NHD" or
                 [pages, head, page, ...] "HND"
    vLLM         one buffer, each page [K codes | K scales | V codes | V scales], each of these
                 [head, page, ...] "HND" or [page, head, ...] "NHD"
    SGLang       K, V and their scales apart, flat token slots [slot, head, ...]

vLLM gives its buffer a shape with a last axis of D / 2 + D / 16: [pages, 2 heads, page, ...], or,
as it once had it, [pages, 2, head, page, ...] ("NHD": [pages, 2, page, head, ...]). That says how
many bytes a page has, not what they are: `buffer[..., : D / 2]` is not K's or V's codes. vllm_views
finds them.

Scales of V come in one of three orders within the [page, S] scales of a page's head, S = D / 16:

    linear       token t, block s            at [t, s]
    trtllm       four tokens interleaved     at flat (t / 4) 4 S + s 4 + t % 4
    vllm         the writer's for GPUs before Blackwell, at row (t / 4) 4 + s / (S / 4), column
                 (s % (S / 4)) 4 + t % 4; the same bytes as trtllm

Sources: FlashInfer page.py and fp4_quantization.py; vLLM nvfp4_kv_cache_kernels.cu and
torch_utils.py (nvfp4_kv_cache_split_views); TensorRT-LLM unfusedAttentionKernels_2_template.h;
SGLang kvfp4_tensor.py.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from nvfp4_pallas.cache import (
  PagedKVCache,
  PagePool,
  check_cache,
  check_head_dim,
  check_page_size,
  check_whole,
)
from nvfp4_pallas.format import GLOBAL_SCALE_MAX, GLOBAL_SCALE_MIN

LAYOUTS = ("NHD", "HND")
ARRAYS = ("k", "v", "k_scale", "v_scale")
V_SCALES = ("linear", "trtllm", "vllm")
SCALE_CONVENTIONS = ("decode", "encode", "amax_448", "amax_2688")
BLOCK, CODES_OF_BYTE = 16, 2


@dataclasses.dataclass(frozen=True)
class ForeignPages:
  """Arrays of an engine that keeps K, V and scales apart, or views of one that does not.

  Attributes:
    k, v: codes, uint8 [..., D / 2].
    k_scale, v_scale: block scales, float8_e4m3fn [..., D / 16]; no sign bit is set in any.
    k_global_scale, v_global_scale: decode multipliers of the layer.
  """

  k: jax.Array
  v: jax.Array
  k_scale: jax.Array
  v_scale: jax.Array
  k_global_scale: float
  v_global_scale: float


@dataclasses.dataclass(frozen=True)
class PackedPages:
  """A buffer of vLLM, and what it keeps beside it.

  Attributes:
    buffer: uint8 [pages, bytes of a page], or as vLLM shapes them (see above), row by row as the
      bytes lie in memory.
    k_global_scale, v_global_scale: decode multipliers of the layer.
  """

  buffer: jax.Array
  k_global_scale: float
  v_global_scale: float


def decode_global_scale(value: float, convention: str) -> float:
  """The decode multiplier that another engine's number means.

  Args:
    value: finite and positive.
    convention: `decode` (the multiplier itself), `encode` (its reciprocal), or the largest
      magnitude of the values: `amax_448` (block scales of up to 448 / 6), `amax_2688` (up to 448).

  Raises:
    ValueError: the convention or the value is none, or the multiplier is not within
      [2^-64, 2^64], which no cache takes.
  """
  return _multiplier("a global scale", value, convention)


def _multiplier(name: str, value: float, convention: str = "decode") -> float:
  if convention not in SCALE_CONVENTIONS:
    raise ValueError(f"convention must be one of {SCALE_CONVENTIONS}, got {convention!r}")
  try:
    if isinstance(value, (str, bytes, bool)) or np.ndim(value):
      raise TypeError
    value = float(value)
  except (TypeError, ValueError, OverflowError):
    raise ValueError(f"{name} must be a number, known outside jit, got {value!r}"[:300]) from None
  if not (math.isfinite(value) and value > 0):
    raise ValueError(f"{name} must be finite and positive, got {value}")
  of = {"decode": value, "encode": 1 / value, "amax_448": value / 448, "amax_2688": value / 2688}
  if not GLOBAL_SCALE_MIN <= of[convention] <= GLOBAL_SCALE_MAX:
    raise ValueError(
      f"{name} must mean a multiplier within [2^-64, 2^64], got {value} in {convention!r}, "
      f"which is {of[convention]}"
    )
  return of[convention]


def foreign_global_scale(multiplier: float, convention: str) -> float:
  """The number of another convention that means this decode multiplier: decode_global_scale's
  inverse, to float64's rounding."""
  one = decode_global_scale(1.0, convention)
  multiplier = decode_global_scale(multiplier, "decode")
  return one / multiplier if convention == "encode" else multiplier / one


def to_flashinfer(
  cache: PagedKVCache, *, layout: str = "NHD", v_scales: str = "linear"
) -> ForeignPages:
  """The cache's pages as FlashInfer's (K, V) tuple and kv_cache_sf have them.

  Args:
    layout: NHD or HND. HND is the cache's own order: no byte moves.
    v_scales: the order of V's scales: `trtllm` for trtllm-gen, else `linear`.

  Raises:
    ValueError: an argument breaks a rule, or the KV heads' global scales differ.
    NotImplementedError: K or V is not in nvfp4, or stored rotated or without a mean, or the newest
      tokens are in rings.
  """
  _check_is("cache", cache, PagedKVCache)
  _check_layout(layout)
  check_cache(cache)
  if cache.recent is not None:
    raise NotImplementedError(
      f"this layout has pages only, the newest {cache.recent.tokens} tokens are in rings"
    )
  pools = {name: _pool_out(getattr(cache, name), name) for name in ("k", "v")}
  pools["v"]["scale"] = _order_scales(pools["v"]["scale"], v_scales)
  arrays = {
    name: {what: _from_hnd(array, layout) for what, array in pool.items()}
    for name, pool in pools.items()
  }
  return ForeignPages(
    k=arrays["k"]["codes"],
    v=arrays["v"]["codes"],
    k_scale=arrays["k"]["scale"],
    v_scale=arrays["v"]["scale"],
    k_global_scale=_one_scale(cache.k, "k"),
    v_global_scale=_one_scale(cache.v, "v"),
  )


def from_flashinfer(
  pages: ForeignPages, *, layout: str = "NHD", v_scales: str = "linear"
) -> PagedKVCache:
  """The cache that FlashInfer's pages are; to_flashinfer's inverse.

  Raises:
    ValueError: an argument breaks a rule, or no cache has such pages (their size, the head dims,
      a block scale with a sign; inside jit values are not known, and not checked).
  """
  _check_is("pages", pages, ForeignPages)
  _check_layout(layout)
  arrays = {}
  for name in ARRAYS:
    array = _array(pages, name)
    if array.ndim != 4:
      raise ValueError(f"{name} must be [pages, page, head, row] in some order, got {array.shape}")
    # What is the host's is copied: an engine may write on.
    arrays[name] = _to_hnd(array if isinstance(array, jax.Array) else jnp.array(array), layout)
  v_scale = _order_scales(arrays["v_scale"], v_scales, back=True)
  cache = PagedKVCache(
    k=_pool_in("k", arrays["k"], arrays["k_scale"], pages.k_global_scale),
    v=_pool_in("v", arrays["v"], v_scale, pages.v_global_scale),
  )
  check_cache(cache)
  return cache


def to_sglang(cache: PagedKVCache) -> ForeignPages:
  """Flat token slots [pages * page_size, head, ...], slot = page * page_size + offset."""
  pages = to_flashinfer(cache, layout="NHD")
  flat = lambda a: a.reshape(-1, *a.shape[2:])
  arrays = {name: flat(getattr(pages, name)) for name in ARRAYS}
  return dataclasses.replace(pages, **arrays)


def from_sglang(slots: ForeignPages, *, page_size: int) -> PagedKVCache:
  """to_sglang's inverse. `page_size` divides the number of slots."""
  _check_is("slots", slots, ForeignPages)
  check_page_size(page_size)
  for name in ARRAYS:
    shape = _array(slots, name).shape
    if len(shape) != 3:
      raise ValueError(f"{name} must be [slots, head, row], got {shape}")
    if shape[0] % page_size:
      raise ValueError(
        f"page_size must divide the number of slots, got {page_size} and {shape[0]} of {name}"
      )
  paged = lambda a: a.reshape(-1, page_size, *a.shape[1:])
  arrays = {name: paged(getattr(slots, name)) for name in ARRAYS}
  return from_flashinfer(dataclasses.replace(slots, **arrays), layout="NHD")


def to_vllm(cache: PagedKVCache, *, layout: str = "HND", v_scales: str = "linear") -> PackedPages:
  """One buffer, uint8 [pages, bytes of a page]: [K codes | K scales | V codes | V scales].

  `buffer.reshape(num_pages, 2 * num_kv_heads, page_size, -1)` is it in vLLM's shape.

  Args:
    layout: the order within each of the four regions of a page.
    v_scales: `vllm` for what it writes on GPUs before Blackwell, `linear` since.

  Raises:
    NotImplementedError: head_dim and v_head_dim differ, which a buffer of one width cannot hold;
      and as to_flashinfer.
  """
  _check_is("cache", cache, PagedKVCache)
  if cache.k.head_dim != cache.v.head_dim:
    raise NotImplementedError(
      f"this layout has one head dim, the cache has {cache.k.head_dim} and {cache.v.head_dim}"
    )
  pages = to_flashinfer(cache, layout=layout, v_scales=v_scales)
  regions = (pages.k, pages.k_scale, pages.v, pages.v_scale)
  buffer = jnp.concatenate([_bytes(a).reshape(cache.num_pages, -1) for a in regions], axis=1)
  return PackedPages(buffer, pages.k_global_scale, pages.v_global_scale)


def from_vllm(
  pages: PackedPages,
  *,
  page_size: int,
  num_kv_heads: int,
  head_dim: int,
  layout: str = "HND",
  v_scales: str = "linear",
) -> PagedKVCache:
  """to_vllm's inverse, of a buffer in any of its shapes.

  Raises:
    ValueError: as from_flashinfer; or the buffer is not of such pages.
  """
  sizes = {"page_size": page_size, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
  return from_flashinfer(
    vllm_views(pages, layout=layout, **sizes), layout=layout, v_scales=v_scales
  )


def vllm_views(
  pages: PackedPages,
  *,
  page_size: int,
  num_kv_heads: int,
  head_dim: int,
  layout: str = "HND",
) -> ForeignPages:
  """K's codes and scales and V's, where they lie in a buffer of vLLM.

  With "HND" `views.k[page, head]` is uint8 [page_size, head_dim / 2], one head's codes of one page,
  and `views.k_scale[page, head]` float8_e4m3fn [page_size, head_dim / 16]; with "NHD" they are at
  [page, :, head]. V's scales are in the order that the writer left them in.

  Of a numpy buffer these are views: nothing is copied, and what is written to them is in it. Of a
  jax array they are slices.

  Args:
    pages: the buffer in any of its shapes; a 4-D one is "HND".
    page_size, num_kv_heads, head_dim: of the engine's cache; K and V have one head dim.
    layout: the order within each of the four regions of a page.

  Raises:
    ValueError: an argument breaks a rule, or the buffer is not of such pages.
  """
  _check_is("pages", pages, PackedPages)
  _check_layout(layout)
  check_page_size(page_size)
  check_whole("num_kv_heads", num_kv_heads)
  if num_kv_heads < 1:
    raise ValueError(f"num_kv_heads must be at least 1, got {num_kv_heads}")
  check_head_dim("head_dim", head_dim)
  tokens = {"HND": (num_kv_heads, page_size), "NHD": (page_size, num_kv_heads)}[layout]
  widths = (head_dim // CODES_OF_BYTE, head_dim // BLOCK) * 2
  ends = np.cumsum([math.prod(tokens) * width for width in widths])
  row = widths[0] + widths[1]
  shapes = [[int(ends[-1])], [2, *tokens, row]]
  if layout == "HND":
    shapes.insert(1, [2 * num_kv_heads, page_size, row])
  buffer = _array(pages, "buffer")
  if list(buffer.shape[1:]) not in shapes or buffer.dtype != jnp.uint8:
    rule = " or ".join(f"[{', '.join(map(str, ['pages', *shape]))}]" for shape in shapes)
    raise ValueError(
      f"buffer must be uint8 {rule} for {num_kv_heads} heads of {head_dim}, pages of {page_size} "
      f"and {layout}, got {buffer.dtype} {list(buffer.shape)}"
    )
  flat = buffer.reshape(len(buffer), ends[-1])
  if isinstance(buffer, np.ndarray) and buffer.size and not np.shares_memory(buffer, flat):
    raise ValueError(
      f"buffer must lie in memory row by row, page by page, got strides {buffer.strides} for "
      f"{list(buffer.shape)}"
    )
  k, k_scale, v, v_scale = (
    flat[:, end - math.prod(tokens) * width : end].reshape(len(buffer), *tokens, width)
    for end, width in zip(ends, widths, strict=True)
  )
  return ForeignPages(
    k=k,
    v=v,
    k_scale=k_scale.view(jnp.float8_e4m3fn),
    v_scale=v_scale.view(jnp.float8_e4m3fn),
    k_global_scale=pages.k_global_scale,
    v_global_scale=pages.v_global_scale,
  )


def _check_is(name: str, value: Any, expected: type) -> None:
  if not isinstance(value, expected):
    raise ValueError(f"{name} must be {expected.__name__}, got {type(value).__name__}")


def _array(pages: ForeignPages | PackedPages, name: str) -> jax.Array:
  array = getattr(pages, name)
  if not (hasattr(array, "dtype") and hasattr(array, "shape")):
    raise ValueError(f"{name} must be an array, got {type(array).__name__}")
  return array


def _pool_out(pool: PagePool, name: str) -> dict[str, jax.Array]:
  if pool.format != "nvfp4":
    raise NotImplementedError(f"this layout holds nvfp4, {name} is {pool.format}")
  if pool.rotation is not None or pool.mean is not None:
    raise NotImplementedError(
      f"this layout knows no rotation and no mean, {name} has rotation {pool.rotation!r} and "
      f"{'no' if pool.mean is None else 'a'} mean"
    )
  assert pool.block_scale is not None
  return {"codes": pool.data, "scale": pool.block_scale}


def _pool_in(name: str, codes: jax.Array, scale: jax.Array, global_scale: float) -> PagePool:
  for what, array, dtype in (("", codes, jnp.uint8), ("_scale", scale, jnp.float8_e4m3fn)):
    if array.dtype != dtype:
      raise ValueError(f"{name}{what} must be {jnp.dtype(dtype).name}, got {array.dtype}")
  if (*codes.shape[:-1], codes.shape[-1] * CODES_OF_BYTE) != (
    *scale.shape[:-1],
    scale.shape[-1] * BLOCK,
  ):
    raise ValueError(
      f"{name} and {name}_scale must have a byte for 2 and for 16 columns of the same rows, got "
      f"{list(codes.shape)} and {list(scale.shape)}"
    )
  _check_no_sign(f"{name}_scale", scale)
  multiplier = _multiplier(f"{name}_global_scale", global_scale)
  return PagePool(codes, scale, jnp.full((codes.shape[1],), multiplier, jnp.float32), "nvfp4")


def _check_no_sign(name: str, scale: jax.Array) -> None:
  """Kernels read a block scale as a magnitude: with a sign they need not agree."""
  if isinstance(scale, Tracer):
    return
  signed = _bytes(jnp.asarray(scale)) >= 0x80
  if signed.any():
    place = np.argwhere(np.asarray(signed))[0].tolist()
    value = float(np.asarray(scale)[tuple(place)])
    raise ValueError(
      f"{name} must not have a sign, got {value} at {place} of [page, head, token, block]"
    )


def _one_scale(pool: PagePool, name: str) -> float:
  """The layer's, which its KV heads must share."""
  if isinstance(pool.global_scale, Tracer):
    raise ValueError(f"{name}'s global_scale must be known here: call this outside jit")
  scales: Any = np.asarray(pool.global_scale)
  if (scales != scales[0]).any():
    raise ValueError(
      f"this layout has one global scale a layer, {name}'s KV heads have {scales.tolist()}"
    )
  return float(scales[0])


def _check_layout(layout: str) -> None:
  if layout not in LAYOUTS:
    raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")


def _from_hnd(array: jax.Array, layout: str) -> jax.Array:
  return array if layout == "HND" else jnp.swapaxes(array, 1, 2)


_to_hnd = _from_hnd  # its own inverse


def _order_scales(scale: jax.Array, order: str, back: bool = False) -> jax.Array:
  """[pages, head, page, S] from linear to an order, or back."""
  if order not in V_SCALES:
    raise ValueError(f"v_scales must be one of {V_SCALES}, got {order!r}")
  if order == "linear":
    return scale
  *leading, tokens, blocks = scale.shape
  if tokens % 4 or blocks % 4:
    raise ValueError(
      f"v_scales {order!r} needs pages of a multiple of 4 tokens and head_dim of 64, got "
      f"{tokens} and {blocks * BLOCK}"
    )
  # Both orders are the same bytes: four tokens' scales, block by block.
  grouped = (tokens // 4, blocks, 4) if back else (tokens // 4, 4, blocks)
  return jnp.swapaxes(scale.reshape(*leading, *grouped), -1, -2).reshape(scale.shape)


def _bytes(array: jax.Array) -> jax.Array:
  return array if array.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(array, jnp.uint8)
