"""FlashInfer's paged attention, where it and torch are installed: BF16, FP8 and NVFP4 pages.

By its public API alone, with the pages of our pools as they are: its layout HND is head_major, its
NVFP4 scales are linear too. Not run by this project so far, as FlashInfer was on none of its
machines; a test drives it with a module in its place.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.attention_cases import QUERIES, Shared, attention_speed
from benchmarks.records import Row
from benchmarks.small import Variant
from benchmarks.trace import KernelTimes
from benchmarks.turns import CALLS_A_TURN, TURNS, Timed

WORKSPACE_BYTES = 128 * 2**20
LAYOUT = "HND"


def missing() -> str | None:
  lacking = [name for name in ("flashinfer", "torch") if importlib.util.find_spec(name) is None]
  return f"not installed: {', '.join(lacking)}" if lacking else None


def prepare(shared: Shared, variant: Variant, row: functools.partial[Row]) -> Timed:
  import flashinfer  # pyright: ignore[reportMissingImports]
  import torch  # pyright: ignore[reportMissingImports]

  work = shared.workload
  cache = shared.pools.cache(variant.k_format, variant.v_format)
  tensor = functools.partial(_tensor, torch)
  k, v = tensor(cache.k.data), tensor(cache.v.data)
  options: dict[str, Any] = {}
  if variant.k_format == "nvfp4":
    options["kv_cache_sf"] = tensor(cache.k.block_scale), tensor(cache.v.block_scale)
  if variant.k_format != "bf16":
    options |= {"k_scale": 1.0, "v_scale": 1.0}
  q = [tensor(a) for a in shared.q]
  wrappers = [
    _planned(flashinfer, torch, shared, np.asarray(table), q[0].dtype, k.dtype)
    for table in shared.tables.tables
  ]
  calls = [
    functools.partial(wrappers[i % len(wrappers)].run, q[i % QUERIES], (k, v), **options)
    for i in range(TURNS * CALLS_A_TURN)
  ]
  out = jnp.asarray(calls[0]().float().cpu().numpy())
  judged = shared.reference.errors(variant, shared.judged(out))
  nbytes = int(work.batch * work.kv_len * cache.bytes_per_token) + 2 * shared.q[0].nbytes
  names = {"q": str(q[0].dtype), "k": str(k.dtype), "v": str(v.dtype)}

  def timed_row(times: KernelTimes | None) -> Row:
    return row(
      bytes_per_token=cache.bytes_per_token,
      operand_dtypes={"run": [f"{name} {dtype}" for name, dtype in names.items()]},
      version=f"flashinfer {flashinfer.__version__}, torch {torch.__version__}",
      **judged,
      **attention_speed(shared, variant.read_path, nbytes, times),
      **times.row_fields() if times else {},
    )

  return Timed(calls, timed_row, wait=lambda results: torch.cuda.synchronize())


def _planned(flashinfer, torch, shared: Shared, table: np.ndarray, q_dtype, kv_dtype):
  """A wrapper for one page table."""
  work = shared.workload
  heads = work.heads
  ints = lambda values: torch.as_tensor(np.asarray(values, np.int32), device="cuda")
  pages = table.shape[1]
  indptr = ints(np.arange(work.batch + 1) * pages)
  indices = ints(table.reshape(-1))
  last = ints(np.full(work.batch, (work.kv_len - 1) % work.page_size + 1))
  workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
  shape = heads.num_q_heads, heads.num_kv_heads, heads.head_dim, work.page_size
  dtypes = {"q_data_type": q_dtype, "kv_data_type": kv_dtype}
  if work.phase == "decode":
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
      workspace, LAYOUT, use_tensor_cores=True
    )
    wrapper.plan(indptr, indices, last, *shape, **dtypes)
    return wrapper
  wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, LAYOUT)
  q_indptr = ints(np.arange(work.batch + 1) * work.q_len)
  wrapper.plan(q_indptr, indptr, indices, last, *shape, causal=True, **dtypes)
  return wrapper


def _tensor(torch, array: Any):
  """The same memory; 8-bit floats travel as bytes, which DLPack knows everywhere."""
  if array.dtype != jnp.float8_e4m3fn:
    return torch.from_dlpack(array)
  as_bytes = jax.lax.bitcast_convert_type(array, jnp.uint8)
  return torch.from_dlpack(as_bytes).view(torch.float8_e4m3fn)
