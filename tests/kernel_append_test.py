"""The sm_90 append kernels against cache.encode_rows, byte for byte.

What is plain Pallas runs under GPU interpret mode, what is PTX in tests/ptx_emulator.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized

from nvfp4_pallas import cache as kv_cache
from nvfp4_pallas.kernels import append_mosaic_sm90 as kernel
from nvfp4_pallas.kernels import append_ptx
from tests import kernel_cases as cases
from tests import ptx_emulator
from tests.base import TestCase

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
PAGES, PAGE_SIZE = 3, 16
SLOTS = PAGES * PAGE_SIZE
ARRAYS = ("data", "block_scale")  # of a pool

encode_rows = jax.jit(kv_cache.encode_rows)


def random_cache(r, k_format="nvfp4", v_format="nvfp4", heads=2, k_dim=64, v_dim=64, **options):
  """Every byte of the pages random, so that a byte wrongly written shows; odd global scales."""

  def scale(format):
    return 1.0 if format == "bf16" else jnp.asarray(r.uniform(0.01, 2, heads), jnp.float32)

  def random(a):
    data = r.integers(0, 256, a.nbytes, dtype=np.uint8)
    return jnp.asarray(data.view(a.dtype).reshape(a.shape))

  cache = kv_cache.PagedKVCache.create(
    **{"num_pages": PAGES, "page_size": PAGE_SIZE} | options,
    num_kv_heads=heads,
    head_dim=k_dim,
    v_head_dim=v_dim,
    k_format=k_format,
    v_format=v_format,
    k_global_scale=scale(k_format),
    v_global_scale=scale(v_format),
  )
  pools = (
    kv_cache.with_arrays(pool, tuple(map(random, kv_cache.pool_arrays(pool))))
    for pool in (cache.k, cache.v)
  )
  return dataclasses.replace(cache, **dict(zip("kv", pools, strict=True)))


def random_rows(r, cache, tokens, dtype=BFLOAT16):
  """K and V rows of hard values, each head's for its own global scale."""
  rows = []
  for pool in (cache.k, cache.v):
    scales = np.ones(pool.num_kv_heads) if pool.global_scale is None else pool.global_scale
    row = (tokens, pool.head_dim)
    heads = [
      cases.hard_blocks(r, np.prod(row) // 16, scale, dtype).reshape(row)
      for scale in np.asarray(scales)
    ]
    rows.append(jnp.asarray(np.stack(heads, axis=1)))
  return rows


def expected(pool, x, slots):
  """The pool's bytes with the rows written one by one, on the host."""
  arrays = []
  encoded = encode_rows(pool, x)
  for before, rows in zip(kv_cache.pool_arrays(pool), encoded, strict=True):
    after, rows = cases.raw(before).copy(), cases.raw(rows)
    for row, slot in zip(rows, slots, strict=True):
      if 0 <= slot < pool.num_pages * pool.page_size:
        page, offset = divmod(slot, pool.page_size)
        after[page, :, offset] = row
    arrays.append(after)
  return arrays


class AppendTest(TestCase):
  def check(self, cache, k, v, slots):
    slots = np.asarray(slots, np.int32)
    got = cases.interpret(kernel.append, cache, k, v, jnp.asarray(slots))
    self.assertEqual(jax.tree.structure(got), jax.tree.structure(cache))
    for name, before, after, x in (("k", cache.k, got.k, k), ("v", cache.v, got.v, v)):
      want = expected(before, x, slots)
      for array, bytes in zip(kv_cache.pool_arrays(after), want, strict=True):
        np.testing.assert_array_equal(cases.raw(array), bytes, err_msg=name)

  @parameterized.parameters(
    (("nvfp4", "nvfp4"), (64, 128)),
    (("nvfp4", "nvfp4"), (256, 80)),
    (("nvfp4", "bf16"), (80, 112)),
    (("fp8", "nvfp4"), (112, 64)),
    (("bf16", "fp8"), (128, 256)),
  )
  def test_formats_and_head_dims(self, formats, dims):
    r = np.random.default_rng(0)
    cache = random_cache(r, *formats, 2, *dims)
    slots = r.permutation(SLOTS)[:6]
    self.check(cache, *random_rows(r, cache, len(slots)), slots)

  @parameterized.parameters(1, 3, 8)
  def test_heads(self, heads):
    r = np.random.default_rng(1)
    cache = random_cache(r, heads=heads, v_format="fp8")
    self.check(cache, *random_rows(r, cache, 3), (20, 3, 47))

  @parameterized.parameters(*kv_cache.PAGE_SIZES)
  def test_page_sizes(self, page_size):
    r = np.random.default_rng(2)
    cache = random_cache(r, page_size=page_size)
    slots = (0, page_size - 1, page_size, 3 * page_size - 1)
    self.check(cache, *random_rows(r, cache, len(slots)), slots)

  @parameterized.parameters("nvfp4", "fp8", "bf16")
  def test_skipped_slots(self, format):
    r = np.random.default_rng(3)
    cache = random_cache(r, format, format)
    slots = (5, -1, SLOTS - 1, SLOTS, SLOTS + 1, 2**31 - 1, -(2**31), -16, 17)
    self.check(cache, *random_rows(r, cache, len(slots)), slots)

  @parameterized.parameters(0, 2)
  def test_nothing_to_write(self, tokens):
    r = np.random.default_rng(4)
    cache = random_cache(r)
    self.check(cache, *random_rows(r, cache, tokens), (-1,) * tokens)

  @parameterized.product(dtype=("float16", "float32"), format=("nvfp4", "fp8"))
  def test_other_dtypes(self, dtype, format):
    r = np.random.default_rng(5)
    cache = random_cache(r, format, format)
    self.check(cache, *random_rows(r, cache, 3, np.dtype(dtype)), (20, 3, 47))

  def test_same_twice(self):
    r = np.random.default_rng(6)
    cache = random_cache(r)
    rows, slots = random_rows(r, cache, 3), jnp.asarray([20, 3, 47], jnp.int32)
    once = cases.interpret(kernel.append, cache, *rows, slots)
    twice = cases.interpret(kernel.append, once, *rows, slots)
    for first, second in zip(jax.tree.leaves(once), jax.tree.leaves(twice), strict=True):
      np.testing.assert_array_equal(cases.raw(first), cases.raw(second))

  def test_under_jit_and_scan(self):
    r = np.random.default_rng(7)
    cache = random_cache(r)
    k, v = random_rows(r, cache, 4)
    slots = jnp.asarray([[20, 3], [47, -1]], jnp.int32)

    def append_all(cache, k, v, slots, *, interpret):
      def step(cache, new):
        return kernel.append(cache, *new, interpret=interpret), None

      split = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), (k, v))
      return jax.lax.scan(step, cache, (*split, slots))[0]

    run = jax.jit(append_all, static_argnames="interpret")
    got = cases.interpret(run, cache, k, v, slots)
    for before, after, x in ((cache.k, got.k, k), (cache.v, got.v, v)):
      want = expected(before, x, np.asarray(slots).reshape(-1))
      for array, bytes in zip(kv_cache.pool_arrays(after), want, strict=True):
        np.testing.assert_array_equal(cases.raw(array), bytes)


