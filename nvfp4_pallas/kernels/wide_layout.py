"""Shared memory of the programs that multiply wide tiles (static).

A wide tile is K or V of `tile` keys as float16, as wgmma reads it (wgmma.py): rows are keys, in
PARTS of 64 columns. `Wide` is what programs that attend to such tiles share; `Teams` is for
wide_attend.py, whose query tiles may be cut, `Fused` and `Dense` for fused_attend.py and
dense_attend.py, which take whole ones.
"""

from __future__ import annotations

import dataclasses

from nvfp4_pallas.kernels import item_feed, wgmma

HEAD_DIM = 128
PARTS = HEAD_DIM * 2 // wgmma.ROW
THREADS = 128  # of a warpgroup
WARPS = 4
ROWS = 64  # of q, that a warpgroup attends with


@dataclasses.dataclass(frozen=True)
class Wide:
  """What is computed, and where what all such programs have lies, in a block's or a team's memory.

  Attributes:
    group: query heads of a KV head.
    width: tokens of a query tile.
    q_operands: what is added up to q (levels of A4Q).
    causal, sm_scale, window, soft_cap: as in AttentionSpec.
    out_dtype: bfloat16, float16 or float32.
    tile: keys.
    slots: of wide tiles, (of K, of V).
    consumers: warpgroups that attend.
    producers: arrivals that make a slot full.
    q_in_registers: of one operand of q, 32; they spare shared memory a third of products' reads.
  """

  group: int
  width: int
  q_operands: int
  causal: bool
  sm_scale: float
  window: int | None
  soft_cap: float | None
  out_dtype: str
  tile: int
  slots: tuple[int, int]
  consumers: int
  producers: int
  q_in_registers: bool

  @property
  def part(self) -> int:
    """Bytes of a tile's 64 columns."""
    return self.tile * wgmma.ROW

  @property
  def slot(self) -> int:
    return PARTS * self.part

  def q_place(self, operand: int, part: int) -> int:
    """64 columns of q's rows, from where a consumer's q begins."""
    return (operand * PARTS + part) * ROWS * wgmma.ROW

  @property
  def q_bytes(self) -> int:
    """Of a consumer."""
    return self.q_place(self.q_operands, 0)

  # Places, from a multiple of wgmma.ALIGNMENT on.

  def slots_of(self, pool: int) -> int:
    """Of K, 0, or of V, 1."""
    return self.consumers * self.q_bytes + pool * self.slots[0] * self.slot

  @property
  def reduction(self) -> int:
    """Of each consumer a number of each warp, 16 bytes."""
    return self.slots_of(1) + self.slots[1] * self.slot

  def barriers(self, pool: int, empty: bool) -> int:
    """Of the slots of K or V: whether one is full, or empty again."""
    before = pool * 2 * self.slots[0] + empty * self.slots[pool]
    return self.reduction + 16 * self.consumers + 8 * before

  @property
  def end(self) -> int:
    return self.barriers(1, True) + 8 * self.slots[1]


def aligned(nbytes: int, unit: int = wgmma.ALIGNMENT) -> int:
  return -(-nbytes // unit) * unit


SHARED_TILE = 64  # keys of a tile that warps make together
SHARE = SHARED_TILE // WARPS
CODES = SHARE * HEAD_DIM // 2  # bytes of a share's codes, of K or of V
SCALES = SHARE * HEAD_DIM // 16


@dataclasses.dataclass(frozen=True)
class Rings:
  """Of each warp of warpgroups that widen a ring of stages, what it has fetched or is using.

  Attributes:
    begin: where they lie.
    stages: of a warp.
    pools: whose shares a stage holds: codes, one after the other, then scales.
    producers: warpgroups.
  """

  begin: int
  stages: int
  pools: int
  producers: int

  @property
  def stage(self) -> int:
    return self.pools * (CODES + SCALES)

  def ring(self, producer: int) -> int:
    return self.begin + producer * WARPS * self.stages * self.stage

  def barriers(self, producer: int) -> int:
    return self.ring(self.producers) + 8 * producer * WARPS * self.stages

  @property
  def end(self) -> int:
    return self.barriers(self.producers)


@dataclasses.dataclass(frozen=True)
class Paged:
  """What those know that widen pages.

  Attributes:
    page_size, num_pages, max_pages: of the pools and of the page table's rows.
    stages: of a warp's ring.
  """

  page_size: int
  num_pages: int
  max_pages: int
  stages: int


@dataclasses.dataclass(frozen=True)
class Teams(Paged, Wide):
  """A block of TEAMS, each of a warpgroup that attends and one that widens."""

  @property
  def rings(self) -> Rings:
    return Rings(aligned(self.end, 128), self.stages, pools=2, producers=1)

  @property
  def team_bytes(self) -> int:
    return aligned(self.rings.end)

  @property
  def smem_bytes(self) -> int:
    """Of a block, with room to reach the alignment."""
    return TEAMS * self.team_bytes + wgmma.ALIGNMENT


TEAMS = 2
ROLES = 2


@dataclasses.dataclass(frozen=True)
class Whole(Wide):
  """A block that takes whole query tiles, item by item; the base of two.

  Attributes:
    num_seqs, kv_heads: of the batch.
    tokens: rows of q, padding included.
  """

  num_seqs: int
  kv_heads: int
  tokens: int

  @property
  def feed(self) -> int:
    """Of item_feed.py."""
    return self.end

  @property
  def feed_end(self) -> int:
    return self.feed + item_feed.BYTES


@dataclasses.dataclass(frozen=True)
class Dense(Whole):
  """A block of warpgroups that attend and a warp that copies.

  Attributes:
    max_tiles: of a sequence, in the workspace.
  """

  max_tiles: int

  @property
  def smem_bytes(self) -> int:
    return aligned(self.feed_end) + wgmma.ALIGNMENT


@dataclasses.dataclass(frozen=True)
class Fused(Paged, Whole):
  """A block of warpgroups that attend, one that widens K and one that widens V."""

  @property
  def rings(self) -> Rings:
    return Rings(aligned(self.feed_end, 128), self.stages, pools=1, producers=2)

  @property
  def smem_bytes(self) -> int:
    return aligned(self.rings.end) + wgmma.ALIGNMENT
