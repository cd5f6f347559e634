"""The block-scaled FP4 product of tcgen05, and what an interpreter, which has none, does instead.

    acc (+)= (a codes * a scales) (b codes * b scales)^T      a, b [128, k], a scale for 16 of k

Both forms take the same references, so that which level, slot and scales a kernel multiplies is
executed by its tests; only the two calls below are not.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from nvfp4_pallas import format as nvfp4

ROWS, LANES, WORD = 128, 32, 4


class Tcgen05:
  """The hardware's. Both are asynchronous and in order; a commit makes a barrier wait for them."""

  @staticmethod
  def copy_scales(smem, tmem) -> None:
    """Scales from smem e4m3 [1, k / 64, 32, 16] to tmem e4m3 [128, k / 16]."""
    plgpu.async_copy_scales_to_tmem(smem, tmem)

  @staticmethod
  def multiply(acc, a, b, a_scale, b_scale, *, accumulate: bool) -> None:
    """Refs: acc float32 [128, 128], a and b E2M1 [128, k], scales as `copy_scales` left them."""
    plgpu.tcgen05_mma(
      acc, a, b.transpose((1, 0)), a_scale=a_scale, b_scale=b_scale, accumulate=accumulate
    )


class Modelled:
  """The same for the interpreter: exact products of decoded values, summed in float32."""

  @staticmethod
  def copy_scales(smem, tmem) -> None:
    arranged = smem[...][0]  # [words, 32, 16]
    words = arranged.shape[0]
    by_row = arranged.reshape(words, LANES, ROWS // LANES, WORD).transpose((2, 1, 0, 3))
    plgpu.async_store_tmem(tmem, by_row.reshape(ROWS, words * WORD))
    plgpu.commit_tmem()

  @staticmethod
  def multiply(acc, a, b, a_scale, b_scale, *, accumulate: bool) -> None:
    product = jnp.dot(_decoded(a, a_scale), _decoded(b, b_scale).T, precision="highest")
    plgpu.async_store_tmem(acc, _loaded(acc) + product if accumulate else product)
    plgpu.commit_tmem()


def _decoded(codes, scale):
  """float32 [128, k]."""
  scales = _loaded(scale).astype(jnp.float32)
  return codes[...].astype(jnp.float32) * jnp.repeat(scales, nvfp4.SCALE_BLOCK, axis=1)


def _loaded(tmem):
  value = plgpu.async_load_tmem(tmem)
  plgpu.wait_load_tmem()
  return value
