"""Split-KV attention for short queries over long NVFP4 caches on Hopper: tails of prefill.

Two kernels as for decode (decode_mosaic_sm90.py): a main program cuts the keys of all sequences
evenly over the multiprocessors, `tail_join` (tail_join.py) puts the results of cut query tiles
together. PTX in Pallas kernels. There are three main programs, by the rows of a query tile:

    mma     up to 16   `short_attend` (short_attend.py), decode's program: warps work alone
    wgmma   up to 48   `tail_attend` (tail_attend.py): a warpgroup, K and V from registers
    teams   up to 64   `wide_attend` (wide_attend.py): one warpgroup widens, one attends

`choose_config` takes the first that has room, but teams for 48 rows, and for more than 16 where
there are few sequences.

Limits of `tail_attend` and `wide_attend`, which the definition does not have:
- Scores must be below 9e7 = 2^27 ln 2 in magnitude: the exponents' references are float32, and past
  that their rounding is more than what they leave above P. Beyond, a row may come out as NaN or 0.
- q of a query tile and KV head has one unit: a row 2^-31 as large as the tile's largest still has
  all of bfloat16's digits, one 2^-39 as large has none left.
- When V of a key is not finite (a faulty block), rows that do not see the key also become NaN in
  the columns concerned if other rows of their query tile do see it.

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
from nvfp4_pallas.kernels import (
  short_attend,
  tail_attend,
  tail_join,
  tail_layout,
  wide_attend,
  wide_layout,
)
from nvfp4_pallas.kernels.decode_layout import WARPS, Ring
from nvfp4_pallas.kernels.decode_mosaic_sm90 import (
  MAX_SOFT_CAP,
  MULTIPROCESSORS,
  attend_and_join,
  inputs,
  nothing_seen,
)
from nvfp4_pallas.kernels.decode_work import Cut
from nvfp4_pallas.kernels.mma_fragments import NvFp4Fragments
from nvfp4_pallas.kernels.ptx import WARPGROUP, Ptx
from nvfp4_pallas.kernels.ptx_launch import Kernel
from nvfp4_pallas.kernels.short_attend import Short
from nvfp4_pallas.kernels.tail_join import TailJoin
from nvfp4_pallas.kernels.tail_layout import HEAD_DIM, TILE, Tail
from nvfp4_pallas.kernels.wide_layout import Teams
from nvfp4_pallas.kernels.wide_tiles import Tiles
from nvfp4_pallas.read_paths import AttentionSpec

READ_PATHS = ("nvfp4_dequant", "nvfp4_repack", "nvfp4_a4q")
SHORT_TILE = 32  # keys
MAX_ROWS = wide_layout.ROWS
MOST_ROWS = {
  "mma": short_attend.MAX_COLUMNS,
  "wgmma": tail_layout.MAX_ROWS,
  "teams": wide_layout.ROWS,
}


@dataclasses.dataclass(frozen=True)
class TailConfig:
  """What can be tuned.

  Attributes:
    engine: "mma", "wgmma" or "teams".
    width: tokens of a query tile.
    stages: key tiles fetched or in use in a block, or slots of a warp's ring.
    blocks: of threads, or teams; the work is cut into as many parts.
    join_warps: that put one row together, 1 or 4.
  """

  engine: str
  width: int
  stages: int
  blocks: int
  join_warps: int


def choose_config(tokens: int, num_seqs: int, kv_heads: int, group: int) -> tuple[TailConfig, str]:
  """The configuration for a shape, and why."""
  average = -(-tokens // max(num_seqs, 1))
  width = max(1, min(MAX_ROWS // group, average))
  rows = width * group
  # With few sequences what counts is how soon a block is done, not what it costs.
  few = 4 * num_seqs * kv_heads <= MULTIPROCESSORS
  if rows <= short_attend.MAX_COLUMNS:
    engine, because = "mma", "its warps wait for nobody"
  elif few:
    engine, because = "teams", "with few sequences it is done soonest"
  elif rows < tail_layout.MAX_ROWS:
    engine, because = "wgmma", "a value of the cache is widened once, in registers"
  else:
    engine, because = "teams", "a value of the cache is widened once, while others multiply"
  blocks = 2 * MULTIPROCESSORS
  if engine == "mma" and not few:
    blocks = 3 * MULTIPROCESSORS  # as many have room
  stages = {"mma": 6, "wgmma": 6, "teams": 3}
  config = TailConfig(
    engine=engine,
    width=width,
    stages=stages[engine],
    blocks=blocks,
    join_warps=4 if tokens * kv_heads * group < 4 * 4 * MULTIPROCESSORS else 1,
  )
  why = f"query tiles of {width} tokens, of {average} on average, by {engine}: {because}"
  return config, why


def attention(
  q: jax.Array,
  cache: PagedKVCache,
  batch: RaggedBatch,
  spec: AttentionSpec,
  *,
  out_dtype: Any = None,
  config: TailConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Attention of ragged queries; ops.prefill is the definition.

  Args:
    q: [tokens, num_q_heads, head_dim] of any float type; it is rounded to bf16 first.
    cache, batch, spec: as in ops.prefill. All of the batch is data.
    out_dtype: bfloat16, float16 or float32; None for q's.
    config: instead of choose_config's.

  Returns:
    out [tokens, num_q_heads, head_dim], lse float32 [tokens, num_q_heads].
  """
  out_dtype = q.dtype if out_dtype is None else out_dtype
  if 0 in (q.shape[0], batch.num_seqs, batch.max_pages):
    return nothing_seen(q.shape, out_dtype)
  attend, join = kernels(q, cache, batch, spec, out_dtype, config)
  arrays = inputs(q, cache, batch) | {"cu_q_lens": batch.cu_q_lens}
  return attend_and_join(attend, join, arrays)


