"""The live engine: computes the scheduler's steps with a real decoder over real caches.

Every step runs as one compiled function of its bucket: room for so many prompt tokens of so many
requests, and for all decoding places. `warm_up` compiles them all, a few at a time; from then on
nothing is traced again, and `traces` says so. A step's time is the host's clock from making its
arrays until its tokens are back on the host: nothing overlaps.

Prompts are made of what their hash ids say, 512 tokens each, so that requests that share ids share
tokens, and a page that is found again holds what the request would have computed.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

import nvfp4_pallas as nv
from benchmarks import llama, program
from benchmarks.serve_costs import Times
from benchmarks.serve_decoder import Reading, StepRows, Weights, step
from benchmarks.serve_model import Measured
from benchmarks.serve_scheduler import Request, Step
from benchmarks.serve_workloads import HASHED_TOKENS, Item

LEAST_ROWS = 128  # of a bucket that reads
GROWTH = 4  # of a bucket over the next smaller one: each costs seconds to compile, for each format
TIMED = 9  # steps of a bucket without attention
# XLA would otherwise try dozens of kernels for each product of each bucket, for minutes.
COMPILER_OPTIONS = {"xla_gpu_enable_triton_gemm": False}
_NOBODY = 2**31  # and on: numbers of requests that are in no workload


@dataclasses.dataclass
class PageRow:
  """A request's row of a page table, kept from step to step.

  Attributes:
    source: the request's list; another one since it began again.
    row: int32 [max_pages].
    known: pages of `source` that are in it.
  """

  source: list[int]
  row: np.ndarray
  known: int = 0

  def now(self) -> np.ndarray:
    if self.known < len(self.source):
      self.row[self.known : len(self.source)] = self.source[self.known :]
      self.known = len(self.source)
    return self.row


class Engine:
  """See the module.

  Attributes:
    caches: of every layer; replaced by every step.
    traces: how often a step was traced; `programs` is how many were compiled.
    kernels: names of those that steps launch, beside XLA's own.
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
    compilers: int = 1,
    keep_logits: bool = False,
  ):
    """
    Args:
      context: tokens of the longest request, prompt and output.
      budget, places, most_chunks: of the scheduler: tokens of a step, requests that run, and
        requests that read in one step.
      compilers: steps that are compiled at a time.
    """
    self.weights, self.config, self.caches, self._how = weights, config, caches, how
    self._page_size = caches[0].page_size
    self._max_pages = -(-context // self._page_size)
    self._places, self._vocab = places, weights.embedding.shape[0]
    self.rows = row_buckets(budget)
    self.chunks = (1, most_chunks) if most_chunks > 1 else (1,)
    self._rope = llama.rope_table(config, context)
    self._context, self._compilers = context, compilers
    self._tokens: dict[Request, np.ndarray] = {}
    self._page_rows: dict[Request, PageRow] = {}
    self.traces = 0
    self.kernels: set[str] = set()
    self.logits: dict[Request, list[float]] | None = {} if keep_logits else None
    self._run = self._jit(self._traced)

  def _traced(self, weights, caches, rope, rows):
    self.traces += 1
    return step(weights, caches, rope, rows, config=self.config, how=self._how)

  def _jit(self, function: Any) -> Any:
    return jax.jit(function, donate_argnums=1, compiler_options=COMPILER_OPTIONS)

  def buckets(self) -> Iterator[tuple[int, int]]:
    """(rows, chunks) of every step there can be: one that only decodes is (0, 0)."""
    yield 0, 0
    yield from itertools.product(self.rows, self.chunks)

  def bucket(self, tokens: int, chunks: int) -> tuple[int, int]:
    """Of a step that reads so many tokens of so many requests."""
    if not chunks:
      return 0, 0
    return _at_least(self.rows, tokens), _at_least(self.chunks, chunks)

  @property
  def programs(self) -> int:
    return self._run._cache_size()  # JAX has no public name for it

  def warm_up(self) -> None:
    """Compiles every bucket, then takes a step of each that touches no page."""
    self.kernels |= self._compile(self._run, self.buckets())
    for bucket in self.buckets():
      self._compute(self._run, self._empty(*bucket))

  def _compile(self, run: Any, buckets: Iterator[tuple[int, int]]) -> set[str]:
    """Fills the cache of a jitted function; returns what it launches."""
    given = self.weights, self.caches, self._rope
    lowered = [run.lower(*given, self._empty(*bucket)) for bucket in buckets]
    with concurrent.futures.ThreadPoolExecutor(self._compilers) as pool:
      list(pool.map(lambda one: one.compile(), lowered))
    names = {name for one in lowered for name in program.operands(one.as_text())}
    return names - {program.XLA_ALONE}

  def model_costs(self, decodes: int) -> Measured:
    """Times every number of rows without attention and appends: what all formats share. The host's
    part is in it, with so many requests that decode."""
    how = dataclasses.replace(self._how, attends=False)
    run = self._jit(functools.partial(step, config=self.config, how=how))
    self._compile(run, ((rows, min(rows, 1)) for rows in (0, *self.rows)))
    prompt = max(self._context - 2, 1)
    requests = [Request(_NOBODY + i, Item(0.0, prompt, 2)) for i in range(decodes)]
    for request in requests:
      request.computed, request.pages = prompt - 1, [0] * self._max_pages
    only_decodes, times = Step(decodes=requests), []
    for rows in (0, *self.rows):
      spent = [self._take(run, only_decodes, rows, min(rows, 1)) for _ in range(1 + TIMED)]
      times.append(statistics.median(spent[1:]))
    return Measured((0, *self.rows), tuple(times))

  def execute(self, step: Step) -> Times:
    return Times(
      other=self._take(self._run, step, *self.bucket(step.chunk_tokens, len(step.chunks)))
    )

  def _take(self, run: Any, step: Step, rows: int, chunks: int) -> float:
    """Takes a step; returns its seconds."""
    start = time.perf_counter()
    arrays = self._empty(rows, chunks)
    self._fill(arrays, step, rows)
    tokens, logits = self._compute(run, arrays)
    self._keep(step, chunks, tokens, logits)
    return time.perf_counter() - start

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
      arrays.chunk_pages[i] = self._pages_of(request)
      positions = np.arange(before, before + n)
      arrays.tokens[row : row + n] = self.tokens_of(request)[before : before + n]
      arrays.positions[row : row + n] = positions
      row += n
      arrays.chunk_lens[i] = before + n
      arrays.chunk_starts[i + 1 :] = row
      arrays.written[i] = row - 1
    first = len(arrays.written) - self._places
    for place, request in enumerate(step.decodes):
      at, position = rows + place, request.computed
      arrays.decode_pages[place] = self._pages_of(request)
      arrays.tokens[at] = self.tokens_of(request)[position]
      arrays.positions[at] = position
      arrays.decode_lens[place] = position + 1
      arrays.written[first + place] = at

  def _pages_of(self, request: Request) -> np.ndarray:
    kept = self._page_rows.get(request)
    if kept is None or kept.source is not request.pages:
      kept = PageRow(request.pages, np.zeros(self._max_pages, np.int32))
      self._page_rows[request] = kept
    return kept.now()

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
      done = request.tokens + 1 == request.last
      if done:
        del self._page_rows[request]
      if done and self.logits is None:
        del self._tokens[request]
      else:
        self.tokens_of(request)[request.tokens] = tokens[i]


def row_buckets(budget: int) -> tuple[int, ...]:
  """Up to the budget, each GROWTH times the one before; none below LEAST_ROWS but a budget is."""
  rows = [budget]
  while rows[-1] >= GROWTH * LEAST_ROWS:
    rows.append(-(-rows[-1] // GROWTH))
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
