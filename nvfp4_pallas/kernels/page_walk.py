"""Which pages a warp's next tiles of keys lie in: the page table's walk. PTX.

Lanes hold the page numbers of a group of tiles to come, one load of 32 entries, and load those of
the group after it, so that no copy waits for the table.
"""

from __future__ import annotations

import dataclasses

from nvfp4_pallas.kernels.ptx import Mem, Ptx, Reg

LANES = 32


@dataclasses.dataclass(frozen=True)
class Pages:
  """Pages and tiles (static).

  Attributes:
    page_size, num_pages: of the pools.
    kv_heads: of a page.
    tile: keys that are copied at a time.
    stride: tiles from one of a warp's to its next.
  """

  page_size: int
  num_pages: int
  kv_heads: int
  tile: int
  stride: int

  @property
  def of_tile(self) -> int:
    """Pages that a tile lies in."""
    return max(1, self.tile // self.page_size)

  @property
  def run(self) -> int:
    """Keys of a tile that lie in one page, and so in one run of bytes of each page array."""
    return min(self.page_size, self.tile)


class PageWalk:
  """A warp's way through one sequence's pages."""

  def __init__(self, p: Ptx, pages: Pages, lane: Reg, *, row: Reg, kv_len: Reg, first_tile: Reg):
    """`row`: the address of the sequence's row of the page table."""
    self._p, self._pages, self._lane, self._row = p, pages, lane, row
    self._first_tile = first_tile
    # Past the sequence's last page the table holds anything.
    self._last_page = p.maximum(p.cdiv(kv_len, pages.page_size), 1) - 1
    self._numbers, self._next_numbers = p.u32(0), p.register("r")
    self._load(p.u32(0))

  @property
  def _group(self) -> int:
    return LANES // self._pages.of_tile

  def _load(self, group: Reg) -> None:
    p, pages = self._p, self._pages
    ahead = group * self._group + self._lane // pages.of_tile
    tile = self._first_tile + ahead * pages.stride
    if pages.of_tile > 1:
      entry = tile * pages.of_tile + self._lane % pages.of_tile
    else:
      entry = tile // (pages.page_size // pages.tile)
    at = p.address(self._row, p.minimum(entry, self._last_page), 4)
    p.load_into([self._next_numbers], "global.nc", Mem(at))

  def reach(self, index: Reg) -> None:
    """To the warp's tile of this index, which must be the next one."""
    p = self._p
    with p.when((index % self._group).eq(0)):
      p.set(self._numbers, self._next_numbers)
      self._load(index // self._group + 1)

  def runs(self, index: Reg, head: Reg) -> list[Reg]:
    """Of the tile reached: its runs' numbers in a page array, counted in runs."""
    p, pages = self._p, self._pages
    runs_of_page = pages.page_size // pages.run
    runs = []
    for i in range(pages.of_tile):
      page = p.from_lane(self._numbers, index % self._group * pages.of_tile + i)
      page = p.minimum(page, pages.num_pages - 1)  # a wrong number must not fault
      run = p.mad(page, pages.kv_heads, head) * runs_of_page
      if runs_of_page > 1:
        run = run + (self._first_tile + index * pages.stride) % runs_of_page
      runs.append(run)
    return runs
