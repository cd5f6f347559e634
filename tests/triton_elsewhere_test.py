"""The kernel for sm_120 on another GPU: what is called, how results are judged, and what goes on.

The kernel's source runs here by the CPU's emulator in a GPU's place (triton_emulator.py).
"""

import contextlib
import functools
import importlib.util
import io
import pathlib
import tempfile
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from benchmarks import triton_elsewhere
from benchmarks.triton_elsewhere import CASES, Case
from nvfp4_pallas.dispatch import Target, use_target
from tests.base import TestCase
from tests.triton_version import INTERPRETS, has_triton, need_triton

if has_triton(INTERPRETS):
  from tests import triton_emulator

SMALL = Case("small", "nvfp4_a4q", {"q_levels": 2}, {"dim": 64, "page_size": 16, "group": 2})


class Called:
  """In the place of what was exported: a function of the case's arrays."""

  def __init__(self, call):
    self.call = call

  def mlir_module(self):
    return ""


def exactly(case, change=lambda out, lse: (out, lse)):
  exact = case.exact()
  results = change(*(np.asarray(a, np.float32) for a in (exact.out, exact.lse)))
  return Called(lambda *_: results)


def with_last_row(out, value):
  return np.concatenate([out[:-1], np.full_like(out[-1:], value)])


class CasesTest(TestCase):
  def test_what_is_covered(self):
    self.assertLen({case.name for case in CASES}, len(CASES))
    for name, values in (
      ("page_size", {16, 32, 64, 128}),
      ("dim", {64, 128}),
      ("group", {1, 4, 7}),
    ):
      usual = {"page_size": 64, "dim": 128, "group": 4}
      found = {(usual | case.shape)[name] for case in CASES if case.read_path == "nvfp4_a4q"}
      self.assertEqual(found, values)
    for decodes in (False, True):
      of = [case for case in CASES if case.decodes == decodes]
      self.assertContainsSubset({"nvfp4_a4q", "nvfp4_dequant"}, {case.read_path for case in of})
      levels = {case.options["q_levels"] for case in of if case.read_path == "nvfp4_a4q"}
      self.assertEqual(levels, {1, 2})
    self.assertContainsSubset({True, False}, {case.spec.causal for case in CASES})

  def test_reads_what_a_case_says(self):
    """The kernel's arguments, as the case has them."""
    case = Case("a", "nvfp4_a4q", {"q_levels": 1, "window": 7}, decodes=True, num_splits=2)
    out, lse = jnp.zeros((2, 4, 8, 128)), jnp.zeros((2, 4, 8))
    with mock.patch.object(triton_elsewhere.kernel, "attention", return_value=(out, lse)) as called:
      function, arrays = case.function()
      self.assertEqual(function(*arrays)[0].shape, (4, 8, 128))
    (q, cache, batch, spec), options = called.call_args
    self.assertEqual((spec.q_levels, spec.window, spec.causal), (1, 7, True))
    self.assertEqual(options, {"num_splits": 2, "one_each": True, "ahead": False})
    self.assertEqual((q.shape[0], cache.k.format, batch.num_seqs), (4, "nvfp4", 4))


