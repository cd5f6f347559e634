"""Packs arrays to NVFP4 and back, on Hopper. Plain Pallas Mosaic GPU, no inline assembly.

    pack:    block_scale = e4m3(amax / (6 * global_scale))
             codes       = e2m1(|x| / (block_scale * global_scale)), with the sign of x
    unpack:  x           = e2m1(codes) * block_scale * global_scale

bit for bit as format.py rounds (common.py says how).

Threads: a program is one warpgroup and takes a tile of 128 blocks of sixteen values, one block a
thread: its largest magnitude and its two-codes-a-byte pairing never leave the thread. Global
memory is read and written directly, without shared memory.

Bytes moved per value: 2 + .5625 for 16-bit values, and 4 bytes a row where rows have their own
global scales.

Interpreted on a CPU and compiled ahead of time for sm_90a in the tests; run on an H200 as the rows
of benchmarks/results say, which name the hash of these sources.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from nvfp4_pallas import format as nvfp4
from nvfp4_pallas.kernels import common
from nvfp4_pallas.kernels.common import u32

GRID_NAMES = ("column", "row")


def unsupported_pack(levels: int, scale_search: str, sanitize: bool) -> str | None:
  """Why `pack` cannot do what format.encode would, or None."""
  if levels != 1:
    return "the kernel packs one level"
  if scale_search != "amax":
    return f"the kernel does not search scales by {scale_search}"
  return "the kernel does not sanitize" if sanitize else None


def unsupported_unpack(levels: int) -> str | None:
  """Why `unpack` cannot do what format.decode would, or None."""
  return None if levels == 1 else "the kernel unpacks one level"


def pack(
  x: jax.Array, global_scale: jax.Array | float, *, interpret=None
) -> tuple[jax.Array, jax.Array]:
  """format.encode with one level, the amax scale and no sanitising.

  Args:
    x: bfloat16, float16 or float32 [..., n], n a multiple of 16.
    global_scale: float32, broadcastable to the leading shape of x. A scalar costs nothing.
    interpret: Mosaic GPU interpret parameters, to run on a CPU.

  Returns:
    codes, uint8 [..., n / 2], and block_scale, float8_e4m3fn [..., n / 16].
  """
  *leading, n = x.shape
  rows, blocks = math.prod(leading), n // nvfp4.SCALE_BLOCK
  codes_shape, scale_shape = (*leading, n // nvfp4.E2M1_PER_BYTE), (*leading, blocks)
  if rows == 0:
    return jnp.zeros(codes_shape, jnp.uint8), jnp.zeros(scale_shape, jnp.float8_e4m3fn)
  tiles = _RowTiles(rows, blocks)

  def kernel(x_gmem, global_scale_gmem, codes_gmem, scale_gmem):
    @tiles.visit
    def _(tile):
      even, odd = common.load_pairs(tile, x_gmem, x.dtype)
      codes, scale = common.encode(even, odd, _load_global_scale(tile, global_scale_gmem))
      tile.store(codes_gmem, codes.astype(jnp.uint8))
      tile.store(scale_gmem, common.as_e4m3(scale))

  codes, scale = plgpu.kernel(
    kernel,
    out_type=(
      jax.ShapeDtypeStruct((rows, blocks, common.PAIRS), jnp.uint8),
      jax.ShapeDtypeStruct((rows, blocks), jnp.float8_e4m3fn),
    ),
    grid=tiles.grid,
    grid_names=GRID_NAMES,
    compiler_params=common.COMPILER_PARAMS,
    kernel_name="nvfp4_pack",
    interpret=interpret,
  )(common.view_pairs(x.reshape(rows, n)), _row_scales(global_scale, leading))
  return codes.reshape(codes_shape), scale.reshape(scale_shape)


def unpack(
  codes: jax.Array,
  block_scale: jax.Array,
  global_scale: jax.Array | float,
  dtype: jax.typing.DTypeLike,
  *,
  interpret=None,
) -> jax.Array:
  """format.decode of one level.

  Args:
    codes: uint8 [..., n / 2].
    block_scale: float8_e4m3fn [..., n / 16].
    global_scale: float32, broadcastable to the leading shape. A scalar costs nothing.
    dtype: bfloat16, float16 or float32.
    interpret: Mosaic GPU interpret parameters, to run on a CPU.

  Returns:
    [..., n] of `dtype`.
  """
  *leading, blocks = block_scale.shape
  rows = math.prod(leading)
  shape = (*leading, blocks * nvfp4.SCALE_BLOCK)
  if rows == 0:
    return jnp.zeros(shape, dtype)
  tiles = _RowTiles(rows, blocks)
  x = jax.ShapeDtypeStruct((rows, blocks * nvfp4.SCALE_BLOCK), dtype)

  def kernel(codes_gmem, scale_gmem, global_scale_gmem, x_gmem):
    @tiles.visit
    def _(tile):
      # 32-bit results do not lie side by side: see _store_pairs.
      vector = 1 if dtype == jnp.float32 else None
      codes = tile.load(codes_gmem, vector).astype(jnp.uint32)
      scale = tile.load(scale_gmem).astype(jnp.float32)
      even, odd = _decode(codes, scale, _load_global_scale(tile, global_scale_gmem))
      _store_pairs(tile, x_gmem, even, odd, dtype)

  pairs = plgpu.kernel(
    kernel,
    out_type=jax.eval_shape(common.view_pairs, x),
    grid=tiles.grid,
    grid_names=GRID_NAMES,
    compiler_params=common.COMPILER_PARAMS,
    kernel_name="nvfp4_unpack",
    interpret=interpret,
  )(
    codes.reshape(rows, blocks, common.PAIRS),
    block_scale.reshape(rows, blocks),
    _row_scales(global_scale, leading),
  )
  return lax.bitcast_convert_type(pairs, dtype).reshape(shape)


class _RowTiles:
  """The programs of a [rows, blocks] array: tiles of 128 blocks, and one program for the rest.

  The last rows that do not fill a tile are taken in smaller even tiles, one after the other, so
  that nothing outside the array is touched.
  """

  def __init__(self, rows: int, blocks: int):
    self.blocks = common.power_of_two_divisor(blocks, common.WARPGROUP)
    self.rows = common.WARPGROUP // self.blocks
    self.full, self.rest = divmod(rows, self.rows)
    self.grid = (blocks // self.blocks, self.full + (self.rest > 0))

  def visit(self, body: Callable[[common.Tile], None]) -> None:
    """Calls `body` for the tiles of this program."""
    column, row = (lax.axis_index(name) for name in GRID_NAMES)
    first_block = column * self.blocks

    @pl.when(row < self.full)
    def _():
      body(common.Tile(row * self.rows, self.rows, first_block, self.blocks))

    if self.rest:
      rows = common.power_of_two_divisor(self.rest, self.rows)

      @pl.when(row == self.full)
      def _():
        @pl.loop(0, self.rest // rows)
        def _(i):
          first_row = self.full * self.rows + i * rows
          body(common.Tile(first_row, rows, first_block, self.blocks))


def _row_scales(global_scale: jax.Array | float, leading: list[int]) -> jax.Array:
  """float32 [1] or [rows]."""
  global_scale = jnp.asarray(global_scale, jnp.float32)
  if global_scale.size == 1:
    return global_scale.reshape(1)
  return jnp.broadcast_to(global_scale, leading).reshape(math.prod(leading))


def _load_global_scale(tile: common.Tile, global_scale_gmem) -> jax.Array:
  """float32 [rows, blocks] of a tile."""
  if global_scale_gmem.shape[0] == 1:
    return jnp.full((tile.rows, tile.blocks), global_scale_gmem[0])
  return tile.load_rows(global_scale_gmem)


def _decode(codes: jax.Array, scale: jax.Array, global_scale: jax.Array):
  """format.decode of blocks, before the rounding to the result's type.

  Args:
    codes: uint32 [..., 8], one byte each.
    scale: float32 [...].
    global_scale: float32 [...].

  Returns:
    The even and the odd elements, float32 [..., 8].
  """
  scale, global_scale = (common.broadcast(x, codes.shape) for x in (scale, global_scale))
  low, high = codes & u32(15), codes >> u32(4)
  # The first product is exact, the second rounds: the order is part of the definition.
  return tuple(_e2m1_to_f32(code) * scale * global_scale for code in (low, high))


def _e2m1_to_f32(code: jax.Array) -> jax.Array:
  """float32 of codes 0 .. 15 in uint32.

  From index 2 on, E2M1 is float32 with other widths: two exponent bits (bias 1) and one fraction
  bit, so a shift and a new bias are enough. Below it are 0 and .5.
  """
  index = code & u32(7)
  half = u32((common.F32_BIAS - 1) << common.F32_FRACTION)
  normal = (index << u32(common.F32_FRACTION - 1)) + half
  magnitude = jnp.where(index < u32(2), index * half, normal)
  return lax.bitcast_convert_type(magnitude | ((code & u32(8)) << u32(28)), jnp.float32)


def _store_pairs(tile: common.Tile, ref, even: jax.Array, odd: jax.Array, dtype) -> None:
  """Rounds float32 [rows, blocks, 8] to `dtype` and stores them in a tile of common.view_pairs."""
  if dtype == jnp.float32:
    for half, value in enumerate((even, odd)):
      tile.store(ref.at[..., half], common.f32_bits(value))
    return
  low, high = (
    lax.bitcast_convert_type(value.astype(dtype), jnp.uint16).astype(jnp.uint32)
    for value in (even, odd)
  )
  tile.store(ref, low | (high << u32(16)))
