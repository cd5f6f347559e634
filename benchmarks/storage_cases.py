"""What writes a cache, as cases to time: append, a step's or a prompt's append, pack and unpack."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import nvfp4_pallas as nv
from benchmarks import program
from benchmarks.metrics import row_error
from benchmarks.records import Row
from benchmarks.trace import KernelTimes
from benchmarks.turns import CALLS_A_TURN, TURNS, Timed
from benchmarks.workloads import Workload
from nvfp4_pallas.cache import decode_rows, pool_arrays, take
from nvfp4_pallas.ops.append import append_request, resolve_append
from nvfp4_pallas.ops.pack import PackRequest, resolve_pack

COPIES = 3  # of inputs, to take turns with
CALLS = TURNS * CALLS_A_TURN
JUDGED = 64  # rows that are read back


def prepare_append(
  work: Workload,
  implementation: str,
  row: functools.partial[Row],
  copy_rate: float | None,
  *,
  format: str,
  scale: float = 1.0,
  scale_search: str = "amax",
) -> Timed:
  """`work.batch` rows to given slots: a prompt's to whole pages, up to 64 each somewhere else."""
  tokens, heads = work.batch, work.heads
  pages = 2 * max(tokens // work.page_size, 64)
  cache = nv.PagedKVCache.create(
    num_pages=pages,
    page_size=work.page_size,
    num_kv_heads=heads.num_kv_heads,
    head_dim=heads.head_dim,
    k_format=format,
    k_global_scale=scale,
    v_global_scale=scale,
    scale_search=scale_search,
  )
  r = np.random.default_rng(0)
  if tokens <= 64:
    slots = r.permutation(pages * work.page_size)[:tokens]
  else:
    order = r.permutation(pages)[: tokens // work.page_size]
    slots = (order[:, None] * work.page_size + np.arange(work.page_size)).reshape(-1)
  slots = jnp.asarray(slots, jnp.int32)
  shape = (2, tokens, heads.num_kv_heads, heads.head_dim)
  new = [jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(COPIES)]
  new = [(kv[0], kv[1]) for kv in new]
  try:
    reason = resolve_append(append_request(cache, *new[0]), implementation).reason
  except NotImplementedError as error:
    why_not = str(error)
    return Timed((), lambda _: row(reason=why_not))

  append = jax.jit(
    lambda cache, k, v, slots: nv.append(
      cache, k, v, slot_mapping=slots, implementation=implementation
    ),
    donate_argnums=0,
  )
  state = _State(append, cache, (*new[0], slots))
  bytes_per_token = state.cache.bytes_per_token
  calls = [functools.partial(state.call, *new[i % COPIES], slots) for i in range(CALLS)]
  calls[0]()
  known = {
    "bytes_per_token": bytes_per_token,
    "reason": reason,
    "format_error": _stored_error(state.cache.k, new[0][0], slots),
    **state.launched,
  }
  nbytes = int(tokens * (heads.num_kv_heads * heads.head_dim * 4 + bytes_per_token))
  return Timed(calls, _row_of(row, known, nbytes, copy_rate), state.wait)


def prepare_step(
  work: Workload,
  implementation: str,
  row: functools.partial[Row],
  copy_rate: float | None,
  **levers: Any,
) -> Timed:
  """An append of a decoding step by the batch: what finding the slots costs is in it.

  Sequences are anywhere in their pages, so that with a window a few of them give one up.

  Args:
    levers: options of `PagedKVCache.create`.
  """
  seqs, pages, heads = work.batch, 4, work.heads
  cache = _cache_of(work, seqs * pages, seqs, levers)
  r = np.random.default_rng(0)
  table = jnp.asarray(r.permutation(seqs * pages).reshape(seqs, pages), jnp.int32)
  lens = r.integers(2 * work.page_size, 3 * work.page_size, seqs)
  shape = (2, seqs, heads.num_kv_heads, heads.head_dim)
  k, v = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
  first = nv.RaggedBatch.for_decode(table, jnp.asarray(lens, jnp.int32))
  fill = jnp.zeros((int(lens.sum()), *shape[2:]), jnp.bfloat16)
  whole = dataclasses.replace(first, cu_q_lens=jnp.asarray(np.cumsum([0, *lens]), jnp.int32))
  cache = jax.jit(functools.partial(nv.append, implementation="xla"))(cache, fill, fill, whole)
  append = functools.partial(nv.append, implementation=implementation)
  after = [dataclasses.replace(first, kv_lens=first.kv_lens + 1 + step) for step in range(CALLS)]
  state = _State(jax.jit(append, donate_argnums=0), cache, (k, v, after[0]))
  calls = [functools.partial(state.call, k, v, batch) for batch in after]
  known = {"bytes_per_token": state.cache.bytes_per_token, **state.launched}
  nbytes = step_bytes(
    lens,
    levers.get("recent_window", 0),
    page_size=work.page_size,
    wide=4 * heads.num_kv_heads * heads.head_dim,
    stored=state.cache.bytes_per_token,
  )
  return Timed(calls, _row_of(row, known, nbytes, copy_rate), state.wait)


def prepare_prompt(
  work: Workload,
  implementation: str,
  row: functools.partial[Row],
  copy_rate: float | None,
  **levers: Any,
) -> Timed:
  """An append of a prompt's `q_len` tokens by the batch; each call is of a sequence of its own.

  Args:
    levers: options of `PagedKVCache.create`.
  """
  tokens, heads = work.q_len, work.heads
  pages = -(-tokens // work.page_size)
  cache = _cache_of(work, CALLS * pages, CALLS, levers)
  table = jnp.asarray(np.random.default_rng(0).permutation(CALLS * pages), jnp.int32)
  table = table.reshape(CALLS, 1, pages)
  lens, starts = jnp.array([tokens], jnp.int32), jnp.array([0, tokens], jnp.int32)
  rings = [jnp.array([i], jnp.int32) if cache.recent is not None else None for i in range(CALLS)]
  batches = [
    nv.RaggedBatch(of, lens, starts, ring_ids=ring) for of, ring in zip(table, rings, strict=True)
  ]
  shape = (2, tokens, heads.num_kv_heads, heads.head_dim)
  new = [jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(COPIES)]
  append = jax.jit(functools.partial(nv.append, implementation=implementation), donate_argnums=0)
  state = _State(append, cache, (*new[0], batches[0]))
  calls = [functools.partial(state.call, *new[i % COPIES], batches[i]) for i in range(CALLS)]
  known = {"bytes_per_token": state.cache.bytes_per_token, **state.launched}
  window = levers.get("recent_window", 0)
  stays_wide = tokens - max(tokens - window, 0) // work.page_size * work.page_size if window else 0
  wide = 4 * heads.num_kv_heads * heads.head_dim
  stored = (tokens - stays_wide) * state.cache.bytes_per_token
  nbytes = int(tokens * wide + stays_wide * wide + stored)
  return Timed(calls, _row_of(row, known, nbytes, copy_rate), state.wait)


def _cache_of(work: Workload, pages: int, seqs: int, levers: dict[str, Any]) -> nv.PagedKVCache:
  rings = {"num_rings": seqs} if levers.get("recent_window") else {}
  return nv.PagedKVCache.create(
    num_pages=pages,
    page_size=work.page_size,
    num_kv_heads=work.heads.num_kv_heads,
    head_dim=work.heads.head_dim,
    **rings,
    **levers,
  )


def step_bytes(lens: np.ndarray, window: int, *, page_size: int, wide: int, stored: float) -> int:
  """Read and written by a decoding step, on average over CALLS steps from these lengths.

  Without a window a new token is read wide and written stored. With one it is read and written
  wide, and so are tokens stored that leave the window: a page of a sequence at once.

  Args:
    wide, stored: bytes of a token's K and V in bfloat16, and in the cache's pages.
  """
  if not window:
    return int(len(lens) * (wide + stored))
  begins = lambda ends: np.maximum(ends - window, 0) // page_size * page_size
  leaving = (begins(lens + CALLS) - begins(lens)).sum() / CALLS
  return int(len(lens) * 2 * wide + leaving * (wide + stored))


class _State:
  """A cache that calls pass on to each other."""

  def __init__(self, append, cache: nv.PagedKVCache, arguments: tuple):
    self._compiled, self.launched = program.compiled(append, cache, *arguments)
    self.cache = cache

  def call(self, *arguments) -> None:
    self.cache = self._compiled(self.cache, *arguments)

  def wait(self, results) -> None:
    del results
    jax.block_until_ready(self.cache)


def _stored_error(pool: nv.PagePool, k: jax.Array, slots: jax.Array) -> float:
  """Of the first rows as they can be read back."""
  page, place = slots[:JUDGED] // pool.page_size, slots[:JUDGED] % pool.page_size
  rows = tuple(take(a, (page, slice(None), place)) for a in pool_arrays(pool))
  values = np.asarray(decode_rows(pool, rows)) * np.asarray(pool.decode_scale)[:, None]
  return row_error(k[:JUDGED], values)


def prepare_pack(
  work: Workload,
  implementation: str,
  row: functools.partial[Row],
  copy_rate: float | None,
  *,
  scale: float = 1.0,
) -> Timed:
  """Of `work.q_len` rows, with what `unpack` makes of them in the errors."""
  shape = work.q_len, work.heads.head_dim
  x = [jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(COPIES)]
  pack = functools.partial(nv.pack, implementation=implementation)
  unpack = functools.partial(nv.unpack, implementation=implementation)
  g = jnp.float32(scale)
  request = PackRequest(shape, "bfloat16", 1, "amax", False)
  try:
    reason = resolve_pack(request, implementation).reason
  except NotImplementedError as error:
    why_not = str(error)
    return Timed((), lambda _: row(reason=why_not))
  run, launched = program.compiled(jax.jit(pack), x[0], g)
  if work.phase == "unpack":
    inputs = [(run(a, g),) for a in x]
    run, launched = program.compiled(jax.jit(unpack), *inputs[0])
    some = run(*inputs[0])[:JUDGED]
  else:
    inputs = [(a, g) for a in x]
    packed = run(*inputs[0])
    some = jax.jit(functools.partial(nv.unpack, implementation="xla"))(packed)[:JUDGED]
  calls = [functools.partial(run, *inputs[i % COPIES]) for i in range(CALLS)]
  known = {"reason": reason, "format_error": row_error(x[0][:JUDGED], some), **launched}
  nbytes = x[0].size * 2 + x[0].size * 9 // 16
  return Timed(calls, _row_of(row, known, nbytes, copy_rate))


def _row_of(row, known: dict[str, Any], nbytes: int | None, copy_rate: float | None):
  speed: dict[str, Any] = {"bytes": nbytes}
  if copy_rate is not None:
    speed["copy_gbs"] = copy_rate / 1e9
    speed["floor_us"] = None if nbytes is None else 1e6 * nbytes / copy_rate

  def timed_row(times: KernelTimes | None) -> Row:
    return row(**known, **speed, **times.row_fields() if times else {})

  return timed_row
