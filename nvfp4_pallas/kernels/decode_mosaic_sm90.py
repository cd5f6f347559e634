"""Split-KV decode over a paged cache on Hopper, at the memory's speed.

    S = cap(q' K^T * sm_scale * k_global_scale)      O = softmax(S) V * v_global_scale      lse

for one query token a sequence. Two kernels: `decode_attend` (decode_attend.py) cuts the keys of the
whole batch evenly over the multiprocessors (decode_work.py), `decode_join` (decode_join.py) puts
the results of cut (sequence, head)s together. Both are PTX in a Pallas kernel, because each warp
must run its own ring of copies, and a Pallas program is a warpgroup that moves in step.

Formats are parameters (mma_fragments.py). K and V, without their global scales, are exact as bf16
operands, and so is every level of an A4Q q; P is rounded to bf16; all else is float32.

Bytes from device memory: the cache's, once.

Run on a CPU by an emulator of its instructions and compiled ahead of time for sm_90a in the tests;
run on an H200 as the rows of benchmarks/results say, which name the hash of these sources.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from nvfp4_pallas import format as nvfp4
from nvfp4_pallas.batch import RaggedBatch
from nvfp4_pallas.cache import PagedKVCache, PagePool, pool_arrays
from nvfp4_pallas.kernels import decode_attend, decode_join
from nvfp4_pallas.kernels.decode_attend import Problem, Ring
from nvfp4_pallas.kernels.decode_join import Join
from nvfp4_pallas.kernels.decode_work import Cut
from nvfp4_pallas.kernels.mma_fragments import fragments
from nvfp4_pallas.kernels.ptx_launch import launch
from nvfp4_pallas.read_paths import AttentionSpec

READ_PATHS = ("bf16", "fp8", "nvfp4_dequant", "nvfp4_a4q")
HEAD_DIMS = (64, 128, 256)
MAX_GROUP = 16
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
  blocks = 3 * MULTIPROCESSORS
  if not batch_invariant:

    def most_units() -> int:
      return pairs * -(-problem.max_pages * problem.page_size // (decode_attend.WARPS * tile))

    if most_units() < 2 * MULTIPROCESSORS and tile > 32:
      tile, why = 32, "half a tile, as the keys are few"
    if most_units() < 8 * blocks:
      blocks = min(most_units(), 2 * MULTIPROCESSORS)
  join_warps = 4 if pairs * problem.group < 4 * MULTIPROCESSORS else 1
  return DecodeConfig(tile, 3, blocks, join_warps, 2048 // tile), why


def decode(
  q: jax.Array,
  cache: PagedKVCache,
  batch: RaggedBatch,
  spec: AttentionSpec,
  *,
  batch_invariant: bool,
  config: DecodeConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Attention of one query token a sequence; ops.decode is the definition.

  Args:
    q: [num_seqs, num_q_heads, head_dim] of any float type; it is rounded to bf16 first.
    cache, batch, spec: as in ops.decode. All of the batch is data.
    batch_invariant: cut sequences at points that depend on nothing else.
    config: instead of choose_config's.

  Returns:
    out [num_seqs, num_q_heads, v_head_dim] in q's dtype, lse float32 [num_seqs, num_q_heads].
  """
  num_seqs, num_q_heads, _ = q.shape
  kv_heads = cache.num_kv_heads
  if 0 in (num_seqs, batch.max_pages):
    out = jnp.zeros((num_seqs, num_q_heads, cache.v.head_dim), q.dtype)
    return out, jnp.full(out.shape[:-1], -jnp.inf, jnp.float32)
  problem = _problem(q, cache, batch, spec)
  if config is None:
    config, _ = choose_config(problem, num_seqs, kv_heads, batch_invariant)
  cut = Cut(
    num_seqs=num_seqs,
    kv_heads=kv_heads,
    tile=config.tile,
    blocks=config.blocks,
    window=spec.window,
    unit=config.unit if batch_invariant else decode_attend.WARPS,
    batch_invariant=batch_invariant,
  )
  attend, join = _kernels(problem, cut, config)
  out, lse, *pieces = attend(
    _q_operands(q, spec),
    batch.page_table,
    batch.kv_lens,
    _global_scale(cache.k),
    _global_scale(cache.v),
    *_page_arrays(cache),
  )
  out, lse = jax.new_ref(out), jax.new_ref(lse)
  pieces, piece_lse, piece_slots = pieces
  join(batch.kv_lens, pieces, piece_lse, piece_slots, out, lse)
  return jax.freeze(out), jax.freeze(lse)


