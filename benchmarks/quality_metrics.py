"""How far approximate attention is from exact, in the terms that people compare.

The output's relative L2 is what the next layer sees. The norm ratio is there because a wrong scale
passes a cosine, KL and top-k because a model reads a distribution over keys, and the logits because
an error there grows with the length while an error of V averages out.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from benchmarks.metrics import snr_db

# Of the output, and of the probabilities, in the order that tables have.
OUTPUT_METRICS = (
  "rel_l2",
  "rel_l2_p99",
  "rel_l2_max",
  "snr_db",
  "cos",
  "cos_min",
  "norm_ratio",
  "lse_error",
)
PROBABILITY_METRICS = ("kl", "top1", "top8", "max_delta_logit")
TOP = 8


@dataclasses.dataclass(frozen=True)
class Number:
  """A metric and, of a mean over rows, its 95 % interval."""

  value: float
  ci_low: float | None = None
  ci_high: float | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class State:
  """Attention of some rows: scores float64 [rows, keys] (-inf where not seen), lse [rows],
  out [rows, dim]."""

  scores: np.ndarray
  lse: np.ndarray
  out: np.ndarray

  @property
  def log_p(self) -> np.ndarray:
    return self.scores - self.lse[:, None]


def attend(scores: np.ndarray, v: np.ndarray) -> State:
  """Exact attention; v float64 [keys, dim], or [rows, keys, dim] where rows read other values."""
  top = scores.max(axis=-1, keepdims=True)
  weight = np.exp(scores - top)
  total = weight.sum(axis=-1, keepdims=True)
  out = weight @ v if v.ndim == 2 else np.einsum("rk,rkd->rd", weight, v)
  return State(scores, (top + np.log(total))[:, 0], out / total)


def of_output(reference: State, out: np.ndarray, lse: np.ndarray) -> dict[str, Number]:
  """out [rows, dim] and lse [rows] of the operation against exact ones."""
  exact, out = reference.out, np.asarray(out).astype(np.float64)
  norm, got_norm = np.linalg.norm(exact, axis=-1), np.linalg.norm(out, axis=-1)
  error = np.linalg.norm(out - exact, axis=-1) / norm
  # An output of zeros has no direction; it is given the cosine 0.
  cosine = np.sum(exact * out, axis=-1) / np.where(got_norm > 0, norm * got_norm, 1.0)
  lse_error = np.abs(np.asarray(lse).astype(np.float64) - reference.lse)
  return {
    "rel_l2": mean(error),
    "rel_l2_p99": Number(float(np.quantile(error, 0.99))),
    "rel_l2_max": Number(float(error.max())),
    "snr_db": Number(snr_db(exact, out)),
    "cos": mean(cosine),
    "cos_min": Number(float(cosine.min())),
    "norm_ratio": mean(got_norm / norm),
    "lse_error": Number(float(lse_error.max())),
  }


def of_probabilities(reference: State, measured: State) -> dict[str, Number]:
  """Distributions over keys, made of the scores that the operation's inputs give exactly."""
  seen = np.isfinite(reference.scores)
  delta = np.abs(np.where(seen, measured.scores, 0) - np.where(seen, reference.scores, 0))
  order, got_order = (_top_keys(state.scores) for state in (reference, measured))
  return {
    "kl": mean(kl(reference, measured)),
    "top1": mean(_overlap(order[:, :1], got_order[:, :1])),
    "top8": mean(_overlap(order, got_order)),
    "max_delta_logit": Number(float(delta.max())),
  }


def kl(reference: State, measured: State) -> np.ndarray:
  """KL(P, P^) of each row."""
  seen = np.isfinite(reference.scores)
  log_p = np.where(seen, reference.log_p, 0.0)
  distance = np.where(seen, np.exp(log_p) * (log_p - np.where(seen, measured.log_p, 0.0)), 0.0)
  return distance.sum(axis=-1)


def mean(values: np.ndarray) -> Number:
  half = 1.96 * float(np.std(values, ddof=1)) / np.sqrt(len(values)) if len(values) > 1 else 0.0
  middle = float(np.mean(values))
  return Number(middle, middle - half, middle + half)


def _top_keys(scores: np.ndarray) -> np.ndarray:
  """[rows, TOP], the best first."""
  some = np.argpartition(scores, -TOP, axis=-1)[:, -TOP:]
  order = np.argsort(-np.take_along_axis(scores, some, axis=-1), axis=-1)
  return np.take_along_axis(some, order, axis=-1)


def _overlap(keys: np.ndarray, others: np.ndarray) -> np.ndarray:
  """Of each row, the share of its keys that are among the others."""
  return np.mean([(others == keys[:, [i]]).any(axis=-1) for i in range(keys.shape[1])], axis=0)
