"""Attention of many queries over wide tiles in device memory (dense_widen.py). PTX.

Whole query tiles (whole_attend.py); a warp copies wide tiles into the slots of shared memory.
"""

from __future__ import annotations

from nvfp4_pallas.kernels import copies
from nvfp4_pallas.kernels.item_walk import ItemWalk
from nvfp4_pallas.kernels.ptx import Mem, Ptx
from nvfp4_pallas.kernels.whole_attend import CONSUMERS, Block
from nvfp4_pallas.kernels.wide_layout import Dense
from nvfp4_pallas.kernels.wide_slots import Slots

WARPGROUPS = CONSUMERS + 1
# Registers of a thread: 504 for one of each warpgroup, as 384 threads have 65536.
REGISTERS = {"attend": 232, "copy": 40}
assert CONSUMERS * REGISTERS["attend"] + REGISTERS["copy"] <= 504


def pointers_in(dense: Dense) -> tuple[str, ...]:
  """What the program reads, beside the counter of item_feed.py."""
  scales = [name for name, pool in zip(_GLOBAL, dense.pools, strict=True) if pool.has_global_scale]
  units = ["k_units"] if dense.keys.as_e4m3 else []
  first = ["first_tiles"] if dense.max_tiles is None else []
  return "q", "kv_lens", "cu_q_lens", *scales, *units, *first, *_WIDE, "counter"


_GLOBAL = "k_global", "v_global"
_WIDE = "k_wide", "v_wide"


def attend(dense: Dense, blocks: int) -> Ptx:
  """The program; its pointers are pointers_in() and whole_attend.POINTERS_OUT."""
  block = Block(pointers_in(dense), dense, blocks, others=1, readers=1)
  p = block.p
  block.begin()
  with p.when(p.role.eq(CONSUMERS)):
    p.emit("setmaxnreg.dec.sync.aligned.u32", REGISTERS["copy"])
    with p.when(block.warp.eq(0)):
      _copy(block, dense)
    block.clear_padding()
  block.attend(REGISTERS["attend"])
  return p


def _copy(block: Block, dense: Dense) -> None:
  p = block.p
  feed, work = block.item_feed(), ItemWalk(p, dense, block.lane)
  pools = [Slots(p, dense, block.smem, pool) for pool in range(2)]
  policy = copies.evict_last(p)
  with p.loop() as items:
    feed.tell()
    work.find(feed.next(), items)
    feed.ask()
    block.bring_q_near(work)
    if dense.max_tiles is None:
      at = p.address(p.pointer("first_tiles"), work.seq, 4)
      (first,) = p.load("global.nc", Mem(at))
    else:
      first = work.seq * dense.max_tiles
    first = p.mad(first + work.first_tile, dense.kv_heads, work.head)
    done = p.u32(0)
    with p.loop() as tiles:
      for name, pool, slots in zip(_WIDE, dense.pools, pools, strict=True):
        source = p.address(p.pointer(name), p.mad(done, dense.kv_heads, first), pool.nbytes)
        slots.wait_empty()
        slots.copy(source, policy, block.first_lane)
      p.set(done, done + 1)
      tiles.leave_if(done >= work.count)
