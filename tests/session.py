"""A small serving engine over the package's functions, as a user would write one.

Tokens are numbers of rows: a token's K and V are the same wherever it stands, so that what pages
should hold can be said without a model. Sequences live in places of a batch; a place may have a
ring. All steps have the same shapes, so that each function compiles once for a kind of cache.
"""

from __future__ import annotations

import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import nvfp4_pallas as nv
from benchmarks.serve_pages import PagePool
from nvfp4_pallas import checkpoint
from tests.stored_rows import StoredRows

PAGE, MAX_PAGES, PLACES = 16, 4, 4
NUM_PAGES = 12  # fewer than all places can fill
LONGEST = PAGE * MAX_PAGES
NO_PAGE = 2**30

append = jax.jit(functools.partial(nv.append, implementation="xla"), donate_argnums=0)
copy_pages = jax.jit(nv.copy_pages, donate_argnums=0)
copy_rings = jax.jit(nv.copy_rings, donate_argnums=0)
open_rings = jax.jit(nv.open_rings, donate_argnums=0)


@dataclasses.dataclass
class Sequence:
  """
  Attributes:
    tokens: all of them.
    pages: that its tokens have or will have.
    paged: how many tokens, the oldest, are in the pages; the others are in the ring.
    longest: the most tokens it ever had.
  """

  tokens: list[int]
  pages: list[int]
  paged: int
  longest: int = 0


@dataclasses.dataclass(frozen=True)
class Preempted:
  """A sequence without pages: what each of them held, on the host."""

  tokens: list[int]
  paged: int
  host: list[dict[str, np.ndarray]]


