"""What the kernels for sm_100 and sm_120 have in common: what they refuse and how they split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

HEAD_DIMS = (64, 128)
MAX_ROWS = 128  # of a query tile
NOT_RUN = "compiled for this GPU, not yet run on one"


def unsupported(request: Any, read_paths: Sequence[str]) -> str | None:
  """Why neither kernel can run a request (ops.request.AttentionRequest), or None.

  read_paths: that the kernel in question has.
  """
  if request.spec.read_path not in read_paths:
    return f"the kernel has the read paths {', '.join(read_paths)}, not {request.spec.read_path}"
  if request.new_kv:
    return "the kernel reads all keys from the cache, so new_kv must be appended first"
  for name, dim in (("head_dim", request.head_dim), ("v_head_dim", request.v_head_dim)):
    if dim not in HEAD_DIMS:
      return f"the kernel has head dims {', '.join(map(str, HEAD_DIMS))}, got {name} {dim}"
  if request.group > MAX_ROWS:
    return f"the kernel takes up to {MAX_ROWS} query heads a KV head, got {request.group}"
  return None


def products(request: Any) -> str:
  """Of what operands the kernel's products are, for the reason why it runs."""
  levels = {1: "one level", 2: "two levels"}.get(request.spec.q_levels)
  fp4 = request.spec.read_path == "nvfp4_a4q"
  scores = f"Q K^T in FP4 with block scales, {levels} of Q, P V in BF16" if fp4 else "all in BF16"
  return f"products {scores}; {NOT_RUN}"


def splits_to_fill(programs: int, wanted: int, longest: int, least: int, most: int) -> int:
  """Parts of the keys, so that `programs` of each make `wanted` in all.

  Args:
    longest: keys that a sequence can have.
    least: of a part where there are several.
    most: parts.
  """
  return max(1, min(-(-wanted // max(programs, 1)), longest // least, most))
