"""`python3 -m benchmarks scale` at its edges: what it refuses first, and the width of its lines."""

import contextlib
import io
from unittest import mock

import jax
from absl.testing import absltest, parameterized

from benchmarks import scale
from tests.base import TestCase


class ScaleCommandTest(TestCase):
  @parameterized.parameters(
    (1, "--devices must be at least 2, got 1"),
    (3, "--devices must divide the 8 KV heads, got 3"),
    (16, "--devices must divide the 8 KV heads, got 16"),
  )
  def test_devices_that_divide_nothing(self, devices, message):
    said = io.StringIO()
    with (
      mock.patch.object(scale, "measure") as measure,
      contextlib.redirect_stderr(said),
      self.assertRaises(SystemExit),
    ):
      scale.main(["--devices", str(devices)])
    self.assertIn(message, said.getvalue())
    measure.assert_not_called()

  @parameterized.parameters(0.0, 1e-3, 1.0)
  def test_lines_fit_a_terminal(self, error):
    gpu, said = mock.Mock(device_kind="a GPU"), io.StringIO()
    scaled = lambda case, gpus: scale.Scaled(case, len(gpus), 123456.7, 71234.5, error)
    with (
      mock.patch.object(jax, "default_backend", return_value="gpu"),
      mock.patch.object(jax, "devices", return_value=[gpu] * 2),
      mock.patch.object(scale, "measure", side_effect=scaled),
      contextlib.redirect_stdout(said),
    ):
      scale.main([])
    for line in said.getvalue().splitlines():
      self.assertLessEqual(len(line), 100)
    self.assertIn("decode 1/1/512K by pages: 1 GPU 123456.7 us", said.getvalue())


if __name__ == "__main__":
  absltest.main()
