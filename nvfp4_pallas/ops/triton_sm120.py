"""prefill and decode by the Triton kernel for sm_120: which requests it takes, and how it is cut.

A device of that kind that lacks jax-triton is an installation to be mended: requests that the
kernel could run raise then, whoever was asked for by name or not, and nothing slower steps in.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax.numpy as jnp

from nvfp4_pallas import attention, recent
from nvfp4_pallas.dispatch import Entry
from nvfp4_pallas.kernels import blackwell
from nvfp4_pallas.ops import prefill_recent, transforms
from nvfp4_pallas.ops.merge import merge_splits
from nvfp4_pallas.ops.request import AttentionRequest

INVARIANT_SPLITS = 8


def _prefill_unsupported(request: AttentionRequest) -> str | None:
  parts = (request,)
  if request.recent_window and not request.new_kv:
    why_not = prefill_recent.unsupported(request)
    if why_not is not None:
      return why_not
    parts = prefill_recent.part_requests(request)
  return _unsupported(parts)


def _decode_unsupported(request: AttentionRequest) -> str | None:
  if request.recent_window and request.spec.window is not None:
    return "the kernel counts a sliding window from a sequence's last page, not from its ring"
  return _unsupported(_decode_parts(request))


def _unsupported(parts: tuple[AttentionRequest, ...]) -> str | None:
  from nvfp4_pallas.kernels import attention_triton_sm120 as kernel
  from nvfp4_pallas.kernels import triton_launch

  why_not = next(filter(None, map(kernel.unsupported, parts)), None)
  if why_not is None:
    triton_launch.check_installed()
  return why_not


def _decode_parts(request: AttentionRequest) -> tuple[AttentionRequest, ...]:
  """What is asked of the kernel: for the pages, and for the ring."""
  if not request.recent_window:
    return (request,)
  part = functools.partial(dataclasses.replace, request, recent_window=0)
  wide = dataclasses.replace(request.spec, read_path="bf16")
  return part(), part(spec=wide, formats=("bf16", "bf16"))


def _choose_prefill(request: AttentionRequest) -> tuple[Callable, str]:
  from nvfp4_pallas.kernels import attention_triton_sm120 as kernel

  if request.recent_window:
    parts = [_choose_prefill(part) for part in prefill_recent.part_requests(request)]
    run = functools.partial(prefill_recent.attend, runs=[run for run, _ in parts])
    return run, f"pages and ring apart, merged by lse; pages {parts[0][1]}"
  num_splits = kernel.splits_to_fill_a_gpu(request)
  ahead, how = kernel.widens_ahead(request)
  run = functools.partial(_attend, num_splits=num_splits, ahead=ahead)
  why = [blackwell.products(request)]
  why += [how] if request.spec.read_path == "nvfp4_repack" else []
  why += [f"keys in {num_splits} runs, joined by lse"] if num_splits > 1 else []
  return run, "; ".join(why)


def _choose_decode(request: AttentionRequest) -> tuple[Callable, str]:
  from nvfp4_pallas.kernels import attention_triton_sm120 as kernel

  num_splits = request.num_splits or kernel.splits_to_fill_a_gpu(request, one_each=True)
  runs = f"; keys in {num_splits} runs" if num_splits > 1 else ""
  return functools.partial(_decode, splits=num_splits), blackwell.products(request) + runs


def _attend(q, cache, batch, spec, new_kv, sinks, *, num_splits, ahead=False, one_each=False):
  from nvfp4_pallas.kernels import attention_triton_sm120 as kernel

  run = functools.partial(kernel.attention, ahead=ahead, one_each=one_each)
  if num_splits == 1:
    state = run(q, cache, batch, spec, out_dtype=transforms.out_dtype(q, cache, sinks))
  else:
    state = merge_splits(*run(q, cache, batch, spec, num_splits=num_splits))
  return attention.add_sinks(state, sinks)


def _decode(q, cache, batch, spec, num_splits, batch_invariant, sinks, *, splits):
  if batch_invariant and num_splits is None:
    splits = INVARIANT_SPLITS
  attend = functools.partial(_attend, new_kv=None, num_splits=splits, one_each=True)
  if cache.recent is None:
    return attend(q, cache, batch, spec, sinks=sinks)
  q = q.astype(jnp.bfloat16).astype(jnp.float32)  # so that parts come unrounded
  where = recent.spans(cache.recent, batch)
  paged = dataclasses.replace(batch, kv_lens=where.start)
  pages = dataclasses.replace(cache, recent=None)
  rings, ringed = recent.ring_cache(cache.recent), recent.ring_batch(cache.recent, batch, where)
  wide = dataclasses.replace(spec, read_path="bf16")
  states = (
    attend(q, pages, paged, spec, sinks=None),
    attend(q, rings, ringed, wide, sinks=None, num_splits=1),
  )
  return attention.add_sinks(attention.merge_two(*states), sinks)


PREFILL = Entry(_attend, _prefill_unsupported, _choose_prefill)
DECODE = Entry(_decode, _decode_unsupported, _choose_decode)
