"""JAX's own paged attention for decode: Pallas on Triton, deprecated, BF16 only."""

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp

from benchmarks import program
from benchmarks.attention_cases import QUERIES, Shared, attention_speed
from benchmarks.records import Row
from benchmarks.small import Variant
from benchmarks.trace import KernelTimes
from benchmarks.turns import CALLS_A_TURN, TURNS, Timed

# Splits of a sequence and keys of a step: its defaults would need more shared memory than there is
# for pages of 64.
SPLITS = 16
KEYS_A_STEP = 128


def missing() -> str | None:
  if jax.default_backend() != "gpu":
    return "JAX's paged attention runs on GPUs"
  try:
    _paged_attention()
  except ImportError as error:
    return f"this JAX has no paged attention: {error}"
  return None


def _paged_attention():
  with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.experimental.pallas.ops.gpu import paged_attention

  return paged_attention.paged_attention


def prepare(shared: Shared, variant: Variant, row: functools.partial[Row]) -> Timed:
  work = shared.workload
  pages = work.kv_len // work.page_size
  a_step = max(1, KEYS_A_STEP // work.page_size)
  splits = max(1, min(SPLITS, pages // a_step))
  if work.kv_len % (work.page_size * splits * a_step):
    raise NotImplementedError(
      f"it cuts {work.kv_len} keys into {splits} equal parts of steps of {a_step} pages"
    )
  cache = shared.pools.cache(variant.k_format, variant.v_format)

  @jax.jit
  def head_major(data):
    return jnp.swapaxes(data[: shared.tables.pages], 0, 1)

  k, v = head_major(cache.k.data), head_major(cache.v.data)
  # It does not scale scores.
  q = [(a * jnp.asarray(work.heads.head_dim**-0.5, a.dtype)) for a in shared.q]
  paged_attention = _paged_attention()
  attend = jax.jit(
    lambda q, k, v, table: paged_attention(
      q, k, v, table, None, pages_per_compute_block=a_step, k_splits=splits
    )
  )
  tables = shared.tables.tables
  run, launched = program.compiled(attend, q[0], k, v, tables[0])
  calls = [
    functools.partial(run, q[i % QUERIES], k, v, tables[i % len(tables)])
    for i in range(TURNS * CALLS_A_TURN)
  ]
  judged = shared.reference.errors(variant, shared.judged(calls[0]()))
  nbytes = int(work.batch * work.kv_len * cache.bytes_per_token) + 2 * shared.q[0].nbytes

  def timed_row(times: KernelTimes | None) -> Row:
    return row(
      bytes_per_token=cache.bytes_per_token,
      version=f"jax {jax.__version__}",
      **launched,
      **judged,
      **attention_speed(shared, "bf16", nbytes, times),
      **times.row_fields() if times else {},
    )

  return Timed(calls, timed_row)
