"""Level attention: the scores it makes of a cache are those of the operations, and its gates."""

import dataclasses
import pathlib
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized

from benchmarks import quality_attention, quality_data, quality_plot, quality_table
from benchmarks.metrics import row_error
from benchmarks.quality_attention import Case
from benchmarks.quality_configs import BY_NAME
from benchmarks.quality_gates import GATES
from benchmarks.quality_judge import judge
from benchmarks.quality_metrics import attend, of_output, of_probabilities
from benchmarks.quality_table import WIDTH
from tests.base import TestCase
from tests.quality_rows_test import example_row

# One of each thing that changes scores or values.
CONFIGS = (
  *("fp8/nvfp4", "nvfp4 hadKV 4/6", "nvfp4, Q x1", "nvfp4, Q fp8", "nvfp4 cal"),
  "nvfp4 mean hadK 4/6 w64",
)


class ScoresTest(TestCase):
  """The output must be that of exact attention with the scores and values read from the cache."""

  @parameterized.parameters(*CONFIGS)
  def test_decode(self, name):
    config, inputs = BY_NAME[name], quality_data.pattern("peaky", 300, 64)
    out, lse, who, stored = quality_attention.by_decode(config, inputs, None)
    self.assertEqual(who, "xla")
    self.assertEqual(stored.start, 224 if config.recent_window else 300)
    ((scores, _, stored_v),) = quality_attention.heads(config, inputs, stored)
    state = attend(scores(quantised_q=True, quantised_k=True), stored_v)
    self.assertLess(row_error(state.out, out[:, 0]), 1e-5)
    np.testing.assert_allclose(lse[:, 0], state.lse, atol=2e-4)

  def test_a_window_keeps_its_tokens(self):
    config, inputs = BY_NAME["nvfp4 w64"], quality_data.pattern("gauss", 300, 64)
    _, _, _, stored = quality_attention.by_decode(config, inputs, None)
    wide = np.abs(stored.k - inputs.k) <= 2**-8 * np.abs(inputs.k)
    self.assertTrue(wide[stored.start :].all())
    self.assertLess(wide[: stored.start].mean(), 0.1)

    # Whole pages leave, so that of 300 tokens 224 have left.
    counted = quality_attention._wide_tokens(config, inputs, stored)
    self.assertEqual(counted.value, 76)

  def test_a_text_is_read_as_it_is_generated(self):
    """Token by token and all at once are the same where nothing depends on when a token came."""
    inputs = quality_data.captured()[0]
    some = dataclasses.replace(inputs, q=inputs.q[:48], k=inputs.k[:48], v=inputs.v[:48])
    at_once, _, _, _ = quality_attention.by_prefill(BY_NAME["nvfp4"], some, None)
    one_by_one, _, _, _ = quality_attention.by_decode_of_a_text(BY_NAME["nvfp4"], some, None)
    self.assertLess(row_error(at_once, one_by_one), 1e-5)


class MetricsTest(TestCase):
  def test_nothing_is_lost_by_the_exact(self):
    rng = np.random.default_rng(0)
    scores, v = rng.standard_normal((5, 40)), rng.standard_normal((40, 8))
    state = attend(scores, v)
    numbers = of_output(state, state.out, state.lse) | of_probabilities(state, state)
    exact = {"cos": 1, "cos_min": 1, "norm_ratio": 1, "top1": 1, "top8": 1, "snr_db": np.inf}
    for metric, number in numbers.items():
      self.assertAlmostEqual(number.value, exact.get(metric, 0), places=12, msg=metric)

  def test_known_distances(self):
    scores = np.log([[0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.0078125]])
    other = attend(scores[:, ::-1].copy(), np.eye(8))
    state = attend(scores, np.eye(8))
    numbers = of_probabilities(state, other)
    p = np.exp(scores)
    self.assertAlmostEqual(numbers["kl"].value, np.sum(p * np.log(p / p[:, ::-1])))
    self.assertEqual(numbers["top1"].value, 0)
    self.assertAlmostEqual(numbers["max_delta_logit"].value, np.log(64))
    doubled = of_output(state, 2 * state.out, state.lse + 0.5)
    self.assertAlmostEqual(doubled["norm_ratio"].value, 2)
    self.assertAlmostEqual(doubled["rel_l2"].value, 1)
    self.assertAlmostEqual(doubled["cos"].value, 1)
    self.assertAlmostEqual(doubled["lse_error"].value, 0.5)

  def test_an_output_of_zeros(self):
    state = attend(np.zeros((2, 3)), np.ones((3, 4)))
    numbers = of_output(state, 0 * state.out, state.lse)
    self.assertEqual((numbers["cos"].value, numbers["rel_l2"].value), (0, 1))

  def test_keys_that_are_not_seen(self):
    scores = np.array([[0.0, 1.0, -np.inf] + 8 * [0.0]])
    v = np.random.default_rng(0).standard_normal((11, 4))
    numbers = of_probabilities(attend(scores, v), attend(scores + 0.5, v))
    self.assertAlmostEqual(numbers["kl"].value, 0)
    self.assertAlmostEqual(numbers["max_delta_logit"].value, 0.5)


