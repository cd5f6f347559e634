"""The sm_90 pack and unpack kernels, bit for bit against format.py.

What is plain Pallas runs under GPU interpret mode, what is PTX in tests/ptx_emulator.py; there on
ordinary values, as encode_ptx_test.py has the hard ones.
"""

import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from nvfp4_pallas import format as nvfp4
from nvfp4_pallas.kernels import common, pack_ptx
from nvfp4_pallas.kernels import pack_mosaic_sm90 as kernel
from tests import kernel_cases as cases
from tests import ptx_emulator
from tests.base import TestCase

DTYPES = ("bfloat16", "float16", "float32")

encode = jax.jit(common.encode)
encode_definition = jax.jit(nvfp4.encode)


class RoundingTest(TestCase):
  """common.encode alone, as plain JAX, on more values than interpret mode has time for."""

  @parameterized.product(dtype=DTYPES, global_scale=cases.GLOBAL_SCALES)
  def test_encode(self, dtype, global_scale):
    r = np.random.default_rng(0)
    x = jnp.asarray(cases.hard_blocks(r, 2**14, global_scale, jnp.dtype(dtype)))
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    scales = jnp.full(len(x), global_scale, jnp.float32)
    codes, scale = encode(bits[:, 0::2], bits[:, 1::2], scales)
    want = encode_definition(x, jnp.float32(global_scale))
    np.testing.assert_array_equal(codes, want.codes)
    np.testing.assert_array_equal(scale[:, None], cases.raw(want.block_scale))

  def test_every_bfloat16_against_every_block_scale(self):
    for global_scale in (1.0, 0.7):
      scales = np.arange(1, 0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
      step = scales.astype(np.float32) * np.float32(global_scale)
      x = (np.arange(0x80, 0x7F80, dtype=np.uint32) << 16)[:, None]
      thresholds = jax.jit(common.e2m1_thresholds)(jnp.asarray(step.view(np.uint32)))
      codes = sum((x >= np.asarray(least)).astype(np.uint8) for least in thresholds)
      with np.errstate(over="ignore"):
        y = x.view(np.float32) / step
      np.testing.assert_array_equal(codes, jax.jit(nvfp4.round_to_e2m1_index)(y))

  def test_every_bfloat16_over_random_divisors(self):
    r = np.random.default_rng(0)
    x = np.arange(0x80, 0x7F80, dtype=np.uint32) << 16
    quotient_to_e4m3 = jax.jit(common.quotient_to_e4m3)
    for exponent in r.uniform(-90, 90, 40):
      divisor = np.float32(2.0**exponent)
      byte = quotient_to_e4m3(x, np.full_like(x, divisor.view(np.uint32)))
      with np.errstate(over="ignore"):
        quotient = np.minimum(x.view(np.float32) / divisor, np.float32(448))
      np.testing.assert_array_equal(byte, cases.raw(quotient.astype(ml_dtypes.float8_e4m3fn)))


class PackTest(TestCase):
  def check_pack(self, x, global_scale):
    codes, scale = cases.interpret(kernel.pack, x, global_scale)
    want = encode_definition(x, global_scale)
    self.assertEqual((codes.dtype, scale.dtype), (want.codes.dtype, want.block_scale.dtype))
    np.testing.assert_array_equal(codes, want.codes)
    np.testing.assert_array_equal(cases.raw(scale), cases.raw(want.block_scale))

  @parameterized.product(dtype=DTYPES, global_scale=(1.0, 0.0123))
  def test_hard_values(self, dtype, global_scale):
    blocks = cases.hard_blocks(np.random.default_rng(1), 512, global_scale, jnp.dtype(dtype))
    self.check_pack(jnp.asarray(blocks.reshape(64, 128)), jnp.float32(global_scale))

  @parameterized.parameters(
    ((), 16), ((1,), 64), ((3,), 80), ((33, 3), 128), ((129,), 16), ((2, 3), 4096)
  )
  def test_shapes(self, leading, n):
    r = np.random.default_rng(2)
    x = jnp.asarray(r.standard_normal((*leading, n)), jnp.bfloat16)
    self.check_pack(x, 0.3)
    if leading:
      self.check_pack(x, jnp.asarray(r.uniform(0.1, 3, leading[-1]), jnp.float32))

  def test_no_rows(self):
    self.check_pack(jnp.zeros((0, 3, 32), jnp.bfloat16), jnp.ones(3))

  def test_same_twice(self):
    x = jnp.asarray(np.random.default_rng(3).standard_normal((40, 64)), jnp.bfloat16)
    first, second = (cases.interpret(kernel.pack, x, 0.01) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)

  def test_why_not(self):
    self.assertIsNone(kernel.unsupported_pack(1, "amax", False))
    self.assertIn("level", kernel.unsupported_pack(2, "amax", False))
    self.assertIn("four_over_six", kernel.unsupported_pack(1, "four_over_six", False))
    self.assertIn("sanitize", kernel.unsupported_pack(1, "amax", True))


class UnpackTest(TestCase):
  def check_unpack(self, array, dtype):
    unpack = functools.partial(kernel.unpack, dtype=jnp.dtype(dtype))
    x = cases.interpret(unpack, array.codes, array.block_scale, array.global_scale)
    want = nvfp4.decode(array, dtype)
    self.assertEqual(x.dtype, want.dtype)
    x, want = (np.asarray(a.astype(jnp.float32)) for a in (x, want))
    np.testing.assert_array_equal(x, want)
    np.testing.assert_array_equal(np.signbit(x)[want == 0], np.signbit(want)[want == 0])

  @parameterized.parameters(*DTYPES)
  def test_every_byte_with_every_scale(self, dtype):
    codes = np.broadcast_to(np.arange(256, dtype=np.uint8), (0x80, 256))
    scale = np.broadcast_to(np.arange(0x80, dtype=np.uint8)[:, None], (0x80, 32))
    array = nvfp4.NvFp4Array(
      jnp.asarray(codes),
      lax.bitcast_convert_type(jnp.asarray(scale), jnp.float8_e4m3fn),
      jnp.float32(0.0123),
    )
    self.check_unpack(array, dtype)

  @parameterized.parameters(((), 16), ((3,), 80), ((33, 3), 128), ((2, 3), 2048), ((0, 2), 32))
  def test_shapes(self, leading, n):
    r = np.random.default_rng(4)
    x = jnp.asarray(r.standard_normal((*leading, n)), jnp.bfloat16)
    scales = r.uniform(0.1, 3, leading[-1:])
    self.check_unpack(nvfp4.encode(x, jnp.asarray(scales, jnp.float32)), jnp.bfloat16)

  def test_why_not(self):
    self.assertIsNone(kernel.unsupported_unpack(1))
    self.assertIn("level", kernel.unsupported_unpack(2))


class PtxTest(TestCase):
  """Leading shape, values of a row, shape of the global scale."""

  SHAPES = (
    ((), 16, ()),
    ((3,), 80, (1,)),
    ((64,), 128, ()),  # nothing is left over
    ((32, 8), 128, (8,)),  # all pieces of a thread have the same scale
    ((16, 16), 64, (16,)),
    ((16, 16), 256, (16,)),
    ((7, 5), 80, (5,)),
    ((2, 3, 5), 48, (3, 1)),
    ((2, 3, 5), 48, (2, 1, 1)),
    ((2, 3, 5), 48, (1, 3, 5)),
    ((257,), 32, (257,)),
  )

  def arrays(self, leading, n, scale_shape):
    r = np.random.default_rng(8)
    x = r.standard_normal((*leading, n)) * 2.0 ** r.integers(-9, 9, (*leading, 1))
    x, scale = (
      jnp.asarray(x, jnp.bfloat16),
      jnp.asarray(r.uniform(0.1, 3, scale_shape), jnp.float32),
    )
    array = encode_definition(x, scale)
    return x, array, scale, kernel.cycle(scale, leading)

  def run_program(self, program, programs, inputs, outputs):
    memory = ptx_emulator.Memory(inputs=inputs, outputs=outputs)
    ptx_emulator.run(program, memory, programs=range(programs))
    return [memory.array(name) for name in outputs]

  @parameterized.parameters(*SHAPES)
  def test_pack(self, leading, n, scale_shape):
    x, want, _, scales = self.arrays(leading, n, scale_shape)
    codes, block_scale = self.run_program(
      *pack_ptx.pack_program(kernel.blocks_of(want.block_scale, scales)),
      {"x": x, "global_scale": scales},
      {"codes": want.codes, "block_scale": want.block_scale},
    )
    np.testing.assert_array_equal(codes, want.codes)
    np.testing.assert_array_equal(cases.raw(block_scale), cases.raw(want.block_scale))

  @parameterized.parameters(*SHAPES)
  def test_unpack(self, leading, n, scale_shape):
    x, array, _, scales = self.arrays(leading, n, scale_shape)
    (got,) = self.run_program(
      *pack_ptx.unpack_program(kernel.blocks_of(array.block_scale, scales)),
      {"codes": array.codes, "block_scale": array.block_scale, "global_scale": scales},
      {"x": x},
    )
    np.testing.assert_array_equal(got, nvfp4.decode(array, "bfloat16"))

  @parameterized.parameters(*SHAPES)
  def test_scales_in_cycles(self, leading, n, scale_shape):
    _, array, scale, scales = self.arrays(leading, n, scale_shape)
    rows = np.broadcast_to(scale, leading).ravel()
    np.testing.assert_array_equal(np.resize(scales, rows.size), rows)
    repeated = math.prod(leading) // scales.size
    self.assertEqual(repeated * scales.size, rows.size)


class InterpretTest(TestCase):
  def test_a_race_is_an_error(self):
    def racy(x_gmem, out_gmem):
      out_gmem[...] = x_gmem[...]

    def kernel(x, *, interpret):
      threads = {"num_threads": 2, "thread_name": "t"}
      return plgpu.kernel(racy, out_type=x, interpret=interpret, **threads)(x)

    with self.assertRaisesRegex(Exception, "(?i)race"):
      cases.interpret(kernel, jnp.zeros(128))


if __name__ == "__main__":
  absltest.main()
