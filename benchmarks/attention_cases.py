"""Attention by this package, as cases to time: one read path of one shape."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import nvfp4_pallas as nv
from benchmarks import program
from benchmarks.pages import Pools, Tables
from benchmarks.records import Row, q_quantisation
from benchmarks.reference import HEAD, Reference, judged_tokens
from benchmarks.small import Variant
from benchmarks.trace import KernelTimes
from benchmarks.turns import CALLS_A_TURN, TURNS, Timed
from benchmarks.workloads import Workload
from nvfp4_pallas.cache import LAYOUT, ring_pages
from nvfp4_pallas.ops.decode import resolve_decode
from nvfp4_pallas.ops.prefill import resolve_prefill
from nvfp4_pallas.ops.prefill_sm90 import workspace_bytes
from nvfp4_pallas.ops.request import attention_request, attention_spec

# Measured dense BF16 rates on random data. Of other devices a floor is of bytes alone.
BF16_FLOPS = {"NVIDIA H200": 800e12}
QUERIES = 3  # that calls take turns with


@dataclasses.dataclass(frozen=True)
class Shared:
  """What the cases of a shape have in common.

  Attributes:
    q: bfloat16 [batch * q_len, num_q_heads, head_dim], some to take turns with.
    copy_rate: bytes a second of the device; None where no floor is to be named, as on a CPU.
  """

  workload: Workload
  pools: Pools
  tables: Tables
  q: tuple[jax.Array, ...]
  reference: Reference
  copy_rate: float | None

  @classmethod
  def of(cls, workload: Workload, pools: Pools, tables: Tables, copy_rate: float | None) -> Shared:
    heads, tokens = workload.heads, judged_tokens(workload.q_len)
    shape = workload.batch * workload.q_len, heads.num_q_heads, heads.head_dim
    q = tuple(_normal(jax.random.key(i), shape) for i in range(QUERIES))
    judged = np.asarray(q[0][jnp.asarray(tokens), : heads.group])
    pages = np.asarray(tables.tables[0])[0]
    return cls(workload, pools, tables, q, Reference(workload, pools, pages, judged), copy_rate)

  def judged(self, out: jax.Array) -> np.ndarray:
    """The rows of `out` [tokens, num_q_heads, head_dim] that the reference knows."""
    group = self.workload.heads.group
    rows = out[jnp.asarray(judged_tokens(self.workload.q_len))]
    return np.asarray(rows)[:, HEAD * group : (HEAD + 1) * group].astype(np.float64)


@functools.partial(jax.jit, static_argnums=1)
def _normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  return jax.random.normal(key, shape, jnp.bfloat16)


def prepare(
  shared: Shared,
  variant: Variant,
  implementation: str,
  row: functools.partial[Row],
  *,
  batch_invariant: bool = False,
  recent_window: int = 0,
  k_rotation: str | None = None,
  v_rotation: str | None = None,
  k_mean: bool = False,
  new_kv: bool = False,
) -> Timed:
  """Compiles the call and judges its result.

  Args:
    row: of what is known of the case before it has run.
    k_mean: whether K is stored without a mean.
    new_kv: whether the newest `q_len` keys are given in bfloat16, and the cache has those before.
  """
  work = shared.workload
  if work.layout != LAYOUT:
    reason = f"pages have the layout {LAYOUT}, the only one that the cache has, not {work.layout}"
    return Timed((), lambda _: row(reason=reason))
  cache = shared.pools.cache(variant.k_format, variant.v_format)
  lens = jnp.full((work.batch,), work.kv_len, jnp.int32)
  if recent_window:
    # So that sequences are anywhere in their pages, some of them are shorter, by up to a page.
    lens = lens - jnp.arange(work.batch, dtype=jnp.int32) * 37 % work.page_size
    cached = lens - work.q_len if new_kv else lens
    cache = dataclasses.replace(cache, recent=random_rings(cache, cached, recent_window))
  heads = work.heads
  mean = jnp.ones((heads.num_kv_heads, heads.head_dim), jnp.float32) if k_mean else None
  cache = dataclasses.replace(
    cache,
    k=dataclasses.replace(cache.k, rotation=k_rotation, mean=mean),
    v=dataclasses.replace(cache.v, rotation=v_rotation),
  )
  starts = jnp.arange(work.batch + 1, dtype=jnp.int32) * work.q_len
  batches = [nv.RaggedBatch(table, lens, starts) for table in shared.tables.tables]
  numerics: Any = {"read_path": variant.read_path, "q_levels": variant.q_levels}
  plain: Any = {"causal": True, "sm_scale": None, "window": None, "soft_cap": None}
  spec = attention_spec(shared.q[0], **numerics, **plain)
  pages = batches[0].max_pages
  request = attention_request(
    shared.q[0], cache, spec, new_kv, num_seqs=work.batch, max_pages=pages
  )
  operation, resolve = nv.prefill, resolve_prefill
  if work.phase == "decode":
    operation = functools.partial(nv.decode, batch_invariant=batch_invariant)
    resolve = resolve_decode
  try:
    reason = resolve(request, implementation).reason
  except NotImplementedError as error:
    why_not = str(error)
    return Timed((), lambda _: row(reason=why_not))

  operation = functools.partial(operation, implementation=implementation, **numerics)
  arguments: tuple = ()
  if new_kv:
    operation = _with_new_kv(operation)
    shape = shared.q[0].shape[0], heads.num_kv_heads, heads.head_dim
    arguments = (tuple(_normal(jax.random.key(QUERIES + i), shape) for i in range(2)),)
  run, launched = program.compiled(jax.jit(operation), shared.q[0], cache, batches[0], *arguments)
  calls = [
    functools.partial(run, shared.q[i % QUERIES], cache, batches[i % len(batches)], *arguments)
    for i in range(TURNS * CALLS_A_TURN)
  ]
  judged = {}
  # The reference knows none of these.
  if not (recent_window or k_rotation or v_rotation or k_mean or new_kv):
    judged = shared.reference.errors(variant, shared.judged(calls[0]()[0]))
  nbytes = int(work.batch * work.kv_len * cache.bytes_per_token) + 2 * shared.q[0].nbytes
  read_wide = shared.q[0].shape[0] if new_kv else 0
  if cache.recent is not None:
    read_wide = int(jnp.sum(lens - cache.recent.starts))
  wide_bytes = 4 * heads.num_kv_heads * heads.head_dim
  nbytes += int(read_wide * (wide_bytes - cache.bytes_per_token))
  known = {
    "bytes_per_token": cache.bytes_per_token,
    "workspace_bytes": None if work.phase == "decode" else _workspace(request, implementation),
    "reason": reason,
    **launched,
    **judged,
  }

  def timed_row(times: KernelTimes | None) -> Row:
    speed = attention_speed(shared, variant.read_path, nbytes, times)
    return row(**known, **speed, **times.row_fields() if times else {})

  return Timed(calls, timed_row)


def _with_new_kv(prefill):
  return lambda q, cache, batch, new_kv: prefill(q, cache, batch, new_kv=new_kv)


def known_fields(variant: Variant) -> dict[str, Any]:
  """A row's words for a read path."""
  return {
    "k_format": variant.k_format,
    "v_format": variant.v_format,
    "read_path": variant.read_path,
    **q_quantisation(variant.read_path, variant.q_levels),
  }


