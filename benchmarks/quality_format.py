"""Level `format`: how much of a value survives being packed and unpacked, without any attention.

Values are packed and unpacked by the package and compared with what they were, in dB. NVFP4 packs
with the global scale amax / 2688, where the largest block scale is the largest E4M3 number; FP8
with amax / 448 and with 1. Errors relative to the value do not depend on a distribution's scale, so
`tiny` and `huge` must give what `gauss` gives.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import nvfp4_pallas as nv
from benchmarks import quality_data
from benchmarks.metrics import snr_db
from benchmarks.progress import Progress
from benchmarks.quality_configs import CalibratedOn, QualityConfig
from benchmarks.quality_rows import QualityRow
from nvfp4_pallas import cache as nv_cache
from nvfp4_pallas.format import E2M1_MAX, E4M3_MAX
from nvfp4_pallas.ops import pack as pack_op
from nvfp4_pallas.rotation import rotate

ROWS = 16384

_FP8 = QualityConfig(name="fp8", k_format="fp8", read_path="fp8", global_scale="calibrated")
_NVFP4 = QualityConfig(name="nvfp4", q_levels=1, global_scale="calibrated")
_HAD = dataclasses.replace(_NVFP4, name="nvfp4 had", k_rotation="hadamard")
# A config names a quantiser here: of its fields those of K say how, q_levels how many levels.
QUANTISERS = (
  dataclasses.replace(_FP8, name="fp8, scale 1", global_scale="1"),
  _FP8,
  _NVFP4,
  dataclasses.replace(_NVFP4, name="nvfp4 4/6", scale_search="four_over_six"),
  _HAD,
  dataclasses.replace(_HAD, name="nvfp4 had 4/6", scale_search="four_over_six"),
  dataclasses.replace(_NVFP4, name="nvfp4 x2", q_levels=2),
  dataclasses.replace(_HAD, name="nvfp4 had x2", q_levels=2),
)


def measure(
  quantisers: tuple[QualityConfig, ...] = QUANTISERS,
  *,
  rows: int = ROWS,
  distributions: tuple[str, ...] = quality_data.DISTRIBUTIONS,
  implementation: str | None = None,
  progress: Progress | None = None,
) -> list[QualityRow]:
  measured = []
  for distribution in distributions:
    x = quality_data.values(distribution, rows)
    for config in quantisers:
      if progress is not None:
        progress.step(f"{distribution}, {config.name}")
      back, who, bits = pack_and_unpack(config, x, implementation)
      measured.append(
        QualityRow(
          level="format",
          config=config,
          operation="pack",
          data=distribution,
          context=rows,
          head_dim=x.shape[-1],
          metric="sqnr_db",
          value=snr_db(x, back),
          bits_per_value=bits,
          calibrated_on=_calibrated_on(config, rows),
          implementation=who,
        )
      )
  return measured


def _calibrated_on(config: QualityConfig, rows: int) -> CalibratedOn | None:
  calibrated = config.global_scale == "calibrated"
  return CalibratedOn("the values themselves", rows, headroom=1.0) if calibrated else None


def pack_and_unpack(config: QualityConfig, x: np.ndarray, implementation: str | None = None):
  """(float32 values that come back, who packed them, bits of a value)."""
  turned = rotate(jnp.asarray(x), config.k_rotation)
  largest = {"fp8": E4M3_MAX, "nvfp4": E2M1_MAX * E4M3_MAX}[config.k_format]
  calibrated = config.global_scale == "calibrated"
  scale = np.float32(np.abs(turned).max() / largest) if calibrated else np.float32(1.0)
  if config.k_format == "fp8":
    pool = nv_cache.PagePool(jnp.zeros(()), None, jnp.asarray(scale)[None], "fp8")
    return np.asarray(_through_fp8(pool, turned[:, None]))[:, 0], "xla", 8.0
  levels, search = config.q_levels, config.scale_search
  packed = _PACK(turned, scale, levels=levels, scale_search=search, implementation=implementation)
  back = _UNPACK(packed, jnp.float32, implementation=implementation)
  request = pack_op.PackRequest(turned.shape, "float32", levels, search, False)
  who = pack_op.resolve_pack(request, implementation).implementation
  return np.asarray(rotate(back, config.k_rotation)), who, 4.5 * levels


_PACK = jax.jit(nv.pack, static_argnames=("levels", "scale_search", "implementation"))
_UNPACK = jax.jit(nv.unpack, static_argnums=1, static_argnames="implementation")


@jax.jit
def _through_fp8(pool: nv_cache.PagePool, rows: jax.Array) -> jax.Array:
  stored = nv_cache.encode_rows(pool, rows)
  return nv_cache.decode_rows(pool, stored) * pool.decode_scale[None, :, None]