def kernels(
  q, cache: PagedKVCache, batch: RaggedBatch, spec: AttentionSpec, out_dtype: Any, config=None
) -> tuple[Kernel, Kernel]:
  """The main program and the one that joins pieces. `config`: instead of choose_config's."""
  tokens, num_q_heads, _ = q.shape
  num_seqs, kv_heads = batch.num_seqs, cache.num_kv_heads
  group = num_q_heads // kv_heads
  if config is None:
    config, _ = choose_config(tokens, num_seqs, kv_heads, group)
  common = {
    "group": group,
    "width": config.width,
    "q_levels": spec.q_levels if spec.read_path == "nvfp4_a4q" else 0,
    "page_size": cache.page_size,
    "num_pages": cache.num_pages,
    "max_pages": batch.max_pages,
    "causal": spec.causal,
    "sm_scale": spec.sm_scale,
    "window": spec.window,
    "soft_cap": spec.soft_cap,
    "out_dtype": jnp.dtype(out_dtype).name,
  }
  cut = Cut(
    num_seqs=num_seqs,
    kv_heads=kv_heads,
    tile=SHORT_TILE if config.engine == "mma" else TILE,
    blocks=config.blocks,
    window=spec.window,
    unit=WARPS if config.engine == "mma" else 1,
    batch_invariant=False,
  )
  most = MOST_ROWS[config.engine]
  if config.width * group > most:
    raise ValueError(f"a query tile by {config.engine} has up to {most} rows, got {config}")
  program = _PROGRAMS[config.engine](cut, config.stages, common)
  if config.blocks % program.teams:
    raise ValueError(f"blocks must be a multiple of {program.teams}, got {config}")
  slots, tile_rows = cut.slots(batch.max_pages * cache.page_size), program.tile_rows
  attend = Kernel(
    name=program.name,
    program=program.program,
    blocks=config.blocks // program.teams,
    threads=program.threads,
    smem_bytes=program.smem_bytes,
    makes={
      "out": jax.ShapeDtypeStruct((tokens, num_q_heads, HEAD_DIM), common["out_dtype"]),
      "lse": jax.ShapeDtypeStruct((tokens, num_q_heads), jnp.float32),
      "pieces": jax.ShapeDtypeStruct((slots, tile_rows, HEAD_DIM), jnp.float32),
      "piece_lse": jax.ShapeDtypeStruct((slots, tile_rows), jnp.float32),
      "piece_slots": jax.ShapeDtypeStruct((tokens * kv_heads, 4), jnp.int32),
    },
  )
  pieces = TailJoin(
    num_seqs=num_seqs,
    kv_heads=kv_heads,
    group=group,
    head_dim=HEAD_DIM,
    warps=config.join_warps,
    in_order=False,
    out_dtype=common["out_dtype"],
    tokens=tokens,
    tile_rows=tile_rows,
  )
  join = Kernel("tail_join", tail_join.join(pieces), pieces.blocks, pieces.smem_bytes, {})
  return attend, join


