"""What an attention implementation must know to say whether it can run."""

from __future__ import annotations

import dataclasses
import math
import operator

import jax
from jax.core import Tracer

from nvfp4_pallas.cache import PagedKVCache
from nvfp4_pallas.ops.checks import check_is_array
from nvfp4_pallas.policy import MAX_WORKSPACE_BYTES
from nvfp4_pallas.read_paths import AttentionSpec


@dataclasses.dataclass(frozen=True)
class AttentionRequest:
  """Static facts of one prefill or decode call.

  Attributes:
    max_keys: what a row of the page table holds.
    max_workspace_bytes: that a kernel may take beside its results; decode takes none.
    recent_window: the cache's; 0 for none.
    the rest: as in ops.prefill.
  """

  spec: AttentionSpec
  formats: tuple[str, str]
  head_dim: int
  v_head_dim: int
  num_kv_heads: int
  group: int
  page_size: int
  q_dtype: str
  num_tokens: int
  num_seqs: int
  new_kv: bool
  num_splits: int | None
  max_keys: int
  max_workspace_bytes: int
  recent_window: int = 0

  @property
  def emulation(self) -> str:
    """What the Hopper kernels add to the reason why they run."""
    if self.spec.read_path != "nvfp4_a4q":
      return ""
    return "; A4Q emulated on 16-bit tensor cores: its numbers, not its speed"

  @property
  def too_large(self) -> str | None:
    """Why the plain kernel, which counts the elements of out in 32 bits, cannot run it."""
    elements = self.num_tokens * self.num_kv_heads * self.group * self.v_head_dim
    if elements < 2**32:
      return None
    return f"the kernel writes an out of less than 2^32 elements, this one has {elements}"


def attention_request(
  q: jax.Array,
  cache: PagedKVCache,
  spec: AttentionSpec,
  new_kv: bool = False,
  num_splits: int | None = None,
  num_seqs: int | None = None,
  max_pages: int = 0,
  max_workspace_bytes: int = MAX_WORKSPACE_BYTES,
) -> AttentionRequest:
  return AttentionRequest(
    spec=spec,
    formats=cache.formats,
    head_dim=cache.k.head_dim,
    v_head_dim=cache.v.head_dim,
    num_kv_heads=cache.num_kv_heads,
    group=q.shape[1] // cache.num_kv_heads,
    page_size=cache.page_size,
    q_dtype=str(q.dtype),
    num_tokens=q.shape[0],
    num_seqs=q.shape[0] if num_seqs is None else num_seqs,  # decode: a token each
    new_kv=new_kv,
    num_splits=num_splits,
    max_keys=max_pages * cache.page_size,
    max_workspace_bytes=max_workspace_bytes,
    recent_window=0 if cache.recent is None else cache.recent.tokens,
  )


def attention_spec(
  q: jax.Array,
  read_path: str,
  *,
  causal: bool,
  sm_scale: float | None,
  window: int | None,
  soft_cap: float | None,
  q_levels: int,
) -> AttentionSpec:
  """The static numerics of a call, from what the caller gave."""
  check_is_array("q", q)
  if q.ndim != 3 or q.shape[-1] == 0:
    raise ValueError(f"q must be [tokens, num_q_heads, head_dim], got {q.shape}")
  if sm_scale is None:
    sm_scale = 1.0 / math.sqrt(q.shape[-1])
  return AttentionSpec(
    read_path,
    causal=bool(_known("causal", causal)),
    sm_scale=float(_known("sm_scale", sm_scale)),
    window=None if window is None else whole("window", window),
    soft_cap=None if soft_cap is None else float(_known("soft_cap", soft_cap)),
    q_levels=_known("q_levels", q_levels),
  )


def whole(name: str, value) -> int:
  try:
    if isinstance(_known(name, value), bool):
      raise TypeError
    return operator.index(value)
  except TypeError:
    raise ValueError(f"{name} must be a whole number, got {value!r}") from None


def _known(name: str, value):
  """A kernel is made for these numbers, so they must be known when it is traced."""
  if isinstance(value, Tracer):
    raise ValueError(f"{name} must be a number known when the call is traced, got {value}")
  return value
