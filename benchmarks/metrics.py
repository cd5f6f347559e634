"""How far one array is from another."""

from __future__ import annotations

import numpy as np


def snr_db(reference, approximation) -> float:
  """10 log10 of signal over error energy; infinite for equal arrays."""
  reference, approximation = (np.asarray(a).astype(np.float64) for a in (reference, approximation))
  error = np.sum((reference - approximation) ** 2)
  return float("inf") if error == 0 else float(10 * np.log10(np.sum(reference**2) / error))


def row_error(reference, approximation) -> float:
  """Mean over rows (last axis) of |error| / |reference|, rows with no reference left out."""
  reference, approximation = (np.asarray(a).astype(np.float64) for a in (reference, approximation))
  size = np.linalg.norm(reference, axis=-1)
  error = np.linalg.norm(approximation - reference, axis=-1)
  return float(np.mean(error[size > 0] / size[size > 0])) if (size > 0).any() else 0.0


def dense_attention(q, k, v, sm_scale: float) -> np.ndarray:
  """Causal attention of one sequence in float64, queries at its end.

  q [q_len, num_q_heads, dim], k [kv_len, heads, dim], v [kv_len, heads, v_dim], all float64.
  """
  q_len, num_q_heads, _ = q.shape
  kv_len, heads, _ = k.shape
  q = q.reshape(q_len, heads, num_q_heads // heads, -1)
  score = np.einsum("ihgd,jhd->hgij", q, k) * sm_scale
  position = kv_len - q_len + np.arange(q_len)
  score = np.where(np.arange(kv_len)[None, :] <= position[:, None], score, -np.inf)
  weight = np.exp(score - score.max(axis=-1, keepdims=True))
  out = np.einsum("hgij,jhd->ihgd", weight / weight.sum(axis=-1, keepdims=True), v)
  return out.reshape(q_len, num_q_heads, -1)


def dense_rows(q, k, v, positions, sm_scale: float) -> np.ndarray:
  """Causal attention of some tokens over one KV head's keys, in float64.

  q [tokens, heads, dim], k and v [kv_len, dim], positions [tokens]: the newest key that each sees.
  """
  score = q @ k.T * sm_scale
  seen = np.arange(len(k)) <= np.asarray(positions)[:, None, None]
  score = np.where(seen, score, -np.inf)
  weight = np.exp(score - score.max(axis=-1, keepdims=True))
  return weight / weight.sum(axis=-1, keepdims=True) @ v
