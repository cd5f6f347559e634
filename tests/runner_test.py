"""The test runner, on small test modules that do everything a test may do wrong."""

import contextlib
import io
import pathlib
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings

import jax.numpy as jnp
from absl.testing import absltest, parameterized

from tests import runner
from tests.base import TestCase

MODULES = {
  "pass_test": """
    from absl.testing import parameterized

    class PassTest(parameterized.TestCase):
      @parameterized.parameters(1, 2, 3)
      def test_numbered(self, x):
        self.assertGreater(x, 0)

      @parameterized.named_parameters(("_first", 1), ("_second", 2))
      def test_named(self, x):
        self.create_tempdir()  # needs parsed flags
  """,
  "fail_test": """
    import unittest

    class FailTest(unittest.TestCase):
      def test_fails(self):
        self.assertEqual("left", "right")

      def test_subtests(self):
        for x in range(3):
          with self.subTest(x=x):
            self.assertEqual(x, 1)

      @unittest.expectedFailure
      def test_unexpected_success(self):
        pass

    class BadSetUpTest(unittest.TestCase):
      @classmethod
      def setUpClass(cls):
        raise RuntimeError("cannot set up")

      def test_a(self):
        pass

      def test_b(self):
        pass

    class BadTearDownTest(unittest.TestCase):
      @classmethod
      def tearDownClass(cls):
        raise RuntimeError("cannot tear down")

      def test_passes(self):
        pass
  """,
  "skip_test": """
    import unittest

    class SkipTest(unittest.TestCase):
      def test_with_reason(self):
        self.skipTest("needs a moon")

      def test_without_reason(self):
        self.skipTest("")

    class SkippedClassTest(unittest.TestCase):
      @classmethod
      def setUpClass(cls):
        raise unittest.SkipTest("needs a sun")

      def test_a(self):
        pass

      def test_b(self):
        pass
  """,
  "import_test": "import no_such_module",
  "shared_test": """
    import os
    import pathlib
    import time
    from absl.testing import parameterized

    class SharedTest(parameterized.TestCase):
      @parameterized.parameters(*range(5))
      def test_waits_for_a_second_process(self, x):
        seen = pathlib.Path(__file__).with_name("seen")
        seen.mkdir(exist_ok=True)
        (seen / str(os.getpid())).touch()
        deadline = time.monotonic() + 60
        while len(list(seen.iterdir())) < 2:
          self.assertLess(time.monotonic(), deadline)
          time.sleep(0.02)
  """,
  "crash_test": """
    import os
    import unittest

    class CrashTest(unittest.TestCase):
      def test_a(self):
        pass

      def test_b(self):
        print("last words", flush=True)
        os._exit(0)

      def test_c(self):
        pass
  """,
  "hang_test": """
    import time
    import unittest

    class HangTest(unittest.TestCase):
      def test_sleeps_on(self):
        time.sleep(60)
  """,
  "late_test": """
    import atexit
    import os
    import unittest

    atexit.register(os._exit, 7)

    class LateTest(unittest.TestCase):
      def test_passes(self):
        pass
  """,
}


def write_modules(folder):
  (folder / "__init__.py").touch()
  for name, source in MODULES.items():
    (folder / f"{name}.py").write_text(textwrap.dedent(source))


def run(folder, *arguments):
  """(exit code, printed lines) of a run of the modules above."""
  printed = io.StringIO()
  with contextlib.redirect_stdout(printed):
    code = runner.run(folder, arguments)
  return code, printed.getvalue().splitlines()


