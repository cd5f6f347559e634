"""The NVFP4 number format: codes, rounding, scales. What every implementation is judged by.

    x  ~=  e2m1(code) * block_scale * global_scale

One code is four bits: bit 3 the sign, bits 2..0 an index into {0, .5, 1, 1.5, 2, 3, 4, 6}. Two
codes share a byte, the even element in the low nibble. Sixteen consecutive elements of the last
axis share one `block_scale` (E4M3, never negative). `global_scale` (float32) is ALWAYS the decode
multiplier of the equation above; its inverse is never stored.

Encoding one block of sixteen values, every operation in float32 rounded once (fl):

    block_scale = e4m3(fl(amax / fl(6 * global_scale)))      nearest, ties to even, at most 448
    code        = e2m1(fl(|x| / fl(block_scale * global_scale)))  nearest, ties to even, at most 6

The codes are rounded against the *decoded* scale, so that what was lost in rounding the scale is
regained. A value that rounds to zero keeps its sign; a block whose scale rounds to zero is all
zeros. Decoding rounds once: e2m1(code) * block_scale is exact in bfloat16, float16 and float32.

Non-finite input is not hidden: the block's scale becomes E4M3 NaN (0x7F) and its codes 0, so that
exactly this block reads back as NaN.

Sources: the format and the two-level scale follow the NVFP4 recipe (arXiv:2509.25149); the choice
between 6 and 4 as the largest code of a block is Four Over Six (arXiv:2512.02010); nibble order as
in FlashInfer, vLLM and TensorRT-LLM.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_NAN = 0x7F
SCALE_BLOCK = 16  # values that share one block scale
E2M1_PER_BYTE = 2
# Between these bounds no intermediate of the equations above leaves float32's normal range.
GLOBAL_SCALE_MIN = 2.0**-64
GLOBAL_SCALE_MAX = 2.0**64

SCALE_SEARCHES = ("amax", "four_over_six")
INPUT_DTYPES = ("bfloat16", "float16", "float32")
_EVEN = lax.RoundingMethod.TO_NEAREST_EVEN


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["codes", "block_scale", "global_scale", "residual"],
  meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class NvFp4Array:
  """Values `e2m1(codes) * block_scale * global_scale (+ residual)`, packed along the last axis.

  Attributes:
    codes: uint8 [..., n / 2], two codes a byte, the even element in the low nibble.
    block_scale: float8_e4m3fn [..., n / 16].
    global_scale: float32, broadcastable to the leading shape [...]; the decode multiplier.
    residual: with `levels=2`, what the first level missed, packed with the same global scale.
  """

  codes: jax.Array
  block_scale: jax.Array
  global_scale: jax.Array
  residual: NvFp4Array | None = None

  @property
  def shape(self) -> tuple[int, ...]:
    return (*self.codes.shape[:-1], self.codes.shape[-1] * E2M1_PER_BYTE)

  @property
  def levels(self) -> int:
    return 1 if self.residual is None else 2


def divide(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
  """float32 division, correctly rounded on every device.

  Plain `/` is not: XLA turns a division by a constant or by something broadcast into a
  multiplication by the rounded reciprocal (the barrier forbids that), and on a GPU it emits
  `div.full`, which may be two units off (`refine_quotient` mends that).
  """
  denominator = lax.optimization_barrier(jnp.broadcast_to(denominator, numerator.shape))
  return refine_quotient(numerator, numerator / denominator, denominator)


def refine_quotient(numerator: jax.Array, quotient: jax.Array, d: jax.Array) -> jax.Array:
  """fl(numerator / d) from a quotient that may be some units off.

  It is corrected by its exact remainder to within one unit; of it and its two neighbours the one
  with the least remainder is the answer. That holds where the remainder, down to 2^-46 of the
  numerator, is in float32's normal range; a quotient that is not finite is returned as it is.
  """
  correction = _remainder(numerator, quotient, d) / d
  near = jnp.where(jnp.isfinite(correction), quotient + correction, quotient)
  best, least = near, jnp.abs(_remainder(numerator, near, d))
  for step in (-1, 1):
    bits = lax.bitcast_convert_type(near, jnp.int32) + jnp.int32(step)
    neighbour = lax.bitcast_convert_type(bits, jnp.float32)
    remainder = jnp.abs(_remainder(numerator, neighbour, d))
    best = jnp.where(remainder < least, neighbour, best)
  return jnp.copysign(best, quotient)  # the sums above lose the sign of -0


def _remainder(n: jax.Array, q: jax.Array, d: jax.Array) -> jax.Array:
  """n - q * d without rounding, for q within some units of n / d.

  The halves have 12 bits, so their products are exact, fused or not; after each subtraction what
  is left spans fewer than 24 bits (Dekker, 1971).
  """
  (q_high, q_low), (d_high, d_low) = _halves(q), _halves(d)
  return ((n - q_high * d_high) - q_high * d_low - q_low * d_high) - q_low * d_low


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The upper 12 bits of a float32's significand, and the rest."""
  bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFFF000)
  high = lax.bitcast_convert_type(bits, jnp.float32)
  return high, x - high


