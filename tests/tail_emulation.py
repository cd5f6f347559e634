"""Runs the kernels for short queries, PTX, on a CPU; how far they may be from float64."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import oracle
from nvfp4_pallas.kernels import tail_mosaic_sm90 as kernel
from nvfp4_pallas.kernels.tail_layout import TILE
from nvfp4_pallas.kernels.tail_mosaic_sm90 import TailConfig
from nvfp4_pallas.read_paths import AttentionSpec
from tests.cases import Built
from tests.decode_emulation import OUT_UNIT, U
from tests.ptx_emulator import Memory, run

# Few blocks, which cut query tiles and have several segments each, and a short ring.
SMALL = TailConfig("wgmma", width=4, stages=3, blocks=5, join_warps=1)


def spec_of(built: Built, **options) -> AttentionSpec:
  numerics = {"read_path": "nvfp4_dequant", "causal": True, "sm_scale": 128**-0.5}
  return AttentionSpec(**numerics | built.options | options)


def emulate(
  built: Built,
  spec: AttentionSpec,
  *,
  config: TailConfig | None = SMALL,
  out_dtype=None,
  reverse: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
  """tail_mosaic_sm90.attention by the emulator, on arrays of which it may read what it needs."""
  q, cache, batch = built.q, built.cache, built.batch
  attend, join = kernel.kernels(q, cache, batch, spec, out_dtype or q.dtype, config)
  arrays = inputs(built) | {"cu_q_lens": np.asarray(batch.cu_q_lens)}
  made = dict(attend.makes)
  slots = made.pop("piece_slots")
  memory = Memory(
    arrays,
    made,
    # Of tokens with no keys it is not written; the join may load it and must not use it.
    in_place={"piece_slots": np.full(slots.shape, -1, slots.dtype)},
    readable=_readable(arrays, cache, spec),
    copies_read_all=False,
  )
  for part in (attend, join):
    sizes = {"threads": part.threads, "smem_bytes": part.smem_bytes}
    run(part.program, memory, programs=range(part.blocks), **sizes, reverse=reverse)
  return memory.array("out"), memory.array("lse")


def inputs(built: Built) -> dict[str, np.ndarray]:
  arrays = jax.jit(kernel.inputs)(built.q, built.cache, built.batch)
  return {name: np.asarray(array) for name, array in arrays.items()}


def _readable(arrays, cache, spec: AttentionSpec) -> dict[str, np.ndarray]:
  """Table entries and slots of the tiles with keys that some new token sees."""
  page_size = cache.page_size
  # A number that is no page's stands for the last one: it must not fault.
  table = np.minimum(arrays["table"].astype(np.uint32), cache.num_pages - 1)
  entries = np.zeros(table.shape, bool)
  slots = np.zeros((cache.num_pages, page_size), bool)
  q_lens = np.diff(arrays["cu_q_lens"])
  for s, (kv_len, q_len) in enumerate(zip(arrays["kv_lens"].tolist(), q_lens, strict=True)):
    if q_len == 0:
      continue
    pages = -(-kv_len // page_size)
    oldest = 0 if spec.window is None else max(0, kv_len - q_len + 1 - spec.window)
    begin = oldest // TILE * TILE
    entries[s, begin // page_size : pages] = True
    keys = np.arange(begin, min(-(-kv_len // TILE) * TILE, pages * page_size))
    slots[table[s, keys // page_size], keys % page_size] = True
  rows = slots[:, None, :, None]
  return {"table": entries} | dict.fromkeys(("k", "k_scale", "v", "v_scale"), rows)


def bounds(
  exact: oracle.Attention,
  built: Built,
  spec: AttentionSpec,
  out_dtype,
  width: int,
  least_top: float,
  wide_keys: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
  """How far (out, lse) of the kernel may be from `exact`; u = 2^-24.

  With `wide_keys` some keys and values are bf16 whatever the cache is.

  delta, what a score may be wrong by, is oracle.Attention's and:
  - K is exact in its operand, and so is q beside a bf16 K, and in A4Q and A8Q. Else q is float16 in
    a unit that brings M, the largest of its query tile, to 2^14 or more, and rounded to multiples
    of 2^-24 at worst, by 2^-25 2^-14 M. So a row of which the largest value is m = 2^-k M has its
    scores to 2^(k - 39) reach: of no less than bfloat16's digits up to k = 31, and none from k = 39
    on.
  - The soft cap's 18 u soft_cap: see decode_emulation.bounds.
  A weight is exp2 of a score less the reference, an exact number for all keys; so what else is
  wrong is the fma's rounding, within oracle's 8 u |score| + 7 u for FIRST_P, and ex2's 4 u.
  The weights of pieces come from their lse in log2, rounded twice: 4 u |lse|. Sums over keys: n u;
  the rest, of O and of the sum: new references, rcp, two factors, the join's: 16 u.
  P is rounded to bfloat16 beside a bf16 V, by 2^-8 of itself; else to float16, by 2^-11 of itself
  or, among subnormals, by 2^-25. The largest weight of a row and piece is 2^least_top or more
  (2^LATER_P, as that was of the tile which set the reference, or 2^P_EXPONENT against a running
  maximum); so that is 2^(-25 - least_top) of the largest. The sum it is divided by is not rounded.
  lse is log2(total) - reference: lg2 is wrong by 2^-22 of itself, and total lies between
  2^4 and 2^15 n.
  """
  delta = exact.delta
  if spec.read_path not in ("nvfp4_a4q", "nvfp4_a8q") and built.cache.k.format != "bf16":
    delta = delta + 2.0**-39 * _reach_of_tiles(exact, built, width)
  if spec.soft_cap is not None:
    delta = delta + 18 * U * spec.soft_cap
  size = np.where(np.isfinite(exact.lse), np.abs(exact.lse), 0)
  sums = (exact.keys + 32) * U + 4 * U * size
  all_wide = built.cache.v.format == "bf16"
  relative = 2 * delta + sums + (2.0**-8 if all_wide or wide_keys else 2.0**-11)
  subnormals = 0.0 if all_wide else 2.0 ** (-25 - least_top)
  out = relative[..., None] * exact.spread + subnormals * exact.magnitude
  stored = OUT_UNIT[jnp.dtype(out_dtype).name]
  out = out * (1 + stored) + stored * np.abs(exact.out)
  if out_dtype == jnp.float16:
    out = out + 2.0**-25  # subnormals
  log_of_total = 2.0**-22 * (11 + np.log(np.maximum(exact.keys, 1)))
  return out + 1e-30, delta + sums + log_of_total


def _reach_of_tiles(exact, built: Built, width: int) -> np.ndarray:
  """exact.reach, each row's as if it had its query tile's largest value."""
  q = np.abs(inputs(built)["q"].astype(np.float64))  # [tokens, heads, dim]
  group = q.shape[1] // built.cache.num_kv_heads
  own = q.max(axis=2)
  of_row = own.reshape(len(q), -1, group)
  largest = np.zeros_like(of_row)
  cu = np.asarray(built.batch.cu_q_lens)
  for begin, end in zip(cu[:-1], cu[1:], strict=True):
    for first in range(begin, end, width):
      tile = slice(first, min(first + width, end))
      largest[tile] = of_row[tile].max(axis=(0, 2), keepdims=True)
  # Where q is 0, so are all its scores.
  ratio = np.divide(largest.reshape(own.shape), own, out=np.zeros_like(own), where=own > 0)
  return ratio * exact.reach
