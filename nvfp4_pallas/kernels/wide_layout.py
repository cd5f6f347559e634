"""Shared memory of the programs that multiply wide tiles (wide_tiles.py), static.

`Wide` is what programs that attend to such tiles share; `Teams` is for wide_attend.py, whose query
tiles may be cut, `Fused` and `Dense` are for fused_attend.py and dense_attend.py, which take whole
ones.
"""

from __future__ import annotations

import dataclasses

from nvfp4_pallas.kernels import item_feed, wgmma
from nvfp4_pallas.kernels.wide_tiles import Tiles

THREADS = 128  # of a warpgroup
WARPS = 4
ROWS = 64  # of q, that a warpgroup attends with
SMEM_BYTES = 227 * 1024  # of a multiprocessor, for one block


@dataclasses.dataclass(frozen=True)
class Wide:
  """What is computed, and where what all such programs have lies, in a block's or a team's memory.

  Attributes:
    keys, values: the tiles.
    group: query heads of a KV head.
    width: tokens of a query tile.
    q_levels: of A4Q, or 0.
    causal, sm_scale, window, soft_cap: as in AttentionSpec.
    out_dtype: bfloat16, float16 or float32.
    slots: of wide tiles, (of K, of V).
    consumers: warpgroups that attend.
    producers: arrivals that make a slot full.
    q_in_registers: where q is one operand; it spares shared memory a third of products' reads.
    in_turns: whether two consumers start products in turns.
  """

  keys: Tiles
  values: Tiles
  group: int
  width: int
  q_levels: int
  causal: bool
  sm_scale: float
  window: int | None
  soft_cap: float | None
  out_dtype: str
  slots: tuple[int, int]
  consumers: int
  producers: int
  q_in_registers: bool
  in_turns: bool

  @property
  def tile(self) -> int:
    """Keys of one."""
    return self.keys.keys

  @property
  def pools(self) -> tuple[Tiles, Tiles]:
    return self.keys, self.values

  @property
  def q_operands(self) -> int:
    """What is added up to q."""
    return max(1, self.q_levels)

  def q_place(self, operand: int, part: int) -> int:
    """A part of q's rows, from where a consumer's q begins."""
    return (operand * self.keys.parts + part) * ROWS * wgmma.ROW

  @property
  def q_bytes(self) -> int:
    """Of a consumer."""
    return self.q_place(self.q_operands, 0)

  # Places, from a multiple of wgmma.ALIGNMENT on.

  def slots_of(self, pool: int) -> int:
    """Of K, 0, or of V, 1."""
    return self.consumers * self.q_bytes + pool * self.slots[0] * self.keys.nbytes

  @property
  def reduction(self) -> int:
    """Of each consumer a number of each warp, 16 bytes."""
    return self.slots_of(1) + self.slots[1] * self.values.nbytes

  def barriers(self, pool: int, empty: bool) -> int:
    """Of the slots of K or V: whether one is full, or empty again."""
    before = pool * 2 * self.slots[0] + empty * self.slots[pool]
    return self.reduction + 16 * self.consumers + 8 * before

  def q_units(self, consumer: int) -> int:
    """Of a consumer's rows, where they have a scale each."""
    return self.barriers(1, True) + 8 * self.slots[1] + 4 * ROWS * consumer

  @property
  def end(self) -> int:
    return self.q_units(self.consumers if self.keys.as_e4m3 else 0)


def aligned(nbytes: int, unit: int = wgmma.ALIGNMENT) -> int:
  return -(-nbytes // unit) * unit


@dataclasses.dataclass(frozen=True)
class Rings:
  """Of each warp of warpgroups that widen a ring of stages, what it has fetched or is using.

  Attributes:
    begin: where they lie.
    stages: of a warp.
    share: keys of a tile that a warp widens.
    head_dims: of K and V.
    producers: warpgroups: one for K and V, or one for each.
  """

  begin: int
  stages: int
  share: int
  head_dims: tuple[int, int]
  producers: int

  def pools(self, producer: int) -> tuple[int, ...]:
    """Of which a stage of a producer holds a share: of K (0), of V (1)."""
    return (0, 1) if self.producers == 1 else (producer,)

  def codes(self, pool: int) -> int:
    """Bytes of a share's codes."""
    return self.share * self.head_dims[pool] // 2

  def scales(self, pool: int) -> int:
    return self.codes(pool) // 8

  def arrays(self, producer: int) -> dict[str, int]:
    """Bytes of a share in each array, in the order in which a stage has them."""
    pools = self.pools(producer)
    codes = {"kv"[pool]: self.codes(pool) for pool in pools}
    return codes | {f"{'kv'[pool]}_scale": self.scales(pool) for pool in pools}

  def stage(self, producer: int) -> int:
    return sum(self.arrays(producer).values())

  def ring(self, producer: int) -> int:
    before = sum(self.stage(other) for other in range(producer))
    return self.begin + WARPS * self.stages * before

  def barriers(self, producer: int) -> int:
    return self.ring(self.producers) + 8 * producer * WARPS * self.stages

  @property
  def end(self) -> int:
    return self.barriers(self.producers)


@dataclasses.dataclass(frozen=True)
class Paged(Wide):
  """What those know that widen NVFP4 pages themselves.

  Attributes:
    page_size, num_pages, max_pages: of the pools and of the page table's rows.
    stages: of a warp's ring.
    widening: warpgroups that do it.
    reused: whether other blocks read the same pages.
  """

  page_size: int
  num_pages: int
  max_pages: int
  stages: int
  widening: int
  reused: bool

  @property
  def rings(self) -> Rings:
    head_dims = self.keys.head_dim, self.values.head_dim
    begin = aligned(self._rings_after, 128)
    return Rings(begin, self.stages, self.tile // WARPS, head_dims, self.widening)

  @property
  def _rings_after(self) -> int:
    return self.end


@dataclasses.dataclass(frozen=True)
class Teams(Paged):
  """A block of TEAMS, each of a warpgroup that attends and one that widens."""

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
    queries_after: the queries come after all keys that there are, instead of being the last ones.
  """

  num_seqs: int
  kv_heads: int
  tokens: int
  queries_after: bool

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
    max_tiles: of a sequence and head, in the workspace; None where the keys are this step's rows
      (dense_widen.py), and an array says where sequences' tiles begin.
  """

  max_tiles: int | None

  @property
  def smem_bytes(self) -> int:
    return aligned(self.feed_end) + wgmma.ALIGNMENT


@dataclasses.dataclass(frozen=True)
class Fused(Paged, Whole):
  """A block of warpgroups that attend and of others that widen."""

  @property
  def _rings_after(self) -> int:
    return self.feed_end

  @property
  def smem_bytes(self) -> int:
    return aligned(self.rings.end) + wgmma.ALIGNMENT
