"""Checks of values inside jit, for debugging: off by default, and free when off.

Outside jit the operations see lengths and offsets and check them. Inside, values are not known
when the call is traced, and a wrong one is clipped, skipped or read as it stands. `debug_checks`
hands the small arrays of a call (page table, lengths, slots, global scales, K's mean) to the host,
where the same rules are tried; the pages themselves stay where they are.

It is a jax.debug.callback that raises. checkify would leave it to the caller to functionalise
every jit around a call, and io_callback has no derivative; this one works under jit, scan, vmap and
grad as it is. That it is on is part of jit's cache key (jax.make_user_context): a function that was
traced before is traced once more with checks, and without them it runs as before.

Where all values are known, the error is the ValueError itself. Inside jit it is JAX's
JaxRuntimeError, whose message ends with the same text. Calls return before they have run, so it may
surface only where a result is waited for (block_until_ready, a copy to the host) or at
jax.effects_barrier(); a process says its last one again when it ends. So it should be on a GPU,
where kernels go on with what they were given until then, and where JAX needs its CPU backend too,
which it has by default; it was tried on a CPU only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.core import Tracer

from nvfp4_pallas.batch import RaggedBatch, check_batch, check_one_token_each
from nvfp4_pallas.cache import PagedKVCache, check_finite
from nvfp4_pallas.format import check_global_scale
from nvfp4_pallas.read_paths import AttentionSpec

_on = jax.make_user_context(False)


@contextlib.contextmanager
def debug_checks() -> Iterator[None]:
  """append, prefill, decode and LlamaAttention check values, inside jit too:
  `with debug_checks():`, or as a decorator, `@debug_checks()`.

  Page table entries that the call uses, and slots, must lie in the pool; no two rows may have one
  slot; kv_lens, cu_q_lens and global scales must be as RaggedBatch and PagedKVCache say. Each call
  waits for the host: for debugging, not for serving.

  Raises:
    ValueError: a value breaks a rule (message: argument, rule, value and place).
    jax.errors.JaxRuntimeError: the same inside jit, where the result is waited for.
  """
  with _on(True):
    yield


def is_on() -> bool:
  """Whether the call is within debug_checks."""
  return _on.value


@contextlib.contextmanager
def without_checks() -> Iterator[None]:
  """For what was checked as a whole and is then done in parts."""
  with _on(False):
    yield


def check_append(
  cache: PagedKVCache,
  batch: RaggedBatch | None,
  slot_mapping: jax.Array | np.ndarray,
  num_tokens: int,
) -> None:
  """The values of an append. With `batch`, slot_mapping is what it leads to."""
  num_pages, page_size, window = cache.num_pages, cache.page_size, cache.recent

  def check(scales, starts, batch, slots):
    _check_scales(scales)
    if batch is not None:
      check_batch(batch, num_tokens=num_tokens, page_size=page_size, appends=True)
      new = batch.kv_lens - batch.q_lens, batch.kv_lens
      if window is not None:
        before = _in_pages(starts, batch, new[0])
        outside = np.maximum(batch.kv_lens - window.tokens, 0) // page_size * page_size
        with_ring = _has_ring(starts, batch)
        new = before, np.where(with_ring, np.maximum(before, outside), batch.kv_lens)
      _check_page_table(batch.page_table, *new, num_pages, page_size)
    if window is not None:
      return
    name = "slot_mapping" if batch is None else "batch's slot_mapping"
    _refuse(name, slots, slots >= num_pages * page_size, f"be below {num_pages * page_size}")
    _, first, place = np.unique(slots, return_index=True, return_inverse=True)
    again = (slots >= 0) & (first[place] != np.arange(len(slots)))
    _refuse(name, slots, again, "not repeat a slot")

  _on_values(check, _scales(cache), _starts(cache), batch, slot_mapping)


def check_attention(
  cache: PagedKVCache,
  batch: RaggedBatch,
  spec: AttentionSpec,
  num_tokens: int,
  *,
  new_kv: bool = False,
  one_token_each: bool = False,
) -> None:
  """The values of a prefill, or with `one_token_each` of a decode. With `new_kv` a free place may
  have no row, as that would see itself: where lengths are known, this is always checked."""
  if new_kv:
    _on_known_values(_check_no_free_rows, batch.kv_lens, batch.cu_q_lens)
  num_pages, page_size = cache.num_pages, cache.page_size
  # nvfp4_a8q takes K's scale from all keys, whatever the window.
  window = None if spec.read_path == "nvfp4_a8q" else spec.window

  def check(scales, starts, batch):
    _check_scales(scales)
    check_batch(batch, num_tokens=num_tokens, page_size=page_size, appends=new_kv)
    if one_token_each:
      check_one_token_each(batch)
    before = batch.kv_lens - batch.q_lens
    begin = np.zeros_like(before) if window is None else np.maximum(before - window + 1, 0)
    end = np.where(batch.q_lens == 0, 0, before if new_kv else batch.kv_lens)
    if starts is not None:
      end = np.minimum(end, _in_pages(starts, batch, before if new_kv else batch.kv_lens))
    _check_page_table(batch.page_table, begin, end, num_pages, page_size)

  _on_values(check, _scales(cache), _starts(cache), batch)


def _check_no_free_rows(kv_lens: np.ndarray, cu_q_lens: np.ndarray) -> None:
  free = (kv_lens == 0) & (np.diff(cu_q_lens) > 0)
  _refuse("kv_lens", kv_lens, free, "count this step's rows, which new_kv holds")


def check_positions(name: str, batch: RaggedBatch, positions: int) -> None:
  """The new rows of `batch` must stand below `positions`. Where lengths are known, always."""

  def check(kv_lens, cu_q_lens):
    past = (np.diff(cu_q_lens) > 0) & (kv_lens > positions)
    _refuse(f"{name}' kv_lens", kv_lens, past, f"be at most rope's {positions} positions")

  _on_known_values(check, batch.kv_lens, batch.cu_q_lens)


def check_ring_ids(name: str, ring_ids: jax.Array | np.ndarray, num_rings: int) -> None:
  """No ring may be named twice; other numbers may. Where they are known, always."""

  def check(ids):
    _, first, place = np.unique(ids, return_index=True, return_inverse=True)
    again = (ids >= 0) & (ids < num_rings) & (first[place] != np.arange(len(ids)))
    _refuse(name, ids, again, "not repeat a ring")

  _on_known_values(check, ring_ids)


def check_whole_pages(kv_lens: jax.Array | np.ndarray, page_size: int) -> None:
  """kv_lens of shared pages must be whole pages. Where they are known, always."""

  def check(lens):
    broken = (lens < 0) | (lens % page_size != 0)
    _refuse("kv_lens", lens, broken, f"be a multiple of page_size {page_size} of at least 0")

  _on_known_values(check, kv_lens)


def _on_known_values(check: Callable[..., None], *arrays) -> None:
  """check(*arrays) with numpy arrays if all are known; else under debug_checks only."""
  if any(isinstance(a, Tracer) for a in arrays):
    _on_values(check, *arrays)
  else:
    check(*map(np.asarray, arrays))


def _on_values(check: Callable[..., None], *trees) -> None:
  """check(*trees) with numpy arrays: now if all are known, else when the program runs."""
  if not _on.value:
    return

  def on_host(*trees):
    check(*jax.tree.map(np.asarray, trees))

  traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(trees))
  jax.debug.callback(on_host, *trees) if traced else on_host(*trees)


def _starts(cache: PagedKVCache) -> jax.Array | None:
  return None if cache.recent is None else cache.recent.starts


def _ring_ids(batch: RaggedBatch) -> np.ndarray:
  return np.arange(batch.num_seqs) if batch.ring_ids is None else np.asarray(batch.ring_ids)


def _has_ring(starts: np.ndarray, batch: RaggedBatch) -> np.ndarray:
  ids = _ring_ids(batch)
  return (ids >= 0) & (ids < len(starts))


def _in_pages(starts: np.ndarray, batch: RaggedBatch, lens: np.ndarray) -> np.ndarray:
  """How many of each sequence's `lens` tokens are in the pages."""
  has_ring = _has_ring(starts, batch)
  start = starts[np.where(has_ring, _ring_ids(batch), 0)]
  _refuse(
    "kv_lens",
    lens,
    has_ring & (lens > 0) & (start > lens),
    "not fall more than the recent window below the longest there was",
  )
  return np.where(has_ring, np.minimum(start, lens), lens)


