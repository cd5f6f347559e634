"""Which of prefill's programs for whole query tiles runs a request, and with what workspace."""

from __future__ import annotations

from nvfp4_pallas.kernels.decode_mosaic_sm90 import MAX_SOFT_CAP, MULTIPROCESSORS
from nvfp4_pallas.kernels.prefill_mosaic_sm90 import (
  FUSED_PATHS,
  HEAD_DIMS,
  QUERY_ROWS,
  row_tiles,
  tiles_of,
  wide_spec,
)
from nvfp4_pallas.ops.request import AttentionRequest

# Blocks that read a tile, from which on it is widened ahead. Measured with one sequence on an H200:
# with 4 the fused program is faster by far, with 16 (512 tokens, group 4) by 10 % over 1K keys and
# slower by 4 % from 4K on, with 32 they are equal over 1K and ahead is 14 % faster over 16K.
MIN_READERS = 16


def workspace_bytes(request: AttentionRequest) -> int:
  """Of device memory, while a call runs."""
  return _workspace_bytes(request, widens_ahead(request)[0])


def _workspace_bytes(request: AttentionRequest, ahead: bool) -> int:
  """Wide tiles of all pages of the page table where they are made ahead, and of new_kv's rows."""
  dims, total = (request.head_dim, request.v_head_dim), 0
  if ahead:
    tiles = tiles_of(request.spec, request.formats, dims, ahead=True)
    count = request.num_seqs * -(-request.max_keys // tiles[0].keys)
    total += count * sum(tile.nbytes for tile in tiles)
  if request.new_kv:
    tiles = tiles_of(wide_spec(request.spec), ("bf16", "bf16"), dims, ahead=True)
    rows = row_tiles(request.num_tokens, request.num_seqs, tiles[0])
    total += rows * sum(tile.nbytes for tile in tiles)
  return request.num_kv_heads * total


def fills_gpu(request: AttentionRequest) -> bool:
  """Whether nearly every multiprocessor gets a query tile that is more than half full."""
  tokens = request.num_tokens / max(request.num_seqs, 1)
  width = QUERY_ROWS // max(request.group, 1)
  if width == 0 or 2 * tokens <= width:
    return False
  items = request.num_seqs * request.num_kv_heads * tokens / width
  return items >= 0.9 * MULTIPROCESSORS


def widens_ahead(request: AttentionRequest) -> tuple[bool, str]:
  """Whether all keys are widened first, and why.

  By averages, as lengths are data: of a batch with one long chunk and many single tokens both are
  better done apart.
  """
  path, formats = request.spec.read_path, request.formats
  if path in FUSED_PATHS:
    return False, "tiles are widened as they are read"
  if path != "nvfp4_repack" or formats != ("nvfp4", "nvfp4"):
    return True, "all keys are made wide tiles first"
  tokens = request.num_tokens / max(request.num_seqs, 1)
  blocks = tokens / max(1, QUERY_ROWS // max(request.group, 1))
  if blocks < MIN_READERS:
    return False, f"a tile is widened once for each of {blocks:.1f} blocks that read it"
  needed, limit = _workspace_bytes(request, ahead=True), request.max_workspace_bytes
  if needed > limit:
    return False, f"the workspace would have {needed} bytes, more than {limit}"
  return True, f"all keys are widened once, for {blocks:.1f} blocks that read a tile"


def unsupported(request: AttentionRequest) -> str | None:
  """Why the kernels cannot run a request (ops.request.AttentionRequest), or None if they can."""
  spec, path = request.spec, request.spec.read_path
  if path in FUSED_PATHS and request.formats != ("nvfp4", "nvfp4"):
    formats = " and ".join(request.formats)
    return f"as {path} the kernel reads K and V in nvfp4, got {formats}"
  for name, dim in (("head_dim", request.head_dim), ("v_head_dim", request.v_head_dim)):
    if dim not in HEAD_DIMS:
      return f"the kernel has head dims {', '.join(map(str, HEAD_DIMS))}, got {name} {dim}"
  if request.group > QUERY_ROWS:
    return f"the kernel takes up to {QUERY_ROWS} query heads a KV head, got {request.group}"
  if spec.sm_scale == 0:
    return "the kernel compares scores before it scales them, so sm_scale must not be 0"
  if spec.soft_cap is not None and spec.soft_cap > MAX_SOFT_CAP:
    return f"the kernel's soft cap loses digits above {MAX_SOFT_CAP}, got {spec.soft_cap}"
  needed, limit = workspace_bytes(request), request.max_workspace_bytes
  if needed > limit:
    return f"the shapes ask for a workspace of {needed} bytes, the limit is {limit}"
  return None
