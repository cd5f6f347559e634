"""Cases of equal work are timed in turns, a few calls each.

Long calls heat a GPU until it slows down: whoever came first would look fastest. And a run that is
cut short has compared what it timed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from benchmarks import clocks
from benchmarks.records import Row
from benchmarks.trace import KernelTimes, joined

TURNS = 4
CALLS_A_TURN = 2


@dataclasses.dataclass(frozen=True)
class Timed:
  """A case that is ready to run.

  Attributes:
    calls: equal work on different memory; none of a case that cannot run.
    row: of their times.
    wait: for the results of calls.
  """

  calls: Sequence[Callable[[], Any]]
  row: Callable[[KernelTimes | None], Row]
  wait: Callable[[Any], Any] = jax.block_until_ready


# kernel_times or wall_times, of trace.py.
Timer = Callable[..., KernelTimes]


def in_turns(
  cases: Sequence[Callable[[], Timed]], timer: Timer, turns: int = TURNS
) -> list[Row | Exception]:
  """Of each case its row, or what went wrong; the others go on."""
  running = [_Turns(case, timer) for case in cases]
  for turn in range(turns):
    for case in running:
      case.take(turn)
  return [case.result() for case in running]


class _Turns:
  """A case's, each with calls of other memory than the last one's."""

  def __init__(self, case: Callable[[], Timed], timer: Timer):
    self._timer = timer
    self._times: list[KernelTimes] = []
    self._clocks: dict[str, float] | None = None
    self._error: Exception | None = None
    self._timed: Any = self._try(case)

  def take(self, turn: int) -> None:
    if self._error is not None or not self._timed.calls:
      return
    calls, wait = self._timed.calls, self._timed.wait
    if turn == 0:
      self._try(lambda: wait([call() for call in calls[-CALLS_A_TURN:]]))
    some = [calls[(CALLS_A_TURN * turn + i) % len(calls)] for i in range(CALLS_A_TURN)]
    times = self._try(lambda: self._timer(some, wait=wait, warm_up=0))
    if times is not None:
      self._times.append(times)
      self._clocks = clocks.read()

  def result(self) -> Row | Exception:
    row = self._try(lambda: self._timed.row(joined(self._times) if self._times else None))
    return self._error or dataclasses.replace(row, clocks=self._clocks)

  def _try(self, action: Callable[[], Any]) -> Any:
    try:
      return action()
    except Exception as error:  # noqa: BLE001 - any fault of one case is a row of its own
      self._error = self._error or error
      return None
