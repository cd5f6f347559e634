"""The ratios of the reports that this project began with, from rows of our own.

They are of other cards and other software (an RTX PRO 5000 with vLLM and FlashInfer), and stand
here for what they divide by what, not to be beaten: prefill, decode and append of NVFP4 over FP8,
A4Q and repack over what was stock, nvfp4_dequant.
"""

from __future__ import annotations

import dataclasses

from benchmarks.measured import Run, Shape, is_emulated, ratio
from benchmarks.text_table import Table, factor

FULL = (1, 8192, 8192), (1, 16384, 16384), (1, 32768, 32768)
CHUNK = ((4, 128, 2048),)
TAILS = (1, 16, 16384), (16, 16, 16384)
DECODE = (1, 1, 8192), (16, 1, 8192), (64, 1, 8192)


@dataclasses.dataclass(frozen=True)
class Ratio:
  """One path's time over another's.

  Attributes:
    reported: what the reports say, and of what.
    shapes: ours, nearest to theirs.
  """

  name: str
  of: str
  to: str
  reported: str
  shapes: tuple[tuple[int, int, int], ...]


RATIOS = (
  Ratio("stock / FP8, prefill", "dequant", "fp8", "1.74 of 48 calls, 1.89 at 16K", FULL),
  Ratio("repack / FP8, prefill", "repack", "fp8", "", FULL),
  Ratio("A8Q / FP8, prefill", "a8q", "fp8", "", FULL),
  Ratio("stock / FP8, decode", "dequant", "fp8", "0.78 (9.63 / 12.35 us)", DECODE),
  Ratio("A4Q x2 / stock, prefill", "a4q x2", "dequant", "0.857 (18.0 / 21.0 ms at 16K)", FULL),
  Ratio("A4Q x2 / FP8, prefill", "a4q x2", "fp8", "1.62 (18.0 / 11.1 ms at 16K)", FULL),
  Ratio("repack / stock, chunk", "repack", "dequant", "0.963 (0.2888 / 0.2999 ms)", CHUNK),
  Ratio("repack / stock, tail", "repack", "dequant", "", TAILS),
)


def table(run: Run) -> Table:
  shapes = run.attention if run.is_of_kernels else {}
  rows, emulated = [], False
  for wanted in RATIOS:
    for lengths in wanted.shapes:
      of = _at(shapes, lengths)
      value = ratio(of, wanted.of, wanted.to)
      if value is not None:
        mark = " emulated" * is_emulated(of[wanted.of])
        emulated |= bool(mark)
        where = "/".join(map(str, lengths))
        rows.append((wanted.name, wanted.reported, where, factor(value) + mark))
  rows += _append(run) if run.is_of_kernels else []
  if rows:
    rows += _bytes(shapes)
  notes = ["Reported ones are of other cards and shapes: compare what is divided, not the numbers."]
  if emulated:
    notes.append("Emulated A4Q shows what it computes; how fast it is takes FP4 tensor cores.")
  head = ("NVFP4 over FP8", "as reported", "b/q/kv here", "here")
  return Table("the published ratios", head, rows, notes, left=3)


def _at(shapes: dict[Shape, dict], lengths: tuple[int, int, int]) -> dict[str, dict]:
  for shape, of in shapes.items():
    usual = shape.geometry == "8b" and shape.page_size == 64
    if usual and (shape.batch, shape.q_len, shape.kv_len) == lengths:
      return of
  return {}


def _append(run: Run) -> list[tuple[str, ...]]:
  """Appends by kernels without levers, of global scale 1."""
  of_tokens: dict[int, dict[str, dict]] = {}
  for row in run.newest_last(run.of_phase("append")):
    usual = row["data"] == "gaussian, global scale 1.0" and not row["levers"]
    if usual and row["implementation"] != "xla":
      of_tokens.setdefault(row["batch"], {})[row["k_format"]] = row
  return [
    (
      "stock / FP8, append",
      "2.79 (8.39 / 3.01 us)",
      f"{tokens} tokens",
      factor(value),
    )
    for tokens, of in sorted(of_tokens.items())
    if (value := ratio(of, "nvfp4", "fp8")) is not None
  ]


def _bytes(shapes: dict[Shape, dict]) -> list[tuple[str, ...]]:
  for of in shapes.values():
    ours, fp8 = (of.get(name, {}).get("bytes_per_token") for name in ("dequant", "fp8"))
    if ours and fp8:
      part = ours / fp8
      return [("cache bytes a token", "0.5625 (1.78 times as many)", "all", f"{part:.4f}")]
  return []
