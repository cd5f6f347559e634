"""Statistics of keys and values, and the scales and means that they lead to."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import nvfp4_pallas as nv
from nvfp4_pallas import calibration
from nvfp4_pallas import format as nvfp4
from nvfp4_pallas.cache import decode_rows, pool_arrays
from nvfp4_pallas.calibration import KVStatistics, calibrate, merge, observe
from tests.base import TestCase
from tests.rotation_test import matrix

HEADS, DIM, V_DIM = 2, 64, 80


def rows(seed=0, tokens=50):
  r = np.random.default_rng(seed)
  k = r.standard_normal((tokens, HEADS, DIM)) * [[[1], [7]]] + 3
  v = r.standard_normal((tokens, HEADS, V_DIM)) * 2.0 ** r.integers(-9, 3, (tokens, HEADS, 1))
  v[3, :, 16:32] = 0
  return jnp.asarray(k, jnp.bfloat16), jnp.asarray(v, jnp.bfloat16)


def empty(**options) -> KVStatistics:
  return KVStatistics.create(num_kv_heads=HEADS, head_dim=DIM, **options)


def block_amax(x) -> np.ndarray:
  x = np.abs(np.asarray(x, np.float64))
  return x.reshape(*x.shape[:2], -1, 16).max(-1)


class StatisticsTest(TestCase):
  def test_what_is_seen(self):
    k, v = rows()
    stats = jax.jit(observe)(empty(), k, v)
    self.assertEqual(int(stats.count), 50)
    np.testing.assert_allclose(stats.k_sum, np.asarray(k, np.float64).sum(0), rtol=1e-5)
    for x, amax, least in ((k, stats.k_amax, stats.k_least), (v, stats.v_amax, stats.v_least)):
      blocks = block_amax(x)
      np.testing.assert_array_equal(amax, blocks.max((0, 2)))
      blocks[blocks == 0] = np.inf
      np.testing.assert_array_equal(least, blocks.min((0, 2)))

  def test_parts_are_the_whole(self):
    k, v = rows()
    whole = observe(empty(), k, v)
    by_two = observe(observe(empty(), k[:20], v[:20]), k[20:], v[20:])
    merged = merge(observe(empty(), k[:20], v[:20]), observe(empty(), k[20:], v[20:]))
    for parts in (by_two, merged):
      jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), parts, whole)
    nothing = observe(whole, k[:0], v[:0])
    jax.tree.map(np.testing.assert_array_equal, nothing, whole)

  def test_of_rows_as_they_are_stored(self):
    k, v = rows()
    mean = jnp.mean(k.astype(jnp.float32), 0)
    options = {"k_rotation": "hadamard", "v_rotation": "hadamard", "k_mean": mean}
    stats = observe(empty(**options), k, v)
    cache = nv.PagedKVCache.create(
      num_pages=4, page_size=16, num_kv_heads=HEADS, head_dim=DIM, v_head_dim=V_DIM,
      k_format="bf16", **options,
    )  # fmt: skip
    cache = nv.append(cache, k, v, slot_mapping=jnp.arange(50, dtype=jnp.int32))
    for pool, amax in ((cache.k, stats.k_amax), (cache.v, stats.v_amax)):
      stored = jnp.abs(pool.data.astype(jnp.float32))
      np.testing.assert_array_equal(amax, jnp.max(stored, axis=(0, 2, 3)))
    # The sum stays that of plain keys, so that a second run gives the same mean.
    np.testing.assert_array_equal(stats.k_sum, observe(empty(), k, v).k_sum)

  def test_layers_under_vmap(self):
    k, v = (jnp.stack(x) for x in zip(rows(0), rows(1), strict=True))
    means = jnp.stack([jnp.full((HEADS, DIM), x) for x in (0.5, 3.0)])
    stacked = jax.vmap(lambda m: empty(k_mean=m, k_rotation="hadamard"))(means)
    found = jax.jit(jax.vmap(lambda s, k, v: calibrate(observe(s, k, v))))(stacked, k, v)
    for layer in range(2):
      alone = empty(k_mean=means[layer], k_rotation="hadamard")
      want = calibrate(observe(alone, k[layer], v[layer]))
      of_layer = [a[layer] for a in found]
      jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), of_layer, list(want))

  @parameterized.named_parameters(
    ("k_shape", lambda k, v: (k[:, :1], v), r"k must be \[tokens, 2, 64\] .* got \(50, 1, 64\)"),
    ("v_shape", lambda k, v: (k, v[..., :9]), r"v must be \[tokens, 2, 9\] .* got \(50, 2, 9\)"),
    ("dtype", lambda k, v: (k.astype(jnp.int8), v), "k must have one of the dtypes .* got int8"),
  )
  def test_refused_rows(self, change, message):
    with self.assertRaisesRegex(ValueError, message):
      observe(empty(), *change(*rows()))

  def test_refused_rotation(self):
    with self.assertRaisesRegex(ValueError, "v_rotation must be None or one of .* got 'random'"):
      empty(v_rotation="random")


class CalibrateTest(TestCase):
  @parameterized.parameters(1.0, 2.0, 3.7)
  def test_scales_and_mean(self, headroom):
    k, v = rows()
    found = calibrate(observe(empty(), k, v), headroom)
    for x, scale, least in (
      (k, found.k_global_scale, found.k_least_scale),
      (v, found.v_global_scale, found.v_least_scale),
    ):
      blocks = block_amax(x)
      np.testing.assert_allclose(scale, blocks.max((0, 2)) * headroom / 2688, rtol=1e-6)
      blocks[blocks == 0] = np.inf
      np.testing.assert_allclose(least, blocks.min((0, 2)) / (6 * np.asarray(scale)), rtol=1e-6)
    np.testing.assert_allclose(found.k_mean, np.asarray(k, np.float64).mean(0), rtol=1e-5)

  @parameterized.parameters("nvfp4", "fp8")
  def test_scales_of_a_format_let_the_largest_value_through(self, format):
    """At headroom 1 the largest value is the format's largest number: nothing is cut off."""
    k, v = rows()
    found = calibrate(observe(empty(), k, v), 1.0, k_format=format, v_format="bf16")
    np.testing.assert_array_equal(found.v_global_scale, 1.0)
    cache = nv.PagedKVCache.create(
      num_pages=4,
      page_size=16,
      num_kv_heads=HEADS,
      head_dim=DIM,
      v_head_dim=V_DIM,
      k_format=format,
      v_format="bf16",
      k_global_scale=found.k_global_scale,
    )
    slots = jnp.arange(k.shape[0], dtype=jnp.int32)
    stored = nv.append(cache, k, v, slot_mapping=slots).k
    arrays = tuple(array[slots // 16, :, slots % 16] for array in pool_arrays(stored))
    kept = np.abs(np.asarray(decode_rows(stored, arrays))).max((0, 2))
    kept *= np.asarray(found.k_global_scale)
    np.testing.assert_allclose(kept, np.abs(np.asarray(k, np.float32)).max((0, 2)), rtol=2**-4)

  def test_window(self):
    """The edges that the module names, block by block."""
    headroom, amax = 2.0, 3.0
    g = np.float32(amax * headroom / 2688)
    stats = dataclasses.replace(
      empty(),
      count=jnp.int32(1),
      k_amax=jnp.full((HEADS,), amax),
      v_amax=jnp.full((HEADS,), amax),
    )
    np.testing.assert_allclose(calibrate(stats).k_global_scale, g, rtol=1e-6)

    def scale_of(block_amax):
      x = jnp.full((1, 16), block_amax, jnp.float32)
      return float(nvfp4.encode(x, jnp.float32(g)).block_scale[0, 0].astype(jnp.float32))

    top = amax * headroom
    self.assertEqual(scale_of(top), 448)
    self.assertEqual(scale_of(1.2 * top), 448)
    self.assertLess(scale_of(top / 1.2), 448)
    self.assertAlmostEqual(scale_of(1.001 * top / 28672), 2.0**-6, delta=2.0**-10)
    self.assertEqual(scale_of(1.001 * top / 458752), 2.0**-9)
    self.assertEqual(scale_of(0.999 * top / 458752), 0)

  def test_no_value_seen_is_cut(self):
    """With four_over_six too, whose scales are half as large again."""
    k, v = rows()
    found = calibrate(observe(empty(), k, v))
    amax = block_amax(k).max((0, 2))
    self.assertTrue((amax / (4 * np.asarray(found.k_global_scale)) <= 448).all())
    self.assertEqual(calibration.HEADROOM, 2.0)

  def test_a_head_of_zeros(self):
    k, v = (jnp.zeros_like(x) for x in rows())
    found = calibrate(observe(empty(), k, v))
    np.testing.assert_array_equal(found.k_global_scale, [1, 1])
    np.testing.assert_array_equal(found.k_mean, 0)
    np.testing.assert_array_equal(found.v_least_scale, np.inf)

  def test_serves_create(self):
    k, v = rows()
    first = calibrate(observe(empty(), k, v))
    options = {"k_mean": first.k_mean, "k_rotation": "hadamard"}
    found = calibrate(observe(empty(**options), k, v))
    cache = nv.PagedKVCache.create(
      num_pages=1, page_size=16, num_kv_heads=HEADS, head_dim=DIM, v_head_dim=V_DIM,
      k_global_scale=found.k_global_scale, v_global_scale=found.v_global_scale, **options,
    )  # fmt: skip
    cache = nv.append(cache, k[:1], v[:1], slot_mapping=jnp.zeros((1,), jnp.int32))
    packed = nvfp4.NvFp4Array(cache.k.data[0, :, 0], cache.k.block_scale[0, :, 0],
                              cache.k.decode_scale)  # fmt: skip
    stored = np.asarray(nvfp4.decode(packed, jnp.float32), np.float64)
    plain = stored @ matrix(DIM) + np.asarray(found.k_mean)
    k = np.asarray(k, np.float64)
    error = np.linalg.norm(plain - k[0]) / np.linalg.norm(k[0] - np.asarray(found.k_mean))
    self.assertBetween(error, 0.02, 0.15)

  @parameterized.parameters(
    ({"num_kv_heads": 0}, "num_kv_heads must be a whole number of at least 1, got 0"),
    ({"num_kv_heads": "2"}, "num_kv_heads must be a whole number of at least 1, got '2'"),
    ({"head_dim": 60}, "head_dim must be a multiple of 16, got 60"),
    ({"head_dim": 64.0}, "head_dim must be a whole number of at least 1, got 64.0"),
    ({"k_rotation": "fourier"}, "k_rotation must be None or one of .*, got 'fourier'"),
    ({"k_mean": [0.0]}, r"k_mean must be float32 \(2, 64\), got list"),
    (
      {"k_mean": np.zeros(64, np.float32)},
      r"k_mean must be float32 \(2, 64\), got float32 \(64,\)",
    ),
    ({"k_mean": np.zeros((2, 64))}, r"k_mean must be float32 \(2, 64\), got float64"),
  )
  def test_statistics_that_are_refused(self, options, message):
    with self.assertRaisesRegex(ValueError, message):
      KVStatistics.create(**{"num_kv_heads": HEADS, "head_dim": DIM} | options)

  def test_rows_that_are_refused(self):
    k, v = rows()
    for k_, v_, message in (
      ([1.0], v, "k must be an array, got list"),
      (k, None, "v must be an array, got NoneType"),
      (k, v[:7], "k and v must have as many tokens, got 50 and 7"),
    ):
      with self.subTest(message), self.assertRaisesRegex(ValueError, message):
        observe(empty(), k_, v_)

  def test_statistics_that_do_not_merge(self):
    for other, message in (
      (empty(k_rotation="hadamard"), r"the same k_rotation, got \(None, 'hadamard'\)"),
      (empty(v_rotation="hadamard"), r"the same v_rotation, got \(None, 'hadamard'\)"),
      (
        KVStatistics.create(num_kv_heads=1, head_dim=DIM),
        r"head_dim, got \(\(2, 64\), \(1, 64\)\)",
      ),
      (empty(k_mean=jnp.zeros((HEADS, DIM))), "must both have a k_mean or none"),
    ):
      with self.subTest(message), self.assertRaisesRegex(ValueError, message):
        merge(empty(), other)

  def test_refused(self):
    k, v = rows()
    for call, message in (
      *(
        (
          lambda headroom=headroom: calibrate(observe(empty(), k, v), headroom),
          f"headroom must be a finite number of at least 1, got {headroom!r}",
        )
        for headroom in (0.9, np.nan, np.inf, "2")
      ),
      (lambda: calibrate(empty()), "stats must have seen tokens, got none"),
      (lambda: calibrate(None), "stats must be KVStatistics, got NoneType"),
      (lambda: observe(None, k, v), "stats must be KVStatistics, got NoneType"),
      (lambda: calibrate(empty(), k_format="int4"), "k_format must be one of .*, got 'int4'"),
      (
        lambda: merge(empty(k_mean=jnp.zeros((HEADS, DIM))), empty(k_mean=jnp.ones((HEADS, DIM)))),
        "first and second must have the same k_mean",
      ),
      (
        lambda: calibrate(observe(empty(), k.at[3, 1, 5].set(jnp.nan), v)),
        r"stats.k_amax must be finite, got \[.* nan\]",
      ),
      (
        lambda: calibrate(observe(empty(), k, v.at[3, 1, 5].set(jnp.inf))),
        r"stats.v_amax must be finite, got \[.* nan\]",
      ),
    ):
      with self.assertRaisesRegex(ValueError, message):
        call()


if __name__ == "__main__":
  absltest.main()
