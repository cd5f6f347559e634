"""Runs prefill's kernels, PTX, on a CPU."""

import numpy as np

from nvfp4_pallas.kernels import prefill_mosaic_sm90 as kernel
from nvfp4_pallas.kernels.wide_layout import SHARED_TILE
from nvfp4_pallas.read_paths import AttentionSpec
from tests.cases import Built
from tests.ptx_emulator import Memory, run
from tests.tail_emulation import inputs


def emulate(
  built: Built, spec: AttentionSpec, *, blocks: int = 3, out_dtype=None, reverse: bool = False
) -> tuple[np.ndarray, np.ndarray]:
  """prefill_mosaic_sm90.attention by the emulator, on arrays of which it may read what it needs."""
  q, cache, batch = built.q, built.cache, built.batch
  widen, attend = kernel.kernels(q, cache, batch, spec, out_dtype or q.dtype, blocks)
  arrays = inputs(built, spec) | {"cu_q_lens": np.asarray(batch.cu_q_lens)}
  made, in_place = dict(attend.makes), {"counter": np.zeros(1, np.int32)}
  if widen is not None:
    made |= widen.makes
    in_place = {}
  tile = 1 if widen is not None else SHARED_TILE
  memory = Memory(
    arrays,
    made,
    in_place,
    readable=_readable(arrays, cache.page_size, cache.num_pages, tile),
    copies_read_all=False,
  )
  for part in (widen, attend) if widen is not None else (attend,):
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
