"""Pages of one cache in a serving run: who holds them, and what they still hold for others.

A page is held by as many requests as share it. A full page has a key, which stands for its tokens
and all before them (a chained hash), so that equal keys mean equal keys and values. When nobody
holds a page it waits, key and all, at the end of a queue, and is found again until it is needed
for something else: the page that has waited longest goes first. As in vLLM a request gives its
pages back last page first, so that the beginnings of prompts stay longest.

Nothing here knows a format: fewer bytes a token are more pages, and that is all.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class PagePool:
  """`num_pages` pages.

  Attributes:
    num_pages: of the pool.
    prefix_cache: False: no page is found again.
    evictions: pages whose key was forgotten because the page was needed.
  """

  def __init__(self, num_pages: int, *, prefix_cache: bool = True):
    if num_pages < 1:
      raise ValueError(f"num_pages must be at least 1, got {num_pages}")
    self.num_pages, self.prefix_cache = num_pages, prefix_cache
    self.evictions = 0
    # Pages from `_unused` on were never held: a pool that is far too large costs nothing.
    self._unused = 0
    self._waiting: OrderedDict[int, None] = OrderedDict()
    self._holders: list[int] = []
    self._key_of: dict[int, int] = {}
    self._page_of: dict[int, int] = {}

  @property
  def free(self) -> int:
    """Pages that nobody holds."""
    return self.num_pages - self._unused + len(self._waiting)

  @property
  def usage(self) -> float:
    """The share of pages that somebody holds."""
    return 1 - self.free / self.num_pages

  def find(self, keys: Iterable[int]) -> list[int]:
    """The pages of the first keys, up to the first one that no page has."""
    found = []
    for key in keys:
      page = self._page_of.get(key)
      if page is None:
        break
      found.append(page)
    return found

  def waiting(self, pages: Sequence[int]) -> int:
    """How many of them nobody holds, so that holding them leaves fewer free."""
    holders = self._holders
    return sum(not holders[page] for page in pages)

  def held_once(self, pages: Sequence[int]) -> int:
    """How many of them only one request holds, so that more are free when it gives them back."""
    holders = self._holders
    return sum(holders[page] == 1 for page in pages)

  def hold(self, pages: Sequence[int]) -> None:
    """One holder more of pages that were found."""
    for page in pages:
      if not self._holders[page]:
        del self._waiting[page]
      self._holders[page] += 1

  def take(self, count: int) -> list[int]:
    """Pages for new tokens, held once.

    Raises:
      ValueError: fewer are free; ask first.
    """
    if count > self.free:
      raise ValueError(f"count must be at most the {self.free} free pages, got {count}")
    new = min(count, self.num_pages - self._unused)
    pages = list(range(self._unused, self._unused + new))
    self._unused += new
    self._holders += [1] * new
    for _ in range(count - new):
      page, _ = self._waiting.popitem(last=False)
      key = self._key_of.pop(page, None)
      if key is not None:
        del self._page_of[key]
        self.evictions += 1
      self._holders[page] = 1
      pages.append(page)
    return pages

  def name(self, page: int, key: int) -> None:
    """Says what a held page holds, now that it is full. The first page of a key stays its page."""
    if self.prefix_cache and key not in self._page_of:
      self._page_of[key] = page
      self._key_of[page] = key

  def give_back(self, pages: Sequence[int]) -> None:
    """One holder less of a request's pages, given in the order of its tokens."""
    holders, waiting = self._holders, self._waiting
    for page in reversed(pages):
      holders[page] -= 1
      if not holders[page]:
        waiting[page] = None

  def check(self, held: Iterable[Sequence[int]]) -> None:
    """Raises AssertionError unless `held`, the pages of every request, are all that is held."""
    count = Counter(page for pages in held for page in pages)
    holders = {page: n for page, n in enumerate(self._holders) if n}
    assert count == holders, "pages must be held by the requests that list them"
    assert not self._waiting.keys() & count.keys(), "a held page must not wait"
    known = len(count) + len(self._waiting) + self.num_pages - self._unused
    assert known == self.num_pages, f"{self.num_pages} pages must stay so many, got {known}"
    assert all(self._key_of[page] == key for key, page in self._page_of.items())
    assert len(self._key_of) == len(self._page_of)
