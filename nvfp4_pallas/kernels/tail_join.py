"""The second program for short queries: puts the pieces of each row together. PTX.

As decode_join.py does, with two differences: a piece holds the rows of a query tile, and which
tokens have keys at all is found in cu_q_lens and kv_lens.
"""

from __future__ import annotations

import dataclasses

from nvfp4_pallas.kernels import decode_join
from nvfp4_pallas.kernels.decode_layout import WARPS
from nvfp4_pallas.kernels.ptx import Mem, Ptx, Reg

POINTERS_IN = ("kv_lens", "cu_q_lens", "pieces", "piece_lse", "piece_slots")
POINTERS_OUT = decode_join.POINTERS_OUT
LANES = 32


@dataclasses.dataclass(frozen=True)
class TailJoin(decode_join.Join):
  """Join with `num_seqs` sequences of `tokens` in all.

  Attributes:
    tokens: rows of q, padding included.
    tile_rows: of a piece.
  """

  tokens: int
  tile_rows: int

  @property
  def rows(self) -> int:
    return self.tokens * self.kv_heads * self.group

  @property
  def piece_rows(self) -> int:
    return self.tile_rows


def join(j: TailJoin) -> Ptx:
  """The program; its pointers are POINTERS_IN and POINTERS_OUT."""
  p = Ptx((*POINTERS_IN, *POINTERS_OUT))
  thread = p.thread
  lane, warp = thread & 31, p.from_lane(thread >> 5, 0)
  row = p.program * WARPS + warp if j.warps == 1 else p.u32(p.program)
  part = p.u32(0) if j.warps == 1 else warp
  row = p.minimum(row, j.rows - 1)  # one too many does the last one's work again
  kv_row = row // j.group
  token = kv_row // j.kv_heads
  info = p.load("global", Mem(p.address(p.pointer("piece_slots"), kv_row, 16)), 4)
  first, pieces, first_row, _ = info
  head = row - kv_row * j.group
  seq = _sequence(p, j, token, lane)
  kv_len = p.u32(0)
  at = p.address(p.pointer("kv_lens"), seq, 4)
  p.load_into([kv_len], "global", Mem(at), when=seq < j.num_seqs)
  decode_join.join_row(p, j, kv_len, first, pieces, row, first_row + head, lane, warp, part)
  return p


def _sequence(p: Ptx, j: TailJoin, token: Reg, lane: Reg) -> Reg:
  """Of a token; num_seqs for padding. It is the number of sequences that end before it."""
  seq, start = p.u32(0), p.u32(0)
  with p.loop() as loop:
    index = start + lane
    real = index < j.num_seqs
    end = p.u32(0)
    at = p.address(p.pointer("cu_q_lens"), index, 4)
    p.load_into([end], "global", Mem(at, 4), when=real)
    p.set(seq, seq + p.count_lanes(real & (end <= token)))
    p.set(start, start + LANES)
    loop.leave_if(start >= j.num_seqs)
  return seq
