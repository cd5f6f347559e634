"""Slow numpy references that share no code with the package: tables, searches, dense float64.

The format oracle rounds by searching a table of all values. The attention oracle decodes the cache
by table, makes the dense score matrix of each sequence in float64, and also returns how far a
correct float32 implementation may be from it (see `Bounds`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)
E4M3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
E4M3_ALL = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
F32_UNIT = 2.0**-24  # unit roundoff of float32
BF16_UNIT = 2.0**-8  # unit roundoff of bfloat16


def nearest_even(values: np.ndarray, table: np.ndarray) -> np.ndarray:
  """Index of the table entry nearest to each value >= 0; of two equally near, the even index."""
  distance = np.abs(values.astype(np.float64)[..., None] - table)
  near = distance == distance.min(axis=-1, keepdims=True)
  index = np.arange(len(table))
  first = near.argmax(axis=-1)
  last = len(table) - 1 - near[..., ::-1].argmax(axis=-1)
  return np.where(index[first] % 2 == 0, first, last)


def encode(x, global_scale: Any = 1.0, scale_search="amax") -> tuple[np.ndarray, np.ndarray]:
  """float values [..., n] -> (packed codes uint8 [..., n / 2], scale bytes uint8 [..., n / 16])."""
  x = np.asarray(x).astype(np.float32)
  g = np.broadcast_to(np.asarray(global_scale, np.float32), x.shape[:-1])
  codes = np.zeros(x.shape, np.uint8)
  scales = np.zeros((*x.shape[:-1], x.shape[-1] // 16), np.uint8)
  for place in np.ndindex(scales.shape):
    span = (*place[:-1], slice(16 * place[-1], 16 * place[-1] + 16))
    codes[span], scales[place] = _encode_block(x[span], g[place[:-1]], scale_search)
  return codes[..., 0::2] | (codes[..., 1::2] << 4), scales


def _encode_block(x, g, scale_search):
  if not np.isfinite(x).all():
    return np.zeros(16, np.uint8), 0x7F
  six = _with_largest_code(x, g, np.float32(6))
  if scale_search == "amax":
    return six
  four = _with_largest_code(x, g, np.float32(4))
  return four if _squared_error(x, g, *four) < _squared_error(x, g, *six) else six


def _with_largest_code(x, g, largest):
  with np.errstate(over="ignore"):  # amax / (6 g) may pass float32's range; it saturates
    quotient = np.abs(x).max() / np.float32(largest * g)
  scale = int(nearest_even(np.minimum(quotient, np.float32(448)), E4M3))
  if scale == 0:
    return np.zeros(16, np.uint8), 0
  step = np.float32(np.float32(E4M3[scale]) * g)
  y = np.minimum(np.abs(x) / step, np.float32(6))
  return nearest_even(y, E2M1).astype(np.uint8) | (np.signbit(x).astype(np.uint8) << 3), scale


def _squared_error(x, g, codes, scale):
  """In float32, each operation rounded, the squares added as a tree."""
  value = np.where(codes & 8, -E2M1[codes & 7], E2M1[codes & 7]) * E4M3[scale]
  miss = (x - value.astype(np.float32) * g) / g
  squares = miss * miss
  while len(squares) > 1:
    squares = squares[: len(squares) // 2] + squares[len(squares) // 2 :]
  return squares[0]


def decode(packed, scales, global_scale: Any = 1.0) -> np.ndarray:
  """float64 values [..., n]: the true product, never rounded."""
  packed, scales = np.asarray(packed), np.asarray(scales).view(np.uint8)
  codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
  value = np.where(codes & 8, -E2M1[codes & 7], E2M1[codes & 7])
  value = value * np.repeat(E4M3_ALL[scales], 16, axis=-1)
  g = np.asarray(global_scale, np.float32).astype(np.float64)
  return value * np.broadcast_to(g, value.shape[:-1])[..., None]


def decode_pool(pool) -> np.ndarray:
  """float64 [pages, heads, page_size, head_dim], global scale included."""
  data = np.asarray(pool.data)
  if pool.format == "bf16":
    return data.astype(np.float64)
  g = np.asarray(pool.global_scale).astype(np.float64)[:, None]
  if pool.format == "fp8":
    return E4M3_ALL[data.view(np.uint8)] * g[..., None]
  return decode(data, pool.block_scale, np.broadcast_to(g, data.shape[:-1]))


def round_q(q, read_path, q_levels) -> np.ndarray:
  """Q' of the read path, float64."""
  q = np.asarray(q).astype(ml_dtypes.bfloat16).astype(np.float32)
  if read_path == "nvfp4_a4q":
    total = decode(*encode(q))
    if q_levels == 2:
      total = total + decode(*encode((q - total).astype(np.float32)))
    return total
  if read_path != "nvfp4_a8q":
    return q.astype(np.float64)
  amax = np.maximum(np.abs(q).max(axis=-1, keepdims=True), np.float32(2.0**-100))
  scale = (amax / np.float32(448)).astype(np.float32)
  y = q / scale
  rounded = np.copysign(E4M3[nearest_even(np.minimum(np.abs(y), 448), E4M3)], y)
  return rounded * scale.astype(np.float64)


