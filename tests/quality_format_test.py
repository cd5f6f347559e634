"""What packing keeps of values, against an independent numpy quantiser and the gates."""

import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized

from benchmarks import quality_data, quality_format
from benchmarks.metrics import snr_db
from benchmarks.quality_gates import GATES
from benchmarks.quality_judge import judge
from tests.base import TestCase

QUANTISERS = {config.name: config for config in quality_format.QUANTISERS}
ROWS = 512


def nvfp4(x: np.ndarray, g: np.float32, largest=6) -> np.ndarray:
  """Blocks of 16, E4M3 scales, nearest-even codes, by ml_dtypes; float32 of x's shape."""
  blocks = x.reshape(-1, 16)
  amax = np.abs(blocks).max(axis=1, keepdims=True)
  scale = (amax / np.float32(largest * g)).clip(max=448).astype(ml_dtypes.float8_e4m3fn)
  step = scale.astype(np.float32) * g
  # A scale that was rounded down lets a quotient pass the largest code.
  codes = (blocks / step).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn)
  return (codes.astype(np.float32) * scale.astype(np.float32) * g).reshape(x.shape)


class PackedTest(TestCase):
  @parameterized.parameters("gauss", "outliers x10", "student-t4", "huge 2^20")
  def test_nvfp4_is_what_numpy_makes_of_it(self, distribution):
    x = quality_data.values(distribution, ROWS)
    g = np.float32(np.abs(x).max() / 2688)
    back, who, bits = quality_format.pack_and_unpack(QUANTISERS["nvfp4"], x)
    np.testing.assert_array_equal(back, nvfp4(x, g))
    self.assertEqual((who, bits), ("xla", 4.5))
    two, _, bits = quality_format.pack_and_unpack(QUANTISERS["nvfp4 x2"], x)
    np.testing.assert_array_equal(two, back + nvfp4(x - back, g))
    self.assertEqual(bits, 9)

  def test_the_better_of_two_scales(self):
    x = quality_data.values("laplace", ROWS)
    g = np.float32(np.abs(x).max() / 2688)
    back, _, _ = quality_format.pack_and_unpack(QUANTISERS["nvfp4 4/6"], x)
    error = lambda y: np.sum((x - y).reshape(-1, 16) ** 2, axis=1)
    least = np.minimum(error(nvfp4(x, g)), error(nvfp4(x, g, largest=4)))
    np.testing.assert_allclose(error(back), least, rtol=1e-4)

  def test_fp8_with_a_scale_and_without(self):
    x = quality_data.values("gauss", ROWS)
    e4m3 = lambda y: y.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    back, _, _ = quality_format.pack_and_unpack(QUANTISERS["fp8, scale 1"], x)
    np.testing.assert_array_equal(back, e4m3(x))
    scale = np.float32(np.abs(x).max() / 448)
    back, _, _ = quality_format.pack_and_unpack(QUANTISERS["fp8"], x)
    np.testing.assert_allclose(back, e4m3(x / scale) * scale, rtol=1e-6)

  def test_a_rotation_is_turned_back(self):
    x = quality_data.values("biased +10", ROWS)
    back, _, _ = quality_format.pack_and_unpack(QUANTISERS["nvfp4 had"], x)
    self.assertAlmostEqual(snr_db(x, back), 20.1, delta=0.3)

  @parameterized.parameters("q", "k", "v")
  def test_activations_are_kept_as_well_as_gaussian_values(self, name):
    """20.7 / 20.6 / 20.7 dB for K / V / Q over all layers; single layers differ by some tenths."""
    for inputs in quality_data.captured():
      x = getattr(inputs, name)
      back, _, _ = quality_format.pack_and_unpack(QUANTISERS["nvfp4"], x.reshape(-1, x.shape[-1]))
      self.assertAlmostEqual(snr_db(x.reshape(back.shape), back), 20.7, delta=0.35)


class GatesTest(TestCase):
  def judged(self, **options):
    quantisers = tuple(q for q in quality_format.QUANTISERS if q.name == "nvfp4")
    rows = quality_format.measure(quantisers, rows=4 * ROWS, **options)
    gates = [g for g in GATES if g.level == "format" and g.where == {"config": "nvfp4"}]
    return judge(rows, ["format"], gates=gates)

  def test_nvfp4_passes(self):
    self.assertEqual([v.word for v in self.judged()], ["pass", "pass"])

  def test_a_distribution_that_was_not_measured(self):
    verdicts = self.judged(distributions=quality_data.DISTRIBUTIONS[1:])
    self.assertEqual([v.note for v in verdicts][0], "no measurement, gauss")


if __name__ == "__main__":
  absltest.main()