def round_to_e2m1_index(y: jax.Array) -> jax.Array:
  """Index 0..7 of the E2M1 value nearest to y >= 0; ties to the even index; at most 7.

  E2M1 is three straight lines: steps of .5 up to 2, of 1 up to 4, of 2 up to 6. On each the index
  is an even offset plus the rounded quotient of y by the step, and the line in force is the one
  that gives the least. Only exact quotients are rounded, and once, so ties come out right:

      y              0  .25  .5  .75 1.25 1.75   2  2.5   3  3.5   4   5   6   7
      round(2 y)     0    0   1    2    2    4   4    5   6    7   8  10  12  14
      2 + round(y)   2    2   2    3    3    4   4    4   5    6   6   7   8   9
      4 + round(y/2) 4    4   4    4    5    5   5    5   6    6   6   6   7   8
      index          0    0   1    2    2    4   4    4   5    6   6   6   7   7
  """
  halves, ones, twos = (lax.round(y * f, _EVEN) for f in (2.0, 1.0, 0.5))
  index = jnp.minimum(jnp.minimum(halves, ones + 2.0), jnp.minimum(twos + 4.0, 7.0))
  return index.astype(jnp.uint8)


def e2m1_index_to_f32(index: jax.Array) -> jax.Array:
  """The inverse map: of the three lines i / 2, i - 2, 2 i - 8 the largest is in force."""
  i = index.astype(jnp.float32)
  return jnp.maximum(jnp.maximum(i * 0.5, i - 2.0), i * 2.0 - 8.0)


def decode_e2m1(codes: jax.Array) -> jax.Array:
  """float32 values of uint8 codes 0..15 (code 8 is -0)."""
  magnitude = e2m1_index_to_f32(codes & jnp.uint8(7))
  return jnp.where((codes & jnp.uint8(8)) != 0, -magnitude, magnitude)


def round_to_e4m3(q: jax.Array) -> jax.Array:
  """float8_e4m3fn nearest to the float32 q >= 0; ties to even; at most 448, never NaN."""
  return jnp.minimum(q, E4M3_MAX).astype(jnp.float8_e4m3fn)


