"""Runs prefill's kernels, PTX, on a CPU."""

import jax
import numpy as np

from nvfp4_pallas.kernels import prefill_mosaic_sm90 as kernel
from nvfp4_pallas.kernels.ptx_launch import Kernel
from nvfp4_pallas.read_paths import AttentionSpec
from tests.cases import Built
from tests.ptx_emulator import Memory, run
from tests.tail_emulation import inputs


def emulate(
  built: Built,
  spec: AttentionSpec,
  *,
  ahead: bool,
  queries_after: bool = False,
  blocks: int = 3,
  out_dtype=None,
  reverse: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
  """prefill_mosaic_sm90.attention by the emulator, on arrays of which it may read what it needs."""
  q, cache, batch = built.q, built.cache, built.batch
  launched = kernel.kernels(
    q, cache, batch, spec, out_dtype or q.dtype, blocks, ahead, queries_after
  )
  arrays = inputs(built) | {"cu_q_lens": np.asarray(batch.cu_q_lens)}
  dims = cache.k.head_dim, cache.v.head_dim
  tile = 1 if ahead else kernel.tiles_of(spec, cache.formats, dims, ahead)[0].keys
  readable = _readable(arrays, cache.page_size, cache.num_pages, tile)
  return _run(launched, arrays, readable, reverse)


def emulate_rows(
  built: Built, new_kv, spec: AttentionSpec, *, blocks: int = 3, out_dtype=None, reverse=False
) -> tuple[np.ndarray, np.ndarray]:
  """prefill_mosaic_sm90.attention_to_rows by the emulator."""
  q, batch = built.q, built.batch
  launched = kernel.row_kernels(q, new_kv, batch, spec, out_dtype or q.dtype, blocks)
  arrays = jax.jit(kernel.row_inputs, static_argnums=3)(q, new_kv, batch, spec)
  arrays = {name: np.asarray(array) for name, array in arrays.items()}
  rows = np.arange(len(arrays["q"])) < arrays["cu_q_lens"][-1]
  readable = dict.fromkeys(("k", "v"), rows[:, None, None])
  return _run(launched, arrays, readable, reverse)


def _run(launched: list[Kernel], arrays, readable, reverse: bool) -> tuple[np.ndarray, np.ndarray]:
  made = {name: shape for part in launched for name, shape in part.makes.items()}
  in_place = {} if "counter" in made else {"counter": np.zeros(1, np.int32)}
  memory = Memory(
    arrays,
    made,
    in_place,
    readable={k: v for k, v in readable.items() if k in arrays},
    copies_read_all=False,
  )
  for part in launched:
    sizes = {"threads": part.threads, "smem_bytes": part.smem_bytes}
    run(part.program, memory, programs=range(part.blocks), **sizes, reverse=reverse)
  return memory.array("out"), memory.array("lse")


def _readable(arrays, page_size: int, num_pages: int, tile: int) -> dict[str, np.ndarray]:
  """Table entries and slots of the tiles with keys, or of the first tile."""
  table = np.minimum(arrays["table"].astype(np.uint32), num_pages - 1)
  entries, slots = np.zeros(table.shape, bool), np.zeros((num_pages, page_size), bool)
  for s, kv_len in enumerate(arrays["kv_lens"].tolist()):
    read = max(kv_len, 1) if tile > 1 else kv_len
    pages = -(-read // page_size)
    entries[s, :pages] = True
    keys = np.arange(min(-(-read // tile) * tile, pages * page_size))
    slots[table[s, keys // page_size], keys % page_size] = True
  rows = slots[:, None, :, None]
  return {"table": entries} | dict.fromkeys(("k", "k_scale", "v", "v_scale"), rows)
