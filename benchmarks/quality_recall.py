"""Whether a model finds in its cache what a prompt told it long before.

Judged by the likelihood of the answer's tokens, each given the true ones before it: rates of whole
answers saturate long before a cache is good, or where a small model fails whatever the cache.
"""

from __future__ import annotations

import numpy as np

from benchmarks.quality_compare import compare, mean_of_samples
from benchmarks.quality_metrics import Number
from benchmarks.quality_serving import Server
from benchmarks.quality_texts import Recall


def answers(
  server: Server, recall: Recall, chunk: int, newest: str
) -> tuple[np.ndarray, np.ndarray]:
  """Of each prompt: NLL of its answer, nats of all its tokens, and whether each was the likeliest.

  Prompts run num_seqs at a time; their number must be a multiple of it.
  """
  prompts = len(recall.kinds)
  if prompts % server.num_seqs:
    raise ValueError(f"prompts must be a multiple of {server.num_seqs=}, got {prompts}")
  longest = int(recall.answer_lens.max())
  nll, exact = [], []
  for first in range(0, prompts, server.num_seqs):
    some = slice(first, first + server.num_seqs)
    server.reset()
    hidden = server.prefill(recall.tokens[some], chunk, newest)[:, -longest - 1 : -1]
    compared = compare(server.model, hidden, hidden, recall.tokens[some, -longest:])
    answer = np.arange(longest)[None] >= longest - recall.answer_lens[some, None]
    nll.append(np.sum(compared.nll * answer, axis=1))
    exact.append(np.all((compared.hit == 1) | ~answer, axis=1))
  return np.concatenate(nll), np.concatenate(exact)


def measure(
  server: Server, recall: Recall, chunk: int, newest: str
) -> dict[tuple[str, str], Number]:
  """(kind, metric) -> number over the depths."""
  nll, exact = answers(server, recall, chunk, newest)
  numbers = {}
  for kind in dict.fromkeys(recall.kinds):
    mine = np.array(recall.kinds) == kind
    numbers[kind, "answer_nll"] = mean_of_samples(nll[mine])
    numbers[kind, "answer_top1"] = Number(float(exact[mine].mean()))
  return numbers
