"""What the tail kernel computes and where its things lie in shared memory (static)."""

from __future__ import annotations

import dataclasses

from nvfp4_pallas.kernels import wgmma

HEAD_DIM = 128
THREADS = 128
WARPS = 4
TILE = 64  # keys
MAX_ROWS = 48  # more leave no registers for masks
CODES = TILE * HEAD_DIM // 2  # bytes of a tile's codes, of K or of V
SCALES = TILE * HEAD_DIM // 16
STAGE = 2 * (CODES + SCALES)
P_BUFFERS = 3
V_SCALE_BYTES = 256  # of a warp: its two blocks of a tile's keys, as float16


@dataclasses.dataclass(frozen=True)
class Tail:
  """What is computed (static).

  Attributes:
    group: query heads of a KV head.
    width: tokens of a query tile.
    q_levels: of A4Q, or 0.
    page_size, num_pages, max_pages: of the pools and of the page table's rows.
    causal, sm_scale, window, soft_cap: as in AttentionSpec.
    out_dtype: bfloat16, float16 or float32.
    stages: key tiles fetched or in use.
  """

  group: int
  width: int
  q_levels: int
  page_size: int
  num_pages: int
  max_pages: int
  causal: bool
  sm_scale: float
  window: int | None
  soft_cap: float | None
  out_dtype: str
  stages: int

  @property
  def q_operands(self) -> int:
    """What is added up to q."""
    return max(1, self.q_levels)

  @property
  def rows(self) -> int:
    """Of a query tile, as the products have them."""
    return -(-self.width * self.group // 16) * 16

  # Where things lie in shared memory, from its first multiple of wgmma.ALIGNMENT on.

  def q_place(self, operand: int, part: int) -> int:
    """64 columns of q's rows."""
    parts = HEAD_DIM * 2 // wgmma.ROW
    return (operand * parts + part) * self.rows * wgmma.ROW

  @property
  def p_offset(self) -> int:
    return self.q_place(self.q_operands, 0)

  @property
  def ring(self) -> int:
    return self.p_offset + P_BUFFERS * self.rows * TILE * 2

  @property
  def v_scales(self) -> int:
    return self.ring + self.stages * STAGE

  @property
  def references(self) -> int:
    """r of each row, those of a lane's columns of S side by side: 2 c + 8 j and the next."""
    return self.v_scales + WARPS * V_SCALE_BYTES

  @property
  def reference_stride(self) -> int:
    """Between lanes' references, so that they lie in different banks."""
    return self.rows + 16

  @property
  def reduction(self) -> int:
    """Of each warp a number for each row."""
    return self.references + 4 * self.reference_stride

  @property
  def barriers(self) -> int:
    """Of the ring's stages."""
    return self.reduction + 4 * WARPS * self.rows

  @property
  def smem_bytes(self) -> int:
    return self.barriers + 8 * self.stages + wgmma.ALIGNMENT