def round_k_to_e4m3(k, block_scales, global_scale) -> np.ndarray:
  """K of one sequence and head, float64 [keys, dim], as the A8Q path sees it."""
  largest = E4M3_ALL[block_scales][~np.isnan(E4M3_ALL[block_scales])].max(initial=0.0)
  unit = 1.0 if largest == 0 else 2.0 ** np.ceil(np.log2(6 * largest / 448))
  y = k / global_scale / unit
  rounded = np.copysign(E4M3[nearest_even(np.minimum(np.abs(y), 448), E4M3)], y)
  return np.where(np.isnan(y), np.nan, rounded) * unit * global_scale


@dataclasses.dataclass(frozen=True)
class Attention:
  """What `attention` returns; arrays are float64.

  `out_bound` and `lse_bound` bound the distance of a correct implementation, element by element.
  With u the unit roundoff of float32, a score computed as a float32 dot product over D elements is
  wrong by at most (D + 4) u sum_d |q_d k_d| * sm_scale, whatever the order of the sum, plus 8 u
  |score| for scaling, soft cap and the argument of exp: delta in total. Weights are then wrong by
  a factor within exp(+-delta), their sum too, and the weighted sum over n keys adds (n + 16) u:

      |out - exact| <= (2 delta + (n + 16) u + p_unit) sum_j p_j |v_j|        p_unit: see below
      |lse - exact| <= delta + (n + 16) u + 4 u |lse|

  An implementation that rounds its weights to bfloat16 before the PV product adds p_unit = 2^-8
  for the weights and 2^-8 because their float32 sum no longer belongs to them: `bound(bf16=True)`.
  Results stored in bfloat16 add 2^-8 |out|.
  """

  out: np.ndarray
  lse: np.ndarray
  spread: np.ndarray  # sum_j p_j |v_j|, [tokens, heads, dim]
  delta: np.ndarray  # [tokens, heads]
  keys: np.ndarray  # n, [tokens, heads]
  magnitude: np.ndarray  # sum_j |v_j| / sum_j exp(s_j - max s), [tokens, heads, dim]
  reach: np.ndarray  # max_d |q_d| max_j sum_d |k_jd| * |sm_scale|, [tokens, heads]

  def out_bound(self, *, bf16_weights=False, bf16_out=False) -> np.ndarray:
    relative = 2 * self.delta + (self.keys + 16) * F32_UNIT + (2 * BF16_UNIT) * bf16_weights
    return relative[..., None] * self.spread + BF16_UNIT * np.abs(self.out) * bf16_out + 1e-30

  def lse_bound(self) -> np.ndarray:
    finite = np.where(np.isfinite(self.lse), np.abs(self.lse), 0)
    return self.delta + (self.keys + 16) * F32_UNIT + 4 * F32_UNIT * finite


