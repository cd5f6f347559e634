"""What a cache format does to generated text: where greedy decoding parts, and how far sampling is.

Prompts are prefilled with their own chunks wide, as serving does; every generated token is then one
`decode` over the cache.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import llama
from benchmarks.quality_compare import compare, mean_of_rows, mean_of_samples
from benchmarks.quality_metrics import Number
from benchmarks.quality_serving import Server, join


@dataclasses.dataclass(frozen=True, eq=False)
class Generated:
  """tokens int32 [num_seqs, n], and the hidden states [num_seqs, n, hidden] that predict them."""

  tokens: np.ndarray
  hidden: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Reference:
  """What a BF16 cache generates from the same prompts: the likeliest tokens, and a sample."""

  greedy: Generated
  sampled: Generated


@functools.partial(jax.jit, static_argnames="sample")
def next_tokens(model: llama.Model, hidden: jax.Array, key: jax.Array, sample: bool) -> jax.Array:
  """int32 [rows]: the likeliest token, or one at temperature 1."""
  logits = llama.logits(model, hidden)
  if sample:
    return jax.random.categorical(key, logits).astype(jnp.int32)
  return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def generate(server: Server, prompts: np.ndarray, chunk: int, n: int, sample: bool) -> Generated:
  """n tokens after each of prompts [num_seqs, length]."""
  server.reset()
  hidden = server.prefill(prompts, chunk, "wide")[:, -1:]
  tokens, states = [], []
  for key in jax.random.split(jax.random.key(0), n):
    states.append(hidden)
    tokens.append(next_tokens(server.model, hidden[:, 0], key, sample)[:, None])
    hidden = server.advance(tokens[-1], "stored")
  return Generated(np.asarray(join(tokens)), join(states))


def follow(server: Server, prompts: np.ndarray, chunk: int, tokens: np.ndarray) -> Generated:
  """The given tokens, as if they had been generated."""
  server.reset()
  states = [server.prefill(prompts, chunk, "wide")[:, -1:]]
  states += [server.advance(tokens[:, [i]], "stored") for i in range(tokens.shape[1] - 1)]
  return Generated(tokens, join(states))


def reference(server: Server, prompts: np.ndarray, chunk: int, n: int) -> Reference:
  return Reference(*(generate(server, prompts, chunk, n, sample) for sample in (False, True)))


def divergence(reference: np.ndarray, tokens: np.ndarray) -> np.ndarray:
  """int [num_seqs]: the first position whose token differs, or the length where none does."""
  differs = reference != tokens
  return np.where(differs.any(axis=1), differs.argmax(axis=1), tokens.shape[1])


def measure(
  server: Server, prompts: np.ndarray, chunk: int, reference: Reference
) -> dict[tuple[str, str], Number]:
  """(temperature, metric) -> number.

  At temperature 0: mean and least position at which the text parts from the reference's. At
  temperature 1: KL and total variation along a text that the reference sampled, so that both see
  the same tokens.
  """
  n = reference.greedy.tokens.shape[1]
  greedy = generate(server, prompts, chunk, n, sample=False)
  parted = divergence(reference.greedy.tokens, greedy.tokens)
  sampled = reference.sampled
  followed = follow(server, prompts, chunk, sampled.tokens)
  compared = compare(server.model, sampled.hidden, followed.hidden, sampled.tokens)
  return {
    ("greedy", "divergence"): mean_of_samples(parted),
    ("greedy", "divergence_min"): Number(float(parted.min())),
    ("greedy", "identical"): Number(float(np.mean(parted == n))),
    ("sampled", "kl"): mean_of_rows(compared.kl),
    ("sampled", "tv"): mean_of_rows(compared.tv),
  }
