"""Which of the kernels for Hopper runs a prefill, and how it is called."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax.numpy as jnp

from nvfp4_pallas import attention
from nvfp4_pallas.dispatch import current_target
from nvfp4_pallas.ops import prefill_recent, transforms
from nvfp4_pallas.ops.request import AttentionRequest

# New tokens of a sequence, on average, up to which the kernel for short queries may run. It was
# timed up to 16, and at 128, where 4 sequences take it 59 us and whole query tiles 45. Which is
# faster in between is a guess.
MAX_TAIL = 128


def choose_kernel(request: AttentionRequest) -> tuple[Callable, str]:
  """Which of mosaic_sm90's kernels runs what one of them can, and why.

  tail_mosaic_sm90.py cuts the keys of few queries over the whole GPU: PTX.
  prefill_mosaic_sm90.py gives blocks whole query tiles: PTX.
  attention_mosaic_sm90.py, plain Pallas, takes every other shape, and can be interpreted.
  """
  chosen, why = _choose_kernel(request)
  return chosen, why + request.emulation


def _choose_kernel(request: AttentionRequest) -> tuple[Callable, str]:
  if request.recent_window:
    parts = [_choose_kernel(part) for part in prefill_recent.part_requests(request)]
    run = functools.partial(prefill_recent.attend, runs=[run for run, _ in parts])
    return run, f"pages and ring apart, merged by lse; pages {parts[0][1]}"
  from nvfp4_pallas.kernels import tail_mosaic_sm90
  from nvfp4_pallas.ops import prefill_choice_sm90 as whole_tiles

  not_tail = tail_mosaic_sm90.unsupported(request)
  if not_tail is None and request.num_tokens > MAX_TAIL * request.num_seqs:
    not_tail = f"sequences have more than {MAX_TAIL} new tokens on average"
  if not_tail is None and whole_tiles.fills_gpu(request):
    not_tail = "query tiles fill the GPU without cutting their keys"
  not_whole = whole_tiles.unsupported(request)
  if current_target().interpret is not None:
    not_tail = not_whole = "its PTX cannot be interpreted"
  if not_tail is None:
    shape = request.num_tokens, request.num_seqs, request.num_kv_heads, request.group
    return tail, f"by the kernel for short queries, {tail_mosaic_sm90.choose_config(*shape)[1]}"
  if not_whole is None:
    ahead, how = whole_tiles.widens_ahead(request)
    run = functools.partial(whole, ahead=ahead)
    where = "by the kernel for whole query tiles, not the one for short queries"
    return run, f"{where}: {not_tail}; {how}"
  return plain, f"by the plain kernel, not the one for whole query tiles: {not_whole}"


def workspace_bytes(request: AttentionRequest) -> int:
  """Of device memory, that mosaic_sm90 takes for wide keys and values while a call runs."""
  from nvfp4_pallas.ops import prefill_choice_sm90

  chosen, _ = choose_kernel(request)
  by_it = getattr(chosen, "func", None) is whole
  return prefill_choice_sm90.workspace_bytes(request) if by_it else 0


def plain(q, cache, batch, spec, new_kv, sinks):
  from nvfp4_pallas.kernels import attention_mosaic_sm90 as kernel

  state = kernel.attention(q, cache, batch, spec, interpret=current_target().interpret)
  return attention.add_sinks(state, sinks)


def tail(q, cache, batch, spec, new_kv, sinks):
  from nvfp4_pallas.kernels import tail_mosaic_sm90 as kernel

  return _with_sinks(kernel.attention, q, cache, batch, spec, sinks)


def whole(q, cache, batch, spec, new_kv, sinks, *, ahead):
  from nvfp4_pallas.kernels import prefill_mosaic_sm90 as kernel

  run = functools.partial(kernel.attention, ahead=ahead)
  if new_kv is None:
    return _with_sinks(run, q, cache, batch, spec, sinks)
  past = dataclasses.replace(batch, kv_lens=jnp.maximum(batch.kv_lens - batch.q_lens, 0))
  states = (
    run(q, cache, past, spec, queries_after=True, out_dtype=jnp.float32),
    kernel.attention_to_rows(q, new_kv, batch, spec, out_dtype=jnp.float32),
  )
  return attention.add_sinks(attention.merge_two(*states), sinks)


def _with_sinks(run, q, cache, batch, spec, sinks):
  state = run(q, cache, batch, spec, out_dtype=transforms.out_dtype(q, cache, sinks))
  return attention.add_sinks(state, sinks)


def unsupported(request: AttentionRequest) -> str | None:
  from nvfp4_pallas.kernels import attention_mosaic_sm90 as kernel

  if request.recent_window:
    why_not = prefill_recent.unsupported(request)
    parts = prefill_recent.part_requests(request)
    if why_not is None and request.new_kv:
      why_not = _rows_unsupported(parts[1])
    return why_not or next(filter(None, map(unsupported, parts)), None)
  chosen, why = choose_kernel(request)
  if chosen is not plain:
    return None
  why_not = request.too_large or kernel.unsupported(request)
  return None if why_not is None else f"{why}; and {why_not}"


def _rows_unsupported(request: AttentionRequest) -> str | None:
  """Why the kernel for this step's rows cannot run."""
  from nvfp4_pallas.ops import prefill_choice_sm90

  if current_target().interpret is not None:
    return "PTX cannot be interpreted"
  return prefill_choice_sm90.unsupported(dataclasses.replace(request, new_kv=True))
