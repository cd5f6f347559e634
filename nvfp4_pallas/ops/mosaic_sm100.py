"""prefill and decode by the kernel for sm_100: A4Q alone so far."""

from __future__ import annotations

import functools
from collections.abc import Callable

from nvfp4_pallas import attention
from nvfp4_pallas.dispatch import Entry, current_target
from nvfp4_pallas.kernels import blackwell
from nvfp4_pallas.ops.merge import merge_splits
from nvfp4_pallas.ops.request import AttentionRequest

INVARIANT_SPLITS = 8
MIN_KEYS_PER_SPLIT, MAX_SPLITS = 1024, 32


def _unsupported(request: AttentionRequest) -> str | None:
  from nvfp4_pallas.kernels import attention_mosaic_sm100 as kernel

  if request.recent_window:
    return "the kernel reads NVFP4 pages only, not a recent window's ring"
  return request.too_large or kernel.unsupported(request)


def _splits_to_fill_a_gpu(request: AttentionRequest) -> int:
  """For a program a multiprocessor, none shorter than MIN_KEYS_PER_SPLIT can be."""
  from nvfp4_pallas.kernels import attention_mosaic_sm100 as kernel

  width = max(1, kernel.ROWS // request.group)
  tiles = request.num_seqs * -(-request.num_tokens // (max(request.num_seqs, 1) * width))
  return blackwell.splits_to_fill(
    tiles * request.num_kv_heads,
    kernel.MULTIPROCESSORS,
    request.max_keys,
    MIN_KEYS_PER_SPLIT,
    MAX_SPLITS,
  )


def _choose(request: AttentionRequest) -> tuple[int, str]:
  splits = request.num_splits or _splits_to_fill_a_gpu(request)
  runs = f"; keys in {splits} runs" if splits > 1 else ""
  return splits, blackwell.products(request) + runs


def _choose_prefill(request: AttentionRequest) -> tuple[Callable, str]:
  splits, why = _choose(request)
  return functools.partial(_prefill, num_splits=splits), why


def _choose_decode(request: AttentionRequest) -> tuple[Callable, str]:
  splits, why = _choose(request)
  return functools.partial(_decode, splits=splits), why


def _prefill(q, cache, batch, spec, new_kv, sinks, *, num_splits=1, max_q_len=None):
  from nvfp4_pallas.kernels import attention_mosaic_sm100 as kernel

  out, lse = kernel.attention(
    q,
    cache,
    batch,
    spec,
    num_splits=num_splits,
    max_q_len=max_q_len,
    interpret=current_target().interpret,
  )
  state = (out, lse) if num_splits == 1 else merge_splits(out, lse)
  return attention.add_sinks(state, sinks)


def _decode(q, cache, batch, spec, num_splits, batch_invariant, sinks, *, splits=1):
  if batch_invariant and num_splits is None:
    splits = INVARIANT_SPLITS
  return _prefill(q, cache, batch, spec, None, sinks, num_splits=splits, max_q_len=1)


PREFILL = Entry(_prefill, _unsupported, _choose_prefill)
DECODE = Entry(_decode, _unsupported, _choose_decode)
