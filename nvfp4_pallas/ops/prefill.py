"""prefill: attention of a ragged batch of query tokens over their sequences' cached keys."""

from __future__ import annotations

import functools

import jax

from nvfp4_pallas import debug, recent
from nvfp4_pallas.batch import RaggedBatch, check_batch
from nvfp4_pallas.cache import PagedKVCache
from nvfp4_pallas.dispatch import Resolved, resolve
from nvfp4_pallas.explicit import in_auto_mode
from nvfp4_pallas.ops import auto, implementations, transforms
from nvfp4_pallas.ops.checks import as_jax, check_attention, check_kv
from nvfp4_pallas.ops.request import (
  AttentionRequest,
  attention_request,
  attention_spec,
  whole,
)
from nvfp4_pallas.policy import MAX_WORKSPACE_BYTES


def prefill(
  q: jax.Array,
  cache: PagedKVCache,
  batch: RaggedBatch,
  *,
  read_path: str,
  implementation: str | None = None,
  causal: bool = True,
  sm_scale: float | None = None,
  window: int | None = None,
  soft_cap: float | None = None,
  sinks: jax.Array | None = None,
  q_levels: int = 2,
  new_kv: tuple[jax.Array, jax.Array] | None = None,
  max_workspace_bytes: int = MAX_WORKSPACE_BYTES,
) -> tuple[jax.Array, jax.Array]:
  """out_i = sum_j softmax_j(sm_scale * q'_i . k'_j) v_j over the keys that row i sees.

  Query i of a sequence with q_len queries stands at position kv_len - q_len + i (bottom-right
  alignment) and, when causal, sees the keys up to there. attention.py states the equations,
  read_paths.py what q' and k' are.

  Args:
    q: bfloat16, float16 or float32 [tokens, num_q_heads, head_dim], ragged by batch.cu_q_lens.
      num_q_heads is a multiple of the cache's num_kv_heads; query head h reads KV head
      h // (num_q_heads / num_kv_heads).
    cache: holds all kv_lens tokens of every sequence, this step's included (append first); with
      `new_kv` only those before this step. With a recent window and `new_kv`, call prefill before
      append: afterwards less of what came before this step is wide.
    batch: which rows belong to which sequence and where its pages are.
    read_path: the numerics: `bf16`, `fp8`, `nvfp4_dequant`, `nvfp4_repack`, `nvfp4_a4q`,
      `nvfp4_a8q`; or `auto`: of those with a bfloat16 Q and exact keys for the cache's formats, the
      one that measured costs say is fastest (ops/auto.py says which and why).
    implementation: who runs it; None lets `dispatch.resolve` choose.
    causal: False lets every query see all keys of its sequence.
    sm_scale: factor on the scores; None is 1 / sqrt(head_dim).
    window: see only the newest `window` keys up to the own position, that one included.
    soft_cap: scores become soft_cap * tanh(score / soft_cap). Not for a cache with a k_mean.
    sinks: float [num_q_heads], one more logit per head in the softmax's denominator.
    q_levels: NVFP4 levels of Q for `nvfp4_a4q`: 1, or 2 with a packed residual.
    new_kv: this step's (k, v) [tokens, num_kv_heads, dim] in wide form: they are attended to as
      bfloat16 with a bfloat16 Q, and only the keys before this step are read from the cache.
      kv_lens count them all the same, as for `append`.
    max_workspace_bytes: of device memory that the call may take for wide keys and values, beside
      its results. Kernels that would need more do not run: nvfp4_repack then widens tile by tile.

  Returns:
    out [tokens, num_q_heads, v_head_dim] in q's dtype, and lse float32 [tokens, num_q_heads], the
    natural log of the softmax's denominator, sinks included. A row that sees no key, padding
    included, has out 0 and lse -inf.

  Raises:
    ValueError: an argument breaks a rule (message: argument, rule, value).
    NotImplementedError: the named implementation cannot run (message: why).

  Source: FlashAttention arXiv:2205.14135; ragged layout as FlashInfer's batch prefill; A4Q after
  the dual-level query of flashinfer issue 4269.
  """
  spec = attention_spec(
    q,
    read_path,
    causal=causal,
    sm_scale=sm_scale,
    window=window,
    soft_cap=soft_cap,
    q_levels=q_levels,
  )
  check_attention(q, cache, batch, spec, sinks)
  recent.check_rings(cache.recent, batch)
  if new_kv is not None:
    if not isinstance(new_kv, (tuple, list)) or len(new_kv) != 2:
      raise ValueError(f"new_kv must be a pair (k, v), got {type(new_kv).__name__}")
    check_kv(*new_kv, cache, prefix="new_kv's ")
    check_batch(batch, num_tokens=q.shape[0], page_size=cache.page_size, appends=True)
    if new_kv[0].shape[0] != q.shape[0]:
      raise ValueError(f"new_kv must have q's {q.shape[0]} tokens, got {new_kv[0].shape[0]}")
  max_workspace_bytes = whole("max_workspace_bytes", max_workspace_bytes)
  if max_workspace_bytes < 0:
    raise ValueError(f"max_workspace_bytes must not be negative, got {max_workspace_bytes}")
  q, cache, batch, sinks, new_kv = as_jax(q, cache, batch, sinks, new_kv)
  run = functools.partial(
    _prefill,
    spec=spec,
    limits={"max_workspace_bytes": max_workspace_bytes},
    implementation=implementation,
  )
  return in_auto_mode(run, lambda: (q, q[..., 0]), q, cache, batch, sinks, new_kv)


def _prefill(q, cache, batch, sinks, new_kv, *, spec, limits, implementation):
  """prefill after the checks of its arguments, all of them jax arrays."""
  spec = auto.settle(spec, "prefill", q, cache, batch, **limits)
  debug.check_attention(cache, batch, spec, q.shape[0], new_kv=new_kv is not None)
  request = attention_request(
    q,
    cache,
    spec,
    new_kv=new_kv is not None,
    num_seqs=batch.num_seqs,
    max_pages=batch.max_pages,
    **limits,
  )
  resolved = resolve_prefill(request, implementation)
  if new_kv is not None:
    new_kv = transforms.stored_rows(cache, *new_kv)
  out, lse = transforms.attend(resolved.function, q, cache, batch, spec, new_kv, sinks=sinks)
  return out.astype(q.dtype), lse


def resolve_prefill(request: AttentionRequest, implementation: str | None = None) -> Resolved:
  """Who runs it; the reason also names the kernel where an implementation has two."""
  return resolve(implementations.PREFILL, request, implementation)
