"""Caches past 2^31 elements: whatever names a page works at the pool's end as at its beginning."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import nvfp4_pallas as nv
from benchmarks.gpu_repeats import repeated
from nvfp4_pallas.cache import pool_arrays

PAGE_SIZE, HEADS, GROUP, DIM = 64, 8, 4, 128
TOKENS, MORE, WINDOW = 100, 44, 64  # of a sequence; MORE bring its first page out of the window
# 2^32 elements of K and a few more, and as many of V: 4.3 GB each of codes or E4M3, 8.6 of bf16.
NUM_PAGES = {"nvfp4": 2**17 + 8, "fp8": 2**16 + 8, "bf16": 2**16 + 8}
# Read path, new tokens of a sequence: programs for one, for few and for many of them.
READS = {
  "nvfp4": (
    ("nvfp4_dequant", 1),
    ("nvfp4_dequant", 8),
    ("nvfp4_dequant", TOKENS),
    ("nvfp4_repack", TOKENS),
    ("nvfp4_a8q", TOKENS),
  ),
  "fp8": (("fp8", 1), ("fp8", TOKENS)),
  "bf16": (("bf16", 1), ("bf16", TOKENS)),
}


def check_large_cache(
  format: str, *, num_pages: int = 0, kernels: tuple[Callable[..., Any], ...] = ()
) -> str:
  """Two equal sequences, in the first pages and in the last ones, are equal in every way.

  Args:
    format: of K and V.
    num_pages: instead of NUM_PAGES.
    kernels: attention beside READS, functions of (q, cache, batch).

  Raises:
    AssertionError: where they differ, or where nothing was written.
  """
  num_pages = num_pages or NUM_PAGES[format]
  create = functools.partial(
    nv.PagedKVCache.create,
    num_pages=num_pages,
    page_size=PAGE_SIZE,
    num_kv_heads=HEADS,
    head_dim=DIM,
    k_format=format,
  )
  pages = -(-(TOKENS + MORE) // PAGE_SIZE)
  table = np.stack([np.arange(pages), np.arange(num_pages - pages, num_pages)])
  table = jnp.asarray(table, jnp.int32)
  append = jax.jit(nv.append, donate_argnums=0)
  cache = append(create(), *_rows(TOKENS), _batch(table, TOKENS, TOKENS))
  _check_pages(cache, table, "append")
  for path, tokens in READS[format]:
    run = functools.partial(nv.decode if tokens == 1 else nv.prefill, read_path=path)
    _check_attention(f"{path} of {tokens}", run, cache, table, TOKENS, tokens)
  for kernel in kernels:
    _check_attention("a further kernel", kernel, cache, table, TOKENS, TOKENS)
  cache = jax.jit(nv.copy_pages, donate_argnums=0)(cache, table[::-1, 0], table[:, -1])
  _check_pages(cache, table, "copy_pages")
  nbytes = cache.k.nbytes
  del cache  # for room for another one
  if format != "bf16":
    cache = append(
      create(recent_window=WINDOW, num_rings=2), *_rows(TOKENS), _batch(table, TOKENS, TOKENS)
    )
    cache = append(cache, *_rows(MORE), _batch(table, TOKENS + MORE, MORE))
    _check_pages(cache, table[:, :1], "append to a recent window")
    read = functools.partial(nv.decode, read_path=READS[format][0][0])
    _check_attention("decode with a recent window", read, cache, table, TOKENS + MORE, 1)
  return (
    f"check large {format} cache: page {num_pages - 1} of {nbytes / 1e9:.1f} GB of K acts as page 0"
  )


def _rows(tokens: int):
  """K and V, the same for both sequences."""
  k, v = jax.random.normal(jax.random.key(tokens), (2, tokens, HEADS, DIM), jnp.bfloat16)
  return jnp.concatenate([k, k]), jnp.concatenate([v, v])


def _batch(table: jax.Array, kv_len: int, q_len: int) -> nv.RaggedBatch:
  starts = jnp.asarray([0, q_len, 2 * q_len], jnp.int32)
  return nv.RaggedBatch(table, jnp.full((2,), kv_len, jnp.int32), starts)


def _check_attention(name: str, run, cache, table, kv_len: int, q_len: int) -> None:
  q = jax.random.normal(jax.random.key(0), (q_len, GROUP * HEADS, DIM), jnp.bfloat16)
  batch = _batch(table, kv_len, q_len)
  state = repeated(jax.jit(run), jnp.concatenate([q, q]), cache, batch)
  _check_halves(name, [a.reshape(2, q_len, *a.shape[1:]) for a in state])


def _check_pages(cache: nv.PagedKVCache, table: jax.Array, name: str) -> None:
  taken = jax.jit(lambda pool: [array[table] for array in pool_arrays(pool)])
  for which, pool in (("K", cache.k), ("V", cache.v)):
    _check_halves(f"{which} after {name}", taken(pool))


def _check_halves(name: str, arrays) -> None:
  for array in arrays:
    first, last = np.asarray(array)
    if first.tobytes() != last.tobytes():
      raise AssertionError(f"{name}: the last pages differ from the first")
    if not first.view(np.uint8).any():
      raise AssertionError(f"{name}: nothing was written")
