"""The model of the block-scaled FP4 product says what the definition of A4Q says."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest

import nvfp4_pallas as nv
from benchmarks import block_scaled
from nvfp4_pallas import attention
from nvfp4_pallas import format as nvfp4
from nvfp4_pallas.read_paths import Q_LEVELS, AttentionSpec, round_q
from tests.base import TestCase

DIM = 128
encode = jax.jit(nvfp4.encode, static_argnames="levels")
decode_unscaled = jax.jit(nvfp4.decode_unscaled)


def random_rows(r: np.random.Generator, rows: int, scales: tuple[int, int]):
  """Codes of both signs, and scale bytes from scales[0] to scales[1] - 1."""
  codes = r.integers(0, 256, (rows, DIM // 2), dtype=np.uint8)
  return codes, r.integers(*scales, (rows, DIM // 16), dtype=np.uint8)


def decoded(codes, scales) -> np.ndarray:
  """By the package, float64."""
  scales = jnp.asarray(scales.view(ml_dtypes.float8_e4m3fn))
  return np.asarray(decode_unscaled(jnp.asarray(codes), scales), np.float64)


class ModelTest(TestCase):
  def test_every_product_is_that_of_decoded_values(self):
    """All pairs of codes with all pairs of block scales, each exact in float32."""
    code = np.arange(16, dtype=np.uint8)
    scales = np.arange(0x7F, dtype=np.uint8)
    # Row i: the code i alone, in column 0 of its block.
    rows = np.zeros((16, DIM // 2), np.uint8)
    rows[:, 0] = code
    every = np.arange(16 * len(scales))
    a, a_scale = rows[every % 16], np.repeat(scales[every // 16][:, None], DIM // 16, 1)
    wide = decoded(a, a_scale)[:, 0]
    expected = wide[:, None] * wide[None]
    zero = np.zeros(expected.shape, np.float32)
    np.testing.assert_array_equal(block_scaled.exact(a, a_scale, a, a_scale) * 2.0**-20, expected)
    np.testing.assert_array_equal(block_scaled.multiply(a, a_scale, a, a_scale, zero), expected)

  def test_sums_are_exact_and_rounded_once_an_instruction(self):
    r = np.random.default_rng(0)
    a, b = random_rows(r, 64, (0, 0x7F)), random_rows(r, 48, (0, 0x7F))
    wide_a, wide_b = decoded(*a), decoded(*b)
    # In float64 each product is exact, and so are 64 of them: 47 bits.
    halves = [wide_a[:, k : k + 64] @ wide_b[:, k : k + 64].T for k in (0, 64)]
    np.testing.assert_array_equal(block_scaled.exact(*a, *b) * 2.0**-20, sum(halves))
    c = r.standard_normal((64, 48)).astype(np.float16).astype(np.float32)
    expected = (halves[0] + c).astype(np.float32)
    expected = (halves[1] + expected).astype(np.float32)
    np.testing.assert_array_equal(block_scaled.multiply(*a, *b, c), expected)

  def test_a_faulty_scale_spoils_its_row(self):
    r = np.random.default_rng(1)
    a, b = random_rows(r, 4, (0, 0x7F)), random_rows(r, 4, (0, 0x7F))
    a[1][2, 5] = b[1][1, 0] = block_scaled.NAN
    found = np.isnan(block_scaled.multiply(*a, *b, np.zeros((4, 4), np.float32)))
    np.testing.assert_array_equal(found, (np.arange(4) == 2)[:, None] | (np.arange(4) == 1))


class DefinitionTest(TestCase):
  """Scores of nvfp4_a4q by its definition: over one key, lse is its score."""

  def scores(self, q_levels):
    """A function of q [rows, DIM] and one key: float32 [rows]."""
    spec = AttentionSpec("nvfp4_a4q", causal=False, sm_scale=1.0, q_levels=q_levels)

    @jax.jit
    def lse(q, codes, scales):
      data = jnp.zeros((1, 1, 16, DIM // 2), jnp.uint8).at[0, 0, 0].set(codes)
      block_scale = jnp.ones((1, 1, 16, DIM // 16), jnp.float8_e4m3fn).at[0, 0, 0].set(scales)
      pool = nv.PagePool(data, block_scale, jnp.ones((1,), jnp.float32), "nvfp4")
      cache = nv.PagedKVCache(k=pool, v=pool)
      keys = attention.cached_keys(cache, jnp.zeros((1,), jnp.int32), jnp.int32(1))
      rows, positions = round_q(q, spec)[:, None], jnp.zeros(q.shape[:1], jnp.int32)
      tiles = jnp.int32(0), jnp.int32(1)
      return attention.attend(rows, positions, keys, spec, tiles)[1][0, 0]

    return lambda q, codes, scales: np.asarray(lse(q, codes, scales.view(ml_dtypes.float8_e4m3fn)))

  def test_the_model_gives_the_definition_s_scores(self):
    """Bit for bit where float32 holds every sum; otherwise within the rounding of its sums."""
    r = np.random.default_rng(2)
    for q_levels in Q_LEVELS:
      scores = self.scores(q_levels)
      for scales, same_bits in (((0x38, 0x40), q_levels == 1), ((0, 0x7F), False)):
        q = jnp.asarray(r.standard_normal((48, DIM)), jnp.bfloat16)
        if same_bits:  # block scales of Q within a factor of 4, so that sums have 24 bits
          q = jnp.clip(q, -4, 4).at[:, ::16].set(4)
        k, k_scale = random_rows(r, 1, scales)
        packed = encode(q, levels=q_levels)
        levels = [packed] if packed.residual is None else [packed, packed.residual]
        total, exact, size = np.zeros((48, 1), np.float32), 0.0, 0.0
        for level in levels:
          codes, scale = np.asarray(level.codes), np.asarray(level.block_scale).view(np.uint8)
          total = block_scaled.multiply(codes, scale, k, k_scale, total)
          exact = exact + block_scaled.exact(codes, scale, k, k_scale) * 2.0**-20
          size = size + np.abs(decoded(codes, scale)) @ np.abs(decoded(k, k_scale)).T
        found = scores(q, k[0], k_scale[0])
        if same_bits:
          np.testing.assert_array_equal(found, total[:, 0])
        self.assertTrue((np.abs(total - exact) <= 4 * q_levels * 2.0**-24 * size).all())
        self.assertTrue((np.abs(found - exact[:, 0]) <= (DIM + 4) * 2.0**-24 * size[:, 0]).all())


if __name__ == "__main__":
  absltest.main()
