"""A step of few tokens over a cache with a recent window, in one launch. PTX.

A block has one head of K, or of V, of one sequence. With a ring (nvfp4_pallas/recent.py):

    1. tokens that leave the window go from the ring to their pages, encoded
    2. its threads meet
    3. the step's rows go to the ring, some of them to where tokens were that left

Without one, the step's rows are encoded to their pages at once. Most blocks have nothing to encode:
a step of one token a sequence fills a page in every page_size-th sequence.

No sequence may have more rows than the window: then all of them stay in the ring.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from nvfp4_pallas.kernels.append_ptx import BF16_BYTES, Rows, Tuning, Writer
from nvfp4_pallas.kernels.ptx import Mem, Ptx, Reg

THREADS = 256
PIECE = 8  # values that are copied at once


@dataclasses.dataclass(frozen=True)
class Step:
  """What is appended to what (static).

  Attributes:
    tokens: of the window.
    num_rings, of_ring: rings, and pages of each.
    num_seqs, max_pages: of the page table.
    by_number: sequence s has ring s, and there are no ring_ids.
  """

  tokens: int
  num_rings: int
  of_ring: int
  num_seqs: int
  max_pages: int
  by_number: bool = False

  @property
  def pointers(self) -> tuple[str, ...]:
    ids = () if self.by_number else ("ring_ids",)
    return ("kv_lens", "cu_q_lens", *ids, "starts", "table", "start")


def append_program(k: Rows, v: Rows, step: Step) -> tuple[Ptx, int]:
  """The program and the number of its blocks of THREADS."""
  p = Ptx((*k.pointers("k"), "k_ring", *v.pointers("v"), "v_ring", *step.pointers))
  heads, thread = k.num_heads, p.thread  # before all branches
  seq, rest = p.program // (2 * heads), p.program % (2 * heads)
  head = rest % heads
  of_k = rest < heads
  spans = _Spans(p, step, k.page_size, seq)
  p.store(
    "global",
    Mem(p.address(p.pointer("start"), seq, 4)),
    [spans.start],
    when=rest.eq(0) & thread.eq(0),
  )
  for name, rows in (("k", k), ("v", v)):
    with p.when(of_k, unless=name == "v"):
      _Head(p, name, rows, step, spans, seq, head, thread).write()
  return p, step.num_seqs * 2 * heads


class _Spans:
  """What of a sequence is where, and goes where; registers, the same for the block's threads.

  Attributes:
    first_row: of the step's.
    end, kv_len: tokens before the step, and after it.
    has_ring, ring: whether it has one, and which.
    old, stop: the tokens old .. stop - 1 leave the ring.
    start: the first token that is not in the pages, after the step.
  """

  def __init__(self, p: Ptx, step: Step, page_size: int, seq: Reg):
    def number(name: str, index: Reg) -> Reg:
      return p.load("global.nc", Mem(p.address(p.pointer(name), index, 4)))[0]

    self.kv_len = number("kv_lens", seq)
    ring = seq if step.by_number else number("ring_ids", seq)
    self.first_row, after = number("cu_q_lens", seq), number("cu_q_lens", seq + 1)
    q_len = after - self.first_row
    self.end = p.select(self.kv_len > q_len, self.kv_len - q_len, 0)
    self.has_ring = ring < step.num_rings  # unsigned: negative numbers are none either
    self.ring = p.minimum(ring, step.num_rings - 1)
    self.old = p.minimum(number("starts", self.ring), self.end)
    outside = p.select(self.kv_len > step.tokens, self.kv_len - step.tokens, 0)
    start = p.maximum(self.old, outside // page_size * page_size)
    self.stop = p.minimum(start, self.end)
    self.start = p.select(self.has_ring, start, self.kv_len)


class _Head(Writer):
  """Writes a head of K or of V of a sequence."""

  def __init__(self, p: Ptx, name: str, rows: Rows, step: Step, spans: _Spans, seq, head, thread):
    # The ring is written by this launch, so that it must not be read through the read-only cache.
    super().__init__(p, name, rows, Tuning(heads=1, threads=THREADS, load="global"))
    self._step, self._spans, self._seq, self._head = step, spans, seq, head
    self._thread = thread

  def write(self) -> None:
    p, spans = self._p, self._spans
    with p.when(spans.has_ring):
      self._encode_tokens(spans.old, spans.stop, self._in_ring)
      p.sync(THREADS)
      self._copy_rows()
    with p.when(spans.has_ring, unless=True):
      self._encode_tokens(spans.end, spans.kv_len, self._in_rows)

  def _encode_tokens(self, begin: Reg, end: Reg, source: Callable[[Reg], Reg]) -> None:
    p, rows, step = self._p, self._rows, self._step
    count = p.select(end > begin, end - begin, 0) * rows.parts
    for item, there in self._items(count):
      token, part = begin + item // rows.parts, item % rows.parts
      entry = token // rows.page_size
      inside = p.minimum(entry, step.max_pages - 1)
      row = p.address(p.pointer("table"), self._seq * step.max_pages + inside, 4)
      (page,) = p.load("global.nc", Mem(row))
      # As an unsigned number, a negative page is past all pages.
      there = there & (entry < step.max_pages) & (page < rows.num_pages)
      place = p.mad(page, rows.num_heads, self._head) * rows.page_size + token % rows.page_size
      at = p.mad(source(token), rows.parts, part)
      self._encode(at, self._head, p.mad(place, rows.parts, part), there)

  def _in_rows(self, token: Reg) -> Reg:
    """The head's row of a token of the step."""
    self._source = f"{self._name}_rows"
    row = token - self._spans.end + self._spans.first_row
    return self._p.mad(row, self._rows.num_heads, self._head)

  def _in_ring(self, token: Reg) -> Reg:
    """The head's row of a token in the ring."""
    self._source = f"{self._name}_ring"
    rows, step = self._rows, self._step
    page = self._p.mad(self._spans.ring, step.of_ring, token // rows.page_size % step.of_ring)
    slab = self._p.mad(page, rows.num_heads, self._head)
    return slab * rows.page_size + token % rows.page_size

  def _copy_rows(self) -> None:
    """The step's rows to the ring."""
    p, spans, pieces = self._p, self._spans, self._rows.head_dim // PIECE
    for item, there in self._items((spans.kv_len - spans.end) * pieces):
      token, piece = spans.end + item // pieces, item % pieces
      at = p.mad(self._in_rows(token), pieces, piece)
      source = p.address(p.pointer(f"{self._name}_rows"), at, PIECE * BF16_BYTES)
      words = p.load("global.nc", Mem(source), 4)
      at = p.mad(self._in_ring(token), pieces, piece)
      target = p.address(p.pointer(f"{self._name}_ring"), at, PIECE * BF16_BYTES)
      p.store("global", Mem(target), words, when=there)

  def _items(self, count: Reg) -> Iterator[tuple[Reg, Reg]]:
    """The thread's numbers below `count`, one after the other; those past it repeat the last."""
    p = self._p
    done = p.u32(0)
    with p.loop() as loop:
      loop.leave_if(done >= count)
      item = done + self._thread
      yield p.minimum(item, count - 1), item < count
      p.set(done, done + THREADS)
