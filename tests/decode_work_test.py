"""How a ragged batch is cut: the walks of blocks, emulated, against a plan of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from nvfp4_pallas.kernels import decode_attend
from nvfp4_pallas.kernels.decode_attend import POINTERS_OUT
from nvfp4_pallas.kernels.decode_layout import THREADS, WARPS, Problem, Ring
from nvfp4_pallas.kernels.decode_mosaic_sm90 import (
  MULTIPROCESSORS,
  DecodeConfig,
  choose_config,
)
from nvfp4_pallas.kernels.decode_work import Cut
from nvfp4_pallas.kernels.mma_fragments import fragments
from nvfp4_pallas.kernels.ptx import Mem, Ptx
from nvfp4_pallas.kernels.query_walk import QueryWalk
from tests.base import TestCase
from tests.ptx_emulator import Memory, run

PROBLEM = Problem(
  keys=fragments("bf16", 64),
  values=fragments("bf16", 64),
  group=1,
  q_levels=0,
  page_size=16,
  num_pages=1,
  max_pages=1,
  sm_scale=1.0,
  window=None,
  soft_cap=None,
  out_dtype="float32",
)


class Walk(decode_attend.Attend):
  """The main program without its work: it notes what it visits.

  out    [pairs, tiles] += 1 + 2^8 block    lse [pairs] += 1, where stored in one piece
  pieces [slots] += 1 + pair                piece_slots: the kernel's own
  """

  def __init__(self, cut: Cut, tiles: int):
    self._row_tiles = tiles
    super().__init__(PROBLEM, cut, 1)

  def _make_ring(self):
    pass

  _load_q = _load_scale = _reset = _start_pages = _make_ring

  def _issue(self, pool):
    pass

  def _add(self, name, index, value, when):
    at = Mem(self.p.address(self.p.pointer(name), index, 4))
    (old,) = self.p.load("global", at)
    self.p.store("global", at, [old + value], when=when)

  def _tile(self, tile):
    index = self._pair() * self._row_tiles + tile
    self._add("out", index, (self.p.program << 8) + 1, self.first_lane)

  def _join_warps(self):
    p, pair = self.p, self._pair()
    slot = self._slot()
    one = self.thread.eq(0)
    with p.when(self.work.is_whole):
      self._add("lse", pair, 1, one)
    with p.when(self.work.is_whole, unless=True):
      self._add("pieces", slot, pair + 1, one)


@dataclasses.dataclass(frozen=True)
class Visited:
  """What a walk left: arrays as in `Walk`, by pair."""

  blocks: np.ndarray  # [pairs, tiles], -1 where nobody was
  whole: np.ndarray
  owners: np.ndarray
  slots: np.ndarray  # [pairs, 2]


def walk(cut: Cut, kv_lens: np.ndarray) -> Visited:
  pairs = cut.num_seqs * cut.kv_heads
  tiles = max(1, -(-int(kv_lens.max(initial=0)) // cut.tile))
  program = Walk(cut, tiles).p
  zeros = {
    "out": (pairs, tiles),
    "lse": (pairs,),
    "pieces": (cut.slots(tiles * cut.tile),),
    "piece_slots": (pairs, 2),
  }
  nothing = np.zeros(1, np.uint32)
  memory = Memory(
    {"kv_lens": kv_lens.astype(np.int32)} | dict.fromkeys(("q", "table", "k", "v"), nothing),
    {"piece_lse": jax.ShapeDtypeStruct((1,), jnp.float32)},
    in_place={name: np.zeros(shape, np.uint32) for name, shape in zeros.items()},
  )
  assert set(program.parameters[:-2]) == {*PROBLEM.inputs, *POINTERS_OUT}
  run(program, memory, programs=range(cut.blocks), races=False)
  visits = memory.array("out")
  if (visits % 256 > 1).any():
    raise AssertionError("a tile was visited twice")
  blocks = np.where(visits % 256 == 1, (visits >> 8).astype(np.int64), -1)
  return Visited(blocks, memory.array("lse"), memory.array("pieces"), memory.array("piece_slots"))


class WalkTest(TestCase):
  def check(self, cut: Cut, kv_lens):
    kv_lens = np.asarray(kv_lens)
    visited = walk(cut, kv_lens)
    oldest = np.maximum(0, kv_lens - cut.window) if cut.window else np.zeros_like(kv_lens)
    first, end = oldest // cut.tile, -(-kv_lens // cut.tile)
    units = []  # the blocks of each unit, in the order of the line
    pieces_of = []
    for pair, blocks in enumerate(visited.blocks):
      f, e = first[pair // cut.kv_heads], end[pair // cut.kv_heads]
      self.assertTrue((blocks[f:e] >= 0).all(), "a tile was not visited")
      self.assertTrue((blocks[:f] < 0).all() and (blocks[e:] < 0).all())
      of_pair = [blocks[t : min(t + cut.unit, e)] for t in range(f, e, cut.unit)]
      self.assertTrue(all((u == u[0]).all() for u in of_pair), "blocks share a unit")
      units += [int(u[0]) for u in of_pair]
      segments = len(of_pair) if cut.batch_invariant else len({int(u[0]) for u in of_pair})
      pieces_of.append(segments)
    self.assertEqual(units, sorted(units))
    counts = np.bincount(units, minlength=1)
    self.assertLessEqual(counts.max() - counts.min(), 1)
    self.assertLen(counts, max(1, min(cut.blocks, len(units))))

    owners = np.zeros_like(visited.owners)
    for pair, pieces in enumerate(pieces_of):
      self.assertEqual(visited.whole[pair], pieces == 1)
      if pieces:
        self.assertEqual(visited.slots[pair, 1], pieces)
      if pieces > 1:
        index = np.arange(pieces)
        index = index if cut.batch_invariant else np.where(index == 0, 0, 2 * index - 1)
        owners[visited.slots[pair, 0] + index] += pair + 1
    np.testing.assert_array_equal(visited.owners, owners)

  @parameterized.product(
    num_seqs=(1, 7, 32, 33, 129, 300),
    kv_heads=(1, 3),
    window=(None, 50),
    batch_invariant=(False, True),
  )
  def test_every_unit_once(self, num_seqs, kv_heads, window, batch_invariant):
    r = np.random.default_rng(num_seqs + kv_heads)
    cut = Cut(
      num_seqs=num_seqs,
      kv_heads=kv_heads,
      tile=16,
      blocks=int(r.integers(2, 12)),
      window=window,
      unit=int(r.integers(1, 5)),
      batch_invariant=batch_invariant,
    )
    free = r.random(num_seqs) < r.choice((0.1, 0.9))
    kv_lens = np.where(free, 0, r.integers(1, 3000 // num_seqs + 20, num_seqs))
    self.check(cut, kv_lens)

  @parameterized.product(
    kv_lens=((0,), (0, 0, 0), (1,), (0, 0, 64), (64, 0, 0), (640, 1, 0, 640), (16, 16, 16)),
    batch_invariant=(False, True),
  )
  def test_ends(self, kv_lens, batch_invariant):
    for blocks in (1, 3, 50):
      self.check(Cut(len(kv_lens), 2, 16, blocks, None, 1, batch_invariant), kv_lens)


class QueryWalkTest(TestCase):
  WIDTH, GROUP = 4, 2

  def visited(self, cut: Cut, q_lens, kv_lens) -> tuple[np.ndarray, np.ndarray]:
    """visits [tokens, heads, tiles] and piece_slots [tokens, heads, 4].

    Of a query tile's first token it is 1 + 2^8 block for each visit of a tile.
    """
    tokens, tiles = sum(q_lens), max(1, -(-max(kv_lens) // cut.tile))
    p = Ptx(("kv_lens", "cu_q_lens", "piece_slots", "visits"))
    thread = p.new("r", "mov.u32", "%tid.x")
    with p.scope() as scope:
      work = QueryWalk(p, cut, thread & 31, scope, width=self.WIDTH, group=self.GROUP, causal=True)
      with p.loop() as segments:
        work.start_segment()
        work.tell_pieces(thread)
        pair = work.q_row(p.u32(0)) // self.GROUP
        done = p.u32(0)
        with p.loop() as loop:
          loop.leave_if(done >= work.count)
          index = pair * tiles + work.first_tile + done
          at = Mem(p.address(p.pointer("visits"), index, 4))
          (old,) = p.load("global", at)
          p.store("global", at, [old + (p.program << 8) + 1], when=thread.eq(0))
          p.sync(THREADS)
          p.set(done, done + 1)
        work.end_segment()
        segments.leave_if(work.at_end)
        work.next_pair()
    shapes = {"piece_slots": (tokens, cut.kv_heads, 4), "visits": (tokens, cut.kv_heads, tiles)}
    memory = Memory(
      {
        "kv_lens": np.asarray(kv_lens, np.int32),
        "cu_q_lens": np.cumsum([0, *q_lens]).astype(np.int32),
      },
      {},
      in_place={name: np.zeros(shape, np.uint32) for name, shape in shapes.items()},
    )
    run(p, memory, programs=range(cut.blocks), races=False)
    return memory.array("visits"), memory.array("piece_slots")

  @parameterized.product(kv_heads=(1, 3), window=(None, 50), blocks=(1, 7, 60))
  def test_every_tile_once(self, kv_heads, window, blocks):
    q_lens, kv_lens = (9, 0, 1, 3, 0, 4, 70), (200, 70, 64, 0, 0, 17, 75)
    cut = Cut(len(q_lens), kv_heads, 16, blocks, window, 1, False)
    visits, slots = self.visited(cut, q_lens, kv_lens)
    of_blocks, rows = [], []
    for token, q_len, kv_len in zip(np.cumsum([0, *q_lens]), q_lens, kv_lens, strict=False):
      seen_from = 0 if window is None else max(0, kv_len - q_len + 1 - window)
      first, end = seen_from // 16, -(-kv_len // 16)
      for t in range(0, q_len, self.WIDTH):
        for head in range(kv_heads):
          row = np.arange(visits.shape[-1])
          expected = (row >= first) & (row < end)
          np.testing.assert_array_equal(visits[token + t, head] % 256, expected)
          blocks_here = visits[token + t, head][expected] >> 8
          of_blocks += blocks_here.tolist()
          pieces = len(set(blocks_here.tolist()))
          for i in range(min(self.WIDTH, q_len - t) if pieces else 0):
            slot, count, first_row, _ = slots[token + t + i, head]
            self.assertEqual(count, pieces)
            self.assertEqual(slot, 2 * blocks_here[0] + 1)
            self.assertEqual(first_row, i * self.GROUP)
          rows.append(token + t)
    self.assertEqual(visits[sorted(set(range(sum(q_lens))) - set(rows))].sum(), 0)
    self.assertEqual(of_blocks, sorted(of_blocks))
    counts = np.bincount(of_blocks)
    self.assertLen(counts, min(blocks, len(of_blocks)))
    self.assertLessEqual(counts.max() - counts.min(), 1)


class ConfigTest(TestCase):
  @parameterized.parameters(
    # formats, head_dim, group, num_seqs, keys of the page table, tile, blocks, join_warps
    ("nvfp4", 128, 4, 64, 8192, 64, 396, 1),
    ("nvfp4", 128, 4, 1, 32768, 64, 264, 4),
    ("nvfp4", 128, 4, 1, 2048, 32, 128, 4),
    ("nvfp4", 256, 4, 64, 8192, 32, 264, 1),
    ("fp8", 128, 4, 64, 8192, 32, 396, 1),
    ("bf16", 128, 4, 64, 8192, 16, 396, 1),
    ("bf16", 256, 16, 64, 8192, 16, 264, 1),
    ("nvfp4", 64, 16, 1, 16, 32, 8, 4),
  )
  def test_choice(self, format, head_dim, group, num_seqs, keys, tile, blocks, join_warps):
    problem = problem_of(format, head_dim, group, keys)
    config, why = choose_config(problem, num_seqs, 8, batch_invariant=False)
    chosen = config.tile, config.blocks, config.join_warps
    self.assertEqual(chosen, (tile, blocks, join_warps))
    self.assertIn(
      "half a tile" if format == "nvfp4" and tile < 64 and head_dim < 256 else "slot", why
    )

  @parameterized.product(
    format=("nvfp4", "fp8", "bf16"), head_dim=(64, 128, 256), group=(1, 16), invariant=(False, True)
  )
  def test_fits(self, format, head_dim, group, invariant):
    problem = problem_of(format, head_dim, group, 8192)
    config, _ = choose_config(problem, 64, 8, invariant)
    smem = config.smem_bytes(problem)
    # A block may have 227 KiB and a multiprocessor has 228, of which each block takes one more.
    self.assertLessEqual(smem, 227 * 1024)
    fit = 228 * 1024 // (smem + 1024)
    self.assertGreaterEqual(fit, 2 if (format, head_dim) == ("bf16", 256) else 3)
    ring = Ring(config.tile, config.slots, problem)
    self.assertGreaterEqual(ring.warp_bytes, config.slots * ring.slot_bytes)
    self.assertGreaterEqual(ring.warp_bytes, group * (4 * head_dim + 8))  # at a segment's end
    for nbytes in (ring.slot_bytes, ring.warp_bytes):
      self.assertEqual(nbytes % 16, 0)  # what bulk copies need
    self.assertEqual(ring.smem_bytes, WARPS * (ring.warp_bytes + 8 * config.slots))

  def test_batch_invariant(self):
    """Neither the number of sequences nor the page table changes what rounds."""
    configs = set()
    for num_seqs in (1, 8, 64, 1000):
      for keys in (16, 2048, 2**17):
        problem = problem_of("nvfp4", 128, 4, keys)
        config, _ = choose_config(problem, num_seqs, 8, batch_invariant=True)
        configs.add(config)
    self.assertLen(configs, 1)
    self.assertEqual(configs.pop(), DecodeConfig(64, 3, 3 * MULTIPROCESSORS, 4, 32))


def problem_of(format, head_dim, group, keys) -> Problem:
  pool = fragments(format, head_dim)
  return dataclasses.replace(PROBLEM, keys=pool, values=pool, group=group, max_pages=keys // 16)


if __name__ == "__main__":
  absltest.main()
