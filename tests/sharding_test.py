"""Caches over devices: a process has one number of them, so that one of eight is started."""

import os
import subprocess
import sys

from absl.testing import absltest, parameterized

from tests.base import TestCase
from tests.sharded_devices import DEVICES


class ShardingTest(TestCase):
  @parameterized.parameters(
    ("sharded_devices", ("ShardedTest", "NamedShardingTest"), 7),
    ("sharded_devices", ("MeshOpsTest", "ScaleTest"), 12),
    ("sharded_devices", ("MeshChecksTest",), 5),
    ("sharded_axes", ("ExplicitMeshChecksTest",), 7),
    ("sharded_axes", ("PlacedTest",), 12),
  )
  def test_on_eight_devices(self, module, classes, tests):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    environment.pop("TESTBRIDGE_TEST_ONLY", None)
    ran = subprocess.run(
      [sys.executable, "-m", f"tests.{module}", *classes],
      env=environment,
      capture_output=True,
      text=True,
      timeout=500,
    )
    self.assertEqual(ran.returncode, 0, ran.stdout + ran.stderr)
    self.assertRegex(ran.stderr, rf"Ran {tests} tests[\s\S]*OK\n")


if __name__ == "__main__":
  absltest.main()