def through(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
  """x rounded to `dtype`, as float32.

  The barrier is needed: XLA on a GPU drops a pair of conversions, down and up again, and with it
  the rounding ("excess precision").
  """
  return lax.optimization_barrier(x.astype(dtype)).astype(jnp.float32)


def pack_nibbles(codes: jax.Array) -> jax.Array:
  """uint8 codes [..., n] -> bytes [..., n / 2], the even element in the low nibble."""
  return codes[..., 0::2] | (codes[..., 1::2] << jnp.uint8(4))


def unpack_nibbles(packed: jax.Array) -> jax.Array:
  """bytes [..., n / 2] -> uint8 codes [..., n]."""
  pair = jnp.stack([packed & jnp.uint8(15), packed >> jnp.uint8(4)], axis=-1)
  return pair.reshape(*packed.shape[:-1], packed.shape[-1] * E2M1_PER_BYTE)


def encode(
  x: jax.Array,
  global_scale: jax.Array | float = 1.0,
  *,
  levels: int = 1,
  scale_search: str = "amax",
  sanitize: bool = False,
) -> NvFp4Array:
  """Rounds x to NVFP4 as this module's equations say.

  Args:
    x: bfloat16, float16 or float32 [..., n], n a multiple of 16.
    global_scale: decode multiplier, broadcastable to the leading shape of x; positive.
    levels: 2 also packs the residual x - decode(first level), with the same global scale.
    scale_search: `amax` gives the largest value of a block the code 6; `four_over_six` tries 6
      and 4 and keeps what has the smaller squared error (6 on a tie).
    sanitize: replaces NaN by 0 and infinities by the largest value the format can hold, instead
      of marking their block as NaN.

  Returns:
    The packed array; `block_scale` is 0x7F (NaN) where a block held a non-finite value.

  Raises:
    ValueError: an argument breaks a rule above (message: argument, rule, value).
  """
  check_encode_arguments(x, global_scale, levels, scale_search)
  g = jnp.asarray(global_scale, jnp.float32)
  g_block = jnp.broadcast_to(g, x.shape[:-1])[..., None]  # against the block axis
  wide = through(x, x.dtype)  # as it came: a rounding just before must not be undone
  if sanitize:
    largest = jnp.broadcast_to(E2M1_MAX * E4M3_MAX * g_block, wide.shape)
    wide = jnp.where(jnp.isnan(wide), jnp.zeros_like(wide), wide)
    wide = jnp.where(jnp.isinf(wide), jnp.copysign(largest, wide), wide)

  blocks = wide.reshape(*x.shape[:-1], x.shape[-1] // SCALE_BLOCK, SCALE_BLOCK)
  codes, scale = _encode_blocks(blocks, g_block, E2M1_MAX)
  if scale_search == "four_over_six":
    codes4, scale4 = _encode_blocks(blocks, g_block, 4.0)
    better = _squared_error(blocks, codes4, scale4, g_block) < _squared_error(
      blocks, codes, scale, g_block
    )
    codes = jnp.where(better[..., None], codes4, codes)
    scale = jnp.where(better, scale4, scale)

  finite = jnp.all(jnp.isfinite(blocks), axis=-1)
  codes = jnp.where(finite[..., None], codes, jnp.uint8(0))
  scale = jnp.where(finite, scale, _e4m3_nan())
  first = NvFp4Array(pack_nibbles(codes.reshape(x.shape)), scale, g)
  if levels == 1:
    return first
  # The barrier keeps the compiler from fusing the rounding of decode() into the subtraction.
  missed = wide - lax.optimization_barrier(decode(first, jnp.float32))
  return dataclasses.replace(first, residual=encode(missed, g, scale_search=scale_search))


def _encode_blocks(blocks, global_scale, largest_code):
  """f32 [..., b, 16] -> (codes uint8 [..., b, 16], scale e4m3 [..., b])."""
  magnitude = jnp.abs(blocks)
  amax = jnp.max(magnitude, axis=-1)
  # The barrier for the same reason as in `through`.
  scale = lax.optimization_barrier(round_to_e4m3(divide(amax, largest_code * global_scale)))
  step = scale.astype(jnp.float32) * global_scale
  live = step > 0
  y = divide(magnitude, jnp.where(live, step, 1.0)[..., None])
  sign = jnp.signbit(blocks).astype(jnp.uint8) << jnp.uint8(3)
  codes = jnp.where(live[..., None], round_to_e2m1_index(y) | sign, jnp.uint8(0))
  return codes, scale


def _squared_error(blocks, codes, scale, global_scale):
  """Sum over a block of ((x - decoded) / global_scale)^2, in an order that no compiler changes.

  Each product is rounded before it is added (the barriers forbid a fused multiply-add) and the
  sixteen squares are added as a tree, so that all implementations take the same decision.
  """
  exact = decode_e2m1(codes) * scale.astype(jnp.float32)[..., None]
  decoded = lax.optimization_barrier(exact * global_scale[..., None])
  miss = divide(blocks - decoded, global_scale[..., None])
  square = lax.optimization_barrier(miss * miss)
  while square.shape[-1] > 1:
    half = square.shape[-1] // 2
    square = square[..., :half] + square[..., half:]
  return square[..., 0]


def _e4m3_nan():
  return lax.bitcast_convert_type(jnp.uint8(E4M3_NAN), jnp.float8_e4m3fn)


def decode(array: NvFp4Array, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> jax.Array:
  """`e2m1(codes) * block_scale * global_scale (+ residual)` as [..., n] of `dtype`.

  The product of the first two is exact; one rounding to float32 by the global scale, one for the
  residual, one to `dtype`. Results below float32's normal range may be flushed to zero.
  """
  value = decode_unscaled(array.codes, array.block_scale)
  value = value * jnp.broadcast_to(array.global_scale, array.shape[:-1])[..., None]
  if array.residual is not None:
    residual = decode(array.residual, jnp.float32)
    # The barriers forbid a fused multiply-add, which would round less often than is defined.
    value = lax.optimization_barrier(value) + lax.optimization_barrier(residual)
  return value.astype(dtype)


def decode_unscaled(codes: jax.Array, block_scale: jax.Array) -> jax.Array:
  """e2m1(codes) * block_scale, exact, float32 [..., n] from bytes [..., n / 2]."""
  value = decode_e2m1(unpack_nibbles(codes))
  blocks = value.reshape(*block_scale.shape, SCALE_BLOCK)
  return (blocks * block_scale.astype(jnp.float32)[..., None]).reshape(value.shape)


def check_encode_arguments(x, global_scale, levels, scale_search) -> None:
  """Raises ValueError for what `encode` cannot take; values are checked where they are known."""
  if str(x.dtype) not in INPUT_DTYPES:
    raise ValueError(f"x must have one of the dtypes {', '.join(INPUT_DTYPES)}, got {x.dtype}")
  if x.ndim < 1 or x.shape[-1] % SCALE_BLOCK or x.shape[-1] == 0:
    raise ValueError(f"x's last axis must be a positive multiple of {SCALE_BLOCK}, got {x.shape=}")
  if levels not in (1, 2):
    raise ValueError(f"levels must be 1 or 2, got {levels}")
  if scale_search not in SCALE_SEARCHES:
    raise ValueError(f"scale_search must be one of {SCALE_SEARCHES}, got {scale_search!r}")
  check_global_scale(global_scale, x.shape[:-1])


def check_global_scale(global_scale, leading_shape, name="global_scale") -> None:
  """Positive, finite, in range, and broadcastable to `leading_shape`."""
  if isinstance(global_scale, str) or global_scale is None:
    raise ValueError(f"{name} must be a number or an array, got {global_scale!r}")
  shape = np.shape(global_scale)
  try:
    fits = np.broadcast_shapes(shape, leading_shape) == tuple(leading_shape)
  except ValueError:
    fits = False
  if not fits:
    raise ValueError(f"{name} must broadcast to {tuple(leading_shape)}, got shape {shape}")
  if isinstance(global_scale, Tracer):
    return
  values = np.asarray(global_scale, np.float32)
  bad = ~((values >= GLOBAL_SCALE_MIN) & (values <= GLOBAL_SCALE_MAX))
  if bad.any():
    place = np.argwhere(bad)[0].tolist()
    at = f" at {', '.join(map(str, place))}" if place else ""
    raise ValueError(f"{name} must be positive and within [2^-64, 2^64], got {values[bad][0]}{at}")
