"""Split-KV decode over a paged cache on Hopper, at the memory's speed.

    S = cap(q' K^T * sm_scale * k_global_scale)      O = softmax(S) V * v_global_scale      lse

for one query token a sequence. Two kernels: `decode_attend` (decode_attend.py) cuts the keys of the
whole batch evenly over the multiprocessors (decode_work.py), `decode_join` (decode_join.py) puts
the results of cut (sequence, head)s together. Both are PTX in a Pallas kernel, because each warp
must run its own ring of copies, and a Pallas program is a warpgroup that moves in step.

Formats are parameters (mma_fragments.py). K and V, without their global scales, are exact operands:
float16, or bf16 if stored so. P is rounded to V's type and q to K's, which as float16, in a unit of
its own for each row, loses what is under 2^-29 of the row's largest value. All else is float32.
With a recent window decode_recent.py goes over pages and rings in one program.

Bytes from device memory: the cache's, once.

Run on a CPU by an emulator of its instructions and compiled ahead of time for sm_90a in the tests;
run on an H200 as the rows of benchmarks/results say, which name the hash of these sources.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from nvfp4_pallas.batch import RaggedBatch
from nvfp4_pallas.cache import PagedKVCache
from nvfp4_pallas.kernels import decode_attend, decode_join, decode_recent
from nvfp4_pallas.kernels.decode_join import Join
from nvfp4_pallas.kernels.decode_layout import WARPS, Problem, Ring, RingPages
from nvfp4_pallas.kernels.decode_work import Cut
from nvfp4_pallas.kernels.in_place import fence
from nvfp4_pallas.kernels.mma_fragments import fragments
from nvfp4_pallas.kernels.ptx_launch import Kernel
from nvfp4_pallas.read_paths import AttentionSpec

READ_PATHS = ("bf16", "fp8", "nvfp4_dequant", "nvfp4_repack", "nvfp4_a4q")
HEAD_DIMS = (64, 128, 256)
MAX_GROUP = 16
MAX_SOFT_CAP = 1000.0  # where its error, 18 * 2^-24 of it, is 1e-3 in a score
MAX_SLOT_BYTES = 5 * 1024
MULTIPROCESSORS = 132  # of an H100 SXM or H200; on another card this only costs time


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
  """What can be tuned.

  Attributes:
    tile: keys that a warp takes at a time, a multiple of 16.
    slots: of a warp's ring; each holds K or V of a tile.
    blocks: of threads; the work is cut into as many parts.
    join_warps: that put one query head together, 1 or 4.
    unit: with batch_invariant, tiles of a part of a sequence.
  """

  tile: int
  slots: int
  blocks: int
  join_warps: int
  unit: int

  def smem_bytes(self, problem: Problem) -> int:
    """Shared memory of a block."""
    return Ring(self.tile, self.slots, problem).smem_bytes


def choose_config(
  problem: Problem, num_seqs: int, kv_heads: int, batch_invariant: bool
) -> tuple[DecodeConfig, str]:
  """The configuration for a shape, and why.

  With batch_invariant it depends on nothing that another batch or page table could change.
  """
  widest = max(problem.keys.token_bytes, problem.values.token_bytes)
  tile = 64
  while tile > 16 and tile * widest > MAX_SLOT_BYTES:
    tile //= 2
  why = f"K or V of {tile} keys fill a slot of up to {MAX_SLOT_BYTES} bytes"
  pairs = num_seqs * kv_heads
  blocks = _blocks_of_multiprocessor(problem) * MULTIPROCESSORS
  if not batch_invariant:

    def most_units() -> int:
      return pairs * -(-problem.max_pages * problem.page_size // (WARPS * tile))

    if most_units() < 2 * MULTIPROCESSORS and tile > 32:
      tile, why = 32, "half a tile, as the keys are few"
    if most_units() < 8 * blocks:
      blocks = min(most_units(), 2 * MULTIPROCESSORS)
  join_warps = 4 if batch_invariant or pairs * problem.group < 4 * MULTIPROCESSORS else 1
  return DecodeConfig(tile, 3, blocks, join_warps, 2048 // tile), why


def _blocks_of_multiprocessor(problem: Problem) -> int:
  """How many have room: three, or two where q and O take most of a thread's registers.

  q and O are column_tiles * (q_operands * head_dim / 8 + v_head_dim / 4) registers, and about 110
  are for everything else; three blocks of 128 threads have room for 168 in all.
  """
  q = problem.q_operands * problem.keys.head_dim // 8
  state = problem.column_tiles * (q + problem.values.head_dim // 4)
  return 3 if state <= 48 else 2


def decode(
  q: jax.Array,
  cache: PagedKVCache,
  batch: RaggedBatch,
  spec: AttentionSpec,
  *,
  batch_invariant: bool,
  out_dtype: Any = None,
  config: DecodeConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Attention of one query token a sequence; ops.decode is the definition.

  Args:
    q: [num_seqs, num_q_heads, head_dim] of any float type; it is rounded to bf16 first.
    cache, batch, spec: as in ops.decode. All of the batch is data.
    batch_invariant: cut sequences at points that depend on nothing else.
    out_dtype: bfloat16, float16 or float32; None for q's.
    config: instead of choose_config's.

  Returns:
    out [num_seqs, num_q_heads, v_head_dim], lse float32 [num_seqs, num_q_heads].
  """
  out_dtype = q.dtype if out_dtype is None else out_dtype
  if 0 in (batch.num_seqs, batch.max_pages):
    return nothing_seen((*q.shape[:2], cache.v.head_dim), out_dtype)
  problem = problem_of(q, cache, batch, spec, out_dtype)
  attend, join = kernels(problem, batch.num_seqs, cache.num_kv_heads, batch_invariant, config)
  return attend_and_join(attend, join, inputs(q, cache, batch))


