"""How far a timed call is from float64, judged by a few of its rows.

Three query tokens of the first sequence, all query heads of its first KV head: with keys of that
head alone it costs milliseconds on a CPU, whatever the shape. Two errors stand apart, as in the
`small` command: to attention over the same decoded bytes, which is the arithmetic's, and to
attention over the wide values that the pages were made of with Q as it was, which is the format's
and the read path's.
"""

from __future__ import annotations

import dataclasses
import functools

import ml_dtypes
import numpy as np

from benchmarks import oracle
from benchmarks.metrics import dense_rows, row_error
from benchmarks.pages import Pools, Sequence
from benchmarks.small import Variant
from benchmarks.workloads import Workload

HEAD = 0  # the KV head


def judged_tokens(q_len: int) -> np.ndarray:
  """The first, middle and last query token of a sequence."""
  return np.unique([0, q_len // 2, q_len - 1])


@dataclasses.dataclass
class Reference:
  """Of one shape, for every format and read path.

  Attributes:
    pages: [pages of the sequence], of the first sequence.
    q: bfloat16 [judged tokens, num_q_heads of HEAD, head_dim].
  """

  workload: Workload
  pools: Pools
  pages: np.ndarray
  q: np.ndarray

  def __post_init__(self):
    self._wide = functools.cache(lambda: self._attend("bf16", 1, ("bf16", "bf16")))
    self._exact = functools.cache(self._attend)

  def errors(self, variant: Variant, out: np.ndarray) -> dict[str, float]:
    """Words for a row, of `out` [judged tokens, num_q_heads of HEAD, head_dim]."""
    formats = variant.k_format, variant.v_format
    # Without a change of Q the levels change nothing either.
    levels = variant.q_levels if variant.read_path == "nvfp4_a4q" else 1
    path = variant.read_path if variant.read_path in ("nvfp4_a4q", "nvfp4_a8q") else "bf16"
    return {
      "kernel_error": row_error(self._exact(path, levels, formats), out),
      "format_error": row_error(self._wide(), out),
    }

  def _attend(self, path: str, levels: int, formats: tuple[str, str]) -> np.ndarray:
    k, v = (self._sequence(*of) for of in zip("kv", formats, strict=True))
    keys = _in_e4m3(k) if path == "nvfp4_a8q" else k.values
    q = oracle.round_q(self.q, path, levels)
    work = self.workload
    positions = work.kv_len - work.q_len + judged_tokens(work.q_len)
    return dense_rows(q, keys, v.values, positions, self.q.shape[-1] ** -0.5)

  def _sequence(self, side: str, format: str) -> Sequence:
    return self.pools.sequence(side, format, self.pages, HEAD)


def _in_e4m3(k: Sequence) -> np.ndarray:
  """K as A8Q sees it: E4M3 of the decoded, by a power of two that all keys share."""
  largest = k.largest_scale or 448 / 6
  unit = 2.0 ** np.ceil(np.log2(6 * largest / 448))
  scaled = np.clip(k.values / unit, -448, 448).astype(np.float32)
  return scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * unit
