"""Read paths: the numerics of attention over a cache, apart from who runs it.

Every path computes softmax(sm_scale * Q' K'^T) V' with float32 accumulation; they differ in what
Q' and K' are. V' is always the decoded cache, exact.

    path           Q'                                 K'                      cache (K, V)
    bf16           bf16(q)                            decoded                 bf16, bf16
    fp8            bf16(q)                            decoded                 fp8 in one, no nvfp4
    nvfp4_dequant  bf16(q)                            decoded in the loop     nvfp4 in one
    nvfp4_repack   bf16(q)                            decoded once, ahead     nvfp4 in one
    nvfp4_a4q      nvfp4(bf16(q)), q_levels levels    the codes themselves    K nvfp4
    nvfp4_a8q      e4m3(bf16(q) / s_q) * s_q          e4m3(decoded / s_k)     K nvfp4
                                                      * s_k

`nvfp4_dequant` and `nvfp4_repack` are equal as numbers: NVFP4 without its global scale is exact in
bfloat16; they differ in when the work is done. A4Q's second level is the residual of the first
(groups of 16, E4M3 scales, global scale 1: groups of Q whose largest value is under 2^-10 * 6
become zero, values beyond 2688 saturate). A8Q scales a query row by
s_q = max(amax, 2^-100) / 448, so that neither it nor what is divided by it is subnormal, and a KV
head of a sequence by s_k = the least power of two that brings 6 * max(block_scale) to 448 or less.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from nvfp4_pallas import format as nvfp4
from nvfp4_pallas.cache import PagedKVCache

READ_PATHS = ("bf16", "fp8", "nvfp4_dequant", "nvfp4_repack", "nvfp4_a4q", "nvfp4_a8q")
AUTO = "auto"  # in calls: one of those with the same numbers, by measured costs (ops/auto.py)
Q_LEVELS = (1, 2)
LEAST_A8Q_AMAX = 2.0**-100


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
  """The static numerics of one attention call; hashable, so kernels can specialise on it.

  Attributes:
    read_path: one of READ_PATHS.
    causal: bottom-right aligned: query i of a sequence sees keys up to kv_len - q_len + i.
    sm_scale: factor on the scores.
    window: a query sees at most this many newest keys, its own position included; None: all.
    soft_cap: scores become soft_cap * tanh(score / soft_cap); None: unchanged.
    q_levels: NVFP4 levels of Q, for nvfp4_a4q.
  """

  read_path: str
  causal: bool
  sm_scale: float
  window: int | None = None
  soft_cap: float | None = None
  q_levels: int = 2


def check_read_path(read_path: str, cache: PagedKVCache) -> None:
  """Raises ValueError when the cache's formats are not the path's (see the module's table)."""
  if read_path == AUTO:
    return  # it follows the formats
  if read_path not in READ_PATHS:
    raise ValueError(f"read_path must be one of {(*READ_PATHS, AUTO)}, got {read_path!r}")
  rule = formats_lacking(read_path, cache.formats)
  if rule is not None:
    k, v = cache.formats
    raise ValueError(f"read_path {read_path!r} needs a cache with {rule}, got K {k} and V {v}")


def formats_lacking(read_path: str, formats: tuple[str, str]) -> str | None:
  """What formats of K and V the path needs, where these are not such; None where they are."""
  k, v = formats
  allowed, rule = {
    "bf16": (k == v == "bf16", "K and V in bf16"),
    "fp8": ("nvfp4" not in (k, v) and "fp8" in (k, v), "fp8 in K or V and nvfp4 in neither"),
    "nvfp4_dequant": ("nvfp4" in (k, v), "nvfp4 in K or V"),
    "nvfp4_repack": ("nvfp4" in (k, v), "nvfp4 in K or V"),
    "nvfp4_a4q": (k == "nvfp4", "K in nvfp4"),
    "nvfp4_a8q": (k == "nvfp4", "K in nvfp4"),
  }[read_path]
  return None if allowed else rule


def round_q(q: jax.Array, spec: AttentionSpec) -> jax.Array:
  """Q' of the module's table as float32 [..., head_dim]."""
  q = nvfp4.through(q, jnp.bfloat16)
  if spec.read_path == "nvfp4_a4q":
    return nvfp4.decode(nvfp4.encode(q, levels=spec.q_levels), jnp.float32)
  if spec.read_path != "nvfp4_a8q":
    return q
  amax = jnp.maximum(jnp.max(jnp.abs(q), axis=-1, keepdims=True), LEAST_A8Q_AMAX)
  scale = nvfp4.divide(amax, jnp.float32(nvfp4.E4M3_MAX))
  return round_e4m3_signed(nvfp4.divide(q, scale)) * scale


def round_e4m3_signed(x: jax.Array) -> jax.Array:
  """float32 x rounded to E4M3 (nearest even, saturating); NaN stays NaN."""
  return nvfp4.through(jnp.clip(x, -nvfp4.E4M3_MAX, nvfp4.E4M3_MAX), jnp.float8_e4m3fn)


def k_scale_for_e4m3(max_block_scale: jax.Array) -> jax.Array:
  """s_k of A8Q: the least power of two >= 6 * max_block_scale / 448 (1 for a zero scale)."""
  bound = max_block_scale * (nvfp4.E2M1_MAX / nvfp4.E4M3_MAX)
  # bound = mantissa * 2^exponent with mantissa in (.5, 1): no E4M3 value times 6 / 448 is a power
  # of two, so the exponent is the answer and the rounding of 6 / 448 cannot change it.
  _, exponent = jnp.frexp(bound)
  return jnp.where(bound > 0, jnp.ldexp(jnp.float32(1.0), exponent), jnp.float32(1.0))
