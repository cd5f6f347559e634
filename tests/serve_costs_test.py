"""Costs of steps: the measured rows themselves, what lies between them, and what is assumed."""

import itertools
import math
import pathlib
import tempfile

from absl.testing import absltest, parameterized

from benchmarks.serve_costs import (
  TABLE_HEADS,
  Curve,
  DecodeSurface,
  PrefillSurface,
  StepCosts,
  Times,
  committed_appends,
  layer_costs,
  pairs,
)
from benchmarks.serve_formats import FORMATS, Format, Heads, num_pages
from benchmarks.serve_model import MODELS, Linear, Measured, Model, Roofline
from benchmarks.serve_scheduler import Request, Step
from benchmarks.serve_workloads import Item
from nvfp4_pallas.policy import CostTable
from tests.base import TestCase
from tests.plan_test import SMALL, allocated

ONE_PATH = ("bf16", "fp8", "nvfp4_dequant", "nvfp4_repack", "nvfp4_a8q")


def rows(phase, format):
  path = format.decode_path if phase == "decode" else format.prefill_paths[0]
  for row in CostTable.h200().rows:
    if (row.phase, row.read_path, row.k_format) == (phase, path, format.k_format):
      yield row


class FormatsTest(TestCase):
  @parameterized.parameters(*FORMATS.values())
  def test_page_bytes_are_those_of_a_cache(self, format):
    """plan_test's model: 3 layers, 2 KV heads of 64 and 128 for K and V on a device."""
    equal = Heads(layers=3, num_q_heads=4, num_kv_heads=2, head_dim=64)
    wider = Heads(layers=3, num_q_heads=4, num_kv_heads=2, head_dim=128)
    # A cache of 64 for both and one of 128 for both, halved: formats of K and V may differ.
    k, v = format.k_format, format.v_format
    of = lambda heads, f: heads.token_bytes(Format("", f, f, (), ""))
    expected = (of(equal, k) + of(wider, v)) // 2 * 16
    two, one = (allocated(SMALL, pages, k, v) for pages in (2, 1))
    self.assertEqual(two - one, expected)

  def test_the_articles_example(self):
    """64 layers of 8 heads of 128: 128 KiB a token in FP8 and 72 in NVFP4."""
    heads = Heads(64, 32, 8, 128)
    of = {name: heads.token_bytes(format) / 1024 for name, format in FORMATS.items()}
    self.assertEqual((of["bf16"], of["fp8"], of["nvfp4"], of["fp8_nvfp4"]), (256, 128, 72, 100))

  def test_nvfp4_has_16_pages_for_9_of_fp8(self):
    heads = MODELS["llama-8b"].heads
    for pages in (1, 2, 9, 1000, 12345):
      pool = pages * 16 * heads.token_bytes(FORMATS["fp8"])
      self.assertEqual(num_pages(pool, heads, FORMATS["fp8"], 16), pages)
      self.assertEqual(num_pages(pool, heads, FORMATS["nvfp4"], 16), pages * 16 // 9)

  def test_rings_are_taken_off(self):
    heads, window = Heads(2, 8, 2, 64), {"recent_window": 64, "num_rings": 10}
    ring = 80 * 2 * (2 * 64) * 2 * 2  # tokens, layers, values of a head row, K and V, bytes
    pool = 100 * 16 * heads.token_bytes(FORMATS["nvfp4"]) + 10 * ring
    self.assertEqual(num_pages(pool, heads, FORMATS["nvfp4"], 16, **window), 100)
    self.assertEqual(
      num_pages(pool, heads, FORMATS["fp8"], 16, **window),
      num_pages(pool, heads, FORMATS["fp8"], 16),
    )

  def test_a_pool_without_a_page(self):
    with self.assertRaisesRegex(ValueError, "pool_bytes must hold at least a page of 1,048,576"):
      num_pages(10**6, MODELS["llama-8b"].heads, FORMATS["fp8"], 16)
    with self.assertRaisesRegex(ValueError, "head_dim must be a multiple of 16, got 40"):
      Heads(1, 1, 1, 40)


class CurveTest(TestCase):
  def test_straight_in_logarithms(self):
    curve = Curve({10: 2.0, 1000: 8.0}, above=1.0)
    for x, y in ((10, 2), (100, 4), (1000, 8), (2000, 16), (1, 2)):
      self.assertAlmostEqual(curve(x), y)


class PrefillTest(TestCase):
  @parameterized.parameters(*ONE_PATH)
  def test_measured_shapes_are_as_measured(self, name):
    format = FORMATS[name]
    costs = layer_costs("measured", format, TABLE_HEADS)
    measured = [row for row in rows("prefill", format) if row.batch == 1]
    self.assertGreater(len(measured), 15)
    for row in measured:
      self.assertAlmostEqual(1e6 * costs.prefill(row.q_len, row.kv_len), row.us, places=6)

  def test_pairs(self):
    for q_len, kv_len in ((1, 1), (1, 9), (3, 3), (4, 10)):
      seen = sum(kv_len - q_len + i + 1 for i in range(q_len))
      self.assertEqual(pairs(q_len, kv_len), seen)

  def test_between_and_beyond(self):
    """As long as its pairs say, where a pair takes equally long everywhere."""
    shapes = itertools.product((16, 1024), (1024, 65536))
    surface = PrefillSurface({(q, kv): 1e-3 * pairs(q, kv) for q, kv in shapes})
    for shape in ((16, 1024), (100, 3000), (1024, 10**6), (5000, 5000), (10**5, 10**5)):
      self.assertAlmostEqual(surface(*shape) / (1e-3 * pairs(*shape)), 1.0)
    # Fewer than the fewest queries take as long as those, and nothing takes less than anything.
    self.assertEqual(surface(1, 5000), surface(16, 5000))
    self.assertAlmostEqual(surface(1, 1), surface(16, 1024))

  def test_four_in_a_batch_take_less_than_four_times_one(self):
    """What the sum over sequences overestimates, where a batch was measured."""
    for name, least in (("nvfp4_repack", 0.85), ("nvfp4_dequant", 0.85), ("nvfp4_a8q", 0.8)):
      costs = layer_costs("measured", FORMATS[name], TABLE_HEADS)
      (batch,) = (row.us for row in rows("prefill", FORMATS[name]) if row.shape == (4, 2048, 2048))
      self.assertBetween(batch / (4e6 * costs.prefill(2048, 2048)), least, 1.0)

  def test_the_best_of_two_paths(self):
    best, *paths = (
      layer_costs("measured", FORMATS[name], TABLE_HEADS)
      for name in ("nvfp4", "nvfp4_dequant", "nvfp4_repack")
    )
    for shape in ((4, 4096), (512, 1024), (8192, 8192)):
      self.assertEqual(best.prefill(*shape), min(path.prefill(*shape) for path in paths))

  def test_short_chunks_are_alike(self):
    alike, fp8, nvfp4 = (
      layer_costs(kind, FORMATS[name], TABLE_HEADS)
      for kind, name in (("alike", "fp8"), ("measured", "fp8"), ("measured", "nvfp4"))
    )
    for shape in ((16, 16384), (128, 3000), (512, 16384)):
      self.assertEqual(alike.prefill(*shape), nvfp4.prefill(*shape))
      self.assertLess(alike.prefill(*shape), fp8.prefill(*shape))
    self.assertEqual(alike.prefill(513, 3000), fp8.prefill(513, 3000))

  def test_too_few_shapes(self):
    with self.assertRaisesRegex(ValueError, "H200, prefill by nvfp4_a4q: .*at least 4 shapes, got"):
      layer_costs("measured", FORMATS["nvfp4_a4q"], TABLE_HEADS)


class DecodeTest(TestCase):
  @parameterized.parameters("bf16", "fp8", "nvfp4")
  def test_measured_batches_are_as_measured(self, name):
    """Also those that read as many keys together as another batch, and take longer."""
    costs = layer_costs("measured", FORMATS[name], TABLE_HEADS)
    measured = list(rows("decode", FORMATS[name]))
    self.assertGreater(len(measured), len({row.batch * row.kv_len for row in measured}))
    for row in measured:
      found = costs.decode(row.batch, row.batch * row.kv_len)
      self.assertAlmostEqual(1e6 * found, row.us, places=6)

  def test_between_and_beyond(self):
    """A time of the square root of the sequences times the keys, as far as it was measured."""
    us = lambda sequences, keys: 1e-3 * sequences**0.5 * keys
    shapes = itertools.product((1, 16), (2**14, 2**20))
    surface = DecodeSurface({shape: us(*shape) for shape in shapes})
    for sequences, keys in ((1, 2**14), (4, 2**17), (9, 3 * 2**20), (16, 2**15)):
      self.assertAlmostEqual(surface(sequences, keys) / us(sequences, keys), 1.0)
    self.assertAlmostEqual(surface(16, 2**13) / us(16, 2**13), 1.0)  # falls on
    self.assertAlmostEqual(surface(16, 9), us(1, 2**14))  # but not below the least of all
    self.assertEqual(surface(64, 2**20), surface(16, 2**20))

  def test_the_mixed_format_lies_between(self):
    mixed, fp8, nvfp4 = (
      layer_costs("measured", FORMATS[name], TABLE_HEADS) for name in ("fp8_nvfp4", "fp8", "nvfp4")
    )
    for keys in (1000, 10**5, 10**7):
      mean = (fp8.decode(8, keys) + nvfp4.decode(8, keys)) / 2
      self.assertAlmostEqual(mixed.decode(8, keys), mean)
    self.assertEqual(mixed.prefill(8192, 8192), fp8.prefill(8192, 8192))

  def test_other_heads(self):
    """Half the KV heads read half as much; half the query heads have half the products."""
    half = Heads(1, 16, 4, 128)
    whole, part = (layer_costs("measured", FORMATS["fp8"], heads) for heads in (TABLE_HEADS, half))
    self.assertEqual(part.decode(8, 2**18), whole.decode(4, 2**17))
    self.assertEqual(part.prefill(8192, 8192), whole.prefill(8192, 8192) / 2)
    self.assertEqual(part.append(8192), whole.append(4096))


class AppendTest(TestCase):
  def test_committed(self):
    appends = committed_appends()
    self.assertCountEqual(appends, ("bf16", "fp8", "nvfp4"))
    for format in appends.values():
      self.assertContainsSubset((1, 64, 512, 8192), format)
    costs = layer_costs("measured", FORMATS["nvfp4"], TABLE_HEADS)
    self.assertAlmostEqual(1e6 * costs.append(8192), appends["nvfp4"][8192])

  def test_lacking(self):
    with self.assertRaisesRegex(ValueError, r"appends must have rows of nvfp4, got \['fp8'\]"):
      layer_costs("measured", FORMATS["nvfp4"], TABLE_HEADS, appends={"fp8": {1: 1.0}})


class KindsTest(TestCase):
  def test_equal(self):
    fp8 = layer_costs("alike", FORMATS["fp8"], TABLE_HEADS)
    for format in FORMATS.values():
      equal = layer_costs("equal", format, TABLE_HEADS)
      self.assertEqual(equal.prefill(8192, 8192), fp8.prefill(8192, 8192))
      self.assertEqual(equal.decode(3, 99), fp8.decode(3, 99))
      self.assertEqual(equal.append(9), fp8.append(9))

  def test_the_articles(self):
    fp8, stock, a4q = (
      layer_costs("seeds", FORMATS[name], TABLE_HEADS)
      for name in ("fp8", "nvfp4_dequant", "nvfp4_a4q")
    )
    of = [costs.prefill(2**14, 2**14) for costs in (fp8, stock, a4q)]
    self.assertEqual(of, [11.1e-3, 21.0e-3, 18.0e-3])
    self.assertAlmostEqual(stock.decode(2, 9999) / fp8.decode(2, 9999), 9.63 / 12.35)
    self.assertAlmostEqual(stock.append(1) / fp8.append(1), 8.39 / 3.01)
    with self.assertRaisesRegex(ValueError, "format must be read by one of"):
      layer_costs("seeds", FORMATS["nvfp4_a8q"], TABLE_HEADS)
    with self.assertRaisesRegex(ValueError, "kind must be one of .*, got 'mine'"):
      layer_costs("mine", FORMATS["fp8"], TABLE_HEADS)

  def test_their_fp8_with_our_ratios(self):
    ratios, theirs, ours, to = (
      layer_costs(kind, FORMATS[name], TABLE_HEADS)
      for kind, name in (
        ("ratios", "nvfp4"),
        ("seeds", "fp8"),
        ("alike", "nvfp4"),
        ("alike", "fp8"),
      )
    )
    asked = (
      lambda c: c.prefill(5000, 6000),
      lambda c: c.decode(2, 5000),
      lambda c: c.append(9),
    )
    for ask in asked:
      self.assertAlmostEqual(ask(ratios), ask(theirs) * ask(ours) / ask(to))


class ModelTest(TestCase):
  def test_llama_8b_has_its_weights(self):
    model = MODELS["llama-8b"]
    self.assertAlmostEqual((model.weights + model.output_weights) / 1e9, 8.03, delta=0.01)
    self.assertAlmostEqual(MODELS["moe-30b-a3b"].weights / 1e9, 30.2, delta=0.3)

  def test_roofline(self):
    """Few tokens take as long as the weights, many as long as their products."""
    model = Model(2, 100, 4, 2, 64, 300, 1000)
    layer = 100 * 64 * (4 + 2) * 2 + 3 * 100 * 300
    self.assertEqual(model.weights, 2 * layer + 100 * 1000)
    costs = Roofline(model, bytes_per_second=1e9, flops=1e12, overhead=0.5)
    self.assertAlmostEqual(costs.seconds(0, 1, 1), 0.5 + 2 * model.weights / 1e9)
    products = 2 * (10**6 * 2 * layer + 3 * 100 * 1000)
    self.assertAlmostEqual(costs.seconds(10**6 - 2, 2, 3), 0.5 + products / 1e12)

  def test_measured(self):
    costs = Measured((0, 16, 64), (0.5, 1.0, 2.0))
    found = [costs.seconds(n, 9, 1) for n in (0, 1, 16, 17, 64, 128)]
    self.assertEqual(found, [0.5, 1.0, 1.0, 2.0, 2.0, 4.0])
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / "a.json"
      costs.save(path)
      self.assertEqual(Measured.load(path), costs)
    for wrong in (((), ()), ((2, 1), (1.0, 1.0)), ((1,), (math.inf,)), ((1, 2), (1.0,))):
      with self.assertRaisesRegex(ValueError, "must"):
        Measured(*wrong)


class StepTest(TestCase):
  def test_a_step_is_all_its_parts_in_all_layers(self):
    class Counted:
      def prefill(self, q_len, kv_len):
        return 100.0 * q_len + kv_len

      def decode(self, sequences, keys):
        return 1000.0 * sequences + keys

      def append(self, tokens):
        return 1e-3 * tokens

    one, two, three = (Request(i, Item(0.0, 10, 5)) for i in range(3))
    step = Step(decodes=[one], chunks=[(two, 0, 10), (three, 2, 3)], context=11)
    times = StepCosts(Counted(), 2, Linear(0.5, 7.0)).times(step)
    expected = Times(2 * (1000 + 10 + 300 + 5), 2 * 1011.0, 2 * 14e-3, 7 + 0.5 * 14)
    self.assertEqual(times, expected)
    self.assertEqual(times.total, sum((2630, 2022, 28e-3, 14)))
    self.assertEqual((times + times).total, 2 * times.total)

  def test_only_two_write(self):
    """Of the chunks above one ends its prompt: the model is asked for two results."""
    asked = []

    class Model:
      def seconds(self, read, decodes, written):
        asked.append((read, decodes, written))
        return 1.0

    one, two, three = (Request(i, Item(0.0, 10, 5)) for i in range(3))
    step = Step(decodes=[one], chunks=[(two, 0, 10), (three, 2, 3)], context=11)
    StepCosts(layer_costs("alike", FORMATS["fp8"], TABLE_HEADS), 2, Model()).times(step)
    self.assertEqual(asked, [(13, 1, 2)])


if __name__ == "__main__":
  absltest.main()
