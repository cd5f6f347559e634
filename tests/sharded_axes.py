"""Tests of placed caches over Auto and Explicit axes; as sharded_devices.py, over eight devices."""

import jax
from absl.testing import absltest
from jax.sharding import AxisType

from tests import sharded_devices


class ExplicitMeshChecksTest(sharded_devices.MeshChecksTest):
  AXIS_TYPE = AxisType.Explicit

  def test_in_a_context_of_the_mesh(self):
    """Where arrays that say nothing else are of the mesh too."""
    with jax.set_mesh(self.ops.mesh):
      for operation, rows, changes in (
        (self.append, self.k, {}),
        (self.prefill, self.q, {}),
        (self.decode, self.q[:4], {"cu": (0, 1, 2)}),
      ):
        arguments = self.arguments(rows, changes)
        jax.block_until_ready(self.operations[operation](*arguments))
        jax.block_until_ready(operation(*arguments))

  def test_arguments_that_lie_elsewhere(self):
    cache, _, batch = self.arguments(self.k, {})
    with self.assertRaisesRegex(ValueError, "does not match the specs of the input"):
      self.operations[self.append](cache, self.k, batch)


if __name__ == "__main__":
  absltest.main()
