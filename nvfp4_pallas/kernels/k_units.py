"""K of A8Q: E4M3 in a unit s_k of each sequence and KV head (read_paths.py). PTX.

s_k is the least power of two not below 6 max / 448, of the largest block scale that is in use. A
program of its own finds the largest scales of runs of CHUNK keys, one for each warp, and whoever
needs s_k takes the largest of those.
"""

from __future__ import annotations

import dataclasses

from nvfp4_pallas import format as nvfp4
from nvfp4_pallas.kernels.mma_fragments import NvFp4Fragments
from nvfp4_pallas.kernels.ptx import Mem, Ptx, Reg
from nvfp4_pallas.kernels.wide_layout import THREADS, WARPS

CHUNK = 1024  # keys of a block
LANES = 32
POINTERS_IN = ("table", "kv_lens", "k_scale")
POINTERS_OUT = ("k_tops",)


@dataclasses.dataclass(frozen=True)
class Scan:
  """What is looked at (static): as in PagedKVCache and RaggedBatch."""

  num_seqs: int
  kv_heads: int
  head_dim: int
  page_size: int
  num_pages: int
  max_pages: int

  @property
  def blocks(self) -> int:
    return self.num_seqs * self.kv_heads * chunks(self)


def chunks(pages) -> int:
  """Of a row of the page table."""
  return -(-pages.max_pages * pages.page_size // CHUNK)


def scan(scan: Scan) -> Ptx:
  """The program; its pointers are POINTERS_IN and POINTERS_OUT [pairs, chunks, WARPS]."""
  p = Ptx((*POINTERS_IN, *POINTERS_OUT))
  pair = p.program // chunks(scan)
  first = (p.program - pair * chunks(scan)) * CHUNK
  seq = pair // scan.kv_heads
  head = pair - seq * scan.kv_heads
  (kv_len,) = p.load("global.nc", Mem(p.address(p.pointer("kv_lens"), seq, 4)))
  row = p.address(p.pointer("table"), seq, 4 * scan.max_pages)
  words = scan.head_dim // 64  # of a key's scales
  largest = p.u32(0)
  loaded = []
  for start in range(0, CHUNK, THREADS):
    key = first + p.thread + start
    seen, page, scales = key < kv_len, p.u32(0), [p.u32(0) for _ in range(words)]
    at = Mem(p.address(row, key // scan.page_size, 4))
    p.load_into([page], "global.nc", at, when=seen)
    page = p.minimum(page, scan.num_pages - 1)  # a wrong number must not fault
    slot = p.mad(page, scan.kv_heads, head) * scan.page_size + key % scan.page_size
    at = Mem(p.address(p.pointer("k_scale"), slot, 4 * words))
    p.load_into(scales, "global.nc", at, when=seen)
    loaded += scales
  for two in (p.e4m3_to_f16(half) for word in loaded for half in p.halves(word)):
    # A block that is not finite makes its row NaN whatever the unit: a NaN loses here.
    p.set(largest, p.new("r", "max.f16x2", largest, two))
  low, high = p.halves(largest)
  top = p.bits(p.new("f", "max.f32", p.f16_to_f32(low), p.f16_to_f32(high)))
  top = p.max_lanes(top)  # positive numbers are in the order of their bits
  at = p.address(p.pointer("k_tops"), p.mad(p.program, WARPS, p.thread // LANES), 4)
  p.store("global", Mem(at), [top], when=(p.thread % LANES).eq(0))
  return p


def unit_of(p: Ptx, pair: Reg, pages) -> tuple[Reg, Reg]:
  """s_k of a sequence and KV head, float32, and 1 / s_k as two float16, from `k_tops`."""
  count = chunks(pages) * WARPS
  row = p.address(p.pointer("k_tops"), pair, 4 * count)
  top = p.u32(0)
  for start in range(0, count, LANES):
    lane, of_lane = (p.thread % LANES) + start, p.u32(0)
    p.load_into([of_lane], "global.nc", Mem(p.address(row, lane, 4)), when=lane < count)
    top = p.maximum(top, of_lane)
  top = p.max_lanes(top)
  bound = p.multiply(p.as_f32(top), nvfp4.E2M1_MAX / nvfp4.E4M3_MAX)
  # No E4M3 value times 6 / 448 is a power of two: the next one has the exponent one more.
  exponent = p.select(top.eq(0), 127, (p.bits(bound) >> 23) + 1)
  unit, inverse = (p.as_f32(e << 23) for e in (exponent, p.u32(254) - exponent))
  return unit, p.pack("f16", inverse, inverse)


def as_e4m3(p: Ptx, pairs: list[Reg], factor: Reg) -> list[Reg]:
  """Eight values of NvFp4Fragments' unit times a factor, as E4M3 in two words.

  All before the rounding to E4M3 is exact: a block scale over s_k is 2^-12 to 75, its products with
  codes up to 448, and both have few bits.
  """
  unit = p.constant(_twice_as_f16(NvFp4Fragments.unit))
  halves = [p.f16_to_e4m3(p.mul_f16x2(p.mul_f16x2(pair, unit), factor)) for pair in pairs]
  return [p.pair(a, b) for a, b in zip(halves[::2], halves[1::2], strict=True)]


def _twice_as_f16(power_of_two: float) -> int:
  bits = int(power_of_two).bit_length() - 1 + 15 << 10
  return bits << 16 | bits