class RunnerTest(TestCase):
  """One run of every module but the slow ones, and what it printed."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory())) / "samples"
    cls.folder.mkdir()
    write_modules(cls.folder)
    # One process: where two share a module, luck decides which of them runs what follows a crash.
    names = [name for name in MODULES if name not in ("hang_test", "shared_test")]
    cls.code, cls.lines = run(cls.folder, "-j", "1", *names)

  def failure(self, name):
    """What was printed about a failed test, down to how to run it again."""
    lines = self.lines[self.lines.index(f"FAILED {name}") + 1 :]
    end = next(i for i, line in enumerate(lines) if line.startswith("  again: "))
    return "\n".join(lines[: end + 1])

  def test_last_line_counts_every_test_once(self):
    self.assertEqual(self.lines[-1], "8 passed, 11 failed, 3 skipped")
    self.assertEqual(self.code, 1)

  def test_failures_are_listed_once_at_the_end(self):
    end = self.lines[self.lines.index("slowest:") :]
    self.assertCountEqual(
      [line.removeprefix("FAILED ") for line in end if line.startswith("FAILED ")],
      [
        "crash_test.CrashTest.test_b",
        "crash_test.CrashTest.test_c",
        "tearDownClass (samples.fail_test.BadTearDownTest)",
        "fail_test.BadSetUpTest.test_a",
        "fail_test.BadSetUpTest.test_b",
        "fail_test.FailTest.test_fails",
        "fail_test.FailTest.test_subtests",
        "fail_test.FailTest.test_unexpected_success",
        "import_test",
        "late_test (outside of its tests)",
        "skip_test.SkipTest.test_without_reason",
      ],
    )

  def test_failure_is_printed_in_full(self):
    text = self.failure("fail_test.FailTest.test_fails")
    self.assertIn("Traceback", text)
    self.assertIn("AssertionError: 'left' != 'right'", text)
    self.assertIn("again: python3 -m tests fail_test.FailTest.test_fails", text)

  def test_every_failed_subtest_is_printed(self):
    text = self.failure("fail_test.FailTest.test_subtests")
    self.assertIn("(x=0)", text)
    self.assertNotIn("(x=1)", text)
    self.assertIn("(x=2)", text)

  def test_skips_are_listed_with_their_reasons(self):
    self.assertIn("skipped: needs a moon (1: skip_test.SkipTest.test_with_reason)", self.lines)
    self.assertIn("skipped: needs a sun (2: skip_test.SkippedClassTest.test_a, ...)", self.lines)
    text = self.failure("skip_test.SkipTest.test_without_reason")
    self.assertStartsWith(text, "skipped without a reason")

  def test_crash_fails_what_it_was_running_and_what_was_to_come(self):
    text = self.failure("crash_test.CrashTest.test_b")
    self.assertIn("the process ended with exit code 0", text)
    self.assertIn("last words", text)
    self.assertStartsWith(self.failure("crash_test.CrashTest.test_c"), "did not run")

  def test_crash_at_exit_is_a_failure(self):
    self.assertIn("exit code 7", self.failure("late_test (outside of its tests)"))

  def test_import_error_is_a_failure(self):
    text = self.failure("import_test")
    self.assertIn("ModuleNotFoundError: No module named 'no_such_module'", text)
    self.assertIn("again: python3 -m tests import_test", text)

  def test_hang_is_ended_and_shown(self):
    module = runner.Module(self.folder / "hang_test.py")
    with tempfile.TemporaryDirectory() as scratch:
      module.start(scratch, runner.parse([]))
      while module.workers[0].running is None:
        self.assertFalse(module.poll(timeout=60.0))
        time.sleep(0.02)
      time.sleep(0.2)
      self.assertTrue(module.poll(timeout=0.1))
    (result,) = module.results.values()
    self.assertEqual(result["id"], "hang_test.HangTest.test_sleeps_on")
    self.assertEqual(result["status"], "failed")
    self.assertIn("no result within 0.1 s", result["text"])
    self.assertIn("in test_sleeps_on", result["text"])  # the stack at that moment

  @parameterized.named_parameters(
    ("test", ("tests.pass_test.PassTest.test_named_first",), "1 passed, 0 failed, 0 skipped", 0),
    ("file", ("tests/pass_test.py",), "5 passed, 0 failed, 0 skipped", 0),
    ("substring", ("-k", "_numbered", "pass_test"), "3 passed, 0 failed, 0 skipped", 0),
    ("none", ("-k", "nowhere", "pass_test"), "0 passed, 0 failed, 0 skipped", 1),
    ("only_skipped", ("skip_test.SkippedClassTest",), "0 passed, 0 failed, 2 skipped", 1),
  )
  def test_selection(self, arguments, last_line, expected_code):
    code, lines = run(self.folder, *arguments)
    self.assertEqual((lines[-1], code), (last_line, expected_code))

  def test_list(self):
    code, lines = run(self.folder, "--list", "-k", "named", "pass_test")
    self.assertEqual(code, 0)
    self.assertEqual(
      lines, ["pass_test.PassTest.test_named_first", "pass_test.PassTest.test_named_second"]
    )

  def test_unknown_module_is_refused(self):
    with self.assertRaisesRegex(SystemExit, "no such test module: typo_test"):
      run(self.folder, "typo_test")

  def test_free_process_helps_with_a_running_module(self):
    code, lines = run(self.folder, "-j", "2", "shared_test")
    self.assertEqual((lines[-1], code), ("5 passed, 0 failed, 0 skipped", 0))


class StrictTest(TestCase):
  def test_ranks_are_not_promoted(self):
    with self.assertRaisesRegex(ValueError, "rank_promotion"):
      jnp.ones((2, 3)) + jnp.ones(3)

  def test_dtypes_are_not_promoted(self):
    with self.assertRaisesRegex(ValueError, "strict"):
      jnp.ones(3, jnp.bfloat16) + jnp.ones(3, jnp.float32)

  def test_warnings_are_errors_when_a_module_runs_alone(self):
    source = """
      import warnings
      from absl.testing import absltest
      from tests.base import TestCase

      class WarnTest(TestCase):
        def test_warns(self):
          warnings.warn("look out", stacklevel=1)

      absltest.main()
    """
    command = [sys.executable, "-c", textwrap.dedent(source)]
    done = subprocess.run(command, cwd=runner.HERE.parent, capture_output=True, text=True)
    self.assertIn("UserWarning: look out", done.stderr)
    self.assertIn("FAILED (errors=1)", done.stderr)

  def test_warnings_are_errors(self):
    with self.assertRaises(UserWarning):
      warnings.warn("look out", stacklevel=1)


if __name__ == "__main__":
  absltest.main()
