"""The Hadamard rotation, against a matrix made by another rule, and what it is for."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized

from nvfp4_pallas import format as nvfp4
from nvfp4_pallas.rotation import hadamard, rotate, transform_rows
from tests.base import TestCase
from tests.stored_rows import hadamard_signs

HEAD_DIMS = (64, 80, 96, 128, 144, 192, 256)
DTYPES = ("bfloat16", "float16", "float32")


def matrix(d: int) -> np.ndarray:
  signs = hadamard_signs(d)
  return signs / np.sqrt(np.abs(signs).sum(axis=0))


class HadamardTest(TestCase):
  @parameterized.product(d=HEAD_DIMS, dtype=DTYPES)
  def test_is_the_matrix(self, d, dtype):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 2, d)), dtype)
    y = hadamard(x)
    self.assertEqual(y.dtype, jnp.float32)
    # float32 sums of up to 256 terms.
    exact = np.asarray(x, np.float64) @ matrix(d)
    np.testing.assert_allclose(y, exact, rtol=0, atol=1e-5)

  @parameterized.parameters(*HEAD_DIMS)
  def test_is_its_own_inverse_and_keeps_products(self, d):
    q, k = jax.random.normal(jax.random.key(1), (2, 5, 3, d), jnp.float32)
    np.testing.assert_allclose(hadamard(hadamard(q)), q, rtol=0, atol=1e-5)
    products = [np.sum(np.asarray(a, np.float64) * np.asarray(b, np.float64), -1) for a, b in
                ((q, k), (hadamard(q), hadamard(k)))]  # fmt: skip
    np.testing.assert_allclose(*products, rtol=0, atol=1e-4)

  @parameterized.parameters(64, 256)
  def test_is_exact_where_sums_are(self, d):
    """Whole numbers, of bfloat16 too: nothing is rounded to fewer bits on the way."""
    x = np.random.default_rng(2).integers(-255, 256, (4, 1, d)).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(hadamard(jnp.asarray(x)), x.astype(np.float64) @ matrix(d))

  def test_under_jit_and_vmap(self):
    x = jax.random.normal(jax.random.key(3), (2, 3, 4, 96), jnp.bfloat16)
    got = jax.jit(jax.vmap(hadamard))(x)
    np.testing.assert_allclose(got, hadamard(x), rtol=0, atol=1e-6)

  def test_spreads_an_outlier(self):
    """A channel 30 times as large as the rest: in its block NVFP4 keeps next to nothing of them."""
    x = np.random.default_rng(4).standard_normal((512, 1, 128)).astype(np.float32)
    x[..., 5] *= 30

    def error(x):
      """Of the other channels of the outlier's block, relative."""
      back = np.asarray(hadamard(nvfp4.decode(nvfp4.encode(hadamard(x)), jnp.float32)))
      direct = np.asarray(nvfp4.decode(nvfp4.encode(x), jnp.float32))
      others = [i for i in range(16) if i != 5]
      size = np.linalg.norm(x[..., others])
      return tuple(np.linalg.norm((y - np.asarray(x))[..., others]) / size for y in (direct, back))

    direct, rotated = error(jnp.asarray(x))
    self.assertGreater(direct, 0.5)
    self.assertLess(rotated, 0.35)


class TransformTest(TestCase):
  def test_nothing_to_do_is_nothing_done(self):
    x = jnp.ones((2, 1, 64), jnp.bfloat16)
    self.assertIs(transform_rows(x, None), x)
    self.assertEqual(rotate(x, None).dtype, jnp.float32)

  @parameterized.product(
    [
      {"rotation": "hadamard", "mean": False},
      {"rotation": None, "mean": True},
      {"rotation": "hadamard", "mean": True},
    ],
    dtype=DTYPES,
  )
  def test_rounds_once(self, dtype, rotation, mean):
    r = np.random.default_rng(5)
    x = jnp.asarray(r.standard_normal((6, 2, 64)), dtype)
    m = jnp.asarray(r.standard_normal((2, 64)) * 8, jnp.float32) if mean else None
    got = jax.jit(transform_rows, static_argnames="rotation")(x, rotation=rotation, mean=m)
    self.assertEqual(got.dtype, x.dtype)
    exact = np.asarray(x, np.float64) - (np.asarray(m, np.float64) if mean else 0)
    exact = exact if rotation is None else exact @ matrix(64)
    unit = float(jnp.finfo(dtype).eps) / 2
    error = np.abs(np.asarray(got, np.float64) - exact)
    # Half a unit of the dtype, and what float32 sums lose.
    self.assertTrue((error <= unit * np.abs(exact) * (1 + 1e-3) + 1e-5).all(), error.max())


if __name__ == "__main__":
  absltest.main()