class RunTest(TestCase):
  """On a GPU that is not there."""

  def setUp(self):
    super().setUp()
    self.enter_context(mock.patch.object(triton_elsewhere, "KEYS", (90, 0, 1, 30)))
    self.enter_context(mock.patch.object(triton_elsewhere, "QUERIES", (9, 0, 1, 4)))
    self.enter_context(mock.patch.object(triton_elsewhere, "REPEATS", 1))

  def run_all(self, loads, architecture="sm_90"):
    """(exit code, lines) of calls, by name: what is loaded or raised."""
    cases = [Case(name, SMALL.read_path, SMALL.options, SMALL.shape) for name in loads]

    def call_of(case, folder, arch):
      del folder
      self.assertEqual(arch, architecture)
      found = loads[case.name]
      if isinstance(found, Exception):
        raise found
      return found

    printed = io.StringIO()
    with (
      mock.patch.object(triton_elsewhere, "call_of", call_of),
      use_target(Target(architecture)),
      contextlib.redirect_stdout(printed),
    ):
      code = triton_elsewhere.run_all(cases, None)
    return code, printed.getvalue().splitlines()

  def test_those_after_a_failing_one_go_on(self):
    later = exactly(SMALL)
    code, lines = self.run_all({"one": NotImplementedError("no\nsuch thing"), "two": later})
    self.assertEqual((code, lines[-1]), (1, "2 calls, 1 failed"))
    self.assertEqual(lines[2].split(None, 1), ["one", "FAILED: NotImplementedError: no such thing"])
    self.assertRegex(lines[3], r"^two +\d\.\de-0\d +0\.\d\d")
    self.assertEqual(self.run_all({"two": later})[0], 0)

  @parameterized.parameters(
    (lambda out, lse: (out * 1.02, lse), "errors 0.02"),
    (lambda out, lse: (out, lse + 1e-4), "lse is .* times its bound off, 2.0 are allowed"),
    (lambda out, lse: (with_last_row(out, 1), lse), "a row that sees nothing is not 0"),
    (lambda out, lse: (np.full_like(out, np.nan), lse), "not 0 with lse -inf"),
  )
  def test_faults_are_seen(self, change, message):
    code, lines = self.run_all({"one": exactly(SMALL, change)})
    self.assertEqual(code, 1)
    self.assertRegex(lines[2], f"one +FAILED: AssertionError: .*{message}")

  def test_other_bits_are_seen(self):
    (out, lse), times = exactly(SMALL).call(), []

    def changing(*_):
      times.append(None)
      return out * np.float32(1 + len(times) * 1e-6), lse

    with mock.patch.object(triton_elsewhere.jax, "jit", lambda function: function):
      _, lines = self.run_all({"one": Called(changing)})
    self.assertIn("FAILED: AssertionError: the same inputs gave other bits", lines[2])

  def test_needs_a_gpu(self):
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
      self.assertEqual(triton_elsewhere.main(["run"]), 2)
    self.assertIn("this needs a GPU, JAX sees only cpu", errors.getvalue())

  def test_exports_of_other_sources_are_refused(self):
    folder, errors = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory())), io.StringIO()
    (folder / "kernel_hash.txt").write_text("another")
    with use_target(Target("sm_90")), contextlib.redirect_stderr(errors):
      self.assertEqual(triton_elsewhere.main(["run", str(folder)]), 2)
    self.assertIn("the kernel of other sources, another, than these", errors.getvalue())
    self.assertIn("export it again", errors.getvalue())

  def test_the_kernels_source_passes(self):
    """Splits, a window and the rest of what a case hands to the kernel, emulated."""
    need_triton(self, INTERPRETS)
    case = Case("one", "nvfp4_a4q", {"q_levels": 1, "window": 40}, SMALL.shape, num_splits=2)
    function, _ = case.function()
    with triton_emulator.emulated(), mock.patch.object(triton_elsewhere.jax, "jit", lambda f: f):
      row, lse, _ = triton_elsewhere.check(case, lambda: Called(function))
    self.assertBetween(row, 1e-4, 6e-3)
    self.assertLess(lse, 1)


class ExportTest(TestCase):
  def test_a_missing_file_is_named(self):
    with self.assertRaisesRegex(FileNotFoundError, "small.bin"):
      triton_elsewhere.call_of(SMALL, pathlib.Path("/nowhere"), "sm_90")

  def test_a_file_is_what_was_exported(self):
    if importlib.util.find_spec("flatbuffers") is None:
      self.skipTest("flatbuffers is not installed")
    folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    exported = functools.partial(jax.export.export, jax.jit(lambda x: x + 1))
    with mock.patch.object(triton_elsewhere, "lowered", lambda *_: exported()(np.float32(0))):
      triton_elsewhere.lower(SMALL, folder, "sm_90")
    call = triton_elsewhere.call_of(SMALL, folder, "sm_90").call
    self.assertEqual(call(np.float32(2)), 3)


if __name__ == "__main__":
  absltest.main()