class GatesTest(TestCase):
  names = ("nvfp4", "nvfp4, Q x2", "nvfp4, Q x1")

  def measure(self, names=names, **options):
    case = Case("gauss", 1024, tuple(BY_NAME[name] for name in names))
    return quality_attention.measure((case,), **options)

  def words(self, rows, *names):
    verdicts = judge(rows, ["attention"], gates=[g for g in GATES if g.name in names])
    return [verdict.word for verdict in verdicts]

  def test_gaussian_inputs_pass(self):
    rows = self.measure()
    gates = (
      *("nvfp4, gauss: output error", "nvfp4, gauss: cosine", "nvfp4, gauss: norm"),
      *("Q x2 over Q bf16: output error", "Q x2 over Q bf16: KL", "Q x1 fails 1.02 and says so"),
    )
    self.assertEqual(self.words(rows, *gates), len(gates) * ["pass"])
    lines = quality_table.of_rows(rows, "attention")
    self.assertLessEqual(max(map(len, lines)), WIDTH)
    self.assertEqual([" fails" in line for line in lines[-3:]], [False, False, True])

  def test_kernels_are_compared_with_the_definition(self):
    rows = self.measure(("nvfp4",))
    gate = "kernels over the definition: output error"
    self.assertEqual(self.words(rows, gate), ["-"])
    with mock.patch.object(quality_attention, "_who", return_value="mosaic_sm90"):
      rows = self.measure(("nvfp4",))
    (ratio,) = (row for row in rows if row.metric == "rel_l2_over_xla")
    self.assertEqual((ratio.value, ratio.implementation), (1, "mosaic_sm90"))

  def test_pictures(self):
    try:
      import matplotlib  # noqa: F401
    except ImportError:
      self.skipTest("matplotlib is not installed")
    rows = self.measure(("nvfp4",))
    more = [dataclasses.replace(row, context=n) for row in rows for n in (2048, 4096)]
    layers = [dataclasses.replace(row, data="SmolLM2 layer 6", context=256) for row in rows]
    folder = pathlib.Path(self.create_tempdir().full_path)
    drawn = quality_plot.draw([*rows, *more, *layers], folder)
    names = [path.stem for path in drawn]
    self.assertEqual(names, ["size_against_error", "error_against_length", "parts"])
    self.assertEmpty(quality_plot.draw([], folder))

  def test_lengths_are_not_mixed(self):
    try:
      import matplotlib  # noqa: F401
    except ImportError:
      self.skipTest("matplotlib is not installed")
    row = example_row(level="model", operation="prefill 16 stored", metric="kl", data="m, docs")
    rows = [
      row,
      dataclasses.replace(row, data="m, code", value=0.34),
      dataclasses.replace(row, context=8192, value=0.2, bits_per_value=4.6),
      dataclasses.replace(row, operation="prefill 2048 wide", value=0.01),
    ]
    figure = quality_plot.size_against_error(rows)
    assert figure is not None
    short, long = figure.axes
    self.assertEndsWith(short.get_title(), ", 1024 tokens")
    self.assertEndsWith(long.get_title(), ", 8192 tokens")
    points = [[line.get_xydata()[0].tolist() for line in a.lines[:1]] for a in (short, long)]
    np.testing.assert_allclose(points, [[[4.5, 0.24]], [[4.6, 0.2]]])

  def test_no_other_is_better_in_both(self):
    points = [(8.0, 0.04), (4.5, 0.2), (4.5, 0.1), (9.0, 0.05), (16.0, 0.0)]
    self.assertEqual(quality_plot.pareto(points), [(4.5, 0.1), (8.0, 0.04), (16.0, 0.0)])


if __name__ == "__main__":
  absltest.main()
