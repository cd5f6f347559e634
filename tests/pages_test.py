"""The caches that are timed, and the reference that judges what comes of them."""

import functools
from unittest import mock

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import nvfp4_pallas as nv
from benchmarks import oracle, pages, reference, small
from benchmarks import workloads as w
from benchmarks.attention_cases import Shared
from benchmarks.cases import VARIANTS
from benchmarks.pages import Pools, most_pages, pages_for, tables_for
from tests.base import TestCase


def small_pools(num_pages=12):
  return Pools(w.heads_of("small"), 64, num_pages)


class PoolsTest(TestCase):
  def test_formats_hold_the_same_values(self):
    """Each as the oracle rounds what the bf16 pages hold."""
    pools = shared_for_all().pools
    wide = np.asarray(pools.cache("bf16", "bf16").v.data)[-1:]
    codes, scales = oracle.encode(wide)
    nvfp4 = pools.cache("nvfp4", "nvfp4").v
    np.testing.assert_array_equal(nvfp4.data[-1:], codes)
    np.testing.assert_array_equal(np.asarray(nvfp4.block_scale)[-1:].view(np.uint8), scales)
    fp8 = np.asarray(pools.cache("fp8", "fp8").v.data)[-1:]
    np.testing.assert_array_equal(fp8, wide.astype(np.float32).astype(fp8.dtype))

  def test_made_in_parts(self):
    """Pages come in whole parts; every page has values of its own."""
    with mock.patch.object(pages, "CHUNK_VALUES", 2 * 2 * 64 * 128):
      pools = small_pools(5)
    self.assertEqual(pools.num_pages, 6)
    data = np.asarray(pools.cache("bf16", "bf16").k.data).astype(np.float32)
    self.assertEqual(data.shape, (6, 2, 64, 128))
    self.assertLen(np.unique(data[:, 0, 0, 0]), 6)
    self.assertBetween(data.std(), 0.9, 1.1)
    nvfp4 = pools.cache("nvfp4", "nvfp4").k
    self.assertEqual(nvfp4.data.shape, (6, 2, 64, 64))
    error = oracle.decode_pool(nvfp4) - data
    self.assertLess(np.linalg.norm(error) / np.linalg.norm(data), 0.12)

  def test_tables_are_of_different_pages(self):
    work = w.attention(3, 1, 130, geometry="small")
    tables = tables_for(work, rotated_bytes=2**20)
    self.assertEqual(tables.pages, pages_for(work, 2**20))
    named = np.concatenate([np.asarray(table).reshape(-1) for table in tables.tables])
    self.assertLen(np.unique(named), len(named))
    self.assertLess(named.max(), tables.pages)
    self.assertEqual(tables.tables[0].shape, (3, 3))
    nvfp4_bytes = tables.pages * 64 * 2 * 144
    self.assertBetween(nvfp4_bytes, 2**20, 2**20 + 9 * 64 * 2 * 144)

  def test_more_than_the_rotated_bytes_is_one_table(self):
    work = w.attention(1, 1, 1024, geometry="small")
    self.assertEqual((pages_for(work, 0), len(tables_for(work, 0).tables)), (16, 1))

  def test_as_many_pages_as_memory_has(self):
    heads = w.heads_of("8b")
    self.assertEqual(most_pages(heads, 64, None), float("inf"))
    tokens = 64 * most_pages(heads, 64, 105 * 10**9)
    self.assertGreaterEqual(tokens, 64 * 32768)  # the largest shape on an H200
    self.assertLess(tokens * 2 * 8 * 128 * (2 + 1 + 9 / 16), 105e9 / 2)


JUDGED = ("bf16", "nvfp4_dequant", "nvfp4_a4q", "nvfp4_a8q")  # the others add nothing but compiling


@functools.cache
def shared_for_all():
  work = w.attention(2, 70, 200, geometry="small")
  return Shared.of(work, small_pools(), tables_for(work, 0), None)


class ReferenceTest(TestCase):
  """Judged rows of the definition, and of something wrong."""

  @property
  def shared(self):
    return shared_for_all()

  def run_definition(self, variant, table=None):
    work, shared = self.shared.workload, self.shared
    table = shared.tables.tables[0] if table is None else table
    batch = nv.RaggedBatch(
      table, jnp.full((2,), work.kv_len, jnp.int32), jnp.asarray([0, 70, 140], jnp.int32)
    )
    cache = shared.pools.cache(variant.k_format, variant.v_format)
    run = small.operation(variant.read_path, variant.q_levels, False, "xla")
    return shared.judged(run(shared.q[0], cache, batch)[0])

  @parameterized.parameters(*((v,) for v in VARIANTS if v.read_path in JUDGED))
  def test_the_definition_is_right(self, variant):
    errors = self.shared.reference.errors(variant, self.run_definition(variant))
    self.assertBetween(errors["kernel_error"], 1e-5, 4e-3)  # the result is in bfloat16
    limits = {"bf16": (0, 4e-3)}.get(variant.k_format, (0.08, 0.4))
    self.assertBetween(errors["format_error"], *limits)

  def test_one_level_of_q_is_worse_than_two(self):
    one, two = (v for v in VARIANTS if v.read_path == "nvfp4_a4q")
    errors = [self.shared.reference.errors(v, self.run_definition(v)) for v in (one, two)]
    self.assertGreater(errors[0]["format_error"], errors[1]["format_error"])
    # And each is judged by its own numbers.
    mixed = self.shared.reference.errors(two, self.run_definition(one))
    self.assertGreater(mixed["kernel_error"], 0.02)

  def test_another_page_is_seen(self):
    table = self.shared.tables.tables[0].at[0, 2].set(self.shared.tables.tables[0][1, 0])
    out = self.run_definition(VARIANTS[0], table)
    self.assertGreater(self.shared.reference.errors(VARIANTS[0], out)["kernel_error"], 0.1)

  def test_first_middle_and_last_tokens_are_judged(self):
    self.assertEqual(reference.judged_tokens(70).tolist(), [0, 35, 69])
    self.assertEqual(reference.judged_tokens(1).tolist(), [0])

  def test_keys_of_now_and_not_of_other_shapes(self):
    pools = shared_for_all().pools
    first, second = (pools.sequence("k", "nvfp4", np.asarray(p), 0) for p in ([0, 1], [1, 0]))
    np.testing.assert_array_equal(first.values[:64], second.values[64:])
    again = pools.sequence("k", "nvfp4", np.asarray([1, 0]), 1)
    self.assertFalse((again.values == second.values).all())
    self.assertIs(pools.sequence("k", "nvfp4", np.asarray([1, 0]), 1), again)


if __name__ == "__main__":
  absltest.main()
