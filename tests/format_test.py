"""format.py against the slow oracle, bit for bit, and against ml_dtypes where both are defined."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized

from benchmarks import oracle
from nvfp4_pallas import format as nvfp4
from tests.base import TestCase

GLOBAL_SCALES = (1.0, 0.5, 0.37, 3.3, 2.0**-20, 1e9)


def encode_bytes(x, global_scale=1.0, **options):
  """(codes, scale bytes) of the definition, under jit and, to the same bits, without."""
  packed = jax.jit(lambda x: nvfp4.encode(x, global_scale, **options))(x)
  eager = nvfp4.encode(x, global_scale, **options)
  np.testing.assert_array_equal(packed.codes, eager.codes)
  return np.asarray(packed.codes), np.asarray(packed.block_scale).view(np.uint8)


def edge_blocks(global_scale: float) -> np.ndarray:
  """Blocks at every boundary of the format: float32 [blocks, 16]."""
  g = np.float32(global_scale)
  r = np.random.default_rng(0)
  e4m3 = oracle.E4M3.astype(np.float32)
  blocks = [r.standard_normal((64, 16)), r.standard_cauchy((64, 16)), np.zeros((2, 16))]
  # Scale rounding: amax at, just under and just over every midpoint of E4M3 times 6, and beyond.
  midpoints = np.concatenate([(e4m3[1:] + e4m3[:-1]) / 2, e4m3, [460, 464, 480, 2000, 1e30]])
  amax = (midpoints.astype(np.float32) * np.float32(6)).astype(np.float32)
  amax = np.concatenate([amax, np.nextafter(amax, 0), np.nextafter(amax, np.float32(np.inf))])
  scale_edges = r.uniform(-1, 1, (len(amax), 16))
  scale_edges[:, 0] = 1
  blocks.append(scale_edges * amax[:, None])
  # Code rounding: with amax = 6 s the scale is s, and these are ties and their neighbours.
  ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)
  values = np.concatenate([ties, np.nextafter(ties, 0), np.nextafter(ties, 9), [0, -0.0, 0.5]])
  for scale in e4m3[[1, 5, 8, 40, 77, 126]]:
    for part in np.array_split(values, 2):
      block = np.zeros(16, np.float32)
      block[: len(part)] = part * scale * r.choice([-1, 1], len(part))
      block[15] = 6 * scale
      blocks.append(block[None])
  with np.errstate(over="ignore"):
    return np.concatenate(blocks).astype(np.float32) * g


class EncodeTest(TestCase):
  @parameterized.parameters(*GLOBAL_SCALES)
  def test_edges_equal_the_oracle(self, global_scale):
    x = edge_blocks(global_scale)
    codes, scales = encode_bytes(jnp.asarray(x), global_scale)
    expected_codes, expected_scales = oracle.encode(x, global_scale)
    np.testing.assert_array_equal(scales, expected_scales)
    np.testing.assert_array_equal(codes, expected_codes)

  @parameterized.parameters(*GLOBAL_SCALES)
  def test_four_over_six_equals_the_oracle(self, global_scale):
    x = edge_blocks(global_scale)
    codes, scales = encode_bytes(jnp.asarray(x), global_scale, scale_search="four_over_six")
    with np.errstate(over="ignore", invalid="ignore"):
      expected_codes, expected_scales = oracle.encode(x, global_scale, "four_over_six")
    np.testing.assert_array_equal(scales, expected_scales)
    np.testing.assert_array_equal(codes, expected_codes)

  @parameterized.parameters("bfloat16", "float16", "float32")
  def test_every_value_of_every_scale(self, dtype):
    """16 codes x 127 scales: what decodes to them encodes back to them, and decodes exactly."""
    codes = np.tile(np.arange(16, dtype=np.uint8), (127, 1))
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    scales = np.arange(127, dtype=np.uint8)[:, None]
    exact = oracle.decode(packed, scales)
    array = nvfp4.NvFp4Array(
      jnp.asarray(packed), jnp.asarray(scales.view(ml_dtypes.float8_e4m3fn)), jnp.float32(1)
    )
    decoded = nvfp4.decode(array, dtype)
    np.testing.assert_array_equal(np.asarray(decoded).astype(np.float64), exact)
    self.assertTrue((np.signbit(np.asarray(decoded).astype(np.float32)) == (codes >= 8)).all())
    again, scales_again = encode_bytes(decoded)
    live = scales[:, 0] != 0  # a block of zeros forgets the signs of its zeros
    np.testing.assert_array_equal(again[live], packed[live])
    np.testing.assert_array_equal(scales_again[live], scales[live])
    np.testing.assert_array_equal(again[~live], 0)

  @parameterized.product(dtype=("bfloat16", "float16", "float32"), global_scale=(1.0, 0.37))
  def test_input_dtypes(self, dtype, global_scale):
    x = jnp.asarray(np.random.default_rng(1).standard_normal((40, 48)) * 3, dtype)
    codes, scales = encode_bytes(x, global_scale)
    expected_codes, expected_scales = oracle.encode(np.asarray(x), global_scale)
    np.testing.assert_array_equal(codes, expected_codes)
    np.testing.assert_array_equal(scales, expected_scales)

  @parameterized.parameters("bfloat16", "float16", "float32")
  def test_subnormal_input(self, dtype):
    """The compiler may flush subnormal input to zero; with a legal global scale nothing changes."""
    tiny = ml_dtypes.finfo(dtype).smallest_subnormal
    x = np.full((2, 16), float(tiny) * 3, np.float32)
    x[:, 1::2] *= -1
    x[1, 15] = 2.0**-24 if dtype == "float16" else 2.0**-63
    x = x.astype(dtype)
    global_scale = 2.0**-20 if dtype == "float16" else 2.0**-64
    codes, scales = encode_bytes(jnp.asarray(x), global_scale)
    expected_codes, expected_scales = oracle.encode(x, global_scale)
    np.testing.assert_array_equal(scales, expected_scales)
    np.testing.assert_array_equal(codes, expected_codes)

  def test_global_scale_by_row(self):
    x = jnp.asarray(np.random.default_rng(2).standard_normal((5, 3, 32)), jnp.bfloat16)
    g = jnp.asarray([0.3, 1.0, 7.0], jnp.float32)
    packed = nvfp4.encode(x, g)
    for head in range(3):
      alone = nvfp4.encode(x[:, head], g[head])
      np.testing.assert_array_equal(packed.codes[:, head], alone.codes)
    decoded = np.asarray(nvfp4.decode(packed, jnp.float32)).astype(np.float64)
    exact = oracle.decode(packed.codes, packed.block_scale, np.asarray(g))
    np.testing.assert_array_equal(decoded, exact.astype(np.float32).astype(np.float64))

  def test_signs_of_what_rounds_to_zero(self):
    block = np.full((1, 16), -1e-3, np.float32)
    block[0, 0], block[0, 2], block[0, 3] = 6, 0.0, -0.0
    codes, _ = encode_bytes(jnp.asarray(block))
    nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(-1)
    self.assertSequenceEqual(nibbles.tolist(), [7, 8, 0, 8] + [8] * 12)

  def test_underflowing_block_is_all_zero(self):
    block = np.full((1, 16), -(2.0**-10) * 6 * 0.99, np.float32)
    codes, scales = encode_bytes(jnp.asarray(block))
    self.assertFalse(codes.any() or scales.any())


class NonFiniteTest(TestCase):
  @parameterized.product(
    value=(np.nan, np.inf, -np.inf), dtype=("bfloat16", "float16", "float32"), levels=(1, 2)
  )
  def test_marks_its_block_only(self, value, dtype, levels):
    x = np.random.default_rng(3).standard_normal((3, 48)).astype(dtype)
    clean = nvfp4.encode(jnp.asarray(x.copy()), levels=levels)
    x[1, 20] = value
    packed = nvfp4.encode(jnp.asarray(x), levels=levels)
    scales = np.array(packed.block_scale).view(np.uint8)
    self.assertEqual(scales[1, 1], 0x7F)
    self.assertFalse(np.asarray(packed.codes)[1, 8:16].any())
    decoded = np.array(nvfp4.decode(packed, jnp.float32))
    self.assertTrue(np.isnan(decoded[1, 16:32]).all())
    decoded[1, 16:32] = np.asarray(nvfp4.decode(clean, jnp.float32))[1, 16:32]
    np.testing.assert_array_equal(decoded, nvfp4.decode(clean, jnp.float32))

  def test_sanitize(self):
    x = np.zeros((1, 16), np.float32)
    x[0, :4] = np.nan, np.inf, -np.inf, 100
    decoded = nvfp4.decode(nvfp4.encode(jnp.asarray(x), 0.5, sanitize=True), jnp.float32)
    largest = 6 * 448 * 0.5
    self.assertSequenceEqual(decoded[0, :4].tolist(), [0, largest, -largest, 112])


class AgainstMlDtypesTest(TestCase):
  def test_e2m1_rounding(self):
    y = np.linspace(0, 7, 70001).astype(np.float32)
    expected = y.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    index = np.asarray(jax.jit(nvfp4.round_to_e2m1_index)(jnp.asarray(y)))
    inside = y <= 6  # beyond, ml_dtypes and the saturating rule may differ
    np.testing.assert_array_equal(index[inside], expected[inside])
    np.testing.assert_array_equal(index[~inside], 7)

  def test_e2m1_decoding(self):
    codes = np.arange(16, dtype=np.uint8)
    expected = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    decoded = np.asarray(jax.jit(nvfp4.decode_e2m1)(jnp.asarray(codes)))
    np.testing.assert_array_equal(decoded.view(np.uint32), expected.view(np.uint32))

  def test_e4m3_rounding(self):
    q = np.concatenate([np.linspace(0, 460, 200001), np.geomspace(2**-14, 1, 100001)])
    q = q.astype(np.float32)
    expected = np.minimum(q, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    rounded = np.asarray(jax.jit(nvfp4.round_to_e4m3)(jnp.asarray(q))).view(np.uint8)
    np.testing.assert_array_equal(rounded, expected)


class DivideTest(TestCase):
  """Correctly rounded, whatever the device's own division does."""

  def operands(self):
    r = np.random.default_rng(5)
    bits = r.integers(0x20000000, 0x5F000000, (2, 400000), dtype=np.uint32)
    a, b = bits.view(np.float32)
    # Quotients just beside a midpoint of two floats: a = b * (q + half a unit), rounded.
    q = r.uniform(1, 2, 200000).astype(np.float32)
    near = (b[:200000].astype(np.float64) * (q + 2.0**-24)).astype(np.float32)
    a[:200000] = near
    sign = r.choice([-1, 1], a.shape).astype(np.float32)
    return a * sign, b

  @parameterized.parameters(0, 1, -2, 3)
  def test_against_numpy(self, units_off):
    """Also when the quotient it starts from is off by some units, as on a GPU."""
    a, b = self.operands()

    def off(a, b):
      d = b * jnp.float32(1 + units_off * 2.0**-23)
      return nvfp4.refine_quotient(a, a / d, b)

    with np.errstate(over="ignore", under="ignore"):
      want = a / b
    got = np.asarray(jax.jit(off)(jnp.asarray(a), jnp.asarray(b)))
    usual = (np.abs(a) > 2.0**-60) & (np.abs(want) > 2.0**-40) & (np.abs(want) < 2.0**40)
    self.assertGreater(usual.mean(), 0.5)
    np.testing.assert_array_equal(got[usual], want[usual])

  def test_by_a_constant_and_by_something_broadcast(self):
    a = self.operands()[0][:100000].reshape(-1, 10)
    for b in (np.float32(6), np.float32(0.37)):
      got = jax.jit(lambda a, b=b: nvfp4.divide(a, jnp.float32(b)))(jnp.asarray(a))
      usual = (np.abs(a) > 2.0**-60) & (np.abs(a) < 2.0**60)
      np.testing.assert_array_equal(np.asarray(got)[usual], (a / b)[usual])

  def test_not_finite(self):
    a = jnp.asarray([np.inf, -np.inf, np.nan, 1e38, 0.0, -0.0], jnp.float32)
    got = nvfp4.divide(a, jnp.float32(1e-3))
    np.testing.assert_array_equal(got, [np.inf, -np.inf, np.nan, np.inf, 0, 0])
    self.assertSequenceEqual(np.signbit(got)[4:].tolist(), [False, True])


