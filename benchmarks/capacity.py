"""What a cache of a model costs in bytes, read off the arrays of a real one."""

from __future__ import annotations

import dataclasses

from nvfp4_pallas import PagedKVCache

# The seeds' example: 64 layers, 8 KV heads of 128, 131,072 tokens.
LAYERS, HEADS, HEAD_DIM, TOKENS, PAGE_SIZE = 64, 8, 128, 131_072, 64


@dataclasses.dataclass(frozen=True)
class Capacity:
  """Bytes of one format for a whole model.

  Attributes:
    format: of K and V.
    bytes_per_token: all layers, K and V, scales included.
    sequence_bytes: of `tokens` tokens in whole pages, the unused end of the last page included.
    table_bytes: page table entries and global scales beside the pages.
  """

  format: str
  tokens: int
  bytes_per_token: float
  sequence_bytes: int
  table_bytes: int


def of_format(format: str, tokens: int = TOKENS) -> Capacity:
  pages_made = 2
  cache = PagedKVCache.create(
    num_pages=pages_made,
    page_size=PAGE_SIZE,
    num_kv_heads=HEADS,
    head_dim=HEAD_DIM,
    k_format=format,
  )
  arrays = [a for p in (cache.k, cache.v) for a in (p.data, p.block_scale) if a is not None]
  page_bytes = sum(a.nbytes for a in arrays) // pages_made
  pages = -(-tokens // PAGE_SIZE)
  scales = [p.global_scale for p in (cache.k, cache.v) if p.global_scale is not None]
  return Capacity(
    format=format,
    tokens=tokens,
    bytes_per_token=LAYERS * page_bytes / PAGE_SIZE,
    sequence_bytes=LAYERS * pages * page_bytes,
    table_bytes=4 * pages + LAYERS * sum(a.nbytes for a in scales),
  )


def lines() -> list[str]:
  """The table, for people."""
  out = [
    f"Cache bytes, {LAYERS} layers x {HEADS} KV heads x {HEAD_DIM}, pages of {PAGE_SIZE} tokens, "
    "from the arrays of a cache:",
    f"  {'format':8}{'KiB / token':>12}{'GiB at 131,072 tokens':>24}{'one token more, MiB':>22}"
    f"{'tables, KiB':>14}",
  ]
  for format in ("bf16", "fp8", "nvfp4"):
    c, more = of_format(format), of_format(format, TOKENS + 1)
    out.append(
      f"  {format:8}{c.bytes_per_token / 2**10:12.1f}{c.sequence_bytes / 2**30:24.2f}"
      f"{(more.sequence_bytes - c.sequence_bytes) / 2**20:22.2f}{c.table_bytes / 2**10:14.1f}"
    )
  return out
