"""Next-token distributions of two runs of a model on the same tokens, row by row.

Logits are made a piece of rows at a time and thrown away: of a run only its hidden states are kept.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from scipy import special

from benchmarks import llama
from benchmarks.quality_metrics import Number

ROWS_PER_PIECE = 256
# Rows whose mean counts as one sample. Neighbouring tokens err together; means of 64 of them do so
# hardly, and 4 windows of 8K give 508 of them.
ROWS_PER_BLOCK = 64
MIN_SAMPLES = 4  # of fewer, an interval says nothing


class Compared(NamedTuple):
  """float32 arrays of one shape, a value for each token that was predicted.

  Attributes:
    kl: KL(reference, run) of the next-token distributions, nats.
    tv: their total variation, half the L1 distance.
    same_top: 1 where both have the same most likely token.
    nll, reference_nll: of the token that came, nats.
    hit: 1 where the run's most likely token came.
  """

  kl: np.ndarray
  tv: np.ndarray
  same_top: np.ndarray
  nll: np.ndarray
  reference_nll: np.ndarray
  hit: np.ndarray


def compare(
  model: llama.Model, reference: jax.Array, hidden: jax.Array, targets: np.ndarray
) -> Compared:
  """reference, hidden: float32 [..., hidden] before the targets, int [...]."""
  width = hidden.shape[-1]
  flat = _compare(
    model,
    reference.reshape(-1, width),
    hidden.reshape(-1, width),
    jnp.asarray(targets, jnp.int32).reshape(-1),
  )
  return Compared(*(np.asarray(a).reshape(np.shape(targets)) for a in flat))


@jax.jit
def _compare(model, reference, hidden, targets) -> tuple[jax.Array, ...]:
  rows = targets.shape[0]
  pieces = -(-rows // ROWS_PER_PIECE)
  missing = pieces * ROWS_PER_PIECE - rows

  def cut(a):
    padded = jnp.pad(a, ((0, missing), *((0, 0) for _ in a.shape[1:])))
    return padded.reshape(pieces, ROWS_PER_PIECE, *a.shape[1:])

  def of_piece(arguments):
    reference, hidden, targets = arguments
    log_p, log_q = (jax.nn.log_softmax(llama.logits(model, h)) for h in (reference, hidden))
    p, top = jnp.exp(log_p), jnp.argmax(log_q, axis=-1)
    of_targets = lambda x: -jnp.take_along_axis(x, targets[:, None], axis=-1)[:, 0]
    return (
      jnp.sum(p * (log_p - log_q), axis=-1),
      0.5 * jnp.sum(jnp.abs(p - jnp.exp(log_q)), axis=-1),
      (top == jnp.argmax(log_p, axis=-1)).astype(jnp.float32),
      of_targets(log_q),
      of_targets(log_p),
      (top == targets).astype(jnp.float32),
    )

  arrays = lax.map(of_piece, tuple(map(cut, (reference, hidden, targets))))
  return tuple(a.reshape(-1)[:rows] for a in arrays)


def mean_of_rows(values: np.ndarray) -> Number:
  """Mean of [sequences, rows] with its 95 % interval, by means of blocks of rows.

  The interval says how well this text, or more like it, is measured; not other texts, and it takes
  blocks for independent. A last block that is not full counts for the mean alone.
  """
  values = np.asarray(values, np.float64)
  blocks = values.shape[1] // ROWS_PER_BLOCK
  cut = values[:, : blocks * ROWS_PER_BLOCK].reshape(-1, ROWS_PER_BLOCK)
  return mean_of_samples(cut.mean(axis=1), float(values.mean()))


def mean_of_samples(samples: np.ndarray, mean: float | None = None) -> Number:
  """Mean of independent samples [n] with its 95 % interval by Student's t, if they suffice."""
  samples = np.asarray(samples, np.float64)
  mean = float(samples.mean()) if mean is None else mean
  n = samples.size
  if n < MIN_SAMPLES:
    return Number(mean)
  half = float(special.stdtrit(n - 1, 0.975) * samples.std(ddof=1) / np.sqrt(n))
  return Number(mean, mean - half, mean + half)
