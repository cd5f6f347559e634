"""Which of the kernels for Hopper runs a decode, and how it is called."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from nvfp4_pallas import attention, recent
from nvfp4_pallas.batch import RaggedBatch
from nvfp4_pallas.cache import PagedKVCache
from nvfp4_pallas.dispatch import current_target
from nvfp4_pallas.ops import transforms
from nvfp4_pallas.ops.merge import merge_splits
from nvfp4_pallas.ops.request import AttentionRequest

_MULTIPROCESSORS = 132  # of an H100 SXM or H200


def choose_kernel(request: AttentionRequest) -> tuple[Callable, str]:
  """Which of mosaic_sm90's kernels runs what one of them can, and why.

  decode_mosaic_sm90.py is made for decode: PTX that cuts the batch as it likes.
  attention_mosaic_sm90.py, prefill's kernel in plain Pallas, takes other shapes and split counts,
  and can be interpreted.
  """
  from nvfp4_pallas.kernels import decode_mosaic_sm90

  why_not = decode_mosaic_sm90.unsupported(request)
  simple = plain if not request.recent_window else parts
  if request.num_splits is not None:
    why_not = "it cuts the batch itself, and num_splits is given"
  elif current_target().interpret is not None:
    why_not = "its PTX cannot be interpreted"
  if why_not is None:
    return split_kv, "by the split-KV kernel" + request.emulation
  why = f"by prefill's kernel, not the split-KV kernel: {why_not}"
  return simple, why + request.emulation


def split_kv(q, cache, batch, spec, num_splits, batch_invariant, sinks):
  from nvfp4_pallas.kernels import decode_mosaic_sm90 as kernel

  del num_splits  # none was given
  out_dtype = transforms.out_dtype(q, cache, sinks)
  state = kernel.decode(q, cache, batch, spec, batch_invariant=batch_invariant, out_dtype=out_dtype)
  return attention.add_sinks(state, sinks)


def plain(q, cache, batch, spec, num_splits, batch_invariant, sinks):
  from nvfp4_pallas.kernels import attention_mosaic_sm90 as kernel

  if num_splits is None:
    num_splits = 8 if batch_invariant else _splits_to_fill_a_gpu(cache, batch)
  out, lse = kernel.attention(
    q,
    cache,
    batch,
    spec,
    num_splits=num_splits,
    max_q_len=1,
    interpret=current_target().interpret,
  )
  state = (out, lse) if num_splits == 1 else merge_splits(out, lse)
  return attention.add_sinks(state, sinks)


def parts(q, cache, batch, spec, num_splits, batch_invariant, sinks):
  """Pages and ring apart, merged by lse."""
  where = recent.spans(cache.recent, batch)
  paged = dataclasses.replace(batch, kv_lens=where.start)
  pages = dataclasses.replace(cache, recent=None)
  rings, ringed = recent.ring_cache(cache.recent), recent.ring_batch(cache.recent, batch, where)
  wide = dataclasses.replace(spec, read_path="bf16")
  states = (
    plain(q, pages, paged, spec, num_splits, batch_invariant, None),
    plain(q, rings, ringed, wide, num_splits, batch_invariant, None),
  )
  return attention.add_sinks(attention.merge_two(*states), sinks)


def _splits_to_fill_a_gpu(cache: PagedKVCache, batch: RaggedBatch) -> int:
  """Splits for two programs a multiprocessor, none shorter than a few key tiles can be."""
  programs = batch.num_seqs * cache.num_kv_heads
  longest = batch.max_pages * cache.page_size
  return max(1, min(-(-2 * _MULTIPROCESSORS // max(programs, 1)), longest // 512, 32))


def unsupported(request: AttentionRequest) -> str | None:
  from nvfp4_pallas.kernels import attention_mosaic_sm90 as kernel

  if choose_kernel(request)[0] is split_kv:
    return None
  if request.recent_window and request.spec.window is not None:
    return "the kernels count a sliding window from a sequence's last page, not from its ring"
  return request.too_large or kernel.unsupported(request)
