"""The gate's script, with a python3 that only notes what it is asked for."""

import contextlib
import io
import os
import pathlib
import re
import subprocess
import sys
from unittest import mock

from absl.testing import absltest

from benchmarks import aot_cases
from tests.base import TestCase

SCRIPT = pathlib.Path(__file__).parent.parent / ".ci" / "run"
PYTHON = """#!/usr/bin/env bash
echo "$*" >> "$ASKED"
case "$*" in
  *bootstrap*--version*) [ -z "$NO_CORNER" ] && echo "$0" ;;
  *bootstrap*) echo "$0" ;;
  *--version*) echo --version 3.13 --pin jax==0.11.2 ;;
  *fetch_gguf*) exit "$FETCHED" ;;
  *quality*) echo rows > "$6" ;;
  "-m tests") echo "rows: $(cat "$NVFP4_PALLAS_SMOKE_ROWS")" >> "$ASKED" ;;
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
    outer = {n: v for n, v in os.environ.items() if not n.startswith("NVFP4_PALLAS")}
    path = f"{folder}{os.pathsep}{outer['PATH']}"
    given = {"PATH": path, "ASKED": str(asked), "FETCHED": str(fetched), "NO_CORNER": ""}
    given |= environment
    ran = subprocess.run([SCRIPT], env=outer | given, capture_output=True, text=True, timeout=60)
    return ran.returncode, ran.stdout, asked.read_text()

  def test_judges_a_model(self):
    status, printed, asked = self.run_script(fetched=0)
    self.assertEqual(status, 0, printed)
    self.assertRegex(asked, r"quality --smoke --out \S+ --levels format attention model\n")
    self.assertIn("rows: rows\n", asked)
    self.assertNotIn("no model was judged", printed)

  def test_a_model_that_cannot_be_fetched_is_a_failure(self):
    status, printed, asked = self.run_script(fetched=1)
    self.assertEqual(status, 1)
    self.assertIn("FAILED: SmolLM2, or NVFP4_PALLAS_OFFLINE=1\n", printed)
    self.assertRegex(asked, r"quality --smoke --out \S+ --levels format attention\n")
    self.assertIn("rows: \n", asked)

  def test_offline_must_be_asked_for(self):
    status, printed, asked = self.run_script(fetched=1, NVFP4_PALLAS_OFFLINE="1")
    self.assertEqual(status, 0)
    self.assertIn("NVFP4_PALLAS_OFFLINE=1: no model was judged\n", printed)
    self.assertNotIn("fetch_gguf", asked)

  def test_other_versions(self):
    status, printed, asked = self.run_script(fetched=0)
    self.assertEqual(status, 0, printed)
    self.assertIn("bootstrap --extra tests --version 3.13 --pin jax==0.11.2\n", asked)
    (names,) = re.findall(r"^-m tests (.+)$", asked, re.MULTILINE)
    self.assertIn("jit_test", names.split())
    compiled = [case.name for case in aot_cases.CASES]
    for name in names.split():
      module, _, case = name.partition(".")
      self.assertTrue((SCRIPT.parent.parent / "tests" / f"{module}.py").exists(), name)
      if case:
        self.assertIn(case.removeprefix("CompileTest.test_case_"), compiled)

  def test_without_the_other_versions_the_gate_fails(self):
    status, printed, _ = self.run_script(fetched=0, NO_CORNER="1")
    self.assertEqual(status, 1)
    self.assertIn("FAILED: other versions\n", printed)

  def test_the_other_corner(self):
    """What the script asks bootstrap for, by what the gate's environment has."""
    (code,) = re.findall(r"other_corner='(.*?)'", SCRIPT.read_text(), re.DOTALL)
    pins = ["--pin", "jax==0.11.2", "--pin", "jaxlib==0.11.2"]
    for python, jax, want in (
      ((3, 12, 1), "0.12.0.1", ["--version", "3.13", *pins]),
      ((3, 12, 1), "0.11.2", ["--version", "3.13"]),
      ((3, 13, 0), "0.12.1", ["--version", "3.12", *pins]),
    ):
      modules = {"sys": mock.Mock(version_info=python), "jax": mock.Mock(__version__=jax)}
      with mock.patch.dict(sys.modules, modules):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
          exec(code, {})
      self.assertEqual(printed.getvalue().split(), want)


if __name__ == "__main__":
  absltest.main()
