"""How keys and values become tensor core operands, whatever their format: inside attention kernels.

A loader knows one page pool: what of a page to fetch, and how a tile of KEYS fetched keys becomes
bf16 operands in shared memory. WGMMA wants 16 columns and more of an operand at once, and a code
byte of NVFP4 holds an even and an odd column. So every row is cut into two halves, which are two
operands: for NVFP4 the even and the odd columns, for the wide formats the lower and the upper. Q
is brought into that order, and O out of it, outside of the kernel (`split`, `join`):

    S = Q K^T = Q_0 K_0^T + Q_1 K_1^T          O = P V:  O_0 = P V_0,  O_1 = P V_1

Thread t of the warpgroup widens key t, so that a scale is a register and needs no other thread.
bf16 holds every product of a code and a block scale exactly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from nvfp4_pallas import format as nvfp4
from nvfp4_pallas.cache import PagePool, pool_arrays

KEYS = 128  # of a tile, one for each thread of a warpgroup
STAGES = 2  # tiles fetched or in use
E2M1_AS_F16 = 2.0**-14  # see _e2m1_as_f16

# Register layouts of [KEYS, n], in vectors of the given length, and of [KEYS].
BY_KEY = plgpu.Layout.TCGEN05_TMEM_NATIVE
KEY = BY_KEY(8).reduce(1)


class Place(NamedTuple):
  """Consecutive keys of one page, where they go in a tile, and the barrier they arrive at."""

  page: Any
  head: Any
  offset: Any  # in the page
  slot: Any
  first: int  # in the tile
  count: int
  barrier: Any


@dataclasses.dataclass(frozen=True)
class Loader:
  """The loader of bf16 and fp8 pools.

  Attributes:
    head_dim: of the pool.
    parts: the columns are cut into so many parts, of which a block of threads needs one.
    dtype: of the page array.
  """

  head_dim: int
  parts: int
  dtype: Any

  copies = 1  # that bring one run of keys

  @property
  def width(self) -> int:
    return self.head_dim // self.parts

  @property
  def half(self) -> int:
    return self.width // 2

  @property
  def columns(self) -> int:
    """Columns of a swizzled tile of the operands. Both sides of a product must be tiled alike."""
    return 32 if self.half % 32 == 0 else 16

  def split(self, x: jax.Array) -> jax.Array:
    """[..., head_dim] -> [..., 2 * parts, half], the columns in the order of the operands."""
    return x.reshape(*x.shape[:-1], 2 * self.parts, self.half)

  def join(self, x: jax.Array) -> jax.Array:
    """The inverse of `split`."""
    return x.reshape(*x.shape[:-2], self.head_dim)

  def pages(self, pool: PagePool) -> tuple[jax.Array, ...]:
    """The page arrays as the kernel fetches them."""
    return pool_arrays(pool)

  def raw(self) -> tuple[Any, ...]:
    """Shared memory for keys as they lie in the pages, and what `widen` needs besides."""
    return (swizzled((STAGES, KEYS, self.width), self.dtype, self.columns),)

  def fetch(self, gmem, part, raw, place: Place) -> None:
    """Starts the copies of some keys."""
    row = raw[0].shape[-1]
    plgpu.copy_gmem_to_smem(
      gmem[0].at[place.page, place.head, pl.ds(place.offset, place.count), pl.ds(part * row, row)],
      raw[0].at[place.slot, pl.ds(place.first, place.count)],
      place.barrier,
    )

  def widen(self, raw, slot, part, live, wide) -> None:
    """Stores a tile as bf16 operands; of keys that are not `live`, bool [KEYS], zeros."""
    for half, first, values in self._chunks(raw, slot, part, live):
      wide[half, :, pl.ds(first, self.columns)] = values
    plgpu.commit_smem()

  def _chunks(self, raw, slot, part, live) -> Iterator[tuple[int, int, jax.Array]]:
    """(half, first column, bf16 [KEYS, columns]) of every piece of both operands."""
    del part  # only its columns were fetched
    for half in range(2):
      for first in range(0, self.half, self.columns):
        columns = pl.ds(half * self.half + first, self.columns)
        values = plgpu.load(raw[0].at[slot, :, columns], layout=BY_KEY(8), optimized=False)
        values = values.astype(jnp.float32)
        if live is not None:
          values = jnp.where(along(live, values), values, 0.0)
        yield half, first, values.astype(jnp.bfloat16)


class NvFp4Loader(Loader):
  """The loader of nvfp4 pools."""

  copies = 2

  @property
  def groups(self) -> int:
    """Block scales of a key."""
    return self.head_dim // nvfp4.SCALE_BLOCK

  def split(self, x: jax.Array) -> jax.Array:
    x = jnp.swapaxes(x.reshape(*x.shape[:-1], self.parts, self.half, 2), -1, -2)
    return x.reshape(*x.shape[:-3], 2 * self.parts, self.half)

  def join(self, x: jax.Array) -> jax.Array:
    x = jnp.swapaxes(x.reshape(*x.shape[:-2], self.parts, 2, self.half), -1, -2)
    return x.reshape(*x.shape[:-3], self.head_dim)

  def pages(self, pool: PagePool) -> tuple[jax.Array, ...]:
    codes, scales = pool_arrays(pool)
    scales = lax.bitcast_convert_type(scales, jnp.uint8)
    # No copy fetches rows of 4 or 8 bytes, but those of many keys, flat, are one run of bytes.
    return codes, scales.reshape(*scales.shape[:2], pool.page_size * self.groups)

  def raw(self) -> tuple[Any, ...]:
    return (
      swizzled((STAGES, KEYS, self.half), jnp.uint8, self.columns),
      plgpu.SMEM((STAGES, KEYS * self.groups), jnp.uint8),
      plgpu.SMEM((KEYS, self.groups), jnp.uint8),
    )

  def fetch(self, gmem, part, raw, place: Place) -> None:
    super().fetch(gmem, part, raw, place)
    plgpu.copy_gmem_to_smem(
      gmem[1].at[
        place.page, place.head, pl.ds(place.offset * self.groups, place.count * self.groups)
      ],
      raw[1].at[place.slot, pl.ds(place.first * self.groups, place.count * self.groups)],
      place.barrier,
      # Asked to guard against the array's end, a copy could not take more than 256 elements.
      oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
    )

  def _chunks(self, raw, slot, part, live):
    codes_smem, flat_scales_smem, scales_smem = raw
    # Through shared memory, as the interpreter knows no view of a reference in another shape.
    scales_smem[...] = flat_scales_smem[slot].reshape(KEYS, self.groups)
    groups = self.groups // self.parts
    layout = BY_KEY(groups & -groups)
    scales = scales_smem.at[:, pl.ds(part * groups, groups)]
    scales = plgpu.load(scales, layout=layout, optimized=False).astype(jnp.int32)
    column = plgpu.broadcasted_iota(jnp.int32, scales.shape, 1, layout=layout)
    block = nvfp4.SCALE_BLOCK // 2  # columns of one half that share a scale
    for first in range(0, self.half, self.columns):
      codes = codes_smem.at[slot, :, pl.ds(first, self.columns)]
      codes = plgpu.load(codes, layout=BY_KEY(8), optimized=False)
      halves = ([], [])
      for start in range(0, self.columns, block):
        # One column of the scales; the compiler sees that all other terms are zero.
        byte = jnp.sum(jnp.where(column == (first + start) // block, scales, 0), axis=1)
        scale = lax.bitcast_convert_type(byte.astype(jnp.uint8), jnp.float8_e4m3fn)
        scale = scale.astype(jnp.float32) * (1.0 / E2M1_AS_F16)
        if live is not None:
          scale = jnp.where(live, scale, 0.0)  # enough, as no code is NaN
        pair = codes[:, start : start + block].astype(jnp.uint16)
        for values, code in zip(halves, (pair, pair >> jnp.uint16(4)), strict=True):
          values.append((_e2m1_as_f16(code) * along(scale, pair)).astype(jnp.bfloat16))
      for half, values in enumerate(halves):
        yield half, first, lax.concatenate(values, 1)


def loaders(formats: tuple[str, str], head_dim: int, v_head_dim: int) -> tuple[Loader, Loader]:
  """Those of K and V. A wide V is cut into parts, as O has to fit into registers."""

  def loader(format, dim, parts):
    if format == "nvfp4":
      return NvFp4Loader(dim, parts, jnp.uint8)
    return Loader(dim, parts, {"bf16": jnp.bfloat16, "fp8": jnp.float8_e4m3fn}[format])

  v_parts = 2 if v_head_dim > 128 and v_head_dim % 64 == 0 else 1
  return loader(formats[0], head_dim, 1), loader(formats[1], v_head_dim, v_parts)


def swizzled(shape: tuple[int, ...], dtype: Any, columns: int) -> Any:
  """Shared memory in tiles of 8 rows and `columns` columns, which one swizzle spans."""
  tiling, span = plgpu.TilingTransform((8, columns)), columns * jnp.dtype(dtype).itemsize
  # The narrowest swizzle, over 16 bytes, is none.
  transforms = (tiling,) if span == 16 else (tiling, plgpu.SwizzleTransform(span))
  return plgpu.SMEM(shape, dtype, transforms=transforms)


def along(x: jax.Array, like: jax.Array) -> jax.Array:
  """x [n] as [n, m], the shape of `like`."""
  return lax.broadcast_in_dim(x, like.shape, [0])


def _e2m1_as_f16(code: jax.Array) -> jax.Array:
  """The E2M1 codes in the low four bits of uint16, times E2M1_AS_F16, as float32.

  The three low bits of a code, put where float16 has the last two of its exponent and the first
  of its fraction, are its value up to the difference of the exponent biases, 14; subnormals are
  subnormals. (bfloat16 would do as well on a GPU, but XLA's CPU flushes its subnormals.)

      code            0    1    2    3    4    5    6    7
      exponent field  0    0    1    1    2    2    3    3
      fraction        0    .5   0    .5   0    .5   0    .5
      times 2^14      0    .5   1    1.5  2    3    4    6
  """
  magnitude = (code & jnp.uint16(7)) << jnp.uint16(9)
  sign = (code & jnp.uint16(8)) << jnp.uint16(12)
  return lax.bitcast_convert_type(sign | magnitude, jnp.float16).astype(jnp.float32)
