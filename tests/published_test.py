"""`python -m benchmarks published`: what was published stands beside what this card does, or beside
what it lacks."""

import contextlib
import importlib.metadata
import io
import pathlib
import re
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized

from benchmarks import cases, cli, published, records, seeds
from benchmarks import workloads as w
from benchmarks.table import WIDTH
from nvfp4_pallas.dispatch import Target, use_target
from nvfp4_pallas.kernels import triton_launch
from tests.base import TestCase
from tests.matrix_test import MatrixTestCase

STOCK = "stock / FP8, prefill 1.89 (21.0 / 11.1 ms)"
A4Q = "A4Q x2 / FP8, prefill 1.62 (18.0 / 11.1 ms)"
CLAIMS = [text for of in seeds.RATIOS for text in of.published.values() if text]


class NumbersTest(TestCase):
  def test_published_ratios_are_those_of_the_published_times(self):
    found = set()
    for claim in CLAIMS:
      times = re.match(r"([\d.]+) \(([\d.]+) / ([\d.]+) ", claim)
      if times:
        ratio, of, to = times.groups()
        self.assertEqual(f"{float(of) / float(to):.{len(ratio.partition('.')[2])}f}", ratio)
        found |= {ratio, of, to}
    self.assertContainsSubset({"1.74", "1.89", "1.62", "21.0", "18.0", "11.1"}, found)

  def test_shapes_and_paths(self):
    """All four shapes, and the prompt of 16K, over all paths that others have."""
    made = cases.published(cases.Device("sm_120", small=False), published.SHAPES)
    shapes = {(c.workload.batch, c.workload.q_len, c.workload.kv_len) for c in made}
    self.assertContainsSubset(
      {(1, 8192, 8192), (1, 32768, 32768), (4, 128, 2048), (1, 16, 16384), (1, 16384, 16384)},
      shapes,
    )
    paths = {(c.variant.read_path, c.fields.get("q_levels")) for c in made}
    self.assertEqual(
      paths,
      {
        *((path, None) for path in ("bf16", "fp8", "nvfp4_dequant", "nvfp4_repack")),
        *(("nvfp4_a4q", levels) for levels in (1, 2)),
      },
    )
    self.assertLen(made, len(paths) * len(shapes))
    self.assertEqual({c.implementation for c in made}, {"triton_sm120"})

  def test_they_are_cases_of_the_matrix(self):
    device = cases.Device("sm_90", small=False)
    known = {cases.key(case.fields) for case in cases.default(device)}
    for case in cases.published(device, published.SHAPES):
      self.assertIn(cases.key(case.fields), known)


