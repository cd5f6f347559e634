"""The live engine: computes the scheduler's steps with a real decoder over real caches.

Every step runs as one compiled function of its bucket: room for so many prompt tokens of so many
requests, and for all decoding places. `warm_up` compiles them all; from then on nothing is traced
again, and `traces` says so. A step's time is the host's clock from making its arrays until its
tokens are back on the host: nothing overlaps.

Prompts are made of what their hash ids say, 512 tokens each, so that requests that share ids share
tokens, and a page that is found again holds what the request would have computed.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np

import nvfp4_pallas as nv
from benchmarks import llama
from benchmarks.serve_costs import Times
from benchmarks.serve_decoder import Reading, StepRows, Weights, step
from benchmarks.serve_model import Measured
from benchmarks.serve_scheduler import Request, Step
from benchmarks.serve_workloads import HASHED_TOKENS

LEAST_ROWS = 128  # of the smallest bucket that reads
TIMED = 5  # steps of a bucket without attention


class Engine:
  """See the module.

  Attributes:
    caches: of every layer; replaced by every step.
    traces: how often a step was traced.
    logits: of every written token, the likeliest one's, by request, if they are kept.
  """

  def __init__(
    self,
    weights: Weights,
    config: llama.Config,
    caches: tuple[nv.PagedKVCache, ...],
    how: Reading,
    *,
    context: int,
    budget: int,
    places: int,
    most_chunks: int,
    keep_logits: bool = False,
  ):
    """
    Args:
      context: tokens of the longest request, prompt and output.
      budget, places, most_chunks: of the scheduler: tokens of a step, requests that run, and
        requests that read in one step.
    """
    self.weights, self.config, self.caches, self._how = weights, config, caches, how
    self._page_size = caches[0].page_size
    self._max_pages = -(-context // self._page_size)
    self._places, self._vocab = places, weights.embedding.shape[0]
    self.rows = row_buckets(budget)
    self.chunks = (1, most_chunks) if most_chunks > 1 else (1,)
    self._rope = llama.rope_table(config, context)
    self._tokens: dict[Request, np.ndarray] = {}
    self.traces = 0
    self.logits: dict[Request, list[float]] | None = {} if keep_logits else None
    self._run = jax.jit(functools.partial(self._traced, how=how), donate_argnums=1)

  def _traced(self, weights, caches, rope, rows, *, how: Reading):
    self.traces += 1
    return step(weights, caches, rope, rows, config=self.config, how=how)

  def buckets(self) -> Iterator[tuple[int, int]]:
    """(rows, chunks) of every step there can be: one that only decodes is (0, 0)."""
    yield 0, 0
    yield from itertools.product(self.rows, self.chunks)

  def warm_up(self) -> None:
    """Compiles every bucket, with steps that touch no page."""
    for rows, chunks in self.buckets():
      self._compute(self._run, self._empty(rows, chunks))

  def model_costs(self) -> Measured:
    """Times every bucket without attention and appends: what all formats share."""
    how = Reading(self._how.prefill_path, self._how.decode_path, attends=False)
    run = jax.jit(functools.partial(step, config=self.config, how=how), donate_argnums=1)
    times = []
    for rows in (0, *self.rows):
      arrays = self._empty(rows, min(rows, 1))
      self._compute(run, arrays)
      spent = []
      for _ in range(TIMED):
        start = time.perf_counter()
        self._compute(run, arrays)
        spent.append(time.perf_counter() - start)
      times.append(statistics.median(spent))
    return Measured((0, *self.rows), tuple(times))

  def execute(self, step: Step) -> Times:
    start = time.perf_counter()
    rows = _at_least(self.rows, step.chunk_tokens) if step.chunks else 0
    chunks = _at_least(self.chunks, len(step.chunks)) if step.chunks else 0
    arrays = self._empty(rows, chunks)
    self._fill(arrays, step, rows)
    tokens, logits = self._compute(self._run, arrays)
    self._keep(step, chunks, tokens, logits)
    return Times(other=time.perf_counter() - start)

  def tokens_of(self, request: Request) -> np.ndarray:
    """int32 [prompt + output] of a request; what is not written yet is 0."""
    if request not in self._tokens:
      tokens = np.zeros(request.last, np.int32)
      tokens[: request.prompt] = prompt_tokens(request, self._vocab)
      self._tokens[request] = tokens
    return self._tokens[request]

  def _empty(self, rows: int, chunks: int) -> StepRows:
    """A step of a bucket in which nothing happens, as arrays of the host."""
    int32 = functools.partial(np.zeros, dtype=np.int32)
    total = rows + self._places
    return StepRows(
      tokens=int32(total),
      positions=int32(total),
      slots=np.full(total, -1, np.int32),
      chunk_pages=int32((chunks, self._max_pages)),
      chunk_lens=int32(chunks),
      chunk_starts=int32(chunks + 1),
      decode_pages=int32((self._places, self._max_pages)),
      decode_lens=int32(self._places),
      written=int32(chunks + self._places),
    )

  def _fill(self, arrays: StepRows, step: Step, rows: int) -> None:
    """Chunk i's next token is written[i], the decode at place i's is written[chunks + i]."""
    row = 0
    for i, (request, before, n) in enumerate(step.chunks):
      self._fill_rows(arrays, request, before, row, n)
      row += n
      arrays.chunk_pages[i, : len(request.pages)] = request.pages
      arrays.chunk_lens[i] = before + n
      arrays.chunk_starts[i + 1 :] = row
      arrays.written[i] = row - 1
    first = len(arrays.written) - self._places
    for place, request in enumerate(step.decodes):
      self._fill_rows(arrays, request, request.computed, rows + place, 1)
      arrays.decode_pages[place, : len(request.pages)] = request.pages
      arrays.decode_lens[place] = request.computed + 1
      arrays.written[first + place] = rows + place

  def _fill_rows(self, arrays: StepRows, request: Request, before: int, row: int, n: int) -> None:
    positions = np.arange(before, before + n)
    pages = np.asarray(request.pages)[positions // self._page_size]
    arrays.tokens[row : row + n] = self.tokens_of(request)[before : before + n]
    arrays.positions[row : row + n] = positions
    arrays.slots[row : row + n] = pages * self._page_size + positions % self._page_size

  def _compute(self, run, arrays: StepRows) -> tuple[np.ndarray, np.ndarray]:
    tokens, logits, self.caches = run(self.weights, self.caches, self._rope, arrays)
    return np.asarray(tokens), np.asarray(logits)

  def _keep(self, step: Step, chunks: int, tokens: np.ndarray, logits: np.ndarray) -> None:
    """Puts the tokens that were written behind those that are known."""
    written = [
      (request, i)
      for i, (request, before, n) in enumerate(step.chunks)
      if before + n == request.tokens
    ]
    written += [(request, chunks + place) for place, request in enumerate(step.decodes)]
    for request, i in written:
      if self.logits is not None:
        self.logits.setdefault(request, []).append(float(logits[i]))
      if request.tokens + 1 == request.last and self.logits is None:
        del self._tokens[request]  # it is done
      else:
        self.tokens_of(request)[request.tokens] = tokens[i]


def row_buckets(budget: int) -> tuple[int, ...]:
  """Doubling up to the budget."""
  rows = [budget]
  while rows[-1] > LEAST_ROWS:
    rows.append(-(-rows[-1] // 2))
  return tuple(sorted(rows))


def _at_least(buckets: Sequence[int], count: int) -> int:
  return next(bucket for bucket in buckets if bucket >= count)


def prompt_tokens(request: Request, vocab: int) -> np.ndarray:
  """int32 [prompt], of the request's hash ids; without any, of its index."""
  of = lambda *seed: np.random.default_rng(seed).integers(vocab, size=HASHED_TOKENS)
  ids = request.item.hash_ids
  blocks = -(-request.prompt // HASHED_TOKENS)
  parts = [of(0, ids[i]) if ids else of(1, request.index, i) for i in range(blocks)]
  return np.concatenate(parts)[: request.prompt].astype(np.int32)
