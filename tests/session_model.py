"""What a serving session's cache must hold, from the tokens of its sequences alone."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

import nvfp4_pallas as nv
from nvfp4_pallas.cache import pool_arrays, with_arrays
from tests import stored_rows
from tests.session import NUM_PAGES, PAGE, PLACES, Session

HEADS, GROUP, K_DIM, V_DIM = 2, 2, 64, 80
WORDS = 40  # different tokens
RINGS = (1, -1, 2, 0)  # of places, where there are rings


@dataclasses.dataclass(frozen=True)
class Kind:
  """A kind of cache; with `levers` both are rotated, and K is without a mean."""

  k_format: str
  v_format: str
  window: int = 0
  search: str = "amax"
  levers: bool = False

  @property
  def read_path(self) -> str:
    if "nvfp4" in (self.k_format, self.v_format):
      return "nvfp4_dequant"
    return self.k_format

  def session(self, seen) -> Session:
    rings = RINGS if self.window else (-1,) * PLACES
    return Session(self.cache(), self.rows(), rings, seen)

  def cache(self) -> nv.PagedKVCache:
    scales = {"k": jnp.asarray([0.7, 1.6]), "v": jnp.asarray([1.1, 0.4])}
    formats = {"k": self.k_format, "v": self.v_format}
    options: dict[str, Any] = {f"{n}_global_scale": scales[n] for n in "kv" if formats[n] != "bf16"}
    if self.levers:
      mean = stored_rows.mean_of(np.random.default_rng(1), (HEADS, K_DIM))
      options |= {"k_rotation": "hadamard", "v_rotation": "hadamard", "k_mean": jnp.asarray(mean)}
    return nv.PagedKVCache.create(
      num_pages=NUM_PAGES,
      page_size=PAGE,
      num_kv_heads=HEADS,
      head_dim=K_DIM,
      v_head_dim=V_DIM,
      k_format=self.k_format,
      v_format=self.v_format,
      scale_search=self.search,
      recent_window=self.window,
      num_rings=sum(ring >= 0 for ring in RINGS) if self.window else None,
      **options,
    )

  @functools.cache  # noqa: B019 - kinds are few, and rounding their rows takes a while
  def rows(self) -> tuple[stored_rows.StoredRows, stored_rows.StoredRows]:
    """K and V of each token, of all sizes, some blocks of them zeros."""
    r, cache = np.random.default_rng(0), self.cache()

    def draw(pool):
      shape = WORDS, HEADS, pool.head_dim
      if self.levers:
        x = stored_rows.whole(r, shape)
      else:
        x = r.standard_normal(shape) * 2.0 ** r.integers(-3, 3, (WORDS, 1, 1))
      x[0], x[1, :, :16] = 0, -0.0
      return stored_rows.make(pool, x)

    return draw(cache.k), draw(cache.v)


def check_contents(session: Session, model: dict[int, list[int]], keys) -> None:
  """Raises AssertionError unless every byte is there, of sequences and of full pages.

  Args:
    model: the tokens of each place.
    keys: tokens up to the end of a page, of every page that was ever full.
  """
  assert session.sequences.keys() == model.keys()
  for place, tokens in model.items():
    sequence = session.sequences[place]
    assert sequence.tokens == tokens, f"place {place}"
    _check_pages(session, sequence.pages, tokens[: sequence.paged], f"place {place}")
    if session.has_ring(place):
      _check_ring(session, place, tokens)
  for key in keys:
    for page in session.pool.find([key]):
      _check_pages(session, [page], key[-PAGE:], f"page {page}")


def _check_pages(session: Session, pages: list[int], tokens, name: str) -> None:
  for pool, rows in zip((session.cache.k, session.cache.v), session.rows, strict=True):
    for array, stored in zip(pool_arrays(pool), rows.stored, strict=True):
      got = stored_rows.of_pages(array, pages, len(tokens))
      np.testing.assert_array_equal(got, stored[np.asarray(tokens, int)], name)


def _check_ring(session: Session, place: int, tokens: list[int]) -> None:
  recent, ring = session.cache.recent, session.rings[place]
  assert recent is not None
  start = session.sequences[place].paged
  assert np.asarray(recent.starts)[ring] == start, f"ring {ring}"
  where = ring_rows(session, place, np.arange(start, len(tokens)))
  for pool, rows in zip((recent.k, recent.v), session.rows, strict=True):
    got = np.asarray(pool.data)[where]
    np.testing.assert_array_equal(got, rows.kept[np.asarray(tokens[start:], int)], f"ring {ring}")


def by_hand(session: Session) -> tuple[nv.PagedKVCache, np.ndarray]:
  """A cache with the sequences in other pages, and the number there of each page here.

  Whatever no token needs is 0xFF: NaN, but for codes.
  """
  cache, pools = session.cache, {}
  moved = np.roll(np.arange(NUM_PAGES), 5)
  for name, rows in zip("kv", session.rows, strict=True):
    pool = getattr(cache, name)
    arrays = []
    for array, stored in zip(pool_arrays(pool), rows.stored, strict=True):
      raw = np.full((*array.shape[:3], stored.shape[-1]), 0xFF, np.uint8)
      for sequence in session.sequences.values():
        at = np.arange(sequence.paged)
        page = moved[np.asarray(sequence.pages, int)[at // PAGE]]
        raw[page, :, at % PAGE] = stored[np.asarray(sequence.tokens, int)[at]]
      arrays.append(jnp.asarray(raw.view(array.dtype)))
    pools[name] = with_arrays(pool, tuple(arrays))
  recent = cache.recent
  if recent is not None:
    rings, starts = {}, np.zeros(recent.num_rings, np.int32)
    for name, rows in zip("kv", session.rows, strict=True):
      data = np.full(getattr(recent, name).data.shape, np.nan, ml_dtypes.bfloat16)
      for place, sequence in session.sequences.items():
        if session.has_ring(place):
          at = np.arange(sequence.paged, len(sequence.tokens))
          data[ring_rows(session, place, at)] = rows.kept[np.asarray(sequence.tokens, int)[at]]
          starts[session.rings[place]] = sequence.paged
      rings[name] = dataclasses.replace(getattr(recent, name), data=jnp.asarray(data))
    recent = dataclasses.replace(recent, **rings, starts=jnp.asarray(starts))
  return dataclasses.replace(cache, **pools, recent=recent), moved


def ring_rows(session: Session, place: int, at: np.ndarray) -> tuple:
  """The index of tokens `at` of a sequence in its ring's arrays."""
  recent = session.cache.recent
  assert recent is not None
  page = session.rings[place] * recent.ring_pages + at // PAGE % recent.ring_pages
  return page, slice(None), at % PAGE
