"""The judge of the quality benchmark, and that its table is whole."""

import collections
import dataclasses
import math

from absl.testing import absltest, parameterized

from benchmarks import quality, quality_attention, quality_format, quality_table
from benchmarks.quality_configs import BY_NAME, NVFP4
from benchmarks.quality_gates import GATES
from benchmarks.quality_judge import OVER, RULES, Gate, judge
from benchmarks.quality_rows import LEVELS
from benchmarks.quality_table import WIDTH
from tests.base import TestCase
from tests.quality_rows_test import example_row


def gate(**changes) -> Gate:
  fields = {
    "name": "a gate",
    "level": "attention",
    "where": {"config": "nvfp4"},
    "metric": "rel_l2",
    "rule": "<=",
    "threshold": 0.15,
    "why": "because",
  }
  return Gate(**fields | changes)


def verdict(rows, only=None, **options):
  (found,) = judge(rows, ["attention"], gates=[only or gate()], **options)
  return found


class JudgeTest(TestCase):
  @parameterized.parameters(
    ("<=", 0.15, 0.15, True),
    ("<=", 0.15, 0.1501, False),
    ("<", 0.15, 0.15, False),
    (">=", 0.15, 0.15, True),
    (">=", 0.15, 0.1499, False),
    (">", 0.15, 0.15, False),
    ("<=", 0.15, math.nan, False),
    (">=", 0.15, math.nan, False),
    (">=", 13.5, math.inf, True),
  )
  def test_rules(self, rule, threshold, value, passes):
    found = verdict([example_row(value=value)], gate(rule=rule, threshold=threshold))
    self.assertIs(found.passed, passes)

  def test_the_worst_row_decides(self):
    rows = [example_row(value=0.1), example_row(value=0.2, context=8192)]
    found = verdict(rows)
    self.assertEqual((found.passed, found.value, found.note), (False, 0.2, "gauss, 8192"))
    found = verdict(rows, gate(rule=">=", threshold=0.05))
    self.assertEqual((found.passed, found.value), (True, 0.1))

  @parameterized.parameters(("median", 0.2), ("mean", 0.3))
  def test_over_rows(self, over, value):
    rows = [example_row(value=x, data=str(x)) for x in (0.1, 0.2, 0.6)]
    self.assertAlmostEqual(verdict(rows, gate(over=over)).value, value)

  def test_no_row_is_a_failure(self):
    for rows in ([], [example_row(metric="kl")], [example_row(config=BY_NAME["fp8"])]):
      found = verdict(rows)
      self.assertEqual((found.passed, found.note), (False, "no measurement"))

  def test_other_levels_are_not_judged(self):
    self.assertEmpty(judge([], ["format"], gates=[gate()]))

  def test_what_cannot_be_measured_is_left_open(self):
    found = verdict([], gate(two_implementations=True))
    self.assertEqual((found.passed, found.note), (None, "the definition alone"))
    found = verdict([], gate(two_implementations=True), kernels=True)
    self.assertIs(found.passed, False)
    self.assertIsNone(verdict([], gate(full_only=True), smoke=True).passed)
    self.assertIs(verdict([], gate(full_only=True)).passed, False)

  @parameterized.parameters(
    ("cpu", "xla", None, None),
    ("NVIDIA H200", "xla", None, False),  # no kernel took a request: that must be seen
    ("NVIDIA H200", "xla", "xla", None),  # the definition was asked for
    ("NVIDIA H200", "mosaic_sm90", None, False),
  )
  def test_kernels_that_did_not_run(self, device, who, asked, passed):
    rows = [example_row(device=device, implementation=who)]
    verdicts = quality.verdicts_of(rows, ["attention"], implementation=asked)
    found = {one.gate.name: one.passed for one in verdicts}
    self.assertIs(found["kernels over the definition: output error"], passed)

  def test_ratio_to_the_same_data(self):
    only = gate(where={"config": "nvfp4, Q x2"}, relative_to="nvfp4", threshold=1.02)
    two = BY_NAME["nvfp4, Q x2"]
    rows = [example_row(value=0.2, context=8192), example_row(value=0.1)]
    self.assertAlmostEqual(verdict([*rows, example_row(config=two, value=0.101)], only).value, 1.01)
    found = verdict([*rows, example_row(config=two, value=0.101, data="peaky")], only)
    self.assertEqual(found.note, "no measurement")

  def test_ratio_prefers_the_same_operation(self):
    only = gate(where={"config": "fp8"}, relative_to="nvfp4")
    rows = [example_row(value=0.1, operation="prefill"), example_row(value=0.2)]
    self.assertAlmostEqual(
      verdict([*rows, example_row(config=BY_NAME["fp8"], value=0.1)], only).value, 0.5
    )

  def test_ratio_to_nothing_is_a_failure(self):
    only = gate(where={"config": "fp8"}, relative_to="nvfp4")
    rows = [example_row(value=0.0), example_row(config=BY_NAME["fp8"])]
    self.assertEqual(verdict(rows, only).note, "not a number")

  def test_distance_to_what_is_expected(self):
    only = gate(rule="within", threshold=0.05, expected={"gauss": 1.0, "peaky": 2.0})
    rows = [example_row(value=1.04), example_row(value=1.97, data="peaky")]
    self.assertTrue(verdict(rows, only).passed)
    self.assertFalse(verdict([*rows, example_row(value=0.94)], only).passed)
    self.assertEqual(verdict(rows[:1], only).note, "no measurement, peaky")

  def test_text_is_what_stands_last(self):
    only = gate(where={"text": "docs"})
    self.assertTrue(verdict([example_row(data="a model, docs")], only).passed)
    self.assertFalse(verdict([example_row(data="a model, code")], only).passed)

  def test_contexts_that_were_not_asked_for(self):
    only = gate(level="model", where={"context": (256, 1024)})
    for contexts, note in (((8192,), "not asked for"), ((256,), "no measurement")):
      (found,) = judge([], ["model"], gates=[only], contexts=contexts)
      self.assertEqual(found.note, note)


