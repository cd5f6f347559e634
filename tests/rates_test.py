"""The instruction mixes of `python3 -m benchmarks rates` are programs that run."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from benchmarks import rates
from tests.base import TestCase
from tests.ptx_emulator import Memory, run


class RatesTest(TestCase):
  @parameterized.parameters(range(len(rates.CASES)))
  def test_case(self, index):
    case = rates.CASES[index]
    with mock.patch.multiple(rates, REPEATS=2, INSTRUCTIONS=40):
      program, count = rates.program(case)
    outputs = {"out": jax.ShapeDtypeStruct((rates.THREADS,), jnp.uint32)}
    memory = Memory({"x": np.arange(rates.THREADS, dtype=np.uint32)}, outputs)
    done = run(program, memory, smem_bytes=rates.SMEM)
    self.assertTrue(memory.written("out").all())
    warps = rates.THREADS // 32
    self.assertGreaterEqual(done.instructions, 2 * count * len(case.split()) * warps)


if __name__ == "__main__":
  absltest.main()
