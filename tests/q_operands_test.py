"""Rows of q as operands, by the emulator: bit for bit what the definition multiplies."""

import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized

from benchmarks import oracle
from nvfp4_pallas.kernels.mma_fragments import Lane, fragments
from nvfp4_pallas.kernels.ptx import Mem, Ptx
from nvfp4_pallas.kernels.q_operands import (
  Q_EXPONENT,
  in_order,
  load_quarter,
  row_as_e4m3,
  row_operands,
)
from tests.base import TestCase
from tests.ptx_emulator import Memory, run

WARP, DIM = 32, 64
NATURAL = fragments("bf16", DIM).word_pairs()
CODES = fragments("nvfp4", DIM).word_pairs()
# Where a column stands among each eight that come out of a word of codes.
PLACES = np.argsort([column for pair in CODES for column in pair])
EVERY = np.arange(2**16, dtype=np.uint16)


def words(shape) -> np.ndarray:
  return np.zeros(shape, np.uint32)


def run_rows(q: np.ndarray, operands: int, operand_bytes: int, make) -> tuple[list, np.ndarray]:
  """What `make` makes of a lane's words of bits q [rows, DIM]: operands' bytes, and units."""
  p = Ptx(("q", "y", "unit"))
  lane = Lane.of(p, p.thread)
  row = p.program * 8 + lane.g
  made, unit = make(p, load_quarter(p, row, lane.c, dim=DIM, negate=False))
  size = DIM // 4 * operand_bytes
  for operand, values in enumerate(made):
    at = p.address(p.pointer("y"), p.mad(row, operands, operand) * 4 + lane.c, size)
    for i, value in enumerate(values):
      p.store("global", Mem(at, 4 * i), [value])
  at = p.address(p.pointer("unit"), row * 4 + lane.c, 4)
  p.store("global", Mem(at), [p.f32(1.0) if unit is None else unit])
  made = {"y": words((len(q), operands, DIM * operand_bytes // 4)), "unit": words((len(q), 4))}
  memory = Memory({"q": q}, made)
  run(p, memory, programs=range(len(q) // 8), threads=WARP)
  y = np.ascontiguousarray(memory.array("y"))
  return [np.ascontiguousarray(y[:, i]) for i in range(operands)], memory.array("unit").view("f4")


def in_natural_order(x: np.ndarray) -> np.ndarray:
  return x.reshape(-1, 8)[:, PLACES].reshape(x.shape)


class Float16Test(TestCase):
  def run_q(self, q):
    make = lambda p, loaded: row_operands(p, loaded, "f16", NATURAL, 0)
    (y,), unit = run_rows(q, 1, 2, make)
    return y.view(np.float16), unit

  @parameterized.parameters(
    2.0**-133, 2.0**-127, 2.0**-122, 1.5 * 2.0**-121, 2.0**-100, 1, 1.9921875, 7, 3e38
  )
  def test_all_values(self, largest):
    """Every bfloat16 value beside the largest one of a row, which is anywhere."""
    largest = np.float32(largest).astype(ml_dtypes.bfloat16)
    r = np.random.default_rng(1)
    every = EVERY[(EVERY & 0x7FFF) <= largest.view(np.uint16)]
    rows = -(-len(every) // (8 * 63)) * 8
    q = np.resize(r.permutation(every), (rows, DIM))
    at = r.integers(0, DIM, rows)
    lost = q[np.arange(rows), at].copy()  # by putting the largest value there
    q[np.arange(rows), at] = largest.view(np.uint16) | r.integers(0, 2, rows) << 15
    q[:, 0] = np.where(at == 0, q[:, 0], lost)
    got, unit = self.run_q(q)
    least = Q_EXPONENT + 1 - 127  # the unit and its inverse stay normal numbers
    exponent = max(int(np.floor(np.log2(float(largest)))), least)
    np.testing.assert_array_equal(unit, np.float32(2.0 ** (exponent - Q_EXPONENT)))
    exact = q.view(ml_dtypes.bfloat16).astype(np.float64) / 2.0 ** (exponent - Q_EXPONENT)
    np.testing.assert_array_equal(got.view(np.uint16), exact.astype(np.float16).view(np.uint16))
    if exponent > least:
      self.assertBetween(np.abs(got).max(), 2**14, 255 * 2**7)

  def test_not_finite(self):
    q = np.zeros((8, DIM), ml_dtypes.bfloat16)
    q[:, 5], q[0, 9], q[1, 9], q[2, 9] = 1, np.nan, np.inf, -np.inf
    got, _ = self.run_q(q.view(np.uint16))
    self.assertTrue(np.isnan(got[0, 9]))
    np.testing.assert_array_equal(got[1:3, 9], [np.inf, -np.inf])
    self.assertEqual(np.isfinite(got).sum(), got.size - 3)


class LevelsTest(TestCase):
  def check(self, q):
    """Against the oracle's encoding, level by level; the residual is not rounded before it is."""
    make = lambda p, loaded: row_operands(p, loaded, "f16", CODES, 2)
    levels, unit = run_rows(q.view(np.uint16), 2, 2, make)
    np.testing.assert_array_equal(unit, 2.0**14)
    left = q.astype(np.float64)
    for level in levels:
      value = in_natural_order(level.view(np.float16)).astype(np.float64) * 2.0**14
      want = oracle.decode(*oracle.encode(left.astype(np.float32)))
      np.testing.assert_array_equal(value, want)
      left = left - want

  @parameterized.parameters(*range(8))
  def test_every_value_beside_another(self, seed):
    r = np.random.default_rng(seed)
    finite = EVERY[(EVERY & 0x7F80) != 0x7F80]
    q = r.permutation(np.resize(finite, (1024, DIM)).ravel()).reshape(-1, DIM)
    q = q.view(ml_dtypes.bfloat16)
    # Of like size, so that all codes come up; and far above what scales reach.
    exponents = r.integers(-16, 18, (len(q), 1))
    mantissa = np.frexp(q.astype(np.float64))[0] * 2.0 ** -r.integers(0, 6, q.shape)
    q = np.where(np.arange(len(q))[:, None] % 8 < 7, mantissa * 2.0**exponents, q.astype("f8"))
    self.check(q.astype(np.float32).astype(ml_dtypes.bfloat16))

  def test_not_finite(self):
    q = np.ones((8, DIM), ml_dtypes.bfloat16)
    q[0, 3], q[1, 60] = np.nan, np.inf
    make = lambda p, loaded: row_operands(p, loaded, "f16", CODES, 2)
    levels, _ = run_rows(q.view(np.uint16), 2, 2, make)
    for level in levels:
      nan = np.isnan(level.view(np.float16)).reshape(8, -1, 16).any(axis=-1)
      np.testing.assert_array_equal(np.argwhere(nan), [[0, 0], [1, 3]])


class E4m3Test(TestCase):
  @parameterized.product(seed=(0, 1, 2, 3), order=("natural", "codes"))
  def test_rows(self, seed, order):
    r = np.random.default_rng(seed)
    q = r.standard_normal((256, DIM)) * 2.0 ** r.integers(-139, 126, (256, 1))
    q[::3] *= 2.0 ** -r.integers(0, 14, q[::3].shape)
    q[5], q[6, 1:] = 0, 0
    q = q.astype(np.float32).astype(ml_dtypes.bfloat16)
    make = lambda p, loaded: _one(row_as_e4m3(p, loaded, CODES if order == "codes" else NATURAL))
    (y,), unit = run_rows(q.view(np.uint16), 1, 1, make)
    y = y.view(ml_dtypes.float8_e4m3fn)
    y = in_natural_order(y) if order == "codes" else y
    amax = np.abs(q.astype(np.float32)).max(axis=1, keepdims=True)
    scale = np.maximum(amax, np.float32(2.0**-100)) / np.float32(448)
    np.testing.assert_array_equal(unit, np.broadcast_to(scale, unit.shape))
    want = (q.astype(np.float32) / scale).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(y.view(np.uint8), want.view(np.uint8))
    got = y.astype(np.float64) * scale
    np.testing.assert_array_equal(got, oracle.round_q(q, "nvfp4_a8q", 1))


def _one(made):
  values, unit = made
  return [values], unit


class OrderTest(TestCase):
  @parameterized.parameters("nvfp4", "fp8", "bf16")
  def test_order(self, format):
    """Columns come in the order of the keys' pairs."""
    order = fragments(format, 64).word_pairs()
    p = Ptx(("x", "y"))
    thread = p.new("r", "mov.u32", "%tid.x")
    x = [w for i in range(2) for w in p.load("global", Mem(p.pointer("x"), 16 * i), 4)]
    for i, pair in enumerate(in_order(p, x, order)):
      p.store("global", Mem(p.pointer("y"), 4 * i), [pair], when=thread.eq(0))
    memory = Memory({"x": np.arange(16, dtype=np.uint16)}, {"y": words((8,))})
    run(p, memory, threads=WARP)
    want = [[first + i for i in pair] for first in range(0, 16, 2 * len(order)) for pair in order]
    np.testing.assert_array_equal(memory.array("y").view(np.uint16).reshape(8, 2), want)


if __name__ == "__main__":
  absltest.main()
