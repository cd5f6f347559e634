"""Attention of many queries over wide tiles in device memory (dense_widen.py). PTX.

Whole query tiles (whole_attend.py); a warp copies wide tiles into the slots of shared memory.
"""

from __future__ import annotations

from nvfp4_pallas.kernels import copies
from nvfp4_pallas.kernels.item_walk import ItemWalk
from nvfp4_pallas.kernels.ptx import Ptx
from nvfp4_pallas.kernels.whole_attend import CONSUMERS, Block
from nvfp4_pallas.kernels.wide_layout import Dense
from nvfp4_pallas.kernels.wide_slots import Slots

WARPGROUPS = CONSUMERS + 1
# Registers of a thread: 504 for one of each warpgroup, as 384 threads have 65536.
REGISTERS = {"attend": 240, "copy": 24}
assert CONSUMERS * REGISTERS["attend"] + REGISTERS["copy"] <= 504

POINTERS_IN = ("q", "kv_lens", "cu_q_lens", "k_global", "v_global", "wide", "counter")


def attend(dense: Dense, blocks: int) -> Ptx:
  """The program; its pointers are POINTERS_IN and whole_attend.POINTERS_OUT."""
  block = Block(POINTERS_IN, dense, blocks, others=1, readers=1)
  p = block.p
  block.begin()
  with p.when(p.role.eq(CONSUMERS)):
    p.emit("setmaxnreg.dec.sync.aligned.u32", REGISTERS["copy"])
    with p.when(block.warp.eq(0)):
      _copy(block, dense)
  block.attend(REGISTERS["attend"])
  return p


def _copy(block: Block, dense: Dense) -> None:
  p = block.p
  feed, work = block.item_feed(), ItemWalk(p, dense)
  pools = [Slots(p, dense, block.smem, pool) for pool in range(2)]
  policy = copies.evict_last(p)
  with p.loop() as items:
    feed.fetch()
    work.find(feed.next(), items)
    first = p.mad(work.seq, dense.kv_heads, work.head) * dense.max_tiles + work.first_tile
    done = p.u32(0)
    with p.loop() as tiles:
      for pool, slots in enumerate(pools):
        source = p.address(p.pointer("wide"), (first + done) * 2 + pool, dense.slot)
        slots.wait_empty()
        slots.copy(source, policy, block.first_lane)
      p.set(done, done + 1)
      tiles.leave_if(done >= work.count)
