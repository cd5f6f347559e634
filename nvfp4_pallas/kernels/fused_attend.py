"""Attention of many queries over NVFP4 pages, widened by each block for all its rows. PTX.

Whole query tiles (whole_attend.py); one warpgroup widens K and one V (wide_producer.py), into the
slots of shared memory. No workspace.
"""

from __future__ import annotations

from nvfp4_pallas.kernels import wide_producer
from nvfp4_pallas.kernels.item_walk import ItemWalk
from nvfp4_pallas.kernels.ptx import Ptx
from nvfp4_pallas.kernels.whole_attend import CONSUMERS, Block
from nvfp4_pallas.kernels.wide_layout import WARPS, Fused
from nvfp4_pallas.kernels.wide_producer import Producer

PRODUCERS = 2  # of K and of V
WARPGROUPS = CONSUMERS + PRODUCERS
# Registers of a thread: 512 for one of each warpgroup, as 512 threads have 65536.
REGISTERS = {"attend": 184, "widen": 72}
assert CONSUMERS * REGISTERS["attend"] + PRODUCERS * REGISTERS["widen"] <= 512

POINTERS_IN = (
  "q", "table", "kv_lens", "cu_q_lens", "k_global", "v_global", "k", "k_scale", "v", "v_scale",
  "counter",
)  # fmt: skip


def attend(fused: Fused, blocks: int) -> Ptx:
  """The program; its pointers are POINTERS_IN and whole_attend.POINTERS_OUT."""
  block = Block(POINTERS_IN, fused, blocks, others=PRODUCERS, readers=PRODUCERS * WARPS)
  p = block.p
  wide_producer.make_barriers(p, fused.rings, block.smem, block.maker)
  block.begin()
  for pool in range(PRODUCERS):
    with p.when(p.role.eq(CONSUMERS + pool)):
      p.emit("setmaxnreg.dec.sync.aligned.u32", REGISTERS["widen"])
      _widen(block, fused, pool)
  block.attend(REGISTERS["attend"])
  return p


def _widen(block: Block, fused: Fused, pool: int) -> None:
  p = block.p
  warp, lane = block.warp, block.lane
  producer = Producer(p, fused, fused.kv_heads, block.smem, warp, lane, pools=(pool,), index=pool)
  feed, work = block.item_feed(), ItemWalk(p, fused)
  with p.loop() as items:
    if pool == 0:
      with p.when(warp.eq(0)):
        feed.fetch()
    work.find(feed.next(), items)
    producer.segment(work)
