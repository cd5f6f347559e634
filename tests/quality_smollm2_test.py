"""Smoke of the quality benchmark's model level on SmolLM2, where its file has been fetched before.

    python3 -m benchmarks quality --levels model --smoke

fetches it. Where that has just been run, as in `.ci/run`, NVFP4_PALLAS_SMOKE_ROWS names the file of
its rows, and nothing is measured twice. One window of 256 tokens, so that absolute numbers are
those of one text on one machine: bounds are a factor of two on both sides of what was measured.
"""

import importlib.util
import os
import pathlib

from absl.testing import absltest

from benchmarks import llama_files, quality_model, quality_rows
from benchmarks.progress import Progress
from benchmarks.quality_configs import BY_NAME
from tests.base import TestCase

FETCHED = llama_files.gguf_path().exists()
INSTALLED = all(importlib.util.find_spec(name) for name in ("gguf", "tokenizers"))


@absltest.skipUnless(FETCHED and INSTALLED, "SmolLM2 has not been fetched, or gguf is missing")
class SmokeTest(TestCase):
  def test_smoke(self):
    """One test, because the runner may give tests of a module to several processes."""
    kept = os.environ.get("NVFP4_PALLAS_SMOKE_ROWS")
    rows = quality_rows.read(pathlib.Path(kept)) if kept else self.measured()
    rows = [row for row in rows if row.level == "model"]
    self.assertFalse(any(row.stale for row in rows))
    values = {(row.config.name, row.operation, row.metric): row.value for row in rows}
    for config, least, most in (
      ("bf16", 0.0, 1e-4),  # between chunk lengths: the floor, measured 3.4e-5
      ("fp8", 0.0043, 0.0172),  # .0086
      ("nvfp4", 0.045, 0.18),  # .0898; 1,024 tokens gave .0959 with every token stored
      ("nvfp4 w64", 0.0117, 0.0466),  # .0233, in steps of 64: a token has 0 to 63 wide ones
    ):
      with self.subTest(config):
        self.assertBetween(values[config, "prefill 64 stored", "kl"], least, most)
        self.assertEqual(values[config, "prefill 64 stored", "answer_top1"], 1)
    kl, top1, tv = (
      lambda name, key=key: values[name, *key]
      for key in (
        ("prefill 64 wide", "kl"),
        ("prefill 64 stored", "top1"),
        ("decode sampled", "tv"),
      )
    )
    # Measured: .0021, .0041, .0233.
    self.assertGreater(kl("fp8"), 0)
    self.assertGreater(kl("nvfp4"), 2 * kl("nvfp4 w64"))
    self.assertGreater(kl("nvfp4"), 4 * kl("fp8"))
    # Measured: .953 and .859; a row is .005.
    self.assertBetween(top1("fp8"), 0.9, 0.99)
    self.assertBetween(top1("nvfp4"), 0.8, 0.91)
    self.assertGreater(tv("nvfp4 w64"), 0)
    self.assertGreater(tv("nvfp4"), tv("nvfp4 w64"))

  def measured(self):
    return quality_model.measure(
      [BY_NAME[name] for name in quality_model.SMOKE_CONFIGS],
      quality_model.SMOKE,
      quality_model.load(),
      implementation="xla",
      progress=Progress,
    )


if __name__ == "__main__":
  absltest.main()
