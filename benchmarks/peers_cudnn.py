"""cuDNN's BF16 attention over contiguous keys, through jax.nn.dot_product_attention.

JAX can have it align a causal mask with the first key only, and the queries of a chunk stand at the
end of their keys. A bias could say which of them a query sees, but reading it takes time, so a
chunk is timed without a mask, and the row says so. One token sees all keys anyway.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import program
from benchmarks.attention_cases import QUERIES, Shared, attention_speed
from benchmarks.records import Row
from benchmarks.small import Variant
from benchmarks.trace import KernelTimes
from benchmarks.turns import CALLS_A_TURN, TURNS, Timed
from benchmarks.workloads import Workload


def missing() -> str | None:
  return None if jax.default_backend() == "gpu" else "cuDNN needs an NVIDIA GPU"


def is_causal(work: Workload) -> bool:
  return 1 < work.q_len == work.kv_len


def is_masked(work: Workload) -> bool:
  """Whether every query sees what it should."""
  return is_causal(work) or work.q_len == 1


def fields(work: Workload) -> dict[str, Any]:
  """Of a row, where they are not the workload's: it has no pages."""
  mask = "" if is_masked(work) else ", no mask"
  return {
    "data": f"gaussian, contiguous keys{mask}",
    "page_size": work.kv_len,
    "layout": "contiguous",
  }


def prepare(shared: Shared, variant: Variant, row: functools.partial[Row]) -> Timed:
  work = shared.workload
  causal = is_causal(work)
  pool = shared.pools.cache(variant.k_format, variant.v_format)
  shape = work.batch, -1, work.heads.num_kv_heads, work.heads.head_dim

  @jax.jit
  def contiguous(pages, table):
    return jnp.swapaxes(pages[table], 2, 3).reshape(shape)[:, : work.kv_len]

  kv = [
    tuple(contiguous(p.data, table) for p in (pool.k, pool.v)) for table in shared.tables.tables
  ]
  q = [a.reshape(work.batch, work.q_len, *a.shape[1:]) for a in shared.q]
  attend = jax.jit(
    lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")
  )
  run, launched = program.compiled(attend, q[0], *kv[0])
  calls = [
    functools.partial(run, q[i % QUERIES], *kv[i % len(kv)]) for i in range(TURNS * CALLS_A_TURN)
  ]
  judged = {}
  if is_masked(work):
    out = calls[0]().reshape(shared.q[0].shape)
    judged = shared.reference.errors(variant, shared.judged(out))
  nbytes = 2 * kv[0][0].nbytes + 2 * q[0].nbytes

  def timed_row(times: KernelTimes | None) -> Row:
    return row(
      bytes_per_token=2 * 2 * work.heads.num_kv_heads * work.heads.head_dim,
      version=_version(),
      **launched,
      **judged,
      **attention_speed(shared, "bf16", nbytes, times, causal=causal),
      **times.row_fields() if times else {},
    )

  return Timed(calls, timed_row)


def _version() -> str | None:
  from jax._src.lib import cuda_versions  # JAX says it nowhere else

  return None if cuda_versions is None else f"cudnn {cuda_versions.cudnn_get_version()}"
