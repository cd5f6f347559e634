"""Who can run attention: the tables that dispatch.resolve picks from."""

from __future__ import annotations

from nvfp4_pallas.dispatch import Entry
from nvfp4_pallas.ops import (
  decode_sm90,
  decode_xla,
  mosaic_sm100,
  prefill_sm90,
  prefill_xla,
  triton_sm120,
)

PREFILL = {
  "mosaic_sm90": Entry(prefill_sm90.plain, prefill_sm90.unsupported, prefill_sm90.choose_kernel),
  "mosaic_sm100": mosaic_sm100.PREFILL,
  "triton_sm120": triton_sm120.PREFILL,
  "xla": Entry(prefill_xla.prefill),
}
DECODE = {
  "mosaic_sm90": Entry(decode_sm90.split_kv, decode_sm90.unsupported, decode_sm90.choose_kernel),
  "mosaic_sm100": mosaic_sm100.DECODE,
  "triton_sm120": triton_sm120.DECODE,
  "xla": Entry(decode_xla.decode),
}
