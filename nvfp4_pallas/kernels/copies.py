"""Copies from device to shared memory by the copy engine, and the barriers that tell of them. PTX.

A barrier's phase is over when it has had its arrivals and the bytes that those announced.
"""

from __future__ import annotations

from nvfp4_pallas.kernels.ptx import ALL_LANES, Mem, Ptx, Reg


def make_barriers(p: Ptx, barriers: Reg, count: int, arrivals: int, when: Reg) -> None:
  """`count` barriers of 8 bytes. Other threads see them after their next meeting."""
  for i in range(count):
    p.emit("mbarrier.init.shared::cta.b64", Mem(barriers, 8 * i), arrivals, when=when)
  p.emit("fence.mbarrier_init.release.cluster")
  p.emit("fence.proxy.async.shared::cta")


def evict_first(p: Ptx) -> Reg:
  """The policy for what is read once: it should not drive anything out of the L2 cache."""
  return p.new("d", "createpolicy.fractional.L2::evict_first.b64", 1.0)


def evict_last(p: Ptx) -> Reg:
  """The policy for what other blocks read too."""
  return p.new("d", "createpolicy.fractional.L2::evict_last.b64", 1.0)


def announce(p: Ptx, barrier: Mem, nbytes: Reg | int, when: Reg) -> None:
  """Arrives, and tells how many bytes will."""
  p.emit("mbarrier.arrive.expect_tx.shared::cta.b64", "_", barrier, nbytes, when=when)


def arrive(p: Ptx, barrier: Mem, when: Reg) -> None:
  p.emit("mbarrier.arrive.shared::cta.b64", "_", barrier, when=when)


def start_copy(
  p: Ptx, target: Mem, source: Reg, nbytes: Reg | int, barrier: Mem, policy: Reg, when: Reg
) -> None:
  op = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
  p.emit(op, target, Mem(source), nbytes, barrier, policy, when=when)


def start_prefetch(p: Ptx, source: Reg, nbytes: int, when: Reg) -> None:
  """To the L2 cache; of a multiple of 16 bytes."""
  p.emit("cp.async.bulk.prefetch.L2.global", Mem(source), nbytes, when=when)


def is_over(p: Ptx, barrier: Mem, phase: Reg) -> Reg:
  """Whether the phase of this parity is over, for all lanes, which may see it at other times."""
  over = p.new("p", "mbarrier.try_wait.parity.shared::cta.b64", barrier, phase)
  return p.new("p", "vote.sync.all.pred", over, ALL_LANES)


def wait(p: Ptx, barrier: Mem, phase: Reg) -> None:
  with p.loop() as polling:
    polling.leave_if(is_over(p, barrier, phase))
