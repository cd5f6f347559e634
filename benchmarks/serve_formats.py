"""Cache formats of a serving run: what they are read by, and how many pages of them fit into bytes.

Each is compared in the same bytes of memory. Bytes of a page follow from the formats alone, without
a cache: K or V takes 2, 1 or 9/16 bytes a value in bf16, fp8 and nvfp4, one scale for 16 values
included.
"""

from __future__ import annotations

import dataclasses

SIXTEENTHS = {"bf16": 32, "fp8": 16, "nvfp4": 9}  # of a byte, a value


@dataclasses.dataclass(frozen=True)
class Format:
  """A cache, and who reads it.

  Attributes:
    name: of the row.
    k_format, v_format: of the cache.
    prefill_paths: read paths of prefill; of several the fastest for a shape is taken, as
      `policy.choose_read_path` would.
    decode_path: of decode.
  """

  name: str
  k_format: str
  v_format: str
  prefill_paths: tuple[str, ...]
  decode_path: str

  @property
  def sixteenths(self) -> int:
    """Of a byte, that a value of K and one of V take together."""
    return SIXTEENTHS[self.k_format] + SIXTEENTHS[self.v_format]


def _nvfp4(name: str, *paths: str) -> Format:
  # A8Q and A4Q are paths of prefill on Hopper: what they leave in the cache, decode widens.
  return Format(name, "nvfp4", "nvfp4", paths, "nvfp4_dequant")


FORMATS = {
  format.name: format
  for format in (
    Format("bf16", "bf16", "bf16", ("bf16",), "bf16"),
    Format("fp8", "fp8", "fp8", ("fp8",), "fp8"),
    Format("fp8_nvfp4", "fp8", "nvfp4", ("nvfp4_dequant",), "nvfp4_dequant"),
    _nvfp4("nvfp4", "nvfp4_dequant", "nvfp4_repack"),
    _nvfp4("nvfp4_dequant", "nvfp4_dequant"),
    _nvfp4("nvfp4_repack", "nvfp4_repack"),
    _nvfp4("nvfp4_a8q", "nvfp4_a8q"),
    _nvfp4("nvfp4_a4q", "nvfp4_a4q"),
  )
}
BASELINE = FORMATS["fp8"]


@dataclasses.dataclass(frozen=True)
class Heads:
  """What a model has a cache for.

  Attributes:
    layers: with a cache each.
    num_q_heads, num_kv_heads, head_dim: of a layer.
  """

  layers: int
  num_q_heads: int
  num_kv_heads: int
  head_dim: int

  def __post_init__(self):
    for field in dataclasses.fields(self):
      if getattr(self, field.name) < 1:
        raise ValueError(f"{field.name} must be at least 1, got {getattr(self, field.name)}")
    if self.head_dim % 16:
      raise ValueError(f"head_dim must be a multiple of 16, got {self.head_dim}")

  def token_bytes(self, format: Format) -> int:
    """Of K and V of one token in all layers."""
    values = self.layers * self.num_kv_heads * self.head_dim
    return values * format.sixteenths // 16

  def ring_bytes(self, window: int, page_size: int) -> int:
    """Of one sequence's recent window, in bf16 and all layers, and the page that is leaving it."""
    tokens = (-(-window // page_size) + 1) * page_size
    return tokens * self.token_bytes(FORMATS["bf16"])


def num_pages(
  pool_bytes: int,
  heads: Heads,
  format: Format,
  page_size: int,
  *,
  recent_window: int = 0,
  num_rings: int = 0,
) -> int:
  """Whole pages of a pool of so many bytes.

  Args:
    recent_window: tokens that stay bf16 in a ring, of formats with nvfp4 in them.
    num_rings: sequences that have one; their bytes are taken off the pool.

  Raises:
    ValueError: not one page fits (message: both sizes).
  """
  if recent_window and "nvfp4" in (format.k_format, format.v_format):
    pool_bytes -= num_rings * heads.ring_bytes(recent_window, page_size)
  page_bytes = page_size * heads.token_bytes(format)
  if pool_bytes < page_bytes:
    raise ValueError(
      f"pool_bytes must hold at least a page of {page_bytes:,} bytes of {format.name}, "
      f"got {pool_bytes:,}"
    )
  return pool_bytes // page_bytes
