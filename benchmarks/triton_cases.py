"""Calls of prefill and decode on sm_120, as data: what is compiled ahead of time, and timed.

Shapes are those of a served model: 8 KV heads, 32 query heads, head_dim 128, pages of 16 tokens,
where a case does not say otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import nvfp4_pallas as nv
from benchmarks.aot_calls import abstract_cache, queries
from nvfp4_pallas.dispatch import Resolved
from nvfp4_pallas.kernels.attention_triton_sm120 import KEYS, Config, choose_config
from nvfp4_pallas.ops.decode import resolve_decode
from nvfp4_pallas.ops.prefill import resolve_prefill
from nvfp4_pallas.ops.request import attention_request, attention_spec

TARGET = "sm_120"
SMEM_BYTES = 99 * 1024  # of a block, on sm_120
MAX_REGISTERS = 255  # of a thread; with 256 threads a block that is all there are


@dataclasses.dataclass(frozen=True)
class Case:
  """One call.

  Attributes:
    name: `phase/variant`.
    read_path, q_levels, k_format, v_format: the numerics.
    seqs, q_len, kv_len: of a batch of equal sequences; decode where q_len is 1.
    head_dim: of K and V.
    group, page_size: of the cache and its queries.
    window, soft_cap: as in ops.prefill, or None.
    max_spills: bytes of spill stores and loads that there may be before and after the loops over
      keys; in those, none.
  """

  name: str
  read_path: str
  shape: tuple[int, int, int] = (1, 8192, 8192)
  q_levels: int = 2
  k_format: str = "nvfp4"
  v_format: str = "nvfp4"
  head_dim: int = 128
  group: int = 4
  page_size: int = 16
  window: int | None = None
  soft_cap: float | None = None
  max_spills: int = 0

  @property
  def decodes(self) -> bool:
    return self.shape[1] == 1

  def build(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function and its abstract arguments. Trace it for the target (dispatch.use_target)."""
    operation = nv.decode if self.decodes else nv.prefill
    options = {"q_levels": self.q_levels, "window": self.window, "soft_cap": self.soft_cap}
    return partial(operation, read_path=self.read_path, **options), self.arguments()

  def arguments(self) -> tuple[Any, ...]:
    """(q, cache, batch)."""
    seqs, q_len, kv_len = self.shape
    options = {"head_dim": self.head_dim, "page_size": self.page_size}
    cache = abstract_cache(self.k_format, self.v_format, **options)
    return queries(cache, seqs, q_len, self.group, kv_len // self.page_size)

  def resolve(self) -> Resolved:
    """Who runs it on the current target."""
    q, cache, batch = self.arguments()
    options: Any = {"causal": True, "sm_scale": None, "soft_cap": self.soft_cap}
    spec = attention_spec(q, self.read_path, window=self.window, q_levels=self.q_levels, **options)
    if self.decodes:
      return resolve_decode(attention_request(q, cache, spec, max_pages=batch.max_pages))
    lengths = {"num_seqs": batch.num_seqs, "max_pages": batch.max_pages}
    return resolve_prefill(attention_request(q, cache, spec, **lengths))

  def config(self) -> Config:
    """How the kernel is cut."""
    seqs, q_len, _ = self.shape
    return choose_config(seqs * q_len, seqs, self.group, self.decodes)

  @property
  def loops(self) -> int:
    """The kernel has its loop over keys for tiles that all rows see, once more for those that some
    rows see a part of, and with a window for such ones at the other end."""
    return 2 if self.window is None else 3

  def products(self) -> dict[str, int]:
    """Tensor core instructions that the kernel must have, by kind, and no others."""
    config = self.config()
    # Of 16 rows and 8 columns, and 64 (FP4) or 16 (BF16) of what is added up.
    share = self.loops * config.rows // 16
    scores, levels = share * (KEYS // 8), self.q_levels if self.read_path == "nvfp4_a4q" else 0
    out = share * (self.head_dim // 8) * (KEYS // 16)
    fp4 = levels * scores * (self.head_dim // 64)
    bf16 = out if levels else out + scores * (self.head_dim // 16)
    return {"OMMA": fp4 // config.num_warps, "HMMA": bf16 // config.num_warps}


CHUNK, TAIL, DECODE = (4, 128, 2048), (1, 16, 16384), (16, 1, 8192)
WIDE: dict[str, dict[str, Any]] = {
  "bf16": {"read_path": "bf16", "k_format": "bf16", "v_format": "bf16"},
  "fp8": {"read_path": "fp8", "k_format": "fp8", "v_format": "fp8"},
}
CASES = (
  Case("prefill/a4q", "nvfp4_a4q"),
  Case("prefill/a4q_1_level", "nvfp4_a4q", q_levels=1),
  Case("prefill/a4q_64_window", "nvfp4_a4q", q_levels=1, head_dim=64, window=300),
  # Two levels of Q take all registers, and what a window or a division by the group needs as well
  # is spilled.
  Case("prefill/a4q_window", "nvfp4_a4q", window=300, max_spills=200),
  Case("prefill/a4q_window_soft_cap", "nvfp4_a4q", window=300, soft_cap=30.0, max_spills=136),
  Case("prefill/a4q_group_5_page_64", "nvfp4_a4q", group=5, page_size=64, max_spills=104),
  Case("prefill/a4q_group_7", "nvfp4_a4q", group=7, max_spills=64),
  Case("prefill/dequant", "nvfp4_dequant"),
  Case("prefill/repack", "nvfp4_repack"),
  Case("prefill/fp8", **WIDE["fp8"]),
  Case("prefill/bf16", **WIDE["bf16"]),
  Case("chunk/a4q", "nvfp4_a4q", CHUNK),
  Case("chunk/dequant", "nvfp4_dequant", CHUNK),
  Case("tail/a4q", "nvfp4_a4q", TAIL),
  Case("tail/a4q_64", "nvfp4_a4q", (4, 16, 16384), head_dim=64, max_spills=16),
  Case("tail/a4q_group_7", "nvfp4_a4q", TAIL, group=7, max_spills=160),
  Case("tail/dequant", "nvfp4_dequant", TAIL),
  Case("decode/a4q", "nvfp4_a4q", DECODE),
  Case("decode/dequant", "nvfp4_dequant", DECODE),
)


def named(name: str) -> Case:
  return next(case for case in CASES if case.name == name)