def attention(
  q,
  cache,
  page_table,
  kv_lens,
  cu_q_lens,
  *,
  read_path,
  causal=True,
  sm_scale=None,
  window=None,
  soft_cap=None,
  sinks=None,
  q_levels=2,
  new_kv=None,
  ring_ids=None,
) -> Attention:
  """Dense attention in float64, one sequence and query head at a time."""
  page_table, kv_lens, cu = (np.asarray(a) for a in (page_table, kv_lens, cu_q_lens))
  tokens, num_q_heads, dim = q.shape
  heads, page_size = cache.k.data.shape[1], cache.k.data.shape[2]
  scale = 1 / np.sqrt(dim) if sm_scale is None else sm_scale
  k_pages, v_pages = decode_pool(cache.k), decode_pool(cache.v)
  rounded, wide = round_q(q, read_path, q_levels), round_q(q, "bf16", 1)
  shape = (tokens, num_q_heads)
  result = Attention(
    out=np.zeros((*shape, v_pages.shape[-1])),
    lse=np.full(shape, -np.inf),
    spread=np.zeros((*shape, v_pages.shape[-1])),
    delta=np.zeros(shape),
    keys=np.zeros(shape),
    magnitude=np.zeros((*shape, v_pages.shape[-1])),
    reach=np.zeros(shape),
  )
  for s in range(len(kv_lens)):
    n, first, last = int(kv_lens[s]), int(cu[s]), int(cu[s + 1])
    pages = page_table[s, : -(-n // page_size)]
    start = n - (last - first)  # position of the first query
    for h in range(num_q_heads):
      kv_head = h // (num_q_heads // heads)
      k = k_pages[pages, kv_head].reshape(-1, dim)[:n]
      v = v_pages[pages, kv_head].reshape(-1, v_pages.shape[-1])[:n]
      cached = n if new_kv is None else start
      paged = cached if cache.recent is None else _paged(cache.recent, ring_ids, s, cached)
      if read_path == "nvfp4_a8q":
        scale_bytes = np.asarray(cache.k.block_scale).view(np.uint8)[pages, kv_head]
        used = scale_bytes.reshape(-1, dim // 16)[:paged]
        k = round_k_to_e4m3(k, used, float(np.asarray(cache.k.global_scale)[kv_head]))
      q_of_key = np.repeat(rounded[first:last, h][:, None], n, axis=1)
      if paged < cached:
        for array, pool in ((k, cache.recent.k), (v, cache.recent.v)):
          array[paged:cached] = _in_ring(cache.recent, pool, ring_ids, s, kv_head, paged, cached)
        q_of_key[:, paged:] = wide[first:last, h][:, None]
      if new_kv is not None:
        for array, new in ((k, new_kv[0]), (v, new_kv[1])):
          array[start:] = np.asarray(new)[first:last, kv_head].astype(ml_dtypes.bfloat16)
        q_of_key[:, start:] = wide[first:last, h][:, None]
      for i in range(last - first):
        seen = np.arange(n)
        if causal:
          seen = seen[seen <= start + i]
        if window is not None:
          seen = seen[seen > start + i - window]
        if len(seen):
          sink = None if sinks is None else float(np.asarray(sinks, np.float32)[h])
          _row(result, (first + i, h), q_of_key[i, seen], k[seen], v[seen], scale, soft_cap, sink)
  return result


def _ring(recent, ring_ids, seq) -> int | None:
  ring = seq if ring_ids is None else int(np.asarray(ring_ids)[seq])
  return ring if 0 <= ring < len(recent.starts) else None


def _paged(recent, ring_ids, seq, cached) -> int:
  """How many of a sequence's `cached` tokens are in the pages."""
  ring = _ring(recent, ring_ids, seq)
  return cached if ring is None else min(int(recent.starts[ring]), cached)


def _in_ring(recent, pool, ring_ids, seq, kv_head, first, last) -> np.ndarray:
  """Tokens first .. last - 1 of a sequence from its ring, float64."""
  data = np.asarray(pool.data).astype(np.float64)
  page_size, ring = data.shape[2], _ring(recent, ring_ids, seq)
  pages = data.shape[0] // len(recent.starts)
  token = np.arange(first, last)
  return data[ring * pages + token // page_size % pages, kv_head, token % page_size]


def _row(result, place, q, k, v, scale, soft_cap, sink):
  score = (q * k).sum(axis=1) * scale
  size = (np.abs(q) * np.abs(k)).sum(axis=1) * abs(scale)
  capped = score if soft_cap is None else soft_cap * np.tanh(score / soft_cap)
  top = max(capped.max(), -np.inf if sink is None else sink)
  weight = np.exp(capped - top)
  total = weight.sum() + (0 if sink is None else np.exp(sink - top))
  p = weight / total
  result.out[place] = p @ v
  result.lse[place] = top + np.log(total)
  result.spread[place] = p @ np.abs(v)
  result.delta[place] = ((k.shape[1] + 4) * size + 8 * np.abs(score)).max() * F32_UNIT
  result.keys[place] = len(k)
  result.magnitude[place] = np.abs(v).sum(axis=0) / total
  result.reach[place] = np.abs(q).max() * np.abs(k).sum(axis=1).max() * abs(scale)