class CommandTest(MatrixTestCase):
  """With cases that do nothing."""

  def run_published(self, *argv, architecture):
    printed, errors = io.StringIO(), io.StringIO()
    with (
      use_target(Target(architecture)),
      contextlib.redirect_stdout(printed),
      contextlib.redirect_stderr(errors),
    ):
      code = published.main(["--out", str(self.out), *argv])
    return code, printed.getvalue(), " ".join(errors.getvalue().split())

  def test_beside_what_was_measured(self):
    code, printed, _ = self.run_published(architecture="sm_90")
    self.assertEqual(code, 0)
    rows = records.read(self.out)
    self.assertLen(rows, 1 + len(cases.published(cases.Device("sm_90", False), published.SHAPES)))
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    self.assertIn(f"{STOCK} 1/16384/16384 1.00 2.00 / 2.00", lines)
    self.assertIn(f"{A4Q} 1/16384/16384 1.00 emulated 2.00 / 2.00", lines)
    self.assertIn("how fast it is takes FP4 tensor cores.", printed)
    self.assertIn("which kernels ran, in which numbers", printed)
    self.assertLessEqual(max(map(len, printed.splitlines())), WIDTH)

  def test_fp4_tensor_cores_are_not_called_emulation(self):
    with mock.patch.object(triton_launch, "check_installed"):
      code, printed, _ = self.run_published(architecture="sm_120")
    self.assertEqual(code, 0)
    self.assertIn("A4Q x2 / FP8, prefill    1.62 (18.0 / 11.1 ms)", printed)
    self.assertNotIn("emulated", printed)

  def test_what_fails_is_not_measured_and_the_rest_is(self):
    self.faults = {"nvfp4_a4q": ValueError("a fault")}
    code, printed, _ = self.run_published(architecture="sm_90")
    self.assertEqual(code, 1)
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    self.assertIn(f"{A4Q} 1/16384/16384 not measured here", lines)
    self.assertIn(f"{STOCK} 1/16384/16384 1.00 2.00 / 2.00", lines)

  @parameterized.parameters(
    ("cpu", "JAX sees no GPU here, only cpu. .* sm_120 .* sm_100 .* pip install 'jax.cuda13.==.*'"),
    ("sm_80", "no kernel for this card: not mosaic_sm90: it needs sm_90, the device is sm_80; .*"),
  )
  def test_without_such_a_card(self, architecture, reason):
    code, printed, errors = self.run_published(architecture=architecture)
    self.assertEqual(code, 2)
    self.assertRegex(errors, f"^{reason}")
    for claim in CLAIMS:
      self.assertRegex(printed, rf"{re.escape(claim)} +[\d/]+ +not measured here\n")
    self.assertFalse(self.out.exists())

  @parameterized.parameters("jax-triton", "triton")
  def test_with_the_card_and_without_what_it_needs(self, package):
    def version(name):
      if name == package:
        raise importlib.metadata.PackageNotFoundError(name)
      return "99.0"

    check = triton_launch.check_installed
    with mock.patch.object(triton_launch, "check_installed", lambda: check(version)):
      code, printed, errors = self.run_published(architecture="sm_120")
    self.assertEqual(code, 2)
    self.assertRegex(errors, f"needs {package} .* found None: pip install '{package}>=")
    self.assertIn("not measured here", printed)

  def test_where_a_card_has_a4q_alone(self):
    """It says so before it runs, and gives A4Q's times, which it has."""
    others = ("bf16", "fp8", "nvfp4_dequant", "nvfp4_repack")
    self.faults = {path: NotImplementedError("the kernel has A4Q alone") for path in others}
    code, printed, errors = self.run_published(architecture="sm_100")
    self.assertEqual(code, 0)
    self.assertStartsWith(
      errors,
      "mosaic_sm100 has no dequant, repack, fp8, bf16: no published ratio that these are part of",
    )
    for claim in CLAIMS:
      self.assertRegex(printed, rf"{re.escape(claim)} +[\d/]+ +not measured here\n")
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    self.assertIn("1/16384/16384 18000 2.00 2.00", lines)

  def test_a_card_with_all_paths_has_no_such_warning(self):
    for architecture in ("sm_90", "sm_120"):
      with use_target(Target(architecture)), mock.patch.object(triton_launch, "check_installed"):
        self.assertIsNone(published.incomparable())

  @parameterized.parameters(
    (("--seconds", "-1"), "seconds must be positive, got -1.0"),
    (("--out", "."), "out must be a file, . is a folder"),
  )
  def test_bad_options(self, argv, message):
    error = io.StringIO()
    with contextlib.redirect_stderr(error), self.assertRaises(SystemExit) as raised:
      published.main([*argv])
    self.assertEqual(raised.exception.code, 2)
    self.assertIn(message, error.getvalue())

  def test_what_the_cases_of_a_card_would_take(self):
    seconds = []
    with mock.patch.object(triton_launch, "check_installed"):
      for architecture in ("sm_90", "sm_100", "sm_120"):
        _, printed, _ = self.run_published("--list", architecture=architecture)
        seconds.append(re.search(r"(\d+) cases, about (\d+) s on an H200", printed).groups())
    self.assertLen(set(seconds), 1)
    self.assertGreater(int(seconds[0][1]), 30)

  def test_list_and_rows_that_are_there(self):
    self.assertEqual(self.run_published("--list", architecture="sm_90")[0], 0)
    self.assertEqual(self.prepared, [])
    self.run_published(architecture="sm_90")
    code, _, errors = self.run_published(architecture="sm_90")
    self.assertEqual(code, 2)
    self.assertIn("has rows: --resume goes on with them, --overwrite loses them", errors)
    self.prepared = []
    code, printed, _ = self.run_published("--resume", architecture="sm_90")
    self.assertEqual((code, self.prepared), (0, []))
    self.assertIn("1.00 emulated", printed)

  def test_it_is_a_command(self):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), self.assertRaises(SystemExit) as raised:
      cli.main(["published", "--help"])
    self.assertEqual(raised.exception.code, 0)


class SmallTest(TestCase):
  """For real, on this CPU."""

  def test_rows_of_the_definition_and_no_time_is_compared(self):
    some = tuple(cases.VARIANTS[i] for i in (1, 2, 5))
    self.enter_context(mock.patch.object(cases, "VARIANTS", some))
    out = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory())) / "rows.jsonl"
    self.enter_context(mock.patch.object(w, "SMALL_ATTENTION", ((2, 1, 64),)))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
      code = published.main(["--size", "small", "--out", str(out)])
    self.assertEqual(code, 0)
    rows = records.read(out)
    self.assertEqual([row["read_path"] for row in rows], ["fp8", "nvfp4_dequant", "nvfp4_a4q"])
    for row in rows:
      self.assertEqual((row["timer"], row["implementation"]), ("wall", "xla"))
      self.assertBetween(row["kernel_error"], 1e-5, 4e-3)
    self.assertEqual(printed.getvalue().count("not measured here"), len(CLAIMS))


if __name__ == "__main__":
  absltest.main()