@dataclasses.dataclass(frozen=True)
class _Program:
  """A main program and what it needs.

  Attributes:
    name: in a trace.
    program: the instructions.
    smem_bytes, threads: of a block.
    tile_rows: of a query tile's piece.
    teams: of a block.
  """

  name: str
  program: Ptx
  smem_bytes: int
  tile_rows: int
  threads: int = WARPGROUP
  teams: int = 1


def _by_mma(cut: Cut, stages: int, common: dict[str, Any]) -> _Program:
  short = Short(keys=NvFp4Fragments(HEAD_DIM), values=NvFp4Fragments(HEAD_DIM), **common)
  smem_bytes = short.smem_bytes(Ring(cut.tile, stages, short).smem_bytes)
  return _Program(
    "short_attend", short_attend.attend(short, cut, stages), smem_bytes, short.columns
  )


def _by_wgmma(cut: Cut, stages: int, common: dict[str, Any]) -> _Program:
  tail = Tail(stages=stages, **common)
  return _Program("tail_attend", tail_attend.attend(tail, cut), tail.smem_bytes, tail.rows)


def _by_teams(cut: Cut, stages: int, common: dict[str, Any]) -> _Program:
  tiles = Tiles("nvfp4", HEAD_DIM, TILE)
  # Of V one slot has room beside two operands of q.
  wide = Teams(
    keys=tiles,
    values=tiles,
    slots=(2, 3 - max(1, common["q_levels"])),
    consumers=1,
    producers=WARPS,
    q_in_registers=common["q_levels"] < 2,
    stages=stages,
    in_turns=False,
    widening=1,
    reused=False,
    **common,
  )
  teams = wide_layout.TEAMS
  return _Program(
    "wide_attend",
    wide_attend.attend(wide, cut),
    wide.smem_bytes,
    wide_layout.ROWS,
    threads=teams * wide_layout.ROLES * WARPGROUP,
    teams=teams,
  )


_PROGRAMS = {"mma": _by_mma, "wgmma": _by_wgmma, "teams": _by_teams}


def unsupported(request: Any) -> str | None:
  """Why the kernel cannot run a request (ops.request.AttentionRequest), or None if it can."""
  if request.spec.read_path not in READ_PATHS:
    return f"the kernel has the read paths {', '.join(READ_PATHS)}, not {request.spec.read_path}"
  if request.formats != ("nvfp4", "nvfp4"):
    return f"the kernel reads K and V in nvfp4, got {' and '.join(request.formats)}"
  for name, dim in (("head_dim", request.head_dim), ("v_head_dim", request.v_head_dim)):
    if dim != HEAD_DIM:
      return f"the kernel has head_dim {HEAD_DIM}, got {name} {dim}"
  if request.new_kv:
    return "the kernel for short queries reads all keys from the cache, not new_kv"
  if request.group > MAX_ROWS:
    return f"the kernel takes up to {MAX_ROWS} query heads a KV head, got {request.group}"
  if request.spec.sm_scale == 0:
    return "the kernel compares scores before it scales them, so sm_scale must not be 0"
  if request.spec.soft_cap is not None and request.spec.soft_cap > MAX_SOFT_CAP:
    return f"the kernel's soft cap loses digits above {MAX_SOFT_CAP}, got {request.spec.soft_cap}"
  return None