def nothing_seen(shape: tuple[int, ...], out_dtype: Any) -> tuple[jax.Array, jax.Array]:
  """out and lse of rows that see no key."""
  return jnp.zeros(shape, out_dtype), jnp.full(shape[:-1], -jnp.inf, jnp.float32)


def attend_and_join(
  attend: Kernel, join: Kernel, arrays: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
  """out and lse: what the main program has whole, and what the join makes of its pieces."""
  made = attend.launch(arrays)
  names = (name for name in join.program.parameters if name in arrays or name in made)
  of_join = fence({name: (arrays | made)[name] for name in names})
  out, lse = jax.new_ref(of_join["out"]), jax.new_ref(of_join["lse"])
  join.launch(of_join | {"out": out, "lse": lse})
  return fence((jax.freeze(out), jax.freeze(lse)))


def unsupported(request: Any) -> str | None:
  """Why the kernel cannot run a request (ops.request.AttentionRequest), or None if it can."""
  if request.spec.read_path not in READ_PATHS:
    return f"the kernel has the read paths {', '.join(READ_PATHS)}, not {request.spec.read_path}"
  for name, dim in (("head_dim", request.head_dim), ("v_head_dim", request.v_head_dim)):
    if dim not in HEAD_DIMS:
      return f"the kernel has head dims {', '.join(map(str, HEAD_DIMS))}, got {name} {dim}"
  if request.group > MAX_GROUP:
    return f"the kernel takes up to {MAX_GROUP} query heads a KV head, got {request.group}"
  if request.recent_window and request.spec.window is not None:
    return "the kernel counts a sliding window from a sequence's last page, not from its ring"
  if request.spec.soft_cap is not None and request.spec.soft_cap > MAX_SOFT_CAP:
    return f"the kernel's soft cap loses digits above {MAX_SOFT_CAP}, got {request.spec.soft_cap}"
  return None


def problem_of(q, cache: PagedKVCache, batch: RaggedBatch, spec: AttentionSpec, out_dtype):
  return Problem(
    keys=fragments(cache.k.format, cache.k.head_dim),
    values=fragments(cache.v.format, cache.v.head_dim),
    group=q.shape[1] // cache.num_kv_heads,
    q_levels=spec.q_levels if spec.read_path == "nvfp4_a4q" else 0,
    page_size=cache.page_size,
    num_pages=cache.num_pages,
    max_pages=batch.max_pages,
    sm_scale=spec.sm_scale,
    window=spec.window,
    soft_cap=spec.soft_cap,
    out_dtype=jnp.dtype(out_dtype).name,
    rings=_ring_pages(cache, batch),
  )


def _ring_pages(cache: PagedKVCache, batch: RaggedBatch) -> RingPages | None:
  if cache.recent is None:
    return None
  return RingPages(
    keys=fragments("bf16", cache.k.head_dim),
    values=fragments("bf16", cache.v.head_dim),
    num_rings=cache.recent.num_rings,
    of_ring=cache.recent.ring_pages,
    by_number=batch.ring_ids is None,
  )


def kernels(
  problem: Problem,
  num_seqs: int,
  kv_heads: int,
  batch_invariant: bool,
  config: DecodeConfig | None = None,
) -> tuple[Kernel, Kernel]:
  """The main program and the one that joins pieces. `config`: instead of choose_config's."""
  if config is None:
    config, _ = choose_config(problem, num_seqs, kv_heads, batch_invariant)
  cut = Cut(
    num_seqs=num_seqs,
    kv_heads=kv_heads,
    tile=config.tile,
    blocks=config.blocks,
    window=problem.window,
    unit=config.unit if batch_invariant else WARPS,
    batch_invariant=batch_invariant,
    more_tiles=0 if problem.rings is None else problem.rings.most_tiles(problem.page_size) + 1,
  )
  program = decode_attend if problem.rings is None else decode_recent
  group, dim = problem.group, problem.values.head_dim
  rows = (num_seqs, kv_heads * group)
  slots = cut.slots(problem.max_pages * problem.page_size)
  attend = Kernel(
    name="decode_attend",
    program=program.attend(problem, cut, config.slots),
    blocks=config.blocks,
    smem_bytes=config.smem_bytes(problem),
    makes={
      "out": jax.ShapeDtypeStruct((*rows, dim), problem.out_dtype),
      "lse": jax.ShapeDtypeStruct(rows, jnp.float32),
      "pieces": jax.ShapeDtypeStruct((slots, group, dim), jnp.float32),
      "piece_lse": jax.ShapeDtypeStruct((slots, group), jnp.float32),
      "piece_slots": jax.ShapeDtypeStruct((num_seqs * kv_heads, 2), jnp.int32),
    },
  )
  pieces = Join(
    num_seqs=num_seqs,
    kv_heads=kv_heads,
    group=group,
    head_dim=dim,
    warps=config.join_warps,
    in_order=batch_invariant,
    out_dtype=problem.out_dtype,
  )
  join = Kernel("decode_join", decode_join.join(pieces), pieces.blocks, pieces.smem_bytes, {})
  return attend, join


def inputs(q, cache: PagedKVCache, batch: RaggedBatch) -> dict[str, jax.Array]:
  """The arrays of Problem.inputs by name."""
  arrays = {
    "q": q.astype(jnp.bfloat16),
    "table": batch.page_table,
    "kv_lens": batch.kv_lens,
    "k_global": cache.k.global_scale,
    "v_global": cache.v.global_scale,
    "k": cache.k.data,
    "k_scale": cache.k.block_scale,
    "v": cache.v.data,
    "v_scale": cache.v.block_scale,
  }
  if cache.recent is not None:
    arrays |= {
      "ring_ids": batch.ring_ids,
      "starts": cache.recent.starts,
      "newest_k": cache.recent.k.data,
      "newest_v": cache.recent.v.data,
    }
  return {name: array for name, array in arrays.items() if array is not None}
