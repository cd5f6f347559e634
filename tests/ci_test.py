"""The gate's script, with a python3 that only notes what it is asked for."""

import os
import pathlib
import subprocess

from absl.testing import absltest

from tests.base import TestCase

SCRIPT = pathlib.Path(__file__).parent.parent / ".ci" / "run"
PYTHON = """#!/usr/bin/env bash
echo "$*" >> "$ASKED"
case "$*" in
  *bootstrap*) echo "$0" ;;
  *fetch_gguf*) exit "$FETCHED" ;;
esac
"""


class CiTest(TestCase):
  def run_script(self, *, fetched: int, **environment: str):
    """(exit status, what it printed, what it asked python for)."""
    folder = pathlib.Path(self.create_tempdir().full_path)
    python = folder / "python3"
    python.write_text(PYTHON)
    python.chmod(0o755)
    asked = folder / "asked"
    outer = {n: v for n, v in os.environ.items() if n != "NVFP4_PALLAS_OFFLINE"}
    path = f"{folder}{os.pathsep}{outer['PATH']}"
    given = {"PATH": path, "ASKED": str(asked), "FETCHED": str(fetched)} | environment
    ran = subprocess.run([SCRIPT], env=outer | given, capture_output=True, text=True, timeout=60)
    return ran.returncode, ran.stdout, asked.read_text()

  def test_judges_a_model(self):
    status, printed, asked = self.run_script(fetched=0)
    self.assertEqual(status, 0, printed)
    self.assertIn("quality --smoke --levels format attention model\n", asked)
    self.assertNotIn("no model was judged", printed)

  def test_a_model_that_cannot_be_fetched_is_a_failure(self):
    status, printed, asked = self.run_script(fetched=1)
    self.assertEqual(status, 1)
    self.assertIn("FAILED: SmolLM2, or NVFP4_PALLAS_OFFLINE=1\n", printed)
    self.assertIn("quality --smoke --levels format attention\n", asked)

  def test_offline_must_be_asked_for(self):
    status, printed, asked = self.run_script(fetched=1, NVFP4_PALLAS_OFFLINE="1")
    self.assertEqual(status, 0)
    self.assertIn("NVFP4_PALLAS_OFFLINE=1: no model was judged\n", printed)
    self.assertNotIn("fetch_gguf", asked)


if __name__ == "__main__":
  absltest.main()
