"""decode: one query token a sequence over its cached keys, split over the keys where that helps."""

from __future__ import annotations

import functools

import jax

from nvfp4_pallas import debug, recent
from nvfp4_pallas.batch import RaggedBatch, check_one_token_each
from nvfp4_pallas.cache import PagedKVCache
from nvfp4_pallas.dispatch import Resolved, resolve
from nvfp4_pallas.explicit import in_auto_mode
from nvfp4_pallas.ops import auto, implementations, transforms
from nvfp4_pallas.ops.checks import as_jax, check_attention
from nvfp4_pallas.ops.request import AttentionRequest, attention_request, attention_spec


def decode(
  q: jax.Array,
  cache: PagedKVCache,
  batch: RaggedBatch,
  *,
  read_path: str,
  implementation: str | None = None,
  sm_scale: float | None = None,
  window: int | None = None,
  soft_cap: float | None = None,
  sinks: jax.Array | None = None,
  q_levels: int = 2,
  num_splits: int | None = None,
  batch_invariant: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """out_s = sum_j softmax_j(sm_scale * q'_s . k'_j) v_j over the kv_len keys of sequence s.

  The same contract as `prefill` with one query token a sequence, the newest: row s of q belongs to
  sequence s. A sequence with kv_len 0 is a free place: out 0, lse -inf.

  Args:
    q: bfloat16, float16 or float32 [num_seqs, num_q_heads, head_dim].
    cache, batch, read_path, implementation, sm_scale, window, soft_cap, sinks, q_levels: as in
      `prefill`. batch.cu_q_lens must be 0, 1, ..., num_seqs (RaggedBatch.for_decode).
    num_splits: parts into which the keys of a sequence are cut, each attended to on its own and
      joined by lse; None leaves it to the implementation, which is faster. Counts agree to
      rounding.
    batch_invariant: cut by the sequence alone, so that its result is bit for bit the same in any
      batch; with a cache that is rotated or lacks a mean, to rounding.

  Returns:
    out [num_seqs, num_q_heads, v_head_dim] in q's dtype, lse float32 [num_seqs, num_q_heads].

  Raises:
    ValueError: an argument breaks a rule (message: argument, rule, value).
    NotImplementedError: the named implementation cannot run (message: why).

  Source: split-KV after FlashDecoding (arXiv:2311.01282).
  """
  spec = attention_spec(
    q,
    read_path,
    causal=True,  # or not: one newest token sees all keys
    sm_scale=sm_scale,
    window=window,
    soft_cap=soft_cap,
    q_levels=q_levels,
  )
  _check_one_token_each(q, batch)
  recent.check_rings(cache.recent, batch)
  check_attention(q, cache, batch, spec, sinks)
  if num_splits is not None and (not isinstance(num_splits, int) or num_splits < 1):
    raise ValueError(f"num_splits must be a whole number of at least 1, got {num_splits}")
  q, cache, batch, sinks = as_jax(q, cache, batch, sinks)
  run = functools.partial(
    _decode,
    spec=spec,
    num_splits=num_splits,
    batch_invariant=batch_invariant,
    implementation=implementation,
  )
  return in_auto_mode(run, lambda: (q, q[..., 0]), q, cache, batch, sinks)


def _decode(q, cache, batch, sinks, *, spec, num_splits, batch_invariant, implementation):
  """decode after the checks of its arguments, all of them jax arrays."""
  spec = auto.settle(spec, "decode", q, cache, batch)
  debug.check_attention(cache, batch, spec, q.shape[0], one_token_each=True)
  request = attention_request(q, cache, spec, num_splits=num_splits, max_pages=batch.max_pages)
  resolved = resolve_decode(request, implementation)
  options = num_splits, batch_invariant
  out, lse = transforms.attend(resolved.function, q, cache, batch, spec, *options, sinks=sinks)
  return out.astype(q.dtype), lse


def resolve_decode(request: AttentionRequest, implementation: str | None = None) -> Resolved:
  """Who runs it; the reason also names the kernel where an implementation has two."""
  return resolve(implementations.DECODE, request, implementation)


def _check_one_token_each(q, batch: RaggedBatch) -> None:
  if q.shape[0] != batch.num_seqs:
    raise ValueError(
      f"q must have one row for each of {batch.num_seqs} sequences, got {q.shape[0]}"
    )
  check_one_token_each(batch)
