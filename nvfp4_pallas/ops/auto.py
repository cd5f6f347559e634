"""`read_path="auto"`: of the paths with the same numbers for a cache, the one that costs least."""

from __future__ import annotations

import dataclasses

import jax

from nvfp4_pallas.batch import RaggedBatch, check_batch
from nvfp4_pallas.cache import PagedKVCache, check_cache
from nvfp4_pallas.ops.checks import check_is_array, check_rows
from nvfp4_pallas.policy import (
  EXACT_PATHS,
  MAX_WORKSPACE_BYTES,
  PHASES,
  Choice,
  Geometry,
  check_one_of,
  choose_read_path,
  costs_for,
)
from nvfp4_pallas.read_paths import AUTO, AttentionSpec, formats_lacking


def resolve_read_path(
  phase: str,
  q: jax.Array,
  cache: PagedKVCache,
  batch: RaggedBatch,
  *,
  max_workspace_bytes: int = MAX_WORKSPACE_BYTES,
) -> Choice:
  """What `read_path="auto"` is for such a call, and why.

  Only shapes count, so that it is the same inside jit and outside: sequences are taken to have
  equally many query tokens and as many keys as a row of the page table has room for. What a recent
  window, `new_kv`, a sliding window or a soft cap add is not in the costs. Those are of
  `jax.devices()[0]`, which dispatch.use_target does not change.

  Args:
    phase: `prefill` or `decode`.
    q, cache, batch, max_workspace_bytes: as for that operation.

  Returns:
    One of policy.EXACT_PATHS. It comes from costs measured on this device (policy.costs_for) where
    several paths have the same numbers and were measured; else it is the one without a workspace,
    with the fields that only costs can tell None.

  Raises:
    ValueError: an argument breaks a rule (message: argument, rule, value).
  """
  check_one_of("phase", phase, PHASES)
  check_cache(cache)
  check_is_array("q", q)
  check_rows("q", q, q.shape[1] if q.ndim == 3 else cache.num_kv_heads, cache.k.head_dim)
  check_batch(batch, num_tokens=q.shape[0], page_size=cache.page_size)
  formats = cache.formats
  paths = tuple(path for path in EXACT_PATHS if formats_lacking(path, formats) is None)
  plain = paths[0]  # nvfp4_dequant stands before nvfp4_repack
  num_seqs, kv_len = batch.num_seqs, batch.max_pages * cache.page_size
  if len(paths) == 1:
    return _unmeasured(plain, f"the only path for K {formats[0]} and V {formats[1]}")
  if 0 in (q.shape[0], num_seqs, kv_len):
    return _unmeasured(plain, "no row sees a key")
  device = jax.devices()[0].device_kind
  costs = costs_for(device)
  if costs is None:
    return _unmeasured(plain, f"no costs of {device}: it needs no workspace")
  if not costs.knows(phase, formats):
    why = f"no costs of {phase} over K {formats[0]} and V {formats[1]} on {costs.device}"
    return _unmeasured(plain, f"{why}: it needs no workspace")
  q_len = 1 if phase == "decode" else min(-(-q.shape[0] // num_seqs), kv_len)
  geometry = Geometry(q.shape[1], cache.num_kv_heads, cache.k.head_dim)
  return choose_read_path(
    phase,
    q_len,
    kv_len,
    num_seqs,
    geometry,
    device,
    costs,
    formats=formats,
    max_workspace_bytes=max_workspace_bytes,
  )


def settle(spec: AttentionSpec, phase: str, q, cache, batch, **limits) -> AttentionSpec:
  """The spec with a read path in the place of `auto`."""
  if spec.read_path != AUTO:
    return spec
  chosen = resolve_read_path(phase, q, cache, batch, **limits)
  return dataclasses.replace(spec, read_path=chosen.read_path)


def _unmeasured(path: str, reason: str) -> Choice:
  return Choice(path, None, None, None, reason)
