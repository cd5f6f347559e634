"""What the wide kernel computes and where its things lie in shared memory (static)."""

from __future__ import annotations

import dataclasses

from nvfp4_pallas.kernels import wgmma

HEAD_DIM = 128
PARTS = HEAD_DIM * 2 // wgmma.ROW  # 64 columns of a float16 row each
THREADS = 128  # of a warpgroup
WARPS = 4
TILE = 64  # keys
ROWS = 64  # of a query tile
SHARE = TILE // WARPS  # keys of a tile that a warp widens
CODES = SHARE * HEAD_DIM // 2  # bytes of a share's codes, of K or of V
SCALES = SHARE * HEAD_DIM // 16
STAGE = 2 * (CODES + SCALES)  # codes of K and V, then their scales
PART = TILE * wgmma.ROW
SLOT = PARTS * PART  # a tile of K or of V as float16
TEAMS = 2  # of a block
ROLES = 2  # warpgroups of a team: one attends, one widens


@dataclasses.dataclass(frozen=True)
class Wide:
  """What is computed (static).

  Attributes:
    group: query heads of a KV head.
    width: tokens of a query tile.
    q_operands: what is added up to q (levels of A4Q).
    page_size, num_pages, max_pages: of the pools and of the page table's rows.
    causal, sm_scale, window, soft_cap: as in AttentionSpec.
    out_dtype: bfloat16, float16 or float32.
    stages: shares of tiles that a warp has fetched or in use.
    slots: of wide tiles, (of K, of V).
  """

  group: int
  width: int
  q_operands: int
  page_size: int
  num_pages: int
  max_pages: int
  causal: bool
  sm_scale: float
  window: int | None
  soft_cap: float | None
  out_dtype: str
  stages: int
  slots: tuple[int, int]

  # Where things lie in a team's shared memory, whose size is a multiple of wgmma.ALIGNMENT.

  def q_place(self, operand: int, part: int) -> int:
    return (operand * PARTS + part) * ROWS * wgmma.ROW

  def slots_of(self, pool: int) -> int:
    """Of K, 0, or of V, 1."""
    return self.q_place(self.q_operands, 0) + pool * self.slots[0] * SLOT

  @property
  def ring(self) -> int:
    return self.slots_of(1) + self.slots[1] * SLOT

  @property
  def reduction(self) -> int:
    """A number of each warp."""
    return self.ring + WARPS * self.stages * STAGE

  @property
  def ring_barriers(self) -> int:
    return self.reduction + 4 * WARPS

  def barriers(self, pool: int, empty: bool) -> int:
    """Of the slots of K or V: whether one is full, or empty again."""
    before = pool * 2 * self.slots[0] + empty * self.slots[pool]
    return self.ring_barriers + 8 * (WARPS * self.stages + before)

  @property
  def team_bytes(self) -> int:
    end = self.barriers(1, True) + 8 * self.slots[1]
    return -(-end // wgmma.ALIGNMENT) * wgmma.ALIGNMENT

  @property
  def smem_bytes(self) -> int:
    """Of a block, with room to reach the alignment."""
    return TEAMS * self.team_bytes + wgmma.ALIGNMENT
