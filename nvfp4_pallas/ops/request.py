"""What an attention implementation must know to say whether it can run."""

from __future__ import annotations

import dataclasses
import math

import jax

from nvfp4_pallas.cache import PagedKVCache
from nvfp4_pallas.read_paths import AttentionSpec


@dataclasses.dataclass(frozen=True)
class AttentionRequest:
  """Static facts of one prefill or decode call."""

  spec: AttentionSpec
  formats: tuple[str, str]
  head_dim: int
  v_head_dim: int
  group: int
  page_size: int
  q_dtype: str
  num_tokens: int
  new_kv: bool


def attention_request(
  q: jax.Array, cache: PagedKVCache, spec: AttentionSpec, new_kv: bool = False
) -> AttentionRequest:
  return AttentionRequest(
    spec=spec,
    formats=cache.formats,
    head_dim=cache.k.head_dim,
    v_head_dim=cache.v.head_dim,
    group=q.shape[1] // cache.num_kv_heads,
    page_size=cache.page_size,
    q_dtype=str(q.dtype),
    num_tokens=q.shape[0],
    new_kv=new_kv,
  )


def default_sm_scale(q: jax.Array) -> float:
  if q.ndim != 3 or q.shape[-1] == 0:
    raise ValueError(f"q must be [tokens, num_q_heads, head_dim], got {q.shape}")
  return 1.0 / math.sqrt(q.shape[-1])
