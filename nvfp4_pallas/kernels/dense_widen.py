"""Pages to wide tiles in device memory, once for all queries: repack, ahead. PTX.

A block makes one wide tile (wide_tiles.py) of K or of V, as a copy to shared memory wants it. A
thread takes eight columns of a key at a time, so that warps load and store whole lines. Keys past
the sequence's end are zeros: nobody sees them, but what P of 0 meets must be finite. Sequences have
at least one tile, for query tiles that see no key. The first block also sets the counter of
item_feed.py to 0.

Tiles lie sequence by sequence, and for each the heads. Instead of pages, keys may be rows, those of
this step: then arrays say which tile is whose.

Bytes of a token and KV head, of K or V of 128 columns: 72 (NVFP4), 128 (FP8) or 256 in, 256 out, or
128 as E4M3.
"""

from __future__ import annotations

import dataclasses

from nvfp4_pallas.kernels import k_units, wgmma
from nvfp4_pallas.kernels.mma_fragments import e2m1_as_f16
from nvfp4_pallas.kernels.ptx import Mem, Ptx, Reg
from nvfp4_pallas.kernels.wide_layout import THREADS, Dense
from nvfp4_pallas.kernels.wide_tiles import Tiles

POINTERS_OUT = ("k_wide", "v_wide", "counter")
_AT_ONCE = 8  # items of a thread whose loads are in flight
_POOLS = "k", "v"


@dataclasses.dataclass(frozen=True)
class Pages:
  """Where keys are: page_size, num_pages, max_pages of the pools and of the page table's rows."""

  page_size: int
  num_pages: int
  max_pages: int


def pointers_in(dense: Dense, pages: Pages | None) -> tuple[str, ...]:
  where = ("table",) if pages is not None else ("cu_q_lens", "first_tiles", "seqs_of_tiles")
  pools = [
    name
    for pool, tiles in zip(_POOLS, dense.pools, strict=True)
    for name in (pool, f"{pool}_scale")[: 2 if tiles.format == "nvfp4" else 1]
  ]
  return "kv_lens", *where, *pools, *(("k_tops",) if dense.keys.as_e4m3 else ())


def widen(dense: Dense, pages: Pages | None) -> Ptx:
  """The program; its pointers are pointers_in(), POINTERS_OUT, and of A8Q `k_units`.

  Args:
    pages: None where keys are rows.
  """
  units = ("k_units",) if dense.keys.as_e4m3 else ()
  p = Ptx((*pointers_in(dense, pages), *POINTERS_OUT, *units))
  first = p.program.eq(0) & p.thread.eq(0)
  p.store("global", Mem(p.address(p.pointer("counter"), p.u32(0), 4)), [p.u32(0)], when=first)
  index = p.program >> 1  # of wide tiles
  with p.scope() as scope:
    keys = _Keys(p, dense, pages, index, scope)
    for pool, (name, tiles) in enumerate(zip(_POOLS, dense.pools, strict=True)):
      with p.when((p.program & 1).eq(pool)):
        _Tile(p, name, tiles, keys).make(p.address(p.pointer(f"{name}_wide"), index, tiles.nbytes))
  return p


