"""pack and unpack: arrays to and from NVFP4."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from nvfp4_pallas import format as nvfp4
from nvfp4_pallas.dispatch import Entry, Resolved, current_target, resolve
from nvfp4_pallas.format import NvFp4Array
from nvfp4_pallas.ops.checks import FLOAT_DTYPES, as_jax, check_is_array


@dataclasses.dataclass(frozen=True)
class PackRequest:
  """What an implementation must know to say whether it can run."""

  shape: tuple[int, ...]
  dtype: str
  levels: int
  scale_search: str
  sanitize: bool


@dataclasses.dataclass(frozen=True)
class UnpackRequest:
  shape: tuple[int, ...]
  dtype: str
  levels: int


def pack(
  x: jax.Array,
  global_scale: jax.Array | float = 1.0,
  *,
  levels: int = 1,
  scale_search: str = "amax",
  sanitize: bool = False,
  implementation: str | None = None,
) -> NvFp4Array:
  """Rounds x to NVFP4: x ~= e2m1(codes) * block_scale * global_scale (+ residual).

  Equivalent to `format.encode`, whose docstring has the equations and the policy for zero,
  saturating and non-finite values; every implementation gives the same bytes.

  Args:
    x: bfloat16, float16 or float32 [..., n], n a multiple of 16.
    global_scale: the decode multiplier, positive; broadcastable to the leading shape of x.
    levels: 2 packs the residual as well.
    scale_search: `amax` or `four_over_six`.
    sanitize: non-finite values become 0 or the largest value instead of marking their block NaN.
    implementation: who runs it; None lets `dispatch.resolve` choose.

  Returns:
    NvFp4Array with codes uint8 [..., n / 2] and block_scale float8_e4m3fn [..., n / 16].

  Raises:
    ValueError: an argument breaks a rule (message: argument, rule, value).
    NotImplementedError: the named implementation cannot run (message: why).

  Source: NVFP4 recipe arXiv:2509.25149; Four Over Six arXiv:2512.02010.
  """
  check_is_array("x", x)
  nvfp4.check_encode_arguments(x, global_scale, levels, scale_search)
  (x,) = as_jax(x)
  request = PackRequest(x.shape, str(x.dtype), levels, scale_search, sanitize)
  return resolve_pack(request, implementation).function(x, global_scale, request)


def unpack(
  array: NvFp4Array,
  dtype: jax.typing.DTypeLike = jnp.bfloat16,
  *,
  implementation: str | None = None,
) -> jax.Array:
  """e2m1(codes) * block_scale * global_scale (+ residual) as [..., n] of `dtype`.

  Equivalent to `format.decode`. A block whose scale is E4M3 NaN reads back as NaN.

  Args:
    array: as `pack` returns it.
    dtype: bfloat16, float16 or float32.
    implementation: who runs it; None lets `dispatch.resolve` choose.

  Raises:
    ValueError: shapes or dtypes of `array` contradict each other, or `dtype` is not a float.
    NotImplementedError: the named implementation cannot run (message: why).
  """
  _check_packed(array)
  if dtype not in nvfp4.INPUT_DTYPES and dtype not in FLOAT_DTYPES:
    raise ValueError(f"dtype must be one of {nvfp4.INPUT_DTYPES}, got {dtype}")
  (array,) = as_jax(array)
  request = UnpackRequest(array.shape, str(jnp.dtype(dtype)), array.levels)
  return resolve_unpack(request, implementation).function(array, request)


def resolve_pack(request: PackRequest, implementation: str | None = None) -> Resolved:
  return resolve(_PACK, request, implementation)


def resolve_unpack(request: UnpackRequest, implementation: str | None = None) -> Resolved:
  return resolve(_UNPACK, request, implementation)


def _check_packed(array: NvFp4Array) -> None:
  codes, scale = array.codes, array.block_scale
  if codes.dtype != jnp.uint8:
    raise ValueError(f"codes must be uint8, got {codes.dtype}")
  if scale.dtype != jnp.float8_e4m3fn:
    raise ValueError(f"block_scale must be float8_e4m3fn, got {scale.dtype}")
  expected = (*codes.shape[:-1], array.shape[-1] // nvfp4.SCALE_BLOCK)
  if array.shape[-1] % nvfp4.SCALE_BLOCK or scale.shape != expected:
    raise ValueError(
      f"block_scale must have shape {expected} for {codes.shape=}, got {scale.shape}"
    )
  nvfp4.check_global_scale(array.global_scale, array.shape[:-1])
  if array.residual is not None:
    _check_packed(array.residual)


def _pack_xla(x, global_scale, request):
  return nvfp4.encode(
    x,
    global_scale,
    levels=request.levels,
    scale_search=request.scale_search,
    sanitize=request.sanitize,
  )


def _unpack_xla(array, request):
  return nvfp4.decode(array, jnp.dtype(request.dtype))


def _pack_mosaic_sm90(x, global_scale, request):
  from nvfp4_pallas.kernels import pack_mosaic_sm90 as kernel

  codes, block_scale = kernel.pack(x, global_scale, interpret=current_target().interpret)
  return NvFp4Array(codes, block_scale, jnp.asarray(global_scale, jnp.float32))


def _pack_mosaic_sm90_unsupported(request: PackRequest) -> str | None:
  from nvfp4_pallas.kernels import pack_mosaic_sm90 as kernel

  return kernel.unsupported_pack(request.levels, request.scale_search, request.sanitize)


def _unpack_mosaic_sm90(array, request):
  from nvfp4_pallas.kernels import pack_mosaic_sm90 as kernel

  return kernel.unpack(
    array.codes,
    array.block_scale,
    array.global_scale,
    jnp.dtype(request.dtype),
    interpret=current_target().interpret,
  )


def _unpack_mosaic_sm90_unsupported(request: UnpackRequest) -> str | None:
  from nvfp4_pallas.kernels import pack_mosaic_sm90 as kernel

  return kernel.unsupported_unpack(request.levels)


_PACK = {
  "mosaic_sm90": Entry(_pack_mosaic_sm90, _pack_mosaic_sm90_unsupported),
  "xla": Entry(_pack_xla),
}
_UNPACK = {
  "mosaic_sm90": Entry(_unpack_mosaic_sm90, _unpack_mosaic_sm90_unsupported),
  "xla": Entry(_unpack_xla),
}
