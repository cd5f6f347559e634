"""Continuous batching over a paged cache: which tokens a step computes, and on which pages.

A step has one budget of tokens. Who runs comes first, in the order in which they started: one token
each that decodes, up to a chunk of what is left where a prompt is still read. Then waiting requests
start, first come first served, unless somebody had to give way in this step. Pages are taken for
the tokens of the step alone. Who gives way (serve_policies.py) loses its pages and waits at the
head of the queue: it will read its prompt and what it wrote again, unless its pages are still found
in the prefix cache.

The scheduler neither knows what a token is nor how long a step takes. The simulator and the live
engine drive it in the same way, and therefore see the same decisions.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator

from benchmarks.serve_pages import PagePool
from benchmarks.serve_policies import Policy, Vllm
from benchmarks.serve_workloads import HASHED_TOKENS, Item

_MOST_PAGES = 2**32  # of a request, for keys that no other request has


class Request:
  """An item on its way.

  Attributes:
    index: of the workload.
    item: what was asked for.
    prompt: tokens of it.
    last: tokens when all are written.
    tokens: those that are known, prompt and written: all are computed before the next is written.
    computed: tokens whose keys and values are in the cache.
    pages: those it holds, in the order of its tokens.
    furthest: the most tokens that were computed when it gave way.
    cached: prompt tokens found in the cache when it first started; None: it has not.
    preemptions: how often it gave way.
  """

  __slots__ = (
    *("index", "item", "prompt", "last", "tokens", "computed", "pages", "furthest", "cached"),
    "preemptions",
  )

  def __init__(self, index: int, item: Item):
    self.index, self.item = index, item
    self.prompt = self.tokens = item.prompt
    self.last = item.prompt + item.output
    self.computed = self.furthest = self.preemptions = 0
    self.pages: list[int] = []
    self.cached: int | None = None

  @property
  def generated(self) -> int:
    return self.tokens - self.prompt

  @property
  def to_write(self) -> int:
    return self.last - self.tokens


@dataclasses.dataclass
class Step:
  """What is computed together.

  Attributes:
    decodes: requests of which one token is computed, and all before it are.
    chunks: (request, tokens before, tokens now) of all others.
    context: tokens that decodes read, their own included.
    started: requests that began to run, or began again.
    preempted: who gave way.
    filled: pages that become full, while the step is made.
  """

  decodes: list[Request] = dataclasses.field(default_factory=list)
  chunks: list[tuple[Request, int, int]] = dataclasses.field(default_factory=list)
  context: int = 0
  started: list[Request] = dataclasses.field(default_factory=list)
  preempted: list[Request] = dataclasses.field(default_factory=list)
  filled: list[tuple[Request, range]] = dataclasses.field(default_factory=list)

  @property
  def chunk_tokens(self) -> int:
    return sum(n for _, _, n in self.chunks)

  @property
  def tokens(self) -> int:
    return len(self.decodes) + self.chunk_tokens

  def decision(self) -> tuple:
    """All that was decided, as data to compare."""
    return (
      tuple(r.index for r in self.decodes),
      tuple((r.index, before, n) for r, before, n in self.chunks),
      tuple(r.index for r in self.preempted),
    )


class TooLarge(ValueError):
  """A request that no pool of this size can hold, whatever else runs."""


class Scheduler:
  """See the module.

  Attributes:
    pool: the pages.
    page_size: tokens of one, a divisor of the 512 that a hash id stands for.
    budget: tokens of a step.
    most_running: requests that may run at a time.
    most_chunks: requests that may read their prompt in one step; None: as many as there are.
    policy: of serve_policies.py.
    running, waiting: requests, the first to be served first.
    preemptions: how often somebody gave way.
    short_steps: steps in which somebody gave way, or did not start, for want of pages.
    recomputed: tokens that were computed before and are again.
    queries, hits: tokens asked for in the prefix cache, and found, when requests first start.
  """

  def __init__(
    self,
    pool: PagePool,
    page_size: int,
    *,
    budget: int = 8192,
    most_running: int = 256,
    most_chunks: int | None = None,
    policy: Policy | None = None,
  ):
    limits = {"budget": budget, "most_running": most_running, "most_chunks": most_chunks}
    for name, value in limits.items():
      if value is not None and value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    if page_size < 1 or HASHED_TOKENS % page_size:
      raise ValueError(f"page_size must divide {HASHED_TOKENS}, got {page_size}")
    self.pool, self.page_size = pool, page_size
    self.budget, self.most_running, self.most_chunks = budget, most_running, most_chunks
    self.policy = Vllm() if policy is None else policy
    self.running: list[Request] = []
    self.waiting: deque[Request] = deque()
    self.preemptions = self.short_steps = self.recomputed = self.queries = self.hits = 0

  def pages(self, tokens: int) -> int:
    """Pages of so many tokens."""
    return -(-tokens // self.page_size)

  def most_pages(self, request: Request) -> int:
    """Pages that a request holds at its end: the last token that it writes is never read."""
    return self.pages(request.last - 1)

  def add(self, request: Request) -> None:
    """Puts a request at the end of the queue.

    Raises:
      TooLarge: the pool cannot hold it (the message has both sizes).
    """
    needed = self.most_pages(request)
    if needed > self.pool.num_pages:
      raise TooLarge(
        f"request {request.index} needs {needed:,} pages of {self.page_size} tokens for "
        f"{request.prompt:,} prompt and {request.to_write:,} output tokens, "
        f"the pool has {self.pool.num_pages:,}"
      )
    self.waiting.append(request)

  def schedule(self) -> Step:
    """The next step. Its tokens count as computed from `complete` on; their pages are taken now."""
    step = Step()
    left = self._continue_running(step)
    # Nobody starts where somebody gave way.
    if step.preempted or not self._start_waiting(step, left):
      self.short_steps += 1
    self.policy.stepped()
    return step

  def complete(self, step: Step) -> tuple[list[Request], list[Request]]:
    """The step has been computed: who wrote a token, and who of them is done."""
    wrote, done = step.decodes.copy(), []
    for request in step.decodes:
      request.computed += 1
      request.tokens += 1
      if request.tokens == request.last:
        done.append(request)
    for request, before, n in step.chunks:
      request.computed = before + n
      self.recomputed += max(0, min(request.computed, request.furthest) - before)
      if request.computed == request.tokens:
        wrote.append(request)
        request.tokens += 1
        if request.tokens == request.last:
          done.append(request)
    for request in done:
      self.pool.give_back(request.pages)
      request.pages = []
    if done:
      gone = set(done)
      self.running = [r for r in self.running if r not in gone]
    return wrote, done

  def _continue_running(self, step: Step) -> int:
    """Adds tokens of those that run; returns what is left of the budget."""
    left, size, running = self.budget, self.page_size, self.running
    add, context, place = step.decodes.append, 0, 0
    while place < len(running) and left:
      request = running[place]
      before = request.computed
      missing = request.tokens - before
      if missing == 1 and 0 < before % size < size - 1:
        # Most of all work: one token, on a page that is there and does not become full.
        add(request)
        context += before + 1
        left -= 1
        place += 1
        continue
      n = min(missing, left)
      needed = self.pages(before + n) - len(request.pages)
      if needed > self.pool.free:
        left += self._give_way(step, request, needed)
        # All before this place are in the step, in the same order, but for those that left.
        place = len(step.decodes) + len(step.chunks)
        continue
      self._take(step, request, before, n, needed)
      left -= n
      place += 1
    step.context += context
    self._name(step)
    return left

  def _take(self, step: Step, request: Request, before: int, n: int, needed: int) -> None:
    """Adds a request's next n tokens, for which it needs so many pages."""
    after = before + n
    if needed:
      request.pages += self.pool.take(needed)
    if n == 1 and before and after == request.tokens:
      step.decodes.append(request)
      step.context += after
    else:
      step.chunks.append((request, before, n))
    full = range(before // self.page_size, after // self.page_size)
    if full and self.pool.prefix_cache:
      step.filled.append((request, full))

  def _name(self, step: Step) -> None:
    """Lets pages be found that this step fills: who starts in it can share them already, since
    keys and values are written before anything is attended to."""
    for request, full in step.filled:
      for page in full:
        self.pool.name(request.pages[page], self._key(request, page))
    step.filled.clear()

  def _give_way(self, step: Step, request: Request, needed: int) -> int:
    """Makes room for `request`, or makes it stop; returns tokens that are not computed then."""
    freed = 0
    while request in self.running and needed > self.pool.free:
      for one in self.policy.give_way(self, needed):
        freed += self._preempt(step, one)
    return freed

  def _preempt(self, step: Step, request: Request) -> int:
    self.running.remove(request)
    tokens = 0
    if request in step.decodes:
      step.decodes.remove(request)
      step.context -= request.computed + 1
      tokens = 1
    for chunk in [chunk for chunk in step.chunks if chunk[0] is request]:
      step.chunks.remove(chunk)
      tokens = chunk[2]
    step.filled = [(r, full) for r, full in step.filled if r is not request]
    self.pool.give_back(request.pages)
    request.pages = []
    request.furthest = max(request.furthest, request.computed)
    request.computed = 0
    request.preemptions += 1
    self.preemptions += 1
    self.waiting.appendleft(request)
    step.preempted.append(request)
    return tokens

  def _start_waiting(self, step: Step, left: int) -> bool:
    """Starts who can; whether pages sufficed."""
    while self.waiting and left and len(self.running) < self.most_running:
      if self.most_chunks is not None and len(step.chunks) >= self.most_chunks:
        return True
      request = self.waiting[0]
      # The last token is computed always: its result is the next token.
      most = (request.tokens - 1) // self.page_size
      found = self.pool.find(self._keys(request, most)) if self.pool.prefix_cache else []
      cached = len(found) * self.page_size
      n = min(request.tokens - cached, left)
      idle = self.pool.waiting(found)
      first, whole = (
        self.pages(tokens) - len(found) + idle for tokens in (cached + n, request.tokens)
      )
      if first > self.pool.free or not self.policy.starts(self, request, first, whole):
        return False
      self.waiting.popleft()
      self.running.append(request)
      self.pool.hold(found)
      request.pages, request.computed = found, cached
      self._take(step, request, cached, n, self.pages(cached + n) - len(found))
      self._name(step)
      step.started.append(request)
      left -= n
      if request.cached is None:
        request.cached = cached
        self.queries += request.tokens
        self.hits += cached
    return True

  def _keys(self, request: Request, pages: int) -> Iterator[int]:
    return (self._key(request, page) for page in range(pages))

  def _key(self, request: Request, page: int) -> int:
    """What a full page of the request holds, with all before it: parts of hashed blocks where the
    prompt is hashed, else something that nobody else has."""
    if request.item.hash_ids and (page + 1) * self.page_size <= request.prompt:
      per = HASHED_TOKENS // self.page_size
      return request.item.hash_ids[page // per] * per + page % per
    return -1 - (request.index * _MOST_PAGES + page)
