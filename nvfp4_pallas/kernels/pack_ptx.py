"""The PTX of pack_mosaic_sm90.py: bfloat16 to NVFP4 and back, a block or half of one at a time.

Arrays are taken as they lie in memory, without regard to rows. A thread loads all of its STEPS
pieces before it works on the first: that many loads must be on their way. Pieces to pack are whole
blocks, whose largest magnitude and whose pairs of codes then never leave the thread; pieces to
unpack are half blocks, so that the 16 bytes that each thread of a warp stores lie side by side.
"""

from __future__ import annotations

import dataclasses

from nvfp4_pallas.kernels import encode_ptx, unpack_ptx
from nvfp4_pallas.kernels.ptx import Mem, Ptx, Reg

THREADS = 128
STEPS = 2
VECTOR_WORDS = 4  # of the widest load and store


@dataclasses.dataclass(frozen=True)
class Blocks:
  """The scale blocks of an array.

  Attributes:
    rows: rows, each with one global scale.
    of_row: blocks of a row.
    scales: how many global scales there are; rows take them in turn.
  """

  rows: int
  of_row: int
  scales: int


def pack_program(blocks: Blocks) -> tuple[Ptx, int]:
  """The program and the number of its thread blocks."""
  p = Ptx(("x", "global_scale", "codes", "block_scale"))
  pieces = _Pieces(p, blocks)
  words, global_scales = pieces.load("x", 8), pieces.load_global_scales()
  encoded = [encode_ptx.encode_block(p, *each) for each in zip(words, global_scales, strict=True)]
  pieces.store("codes", [codes for codes, _ in encoded])
  pieces.store("block_scale", [[scale] for _, scale in encoded], size=1)
  return p, pieces.programs


def unpack_program(
  blocks: Blocks, load: str = "global.nc", store: str = "global"
) -> tuple[Ptx, int]:
  """The program and the number of its thread blocks.

  `load` and `store` are the spaces, with hints, of codes and values.
  """
  p = Ptx(("codes", "block_scale", "global_scale", "x"))
  pieces = _Pieces(p, blocks, lanes=2)
  codes = pieces.load("codes", 1, space=load)
  scales = pieces.load("block_scale", 1, size=1, of_block=True)
  global_scales = pieces.load_global_scales()
  decoded = [
    unpack_ptx.decode_word(p, code, scale, global_scale)
    for (code,), (scale,), global_scale in zip(codes, scales, global_scales, strict=True)
  ]
  pieces.store("x", decoded, space=store)
  return p, pieces.programs


class _Pieces:
  """What a thread takes of the arrays: STEPS pieces, and between them those of other threads.

  Attributes:
    programs: thread blocks.
  """

  def __init__(self, p: Ptx, blocks: Blocks, lanes: int = 1):
    """`lanes`: pieces of a block."""
    self._p, self._blocks, self._lanes = p, blocks, lanes
    self._thread = p.thread
    full, rest = divmod(blocks.rows * blocks.of_row * lanes, THREADS * STEPS)
    self.programs = full + (rest > 0)
    self._there: list[Reg | None] = [None] * STEPS
    if rest:
      self._there = [
        (p.program < full) | (self._thread < max(rest - i * THREADS, 0)) for i in range(STEPS)
      ]

  def load(
    self, name: str, count: int, size: int = 4, of_block: bool = False, space: str = "global.nc"
  ) -> list[list[Reg]]:
    """`count` values of `size` bytes, for each piece, or for the block that it belongs to."""
    places = self._places(name, count * size, self._lanes if of_block else 1)
    return [
      [
        value
        for i in range(0, count, VECTOR_WORDS)
        for value in self._p.load(
          space, Mem(at.base, at.offset + i * size), min(count, VECTOR_WORDS), size, when=there
        )
      ]
      for at, there in zip(places, self._there, strict=True)
    ]

  def store(self, name: str, values: list[list[Reg]], size: int = 4, space: str = "global") -> None:
    """One vector of each piece."""
    places = self._places(name, len(values[0]) * size)
    for at, piece, there in zip(places, values, self._there, strict=True):
      self._p.store(space, at, piece, size, when=there)

  def load_global_scales(self) -> list[Reg]:
    """The global scale of each piece."""
    p, blocks = self._p, self._blocks
    pointer, step = p.pointer("global_scale"), THREADS // self._lanes  # in blocks
    first = p.program * (step * STEPS) + self._thread // self._lanes
    scales: list[Reg] = []
    for i in range(STEPS):
      if i and (blocks.scales == 1 or step % (blocks.of_row * blocks.scales) == 0):
        scales.append(scales[0])
        continue
      at = pointer
      if blocks.scales > 1:
        row = (first + i * step) // blocks.of_row
        at = p.address(pointer, row % blocks.scales, 4)
      scales += p.load("global.nc", Mem(at), kind="f")
    return scales

  def _places(self, name: str, piece_bytes: int, lanes: int = 1) -> list[Mem]:
    """Where the pieces of an array are that has one for so many lanes."""
    step = THREADS // lanes * piece_bytes
    at = self._p.address(self._p.pointer(name), self._p.program, step * STEPS)
    at = self._p.address(at, self._thread // lanes, piece_bytes)
    return [Mem(at, i * step) for i in range(STEPS)]
