"""A cache over two processes, by jax.distributed on localhost; and what runs such processes."""

import time
from unittest import mock

from absl.testing import absltest

from tests import processes
from tests.base import TestCase


class TwoProcessesTest(TestCase):
  def test_pages_over_processes_and_heads_over_devices(self):
    printed = processes.run("tests.two_processes", count=2, devices=2, seconds=240)
    self.assertEqual(printed.count("done"), 2, printed)


class GroupTest(TestCase):
  """Of processes that are none of ours."""

  def test_one_that_fails_ends_the_others_and_is_shown(self):
    began = time.monotonic()
    with processes.Group("no_such_module", count=2, devices=1) as group:
      with self.assertRaisesRegex(processes.FailedError, "No module named no_such_module"):
        group.wait(60)
      self.assertFalse(group.joined)
    self.assertLess(time.monotonic() - began, 30)

  def test_one_that_hangs_is_ended(self):
    # It times its arguments, which takes seconds.
    with processes.Group("timeit", count=1, devices=1) as group:
      (process,) = group._processes
      with self.assertRaisesRegex(
        processes.FailedError, r"not done after 0.1 s: exit codes \[None\]"
      ):
        group.wait(0.1)
      self.assertIsNotNone(process.poll())

  def test_a_group_that_never_joined_is_started_again(self):
    started = []

    class Counted(processes.Group):
      def __init__(self, *arguments):
        started.append(self)
        super().__init__(*arguments)

    with mock.patch.object(processes, "Group", Counted):
      with self.assertRaises(processes.FailedError):
        processes.run("no_such_module", 1, 1, seconds=60, attempts=2)
    self.assertLen(started, 2)


if __name__ == "__main__":
  absltest.main()
