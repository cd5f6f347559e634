"""The PTX of append_mosaic_sm90.py: bfloat16 rows into pages, parts of rows a thread.

Threads side by side hold the parts of a row, then the same head of the next SIDE_BY_SIDE tokens:
tokens of a prompt have slots side by side, so that their rows, and the few bytes of their block
scales, fill whole sectors of memory. Where there are many tokens, a thread has the same part of
some heads next to each other: it finds the slot once, and loads all parts before it encodes one.
Programs take K first, then V.

Rows can also come from bf16 pages (the ring of a recent window): token t is then row t % page_size
of page t // page_size. Few of them have a slot, so warps look before they load.
"""

from __future__ import annotations

import dataclasses

from nvfp4_pallas import format as nvfp4
from nvfp4_pallas.kernels import common, encode_ptx, search_ptx
from nvfp4_pallas.kernels.ptx import Mem, Ptx, Reg

_ENCODE = {"amax": encode_ptx.encode_block, "four_over_six": search_ptx.encode_block}
THREADS = 128
SIDE_BY_SIDE = 4
BF16_BYTES = 2
VECTOR_WORDS = 4  # of the widest load and store
LOAD_BYTES = 64  # of a thread, on their way at once, where there are many
MANY_PARTS = 2**18  # of K or of V: as many as an H200 has places for threads


@dataclasses.dataclass(frozen=True)
class Rows:
  """Where the rows of K or V go, and how they are rounded. As in the pool."""

  format: str
  num_heads: int
  head_dim: int
  num_pages: int
  page_size: int
  scale_search: str = "amax"

  @property
  def part(self) -> int:
    """Values of a thread: a scale block, or what one 16-byte store takes."""
    return 8 if self.format == "bf16" else nvfp4.SCALE_BLOCK

  @property
  def parts(self) -> int:
    return self.head_dim // self.part

  @property
  def places(self) -> int:
    """Parts in all pages."""
    return self.num_pages * self.num_heads * self.page_size * self.parts

  def pointers(self, name: str) -> tuple[str, ...]:
    """Names of the arrays: new rows, pages, and as the format has them block and global scales."""
    more = {"nvfp4": ("block_scale", "global_scale"), "fp8": ("global_scale",), "bf16": ()}
    return tuple(f"{name}_{array}" for array in ("rows", "data", *more[self.format]))


@dataclasses.dataclass(frozen=True)
class Tuning:
  """What changes how fast it is only.

  Attributes:
    heads: of a thread, at most: 1, 2 or 4; by default as `heads_of_thread` says.
    threads: of a block.
    load, store: the spaces, with hints, of rows and of pages.
  """

  heads: int | None = None
  threads: int = THREADS
  load: str = "global.nc"
  store: str = "global"


DEFAULT = Tuning()


def supports(rows: Rows) -> bool:
  """Whether places can be counted in 32 bits."""
  return rows.places <= 2**32


def heads_of_thread(rows: Rows, tokens: int) -> int:
  """At most. Few tokens do not fill the GPU: then every part has its own thread."""
  many = tokens * rows.num_heads * rows.parts >= MANY_PARTS
  return LOAD_BYTES // (rows.part * BF16_BYTES) if many else 1


def append_program(
  k: Rows, v: Rows, tokens: int, tuning: Tuning = DEFAULT, *, from_pages: bool = False
) -> tuple[Ptx, int]:
  """The program and the number of its blocks; its last array is the slots."""
  p = Ptx((*k.pointers("k"), *v.pointers("v"), "slots"))
  k_writer, v_writer = (
    _TokenWriter(p, name, rows, tokens, tuning, from_pages) for name, rows in (("k", k), ("v", v))
  )
  thread = p.thread
  of_k = p.program < k_writer.programs
  with p.when(of_k):
    k_writer.write(p.program * tuning.threads + thread)
  with p.when(of_k, unless=True):
    v_writer.write((p.program - k_writer.programs) * tuning.threads + thread)
  return p, k_writer.programs + v_writer.programs


