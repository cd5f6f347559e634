"""What a cache holds, read by numpy in float64, and the scores that a query has with it.

The output of an operation is judged as it comes; scores and probabilities it never shows, so they
are made here from the same bytes. A cache may keep rows rotated and K without its mean
(QualityConfig): scores are products in that space, plus what the mean gives, and values are turned
back.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from benchmarks import oracle
from benchmarks.quality_configs import QualityConfig
from nvfp4_pallas.read_paths import AttentionSpec, round_q


@dataclasses.dataclass(frozen=True, eq=False)
class Stored:
  """One sequence in a cache, float64.

  Attributes:
    k: [tokens, num_kv_heads, head_dim], as stored: without its mean, rotated.
    v: [tokens, num_kv_heads, head_dim], rotated back.
    start: tokens before it come from the pages, the others from the ring.
  """

  k: np.ndarray
  v: np.ndarray
  start: int


def read(cache, pages: np.ndarray, tokens: int, config: QualityConfig) -> Stored:
  """The sequence whose page table is `pages`, and whose ring is the first one."""
  start = tokens if getattr(cache, "recent", None) is None else int(cache.recent.starts[0])
  used = pages[: -(-start // config.page_size)]
  k, v = (_rows(oracle.decode_pool(pool)[used])[:start] for pool in (cache.k, cache.v))
  if config.read_path == "nvfp4_a8q":
    scales = _rows(np.asarray(cache.k.block_scale).view(np.uint8)[used])[:start]
    k = _k_in_e4m3(k, scales, np.asarray(cache.k.global_scale).astype(np.float64))
  if start < tokens:
    count = cache.recent.ring_pages
    order = (start // config.page_size + np.arange(count)) % count
    ring_k, ring_v = (
      _rows(np.asarray(pool.data)[order].astype(np.float64))[: tokens - start]
      for pool in (cache.recent.k, cache.recent.v)
    )
    k, v = np.concatenate([k, ring_k]), np.concatenate([v, ring_v])
  return Stored(k, rotate(v, config.v_rotation), start)


def _rows(pages: np.ndarray) -> np.ndarray:
  """[pages, heads, page_size, dim] -> [tokens, heads, dim]."""
  return np.swapaxes(pages, 1, 2).reshape(-1, pages.shape[1], pages.shape[3])


def _k_in_e4m3(k: np.ndarray, scale_bytes: np.ndarray, global_scale: np.ndarray) -> np.ndarray:
  """K as nvfp4_a8q reads it: E4M3 of the decoded in a power-of-two unit for each head."""
  scales = np.where(np.isnan(oracle.E4M3_ALL[scale_bytes]), 0, oracle.E4M3_ALL[scale_bytes])
  largest = scales.max(axis=(0, 2))
  unit = np.where(largest > 0, 2.0 ** np.ceil(np.log2(6 * np.maximum(largest, 1e-9) / 448)), 1.0)
  unit = (unit * global_scale)[:, None]
  # K over its global scale has 6 bits, so neither float32 nor the division rounds it before.
  return (k / unit).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * unit


def rotate(x: np.ndarray, rotation: str | None) -> np.ndarray:
  """The Hadamard transform of each block of the largest power of two that divides the last axis."""
  if rotation is None:
    return x
  n = x.shape[-1] & -x.shape[-1]
  h = np.ones((1, 1))
  while len(h) < n:
    h = np.block([[h, h], [h, -h]])
  return (x.reshape(*x.shape[:-1], -1, n) @ (h / np.sqrt(n))).reshape(x.shape)


def _round_q(q: np.ndarray, read_path: str, q_levels: int) -> np.ndarray:
  """As the operations do it; the oracle's own loop is too slow here, and is compared in tests."""
  spec = AttentionSpec(read_path, causal=False, sm_scale=1.0, q_levels=q_levels)
  return np.asarray(_ROUND_Q(jnp.asarray(q, jnp.float32), spec)).astype(np.float64)


_ROUND_Q = jax.jit(round_q, static_argnums=1)


class Scores:
  """Scores of one KV head's queries with its keys; each of Q and K exact or as the config has it.

  q [rows, head_dim], k [tokens, head_dim]: wide; k_mean [head_dim] or None; stored_k: of the head.
  """

  def __init__(self, config: QualityConfig, q, k, k_mean, stored_k, start: int):
    q, k = q.astype(np.float64), k.astype(np.float64)
    mean = np.zeros(k.shape[-1]) if k_mean is None else k_mean.astype(np.float64)
    turned = rotate(q, config.k_rotation)
    self.exact_q, self.exact_k = turned, rotate(k - mean, config.k_rotation)
    self.used_q = _round_q(turned, config.read_path, config.q_levels)
    self.used_ring_q = _round_q(turned, "bf16", 1)
    self.used_k, self.start = stored_k, start
    self.of_mean = (q @ mean)[:, None]
    self.of_mean_used = (_round_q(q, "bf16", 1) @ mean)[:, None]
    self.sm_scale = k.shape[-1] ** -0.5

  def __call__(self, *, quantised_q: bool, quantised_k: bool) -> np.ndarray:
    """float64 [rows, tokens]."""
    k = self.used_k if quantised_k else self.exact_k
    if not quantised_q:
      return self.sm_scale * (self.exact_q @ k.T + self.of_mean)
    paged = self.used_q @ k[: self.start].T
    ringed = self.used_ring_q @ k[self.start :].T
    return self.sm_scale * (np.concatenate([paged, ringed], axis=1) + self.of_mean_used)
