"""The benchmark of the published comparison: what it prints, and that a fault does not stop it."""

import json
import pathlib
from unittest import mock

import jax.numpy as jnp
from absl.testing import absltest

from benchmarks import gpu_timings, seeds
from tests.base import TestCase


class SeedsTest(TestCase):
  def run_all(self, shapes, variants):
    """(exit status, what was printed, rows), on this CPU by the definition."""
    out = pathlib.Path(self.create_tempdir().full_path) / "rows.jsonl"
    with (
      mock.patch.object(seeds, "SHAPES", shapes),
      mock.patch.object(seeds, "VARIANTS", variants),
      mock.patch.object(seeds, "CHECKED", (1, 2, 32)),
      mock.patch.object(seeds, "CALLS", 2),
      mock.patch.object(gpu_timings, "ROTATED_BYTES", 1),
      mock.patch("builtins.print") as printed,
    ):
      status = seeds.Run(out, seeds.by_wall).all()
    text = "\n".join(str(call.args[0]) for call in printed.call_args_list)
    lines = out.read_text().splitlines() if out.exists() else []
    return status, text, list(map(json.loads, lines))

  def test_checks_and_times(self):
    variants = {"fp8": seeds.VARIANTS["fp8"]}
    status, text, rows = self.run_all({"prompt of 16K": (1, 2, 32)}, variants)
    self.assertEqual(status, 0)
    self.assertRegex(text, "check fp8: worst row .* off the definition, by xla")
    self.assertRegex(text, r"prompt of 16K +[\d.]+ \(1.00\)\n")
    (row,) = rows
    self.assertEqual((row["read_path"], row["implementation"]), ("fp8", "xla"))
    self.assertIn("not triton_sm120: it needs sm_120, the device is cpu", row["reason"])

  def test_a_fault_is_named_and_the_rest_goes_on(self):
    variants = {name: seeds.VARIANTS[name] for name in ("bf16", "fp8")}
    with mock.patch.object(seeds, "check", side_effect=[ValueError("rows are off"), "good"]):
      status, text, _ = self.run_all({}, variants)
    self.assertEqual(status, 1)
    self.assertIn("check bf16: FAILED: ValueError: rows are off", text)
    self.assertIn("check fp8: good", text)

  def test_a_wrong_kernel_fails_its_check(self):
    call = mock.Mock(repeated=lambda count: [lambda: (jnp.ones((2, 2)), None)])
    wrong = mock.Mock(repeated=lambda count: [lambda: (jnp.full((2, 2), 1.02), None)])
    with mock.patch.object(seeds.Call, "of", side_effect=[wrong, call]):
      with self.assertRaisesRegex(ValueError, "rows must be within 0.01 .* worst is 2.00e-02 off"):
        seeds.check(seeds.VARIANTS["bf16"])

  def test_published_ratios(self):
    ratios = [round(claim.of_ms / claim.to_ms, 2) for claim in seeds.PUBLISHED]
    self.assertEqual(ratios, [1.74, 1.89, 1.62, 0.86])
    ms = {("prompt of 16K", "a4q 2"): 9.0, ("prompt of 16K", "fp8"): 6.0}
    lines = seeds.beside_published(ms)
    self.assertIn("145.81 / 84.03 = 1.74x", lines[1])
    self.assertRegex(lines[3], r"18 / 11.1 = 1.62x +9.00 / 6.00 = 1.50x$")
    self.assertEndsWith(lines[4], " -")
    self.assertIn("9.00 (1.50)", seeds.table(ms)[-1])

  def test_fits_a_terminal(self):
    ms = {(shape, name): 145.81234 for shape in seeds.SHAPES for name in seeds.VARIANTS}
    for line in (*seeds.table(ms), *seeds.beside_published(ms)):
      self.assertLessEqual(len(line), 100)

  def test_needs_a_gpu(self):
    self.assertEqual(seeds.main([]), 1)


if __name__ == "__main__":
  absltest.main()
