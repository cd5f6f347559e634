"""Attention of many queries over NVFP4 pages, widened by each block for all its rows. PTX.

Whole query tiles (whole_attend.py); one warpgroup widens K and one V (wide_producer.py), or one
both, into the slots of shared memory. No workspace.
"""

from __future__ import annotations

from nvfp4_pallas.kernels import wide_producer
from nvfp4_pallas.kernels.item_walk import ItemWalk
from nvfp4_pallas.kernels.ptx import Ptx
from nvfp4_pallas.kernels.whole_attend import CONSUMERS, Block
from nvfp4_pallas.kernels.wide_layout import WARPS, Fused
from nvfp4_pallas.kernels.wide_producer import Producer

# Registers of a thread that attends and of one that widens, for one and for two warpgroups that
# widen: 384 threads have 65536 registers for 504 of one of each warpgroup, 512 for 512.
REGISTERS = {1: (216, 72), 2: (200, 56)}
assert all(CONSUMERS * a + n * w <= {1: 504, 2: 512}[n] for n, (a, w) in REGISTERS.items())

POINTERS_IN = (
  "q", "table", "kv_lens", "cu_q_lens", "k_global", "v_global", "k", "k_scale", "v", "v_scale",
  "counter",
)  # fmt: skip


def attend(fused: Fused, blocks: int) -> Ptx:
  """The program; its pointers are POINTERS_IN and whole_attend.POINTERS_OUT."""
  widening = fused.widening
  block = Block(POINTERS_IN, fused, blocks, others=widening, readers=widening * WARPS)
  p = block.p
  wide_producer.make_barriers(p, fused.rings, block.smem, block.maker)
  block.begin()
  registers_to_attend, registers_to_widen = REGISTERS[widening]
  for index in range(widening):
    with p.when(p.role.eq(CONSUMERS + index)):
      p.emit("setmaxnreg.dec.sync.aligned.u32", registers_to_widen)
      _widen(block, fused, index)
  block.attend(registers_to_attend)
  return p


def _widen(block: Block, fused: Fused, index: int) -> None:
  p, warp, lane = block.p, block.warp, block.lane
  producer = Producer(p, fused, fused.kv_heads, block.smem, warp, lane, index)
  feed, work = block.item_feed(), ItemWalk(p, fused, lane)
  with p.loop() as items:
    if index == 0:
      with p.when(warp.eq(0)):
        feed.tell()
    work.find(feed.next(), items)
    producer.begin(work)
    if index == 0:
      with p.when(warp.eq(0)):
        feed.ask()
        block.bring_q_near(work)
    producer.segment()
  if index == 0:
    block.clear_padding()
