"""Runs the decode kernels' PTX on a CPU, and how far their results may be from float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import oracle
from nvfp4_pallas.kernels import decode_mosaic_sm90 as kernel
from nvfp4_pallas.kernels.decode_layout import Problem
from nvfp4_pallas.kernels.decode_mosaic_sm90 import DecodeConfig
from nvfp4_pallas.read_paths import AttentionSpec
from tests.cases import Built, Case
from tests.ptx_emulator import Memory, run

# Few blocks, which cut sequences and have several segments each, and small tiles.
SMALL = DecodeConfig(tile=32, slots=3, blocks=5, join_warps=1, unit=2)
READ_PATHS = {"nvfp4": "nvfp4_dequant", "fp8": "fp8", "bf16": "bf16"}
U = oracle.F32_UNIT
OUT_UNIT = {"bfloat16": oracle.BF16_UNIT, "float16": 2.0**-11, "float32": 0.0}


def spec_of(case: Case, **options) -> AttentionSpec:
  formats = case.k_format, case.v_format
  path = next(path for format, path in READ_PATHS.items() if format in formats)
  numerics: dict[str, Any] = {"read_path": path, "sm_scale": case.head_dim**-0.5}
  numerics.update(case.options, **options)
  return AttentionSpec(causal=True, **numerics)


def emulate(
  built: Built,
  spec: AttentionSpec,
  *,
  batch_invariant: bool = False,
  config: DecodeConfig | None = SMALL,
  out_dtype=None,
  reverse: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
  """decode_mosaic_sm90.decode by the emulator, on arrays of which it may read what it needs."""
  q, cache, batch = built.q, built.cache, built.batch
  problem = kernel.problem_of(q, cache, batch, spec, out_dtype or q.dtype)
  attend, join = kernel.kernels(
    problem, batch.num_seqs, cache.num_kv_heads, batch_invariant, config
  )
  arrays = jax.jit(kernel.inputs)(q, cache, batch)
  arrays = {name: np.asarray(array) for name, array in arrays.items()}
  if config is None:
    config, _ = kernel.choose_config(problem, batch.num_seqs, cache.num_kv_heads, batch_invariant)
  made = dict(attend.makes)
  slots = made.pop("piece_slots")
  memory = Memory(
    arrays,
    made,
    # Of free places it is not written; the join may load it and must not use it.
    in_place={"piece_slots": np.full(slots.shape, -1, slots.dtype)},
    readable=_readable(arrays, problem, config.tile),
    copies_read_all=False,
  )
  for part in (attend, join):
    run(
      part.program,
      memory,
      programs=range(part.blocks),
      smem_bytes=part.smem_bytes,
      reverse=reverse,
    )
  return memory.array("out"), memory.array("lse")


def _readable(arrays, problem: Problem, tile: int) -> dict[str, np.ndarray]:
  """Table entries of pages that exist, and of those the tiles with keys that are seen."""
  page_size = problem.page_size
  # A number that is no page's stands for the last one: it must not fault.
  table = np.minimum(arrays["table"].astype(np.uint32), problem.num_pages - 1)
  newest = {} if problem.rings is None else _readable_newest(arrays, problem)
  entries = np.zeros(table.shape, bool)
  slots = np.zeros((problem.num_pages, page_size), bool)
  for s, kv_len in enumerate(_paged_lens(arrays, problem)):
    pages = -(-int(kv_len) // page_size)
    # Where all tokens are in the ring, an entry is read that may hold anything.
    entries[s, : max(pages, int(arrays["kv_lens"][s] > 0))] = True
    oldest = 0 if problem.window is None else max(0, int(kv_len) - problem.window)
    keys = np.arange(oldest // tile * tile, min(-(-int(kv_len) // tile) * tile, pages * page_size))
    slots[table[s, keys // page_size], keys % page_size] = True
  rows = slots[:, None, :, None]
  return {"table": entries} | dict.fromkeys(problem.pool_pointers, rows) | newest


def _paged_lens(arrays, problem: Problem) -> list[int]:
  """Tokens of each sequence that are in the pages."""
  lens = [int(n) for n in arrays["kv_lens"]]
  if problem.rings is None:
    return lens
  starts = arrays["starts"]
  return [
    min(int(starts[ring]), n) if 0 <= ring < problem.rings.num_rings else n
    for n, ring in zip(lens, _ring_ids(arrays), strict=True)
  ]


def _ring_ids(arrays) -> np.ndarray:
  return arrays.get("ring_ids", np.arange(len(arrays["kv_lens"])))


def _readable_newest(arrays, problem: Problem) -> dict[str, np.ndarray]:
  """Of rings, the tiles of 16 keys with keys that exist."""
  rings, page_size = problem.rings, problem.page_size
  live = np.zeros((rings.num_rings * rings.of_ring, page_size), bool)
  paged = _paged_lens(arrays, problem)
  for start, kv_len, ring in zip(paged, arrays["kv_lens"], _ring_ids(arrays), strict=True):
    if 0 <= ring < rings.num_rings:
      keys = np.arange(start, -(-int(kv_len) // rings.tile) * rings.tile)
      live[ring * rings.of_ring + keys // page_size % rings.of_ring, keys % page_size] = True
  return dict.fromkeys(("newest_k", "newest_v"), live[:, None, :, None])


def bounds(
  exact: oracle.Attention, built: Built, spec: AttentionSpec, out_dtype
) -> tuple[np.ndarray, np.ndarray]:
  """How far (out, lse) of the kernel may be from `exact`.

  delta, what a score may be wrong by, is oracle.Attention's and:
  - Where K is float16 (all but bf16), so is q, in a unit that brings its largest value M to 2^14 or
    more: rounded to multiples of 2^-24 at worst, by 2^-39 M. In A4Q its levels are exact.
  - The soft cap is c - 2 c r with r = 1 / (1 + e). ex2.approx makes e wrong by 2^-22 of itself, the
    sum by u = 2^-24, rcp.approx by 2^-23; these 7 u of r <= 1, the rounding of the two constants
    (3 u c) and of the result (u c) are 18 u c at most.
  P is rounded to float16 where V is, by 2^-11 of itself or, among subnormals, by 2^-25 (its largest
  value is 2^14), else to bf16 by 2^-8. The sum it is divided by is not rounded.
  - With a recent window, K is of both kinds, and V; and the maximum is brought from the units of
    one to those of the other by two multiplications and rcp.approx (2^-23): by 4 u of itself,
    which the 8 u |score| in `delta` cover once more.
  """
  delta = exact.delta
  if built.cache.k.format != "bf16" and spec.read_path != "nvfp4_a4q":
    delta = delta + 2.0**-39 * exact.reach
  if spec.soft_cap is not None:
    delta = delta + 18 * U * spec.soft_cap
  wide = built.cache.recent is not None
  if wide:
    delta = delta + exact.delta
  f16 = built.cache.v.format != "bf16"
  p_unit = 2.0**-11 if f16 and not wide else oracle.BF16_UNIT
  relative = 2 * delta + (exact.keys + 16) * U + p_unit
  out = relative[..., None] * exact.spread + 2.0**-39 * f16 * exact.magnitude
  stored = OUT_UNIT[jnp.dtype(out_dtype).name]
  out = out * (1 + stored) + stored * np.abs(exact.out)
  if out_dtype == jnp.float16:
    out = out + 2.0**-25  # subnormals
  lse = np.where(np.isfinite(exact.lse), np.abs(exact.lse), 0)
  return out + 1e-30, delta + (exact.keys + 16) * U + 4 * U * lse
