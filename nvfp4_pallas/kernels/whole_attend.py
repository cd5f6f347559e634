"""What the programs that take whole query tiles share: blocks that stay, and who attends. PTX.

A block has CONSUMERS warpgroups that attend (wide_consumer.py), each with 64 rows of a query tile
of 128, and others that fill the slots of shared memory for both. Blocks take query tile after query
tile (item_walk.py), and those who fill go ahead while the last one's results are stored. While one
warpgroup makes P, the other's products run.
"""

from __future__ import annotations

from nvfp4_pallas.kernels import copies, item_feed, wgmma, wide_slots
from nvfp4_pallas.kernels.item_feed import ItemFeed
from nvfp4_pallas.kernels.item_walk import LANES, ItemWalk
from nvfp4_pallas.kernels.ptx import Mem, Ptx
from nvfp4_pallas.kernels.results import NEG_INF
from nvfp4_pallas.kernels.wide_consumer import Consumer
from nvfp4_pallas.kernels.wide_layout import ROWS, THREADS, WARPS, Whole

CONSUMERS = 2
QUERY_ROWS = CONSUMERS * ROWS
POINTERS_OUT = ("out", "lse")


class Block:
  """A program that is being written: its warps, its barriers, and the warpgroups that attend."""

  def __init__(
    self, pointers: tuple[str, ...], whole: Whole, blocks: int, others: int, readers: int
  ):
    """
    Args:
      blocks: that stay.
      others: warpgroups that do not attend; their roles come after CONSUMERS.
      readers: warps of them that read the item feed.
    """
    self.p = p = Ptx((*pointers, *POINTERS_OUT), roles=CONSUMERS + others)
    self.whole, self.blocks = whole, blocks
    self.smem = (p.smem + (wgmma.ALIGNMENT - 1)) & ~(wgmma.ALIGNMENT - 1) % 2**32
    self.warp, self.lane = p.from_lane(p.thread >> 5, 0), p.thread & 31
    self.first_lane, self._feed = self.lane.eq(0), self.smem + whole.feed
    self.maker = p.role.eq(0) & p.thread.eq(0)
    wide_slots.make_barriers(p, whole, self.smem, self.maker)
    self._roles = CONSUMERS + others
    item_feed.make_barriers(p, self._feed, CONSUMERS * WARPS + readers, self.maker)

  def begin(self) -> None:
    """All barriers are made."""
    self.p.emit("bar.sync", self._roles, self._roles * THREADS)

  def item_feed(self) -> ItemFeed:
    return ItemFeed(self.p, self._feed, self.first_lane, self.blocks)

  def bring_q_near(self, work: ItemWalk) -> None:
    """A query tile's q to the L2 cache, while the tile before it is attended to. By a warp."""
    p, whole = self.p, self.whole
    nbytes = whole.group * whole.keys.head_dim * 2  # of a token and KV head
    for start in range(0, whole.width, LANES):
      token = self.lane + start
      row = work.q_row(p.minimum(token, work.tokens - 1) * whole.group)
      at = p.address(p.pointer("q"), row, whole.keys.head_dim * 2)
      copies.start_prefetch(p, at, nbytes, token < work.tokens)

  def attend(self, registers: int) -> None:
    """What the warpgroups that attend do."""
    p = self.p
    with p.when(p.role < CONSUMERS):
      p.emit("setmaxnreg.inc.sync.aligned.u32", registers)
      consumer = Consumer(
        p, self.whole, self.smem, self.warp, self.lane, index=p.role, pieces=False
      )
      feed, work = self.item_feed(), ItemWalk(p, self.whole, self.lane)
      consumer.first_turn()
      with p.loop() as items:
        work.find(feed.next(), items)
        consumer.segment(work)
      consumer.last_turn()

  def clear_padding(self) -> None:
    """Rows of q past the last sequence: out 0 and lse -inf. By a warpgroup that does not attend."""
    p, whole = self.p, self.whole
    heads = whole.kv_heads * whole.group
    pieces = heads * whole.values.head_dim * (4 if whole.out_dtype == "float32" else 2) // 16
    at = p.address(p.pointer("cu_q_lens"), p.u32(whole.num_seqs), 4)
    (end,) = p.load("global.nc", Mem(at))
    token = p.u32(end + p.program)
    zero, nothing = p.u32(0), p.f32(NEG_INF)
    with p.loop() as tokens:
      tokens.leave_if(token >= whole.tokens)
      row = p.address(p.pointer("out"), token, 16 * pieces)
      for start in range(0, pieces, THREADS):
        piece = p.thread + start
        p.store("global", Mem(p.address(row, piece, 16)), [zero] * 4, when=piece < pieces)
      row = p.address(p.pointer("lse"), token, 4 * heads)
      for start in range(0, heads, THREADS):
        head = p.thread + start
        p.store("global", Mem(p.address(row, head, 4)), [nothing], when=head < heads)
      p.set(token, token + self.blocks)
