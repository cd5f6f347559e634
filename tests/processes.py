"""Equal processes that work together over localhost, for a test: started, watched and ended.

    with Group(module, count, devices) as group:
      group.wait(seconds)

If one fails, or all together take too long, all are ended and what they printed is the error.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

JOINED = "joined"  # a process prints it once it has found the others


class FailedError(AssertionError):
  """A process failed or hung; the message has what all of them printed."""


class Group:
  """`python -m module PORT COUNT NUMBER` for each number, with so many CPU devices."""

  def __init__(self, module: str, count: int, devices: int):
    self._folder = tempfile.TemporaryDirectory()
    self._processes = []
    flag = "--xla_force_host_platform_device_count"
    kept = (f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith(flag))
    environment = os.environ | {
      "XLA_FLAGS": " ".join([*kept, f"{flag}={devices}"]),
      "JAX_PLATFORMS": "cpu",
      "PYTHONUNBUFFERED": "1",
    }
    environment.pop("TESTBRIDGE_TEST_ONLY", None)
    port = str(free_port())
    try:
      for number in range(count):
        with self._output(number).open("wb") as output:
          self._processes.append(
            subprocess.Popen(
              [sys.executable, "-m", module, port, str(count), str(number)],
              env=environment,
              stdin=subprocess.DEVNULL,
              stdout=output,
              stderr=subprocess.STDOUT,
            )
          )
    except OSError:
      self.end()
      raise

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.end()

  def wait(self, seconds: float) -> None:
    """Returns when all have ended well. Raises FailedError."""
    until = time.monotonic() + seconds
    while True:
      codes = [process.poll() for process in self._processes]
      failed = any(codes)  # neither None nor 0
      if failed or time.monotonic() > until:
        what = "failed" if failed else f"not done after {seconds:g} s"
        self._kill()
        raise FailedError(f"{what}: exit codes {codes}\n{self.printed()}")
      if None not in codes:
        return
      time.sleep(0.05)

  @property
  def joined(self) -> bool:
    """Whether the processes had found each other."""
    return all(JOINED in self._read(number) for number in range(len(self._processes)))

  def printed(self) -> str:
    texts = (self._read(number)[-6000:] for number in range(len(self._processes)))
    return "\n".join(f"-- process {i}:\n{text}" for i, text in enumerate(texts))

  def end(self) -> None:
    self._kill()
    self._folder.cleanup()

  def _kill(self) -> None:
    for process in self._processes:
      if process.poll() is None:
        process.kill()
      process.wait()

  def _output(self, number: int) -> Path:
    return Path(self._folder.name, str(number))

  def _read(self, number: int) -> str:
    return self._output(number).read_text(errors="replace")


def run(module: str, count: int, devices: int, seconds: float, attempts: int = 3) -> str:
  """Runs a group to its end and returns what it printed.

  Between the choice of a port and its use another program may take it: a group that never joined is
  started anew.
  """
  for attempt in range(1, attempts + 1):
    with Group(module, count, devices) as group:
      try:
        group.wait(seconds)
        return group.printed()
      except FailedError:
        if group.joined or attempt == attempts:
          raise
  raise AssertionError("unreachable")


def free_port() -> int:
  with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    return listener.getsockname()[1]
