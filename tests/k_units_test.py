"""K of A8Q by the emulator: the unit of each sequence and head, and the rounding to E4M3."""

import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized

from nvfp4_pallas.kernels import k_units
from nvfp4_pallas.kernels.mma_fragments import e2m1_as_f16
from nvfp4_pallas.kernels.ptx import Mem, Ptx
from nvfp4_pallas.read_paths import k_scale_for_e4m3
from tests import cases
from tests.base import TestCase
from tests.cases import Case
from tests.ptx_emulator import Memory, run

E2M1 = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = np.concatenate([E2M1, -E2M1])


class ScanTest(TestCase):
  @parameterized.parameters((64, 16), (128, 64), (256, 256))
  def test_largest_scales_in_use(self, head_dim, page_size):
    """Not those of free slots, which are NaN, nor a faulty block's."""
    lens = (1, 1023, 1024, 1025, 0, 2100)
    case = Case(
      "scan", q_lens=(0,) * 6, kv_lens=lens, head_dim=head_dim, page_size=page_size, v_head_dim=64
    )
    built = cases.build(case)
    cache, table = built.cache, np.asarray(built.batch.page_table)
    scales = np.array(cache.k.block_scale).view(np.uint8)
    # A faulty block, and the largest scale where the same thread meets it.
    scales[table[5, 1050 // page_size], 1, 1050 % page_size, 2] = 0x7F
    scales[table[5, 1178 // page_size], 1, 1178 % page_size, 2] = 0x7D
    scales[table[5, 2099 // page_size], 0, 2099 % page_size, 3] = 0x7E
    scales = scales.view(ml_dtypes.float8_e4m3fn)
    pages = {"num_pages": cache.num_pages, "max_pages": table.shape[1], "page_size": page_size}
    scan = k_units.Scan(num_seqs=6, kv_heads=2, head_dim=head_dim, **pages)
    arrays = {"table": table, "kv_lens": np.asarray(lens, np.int32), "k_scale": scales}
    tops = (12, k_units.chunks(scan) * k_units.WARPS)
    memory = Memory(arrays, {"k_tops": np.zeros(tops, np.float32)})
    run(k_units.scan(scan), memory, programs=range(scan.blocks))
    got = memory.array("k_tops").max(axis=1).reshape(6, 2)
    for seq, n in enumerate(lens):
      keys = np.arange(n)
      of_seq = scales[table[seq, keys // page_size], :, keys % page_size].astype(np.float32)
      want = np.nanmax(np.where(np.isnan(of_seq), 0, of_seq), axis=(0, 2), initial=0)
      np.testing.assert_array_equal(got[seq], want)
    self.assertEqual(got[5].tolist(), [448, 416])

  def test_units(self):
    """Of every largest scale, in any place."""
    every = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    pages = k_units.Scan(1, 1, 64, page_size=64, num_pages=1, max_pages=160)
    count = k_units.chunks(pages) * k_units.WARPS
    tops = np.zeros((len(every), count), np.float32)
    tops[np.arange(len(every)), np.arange(len(every)) % count] = every
    p = Ptx(("k_tops", "unit", "inverse"))
    unit, inverse = k_units.unit_of(p, p.program, pages)
    first = p.thread.eq(0)
    p.store("global", Mem(p.address(p.pointer("unit"), p.program, 4)), [unit], when=first)
    p.store("global", Mem(p.address(p.pointer("inverse"), p.program, 4)), [inverse], when=first)
    made = {"unit": np.zeros(127, np.float32), "inverse": np.zeros((127, 2), np.float16)}
    memory = Memory({"k_tops": tops}, made)
    run(p, memory, programs=range(127))
    got = memory.array("unit")
    np.testing.assert_array_equal(got, np.asarray(k_scale_for_e4m3(every)))
    inverse = memory.array("inverse").astype(np.float64)
    np.testing.assert_array_equal(inverse * got[:, None], 1)

  @parameterized.parameters(0x01, 0x08, 0x37, 0x3A, 0x7E)
  def test_rounding(self, top):
    """All codes times all scales up to the largest one, as the definition rounds them."""
    scales = np.arange(top + 1, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    unit = np.float32(k_scale_for_e4m3(scales[-1]))
    # A word has codes 0 to 7 or 8 to 15.
    factors = np.repeat((scales / unit).astype(np.float16), 2).view(np.uint16)
    self.assertTrue(np.array_equal(np.repeat(scales, 2) / unit, factors.view(np.float16)))
    p = Ptx(("word", "factor", "y"))
    (word,) = p.load("global", Mem(p.address(p.pointer("word"), p.program, 4)))
    (factor,) = p.load("global", Mem(p.address(p.pointer("factor"), p.program, 4)))
    made = k_units.as_e4m3(p, e2m1_as_f16(p, word), factor)
    at = Mem(p.address(p.pointer("y"), p.program, 8))
    p.store("global", at, made, when=p.thread.eq(0))
    count = len(factors)
    codes = np.resize(np.asarray([0x76543210, 0xFEDCBA98], np.uint32), count)
    twice = factors.astype(np.uint32) * np.uint32(0x10001)
    memory = Memory({"word": codes, "factor": twice}, {"y": np.zeros((count, 8), np.uint8)})
    run(p, memory, programs=range(count))
    got = memory.array("y")[:, [0, 2, 4, 6, 1, 3, 5, 7]].view(ml_dtypes.float8_e4m3fn)
    values = E2M1.reshape(2, 8)[np.arange(count) % 2] * np.repeat(scales, 2)[:, None] / unit
    want = values.astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))
    self.assertLessEqual(np.abs(values).max(), 448)


if __name__ == "__main__":
  absltest.main()