class Writer:
  """Encodes and stores parts of rows of K or V."""

  def __init__(self, p: Ptx, name: str, rows: Rows, tuning: Tuning, run: int = 1):
    """`run`: tokens that lie side by side in a head's rows."""
    self._p, self._name, self._rows, self._tuning = p, name, rows, tuning
    self._source = f"{name}_rows"  # the array of bf16 rows
    self._run = run
    self._heads = common.power_of_two_divisor(rows.num_heads, tuning.heads or 1)

  def _encode(self, source: Reg, head: Reg, place: Reg, there: Reg) -> None:
    p, rows, heads = self._p, self._rows, self._heads
    words = self._load(source)
    if rows.format == "bf16":
      self._store("data", words, 4, place, there)
      return
    at = p.address(p.pointer(f"{self._name}_global_scale"), head, 4)
    global_scales = p.load("global.nc", Mem(at), heads, kind="f")
    if rows.format == "fp8":
      data = [encode_ptx.encode_fp8(p, *each) for each in zip(words, global_scales, strict=True)]
      self._store("data", data, 4, place, there)
      return
    encode = _ENCODE[rows.scale_search]
    encoded = [encode(p, *each) for each in zip(words, global_scales, strict=True)]
    self._store("data", [codes for codes, _ in encoded], 4, place, there)
    self._store("block_scale", [[scale] for _, scale in encoded], 1, place, there)

  def _load(self, part: Reg) -> list[list[Reg]]:
    """The words of a part, counted from the first row's, and of the same one of further heads."""
    p, part_bytes = self._p, self._rows.part * BF16_BYTES
    head_bytes = self._run * self._rows.parts * part_bytes
    x = p.address(p.pointer(self._source), part, part_bytes)
    return [
      [
        word
        for offset in range(0, part_bytes, 4 * VECTOR_WORDS)
        for word in p.load(self._tuning.load, Mem(x, head * head_bytes + offset), VECTOR_WORDS)
      ]
      for head in range(self._heads)
    ]

  def _store(self, array: str, values: list[list[Reg]], size: int, place: Reg, there: Reg) -> None:
    """A vector of values of `size` bytes for each of the thread's heads.

    `place`: the first one's, counted from the start of the array.
    """
    p, rows = self._p, self._rows
    nbytes = len(values[0]) * size
    at = p.address(p.pointer(f"{self._name}_{array}"), place, nbytes)
    for i, vector in enumerate(values):
      head = Mem(at, i * rows.page_size * rows.parts * nbytes)
      p.store(self._tuning.store, head, vector, size, when=there)


class _TokenWriter(Writer):
  """Writes rows by their slots; `programs` blocks do."""

  def __init__(self, p: Ptx, name: str, rows: Rows, tokens: int, tuning: Tuning, from_pages: bool):
    heads = tuning.heads or heads_of_thread(rows, tokens)
    tuning = dataclasses.replace(tuning, heads=heads)
    super().__init__(p, name, rows, tuning, rows.page_size if from_pages else 1)
    self._tokens, self._from_pages = tokens, from_pages
    self._side_by_side = min(SIDE_BY_SIDE, tokens)
    tokens_there = -(-tokens // self._side_by_side) * self._side_by_side
    items = tokens_there * (rows.num_heads // self._heads) * rows.parts
    self.programs = -(-items // tuning.threads)

  def write(self, item: Reg) -> None:
    """Encodes and stores a part of some heads, or nothing where the token has no slot."""
    p, rows, heads = self._p, self._rows, self._heads
    part, row = item % rows.parts, item // rows.parts
    neighbour, row = row % self._side_by_side, row // self._side_by_side
    head, group = row % (rows.num_heads // heads) * heads, row // (rows.num_heads // heads)
    token = group * self._side_by_side + neighbour
    there, token = token < self._tokens, p.minimum(token, self._tokens - 1)

    slot = p.load("global.nc", Mem(p.address(p.pointer("slots"), token, 4)))[0]
    # As an unsigned number, a negative slot is past all slots.
    there = there & (slot < min(rows.num_pages * rows.page_size, 2**31))
    slab = slot // rows.page_size * rows.num_heads + head
    place = (slab * rows.page_size + slot % rows.page_size) * rows.parts + part
    run = token // self._run * rows.num_heads + head
    source = (run * self._run + token % self._run) * rows.parts + part
    if self._from_pages:
      with p.when(p.any_lane(there)):
        self._encode(source, head, place, there)
    else:
      self._encode(source, head, place, there)