class Session:
  """
  Attributes:
    cache: with a recent window or not.
    rings: of each place, or -1.
    pool: who holds which pages, and what full ones hold for those who come later.
    sequences: by place.
    seen: how often things happened, by name.
  """

  def __init__(self, cache: nv.PagedKVCache, rows: tuple[StoredRows, StoredRows], rings, seen):
    self.cache, self.rows, self.rings, self.seen = cache, rows, list(rings), seen
    self.pool = PagePool(NUM_PAGES)
    self.sequences: dict[int, Sequence] = {}

  @property
  def free_places(self) -> list[int]:
    return [place for place in range(PLACES) if place not in self.sequences]

  def has_ring(self, place: int) -> bool:
    return self.rings[place] >= 0

  def batch(self, q_lens: np.ndarray) -> nv.RaggedBatch:
    """All places; those without a sequence are free."""
    table, lens = np.full((PLACES, MAX_PAGES), NO_PAGE), np.zeros(PLACES, int)
    for place, sequence in self.sequences.items():
      table[place, : len(sequence.pages)] = sequence.pages
      lens[place] = len(sequence.tokens)
    rings = None if self.cache.recent is None else _int32(self.rings)
    return nv.RaggedBatch(_int32(table), _int32(lens), _int32(np.cumsum([0, *q_lens])), rings)

  def admit(self, place: int, tokens: list[int]) -> bool:
    """Begins with the pages that others left or hold; whether there was room."""
    most = (len(tokens) - 1) // PAGE  # one token at least is computed
    found = self.pool.find(tuple(tokens[: PAGE * (i + 1)]) for i in range(most))
    self.seen["prefix found"] += len(found)
    self.seen["prefix found in waiting pages"] += self.pool.waiting(found)
    return self._begin(place, tokens, found, len(found) * PAGE)

  def fork(self, source: int, place: int) -> bool:
    """A second sequence with the same tokens, over the same pages."""
    old = self.sequences[source]
    alike = self.has_ring(source) == self.has_ring(place)
    kept = old.paged if alike else old.paged // PAGE * PAGE
    shared = old.pages if alike else old.pages[: kept // PAGE]
    if not alike or not self.has_ring(source):
      return self._begin(place, old.tokens, shared, kept)
    self.pool.hold(shared)
    self.sequences[place] = dataclasses.replace(old, tokens=list(old.tokens), pages=list(old.pages))
    self.cache = copy_rings(self.cache, *(_int32([self.rings[p]]) for p in (source, place)))
    return True

  def step(self, new: dict[int, list[int]]) -> bool:
    """Appends tokens to some sequences in one call; whether there were pages for them."""
    if not self._make_room(new):
      return False
    q_lens = np.zeros(PLACES, int)
    for place, tokens in new.items():
      q_lens[place] = len(tokens)
      self.sequences[place].tokens += tokens
    order = [token for place in sorted(new) for token in new[place]]
    order += [0] * (LONGEST - len(order))  # padding; a step is no longer than a sequence
    k, v = (rows.values[np.asarray(order)] for rows in self.rows)
    self.cache = append(self.cache, k, v, self.batch(q_lens))
    for place in new:
      self._grown(place)
    return True

  def roll_back(self, place: int, count: int) -> int:
    """Gives `count` of the newest tokens up, or as many as it can; how many are left."""
    sequence = self.sequences[place]
    least = max(sequence.paged // PAGE * PAGE, 1)  # full pages may be others' by now
    if self.has_ring(place):
      assert self.cache.recent is not None
      least = max(least, sequence.longest - self.cache.recent.tokens)
    kept = max(len(sequence.tokens) - count, least)
    del sequence.tokens[kept:]
    if not self.has_ring(place):
      sequence.paged = kept
    pages = -(-kept // PAGE)
    self.pool.give_back(sequence.pages[pages:])
    del sequence.pages[pages:]
    return kept

  def free(self, place: int) -> None:
    self.pool.give_back(self.sequences.pop(place).pages)

  def preempt(self, place: int) -> Preempted:
    sequence = self.sequences[place]
    pages = sequence.pages[: -(-sequence.paged // PAGE)]
    host = [checkpoint.fetch_pages(self.cache, [page]) for page in pages]
    self.free(place)
    return Preempted(sequence.tokens, sequence.paged, host)

  def resume(self, place: int, old: Preempted) -> bool:
    """In any place: what was in the pages comes from the host, the rest is appended again."""
    kept = old.paged // PAGE * PAGE if self.has_ring(place) else old.paged
    count = -(-kept // PAGE)
    if count > self.pool.free:
      return False
    pages = self.pool.take(count)
    for page, host in zip(pages, old.host, strict=False):
      self.cache = checkpoint.restore_pages(self.cache, [page], host)
    room = self._begin(place, old.tokens, pages, kept)
    self.pool.give_back(pages)  # the sequence holds them too, if there was room
    return room

  def save(self, path) -> tuple:
    """Writes the cache to a file; what the host knows is returned."""
    checkpoint.save(self.cache, path)
    return copy.deepcopy((self.pool, self.sequences))

  def restore(self, path, known: tuple) -> None:
    self.cache = checkpoint.restore(path)
    self.pool, self.sequences = copy.deepcopy(known)

  def _begin(self, place: int, tokens: list[int], pages: list[int], kept: int) -> bool:
    """A sequence whose first `kept` tokens are in `pages` already."""
    self.pool.hold(pages)
    self.sequences[place] = Sequence(list(tokens[:kept]), list(pages), kept, kept)
    if self.has_ring(place) and kept:
      self.cache = open_rings(self.cache, _int32([self.rings[place]]), _int32([kept]))
    if kept == len(tokens) or self.step({place: list(tokens[kept:])}):
      return True
    self.free(place)
    return False

  def _make_room(self, new: dict[int, list[int]]) -> bool:
    """Pages for tokens to come: more of them, and own ones in place of shared ones."""
    wanted = []  # place, index
    for place, tokens in new.items():
      sequence = self.sequences[place]
      end = -(-(len(sequence.tokens) + len(tokens)) // PAGE)
      for index in range(sequence.paged // PAGE, end):
        shared = index < len(sequence.pages) and not self.pool.held_once([sequence.pages[index]])
        if shared or index >= len(sequence.pages):
          wanted.append((place, index))
    if len(wanted) > self.pool.free:
      self.seen["no room"] += 1
      return False
    source, target = [np.full(NUM_PAGES, -1) for _ in range(2)]
    for i, ((place, index), page) in enumerate(
      zip(wanted, self.pool.take(len(wanted)), strict=True)
    ):
      pages = self.sequences[place].pages
      if index < len(pages):
        self.seen["copy on write"] += 1
        source[i], target[i] = pages[index], page
        self.pool.give_back([pages[index]])
        pages[index] = page
      else:
        pages.append(page)
    if (source >= 0).any():
      self.cache = copy_pages(self.cache, _int32(source), _int32(target))
    return True

  def _grown(self, place: int) -> None:
    """What moved into the pages, and is there for others from now on."""
    sequence = self.sequences[place]
    sequence.longest = max(sequence.longest, len(sequence.tokens))
    outside = len(sequence.tokens)
    if self.has_ring(place):
      assert self.cache.recent is not None
      outside = max(outside - self.cache.recent.tokens, 0) // PAGE * PAGE
    sequence.paged = max(sequence.paged, outside)
    for index in range(sequence.paged // PAGE):
      self.pool.name(sequence.pages[index], tuple(sequence.tokens[: PAGE * (index + 1)]))


def _int32(values) -> jax.Array:
  return jnp.asarray(np.asarray(values), jnp.int32)
