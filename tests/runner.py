"""Runs the tests in parallel processes.

    python3 -m tests [-j N] [-k SUBSTRING] [--list] [-v] [name ...]

A name is a module (`format_test`), a class (`format_test.EncodeTest`) or a test. Each module gets
a process, since JAX takes seconds to import and compiles anew in each. When no module is left to
start, a process that becomes free helps with one that still runs, so that all are busy to the end.
"""

import argparse
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests import report

HERE = Path(__file__).resolve().parent
TEST_TIMEOUT_S = 600.0  # for one test; the import of a module counts as one
HEARTBEAT_S = 30.0


@dataclasses.dataclass
class Worker:
  """One process, and how far its report was read."""

  folder: Path
  process: subprocess.Popen
  heard: float
  read: int = 0
  running: str | None = None  # the test, from its start until its result

  def listen(self):
    """The lines that were reported since the last call."""
    path = self.folder / "report"
    if not path.exists():
      return []
    with path.open("rb") as file:
      file.seek(self.read)
      whole, newline, _ = file.read().rpartition(b"\n")
    self.read += len(whole + newline)
    if whole:
      self.heard = time.monotonic()
    return [json.loads(line) for line in whole.splitlines()]

  def kill(self):
    """Ends the process and all that it started; SIGABRT first, for a traceback of the hang."""
    for number, patience in ((signal.SIGABRT, 5.0), (signal.SIGKILL, None)):
      try:
        os.killpg(self.process.pid, number)
        self.process.wait(patience)
      except (ProcessLookupError, subprocess.TimeoutExpired):
        pass

  def output(self):
    return (self.folder / "output").read_text(errors="replace").strip()


class Module:
  """A test module, the processes that run it, and the results so far."""

  def __init__(self, path):
    self.path = path
    self.name = path.stem
    self.workers = []
    self.printed = []  # by processes that have ended
    self.tests = None  # known once a process has imported the module
    self.results = {}
    self.began = 0.0

  @property
  def left(self):
    """How many tests have no result yet; 0 while that is unknown."""
    return len([name for name in self.tests or () if name not in self.results])

  def start(self, folder, options):
    """Starts a process for this module, the first one or one more."""
    folder = Path(folder) / self.name
    own = folder / str(len(self.printed) + len(self.workers))
    claims = folder / "claims"
    claims.mkdir(parents=True, exist_ok=True)
    own.mkdir()
    spec = {
      "report": str(own / "report"),
      "claims": str(claims),
      "root": str(self.path.parent.parent),
      "package": self.path.parent.name,
      "module": self.name,
      "names": [name for name in options.names if name.split(".")[0] == self.name],
      "match": options.k,
      "list": options.list,
      "backwards": bool(self.workers),
    }
    with open(own / "output", "wb") as output:
      process = subprocess.Popen(
        [sys.executable, "-m", "tests.worker", json.dumps(spec)],
        cwd=HERE.parent,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # so that what a test started can be ended with it
      )
    now = time.monotonic()
    self.began = self.began or now
    self.workers.append(Worker(own, process, now))

  def poll(self, timeout):
    """Takes in what was reported; whether all is done."""
    for worker in list(self.workers):
      ended = worker.process.poll() is not None  # asked first: what it reported last is read below
      self._take_in(worker)
      hung = not ended and time.monotonic() - worker.heard > timeout
      if hung:
        worker.kill()
      if ended or hung:
        self._settle(worker, f"no result within {timeout:g} s" if hung else "the process ended")
    return not self.workers

  def _take_in(self, worker):
    for line in worker.listen():
      if "tests" in line:
        self.tests = line["tests"]
      elif "running" in line:
        worker.running = line["running"]
      else:
        worker.running = None
        self.results[line["id"]] = line

  def _settle(self, worker, reason):
    """Fails what a process was doing when it ended, and with the last one what nobody did."""
    self.workers.remove(worker)
    self.printed.append(worker.output())
    code = worker.process.returncode
    reason = f"{reason} with exit code {code}"
    if worker.running is not None or code != 0:
      outside = self.name if self.tests is None else f"{self.name} (outside of its tests)"
      self._fail(worker.running or outside, f"{reason}\n{worker.output()[-4000:]}")
    if not self.workers:
      for name in [self.name] if self.tests is None else self.tests:
        if name not in self.results:
          self._fail(name, f"did not run: {reason}")

  def _fail(self, name, text):
    self.results[name] = {"id": name, "status": "failed", "text": text, "seconds": 0.0}


def parse(argv):
  parser = argparse.ArgumentParser(prog="python3 -m tests", description=__doc__.split("\n")[0])
  parser.add_argument("names", nargs="*", metavar="name", help="module, class or test")
  parser.add_argument("-j", type=int, default=usable_cores(), help="how many processes")
  parser.add_argument("-k", default="", metavar="SUBSTRING", help="only tests with this in the id")
  parser.add_argument("-v", action="store_true", help="a line for each test, and what it printed")
  parser.add_argument("--list", action="store_true", help="print the ids, run nothing")
  options = parser.parse_args(argv)
  # Accept what a shell completes and what a traceback shows, too.
  options.names = [re.sub(r"^tests[./]|\.py$", "", name) for name in options.names]
  return options


def usable_cores():
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def find_modules(directory, names):
  """The modules that were asked for, those with most text first: they tend to take longest."""
  modules = {path.stem: Module(path) for path in directory.glob("*_test.py")}
  wanted = {name.split(".")[0] for name in names} or set(modules)
  if wanted - set(modules):
    sys.exit(f"no such test module: {', '.join(sorted(wanted - set(modules)))}")
  return sorted((modules[name] for name in wanted), key=lambda m: -m.path.stat().st_size)


def start_workers(waiting, running, folder, options):
  """Gives each free process a module to start, else one to help with."""
  while sum(len(module.workers) for module in running) < max(1, options.j):
    if waiting:
      module = waiting.pop(0)
      running.append(module)
    else:
      module = max(running, key=lambda m: m.left, default=None)
      # Each of its processes has at most one test in hand; two more repay the import.
      if module is None or module.left < len(module.workers) + 2:
        return
    module.start(folder, options)


def run(directory, argv, timeout=TEST_TIMEOUT_S):
  """Runs the tests of a folder, prints what happened, and returns the exit code."""
  options = parse(argv)
  waiting = find_modules(directory, options.names)
  total, running, finished = len(waiting), [], []
  began = spoke = time.monotonic()
  with tempfile.TemporaryDirectory(prefix="tests_") as folder:
    try:
      while waiting or running:
        start_workers(waiting, running, folder, options)
        time.sleep(0.02)
        for module in [m for m in running if m.poll(timeout)]:
          running.remove(module)
          finished.append(module)
          if not options.list:
            report.print_module(module, f"[{len(finished)}/{total}]", running, options.v)
            spoke = time.monotonic()
        if time.monotonic() - spoke > HEARTBEAT_S:
          print(f"{time.monotonic() - began:.0f} s: {report.describe(running)}", flush=True)
          spoke = time.monotonic()
    finally:
      for worker in [worker for module in running for worker in module.workers]:
        worker.kill()
  results = [result for module in finished for result in module.results.values()]
  if options.list:
    return report.print_list(results)
  return report.print_summary(results, time.monotonic() - began)


def main():
  return run(HERE, sys.argv[1:])
