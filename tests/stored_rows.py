"""Rows of K and V, and the bytes that a pool keeps of each, by the oracle and not the package."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

from benchmarks import oracle
from nvfp4_pallas import PagePool


@dataclasses.dataclass(frozen=True)
class StoredRows:
  """
  Attributes:
    values: bfloat16 [count, heads, head_dim], what is appended.
    stored: uint8 [count, heads, bytes], for each array of the pool, in pool_arrays' order.
  """

  values: np.ndarray
  stored: tuple[np.ndarray, ...]


def make(pool: PagePool, values: np.ndarray) -> StoredRows:
  """values [count, num_kv_heads, head_dim], as `pool` rounds them; its pages do not matter."""
  values = values.astype(ml_dtypes.bfloat16)
  scale = np.asarray(pool.decode_scale)
  if pool.format == "bf16":
    return StoredRows(values, (values.view(np.uint8),))
  if pool.format == "fp8":
    with np.errstate(invalid="ignore", over="ignore"):  # NaN, infinity and what becomes it
      scaled = values.astype(np.float32) / scale[:, None]
      inside = np.where(np.isfinite(scaled), np.clip(scaled, -448, 448), np.nan)
    return StoredRows(values, (inside.astype(ml_dtypes.float8_e4m3fn).view(np.uint8),))
  return StoredRows(values, oracle.encode(values, scale, pool.scale_search))


def of_pages(array, pages: list[int], tokens: int) -> np.ndarray:
  """uint8 [tokens, heads, bytes]: the first rows of some pages of an array of a pool."""
  rows = np.asarray(array)[np.asarray(pages, int)].swapaxes(1, 2)
  return rows.reshape(-1, *rows.shape[2:])[:tokens].view(np.uint8)
