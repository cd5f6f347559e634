"""Device time of kernels, by CUPTI through JAX's own Mosaic GPU profiler; wall time elsewhere."""

from __future__ import annotations

import collections
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class KernelTimes:
  """Microseconds per call.

  Attributes:
    names: of the kernels; none of wall time.
    calls: of each call, all of its kernels summed.
    by_kernel: median microseconds of each kernel, summed over a call.
    timer: `trace` for device time, `wall` for the host's around a call.
  """

  names: tuple[str, ...]
  calls: tuple[float, ...]
  by_kernel: dict[str, float]
  timer: str = "trace"

  def row_fields(self) -> dict[str, Any]:
    return {
      "kernel_names": self.names,
      "us_median": statistics.median(self.calls),
      "us_min": min(self.calls),
      "us_max": max(self.calls),
      "us_count": len(self.calls),
      "us_by_kernel": self.by_kernel or None,
      "timer": self.timer,
    }


def kernel_times(
  calls: Sequence[Callable[[], Any]],
  wait: Callable[[Any], Any] = jax.block_until_ready,
  warm_up: int = 2,
) -> KernelTimes:
  """Runs the calls in order and times what each launched.

  Args:
    calls: equal work on different memory, so that no call finds its data in the L2 cache.
    wait: waits for the list of results; needed where a call donates an earlier one's result.
    warm_up: how many of the first calls are run once before, untimed.
  """
  # JAX exports no function that times different arguments one after the other.
  from jax._src.lib import mosaic_gpu

  extension = mosaic_gpu._mosaic_gpu_ext
  wait([call() for call in calls[:warm_up]])
  extension._cupti_init()
  try:
    wait([call() for call in calls])
  finally:
    timings = extension._cupti_get_timings(True)
  if not timings or len(timings) % len(calls):
    raise RuntimeError(f"{len(timings)} kernels traced for {len(calls)} equal calls")
  per_call = len(timings) // len(calls)
  grouped = [timings[i : i + per_call] for i in range(0, len(timings), per_call)]
  samples = collections.defaultdict(list)
  for group in grouped:
    sums = collections.Counter()
    for name, milliseconds in group:
      sums[name] += 1e3 * milliseconds
    for name, us in sums.items():
      samples[name].append(us)
  return KernelTimes(
    names=tuple(dict.fromkeys(name for name, _ in grouped[0])),
    calls=tuple(1e3 * sum(ms for _, ms in group) for group in grouped),
    by_kernel={name: statistics.median(us) for name, us in samples.items()},
  )


def wall_times(
  calls: Sequence[Callable[[], Any]],
  wait: Callable[[Any], Any] = jax.block_until_ready,
  warm_up: int = 2,
) -> KernelTimes:
  """The same by the host's clock, a call at a time."""
  wait([call() for call in calls[:warm_up]])
  times = []
  for call in calls:
    start = time.perf_counter()
    wait([call()])
    times.append(1e6 * (time.perf_counter() - start))
  return KernelTimes((), tuple(times), {}, "wall")


def joined(parts: Sequence[KernelTimes]) -> KernelTimes:
  """Of the same calls, timed in several parts."""
  names = {name for part in parts for name in part.by_kernel}
  return KernelTimes(
    names=parts[0].names,
    calls=tuple(us for part in parts for us in part.calls),
    by_kernel={
      name: statistics.median(part.by_kernel.get(name, 0.0) for part in parts)
      for name in sorted(names)
    },
    timer=parts[0].timer,
  )