def _scales(cache: PagedKVCache) -> dict[str, jax.Array | None]:
  """The small arrays of the pools."""
  scales = {f"cache.{name}.global_scale": getattr(cache, name).global_scale for name in "kv"}
  return scales | {"cache.k.mean": cache.k.mean}


def _check_scales(scales: dict[str, np.ndarray | None]) -> None:
  for name, values in scales.items():
    if values is not None and name == "cache.k.mean":
      check_finite(name, values)
    elif values is not None:
      check_global_scale(values, values.shape, name)


def _check_page_table(table, begin, end, num_pages: int, page_size: int) -> None:
  """Entries with tokens begin[s] .. end[s] - 1 of sequence s must be pages of the pool."""
  page = np.arange(table.shape[1])[None, :]
  begin, end = begin[:, None], end[:, None]
  used = (begin < end) & (page >= begin // page_size) & (page <= (end - 1) // page_size)
  _refuse("page_table", table, used & (table < 0), "not be negative")
  _refuse("page_table", table, used & (table >= num_pages), f"be below {num_pages}")


def _refuse(name: str, values: np.ndarray, bad: np.ndarray, rule: str) -> None:
  if bad.any():
    place = tuple(np.argwhere(bad)[0].tolist())
    where = ", ".join(map(str, place))
    raise ValueError(f"{name}[{where}] must {rule}, got {values[place]}")
