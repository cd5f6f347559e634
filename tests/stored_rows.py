"""Rows of K and V, and the bytes that a pool keeps of each, by the oracle and not the package.

A pool may rotate its rows or take a mean off them. Sums of float32 depend on their order, which is
the device's; of `whole` rows they do not, since every one of them is exact.
"""

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
    kept: the same as the pool transforms them: what rings hold.
    stored: uint8 [count, heads, bytes], for each array of the pool, in pool_arrays' order.
  """

  values: np.ndarray
  kept: np.ndarray
  stored: tuple[np.ndarray, ...]


def whole(r: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
  """Whole numbers of up to 8 bits, times a power of two for each head's row."""
  return r.integers(-255, 256, shape) * 2.0 ** r.integers(-4, 4, (*shape[:-1], 1))


def mean_of(r: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
  """One that whole rows lose exactly."""
  return (r.integers(-16, 17, shape) / 4).astype(np.float32)


def make(pool: PagePool, values: np.ndarray) -> StoredRows:
  """values [count, num_kv_heads, head_dim], as `pool` rounds them; its pages do not matter."""
  values = values.astype(ml_dtypes.bfloat16)
  kept = transformed(values, pool.rotation, pool.mean)
  return StoredRows(values, kept, _stored(pool, kept))


def _stored(pool: PagePool, values: np.ndarray) -> tuple[np.ndarray, ...]:
  scale = np.asarray(pool.decode_scale)
  if pool.format == "bf16":
    return (values.view(np.uint8),)
  if pool.format == "fp8":
    with np.errstate(invalid="ignore", over="ignore"):  # NaN, infinity and what becomes it
      scaled = values.astype(np.float32) / scale[:, None]
      inside = np.where(np.isfinite(scaled), np.clip(scaled, -448, 448), np.nan)
    return (inside.astype(ml_dtypes.float8_e4m3fn).view(np.uint8),)
  return oracle.encode(values, scale, pool.scale_search)


def transformed(x: np.ndarray, rotation: str | None, mean=None) -> np.ndarray:
  """Rows without `mean`, then rotated, rounded once to their dtype."""
  moved = x.astype(np.float32)
  if mean is not None:
    moved = moved - np.asarray(mean)
  if rotation is not None:
    signs = hadamard_signs(x.shape[-1])
    with np.errstate(invalid="ignore"):  # infinity less infinity
      sums = (moved.astype(np.float64) @ signs).astype(np.float32)
    moved = sums * np.float32(1 / np.sqrt(np.abs(signs).sum(axis=0)[0]))
  return moved.astype(x.dtype)


def hadamard_signs(d: int) -> np.ndarray:
  """Of the rotation's matrix, by Sylvester's construction: blocks of the largest power of two."""
  h = np.ones((1, 1))
  while d % (2 * len(h)) == 0:
    h = np.block([[h, h], [h, -h]])
  return np.kron(np.eye(d // len(h)), h)


def of_pages(array, pages: list[int], tokens: int) -> np.ndarray:
  """uint8 [tokens, heads, bytes]: the first rows of some pages of an array of a pool."""
  rows = np.asarray(array)[np.asarray(pages, int)].swapaxes(1, 2)
  return rows.reshape(-1, *rows.shape[2:])[:tokens].view(np.uint8)
