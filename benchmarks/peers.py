"""Attention by others, as rows of the same table: equal work on the same tokens in the same run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from benchmarks import peers_cudnn, peers_flashinfer, peers_jax
from benchmarks.attention_cases import Shared
from benchmarks.records import Row
from benchmarks.small import Variant
from benchmarks.turns import Timed
from benchmarks.workloads import Workload

BF16 = Variant("bf16", "bf16", "bf16")
FP8 = Variant("fp8", "fp8", "fp8")
NVFP4 = Variant("nvfp4_dequant", "nvfp4", "nvfp4")


@dataclasses.dataclass(frozen=True)
class Peer:
  """A library that attends.

  Attributes:
    variants: that it is timed with.
    phases: of workloads that it can run.
    missing: why it cannot run on this machine at all, or None.
    prepare: makes the case; raises NotImplementedError with the reason where it cannot run this.
    fields: of a row, where they are not the workload's.
  """

  variants: tuple[Variant, ...]
  phases: tuple[str, ...]
  missing: Callable[[], str | None]
  prepare: Callable[[Shared, Variant, functools.partial[Row]], Timed]
  fields: Callable[[Workload], dict[str, Any]] = lambda workload: {}


PEERS = {
  "cudnn": Peer(
    (BF16,),
    ("prefill", "chunk", "tail", "decode"),
    peers_cudnn.missing,
    peers_cudnn.prepare,
    peers_cudnn.fields,
  ),
  "jax_paged": Peer((BF16,), ("decode",), peers_jax.missing, peers_jax.prepare),
  "flashinfer": Peer(
    (BF16, FP8, NVFP4),
    ("prefill", "chunk", "tail", "decode"),
    peers_flashinfer.missing,
    peers_flashinfer.prepare,
  ),
}
