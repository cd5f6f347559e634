"""Named attention shapes as data, and caches filled with everything that can go wrong.

`build` writes the bytes of a cache directly, without the package's own append: random codes of
both signs, random block scales with zeros and subnormals among them, global scales other than 1
that differ by head, pages in random order, and poison wherever nothing may be read: 0x7F scale
bytes and 0xFF data in unused pages and slots, wild page numbers in table tails.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from nvfp4_pallas import PagedKVCache, PagePool, RaggedBatch
from nvfp4_pallas.cache import RecentWindow, ring_pages

# Block scales up to 1.25: |k| up to 7.5 keeps scores in a range where softmax is not one-hot.
MAX_SCALE_BYTE = 0x3A


@dataclasses.dataclass(frozen=True)
class Case:
  """One ragged batch over one cache. `options` go to prefill as they are."""

  name: str
  q_lens: tuple[int, ...] = (1, 1, 40, 0, 8)
  kv_lens: tuple[int, ...] = (1, 70, 100, 33, 8)
  num_kv_heads: int = 2
  group: int = 4
  head_dim: int = 64
  v_head_dim: int | None = None
  page_size: int = 16
  k_format: str = "nvfp4"
  v_format: str = "nvfp4"
  options: tuple[tuple[str, object], ...] = ()

  @property
  def num_q_heads(self) -> int:
    return self.num_kv_heads * self.group


@dataclasses.dataclass(frozen=True)
class Built:
  """Concrete arrays of a case."""

  q: jnp.ndarray
  cache: PagedKVCache
  batch: RaggedBatch
  options: dict


def build(case: Case, seed: int = 0, padding_rows: int = 3) -> Built:
  r = np.random.default_rng(seed)
  pages_of = [-(-n // case.page_size) for n in case.kv_lens]
  num_pages = sum(pages_of) + 2
  order = r.permutation(num_pages)
  table = r.integers(2**20, 2**30, (len(case.kv_lens), max([1, *pages_of]) + 2))
  used = np.zeros((num_pages, case.page_size), bool)
  start = 0
  for s, (n, pages) in enumerate(zip(case.kv_lens, pages_of, strict=True)):
    table[s, :pages] = order[start : start + pages]
    positions = np.arange(n)
    used[table[s, positions // case.page_size], positions % case.page_size] = True
    start += pages
  cache = PagedKVCache(
    k=_pool(r, case, case.k_format, case.head_dim, used),
    v=_pool(r, case, case.v_format, case.v_head_dim or case.head_dim, used),
  )
  tokens = sum(case.q_lens) + padding_rows
  q = r.standard_normal((tokens, case.num_q_heads, case.head_dim))
  batch = RaggedBatch(
    jnp.asarray(table, jnp.int32),
    jnp.asarray(case.kv_lens, jnp.int32),
    jnp.asarray(np.cumsum([0, *case.q_lens]), jnp.int32),
  )
  return Built(jnp.asarray(q, jnp.bfloat16), cache, batch, dict(case.options))


def _pool(r, case: Case, format: str, head_dim: int, used: np.ndarray) -> PagePool:
  shape = (used.shape[0], case.num_kv_heads, case.page_size)
  live = used[:, None, :, None]
  scale = jnp.asarray(r.uniform(0.4, 1.7, shape[1]), jnp.float32)
  if format == "nvfp4":
    codes = r.integers(0, 256, (*shape, head_dim // 2), dtype=np.uint8)
    scales = r.integers(0, MAX_SCALE_BYTE + 1, (*shape, head_dim // 16), dtype=np.uint8)
    return PagePool(
      data=jnp.asarray(np.where(live, codes, 0xFF).astype(np.uint8)),
      block_scale=jnp.asarray(
        np.where(live, scales, 0x7F).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
      ),
      global_scale=scale,
      format=format,
    )
  values = np.where(live, r.standard_normal((*shape, head_dim)), np.nan)
  if format == "fp8":
    data = values.astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    return PagePool(jnp.asarray(data), None, scale, format)
  return PagePool(jnp.asarray(values.astype(ml_dtypes.bfloat16)), None, None, format)


def padded(built: Built, num_pages: int, max_pages: int, rows: int) -> Built:
  """The same batch in shapes that do not depend on its lengths: with more pages, a wider page
  table and more rows of q, all of them poison."""

  def pages(array):
    *shape, row = array.shape[1:]
    raw = np.full((num_pages, *shape, row * array.dtype.itemsize), 0xFF, np.uint8)
    raw = raw.view(array.dtype)
    raw[: len(array)] = array
    return jnp.asarray(raw)

  def pool(pool):
    scale = None if pool.block_scale is None else pages(pool.block_scale)
    return dataclasses.replace(pool, data=pages(pool.data), block_scale=scale)

  batch, cache = built.batch, built.cache
  table = np.full((batch.num_seqs, max_pages), 2**30, np.int32)
  table[:, : batch.max_pages] = batch.page_table
  q = np.full((rows, *built.q.shape[1:]), np.nan, built.q.dtype)
  q[: len(built.q)] = built.q
  return dataclasses.replace(
    built,
    q=jnp.asarray(q),
    cache=dataclasses.replace(cache, k=pool(cache.k), v=pool(cache.v)),
    batch=dataclasses.replace(batch, page_table=jnp.asarray(table)),
  )


def with_window(built: Built, tokens: int, *, past_only: bool = False, seed: int = 5) -> Built:
  """The same batch with its newest tokens in rings, and poison in their places in the pages.

  Every second sequence has as few tokens in its ring as it may, the others as many; the last one
  has no ring. Rings stand in random order, and hold NaN but for what is read. With `past_only`,
  this step's tokens are nowhere yet.
  """
  r = np.random.default_rng(seed)
  cache, batch = built.cache, built.batch
  page_size, num_seqs = cache.page_size, batch.num_seqs
  ends = np.array(batch.kv_lens)
  if past_only:
    ends = ends - np.diff(np.asarray(batch.cu_q_lens))
  least = np.maximum(ends - tokens, 0) // page_size * page_size
  most = np.maximum(ends - ring_pages(tokens, page_size) * page_size + page_size - 1, 0)
  most = np.minimum(most // page_size * page_size, least)
  starts = np.where(np.arange(num_seqs) % 2 == 0, least, most)
  ring_ids = r.permutation(num_seqs + 1)[:num_seqs].astype(np.int32)
  ring_ids[-1] = -1 if num_seqs % 2 else num_seqs + 7
  starts[-1] = ends[-1]
  by_ring = np.full(num_seqs + 1, 16 * page_size, np.int32)
  by_ring[ring_ids[:-1]] = starts[:-1]
  count = ring_pages(tokens, page_size)
  live = np.zeros(((num_seqs + 1) * count, page_size), bool)
  gone = np.zeros((cache.num_pages, page_size), bool)
  for s in range(num_seqs):
    token = np.arange(starts[s], np.asarray(batch.kv_lens)[s])
    gone[np.asarray(batch.page_table)[s, token // page_size], token % page_size] = True
    if s < num_seqs - 1:
      token = token[token < ends[s]]
      live[ring_ids[s] * count + token // page_size % count, token % page_size] = True

  def ring(head_dim):
    shape = (live.shape[0], cache.num_kv_heads, page_size, head_dim)
    values = np.where(live[:, None, :, None], r.standard_normal(shape), np.nan)
    return PagePool(jnp.asarray(values.astype(ml_dtypes.bfloat16)), None, None, "bf16")

  def without_newest(pool):
    if pool.block_scale is None:
      poison = jnp.asarray(jnp.nan, pool.data.dtype)
      return dataclasses.replace(pool, data=jnp.where(gone[:, None, :, None], poison, pool.data))
    scales = np.array(pool.block_scale).view(np.uint8)
    scales = np.where(gone[:, None, :, None], np.uint8(0x7F), scales)
    return dataclasses.replace(pool, block_scale=jnp.asarray(scales.view(ml_dtypes.float8_e4m3fn)))

  recent = RecentWindow(
    ring(cache.k.head_dim), ring(cache.v.head_dim), jnp.asarray(by_ring), tokens
  )
  cache = dataclasses.replace(
    cache, k=without_newest(cache.k), v=without_newest(cache.v), recent=recent
  )
  batch = dataclasses.replace(batch, ring_ids=jnp.asarray(ring_ids))
  return dataclasses.replace(built, cache=cache, batch=batch)


def decode_case(case: Case) -> Case:
  """The same lengths with one query token a sequence."""
  return dataclasses.replace(case, q_lens=(1,) * len(case.kv_lens))


MIXED = Case("mixed")
GQA = tuple(
  Case(f"gqa_{group}", q_lens=(3, 1), kv_lens=(20, 37), num_kv_heads=heads, group=group)
  for heads, group in ((3, 1), (1, 2), (2, 3), (2, 5), (1, 6), (1, 7), (2, 8), (1, 16))
)
PAGES = tuple(
  Case(
    f"page_{size}", q_lens=(2, 1, 5, 0, 1), kv_lens=(size - 1, size, size + 1, 0, 1), page_size=size
  )
  for size in (16, 32, 64, 128, 256)
)
HEAD_DIMS = tuple(
  Case(f"dim_{d}_{dv}", q_lens=(2, 4), kv_lens=(30, 18), head_dim=d, v_head_dim=dv)
  for d, dv in ((64, 128), (80, 64), (96, 96), (128, 128), (192, 128), (256, 256))
)
MASKS = (
  Case("window", options=(("window", 19),)),
  Case("window_1", options=(("window", 1),)),
  Case("not_causal", options=(("causal", False),)),
  Case("not_causal_window", options=(("causal", False), ("window", 12))),
  Case("queries_past_keys", q_lens=(34, 5), kv_lens=(1, 3)),
)
SCORES = (
  Case("soft_cap", options=(("soft_cap", 3.5),)),
  Case("sm_scale", options=(("sm_scale", 0.31),)),
  Case("negative_sm_scale", options=(("sm_scale", -0.2),)),
)
EMPTY = (
  Case("nothing_cached", q_lens=(0, 0), kv_lens=(0, 0)),
  Case("no_queries", q_lens=(0, 0), kv_lens=(5, 17)),
)
LONG = (
  Case("several_key_tiles", q_lens=(1, 70), kv_lens=(1100, 700), group=2, page_size=64),
  Case(
    "window_over_tiles",
    q_lens=(1, 70),
    kv_lens=(1100, 700),
    num_kv_heads=1,
    group=2,
    page_size=64,
    options=(("window", 300),),
  ),
  # The oldest key that is seen, 699 - 189 + 1 = 511, is the last of its key tile.
  Case(
    "window_at_tile_end",
    q_lens=(1,),
    kv_lens=(700,),
    num_kv_heads=1,
    group=1,
    page_size=64,
    options=(("window", 189),),
  ),
)
SHAPES = (MIXED, *GQA, *PAGES, *HEAD_DIMS, *MASKS, *SCORES, *EMPTY, *LONG)

FORMATS_OF_PATH = {
  "bf16": (("bf16", "bf16"),),
  "fp8": (("fp8", "fp8"), ("fp8", "bf16")),
  "nvfp4_dequant": (("nvfp4", "nvfp4"), ("fp8", "nvfp4"), ("nvfp4", "bf16")),
  "nvfp4_repack": (("nvfp4", "nvfp4"),),
  "nvfp4_a4q": (("nvfp4", "nvfp4"), ("nvfp4", "fp8")),
  "nvfp4_a8q": (("nvfp4", "nvfp4"), ("nvfp4", "bf16")),
}


def with_formats(case: Case, k_format: str, v_format: str) -> Case:
  return dataclasses.replace(case, k_format=k_format, v_format=v_format)