class _Keys:
  """The keys of a wide tile: where they are, and which there are."""

  def __init__(self, p: Ptx, dense: Dense, pages: Pages | None, index: Reg, scope):
    self.p, self.kv_heads, self.pages = p, dense.kv_heads, pages
    of_seqs = index // dense.kv_heads
    self.head = index - of_seqs * dense.kv_heads
    if pages is not None:
      assert dense.max_tiles is not None
      self.seq = of_seqs // dense.max_tiles
      tile = of_seqs - self.seq * dense.max_tiles
      self._row = p.address(p.pointer("table"), self.seq, 4 * pages.max_pages)
    else:
      self.seq = self._of_array("seqs_of_tiles", of_seqs)
      scope.leave_if(self.seq >= dense.num_seqs)
      tile = of_seqs - self._of_array("first_tiles", self.seq)
      self._begin = self._of_array("cu_q_lens", self.seq)
    self.tile, self._first = tile, tile * dense.tile
    self._kv_len = self._of_array("kv_lens", self.seq)
    scope.leave_if((self._first >= self._kv_len) & tile.ne(0))

  def _of_array(self, name: str, index: Reg) -> Reg:
    return self.p.load("global.nc", Mem(self.p.address(self.p.pointer(name), index, 4)))[0]

  @property
  def pair(self) -> Reg:
    return self.p.mad(self.seq, self.kv_heads, self.head)

  def find(self, of_tile: Reg) -> tuple[Reg, Reg]:
    """Where one of the tile's keys is in a pool, counted in keys, and whether there is such."""
    p, pages, key = self.p, self.pages, self._first + of_tile
    seen = key < self._kv_len
    if pages is None:
      return p.mad(self._begin + key, self.kv_heads, self.head), seen
    page = p.u32(0)
    at = Mem(p.address(self._row, key // pages.page_size, 4))
    p.load_into([page], "global.nc", at, when=seen)
    page = p.minimum(page, pages.num_pages - 1)  # a wrong number must not fault
    return p.mad(page, self.kv_heads, self.head) * pages.page_size + key % pages.page_size, seen


class _Tile:
  """A wide tile of K or of V that is being made."""

  def __init__(self, p: Ptx, name: str, tiles: Tiles, keys: _Keys):
    self._p, self._name, self._tiles, self._keys = p, name, tiles, keys
    self._inverse_unit: Reg | None = None
    if tiles.as_e4m3:
      unit, self._inverse_unit = k_units.unit_of(p, keys.pair, keys.pages)
      at = p.address(p.pointer("k_units"), keys.pair, 4)
      p.store("global", Mem(at), [unit], when=keys.tile.eq(0) & p.thread.eq(0))

  def make(self, image: Reg) -> None:
    p, tiles = self._p, self._tiles
    nbytes = 8 * tiles.value_bytes
    items = tiles.parts * wgmma.ROW // nbytes  # of a key
    columns = tiles.head_dim // 8  # those that are more are zeros, as copies bring them too
    for start in range(0, tiles.keys * items, THREADS * _AT_ONCE):
      loaded = []
      for i in range(start, min(start + THREADS * _AT_ONCE, tiles.keys * items), THREADS):
        item = p.thread + i
        of_tile, column = item // items, item % items
        slot, seen = self._keys.find(of_tile)
        seen = seen if items == columns else seen & (column < columns)
        loaded.append((of_tile, column, self._load(slot, seen, column)))
      for of_tile, column, raw in loaded:
        at = column * nbytes
        place = (at // wgmma.ROW) * tiles.part + of_tile * wgmma.ROW
        place = place + wgmma.place(of_tile, at % wgmma.ROW)
        p.store("global", Mem(p.address(image, place, 1)), self._widen(raw))

  def _load(self, slot: Reg, seen: Reg, column: Reg) -> list[Reg]:
    """Eight columns of a key, zeros where it is not there; of NVFP4 then their scale."""
    p, format, dim = self._p, self._tiles.format, self._tiles.head_dim
    words = {"nvfp4": 1, "fp8": 2, "bf16": 4}[format]
    raw = [p.u32(0) for _ in range(words)]
    at = p.address(p.pointer(self._name), slot, dim // 8 * 4 * words)
    p.load_into(raw, "global.nc", Mem(p.address(at, column, 4 * words)), when=seen)
    if format == "nvfp4":
      scale = p.u32(0)
      at = p.address(p.pointer(f"{self._name}_scale"), slot, dim // 16)
      p.load_into([scale], "global.nc", Mem(p.address(at, column >> 1, 1)), size=1, when=seen)
      raw.append(scale)
    return raw

  def _widen(self, raw: list[Reg]) -> list[Reg]:
    p = self._p
    if self._tiles.format == "bf16":
      return raw
    if self._tiles.format == "fp8":
      return [p.e4m3_to_f16(half) for word in raw for half in p.halves(word)]
    word, scale = raw
    factor = p.halves(p.e4m3_to_f16(p.halves(scale)[0]))[0]
    twice = p.pair(factor, factor)
    if self._inverse_unit is None:
      return [p.mul_f16x2(pair, twice) for pair in e2m1_as_f16(p, word)]
    return k_units.as_e4m3(p, e2m1_as_f16(p, word), p.mul_f16x2(twice, self._inverse_unit))