def _workspace(request, implementation: str) -> int | None:
  return workspace_bytes(request) if implementation == "mosaic_sm90" else None


def random_rings(cache: nv.PagedKVCache, lens: jax.Array, tokens: int) -> nv.RecentWindow:
  """A ring for each sequence, as after appends."""
  page_size, (batch,) = cache.page_size, lens.shape
  shape = (batch * ring_pages(tokens, page_size), cache.num_kv_heads, page_size, cache.k.head_dim)
  k, v = (
    nv.PagePool(jax.random.normal(jax.random.key(i), shape, jnp.bfloat16), None, None, "bf16")
    for i in range(2)
  )
  starts = jnp.maximum(lens - tokens, 0) // page_size * page_size
  return nv.RecentWindow(k, v, starts, tokens)


def attention_flops(workload: Workload, *, causal: bool = True) -> float:
  """Of both products, over the keys that each query sees."""
  heads, q_len = workload.heads, workload.q_len
  seen = workload.kv_len - (q_len - 1) / 2 if causal else workload.kv_len  # by a query, on average
  return 4 * heads.head_dim * heads.num_q_heads * workload.batch * q_len * seen


def attention_speed(
  shared: Shared, read_path: str, nbytes: int, times: KernelTimes | None, *, causal: bool = True
) -> dict[str, Any]:
  """A row's words for how fast a call could be, and was.

  The floor is what moving the bytes or multiplying takes, whichever is more. Tensor cores multiply
  FP8 twice as fast, which is what A8Q does with Q and K, half of all products.
  """
  flops = attention_flops(shared.workload, causal=causal)
  rate = BF16_FLOPS.get(jax.devices()[0].device_kind, float("inf"))
  multiplying = flops / rate * (0.75 if read_path == "nvfp4_a8q" else 1.0)
  speed: dict[str, Any] = {"bytes": nbytes}
  if shared.copy_rate is not None:
    speed["floor_us"] = 1e6 * max(nbytes / shared.copy_rate, multiplying)
    speed["copy_gbs"] = shared.copy_rate / 1e9
  if times is not None:
    speed["tflops"] = 1e-6 * flops / statistics.median(times.calls)
  return speed