class PtxTest(TestCase):
  def check(self, cache, tokens, slots, tuning=append_ptx.DEFAULT, *, from_pages=False):
    slots = np.asarray(slots, np.int32)
    pools = {"k": cache.k, "v": cache.v}
    new = dict(zip("kv", random_rows(np.random.default_rng(0), cache, tokens), strict=True))
    rows = {name: kernel.page_rows(pool) for name, pool in pools.items()}
    program, programs = append_ptx.append_program(
      rows["k"], rows["v"], tokens, tuning, from_pages=from_pages
    )
    inputs, pages = {"slots": slots}, {}
    for name, pool in pools.items():
      inputs[f"{name}_rows"] = self.as_pages(new[name], pool) if from_pages else new[name]
      if pool.global_scale is not None:
        inputs[f"{name}_global_scale"] = pool.global_scale
      arrays = kv_cache.pool_arrays(pool)
      pages |= {f"{name}_{a}": raw for a, raw in zip(ARRAYS, map(cases.raw, arrays), strict=False)}
    memory = ptx_emulator.Memory(inputs=inputs, in_place=pages)
    ptx_emulator.run(program, memory, programs=range(programs), threads=tuning.threads)
    for name, pool in pools.items():
      for array, want in zip(ARRAYS, expected(pool, new[name], slots), strict=False):
        np.testing.assert_array_equal(memory.array(f"{name}_{array}"), want, err_msg=name)

  def as_pages(self, rows, pool):
    """[tokens, heads, dim] as bf16 pages of the pool's size."""
    rows = np.asarray(rows)
    rows = rows.reshape(-1, pool.page_size, *rows.shape[1:])
    return np.ascontiguousarray(np.swapaxes(rows, 1, 2))

  @parameterized.parameters(
    (("nvfp4", "nvfp4"), (64, 128)),
    (("nvfp4", "bf16"), (80, 112)),
    (("fp8", "nvfp4"), (112, 64)),
    (("bf16", "fp8"), (128, 256)),
  )
  def test_formats_and_head_dims(self, formats, dims):
    r = np.random.default_rng(0)
    cache = random_cache(r, *formats, 2, *dims)
    self.check(cache, 6, r.permutation(SLOTS)[:6])

  @parameterized.parameters(
    (("nvfp4", "nvfp4"), 1, 16),
    (("nvfp4", "fp8"), 4, 32),
    (("fp8", "nvfp4"), 3, 16),
    (("bf16", "nvfp4"), 2, 64),
  )
  def test_rows_from_pages(self, formats, heads, page_size):
    r = np.random.default_rng(6)
    cache = random_cache(r, *formats, heads, 64, 80, page_size=page_size)
    slots = np.where(
      r.random(2 * page_size) < 0.3, r.permutation(3 * page_size)[: 2 * page_size], -1
    )
    for tuning in (append_ptx.DEFAULT, append_ptx.Tuning(heads=2)):
      self.check(cache, 2 * page_size, slots, tuning, from_pages=True)

  @parameterized.parameters(
    (("nvfp4", "nvfp4"), (64, 128), 1),
    (("nvfp4", "fp8"), (80, 64), 2),
    (("bf16", "nvfp4"), (64, 64), 2),
  )
  def test_four_over_six(self, formats, dims, heads_of_thread):
    r = np.random.default_rng(6)
    cache = random_cache(r, *formats, 2, *dims, scale_search="four_over_six")
    slots = r.permutation(SLOTS)[:6]
    slots[2] = -1
    self.check(cache, 6, slots, append_ptx.Tuning(heads_of_thread))

  @parameterized.product(
    formats=(("nvfp4", "fp8"), ("fp8", "bf16"), ("bf16", "nvfp4")),
    heads=((2, 2), (2, 6), (4, 6), (4, 8), (4, 3)),
  )
  def test_heads_of_a_thread(self, formats, heads):
    heads_of_thread, heads = heads
    r = np.random.default_rng(4)
    cache = random_cache(r, *formats, heads, 64, 80)
    slots = r.permutation(SLOTS)[:7]
    slots[3] = -1
    self.check(cache, 7, slots, append_ptx.Tuning(heads_of_thread))

  def test_larger_blocks_and_hints(self):
    r = np.random.default_rng(5)
    cache = random_cache(r, heads=8)
    tuning = append_ptx.Tuning(2, 256, load="global.cs", store="global.cs")
    self.check(cache, 12, r.permutation(SLOTS)[:12], tuning)

  def test_places_fit_32_bits(self):
    def supports(num_pages):
      return append_ptx.supports(append_ptx.Rows("nvfp4", 8, 128, num_pages, 64))

    self.assertTrue(supports(2**20))
    self.assertFalse(supports(2**20 + 1))

  def test_many_tokens_share_threads(self):
    def heads_of_thread(format, tokens):
      return append_ptx.heads_of_thread(append_ptx.Rows(format, 8, 128, 512, 64), tokens)

    for format, many in (("nvfp4", 2), ("fp8", 2), ("bf16", 4)):
      self.assertEqual(heads_of_thread(format, 512), 1)
      self.assertEqual(heads_of_thread(format, 8192), many)

  @parameterized.parameters(*kv_cache.PAGE_SIZES)
  def test_page_sizes(self, page_size):
    cache = random_cache(np.random.default_rng(1), heads=3, page_size=page_size)
    slots = (0, page_size - 1, page_size, 3 * page_size - 1, 1, 2, 3)
    self.check(cache, len(slots), slots)

  @parameterized.parameters("nvfp4", "fp8", "bf16")
  def test_skipped_slots(self, format):
    cache = random_cache(np.random.default_rng(2), format, format)
    slots = (5, -1, SLOTS - 1, SLOTS, SLOTS + 1, 2**31 - 1, -(2**31), -16, 17)
    self.check(cache, len(slots), slots)

  @parameterized.parameters(1, 2, 3, 5)
  def test_tokens(self, tokens):
    r = np.random.default_rng(3)
    cache = random_cache(r, heads=1)
    self.check(cache, tokens, r.permutation(SLOTS)[:tokens])


if __name__ == "__main__":
  absltest.main()
