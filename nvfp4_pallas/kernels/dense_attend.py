"""Attention of many queries over wide tiles in device memory (dense_widen.py). PTX.

A block is two warpgroups that attend (wide_consumer.py), each with 64 rows of a query tile of 128,
and one of which a warp copies wide tiles into the slots of shared memory, whole, for both. Blocks
stay and go from query tile to query tile (item_walk.py), and copies of the next one start while the
last one's results are stored. While one warpgroup makes P, the other's products run.
"""

from __future__ import annotations

from nvfp4_pallas.kernels import copies, wgmma, wide_slots
from nvfp4_pallas.kernels.item_walk import ItemWalk
from nvfp4_pallas.kernels.ptx import Mem, Ptx, Reg
from nvfp4_pallas.kernels.results import NEG_INF
from nvfp4_pallas.kernels.wide_consumer import Consumer
from nvfp4_pallas.kernels.wide_layout import HEAD_DIM, ROWS, THREADS, Dense
from nvfp4_pallas.kernels.wide_slots import Slots

CONSUMERS = 2
QUERY_ROWS = CONSUMERS * ROWS
# Registers of a thread: 504 for one of each warpgroup, as 384 threads have 65536.
REGISTERS = {"attend": 240, "copy": 24}

POINTERS_IN = ("q", "kv_lens", "cu_q_lens", "k_global", "v_global", "wide")
POINTERS_OUT = ("out", "lse")


def attend(dense: Dense, blocks: int) -> Ptx:
  """The program of both roles; its pointers are POINTERS_IN and POINTERS_OUT."""
  p = Ptx((*POINTERS_IN, *POINTERS_OUT), roles=CONSUMERS + 1)
  smem = (p.smem + (wgmma.ALIGNMENT - 1)) & ~(wgmma.ALIGNMENT - 1) % 2**32
  warp, lane = p.from_lane(p.thread >> 5, 0), p.thread & 31
  wide_slots.make_barriers(p, dense, smem, p.role.eq(0) & p.thread.eq(0))
  p.emit("bar.sync", CONSUMERS + 1, (CONSUMERS + 1) * THREADS)

  def walk() -> ItemWalk:
    return ItemWalk(
      p,
      blocks=blocks,
      num_seqs=dense.num_seqs,
      kv_heads=dense.kv_heads,
      width=dense.width,
      group=dense.group,
      causal=dense.causal,
      window=dense.window,
      tile=dense.tile,
    )

  with p.when(p.role.eq(CONSUMERS)):
    p.emit("setmaxnreg.dec.sync.aligned.u32", REGISTERS["copy"])
    with p.when(warp.eq(0)):
      _copy(p, dense, smem, lane.eq(0), walk())
  with p.when(p.role < CONSUMERS):
    p.emit("setmaxnreg.inc.sync.aligned.u32", REGISTERS["attend"])
    consumer = Consumer(p, dense, smem, warp, lane, index=p.role, pieces=False)
    work = walk()
    with p.loop() as items:
      work.find(items)
      consumer.segment(work)
      p.sync(THREADS)  # q of this one has been read
    _clear_padding(p, dense, blocks)
  return p


def _clear_padding(p: Ptx, dense: Dense, blocks: int) -> None:
  """Rows of q past the last sequence: out 0 and lse -inf."""
  heads = dense.kv_heads * dense.group
  pieces = heads * HEAD_DIM * (4 if dense.out_dtype == "float32" else 2) // 16
  thread, threads = p.thread + p.role * THREADS, CONSUMERS * THREADS
  at = p.address(p.pointer("cu_q_lens"), p.u32(dense.num_seqs), 4)
  (end,) = p.load("global.nc", Mem(at))
  token = p.u32(end + p.program)
  zero, nothing = p.u32(0), p.f32(NEG_INF)
  with p.loop() as tokens:
    tokens.leave_if(token >= dense.tokens)
    row = p.address(p.pointer("out"), token, 16 * pieces)
    for start in range(0, pieces, threads):
      piece = thread + start
      p.store("global", Mem(p.address(row, piece, 16)), [zero] * 4, when=piece < pieces)
    row = p.address(p.pointer("lse"), token, 4 * heads)
    for start in range(0, heads, threads):
      head = thread + start
      p.store("global", Mem(p.address(row, head, 4)), [nothing], when=head < heads)
    p.set(token, token + blocks)


def _copy(p: Ptx, dense: Dense, smem: Reg, first_lane: Reg, work: ItemWalk) -> None:
  keys, values = (Slots(p, dense, smem, pool) for pool in range(2))
  policy = copies.evict_last(p)
  with p.loop() as items:
    work.find(items)
    first = p.mad(work.seq, dense.kv_heads, work.head) * dense.max_tiles + work.first_tile
    done = p.u32(0)
    with p.loop() as tiles:
      for pool, slots in enumerate((keys, values)):
        source = p.address(p.pointer("wide"), (first + done) * 2 + pool, dense.slot)
        slots.wait_empty()
        slots.copy(source, policy, first_lane)
      p.set(done, done + 1)
      tiles.leave_if(done >= work.count)
