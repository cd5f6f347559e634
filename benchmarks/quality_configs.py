"""What the quality benchmark compares: caches by format, levers, window and read path.

A config says everything that changes a number: how K and V are stored, what becomes of Q, and how
many of the newest tokens stay BF16. Like is compared with like: a baseline stands with and without
the recent window, because the window alone is worth more than most formats.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

import nvfp4_pallas as nv
from nvfp4_pallas import calibration

GLOBAL_SCALES = ("1", "calibrated")


@dataclasses.dataclass(frozen=True, kw_only=True)
class QualityConfig:
  """One way to store K and V and to read them.

  Attributes:
    name: short, unique in CONFIGS.
    k_format, v_format, scale_search, k_rotation, v_rotation, recent_window, page_size: as in
      PagedKVCache.create; scale_search is of K and V alike.
    k_mean: whether a mean of K per KV head and channel is taken off before K is stored.
    read_path, q_levels: as in decode and prefill.
    global_scale: `1`, or `calibrated`: from statistics of the data, per KV head.
  """

  name: str
  k_format: str = "nvfp4"
  v_format: str = "nvfp4"
  scale_search: str = "amax"
  k_rotation: str | None = None
  v_rotation: str | None = None
  k_mean: bool = False
  recent_window: int = 0
  page_size: int = 16
  read_path: str = "nvfp4_dequant"
  q_levels: int = 2
  global_scale: str = "1"

  @property
  def needs_calibration(self) -> bool:
    """Whether make_cache must be told something that was measured on data."""
    return self.k_mean or self.global_scale == "calibrated"


@dataclasses.dataclass(frozen=True)
class CalibratedOn:
  """What the means and the global scales of a config were observed on.

  Attributes:
    text: the data; at level format the values that are judged, else never those.
    tokens: of it.
    headroom: of the global scales (calibration.calibrate); None for a config with only a mean.
  """

  text: str
  tokens: int
  headroom: float | None = None


def make_cache(
  config: QualityConfig,
  *,
  num_pages: int,
  num_kv_heads: int,
  head_dim: int,
  num_rings: int = 1,
  k_mean: jax.Array | None = None,
  k_global_scale: jax.Array | float | None = None,
  v_global_scale: jax.Array | float | None = None,
) -> nv.PagedKVCache:
  """An empty cache of a config.

  Args:
    num_rings: sequences whose newest tokens stay wide; for configs without a window of no meaning.
    k_mean: float32 [num_kv_heads, head_dim], for configs with k_mean.
    k_global_scale, v_global_scale: for configs with calibrated scales, of the formats that have
      any.

  Raises:
    ValueError: the config needs calibration that is not given, or the reverse.
  """
  if (k_mean is not None) != config.k_mean:
    raise ValueError(f"k_mean must be given for a config with k_mean only, got {config.name}")
  scales = {"k_global_scale": k_global_scale, "v_global_scale": v_global_scale}
  for name, scale in scales.items():
    if (scale is not None) != (config.global_scale == "calibrated"):
      raise ValueError(f"{name} must be given for calibrated configs only, got {config.name}")
  arguments: dict[str, Any] = {
    "k_format": config.k_format,
    "v_format": config.v_format,
    "k_global_scale": 1.0 if config.k_format == "bf16" else scales["k_global_scale"],
    "v_global_scale": 1.0 if config.v_format == "bf16" else scales["v_global_scale"],
    "scale_search": config.scale_search,
    "k_rotation": config.k_rotation,
    "v_rotation": config.v_rotation,
    "k_mean": k_mean,
    "recent_window": config.recent_window,
  }
  left_out = {"scale_search": "amax", "recent_window": 0}
  given = {n: a for n, a in arguments.items() if a is not None and a != left_out.get(n)}
  if config.recent_window:
    given["num_rings"] = num_rings
  return nv.PagedKVCache.create(
    num_pages=num_pages,
    page_size=config.page_size,
    num_kv_heads=num_kv_heads,
    head_dim=head_dim,
    **given,
  )


def calibrated(config: QualityConfig, k: jax.Array, v: jax.Array) -> dict[str, jax.Array]:
  """What make_cache must be told beside sizes, from keys and values [tokens, num_kv_heads, dim]."""
  if not config.needs_calibration:
    return {}
  observe = lambda **options: calibration.calibrate(
    calibration.observe(
      calibration.KVStatistics.create(
        num_kv_heads=k.shape[1],
        head_dim=k.shape[2],
        k_rotation=config.k_rotation,
        v_rotation=config.v_rotation,
        **options,
      ),
      k,
      v,
    ),
    k_format=config.k_format,
    v_format=config.v_format,
  )
  found = {"k_mean": observe().k_mean} if config.k_mean else {}
  if config.global_scale == "calibrated":
    scales = observe(**found)
    found |= {"k_global_scale": scales.k_global_scale, "v_global_scale": scales.v_global_scale}
  return found


def calibrated_on(config: QualityConfig, text: str, tokens: int) -> CalibratedOn | None:
  """What `calibrated` did, for a row; None for configs that need nothing."""
  if not config.needs_calibration:
    return None
  by_scales = config.global_scale == "calibrated"
  return CalibratedOn(text, tokens, calibration.HEADROOM if by_scales else None)


def tokens_in_pages(config: QualityConfig, kv_len: int) -> int:
  """Of one sequence; the others are in its ring."""
  if not config.recent_window:
    return kv_len
  return max(0, kv_len - config.recent_window) // config.page_size * config.page_size


def bits_per_value(config: QualityConfig, kv_len: int) -> float:
  """Bits of K and V for each of their values at a length: whole pages, and a ring as allocated.

  The bytes are those of a real cache's arrays; they do not depend on heads and head_dim.
  """
  page_bytes, ring_bytes = _bytes_of(dataclasses.replace(config, name="", k_mean=False))
  pages = -(-tokens_in_pages(config, kv_len) // config.page_size)
  return 8 * (pages * page_bytes + ring_bytes) / (2 * kv_len * _HEAD_DIM)


_HEAD_DIM = 128


@functools.cache
def _bytes_of(config: QualityConfig) -> tuple[int, int]:
  """Of a page and of a ring, K and V of one head."""
  scale = 1.0 if config.global_scale == "calibrated" else None
  cache = jax.eval_shape(
    lambda: make_cache(
      config,
      num_pages=1,
      num_kv_heads=1,
      head_dim=_HEAD_DIM,
      k_global_scale=scale,
      v_global_scale=scale,
    )
  )
  ring_bytes = 0 if cache.recent is None else cache.recent.bytes_per_ring
  return int(cache.k.nbytes + cache.v.nbytes), ring_bytes


def _baseline(format: str, **fields) -> QualityConfig:
  return QualityConfig(name=format, k_format=format, v_format=format, read_path=format, **fields)


def _with_window(config: QualityConfig, tokens: int = 64) -> QualityConfig:
  return dataclasses.replace(config, name=f"{config.name} w{tokens}", recent_window=tokens)


BF16 = _baseline("bf16")
FP8 = _baseline("fp8")
FP8_NVFP4 = QualityConfig(name="fp8/nvfp4", k_format="fp8")
NVFP4 = QualityConfig(name="nvfp4")
CALIBRATED = QualityConfig(name="nvfp4 cal", global_scale="calibrated")
FOUR_OVER_SIX = QualityConfig(name="nvfp4 4/6", scale_search="four_over_six")
K_MEAN = QualityConfig(name="nvfp4 mean", k_mean=True)
HAD_K = QualityConfig(name="nvfp4 hadK", k_rotation="hadamard")
HAD_K_46 = dataclasses.replace(HAD_K, name="nvfp4 hadK 4/6", scale_search="four_over_six")
HAD_KV_46 = dataclasses.replace(HAD_K_46, name="nvfp4 hadKV 4/6", v_rotation="hadamard")
HAD_K_46_CALIBRATED = dataclasses.replace(
  HAD_K_46, name="nvfp4 hadK 4/6 cal", global_scale="calibrated"
)
MEAN_HAD_K_46 = dataclasses.replace(HAD_K_46, name="nvfp4 mean hadK 4/6", k_mean=True)

_STORED = (
  FP8,
  FP8_NVFP4,
  NVFP4,
  CALIBRATED,
  FOUR_OVER_SIX,
  K_MEAN,
  HAD_K,
  HAD_K_46,
  HAD_KV_46,
  MEAN_HAD_K_46,
)
WINDOWED = (
  *(_with_window(config) for config in _STORED if config is not CALIBRATED),
  _with_window(HAD_K_46, 96),
  _with_window(HAD_K_46_CALIBRATED),
)


def _with_q(config: QualityConfig, name: str, read_path: str, q_levels: int) -> QualityConfig:
  name = f"{config.name}, {name}"
  return dataclasses.replace(config, name=name, read_path=read_path, q_levels=q_levels)


def with_quantised_q(config: QualityConfig) -> tuple[QualityConfig, ...]:
  """The config with Q in two NVFP4 levels, one, and in FP8."""
  return (
    _with_q(config, "Q x2", "nvfp4_a4q", 2),
    _with_q(config, "Q x1", "nvfp4_a4q", 1),
    _with_q(config, "Q fp8", "nvfp4_a8q", 1),
  )


# The K rotation turns Q too, so that one level of it has no outlier channels to spend its range on.
QUANTISED_Q = (*with_quantised_q(NVFP4), *with_quantised_q(HAD_K_46))

CONFIGS = (BF16, *_STORED, *QUANTISED_Q, *WINDOWED)
BY_NAME = {config.name: config for config in CONFIGS}
RECOMMENDED = BY_NAME["nvfp4 hadK 4/6 w96"].name
