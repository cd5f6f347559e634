"""NVFP4 pages to wide tiles in device memory, once for all queries: repack, ahead. PTX.

A block makes one wide tile (wide_layout.py) of K or of V, as a copy to shared memory wants it. A
thread takes a word of eight codes at a time, and a warp two keys, so that loads and stores are of
whole lines. Keys past the sequence's end are zeros: nobody sees them, but what P of 0 meets must be
finite. Sequences have at least one tile, for query tiles that see no key. The first block also sets
the counter of item_feed.py to 0.

Bytes of a token and KV head, of K or V: 72 in, 256 out.
"""

from __future__ import annotations

from nvfp4_pallas.kernels import wgmma
from nvfp4_pallas.kernels.mma_fragments import e2m1_as_f16
from nvfp4_pallas.kernels.ptx import Mem, Ptx
from nvfp4_pallas.kernels.wide_layout import HEAD_DIM, THREADS, Dense

POINTERS_IN = ("table", "kv_lens", "k", "k_scale", "v", "v_scale")
POINTERS_OUT = ("wide", "counter")
_WORDS = HEAD_DIM // 8  # of a key
_AT_ONCE = 8  # words of a thread whose loads are in flight


def blocks(dense: Dense) -> int:
  return dense.num_seqs * dense.kv_heads * dense.max_tiles * 2


def widen(dense: Dense, page_size: int, num_pages: int, max_pages: int) -> Ptx:
  """The program; its pointers are POINTERS_IN and POINTERS_OUT."""
  p = Ptx((*POINTERS_IN, *POINTERS_OUT))
  thread = p.thread
  pool, index = p.program & 1, p.program >> 1  # of wide tiles: sequence, head, tile
  of_seq = index // dense.max_tiles
  tile = index - of_seq * dense.max_tiles
  seq = of_seq // dense.kv_heads
  head = of_seq - seq * dense.kv_heads
  (kv_len,) = p.load("global.nc", Mem(p.address(p.pointer("kv_lens"), seq, 4)))
  row = p.address(p.pointer("table"), seq, 4 * max_pages)
  is_v = pool.ne(0)
  codes, scales = p.new("d", "mov.b64", p.pointer("k")), p.new("d", "mov.b64", p.pointer("k_scale"))
  p.set(codes, p.pointer("v"), when=is_v)
  p.set(scales, p.pointer("v_scale"), when=is_v)
  first = p.program.eq(0) & thread.eq(0)
  p.store("global", Mem(p.address(p.pointer("counter"), p.u32(0), 4)), [p.u32(0)], when=first)
  image = p.address(p.pointer("wide"), p.program, dense.slot)
  with p.scope() as scope:
    scope.leave_if((tile * dense.tile >= kv_len) & tile.ne(0))
    for start in range(0, dense.tile * _WORDS, THREADS * _AT_ONCE):
      loaded = []
      for i in range(_AT_ONCE):
        item = thread + (start + i * THREADS)
        of_tile, word = item // _WORDS, item % _WORDS
        key = tile * dense.tile + of_tile
        seen = key < kv_len
        page, code, scale = p.u32(0), p.u32(0), p.u32(0)
        p.load_into([page], "global.nc", Mem(p.address(row, key // page_size, 4)), when=seen)
        page = p.minimum(page, num_pages - 1)  # a wrong number must not fault
        slot = p.mad(page, dense.kv_heads, head) * page_size + key % page_size
        at = p.address(codes, slot, HEAD_DIM // 2)
        p.load_into([code], "global.nc", Mem(p.address(at, word, 4)), when=seen)
        at = p.address(scales, slot, HEAD_DIM // 16)
        p.load_into([scale], "global.nc", Mem(p.address(at, word >> 1, 1)), size=1, when=seen)
        loaded.append((of_tile, word, code, scale))
      for of_tile, word, code, scale in loaded:
        factor = p.halves(p.e4m3_to_f16(p.halves(scale)[0]))[0]
        twice = p.pair(factor, factor)
        pairs = [p.mul_f16x2(pair, twice) for pair in e2m1_as_f16(p, code)]
        place = (word >> 3) * dense.part + of_tile * wgmma.ROW
        place = place + wgmma.place(of_tile, (word & 7) * 16)
        p.store("global", Mem(p.address(image, place, 1)), pairs)
  return p