class TableTest(TestCase):
  def test_names_are_unique(self):
    self.assertEmpty([n for n, c in collections.Counter(g.name for g in GATES).items() if c > 1])

  def test_every_line_is_whole(self):
    names = set(BY_NAME) | {q.name for q in quality_format.QUANTISERS}
    fields = {f.name for f in dataclasses.fields(example_row())} | {"text"}
    for g in GATES:
      with self.subTest(g.name):
        self.assertIn(g.level, LEVELS)
        self.assertIn(g.rule, RULES)
        self.assertIn(g.over, OVER)
        self.assertNotEmpty(g.why)
        self.assertContainsSubset(set(g.where), fields)
        self.assertContainsSubset(set(_configs(g)), names)
        self.assertIn(g.relative_to or "nvfp4", names)
        self.assertEqual(g.rule == "within", g.expected is not None)

  def test_every_gate_of_attention_will_be_measured(self):
    """By the full run, and those that are not left to it by the smoke run."""
    for g in GATES:
      for cases in (quality_attention.FULL, quality_attention.SMOKE):
        if g.level != "attention" or (g.full_only and cases is quality_attention.SMOKE):
          continue
        names = lambda case: {config.name for config in case.configs}
        having = [
          case
          for case in cases
          if _may_match(g, case)
          and names(case) & (set(_configs(g)) or names(case))
          and {g.relative_to} - {None} <= names(case)
        ]
        self.assertNotEmpty(having, g.name)

  def test_what_is_not_free_is_expected_to_fail(self):
    (g,) = (g for g in GATES if g.name == "Q x1 fails 1.02 and says so")
    one = BY_NAME["nvfp4, Q x1"]
    for value, passes in ((0.17, True), (0.14, False)):
      rows = [example_row(config=NVFP4, value=0.14), example_row(config=one, value=value)]
      self.assertIs(judge(rows, ["attention"], gates=[g])[0].passed, passes)

  @parameterized.parameters(("prefill 64 stored", 0.04, True), ("prefill 8 stored", 0.05, False))
  def test_a_window_must_halve_what_decoding_pays(self, operation, value, passes):
    (g,) = (g for g in GATES if g.name == "model, nvfp4 w64 beats nvfp4: KL")
    plain = example_row(
      level="model", operation=operation, data="m, docs", context=8192, metric="kl", value=0.09
    )
    windowed = dataclasses.replace(plain, config=BY_NAME["nvfp4 w64"], value=value)
    # Steps whose own tokens are wide hide the cost, and are not judged.
    wide = [
      dataclasses.replace(r, operation="prefill 64 wide", value=0.03) for r in (plain, windowed)
    ]
    self.assertIs(judge([plain, windowed, *wide], ["model"], gates=[g])[0].passed, passes)

  def test_verdicts_fit_a_terminal(self):
    for verdicts in (judge([], LEVELS, gates=GATES), judge([], LEVELS, gates=GATES, smoke=True)):
      lines = quality_table.of_verdicts(verdicts)
      self.assertLessEqual(max(map(len, lines)), WIDTH)
      for v in verdicts:
        self.assertTrue(any(line.startswith(f"{v.gate.name} ") for line in lines), v.gate.name)


def _configs(g: Gate) -> tuple[str, ...]:
  """Names; none for any."""
  config = g.where.get("config", ())
  return config if isinstance(config, tuple) else (str(config),)


def _may_match(g: Gate, case) -> bool:
  data = g.where.get("data", case.data)
  data = data if isinstance(data, tuple) else (data,)
  context = g.where.get("context", case.context)
  named = "SmolLM2 layer 6" if case.data == "captured" else case.data
  return (
    named in data or f"{case.data}, causal" in data or case.data in data
  ) and case.context in (context if isinstance(context, tuple) else (context,))


if __name__ == "__main__":
  absltest.main()