def unsupported(request: Any) -> str | None:
  """Why the kernel cannot run a request (ops.request.AttentionRequest), or None if it can."""
  if request.spec.read_path not in READ_PATHS:
    return f"the kernel has the read paths {', '.join(READ_PATHS)}, not {request.spec.read_path}"
  for name, dim in (("head_dim", request.head_dim), ("v_head_dim", request.v_head_dim)):
    if dim not in HEAD_DIMS:
      return f"the kernel has head dims {', '.join(map(str, HEAD_DIMS))}, got {name} {dim}"
  if request.group > MAX_GROUP:
    return f"the kernel takes up to {MAX_GROUP} query heads a KV head, got {request.group}"
  if request.spec.sm_scale == 0:
    return "the kernel compares scores before it scales them, so sm_scale must not be 0"
  return None


def _problem(q, cache: PagedKVCache, batch: RaggedBatch, spec: AttentionSpec) -> Problem:
  return Problem(
    keys=fragments(cache.k.format, cache.k.head_dim),
    values=fragments(cache.v.format, cache.v.head_dim),
    group=q.shape[1] // cache.num_kv_heads,
    q_operands=spec.q_levels if spec.read_path == "nvfp4_a4q" else 1,
    page_size=cache.page_size,
    num_pages=cache.num_pages,
    max_pages=batch.max_pages,
    sm_scale=spec.sm_scale,
    window=spec.window,
    soft_cap=spec.soft_cap,
    out_dtype=str(q.dtype),
  )


def _kernels(problem: Problem, cut: Cut, config: DecodeConfig):
  """The two kernels as functions of their pointers."""
  group, dim = problem.group, problem.values.head_dim
  rows = (cut.num_seqs, cut.kv_heads * group)
  slots = cut.slots(problem.max_pages * problem.page_size)
  attend = launch(
    decode_attend.attend(problem, cut, config.slots),
    name="decode_attend",
    programs=config.blocks,
    smem_bytes=config.smem_bytes(problem),
    out_type=(
      jax.ShapeDtypeStruct((*rows, dim), problem.out_dtype),
      jax.ShapeDtypeStruct(rows, jnp.float32),
      jax.ShapeDtypeStruct((slots, group, dim), jnp.float32),
      jax.ShapeDtypeStruct((slots, group), jnp.float32),
      jax.ShapeDtypeStruct((cut.num_seqs * cut.kv_heads, 2), jnp.int32),
    ),
  )
  pieces = Join(
    num_seqs=cut.num_seqs,
    kv_heads=cut.kv_heads,
    group=group,
    head_dim=dim,
    warps=config.join_warps,
    in_order=cut.batch_invariant,
    out_dtype=problem.out_dtype,
  )
  join = launch(
    decode_join.join(pieces),
    name="decode_join",
    programs=pieces.blocks,
    smem_bytes=pieces.smem_bytes,
    out_type=(),
  )
  return attend, join


def _page_arrays(cache: PagedKVCache) -> list[jax.Array]:
  """In the order of Problem.pool_pointers."""
  return [*pool_arrays(cache.k), *pool_arrays(cache.v)]


def _q_operands(q: jax.Array, spec: AttentionSpec) -> jax.Array:
  """q' as bf16 operands to be added up, [num_seqs, num_q_heads, operands, head_dim]."""
  q = nvfp4.through(q, jnp.bfloat16) if q.dtype != jnp.bfloat16 else q
  if spec.read_path != "nvfp4_a4q":
    return q.astype(jnp.bfloat16)[:, :, None]
  packed = nvfp4.encode(q.astype(jnp.float32), levels=spec.q_levels)
  levels = [packed] if packed.residual is None else [packed, packed.residual]
  wide = [nvfp4.decode_unscaled(level.codes, level.block_scale) for level in levels]
  return jnp.stack(wide, axis=2).astype(jnp.bfloat16)


def _global_scale(pool: PagePool) -> jax.Array:
  ones = jnp.ones((pool.num_kv_heads,), jnp.float32)
  return ones if pool.global_scale is None else pool.global_scale
