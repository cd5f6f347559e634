"""K or V of some keys as wgmma multiplies them: a wide tile.

Rows are keys, of 128 bytes in each of its parts (wgmma.py). What a cache's format becomes:

    cache    operand   value                      order of columns
    bf16     bf16      as it is                   as they are
    fp8      f16       as it is, exact            as they are
    nvfp4    f16       code * scale * 2^-14       as codes come out of their words
    nvfp4    e4m3      e4m3(code * scale / s_k)   likewise: K of A8Q (read_paths.py)
"""

from __future__ import annotations

import dataclasses

from nvfp4_pallas.kernels import wgmma
from nvfp4_pallas.kernels.mma_fragments import fragments


@dataclasses.dataclass(frozen=True)
class Tiles:
  """Of K or of V (static).

  Attributes:
    format: of the cache.
    head_dim: 64, 128 or 256.
    keys: of a tile.
    as_e4m3: NVFP4 as E4M3.
  """

  format: str
  head_dim: int
  keys: int
  as_e4m3: bool = False

  @property
  def operand(self) -> str:
    return "e4m3" if self.as_e4m3 else self._fragments.operand

  @property
  def value_bytes(self) -> int:
    return 1 if self.as_e4m3 else 2

  @property
  def unit(self) -> float:
    """Values are those of the operand times this."""
    return 1.0 if self.as_e4m3 else self._fragments.unit

  @property
  def has_global_scale(self) -> bool:
    return self._fragments.has_global_scale

  @property
  def order(self) -> list[tuple[int, int]]:
    """The pairs of columns in the order in which a tile has them."""
    return self._fragments.word_pairs()

  @property
  def _fragments(self):
    return fragments(self.format, self.head_dim)

  @property
  def row_bytes(self) -> int:
    """Of a key."""
    return self.head_dim * self.value_bytes

  @property
  def parts(self) -> int:
    return -(-self.row_bytes // wgmma.ROW)

  @property
  def steps(self) -> list[tuple[int, int]]:
    """Part and byte in its rows of what a product takes at a time."""
    return [divmod(at, wgmma.ROW) for at in range(0, self.row_bytes, wgmma.STEP)]

  @property
  def part(self) -> int:
    """Bytes of a tile's part."""
    return self.keys * wgmma.ROW

  @property
  def nbytes(self) -> int:
    return self.parts * self.part
