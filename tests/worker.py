"""Runs tests of one module for runner.py, and reports each as a line of JSON.

Several of these may share a module: a test belongs to the process that claims it first, and one
of them goes through the module backwards. The lines go to a file of their own, so that nothing a
test prints can be mistaken for a result, and what was reported before a crash is not lost:

    {"tests": [id, ...]}                      once imported: all that were asked for
    {"running": id}
    {"id", "status", "text", "seconds"}       status: passed, failed, skipped, listed
"""

import faulthandler
import functools
import hashlib
import importlib
import json
import pathlib
import sys
import time
import traceback
import unittest

from absl import flags

from tests import strict


def test_id(module, test):
  """`format_test.EncodeTest.test_ties0`: the numbers of parameters, not their values."""
  return f"{module}.{type(test).__qualname__}.{test._testMethodName}"


def flatten(suite):
  for item in suite:
    if isinstance(item, unittest.TestSuite):
      yield from flatten(item)
    else:
      yield item


def chosen(name, names, match):
  """Whether an id is, or lies in, one of the names, and has the substring."""
  return match in name and (not names or any(f"{name}.".startswith(f"{n}.") for n in names))


class Report:
  def __init__(self, file):
    self._file = file

  def write(self, **line):
    self._file.write(json.dumps(line) + "\n")
    self._file.flush()

  def result(self, name, status, text="", seconds=0.0):
    self.write(id=name, status=status, text=text, seconds=seconds)


class Result(unittest.TestResult):
  """Reports one result for each test, whatever subtests and fixtures add to it."""

  def __init__(self, report, name_of):
    super().__init__()
    self._report = report
    self._name_of = name_of
    self._started = None
    self._fixture = ("failed", "unittest passed it over")

  def startTest(self, test):
    super().startTest(test)
    self._started = test
    self._status, self._texts, self._began = "passed", [], time.perf_counter()
    self._report.write(running=self._name_of(test))

  def stopTest(self, test):
    super().stopTest(test)
    seconds = time.perf_counter() - self._began
    self._report.result(self._name_of(test), self._status, "\n".join(self._texts), seconds)

  def settle(self, test):
    """Reports a test that never started, because a fixture ended its class or module."""
    if self._started is not test:
      status, text = self._fixture
      self._report.result(self._name_of(test), status, text)
      if status == "failed":
        self._fixture = (status, "did not run either: " + text.splitlines()[-1])

  def addFailure(self, test, err):
    self._add(test, "failed", self._exc_info_to_string(err, test))

  def addError(self, test, err):
    self._add(test, "failed", self._exc_info_to_string(err, test))

  def addSubTest(self, test, subtest, err):
    if err is not None:
      self._add(test, "failed", f"{subtest}\n{self._exc_info_to_string(err, subtest)}")

  def addUnexpectedSuccess(self, test):
    self._add(test, "failed", "passed, but is marked as an expected failure")

  def addSkip(self, test, reason):
    if reason.strip():
      self._add(test, "skipped", reason)
    else:  # if nobody can say why it is skipped, nobody will ever run it again
      self._add(test, "failed", "skipped without a reason")

  def _add(self, test, status, text):
    if isinstance(test, unittest.TestCase):
      if self._status != "failed" or status == "failed":
        self._status = status
        self._texts.append(text)
    elif test.id().startswith("setUp"):  # such as "setUpClass (tests.format_test.EncodeTest)"
      self._fixture = (status, text)
    else:
      self._report.result(test.id(), status, text)


class ClaimedSuite(unittest.TestSuite):
  """Those of its tests that no other process has claimed, decided when their turn comes."""

  _cleanup = False  # unittest's clean-up needs every test to be run

  def __init__(self, tests, name_of, result, claims):
    super().__init__(tests)
    self._name_of = name_of
    self._result = result
    self._claims = pathlib.Path(claims)

  def __iter__(self):
    for test in super().__iter__():
      claim = self._claims / hashlib.sha256(self._name_of(test).encode()).hexdigest()
      try:
        claim.touch(exist_ok=False)
      except FileExistsError:
        continue
      yield test
      self._result.settle(test)


def main(spec, report):
  """Runs what `Module.start` of runner.py asks for."""
  strict.install()
  faulthandler.enable()  # also on the SIGABRT by which the runner ends a hang
  flags.FLAGS.mark_as_parsed()
  sys.path.insert(0, spec["root"])
  name_of = functools.partial(test_id, spec["module"])
  try:
    module = importlib.import_module(f"{spec['package']}.{spec['module']}")
    tests = list(flatten(unittest.defaultTestLoader.loadTestsFromModule(module)))
  except BaseException:  # an import that calls sys.exit is as broken as any
    report.result(spec["module"], "failed", traceback.format_exc())
    return
  tests = [test for test in tests if chosen(name_of(test), spec["names"], spec["match"])]
  report.write(tests=[name_of(test) for test in tests])
  if spec["list"]:
    for test in tests:
      report.result(name_of(test), "listed")
  else:
    result = Result(report, name_of)
    ordered = tests[::-1] if spec["backwards"] else tests
    ClaimedSuite(ordered, name_of, result, spec["claims"]).run(result)


if __name__ == "__main__":
  spec = json.loads(sys.argv[1])
  with open(spec["report"], "w", encoding="utf-8") as file:
    main(spec, Report(file))
