"""prefill over a cache with a recent window by kernels that know one kind of page.

    out, lse = merge(pages, ring, this step's rows if new_kv)

Every row sees all of the pages' tokens, as none of them is newer than the row: with new_kv they are
of the past, and without it the window must be as long as the step. So the mask is the ring's, or
the step's, alone. Sequences without a ring have the step in their pages, and those are attended to
apart, with the mask.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax.numpy as jnp

from nvfp4_pallas import attention, recent
from nvfp4_pallas.cache import ring_pages
from nvfp4_pallas.ops.request import AttentionRequest


def part_requests(request: AttentionRequest) -> tuple[AttentionRequest, ...]:
  """What is asked of the kernels: for the pages, the ring, and, after append, for the pages of
  sequences without one."""
  part = functools.partial(dataclasses.replace, request, recent_window=0, new_kv=False)
  wide = dataclasses.replace(request.spec, read_path="bf16", causal=not request.new_kv)
  parts = [
    part(spec=dataclasses.replace(request.spec, causal=False)),
    part(
      spec=wide,
      formats=("bf16", "bf16"),
      max_keys=ring_pages(request.recent_window, request.page_size) * request.page_size,
    ),
  ]
  return (*parts, *(() if request.new_kv else (part(),)))


def unsupported(request: AttentionRequest) -> str | None:
  """Why parts cannot be put together, whoever attends to them."""
  if request.spec.window is not None:
    return "the kernels count a sliding window from a sequence's last page, not from its ring"
  if not request.spec.causal:
    return "the kernels' rows of this step see what is before them only, so causal must be True"
  if not request.new_kv and request.num_tokens > request.recent_window:
    return (
      f"rows of a step of up to {request.num_tokens} tokens may be older than the recent window of "
      f"{request.recent_window}; with new_kv, before append, they are not"
    )
  return None


def attend(q, cache, batch, spec, new_kv, sinks, *, runs: Sequence[Callable]):
  """`runs`: prefill's functions for the requests above."""
  window = cache.recent
  where = (recent.spans if new_kv is None else recent.past_spans)(window, batch)
  has_ring = where.ring < window.num_rings
  q = q.astype(jnp.bfloat16).astype(jnp.float32)  # so that parts come unrounded
  pages, rings = dataclasses.replace(cache, recent=None), recent.ring_cache(window)
  wide = dataclasses.replace(spec, read_path="bf16", causal=new_kv is None)
  unmasked = dataclasses.replace(spec, causal=False)

  def of_pages(run, lens, spec):
    return run(q, pages, dataclasses.replace(batch, kv_lens=lens), spec, None, None)

  states = [runs[1](q, rings, recent.ring_batch(window, batch, where), wide, None, None)]
  if new_kv is not None:
    from nvfp4_pallas.kernels import prefill_mosaic_sm90 as kernel

    states.append(of_pages(runs[0], where.start, unmasked))
    states.append(kernel.attention_to_rows(q, new_kv, batch, spec, out_dtype=jnp.float32))
  else:
    states.append(of_pages(runs[0], jnp.where(has_ring, where.start, 0), unmasked))
    if batch.ring_ids is not None:  # else every sequence has a ring
      states.append(of_pages(runs[2], jnp.where(has_ring, 0, where.start), spec))
  return attention.add_sinks(functools.reduce(attention.merge_two, states), sinks)
