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

  def test_a_short_output_takes_no_pages(self):
    """Requests that are done before others start leave fewer running, with pages to spare."""
    sizes = {"contexts": (8192,), "concurrencies": (8, 32)}
    points = list(serve_sweeps.capacity(Setup(pool_bytes=2**37), NVFP4, output=2, **sizes))
    self.assertLess(points[1].base.num_requests_running, 32)
    self.assertEqual([p.region for p in points], ["", ""])

  def test_who_gives_way_is_out_of_pages(self):
    """Four prompts fit into FP8's six pages and NVFP4's ten, outputs of a page more into these."""
    setup = Setup(pool_bytes=6 * 64 * 65536)
    (point,) = serve_sweeps.capacity(setup, NVFP4, output=64, contexts=(128,), concurrencies=(4,))
    self.assertEqual((point.base.num_requests_running, point.base.num_preemptions), (4, 2))
    self.assertEqual(point.region, "fp8")

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
    self.assertRegex(lines[3], r"^0 % fp8 +60/60 +0\.0 of 0\.0 ")

  def test_different_requests_are_not_compared(self):
    """FP8's 4,096 tokens are too few for some or all prompts, NVFP4's 7,281 for none or some."""
    sizes = {"requests": 6, "output": 8, "spread": 0.3, "documents": 2, "seed": 0}
    small = Setup(pool_bytes=2**28)
    for prompt, served in ((4096, (2, 6)), (6500, (0, 4))):
      (point,) = serve_sweeps.reuse(small, NVFP4, prompt=prompt, reuses=(0.5,), **sizes)
      self.assertEqual((point.base.request_success, point.other.request_success), served)
      self.assertIsNone(point.speedup)
      _, _, _, fp8, nvfp4 = serve_sweeps.reuse_lines([point], NVFP4)
      self.assertRegex(fp8, f"fp8 +{served[0]}/6 ")
      self.assertRegex(nvfp4, f"nvfp4 +{served[1]}/6 .* -$")

  def test_wide_names_fit(self):
    other = FORMATS["nvfp4_dequant"]
    self.assertLessEqual(max(map(len, serve_sweeps.reuse_lines(self.points, other))), WIDTH)


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

  @absltest.skipUnless(importlib.util.find_spec("matplotlib"), "matplotlib is not installed")
  def test_a_picture_of_nothing_to_compare(self):
    """BF16's pool holds no request of this context, FP8's does."""
    path = self.folder / "a.png"
    self.enter_context(mock.patch.object(serve_sweeps, "CONTEXTS", (16384,)))
    argv = ("--sweep", "capacity", "--formats", "bf16", "--plot", str(path))
    code, out, err = self.run_sweep(*argv)
    self.assertEqual((code, err), (0, ""))
    self.assertRegex(out, r"\n16,384 +-\+ +-\+\n")
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
