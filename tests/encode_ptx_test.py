"""The PTX of packing, unpacking and FP8 (encode_ptx.py, unpack_ptx.py) on a CPU, bit for bit."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized

from nvfp4_pallas import cache as kv_cache
from nvfp4_pallas import format as nvfp4
from nvfp4_pallas.kernels import encode_ptx, search_ptx, unpack_ptx
from nvfp4_pallas.kernels.ptx import Mem, Ptx
from tests import kernel_cases as cases
from tests import ptx_emulator
from tests.base import TestCase

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
THREADS = 128
SCALES = np.arange(1, 0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
MAGNITUDES = (np.arange(0x7F80, dtype=np.uint32) << 16).view(np.float32)  # of bfloat16
GLOBAL_SCALES = (*cases.GLOBAL_SCALES, 0.7, 1 / 3, 1.1e-5)

encode_definition = jax.jit(nvfp4.encode, static_argnames="scale_search")
encode_rows = jax.jit(kv_cache.encode_rows)


class OffByUnits(Ptx):
  """Its reciprocals, which PTX only approximates, are wrong by some units."""

  def __init__(self, pointers, units):
    super().__init__(pointers)
    self._units = units

  def reciprocal(self, x):
    return self.as_f32(self.bits(super().reciprocal(x)) + self._units % 2**32)


def run(write, arrays, words: int, units: int = 0) -> np.ndarray:
  """uint32 [n, words] that `write(p, *registers)` makes of rows of uint32 [n, 1, 2 or 4 or 8]."""
  count = len(arrays[0])
  n = -(-count // THREADS) * THREADS
  names = [f"array{i}" for i in range(len(arrays))]
  p = OffByUnits((*names, "out"), units)
  thread = p.program * THREADS + p.new("r", "mov.u32", "%tid.x")
  operands = []
  for name, array in zip(names, arrays, strict=True):
    width = array.shape[1]
    at, vector = p.address(p.pointer(name), thread, 4 * width), min(width, 4)
    operands.append(
      [x for i in range(0, width, vector) for x in p.load("global", Mem(at, 4 * i), vector)]
    )
  out = p.address(p.pointer("out"), thread, 4 * words)
  for i, value in enumerate(write(p, *operands)):
    p.store("global", Mem(out, 4 * i), [value])
  padded = [np.concatenate([a, np.repeat(a[:1], n - count, 0)]) for a in arrays]
  memory = ptx_emulator.Memory(
    inputs=dict(zip(names, padded, strict=True)),
    outputs={"out": jax.ShapeDtypeStruct((n, words), jnp.uint32)},
  )
  ptx_emulator.run(p, memory, programs=range(n // THREADS))
  return memory.array("out")[:count]


def column(values, count: int) -> np.ndarray:
  """float32, one or `count`, as uint32 [count, 1]."""
  return np.broadcast_to(np.asarray(values, np.float32), (count,)).copy().view(np.uint32)[:, None]


def in_blocks(x) -> np.ndarray:
  """Any number of bfloat16 as uint32 [blocks, 8]; padded with zeros."""
  x = np.asarray(x).astype(BFLOAT16).ravel()
  return np.pad(x, (0, -len(x) % 16)).view(np.uint32).reshape(-1, 8)


def encode_block(x, global_scale, encode=encode_ptx.encode_block, units=0):
  def write(p, words, g):
    codes, scale = encode(p, words, p.as_f32(*g))
    return [*codes, scale]

  out = run(write, (x.view(np.uint32), column(global_scale, len(x))), 3, units)
  return out[:, :2].copy().view(np.uint8), out[:, 2]


class EncodeTest(TestCase):
  @parameterized.parameters(*GLOBAL_SCALES)
  def test_hard_blocks(self, global_scale):
    x = cases.hard_blocks(np.random.default_rng(0), 2**13, global_scale, BFLOAT16)
    codes, scale = encode_block(x, global_scale)
    want = encode_definition(jnp.asarray(x), jnp.float32(global_scale))
    np.testing.assert_array_equal(codes, want.codes)
    np.testing.assert_array_equal(scale[:, None], cases.raw(want.block_scale))

  def check_codes(self, x, step):
    """x: bfloat16 values [n, 16], step: float32 [n]."""
    write = lambda p, words, step: encode_ptx.block_codes(p, words, p.as_f32(*step))
    x = np.asarray(x).astype(BFLOAT16)
    codes = run(write, (x.view(np.uint32), column(step, len(x))), 2).view(np.uint8)
    with np.errstate(over="ignore"):
      y = np.abs(x.astype(np.float32)) / step[:, None]
    index = sum(
      (y >= m if k % 2 else y > m).astype(np.uint8) for k, m in enumerate(cases.E2M1_MIDPOINTS)
    )
    want = index | np.signbit(x).astype(np.uint8) << 3
    np.testing.assert_array_equal(codes, want[:, ::2] | want[:, 1::2] << 4)

  @parameterized.parameters(*GLOBAL_SCALES)
  def test_every_block_scale(self, global_scale):
    """With every bfloat16 within 2^-5 to 2^6 of the step, and signs."""
    step = SCALES * np.float32(global_scale)
    near = np.arange(-5 * 128, 6 * 128) << 16
    x = (step.view(np.uint32)[:, None] + near.astype(np.uint32)).view(np.float32)
    x = x * np.where(np.arange(x.shape[1]) % 3, 1, -1).astype(np.float32)
    self.check_codes(x.reshape(-1, 16), np.repeat(step, x.shape[1] // 16))

  @parameterized.parameters((1.0, 1), (448.0, 0.7), (2.0**-9, 2.0**-64), (448.0, 2.0**64))
  def test_every_bfloat16(self, scale, global_scale):
    blocks = in_blocks(MAGNITUDES).view(BFLOAT16)
    step = np.float32(scale) * np.float32(global_scale)
    self.check_codes(blocks, np.full(len(blocks), step))

  def test_steps_that_make_ties_or_almost(self):
    """x / step is a midpoint, or some units beside one, for one x at least."""
    significand = np.arange(128, 256)[:, None, None] / np.array([1, 3, 5, 7])[:, None]
    step = significand.astype(np.float32).view(np.int32) + np.arange(-5, 6)
    step = step.astype(np.int32).view(np.float32).ravel()
    cut = (np.outer(step, cases.E2M1_MIDPOINTS).astype(np.float32).view(np.uint32) >> 16).astype(
      np.int32
    )
    x = cut[..., None] + np.arange(-1, 3)  # the bfloat16 about each midpoint
    x = np.pad(x.reshape(len(step), -1), ((0, 0), (0, 4)))
    blocks = (x << 16).astype(np.uint32).view(np.float32).reshape(-1, 16)
    self.check_codes(blocks, np.repeat(step, 2))

  @parameterized.parameters(-1, 0, 1)
  def test_block_scale_of_hard_divisors(self, units):
    """6 g near multiples of 2^20 units, where the proof of inverse_above needs most care."""
    d = np.arange(8, 17)[:, None] * 2**20 + np.arange(-3, 4)
    d = d[(d >= 2**23) & (d < 2**24)].astype(np.float32)
    r = np.random.default_rng(0)
    d = np.concatenate([d, r.integers(2**23, 2**24, 20).astype(np.float32)])
    g = (d / np.float32(6))[:, None].view(np.int32) + np.arange(-1, 2, dtype=np.int32)
    g = g.view(np.float32)
    hit = g * np.float32(6) == d[:, None]  # not every float32 is 6 g, rounded, of some g
    g, d = g[np.arange(len(d)), np.argmax(hit, axis=1)][hit.any(1)], d[hit.any(1)]
    self.assertIn(2**24 - 1, d)
    amax = d[:, None] * 2.0 ** np.arange(-11, 9)  # whose exponents are enough
    exponent = (amax.astype(np.float32).view(np.uint32) & np.uint32(0x7F800000)).view(np.float32)
    amax = (exponent[..., None] * (1 + np.arange(128, dtype=np.float32) / 128)).reshape(len(d), -1)
    self.check_scale(amax, g[:, None], units)

  @parameterized.parameters(*GLOBAL_SCALES)
  def test_block_scale_of_every_bfloat16(self, global_scale):
    self.check_scale(MAGNITUDES[None], np.full((1, 1), global_scale, np.float32), 0)

  def check_scale(self, amax, g, units):
    blocks = np.zeros((amax.size, 16), BFLOAT16)
    blocks[:, 5] = -amax.ravel()

    def write(p, words, g):
      amax = encode_ptx.largest_magnitude(p, words)
      return [encode_ptx.block_scale(p, amax, p.multiply(p.as_f32(*g), 6.0))]

    g = np.broadcast_to(g, amax.shape)
    scale = run(write, (blocks.view(np.uint32), column(g.ravel(), g.size)), 1, units)
    with np.errstate(over="ignore"):
      want = np.minimum(amax / (np.float32(6) * g), np.float32(448))
    want = want.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(scale.reshape(amax.shape), want)


class FourOverSixTest(TestCase):
  def check(self, x, global_scale, units=0):
    codes, scale = encode_block(x, global_scale, search_ptx.encode_block, units)
    g = jnp.asarray(global_scale, jnp.float32)
    want = encode_definition(jnp.asarray(x), g, scale_search="four_over_six")
    np.testing.assert_array_equal(codes, want.codes)
    np.testing.assert_array_equal(scale[:, None], cases.raw(want.block_scale))
    return np.asarray(want.block_scale).ravel(), x

  @parameterized.parameters(*GLOBAL_SCALES)
  def test_hard_blocks(self, global_scale):
    """Of all bit patterns too: subnormal, huge, infinite, NaN."""
    x = cases.hard_blocks(np.random.default_rng(1), 2**12, global_scale, BFLOAT16)
    self.check(x, global_scale)

  def test_both_candidates_are_chosen(self):
    x = np.random.default_rng(2).standard_normal((2**11, 16)).astype(BFLOAT16)
    for units in (-1, 1):  # of the approximate reciprocal
      scale, _ = self.check(x, 0.7, units)
    six = cases.raw(encode_definition(jnp.asarray(x), jnp.float32(0.7)).block_scale).ravel()
    share = np.mean(scale.view(np.uint8) != six)
    self.assertBetween(share, 0.2, 0.8)

  @parameterized.parameters(1.0, 0.3, 1 / 3, 2.0**-64, float.fromhex("0x1.fffffep0"))
  def test_errors_that_are_equal_or_almost(self, global_scale):
    """Blocks of few values, in units of the step: many whose errors tie, rounded or not."""
    r = np.random.default_rng(3)
    few = r.choice([0, 0.5, 1, 2, 3, 4, 4.5, 5, 6, 6.25, 6.5, 7, 8], (2**11, 16))
    scale = r.choice(SCALES, (2**11, 1)) * np.float32(global_scale)
    with np.errstate(over="ignore"):
      x = (few * scale * r.choice((-1, 1), few.shape)).astype(BFLOAT16)
    x[::2, 2:] = x[::2, :1]  # two values only
    self.check(x, global_scale)

  @parameterized.parameters(0.7, 1 / 3, 2.9e-11)
  def test_errors_that_differ_in_the_last_bits(self, global_scale):
    """Halves of blocks are paired so that the two errors are as near as can be: what is rounded
    otherwise, or added in another order, decides otherwise."""
    r = np.random.default_rng(5)
    g, count = np.float32(global_scale), 2**14
    halves = (r.uniform(-6, 6, (2, count, 8)) * g).astype(BFLOAT16)
    halves[0, :, 0] = 6 * g
    amax = np.float32(halves[0, 0, 0])

    def error(x, largest_code):
      step = np.float32(np.float32(amax / (largest_code * g)).astype(ml_dtypes.float8_e4m3fn)) * g
      x = np.abs(x.astype(np.float64))
      values = np.array(cases.E2M1_VALUES) * np.float64(step)
      return np.square(np.abs(x[..., None] - values).min(-1)).sum(-1)

    left, right = (error(x, np.float32(6)) - error(x, np.float32(4)) for x in halves)
    order = np.argsort(right)
    place = np.clip(np.searchsorted(right[order], -left), 1, count - 1)
    near = order[place - 1], order[place]
    distance = np.abs(left + right[np.array(near)])
    match = np.where(distance[0] < distance[1], *near)
    nearest = np.argsort(distance.min(0))[:1024]
    x = np.concatenate([halves[0][nearest], halves[1][match[nearest]]], -1)
    self.check(x, global_scale)

  @parameterized.parameters(*GLOBAL_SCALES, float.fromhex("0x1.fffffep0"), 0.5)
  def test_division(self, global_scale):
    x = np.random.default_rng(4).integers(-(2**24), 2**24, (2**12, 4)).astype(np.float32)
    g = np.float32(global_scale)
    self.check_division(x * (g * np.float32(2.0**-20)), np.full(len(x), g))

  def test_division_next_to_ties(self):
    """For odd D, M = -+1 / D modulo 2^j makes M D +- 1 a multiple of 2^j: A. Then A / D is as near
    to M, a midpoint of 25 bits, as any quotient can be: 2^-48 of it."""
    r = np.random.default_rng(6)
    x, g = [], []
    for d in (r.integers(2**22, 2**23, 2**12) * 2 + 1).tolist():
      for j in (24, 25):
        for sign in (1, -1):
          m = -sign * pow(d, -1, 2**j) % 2**j | 2**24
          a = (m * d + sign) >> j
          if (m * d + sign) % 2**j == 0 and 2**23 <= a < 2**24:
            x.append(a)
            g.append(d)
    x, g = np.array(x, np.float32), np.array(g, np.float32)
    self.assertGreater(len(x), 2**12)
    self.check_division(np.stack([x, -x, x * np.float32(2.0**-40), x], 1), g)

  def check_division(self, x, g):
    """x float32 [n, 4], g float32 [n]."""

    def write(p, x, g):
      g = p.as_f32(*g)
      inverse = search_ptx.inverse_of(p, g)
      return [p.bits(search_ptx.divide(p, p.as_f32(each), g, inverse)) for each in x]

    got = run(write, (x.view(np.uint32), column(g, len(x))), 4).view(np.float32)
    np.testing.assert_array_equal(got, x / g[:, None])


class Fp8Test(TestCase):
  @parameterized.product(global_scale=(*GLOBAL_SCALES, float.fromhex("0x1.000002p-1")))
  def test_every_bfloat16(self, global_scale):
    for units in (-1, 1):
      x = np.arange(2**16, dtype=np.uint16).view(BFLOAT16)
      write = lambda p, words, g: encode_ptx.encode_fp8(p, words, p.as_f32(*g))
      blocks = in_blocks(x)
      got = run(write, (blocks, column(global_scale, len(blocks))), 4, units).view(np.uint8)
      pool = kv_cache.PagedKVCache.create(
        num_pages=1, page_size=16, num_kv_heads=1, head_dim=64, k_format="fp8",
        k_global_scale=global_scale,
      ).k  # fmt: skip
      (want,) = encode_rows(pool, jnp.asarray(x.reshape(-1, 1, 64)))
      np.testing.assert_array_equal(got.ravel(), cases.raw(want).ravel())


class UnpackTest(TestCase):
  @parameterized.parameters(*GLOBAL_SCALES)
  def test_every_code_with_every_scale(self, global_scale):
    r = np.random.default_rng(0)
    codes = np.concatenate(
      [np.array([0x76543210, 0xFEDCBA98], np.uint32), r.integers(0, 2**32, 14, dtype=np.uint32)]
    )
    scale, codes = np.repeat(np.arange(128, dtype=np.uint32), 16), np.tile(codes, 128)

    def write(p, codes, scale, g):
      return unpack_ptx.decode_word(p, *codes, *scale, p.as_f32(*g))

    arrays = (codes[:, None], scale[:, None], column(global_scale, len(codes)))
    got = run(write, arrays, 4).view(BFLOAT16).reshape(-1, 8)
    block = np.tile(codes[:, None].view(np.uint8), 2)
    byte = jnp.asarray(scale.astype(np.uint8).view(ml_dtypes.float8_e4m3fn)[:, None])
    array = nvfp4.NvFp4Array(jnp.asarray(block), byte, jnp.float32(global_scale))
    want = np.asarray(nvfp4.decode(array))[:, :8]
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got[~nan].view(np.uint16), want[~nan].view(np.uint16))


if __name__ == "__main__":
  absltest.main()