class LevelsTest(TestCase):
  @parameterized.parameters(1.0, 0.37)
  def test_residual_is_what_the_first_level_missed(self, global_scale):
    x = np.random.default_rng(4).standard_normal((20, 64)).astype(np.float32)
    packed = jax.jit(lambda x: nvfp4.encode(x, global_scale, levels=2))(jnp.asarray(x))
    self.assertEqual(packed.levels, 2)
    g = np.float32(global_scale)
    first = oracle.decode(packed.codes, packed.block_scale).astype(np.float32) * g
    codes, scales = oracle.encode(x - first, global_scale)
    np.testing.assert_array_equal(packed.residual.codes, codes)
    np.testing.assert_array_equal(np.asarray(packed.residual.block_scale).view(np.uint8), scales)
    second = oracle.decode(codes, scales).astype(np.float32) * g
    decoded = jax.jit(lambda a: nvfp4.decode(a, jnp.float32))(packed)
    np.testing.assert_array_equal(decoded, first + second)

  def test_residual_is_searched_too(self):
    x = np.random.default_rng(6).standard_normal((20, 64)).astype(np.float32)
    packed = nvfp4.encode(jnp.asarray(x), levels=2, scale_search="four_over_six")
    first = oracle.decode(packed.codes, packed.block_scale).astype(np.float32)
    codes, scales = oracle.encode(x - first, 1.0, "four_over_six")
    np.testing.assert_array_equal(packed.residual.codes, codes)
    np.testing.assert_array_equal(np.asarray(packed.residual.block_scale).view(np.uint8), scales)


