"""Paged attention for sm_120 (RTX PRO and GeForce Blackwell), prefill and decode, in Triton.

These GPUs multiply block-scaled FP4: for `nvfp4_a4q`, Q is quantised in the kernel and K goes into
the tensor cores as it lies in the cache,

    mma.sync...m16n8k64...kind::mxf4nvf4.block_scale.scale_vec::4X      OMMA in machine code

once for each level of Q. P V is a product in bfloat16 on every path, and so is Q K^T on all others,
K widened once for all rows of a tile. `triton_attend.py` is the kernel; other files and what they
hold: `triton_fp4.py` (the format), `triton_keys.py` (pages, tiles), `triton_launch.py`.

    128 rows, 64 keys, head_dim 128: for each of eight warps    products    instructions
    nvfp4_a4q, 2 levels                                         32 + 64     663
    nvfp4_a4q, 1 level                                          16 + 64     643
    nvfp4_dequant                                               64 + 64     703
    fp8                                                         64 + 64     649
    bf16                                                        64 + 64     536

(Of tiles that all rows see, by Triton 3.9.0 and ptxas 13.0.88. 194 to 255 registers, none spilled;
with two levels and a window, or a group that is no power of two, up to 200 bytes are, before and
after the loops over keys and none in them.) `nvfp4_repack` makes BF16 pages of all that the page
table names, and reads those.

When V of a key is not finite (a faulty block), rows of the same query tile that do not see the key
also become NaN in the columns concerned, if other rows of the tile do see it.

COMPILED, NOT RUN: no such GPU was at hand. The tests read the instructions out of PTX and machine
code, and execute the kernel's source on a CPU with its products modelled (tests/triton_emulator).
How the hardware rounds sums of products, and every speed, are not known.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from nvfp4_pallas.batch import RaggedBatch
from nvfp4_pallas.cache import PagedKVCache, PagePool, decode_rows, pool_arrays, take
from nvfp4_pallas.kernels import blackwell, triton_launch
from nvfp4_pallas.kernels.blackwell import MAX_ROWS
from nvfp4_pallas.read_paths import AttentionSpec

READ_PATHS = ("bf16", "fp8", "nvfp4_dequant", "nvfp4_repack", "nvfp4_a4q")
KEYS = 64
MAX_SOFT_CAP = 1000.0
MULTIPROCESSORS = 110  # of an RTX PRO 5000
MAX_SPLITS = 32
MIN_KEYS_PER_SPLIT = 512
# Query tiles that read a key, from which on nvfp4_repack widens ahead: a guess, not measured.
MIN_READERS = 4


@dataclasses.dataclass(frozen=True)
class Config:
  """How the kernel is cut.

  Attributes:
    rows: of a query tile, a power of two: query heads of a KV head times tokens.
    num_tiles: query tiles that any split of the tokens into sequences needs at most.
    num_warps: of a program.
  """

  rows: int
  num_tiles: int
  num_warps: int


def choose_config(tokens: int, num_seqs: int, group: int, one_each: bool = False) -> Config:
  """By averages, as lengths are data."""
  wanted = 1 if one_each else -(-tokens // max(num_seqs, 1))
  rows = 16
  while rows < min(MAX_ROWS, max(wanted, 1) * group):
    rows *= 2
  width = rows // group
  num_tiles = tokens if one_each else min(tokens, (tokens + num_seqs * (width - 1)) // width)
  return Config(rows, num_tiles, num_warps=8 if rows == MAX_ROWS else 4)


def splits_to_fill_a_gpu(request: Any, one_each: bool = False) -> int:
  """Runs of keys for two programs a multiprocessor, none shorter than MIN_KEYS_PER_SPLIT can be.

  `request`: ops.request.AttentionRequest.
  """
  config = choose_config(request.num_tokens, request.num_seqs, request.group, one_each)
  programs = config.num_tiles * request.num_kv_heads
  return blackwell.splits_to_fill(
    programs, 2 * MULTIPROCESSORS, request.max_keys, MIN_KEYS_PER_SPLIT, MAX_SPLITS
  )


def attention(
  q: jax.Array,
  cache: PagedKVCache,
  batch: RaggedBatch,
  spec: AttentionSpec,
  *,
  num_splits: int = 1,
  one_each: bool = False,
  ahead: bool = False,
  out_dtype: Any = jnp.float32,
) -> tuple[jax.Array, jax.Array]:
  """Attention of ragged queries over a paged cache; attention.py is the definition.

  Args:
    q: [tokens, num_q_heads, head_dim] of any float type; it is rounded to bf16 first.
    cache, batch, spec: as in ops.prefill. All of the batch is data.
    num_splits: parts into which the key tiles of a sequence are cut, by its kv_len alone.
    one_each: row s of q is the one token of sequence s, as for decode.
    ahead: first widen all pages that the page table names, for nvfp4_repack.
    out_dtype: of out.

  Returns:
    out [tokens, num_q_heads, v_head_dim], lse float32 [tokens, num_q_heads]; with more than one
    split a leading axis of splits, for the caller to merge. Where a row sees no key, out is 0 and
    lse -inf.
  """
  tokens, num_q_heads, head_dim = q.shape
  shape = (num_splits, tokens, num_q_heads)
  if 0 in (tokens, batch.num_seqs, batch.max_pages):
    out = jnp.zeros((*shape, cache.v.head_dim), out_dtype)
    lse = jnp.full(shape, float("-inf"), jnp.float32)
    return (out[0], lse[0]) if num_splits == 1 else (out, lse)
  group = num_q_heads // cache.num_kv_heads
  config = choose_config(tokens, batch.num_seqs, group, one_each)
  scales = cache.k.decode_scale, cache.v.decode_scale
  if ahead:
    cache, batch = _widened(cache, batch)
  out, lse = triton_launch.call(
    "triton_attend",
    (
      q,
      *_arrays(cache.k),
      *_arrays(cache.v),
      *scales,
      batch.page_table,
      batch.kv_lens,
      batch.cu_q_lens,
    ),
    (
      jax.ShapeDtypeStruct((*shape, cache.v.head_dim), out_dtype),
      jax.ShapeDtypeStruct(shape, jnp.float32),
    ),
    name=f"attention_{spec.read_path}",
    grid=(config.num_tiles, cache.num_kv_heads, num_splits),
    num_warps=config.num_warps,
    num_stages=2,
    tokens=tokens,
    num_seqs=batch.num_seqs,
    max_pages=batch.max_pages,
    num_pages=cache.num_pages,
    Q_LEVELS=spec.q_levels if spec.read_path == "nvfp4_a4q" else 0,
    K_FORMAT=cache.k.format,
    V_FORMAT=cache.v.format,
    HEADS=cache.num_kv_heads,
    GROUP=group,
    DIM=head_dim,
    V_DIM=cache.v.head_dim,
    PAGE=cache.page_size,
    CAUSAL=spec.causal,
    WINDOW=spec.window or 0,
    SM_SCALE=spec.sm_scale,
    SOFT_CAP=spec.soft_cap or 0.0,
    SPLITS=num_splits,
    SEQS=0 if one_each else 1 << (batch.num_seqs - 1).bit_length(),
    ROWS=config.rows,
    KEYS=KEYS,
  )
  return (out[0], lse[0]) if num_splits == 1 else (out, lse)


def _arrays(pool: PagePool) -> tuple[jax.Array, jax.Array]:
  """Data and block scales; where there are none, the data again, which nobody then reads."""
  return pool.data, pool.data if pool.block_scale is None else pool.block_scale


def _widened(cache: PagedKVCache, batch: RaggedBatch) -> tuple[PagedKVCache, RaggedBatch]:
  """The pages of the page table in bfloat16, without their global scales, in its own order."""
  table = batch.page_table

  def wide(pool: PagePool) -> PagePool:
    rows = tuple(take(a, (table.reshape(-1),), mode="clip") for a in pool_arrays(pool))
    return PagePool(decode_rows(pool, rows).astype(jnp.bfloat16), None, None, "bf16")

  order = jnp.arange(table.size, dtype=jnp.int32).reshape(table.shape)
  pages = dataclasses.replace(cache, k=wide(cache.k), v=wide(cache.v))
  return pages, dataclasses.replace(batch, page_table=order)


def unsupported(request: Any) -> str | None:
  """Why the kernel cannot run a request (ops.request.AttentionRequest), or None if it can."""
  why_not = blackwell.unsupported(request, READ_PATHS)
  soft_cap = request.spec.soft_cap
  if why_not is None and soft_cap is not None and soft_cap > MAX_SOFT_CAP:
    why_not = f"the kernel's soft cap loses digits above {MAX_SOFT_CAP}, got {soft_cap}"
  return why_not


def widens_ahead(request: Any) -> tuple[bool, str]:
  """Whether all keys become BF16 pages first, as only nvfp4_repack may have it, and why."""
  if request.spec.read_path != "nvfp4_repack":
    return False, "this read path widens tiles as they are read"
  tokens = request.num_tokens / max(request.num_seqs, 1)
  readers = tokens * request.group / MAX_ROWS
  if readers < MIN_READERS:
    return False, f"tiles are widened as they are read, once for each of {readers:.1f} query tiles"
  needed, limit = workspace_bytes(request), request.max_workspace_bytes
  if needed > limit:
    return False, f"the workspace would have {needed} bytes, more than {limit}"
  return True, f"all keys are widened once, for {readers:.1f} query tiles"


def workspace_bytes(request: Any) -> int:
  """Of device memory, while all keys are widened."""
  keys = request.num_seqs * request.max_keys * request.num_kv_heads
  return 2 * keys * (request.head_dim + request.v_head_dim)
