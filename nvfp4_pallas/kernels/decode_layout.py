"""What decode's main program computes and how its shared memory is used (static)."""

from __future__ import annotations

import dataclasses

from nvfp4_pallas.kernels.mma_fragments import Fragments

WARPS = 4
THREADS = 32 * WARPS
COLUMNS = 8  # of the right operand of a product: query heads


@dataclasses.dataclass(frozen=True)
class RingPages:
  """The pages of a recent window (static; nvfp4_pallas/recent.py).

  Attributes:
    keys, values: bf16.
    num_rings, of_ring: rings, and pages of each.
    by_number: sequence s has ring s, and there are no ring_ids.
  """

  keys: Fragments
  values: Fragments
  num_rings: int
  of_ring: int
  by_number: bool

  tile = 16  # keys that are copied at a time; they lie in one page

  @property
  def slot_bytes(self) -> int:
    return self.tile * max(self.keys.token_bytes, self.values.token_bytes)

  @property
  def pointers(self) -> tuple[str, ...]:
    ids = () if self.by_number else ("ring_ids",)
    return (*ids, "starts", "newest_k", "newest_v")

  def most_tiles(self, page_size: int) -> int:
    return self.of_ring * page_size // self.tile


@dataclasses.dataclass(frozen=True)
class Problem:
  """What is computed (static).

  Attributes:
    keys, values: the pools' formats.
    group: query heads of a KV head.
    q_levels: of A4Q, or 0.
    page_size, num_pages, max_pages: of the pools and of the page table's rows.
    sm_scale, window, soft_cap: as in AttentionSpec.
    out_dtype: bfloat16, float16 or float32.
    width: tokens of a query tile; 1 for decode.
    rings: where the newest tokens are, if not in the pages.
  """

  keys: Fragments
  values: Fragments
  group: int
  q_levels: int
  page_size: int
  num_pages: int
  max_pages: int
  sm_scale: float
  window: int | None
  soft_cap: float | None
  out_dtype: str
  width: int = 1
  rings: RingPages | None = None

  @property
  def q_operands(self) -> int:
    """What is added up to q."""
    return max(1, self.q_levels)

  @property
  def columns(self) -> int:
    """Of S^T and O^T: query heads of a KV head, for each token of a query tile."""
    return self.width * self.group

  @property
  def column_tiles(self) -> int:
    return -(-self.columns // COLUMNS)

  @property
  def pool_pointers(self) -> dict[str, int]:
    """The arrays of both pools, with the bytes that a token has in them."""
    arrays = {"k": self.keys.row_bytes, "k_scale": self.keys.scale_bytes}
    arrays |= {"v": self.values.row_bytes, "v_scale": self.values.scale_bytes}
    return {name: nbytes for name, nbytes in arrays.items() if nbytes}

  @property
  def inputs(self) -> tuple[str, ...]:
    """The main program's pointers to what it reads."""
    pools = {"k_global": self.keys, "v_global": self.values}
    scales = (name for name, pool in pools.items() if pool.has_global_scale)
    newest = () if self.rings is None else self.rings.pointers
    return ("q", "table", "kv_lens", *scales, *self.pool_pointers, *newest)


@dataclasses.dataclass(frozen=True)
class Ring:
  """The shared memory of a block: for each warp a ring of slots, then the slots' barriers.

  Attributes:
    tile: keys whose K or V a slot holds.
    slots: of each warp.
    problem: gives the sizes.
  """

  tile: int
  slots: int
  problem: Problem

  @property
  def slot_bytes(self) -> int:
    widest = max(self.problem.keys.token_bytes, self.problem.values.token_bytes)
    rings = self.problem.rings
    return max(self.tile * widest, 0 if rings is None else rings.slot_bytes)

  @property
  def warp_bytes(self) -> int:
    """Room for the ring, or at a segment's end for O and two numbers of each query head."""
    state = self.problem.columns * (self.problem.values.head_dim * 4 + 8)
    return max(self.slots * self.slot_bytes, -(-state // 128) * 128)

  @property
  def barriers(self) -> int:
    return WARPS * self.warp_bytes

  @property
  def smem_bytes(self) -> int:
    return self.barriers + 8 * WARPS * self.slots
