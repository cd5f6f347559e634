"""Packs arrays to NVFP4 and back, on Hopper: as fast as memory gives and takes bfloat16.

    pack:    block_scale = e4m3(amax / (6 * global_scale))
             codes       = e2m1(|x| / (block_scale * global_scale)), with the sign of x
    unpack:  x           = e2m1(codes) * block_scale * global_scale

bit for bit as format.py rounds, for any global scale.

bfloat16 is packed and unpacked by PTX programs (pack_ptx.py). Other dtypes, and where the kernel is
interpreted, which inline assembly cannot be, are plain Pallas: a program is one warpgroup and takes
a tile of 128 blocks of sixteen values, one block a thread, with the rounding of common.py. Neither
uses shared memory.

Bytes moved per value: 2 + .5625 for 16-bit values, and 4 bytes for each global scale.

Interpreted on a CPU and compiled ahead of time for sm_90a in the tests, the PTX emulated there; run
on an H200 as the rows of benchmarks/results say, which name the hash of these sources.
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
from nvfp4_pallas.kernels import common, pack_ptx, ptx_launch
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
    global_scale: float32, broadcastable to the leading shape of x. For bfloat16, what only the
      first axes repeat, such as a number or one per head, costs nothing.
    interpret: Mosaic GPU interpret parameters, to run on a CPU.

  Returns:
    codes, uint8 [..., n / 2], and block_scale, float8_e4m3fn [..., n / 16].
  """
  *leading, n = x.shape
  codes = jax.ShapeDtypeStruct((*leading, n // nvfp4.E2M1_PER_BYTE), jnp.uint8)
  scale = jax.ShapeDtypeStruct((*leading, n // nvfp4.SCALE_BLOCK), jnp.float8_e4m3fn)
  if 0 in leading:
    return jnp.zeros(codes.shape, codes.dtype), jnp.zeros(scale.shape, scale.dtype)
  scales = cycle(global_scale, leading)
  if x.dtype == jnp.bfloat16 and interpret is None:
    program, programs = pack_ptx.pack_program(blocks_of(scale, scales))
    packed = _launch(program, programs, "nvfp4_pack", (codes, scale))(x, scales)
  else:
    packed = _pack_in_pallas(x.reshape(-1, n), scales, interpret)
  return packed[0].reshape(codes.shape), packed[1].reshape(scale.shape)


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
    global_scale: float32, broadcastable to the leading shape; see `pack`.
    dtype: bfloat16, float16 or float32.
    interpret: Mosaic GPU interpret parameters, to run on a CPU.

  Returns:
    [..., n] of `dtype`.
  """
  *leading, blocks = block_scale.shape
  out = jax.ShapeDtypeStruct((*leading, blocks * nvfp4.SCALE_BLOCK), dtype)
  if 0 in leading:
    return jnp.zeros(out.shape, dtype)
  scales = cycle(global_scale, leading)
  if dtype == jnp.bfloat16 and interpret is None:
    return _unpack_in_ptx(codes, block_scale, scales, out)
  return _unpack_in_pallas(codes, block_scale, scales, out, interpret)


def _unpack_in_ptx(codes, block_scale, scales, out, **hints) -> jax.Array:
  program, programs = pack_ptx.unpack_program(blocks_of(block_scale, scales), **hints)
  (x,) = _launch(program, programs, "nvfp4_unpack", (out,))(codes, block_scale, scales)
  return x


def _launch(program, programs, name, out_type):
  return ptx_launch.launch(program, name=name, programs=programs, smem_bytes=0, out_type=out_type)


def blocks_of(block_scale, scales: jax.Array) -> pack_ptx.Blocks:
  """Of an array with such block scales; `scales` are those of `cycle`."""
  *leading, of_row = block_scale.shape
  return pack_ptx.Blocks(math.prod(leading), of_row, scales.size)


def cycle(global_scale: jax.Array | float, leading: list[int]) -> jax.Array:
  """float32 [n]: the rows of the leading shape take one after the other, again and again."""
  scales = jnp.asarray(global_scale, jnp.float32)
  repeated = next((i for i, size in enumerate(scales.shape) if size > 1), scales.ndim)
  scales = scales.reshape(scales.shape[repeated:])
  return jnp.broadcast_to(scales, leading[len(leading) - scales.ndim :]).reshape(-1)


def _pack_in_pallas(x: jax.Array, scales: jax.Array, interpret):
  """Codes [rows, blocks, 8] and block scales [rows, blocks] of x [rows, n]."""
  rows, blocks = x.shape[0], x.shape[1] // nvfp4.SCALE_BLOCK
  tiles = _RowTiles(rows, blocks)

  def kernel(x_gmem, scales_gmem, codes_gmem, scale_gmem):
    @tiles.visit
    def _(tile):
      even, odd = common.load_pairs(tile, x_gmem, x.dtype)
      codes, scale = common.encode(even, odd, _load_global_scale(tile, scales_gmem))
      tile.store(codes_gmem, codes.astype(jnp.uint8))
      tile.store(scale_gmem, common.as_e4m3(scale))

  return plgpu.kernel(
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
  )(common.view_pairs(x), _row_scales(scales, rows))


def _unpack_in_pallas(codes, block_scale, scales, out, interpret) -> jax.Array:
  blocks = block_scale.shape[-1]
  rows = block_scale.size // blocks
  tiles = _RowTiles(rows, blocks)
  x = jax.ShapeDtypeStruct((rows, blocks * nvfp4.SCALE_BLOCK), out.dtype)

  def kernel(codes_gmem, scale_gmem, scales_gmem, x_gmem):
    @tiles.visit
    def _(tile):
      # 32-bit results do not lie side by side: see _store_pairs.
      vector = 1 if out.dtype == jnp.float32 else None
      codes = tile.load(codes_gmem, vector).astype(jnp.uint32)
      scale = tile.load(scale_gmem).astype(jnp.float32)
      even, odd = _decode(codes, scale, _load_global_scale(tile, scales_gmem))
      _store_pairs(tile, x_gmem, even, odd, out.dtype)

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
    _row_scales(scales, rows),
  )
  return lax.bitcast_convert_type(pairs, out.dtype).reshape(out.shape)


class _RowTiles:
  """The programs of a [rows, blocks] array: tiles of 128 blocks.

  Rows that do not fill a tile go to more programs, a smaller even tile each, so that nothing
  outside the array is touched.
  """

  def __init__(self, rows: int, blocks: int):
    self.blocks = common.power_of_two_divisor(blocks, common.WARPGROUP)
    self.rows = common.WARPGROUP // self.blocks
    self.full, rest = divmod(rows, self.rows)
    self.small_rows = common.power_of_two_divisor(rest, self.rows)  # 0: there is no rest
    small = rest // self.small_rows if rest else 0
    self.grid = (blocks // self.blocks, self.full + small)

  def visit(self, body: Callable[[common.Tile], None]) -> None:
    """Calls `body` with the tile of this program."""
    column, row = (lax.axis_index(name) for name in GRID_NAMES)
    first_block = column * self.blocks

    @pl.when(row < self.full)
    def _():
      body(common.Tile(row * self.rows, self.rows, first_block, self.blocks))

    if self.small_rows:

      @pl.when(row >= self.full)
      def _():
        first_row = self.full * self.rows + (row - self.full) * self.small_rows
        body(common.Tile(first_row, self.small_rows, first_block, self.blocks))


def _row_scales(scales: jax.Array, rows: int) -> jax.Array:
  """float32 [1] or [rows]."""
  return scales if scales.size == 1 else jnp.tile(scales, rows // scales.size)


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
