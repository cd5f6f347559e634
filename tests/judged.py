"""Attention by a kernel beside float64 on the same decoded bytes: numerics, faults and bounds."""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from benchmarks import oracle
from nvfp4_pallas.cache import PagePool
from nvfp4_pallas.read_paths import AttentionSpec
from tests.cases import Built, Case


def spec_of(case: Case, read_path: str = "nvfp4_dequant", **options) -> AttentionSpec:
  options = {"causal": True, "sm_scale": case.head_dim**-0.5} | dict(case.options) | options
  return AttentionSpec(read_path, **options)


def exact_of(built: Built, spec: AttentionSpec, **more) -> oracle.Attention:
  """more: of oracle.attention, such as sinks."""
  batch = built.batch.page_table, built.batch.kv_lens, built.batch.cu_q_lens
  options = dataclasses.asdict(spec) | {"ring_ids": built.batch.ring_ids} | more
  return oracle.attention(built.q, built.cache, *batch, **options)


def poisoned(pool: PagePool, place: tuple[int, ...]) -> PagePool:
  """The pool with NaN for the block scale at `place` = (page, head, offset, block)."""
  scales = np.array(pool.block_scale).view(np.uint8)
  scales[place] = 0x7F
  return dataclasses.replace(pool, block_scale=jnp.asarray(scales.view(ml_dtypes.float8_e4m3fn)))


def check_close(test, out: np.ndarray, lse: np.ndarray, exact: oracle.Attention) -> None:
  """Of a kernel that rounds P to bfloat16 and nothing else, element by element within the bounds
  that oracle.Attention derives."""
  test.assertEqual((out.dtype, lse.dtype), (np.float32, np.float32))
  sees = np.isfinite(exact.lse)
  np.testing.assert_array_equal(lse[~sees], -np.inf)
  np.testing.assert_array_equal(out[~sees], 0)
  out_error = np.abs(out.astype(np.float64) - exact.out)
  test.assertTrue((out_error <= exact.out_bound(bf16_weights=True)).all())
  lse_error = np.abs(lse[sees].astype(np.float64) - exact.lse[sees])
  test.assertTrue((lse_error <= exact.lse_bound()[sees]).all())
