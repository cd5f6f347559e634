"""prefill over a cache with a recent window by kernels that know one kind of page.

    out, lse = merge(pages, ring, this step's rows if new_kv)

With new_kv every row sees all of the pages' tokens, as they are of the past: the mask is the step's
alone. After append, rows older than what is in the pages (of sequences without a ring, behind a
shared prefix, or after some of the newest tokens were given up) see the pages up to themselves, and
the others all of them. So each sequence is cut in two there, and the pages are attended to with the
mask for the first halves and without it for the second.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax.numpy as jnp

from nvfp4_pallas import attention, recent
from nvfp4_pallas.batch import RaggedBatch
from nvfp4_pallas.cache import ring_pages
from nvfp4_pallas.ops.request import AttentionRequest


def part_requests(request: AttentionRequest) -> tuple[AttentionRequest, ...]:
  """What is asked of the kernels: for the pages, the ring, and, after append, for the pages with a
  mask."""
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
  q = q.astype(jnp.bfloat16).astype(jnp.float32)  # so that parts come unrounded
  pages, rings = dataclasses.replace(cache, recent=None), recent.ring_cache(window)
  wide = dataclasses.replace(spec, read_path="bf16", causal=new_kv is None)
  unmasked = dataclasses.replace(spec, causal=False)
  states = [runs[1](q, rings, recent.ring_batch(window, batch, where), wide, None, None)]
  if new_kv is not None:
    from nvfp4_pallas.kernels import prefill_mosaic_sm90 as kernel

    paged = dataclasses.replace(batch, kv_lens=where.start)
    states.append(runs[0](q, pages, paged, unmasked, None, None))
    states.append(kernel.attention_to_rows(q, new_kv, batch, spec, out_dtype=jnp.float32))
  else:
    older, newer = _halves(batch, where.start)
    states.append(runs[0](q, pages, newer, unmasked, None, None))
    states.append(runs[2](q, pages, older, spec, None, None))
  return attention.add_sinks(functools.reduce(attention.merge_two, states), sinks)


def _halves(batch: RaggedBatch, start) -> tuple[RaggedBatch, RaggedBatch]:
  """Twice as many sequences: the rows before token `start`, which are the last of the first `start`
  tokens, and those from there on. In each of the two batches the other halves have no keys."""
  first = batch.kv_lens - batch.q_lens
  inside = jnp.clip(start - first, 0, batch.q_lens)
  cuts = jnp.stack([batch.cu_q_lens[:-1] + inside, batch.cu_q_lens[1:]], axis=1).reshape(-1)
  cu_q_lens = jnp.concatenate([batch.cu_q_lens[:1], cuts])
  table = jnp.repeat(batch.page_table, 2, axis=0)
  nothing = jnp.zeros_like(start)

  def half(*lens):
    return RaggedBatch(table, jnp.stack(lens, axis=1).reshape(-1), cu_q_lens)

  return half(start, nothing), half(nothing, start)
