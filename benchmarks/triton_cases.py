"""The calls of Triton kernels that are compiled ahead of time, as data.

Shapes are those of a served model: 8 KV heads, 32 query heads, head_dim 128, pages of 16 tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from benchmarks.aot_cases import abstract_cache, queries

GROUP, PAGE_SIZE = 4, 16
SMEM_BYTES = 99 * 1024  # of a block, on sm_120


@dataclasses.dataclass(frozen=True)
class Case:
  """One call of attention_triton_sm120.attention, and what must come of it.

  Attributes:
    name: `phase/variant`.
    read_path, q_levels, k_format, v_format: the numerics.
    seqs, q_len, kv_len: of a batch of equal sequences.
    head_dim: of K and V.
    window: as in ops.prefill; 0 for none.
    num_splits: as in the kernel; of decode, for which q_len is 1, and of short queries.
    max_registers: of a thread.
  """

  name: str
  read_path: str
  q_levels: int = 2
  k_format: str = "nvfp4"
  v_format: str = "nvfp4"
  seqs: int = 4
  q_len: int = 2048
  kv_len: int = 8192
  head_dim: int = 128
  window: int = 0
  num_splits: int = 1
  max_registers: int = 255

  def build(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function and its abstract arguments."""
    from functools import partial

    import jax.numpy as jnp

    from nvfp4_pallas.kernels import attention_triton_sm120 as kernel
    from nvfp4_pallas.read_paths import AttentionSpec

    cache = abstract_cache(
      self.k_format, self.v_format, head_dim=self.head_dim, page_size=PAGE_SIZE
    )
    spec = AttentionSpec(
      self.read_path,
      causal=True,
      sm_scale=self.head_dim**-0.5,
      window=self.window or None,
      q_levels=self.q_levels,
    )
    run = partial(
      kernel.attention,
      spec=spec,
      num_splits=self.num_splits,
      one_each=self.q_len == 1,
      out_dtype=jnp.bfloat16 if self.num_splits == 1 else jnp.float32,
    )
    return run, queries(cache, self.seqs, self.q_len, GROUP, self.kv_len // PAGE_SIZE)

  def config(self):
    """The kernel's own."""
    from nvfp4_pallas.kernels.attention_triton_sm120 import choose_config

    return choose_config(self.seqs * self.q_len, self.seqs, GROUP, self.q_len == 1)

  @property
  def loops(self) -> int:
    """The kernel has its loop over keys for tiles that all rows see, once more for those that some
    rows see a part of, and with a window for such ones at the other end."""
    return 3 if self.window else 2

  def products(self) -> dict[str, int]:
    """Tensor core instructions that the kernel must have, by kind, and no others."""
    from nvfp4_pallas.kernels.attention_triton_sm120 import KEYS

    config = self.config()
    # Of 16 rows and 8 columns, and 64 (FP4) or 16 (BF16) of what is added up.
    share = self.loops * config.rows // 16
    scores, levels = share * (KEYS // 8), self.q_levels if self.read_path == "nvfp4_a4q" else 0
    out = share * (self.head_dim // 8) * (KEYS // 16)
    fp4 = levels * scores * (self.head_dim // 64)
    bf16 = out if levels else out + scores * (self.head_dim // 16)
    return {"OMMA": fp4 // config.num_warps, "HMMA": bf16 // config.num_warps}


TAIL: dict[str, Any] = {"seqs": 1, "q_len": 16, "kv_len": 16384, "num_splits": 28}
DECODE: dict[str, Any] = {"seqs": 16, "q_len": 1, "num_splits": 2}
CASES = (
  Case("prefill/a4q", "nvfp4_a4q"),
  Case("prefill/a4q_1_level", "nvfp4_a4q", q_levels=1),
  Case("prefill/a4q_64_window", "nvfp4_a4q", head_dim=64, window=300),
  Case("prefill/dequant", "nvfp4_dequant"),
  Case("prefill/bf16", "bf16", k_format="bf16", v_format="bf16"),
  Case("prefill/fp8", "fp8", k_format="fp8", v_format="fp8"),
  Case("tail/a4q", "nvfp4_a4q", **TAIL),
  Case("decode/a4q", "nvfp4_a4q", **DECODE),
  Case("decode/dequant", "nvfp4_dequant", **DECODE),
)
