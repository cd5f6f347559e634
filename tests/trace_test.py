"""Device times of calls, from what the profiler says of their kernels."""

import sys
import types
from unittest import mock

from absl.testing import absltest

from benchmarks.trace import KernelTimes, joined, kernel_times
from tests.base import TestCase


def traced(*kernels):
  """A profiler that has seen (name, milliseconds), in place of JAX's, which needs a GPU."""
  extension = types.SimpleNamespace(
    _cupti_init=lambda: None, _cupti_get_timings=lambda finish: list(kernels)
  )
  fake = types.SimpleNamespace(_mosaic_gpu_ext=extension)
  return mock.patch.dict(sys.modules, {"jax._src.lib.mosaic_gpu": fake})


class TraceTest(TestCase):
  def times(self, calls, *kernels):
    with traced(*kernels):
      return kernel_times([lambda: None] * calls)

  def test_kernels_apart(self):
    """Launches of one name are summed in a call, and the median is over calls."""
    of_a_call = lambda widen, attend: [("attend", 0.5), ("widen", widen), ("attend", attend)]
    calls = of_a_call(0.25, 1.0), of_a_call(0.5, 3.0), of_a_call(2.0, 1.5)
    times = self.times(3, *(kernel for call in calls for kernel in call))
    self.assertEqual(times.calls, (1750.0, 4000.0, 4000.0))
    fields = times.row_fields()
    self.assertEqual(fields["us_by_kernel"], {"attend": 2000.0, "widen": 500.0})
    self.assertEqual(fields["kernel_names"], ("attend", "widen"))
    self.assertEqual(fields["us_median"], 4000.0)

  def test_calls_that_are_not_equal(self):
    with self.assertRaisesRegex(RuntimeError, "3 kernels traced for 2 equal calls"):
      self.times(2, ("a", 1.0), ("a", 1.0), ("b", 1.0))

  def test_joined(self):
    parts = [
      KernelTimes(("a", "b"), (3.0, 5.0), {"a": 1.0, "b": 2.0}),
      KernelTimes(("a", "b"), (4.0,), {"a": 3.0, "b": 2.0}),
    ]
    whole = joined(parts)
    self.assertEqual(whole.calls, (3.0, 5.0, 4.0))
    self.assertEqual(whole.by_kernel, {"a": 2.0, "b": 2.0})


if __name__ == "__main__":
  absltest.main()
