"""The program for query tiles of up to 64 rows, NVFP4 widened once for all of them. PTX.

A block holds two teams, each of which takes a query tile, the rows of one KV head for up to
64 / group consecutive tokens of a sequence, through its run of key tiles (query_walk.py). A team is
two warpgroups. One widens K and V to float16 in shared memory (wide_producer.py), the other
multiplies (wide_consumer.py). While one team makes P, the other's products run.
"""

from __future__ import annotations

from nvfp4_pallas.kernels import wgmma, wide_producer, wide_slots
from nvfp4_pallas.kernels.decode_work import Cut
from nvfp4_pallas.kernels.ptx import Ptx, Scope
from nvfp4_pallas.kernels.query_walk import QueryWalk
from nvfp4_pallas.kernels.wide_consumer import Consumer
from nvfp4_pallas.kernels.wide_layout import ROLES, TEAMS, THREADS, Teams
from nvfp4_pallas.kernels.wide_producer import Producer

# Registers of a thread: 256 for one of each role, as 512 threads have 65536.
REGISTERS = {"attend": 184, "widen": 72}
assert TEAMS * sum(REGISTERS.values()) <= 512

POINTERS_IN = ("q", "table", "kv_lens", "cu_q_lens", "k_global", "v_global")
POOL_POINTERS = ("k", "k_scale", "v", "v_scale")
POINTERS_OUT = ("out", "lse", "pieces", "piece_lse", "piece_slots")


def attend(wide: Teams, cut: Cut) -> Ptx:
  """The program of both roles; its pointers are POINTERS_IN, POOL_POINTERS and POINTERS_OUT."""
  p = Ptx(
    (*POINTERS_IN, *POOL_POINTERS, *POINTERS_OUT),
    teams=TEAMS,
    roles=ROLES,
    smem_bytes=wide.team_bytes,
  )
  smem = (p.smem + (wgmma.ALIGNMENT - 1)) & ~(wgmma.ALIGNMENT - 1) % 2**32
  warp, lane = p.from_lane(p.thread >> 5, 0), p.thread & 31
  maker = p.role.eq(0) & p.thread.eq(0)
  wide_producer.make_barriers(p, wide.rings, smem, maker)
  wide_slots.make_barriers(p, wide, smem, maker)
  p.emit("bar.sync", TEAMS * ROLES, TEAMS * ROLES * THREADS)

  def take_segments(worker: Producer | Consumer, scope: Scope) -> None:
    options = {"width": wide.width, "group": wide.group, "causal": wide.causal}
    work = QueryWalk(p, cut, lane, scope, **options)
    with p.loop() as segments:
      work.start_segment()
      if isinstance(worker, Producer):
        worker.begin(work)
        worker.segment()
      else:
        worker.segment(work)
      work.end_segment()
      segments.leave_if(work.at_end)
      work.next_pair()

  with p.when(p.role.eq(1)):
    p.emit("setmaxnreg.dec.sync.aligned.u32", REGISTERS["widen"])
    with p.scope() as scope:
      take_segments(Producer(p, wide, cut.kv_heads, smem, warp, lane, 0), scope)
  with p.when(p.role.eq(0)):
    p.emit("setmaxnreg.inc.sync.aligned.u32", REGISTERS["attend"])
    with p.scope() as scope:
      take_segments(Consumer(p, wide, smem, warp, lane), scope)
  return p
