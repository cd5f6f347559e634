"""Sweeps against FP8: where who runs out of pages, their tables and their pictures."""

import contextlib
import importlib.util
import io
import json
import pathlib
import sys
import tempfile
from unittest import mock

from absl.testing import absltest

from benchmarks import serve, serve_sweeps
from benchmarks.serve_formats import FORMATS
from benchmarks.serve_setup import Setup
from benchmarks.table import WIDTH
from tests.base import TestCase

NVFP4 = FORMATS["nvfp4"]
# 64 KiB a token in FP8: 16,384 tokens, and 29,127 in NVFP4, in whole pages of 64.
SETUP = Setup(pool_bytes=2**30)


class CapacityTest(TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    sweep = serve_sweeps.capacity(
      SETUP, NVFP4, output=64, contexts=(1024, 4096, 32768), concurrencies=(2, 4, 6, 16)
    )
    cls.points = list(sweep)

  def test_regions(self):
    """16 times 1,024 fit into FP8; 4 times 4,096 too, and 7 into NVFP4; no one of 32,768."""
    found = {(p.context, p.concurrency): p.region for p in self.points}
    of = lambda context: [found[context, n] for n in (2, 4, 6, 16)]
    self.assertEqual(of(1024), ["", "", "", ""])
    self.assertEqual(of(4096), ["", "", "fp8", "both"])
    self.assertLen(found, 8)

  def test_pages_are_worth_time(self):
    at = {(p.context, p.concurrency): p.speedup for p in self.points}
    self.assertGreater(at[4096, 6], at[4096, 4])

  def test_lines(self):
    lines = serve_sweeps.capacity_lines(self.points, NVFP4)
    self.assertLessEqual(max(map(len, lines)), WIDTH)
    text = "\n".join(lines)
    self.assertRegex(text, r"\n4,096 .* [0-9.]+\*  [0-9.]+\+")
    self.assertRegex(text, "1,024 tokens: FP8 runs out +never, nvfp4 +never")
    self.assertRegex(text, "4,096 tokens: FP8 runs out +at 6, nvfp4 +at 16")


class ReuseTest(TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    sizes = {"requests": 60, "prompt": 4096, "output": 32, "spread": 0.0, "documents": 6, "seed": 0}
    cls.points = list(serve_sweeps.reuse(SETUP, NVFP4, reuses=serve_sweeps.REUSES, **sizes))

  def test_from_0_to_95_percent(self):
    self.assertEqual([p.reuse for p in self.points], [0.0, 0.25, 0.5, 0.75, 0.9, 0.95])
    shares = [p.findable for p in self.points]
    self.assertEqual((shares, shares[0]), (sorted(shares), 0.0))
    # Six of sixty are the first of their document; a prompt has eight blocks.
    self.assertAlmostEqual(shares[-1], 0.9, delta=0.01)
    for p in self.points:
      self.assertLessEqual(p.base.hit_share, p.other.hit_share + 1e-9)
      self.assertLessEqual(p.other.hit_share, p.findable + 1e-9)

  def test_lines(self):
    lines = serve_sweeps.reuse_lines(self.points, NVFP4)
    self.assertLen(lines, 3 + 2 * len(serve_sweeps.REUSES))
    self.assertLessEqual(max(map(len, lines)), WIDTH)


class CommandTest(TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    small = {"CONTEXTS": (1024, 4096), "CONCURRENCIES": (2, 4), "REUSES": (0.0, 0.9)}
    self.enter_context(mock.patch.multiple(serve_sweeps, **small))

  def run_sweep(self, *argv):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
      try:
        code = serve.main(["--simulate", "--pool-gib", "1", "--output", "32", *argv])
      except SystemExit as error:
        code = error.code
    return code, out.getvalue(), err.getvalue()

  def test_rows_are_written(self):
    path = self.folder / "rows.jsonl"
    code, out, _ = self.run_sweep("--sweep", "capacity", "--out", str(path))
    self.assertEqual(code, 0)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    self.assertEqual(
      [(row["context"], row["concurrency"]) for row in rows][1:3], [(1024, 4), (4096, 2)]
    )
    self.assertIn("num_preemptions", rows[0]["base"])
    self.assertIn("1,024", out)

  @absltest.skipUnless(importlib.util.find_spec("matplotlib"), "matplotlib is not installed")
  def test_pictures(self):
    for sweep in serve_sweeps.SWEEPS:
      path = self.folder / "plots" / f"{sweep}.png"
      sizes = ("--requests", "12", "--prompt", "1024", "--documents", "3")
      of = sizes if sweep == "reuse" else ()
      code, out, err = self.run_sweep("--sweep", sweep, "--plot", str(path), *of)
      self.assertEqual((code, err), (0, ""))
      self.assertIn(f"drawn: {path}", out)
      self.assertStartsWith(path.read_bytes(), b"\x89PNG")

  def test_without_matplotlib(self):
    lacking = {"matplotlib": None, "matplotlib.figure": None, "matplotlib.colors": None}
    with mock.patch.dict(sys.modules, lacking):
      code, out, err = self.run_sweep("--sweep", "capacity", "--plot", "a.png")
    self.assertEqual(code, 2)
    self.assertIn("1,024", out)  # what was found is printed before it is drawn
    self.assertIn("--plot needs matplotlib, which the extra `reports` installs", err)


if __name__ == "__main__":
  absltest.main()
