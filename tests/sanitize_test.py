"""`benchmarks sanitize` with a compute-sanitizer that only writes what it is told to."""

import contextlib
import io
import os
import pathlib
import time
from unittest import mock

from absl.testing import absltest, parameterized

from benchmarks import gpu, gpu_checks, sanitize
from tests.base import TestCase

PROGRAM = """#!/usr/bin/env bash
while [ "$1" != --log-file ]; do shift; done
echo "$SAID" > "$2"
echo "$*" "$XLA_PYTHON_CLIENT_ALLOCATOR"
echo "[1/2, 3 s] check pack: right"
{then}
"""


class SanitizeTest(TestCase):
  def sanitize(self, said, *argv, then="exit 0"):
    """(exit code, what was printed, the folder with the logs)."""
    folder = pathlib.Path(self.create_tempdir().full_path)
    program = folder / "bin" / "compute-sanitizer"
    program.parent.mkdir()
    program.write_text(PROGRAM.replace("{then}", then))
    program.chmod(0o755)
    variables = {"PATH": os.environ["PATH"], "CUDA_HOME": str(folder), "SAID": said}
    with (
      mock.patch.dict(os.environ, variables, clear=True),
      contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
      return sanitize.main(["--out", str(folder / "out"), *argv]), printed.getvalue(), folder

  def test_clean(self):
    code, printed, folder = self.sanitize("========= ERROR SUMMARY: 0 errors")
    self.assertEqual(code, 0)
    for tool in sanitize.TOOLS:
      self.assertRegex(printed, rf"\n{tool} +0 +exit code 0 +\d+ +\[1/2, 3 s\] check pack: right")
    asked = (folder / "out" / "memcheck.checks.log").read_text()
    self.assertRegex(asked, "-m benchmarks gpu --repeats 0 --only pack,append,.* platform\n")

  @parameterized.parameters(
    ("========= ERROR SUMMARY: 7 errors", "exit 99", "7 +exit code 99"),
    ("========= RACECHECK SUMMARY: 2 hazards displayed (2 errors)", "exit 0", "2 +exit code 0"),
    ("========= ERROR SUMMARY: 0 errors", "exit 1", "0 +exit code 1"),  # a check has failed
    ("========= Error: no device", "exit 1", "no summary +exit code 1"),
    (
      "= ERROR SUMMARY: 129515 errors\n= ERROR SUMMARY: 129495 errors were not printed.",
      "exit 99",
      "129515 +exit code 99",
    ),
  )
  def test_not_clean(self, said, then, row):
    code, printed, _ = self.sanitize(said, "--tools", "racecheck", then=then)
    self.assertEqual(code, 1)
    for line in said.splitlines():
      self.assertIn(f"\n  {line}\n", printed)
    self.assertRegex(printed, f"\nracecheck +{row} ")

  def test_places_in_kernels(self):
    said = "\n".join(
      f"=========     at {place} in ptx_launch.py:61" for place in ("a+0x10", "b+0x2f0", "b+0x2f0")
    )
    _, printed, _ = self.sanitize(said, "--tools", "initcheck")
    self.assertRegex(printed, r"\ninitcheck +b\+0x2f0 +2\ninitcheck +a\+0x10 +1\n")

  def test_time_is_bounded(self):
    began = time.monotonic()
    code, printed, _ = self.sanitize(
      "", "--tools", "memcheck", "--seconds", "0.5", then="sleep 60 & wait"
    )
    self.assertLess(time.monotonic() - began, 30)
    self.assertEqual(code, 1)
    self.assertRegex(printed, r"\nmemcheck +no summary +ended after 0.5 s")

  def test_not_installed(self):
    nowhere = mock.patch.object(sanitize, "places", lambda: ["/a/compute-sanitizer"])
    with nowhere, contextlib.redirect_stdout(io.StringIO()) as printed:
      self.assertEqual(sanitize.main([]), 1)
    self.assertRegex(printed.getvalue(), r"compute-sanitizer is not installed(?s:.*)\n  /a/compute")

  def test_checks_exist(self):
    self.assertContainsSubset(sanitize.CHECKS, map(gpu.name_of, gpu_checks.CHECKS))


if __name__ == "__main__":
  absltest.main()
