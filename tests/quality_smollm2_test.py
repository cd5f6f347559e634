"""Smoke of the quality benchmark's model level on SmolLM2, where its file has been fetched before.

    python3 -m benchmarks quality --levels model --smoke

fetches it. One window of 256 tokens, so that absolute numbers are those of one text on one machine:
bounds are a factor of two on both sides of what was measured.
"""

import functools
import importlib.util

from absl.testing import absltest, parameterized

from benchmarks import llama_files, quality_model
from benchmarks.progress import Progress
from benchmarks.quality_configs import CONFIGS
from tests.base import TestCase

FETCHED = llama_files.gguf_path().exists()
INSTALLED = all(importlib.util.find_spec(name) for name in ("gguf", "tokenizers"))


@functools.cache
def values() -> dict[tuple[str, str, str], float]:
  """(config, operation, metric) -> value."""
  rows = quality_model.measure(CONFIGS, smoke=True, implementation="xla", progress=Progress)
  return {(row.config.name, row.operation, row.metric): row.value for row in rows}


@absltest.skipUnless(FETCHED and INSTALLED, "SmolLM2 has not been fetched, or gguf is missing")
class SmokeTest(TestCase):
  @parameterized.parameters(
    ("bf16", 0.0, 1e-4),  # between chunk lengths: the floor, measured 3.4e-5
    ("fp8", 0.0043, 0.0172),  # .0086
    ("nvfp4", 0.045, 0.18),  # .0898; 1,024 tokens gave .0959 with every token stored
    ("nvfp4 w64", 0.0117, 0.0466),  # .0233, in steps of 64: a token has 0 to 63 wide ones
  )
  def test_kl_where_all_is_stored(self, config, least, most):
    self.assertBetween(values()[config, "prefill 64 stored", "kl"], least, most)

  def test_order(self):
    fp8, windowed, nvfp4 = (
      values()[name, "prefill 64 wide", "kl"] for name in ("fp8", "nvfp4 w64", "nvfp4")
    )
    self.assertGreater(fp8, 0)
    # Measured: .0021, .0041, .0233.
    self.assertGreater(nvfp4, 2 * windowed)
    self.assertGreater(nvfp4, 4 * fp8)

  def test_top1(self):
    # Measured: .953 and .859; a row is .005.
    of = {name: values()[name, "prefill 64 stored", "top1"] for name in ("fp8", "nvfp4")}
    self.assertBetween(of["fp8"], 0.9, 0.99)
    self.assertBetween(of["nvfp4"], 0.8, 0.91)

  @parameterized.parameters("bf16", "fp8", "nvfp4", "nvfp4 w64")
  def test_pass_key_is_found(self, config):
    self.assertEqual(values()[config, "prefill 64 stored", "answer_top1"], 1)

  def test_generated_text(self):
    self.assertGreater(values()["nvfp4", "decode sampled", "kl"], 0)
    self.assertGreater(
      values()["nvfp4", "decode sampled", "tv"], values()["nvfp4 w64", "decode sampled", "tv"]
    )


if __name__ == "__main__":
  absltest.main()
