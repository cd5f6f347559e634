"""The second program of decode: puts the pieces of each query head together. PTX.

    out = sum_i w_i out_i / sum_i w_i    w_i = 2^(lse_i - max lse)    lse = max lse + log2 sum_i w_i

for the (sequence, head) whose keys were cut (decode_work.py), and zeros and -inf where there are no
keys. What is there in one piece, the main program has stored.

A query head is the work of one warp, or where there are few of all four of a block, and a lane has
head_dim / 32 neighbouring columns.
"""

from __future__ import annotations

import dataclasses

from nvfp4_pallas.kernels.decode_layout import THREADS, WARPS
from nvfp4_pallas.kernels.ptx import Mem, Ptx, Reg
from nvfp4_pallas.kernels.results import NEG_INF, store_result

POINTERS_IN = ("kv_lens", "pieces", "piece_lse", "piece_slots")
POINTERS_OUT = ("out", "lse")
LOWEST = -1e38
AT_ONCE = 4  # pieces that a warp loads without waiting in between


@dataclasses.dataclass(frozen=True)
class Join:
  """What is put together (static).

  Attributes:
    num_seqs, kv_heads, group, head_dim: of the result.
    warps: that share a query head, 1 or 4.
    in_order: slots of a pair's pieces follow each other (batch_invariant).
    out_dtype: bfloat16, float16 or float32.
  """

  num_seqs: int
  kv_heads: int
  group: int
  head_dim: int
  warps: int
  in_order: bool
  out_dtype: str

  @property
  def rows(self) -> int:
    return self.num_seqs * self.kv_heads * self.group

  @property
  def piece_rows(self) -> int:
    """Rows of a piece."""
    return self.group

  @property
  def blocks(self) -> int:
    return -(-self.rows * self.warps // WARPS)

  @property
  def state_bytes(self) -> int:
    """Of a warp: O, maximum and sum."""
    return 4 * (self.head_dim + 4)

  @property
  def smem_bytes(self) -> int:
    return WARPS * self.state_bytes if self.warps > 1 else 0


def join(j: Join) -> Ptx:
  """The program; its pointers are POINTERS_IN and POINTERS_OUT."""
  p = Ptx((*POINTERS_IN, *POINTERS_OUT))
  thread = p.thread
  lane, warp = thread & 31, p.from_lane(thread >> 5, 0)
  if j.warps == 1:
    row, part = p.program * WARPS + warp, p.u32(0)
  else:
    row, part = p.u32(p.program), warp
  row = p.minimum(row, j.rows - 1)  # one too many does the last one's work again
  pair = row // j.group
  head = row - pair * j.group
  seq = pair // j.kv_heads
  (kv_len,) = p.load("global", Mem(p.address(p.pointer("kv_lens"), seq, 4)))
  first, pieces = p.load("global", Mem(p.address(p.pointer("piece_slots"), pair, 8)), 2)
  join_row(p, j, kv_len, first, pieces, row, head, lane, warp, part)
  return p


def join_row(p: Ptx, j: Join, kv_len, first, pieces, row, piece_row, lane, warp, part) -> None:
  """Puts one query head of one token together.

  Args:
    kv_len: of its sequence.
    first, pieces: the slot of its first piece and how many there are.
    row: in out.
    piece_row: in each piece.
    part: which of the j.warps the warp is.
  """
  with p.scope() as scope:
    with p.when(kv_len.eq(0)):
      zeros = [p.f32(0.0) for _ in range(j.head_dim // 32)]
      _store(p, j, row, lane, zeros, p.f32(NEG_INF), part)
    scope.leave_if(kv_len.eq(0))
    scope.leave_if(pieces.eq(1))
    out, top, total = _add_pieces(p, j, first, pieces, piece_row, lane, part)
    if j.warps > 1:
      out, top, total = _add_warps(p, j, warp, lane, out, top, total)
    scale = p.select(total.eq(0.0), 0.0, p.reciprocal(total))
    lse = top + p.log2(total)
    _store(p, j, row, lane, [x * scale for x in out], lse, part)


def _add_pieces(
  p: Ptx, j: Join, first, pieces, piece_row, lane, part
) -> tuple[list[Reg], Reg, Reg]:
  """The warp's share of the pieces: O, maximum and sum."""
  columns = j.head_dim // 32
  out = [p.f32(0.0) for _ in range(columns)]
  top, total, piece = p.f32(NEG_INF), p.f32(0.0), p.u32(part)
  with p.loop() as loop:
    loop.leave_if(piece >= pieces)
    loaded = []
    for i in range(AT_ONCE):
      index = piece + i * j.warps if i else piece
      real = index < pieces
      if not j.in_order:
        index = p.select(index.eq(0), 0, index * 2 - 1)
      at = (first + index) * j.piece_rows + piece_row
      lse, values = p.f32(NEG_INF), [p.f32(0.0) for _ in range(columns)]
      p.load_into([lse], "global", Mem(p.address(p.pointer("piece_lse"), at, 4)), when=real)
      address = p.address(p.pointer("pieces"), at * 32 + lane, 4 * columns)
      for start in range(0, columns, 4):
        target = values[start : start + 4]
        p.load_into(target, "global", Mem(address, 4 * start), when=real)
      loaded.append((lse, values))
    # Pieces in which a row sees no key have lse -inf, and the first ones may all be such.
    new_top = p.maximum(p.max_of([top, *(lse for lse, _ in loaded)]), LOWEST)
    shrink = p.exp2(top - new_top)
    for x in (total, *out):
      p.set(x, x * shrink)
    p.set(top, new_top)
    for lse, values in loaded:
      weight = p.exp2(lse - new_top)
      p.set(total, total + weight)
      for x, value in zip(out, values, strict=True):
        p.set(x, p.fma(weight, value, x))
    p.set(piece, piece + AT_ONCE * j.warps)
  return out, top, total


def _add_warps(p: Ptx, j: Join, warp, lane, out, top, total) -> tuple[list[Reg], Reg, Reg]:
  """The sum over the block's warps. A warp that had no piece weighs nothing."""
  columns = len(out)
  mine = p.smem + warp * j.state_bytes
  for start in range(0, columns, 4):
    at = Mem(mine + lane * (4 * columns), 16 + 4 * start)
    p.store("shared", at, out[start : start + 4])
  p.store("shared", Mem(mine), [top, total])
  p.sync(THREADS)
  states = [p.load("shared", Mem(p.smem, w * j.state_bytes), 2, kind="f") for w in range(WARPS)]
  new_top = p.maximum(p.max_of([maximum for maximum, _ in states]), LOWEST)
  new_total, new_out = p.f32(0.0), [p.f32(0.0) for _ in range(columns)]
  for w, (maximum, of_warp) in enumerate(states):
    weight = p.exp2(maximum - new_top)
    p.set(new_total, p.fma(weight, of_warp, new_total))
    values = []
    for start in range(0, columns, 4):
      at = Mem(p.smem + lane * (4 * columns), w * j.state_bytes + 16 + 4 * start)
      values += p.load("shared", at, min(4, columns), kind="f")
    for x, value in zip(new_out, values, strict=True):
      p.set(x, p.fma(weight, value, x))
  return new_out, new_top, new_total


def _store(p: Ptx, j: Join, row, lane, values: list[Reg], lse: Reg, part: Reg) -> None:
  column = lane * len(values)
  store_result(p, j.out_dtype, j.head_dim, row, column, values, lse, part.eq(0))
