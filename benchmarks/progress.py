"""A line for each step of long work, with the time it took and what is left."""

from __future__ import annotations

import sys
import time


class Progress:
  """`step("what")` before each of `total` steps; what is left is guessed from the mean so far."""

  def __init__(self, total: int):
    self.total, self.done, self.start = total, 0, time.monotonic()

  def step(self, what: str) -> None:
    spent = time.monotonic() - self.start
    left = f", about {spent / self.done * (self.total - self.done):.0f} s left" if self.done else ""
    self.done += 1
    print(f"[{self.done:2}/{self.total}] {spent:4.0f} s{left}: {what}", file=sys.stderr, flush=True)
