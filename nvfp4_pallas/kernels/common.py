"""What several kernels share: the thread layout of scale blocks, and format.py's rounding.

The rounding here is the rule of format.py in integers. A kernel cannot divide as the rule asks:
the GPU compiler turns a float32 division into `div.full`, which may be two units off. Nor is it
needed. To find the code of fl(x / d) one only has to know which midpoints between two codes it
has reached, and that is a comparison of integers: see `reach`. No rounding, no subnormal and no
fused multiply-add can then change a bit, on any device.

Everywhere, `magnitude` is the bit pattern of a float32 without its sign, in uint32: as integers
these patterns are ordered as the values are.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from nvfp4_pallas import format as nvfp4

WARPGROUP = 128  # threads of one Pallas program
WARP = 32
PAIRS = nvfp4.SCALE_BLOCK // nvfp4.E2M1_PER_BYTE  # elements of a block that share a byte

F32_BIAS = 127
F32_FRACTION = 23  # fraction bits
F32_SIGN = 1 << 31
F32_INF = 0xFF << F32_FRACTION
E4M3_FRACTION = 3
E4M3_MIN_EXPONENT = -6
E4M3_MAX_BYTE = 0x7E  # 448

# No program reads what it writes, so stores need no barriers; and no reduction leaves its thread.
COMPILER_PARAMS = plgpu.CompilerParams(unsafe_no_auto_barriers=True, reduction_scratch_bytes=0)

# The midpoints between neighbouring E2M1 values, in quarters: .25, .75, 1.25, 1.75, 2.5, 3.5, 5.
E2M1_MIDPOINTS = (1, 3, 5, 7, 10, 14, 20)


@dataclasses.dataclass(frozen=True)
class Tile:
  """A tile of `rows` by `blocks` scale blocks of an array [..., rows, blocks, ...] in memory.

  One thread holds all of a (row, block), and neighbouring threads hold neighbouring blocks.
  `rows * blocks` is a power of two up to 128; with fewer than 128, several threads hold the same
  block, compute the same and store the same bytes.

  Attributes:
    row, block: where it starts (traced or not).
    rows, blocks: how large it is.
  """

  row: jax.Array | int
  rows: int
  block: jax.Array | int
  blocks: int

  def of(self, ref):
    """The tile of a ref [rows, blocks, ...]."""
    return ref.at[pl.ds(self.row, self.rows), pl.ds(self.block, self.blocks)]

  def store(self, ref, values: jax.Array) -> None:
    """Writes the tile of a ref [rows, blocks, ...] from registers."""
    store(self.of(ref), values)

  def load(self, ref, vector: int | None = None) -> jax.Array:
    """The tile of a ref [rows, blocks] or [rows, blocks, width], in registers.

    `vector`: how many of the last axis are in one instruction, by default all; 1 where they do
    not lie side by side in memory.
    """
    if len(ref.shape) == 2:
      layout = self._layout(1, 1).reduce(2)
    else:
      layout = self._layout(ref.shape[2], vector or ref.shape[2])
    return plgpu.load(self.of(ref), layout=layout, optimized=False)

  def load_rows(self, ref) -> jax.Array:
    """The rows of a ref [rows], repeated for each block: [rows, blocks]."""
    layout = self._layout(1, 1).reduce(2)
    rows = ref.at[pl.ds(self.row, self.rows)]
    values = plgpu.load(rows, layout=layout.reduce(1), optimized=False)
    return plgpu.layout_cast(broadcast(values, (self.rows, self.blocks)), layout)

  def _layout(self, width: int, vector: int):
    """The registers of [rows, blocks, width]: see Pallas' Layout.TILED."""
    lane_blocks = min(self.blocks, WARP)
    lane_rows = min(self.rows, WARP // lane_blocks)
    warps = (self.rows // lane_rows) * (self.blocks // lane_blocks)
    tiles = ((self.rows, self.blocks, width), (lane_rows, lane_blocks, width), (vector,))
    layout = mgpu.TiledLayout(
      plgpu.Tiling(tiles),
      # After the tiling the axes are [..., rows and blocks of warps, 1, of lanes, width, vector].
      warp_dims=(plgpu.Replicated(WARPGROUP // WARP // warps), -7, -6),
      lane_dims=(plgpu.Replicated(WARP // (lane_rows * lane_blocks)), -4, -3),
      vector_dim=-1,
      _check_canonical=False,
    ).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def store(ref, values: jax.Array) -> None:
  """Registers to memory, in pieces as small as the layout has them.

  From JAX 0.12 on a store must say that it may be less than whole sectors; before, none had to
  and there was no way to.
  """
  write = getattr(plgpu, "store", None)
  if write is None:
    ref[...] = values
  else:
    write(ref, values, optimized=False)


def power_of_two_divisor(n: int, limit: int) -> int:
  """The largest power of two that divides n, at most `limit` (a power of two)."""
  return min(n & -n, limit)


def u32(value: int) -> jax.Array:
  return jnp.uint32(value)


def broadcast(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Repeats x along new trailing axes."""
  return lax.broadcast_in_dim(x, shape, tuple(range(x.ndim)))


def f32_bits(x: jax.Array) -> jax.Array:
  return lax.bitcast_convert_type(x, jnp.uint32)


def exponent(magnitude: jax.Array) -> jax.Array:
  """int32, of a normal number: floor(log2)."""
  return (magnitude >> u32(F32_FRACTION)).astype(jnp.int32) - jnp.int32(F32_BIAS)


def mantissa(magnitude: jax.Array) -> jax.Array:
  """The 24 bits of a normal number's significand, the leading one included."""
  return (magnitude & u32((1 << F32_FRACTION) - 1)) | u32(1 << F32_FRACTION)


def floor_log2(x: jax.Array) -> jax.Array:
  """uint32, of x > 0."""
  return u32(31) - lax.clz(x)


def reach(midpoint: jax.Array, divisor: jax.Array, tie_goes_up: jax.Array) -> jax.Array:
  """The least integer x for which fl(x / divisor) rounds to the value above `midpoint`.

  fl rounds to 24 bits, to nearest: what lies within half a unit of the midpoint becomes the
  midpoint (its own last bit is even, so a tie does too) and then goes up or down with
  `tie_goes_up`. Half a unit is 2^(floor(log2(midpoint)) - 24), so the quotient goes up from

      x >= midpoint * divisor - half_unit * divisor     when a tie goes up,
      x >  midpoint * divisor + half_unit * divisor     when it goes down.

  A midpoint that is a power of two has a smaller unit below it; for both formats that is only
  the first midpoint, 1, whose ties go down to the even 0.

  Args:
    midpoint: integer 1 .. 31, uint32.
    divisor: 24-bit mantissa of a float32, uint32.
    tie_goes_up: bool.
  """
  half_units = divisor >> (u32(24) - floor_log2(midpoint))
  exact = midpoint * divisor  # below 2^29
  return jnp.where(tie_goes_up, exact - half_units, exact + half_units + u32(1))


def quotient_exponent(magnitude: jax.Array, divisor: jax.Array) -> jax.Array:
  """int32 floor(log2(x / divisor)) of normal numbers."""
  less = (mantissa(magnitude) < mantissa(divisor)).astype(jnp.int32)
  return exponent(magnitude) - exponent(divisor) - less


def quotient_to_e4m3(magnitude: jax.Array, divisor: jax.Array) -> jax.Array:
  """E4M3 byte of min(fl(x / divisor), 448), nearest, ties to even.

  Args:
    magnitude: x >= 0, finite, uint32 pattern.
    divisor: positive, normal, uint32 pattern; |x| / divisor < 2^-10 where x is subnormal.

  Returns:
    uint32 0 .. 0x7E, in the shape of the arguments.
  """
  x, d = mantissa(magnitude), mantissa(divisor)
  # The exponent of the E4M3 numbers around the quotient.
  e = jnp.maximum(quotient_exponent(magnitude, divisor), jnp.int32(E4M3_MIN_EXPONENT))
  # In units of half an E4M3 step the quotient is x * 2^shift / d, below 32; where the shift would
  # be negative it is below 1/2 and the byte is zero.
  shift = exponent(magnitude) - exponent(divisor) - e + jnp.int32(E4M3_FRACTION + 1)
  x = x << jnp.maximum(shift, jnp.int32(0)).astype(jnp.uint32)
  below = lax.div(x, d) >> u32(1)
  midpoint = below * u32(2) + u32(1)
  up = x >= reach(midpoint, d, (below & u32(1)) == u32(1))
  # Subnormals share the first normal exponent; `below` then lacks the leading bit.
  byte = ((e - jnp.int32(E4M3_MIN_EXPONENT)) << jnp.int32(E4M3_FRACTION)).astype(jnp.uint32)
  byte = jnp.minimum(byte + below + up.astype(jnp.uint32), u32(E4M3_MAX_BYTE))
  return jnp.where(shift < jnp.int32(0), u32(0), byte)


def as_e4m3(byte: jax.Array) -> jax.Array:
  """float8_e4m3fn of bytes in uint32."""
  return lax.bitcast_convert_type(byte.astype(jnp.uint8), jnp.float8_e4m3fn)


def view_pairs(x: jax.Array) -> jax.Array:
  """x [..., n] as uint32, by block and pair of elements; costs nothing, the bytes stay.

  16-bit values become [..., n / 16, 8], the even one in the low half of a word, and 32-bit values
  [..., n / 16, 8, 2].
  """
  shape = (*x.shape[:-1], x.shape[-1] // nvfp4.SCALE_BLOCK, PAIRS, 2)
  return lax.bitcast_convert_type(x.reshape(shape), jnp.uint32)


def load_pairs(tile: Tile, ref, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
  """The even and odd elements of a tile of view_pairs, as float32 patterns [rows, blocks, 8]."""
  if dtype == jnp.float32:
    even, odd = (tile.load(ref.at[..., half], vector=1) for half in (0, 1))
    return even, odd
  words = tile.load(ref)
  if dtype == jnp.bfloat16:
    return words << u32(16), words & u32(0xFFFF0000)
  halves = (words & u32(0xFFFF), words >> u32(16))
  values = (lax.bitcast_convert_type(half.astype(jnp.uint16), dtype) for half in halves)
  even, odd = (f32_bits(value.astype(jnp.float32)) for value in values)
  return even, odd


def encode(even: jax.Array, odd: jax.Array, global_scale: jax.Array) -> tuple[jax.Array, jax.Array]:
  """format.encode of blocks of sixteen values, bit for bit.

  Args:
    even, odd: uint32 [..., 8], the float32 patterns of a block's even and odd elements.
    global_scale: float32 [...].

  Returns:
    (codes, block scale): bytes in uint32, [..., 8] and [...].
  """
  even_magnitude, odd_magnitude = (x & u32(F32_SIGN - 1) for x in (even, odd))
  amax = jnp.max(jnp.maximum(even_magnitude, odd_magnitude), axis=-1)
  finite = amax < u32(F32_INF)
  scale = quotient_to_e4m3(amax, f32_bits(global_scale * jnp.float32(nvfp4.E2M1_MAX)))
  live = finite & (scale != u32(0))
  thresholds = e2m1_thresholds(f32_bits(as_e4m3(scale).astype(jnp.float32) * global_scale))

  def code(x, magnitude):
    # Codes are ordered as their values are: a code is the number of midpoints that x has passed.
    passed = [
      (magnitude >= broadcast(least, magnitude.shape)).astype(jnp.uint32) for least in thresholds
    ]
    return sum(passed[1:], passed[0]) | ((x & u32(F32_SIGN)) >> u32(28))

  codes = code(even, even_magnitude) | (code(odd, odd_magnitude) << u32(4))
  codes = jnp.where(broadcast(live, codes.shape), codes, u32(0))
  return codes, jnp.where(finite, scale, u32(nvfp4.E4M3_NAN))


def e2m1_thresholds(step: jax.Array) -> list[jax.Array]:
  """For each code from 1 on, the least float32 magnitude x whose fl(x / step) rounds to it.

  Args:
    step: positive and normal, uint32 pattern.
  """
  d, thresholds = mantissa(step), []
  for code, quarters in enumerate(E2M1_MIDPOINTS, start=1):
    # A tie between two codes goes to the even one.
    tie_goes_up = jnp.full(d.shape, code % 2 == 0)
    # x is an integer in units of a quarter of the step's last bit.
    x = reach(jnp.full(d.shape, quarters, jnp.uint32), d, tie_goes_up)
    # Back to a float32 pattern, rounding upwards. A carry out of the mantissa ends up in the
    # exponent, where it belongs.
    surplus = floor_log2(x) - u32(F32_FRACTION)
    significand = (x + (u32(1) << surplus) - u32(1)) >> surplus
    unit = (step >> u32(F32_FRACTION)) - u32(2) + surplus
    thresholds.append((unit << u32(F32_FRACTION)) + significand - u32(1 << F32_FRACTION))
  return thresholds
