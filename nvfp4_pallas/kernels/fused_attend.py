"""Attention of many queries over NVFP4 pages, widened by each block for all its rows. PTX.

Whole query tiles (whole_attend.py); a warpgroup widens K and V (wide_producer.py) into the slots of
shared memory. No workspace.
"""

from __future__ import annotations

from nvfp4_pallas.kernels import wide_producer
from nvfp4_pallas.kernels.item_walk import ItemWalk
from nvfp4_pallas.kernels.ptx import Ptx
from nvfp4_pallas.kernels.whole_attend import CONSUMERS, Block
from nvfp4_pallas.kernels.wide_layout import WARPS, Fused
from nvfp4_pallas.kernels.wide_producer import Producer

# Registers of a thread: 504 for one of each warpgroup, as 384 threads have 65536.
REGISTERS = {"attend": 216, "widen": 72}
assert CONSUMERS * REGISTERS["attend"] + REGISTERS["widen"] <= 504

POINTERS_IN = (
  "q", "table", "kv_lens", "cu_q_lens", "k_global", "v_global", "k", "k_scale", "v", "v_scale",
  "counter",
)  # fmt: skip


def attend(fused: Fused, blocks: int) -> Ptx:
  """The program; its pointers are POINTERS_IN and whole_attend.POINTERS_OUT."""
  block = Block(POINTERS_IN, fused, blocks, readers=WARPS)
  p = block.p
  wide_producer.make_barriers(p, fused.rings, block.smem, block.maker)
  block.begin()
  with p.when(p.role.eq(CONSUMERS)):
    p.emit("setmaxnreg.dec.sync.aligned.u32", REGISTERS["widen"])
    _widen(block, fused)
  block.attend(REGISTERS["attend"])
  return p


def _widen(block: Block, fused: Fused) -> None:
  p, warp, lane = block.p, block.warp, block.lane
  producer = Producer(p, fused, fused.kv_heads, block.smem, warp, lane)
  feed, work = block.item_feed(), ItemWalk(p, fused, lane)
  with p.loop() as items:
    with p.when(warp.eq(0)):
      feed.fetch()
    work.find(feed.next(), items)
    producer.segment(work)