class QualityOfFormatTest(TestCase):
  """Signal to noise on Gaussian data: the published and independently measured figures."""

  @parameterized.parameters(("amax", 1, 20.44), ("four_over_six", 1, 21.22), ("amax", 2, 41.25))
  def test_gaussian_sqnr(self, scale_search, levels, expected_db):
    x = jax.random.normal(jax.random.key(0), (16384, 128), jnp.float32)

    @jax.jit
    def error(x):
      packed = nvfp4.encode(x, levels=levels, scale_search=scale_search)
      return jnp.sum((x - nvfp4.decode(packed, jnp.float32)) ** 2) / jnp.sum(x**2)

    # 2 Mi samples of a squared error whose relative spread is about 1: +-0.01 dB at three sigma.
    self.assertAlmostEqual(-10 * np.log10(float(error(x))), expected_db, delta=0.05)


class ArgumentsTest(TestCase):
  @parameterized.named_parameters(
    ("dtype", dict(x=jnp.zeros((2, 16), jnp.int32)), "x must have one of the dtypes .* got int32"),
    ("length", dict(x=jnp.zeros((2, 24))), r"multiple of 16, got x.shape=\(2, 24\)"),
    ("empty_row", dict(x=jnp.zeros((2, 0))), "positive multiple of 16"),
    ("scalar", dict(x=jnp.float32(1)), "positive multiple of 16"),
    ("levels", dict(levels=3), "levels must be 1 or 2, got 3"),
    ("search", dict(scale_search="mse"), "scale_search must be one of .* got 'mse'"),
    ("zero_scale", dict(global_scale=0.0), r"global_scale must be positive .* got 0\.0"),
    ("negative_scale", dict(global_scale=-1.0), r"global_scale must be positive .* got -1\.0"),
    ("nan_scale", dict(global_scale=float("nan")), "global_scale must be positive .* got nan"),
    ("inf_scale", dict(global_scale=float("inf")), "global_scale must be positive .* got inf"),
    ("tiny_scale", dict(global_scale=1e-38), "within .2.-64, 2.64., got 9.99.*e-39"),
    (
      "scale_shape",
      dict(global_scale=jnp.ones((3,))),
      r"must broadcast to \(2,\), got shape \(3,\)",
    ),
  )
  def test_error_names_argument_rule_and_value(self, arguments, message):
    arguments = dict(x=jnp.zeros((2, 16))) | arguments
    with self.assertRaisesRegex(ValueError, message):
      nvfp4.encode(**arguments)


if __name__ == "__main__":
  absltest.main()
