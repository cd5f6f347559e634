"""The bit tricks of decode's operands, their PTX emulated on all values, against tables."""

import jax
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized

from benchmarks import oracle
from nvfp4_pallas.kernels.mma_fragments import TOKEN_OF_SLOT, Lane, e2m1_as_f16, fragments
from nvfp4_pallas.kernels.ptx import Mem, Ptx
from tests.base import TestCase
from tests.ptx_emulator import Memory, run

WARP, TOKENS = 32, 16
E2M1 = np.concatenate([oracle.E2M1, -oracle.E2M1])
SLOTS = np.asarray(TOKEN_OF_SLOT)


def words(shape) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, np.uint32)


def as_f16(x: np.ndarray) -> np.ndarray:
  return np.ascontiguousarray(x).view(np.float16)


class E2m1Test(TestCase):
  @parameterized.parameters("low", "high", "both")
  def test_all_halves(self, half):
    """Every half of a word with others beside it: what is far apart must not interfere."""
    every = np.arange(2**16, dtype=np.uint32)
    beside = np.random.default_rng(0).permutation(every)
    x = {"low": every | beside << 16, "high": every << 16 | beside, "both": every << 16 | every}[
      half
    ]
    p = Ptx(("x", "y"))
    index = p.mad(p.program, 128, p.new("r", "mov.u32", "%tid.x"))
    (word,) = p.load("global.nc", Mem(p.address(p.pointer("x"), index, 4)))
    p.store("global", Mem(p.address(p.pointer("y"), index, 16)), e2m1_as_f16(p, word))
    memory = Memory({"x": x}, {"y": words((len(x), 4))})
    run(p, memory, programs=range(len(x) // 128))
    got = as_f16(memory.array("y")).reshape(-1, 4, 2).astype(np.float64)
    codes = x[:, None] >> 4 * np.arange(8) & 15
    want = E2M1[codes].reshape(-1, 2, 4).swapaxes(1, 2) * 2.0**-14
    np.testing.assert_array_equal(got, want)  # 0 may be -0


class FragmentsTest(TestCase):
  def pool(self, format, dim):
    """(codes, scales) of tiles of 16 tokens with every scale and, in its block, every code; values.

    Of fp8 and bf16, whose values need no scales: any bits.
    """
    r = np.random.default_rng(dim)
    if format == "nvfp4":
      tiles = 256 // (TOKENS * dim // 16) or 1
      codes = r.permuted(np.tile(np.arange(16), (tiles, TOKENS, dim // 16, 1)), axis=-1)
      codes = codes.reshape(tiles, TOKENS, dim)
      scales = np.resize(r.permutation(256), (tiles, TOKENS, dim // 16)).astype(np.uint8)
      values = E2M1[codes] * np.repeat(oracle.E4M3_ALL[scales], 16, axis=-1)
      packed = (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)
      return packed, scales, values
    if format == "fp8":
      data = np.resize(r.permutation(256), (1, TOKENS, dim)).astype(np.uint8)
      return data, None, oracle.E4M3_ALL[data]
    data = r.integers(0, 2**16, (1, TOKENS, dim), dtype=np.uint16)
    with np.errstate(invalid="ignore"):
      return data.view(np.uint8), None, data.view(ml_dtypes.bfloat16).astype(np.float64)

  def run_pairs(self, format, dim, method):
    """Both halves of each tile's tokens as words [tiles, 2, lanes, pairs], and the values."""
    data, scales, values = self.pool(format, dim)
    tiles = len(data)
    raw = [data.reshape(tiles, -1), *([] if scales is None else [scales.reshape(tiles, -1)])]
    raw = np.concatenate(raw, axis=1).view(np.uint32)
    p = Ptx(("x", "y"))
    lane = Lane.of(p, p.new("r", "mov.u32", "%tid.x"))
    for start in range(0, raw.shape[1], WARP):
      at = lane.index + start
      inside = at < raw.shape[1]
      source = p.address(p.pointer("x"), p.mad(p.program, raw.shape[1], at), 4)
      p.store(
        "shared", Mem(p.smem + at * 4), p.load("global", Mem(source), when=inside), when=inside
      )
    p.sync(WARP)
    made = fragments(format, dim)
    for half in range(2):
      pairs = getattr(made, method)(p, lane, p.smem, p.smem + TOKENS * made.row_bytes, 8 * half)
      for i, pair in enumerate(pairs):
        row = (p.program * 2 + half) * WARP + lane.index
        p.store("global", Mem(p.address(p.pointer("y"), row * len(pairs) + i, 4)), [pair])
    memory = Memory({"x": raw}, {"y": words((tiles, 2, WARP, len(pairs)))})
    run(p, memory, programs=range(tiles), threads=WARP, smem_bytes=4 * raw.shape[1])
    got = memory.array("y")
    dtype = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}[made.operand]
    with np.errstate(invalid="ignore"):
      wide = got.view(dtype).astype(np.float64).reshape(*got.shape, 2) * made.unit
    return made, wide, values

  @parameterized.product(format=("nvfp4", "fp8", "bf16"), dim=(64, 128, 256))
  def test_keys(self, format, dim):
    made, got, values = self.run_pairs(format, dim, "key_pairs")
    order = np.asarray(made.word_pairs())
    pair = np.arange(dim // 8)
    columns = 2 * len(order) * (pair // len(order))[:, None] + order[pair % len(order)]
    for lane in range(WARP):
      g, c = divmod(lane, 4)
      for half in range(2):
        want = values[:, SLOTS[g] + 8 * half][:, columns + c * dim // 4]
        np.testing.assert_array_equal(got[:, half, lane], want)

  @parameterized.product(format=("nvfp4", "fp8", "bf16"), dim=(64, 128, 256))
  def test_values(self, format, dim):
    _, got, values = self.run_pairs(format, dim, "value_pairs")
    columns = np.arange(dim // 8)
    for lane in range(WARP):
      g, c = divmod(lane, 4)
      for half in range(2):
        tokens = SLOTS[[2 * c, 2 * c + 1]] + 8 * half
        want = values[:, tokens][:, :, columns + g * dim // 8].swapaxes(1, 2)
        np.testing.assert_array_equal(got[:, half, lane], want)


if __name__ == "__main__":
  absltest.main()
