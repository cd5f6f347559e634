"""The ratios of the reports that this project began with, from rows of our own.

They are of other cards and other software (an RTX PRO 5000 with vLLM and FlashInfer; how many heads
was not given), and stand here for what they divide by what, not to be beaten: prefill, decode and
append of NVFP4 over FP8, A4Q and repack over what was stock, nvfp4_dequant. Their A4Q quantises Q
in two levels.
"""

from __future__ import annotations

import dataclasses

from benchmarks.measured import Run, Shape, is_emulated, ratio
from benchmarks.text_table import Table, factor, number

Lengths = tuple[int, int, int]

SHORT, PROMPT, LONG = (1, 8192, 8192), (1, 16384, 16384), (1, 32768, 32768)
FULL = dict.fromkeys((SHORT, PROMPT, LONG), "")
TAILS = dict.fromkeys(((1, 16, 16384), (16, 16, 16384)), "")


@dataclasses.dataclass(frozen=True)
class Ratio:
  """One path's time over another's.

  Attributes:
    of, to: the two, of measured.COLUMNS.
    published: by shape (batch, query and key tokens of each), of ours those nearest to theirs, what
      the reports say; empty where they say nothing.
  """

  name: str
  of: str
  to: str
  published: dict[Lengths, str]


RATIOS = (
  Ratio(
    "stock / FP8, prefill",
    "dequant",
    "fp8",
    {
      SHORT: "1.74 (3.04 / 1.75 ms, of 48)",
      PROMPT: "1.89 (21.0 / 11.1 ms)",
      LONG: "1.73 (to the first token)",
    },
  ),
  Ratio(
    "A4Q x2 / FP8, prefill",
    "a4q x2",
    "fp8",
    FULL | {PROMPT: "1.62 (18.0 / 11.1 ms)", LONG: "1.52 (to the first token)"},
  ),
  Ratio("A4Q x2 / stock, prefill", "a4q x2", "dequant", FULL | {PROMPT: "0.857 (18.0 / 21.0 ms)"}),
  Ratio("A4Q x1 / stock, prefill", "a4q x1", "dequant", FULL),
  Ratio("repack / FP8, prefill", "repack", "fp8", FULL),
  Ratio("A8Q / FP8, prefill", "a8q", "fp8", FULL),
  Ratio(
    "repack / stock, chunk", "repack", "dequant", {(4, 128, 2048): "0.963 (0.2888 / 0.2999 ms)"}
  ),
  Ratio("repack / stock, tail", "repack", "dequant", TAILS),
  Ratio("A4Q x2 / stock, tail", "a4q x2", "dequant", TAILS),
  Ratio(
    "stock / FP8, decode",
    "dequant",
    "fp8",
    {(1, 1, 8192): "", (16, 1, 8192): "0.78 (9.63 / 12.35 us)", (64, 1, 8192): ""},
  ),
)
A4Q_US = {PROMPT: "18000"}  # in two levels
HEAD = ("NVFP4 over FP8", "published", "b/q/kv here", "here", "us here")


def table(run: Run | None, unmeasured: str = "") -> Table:
  """Ratios of the run beside published ones.

  Args:
    run: None where nothing was measured.
    unmeasured: says of what was published that the run does not have it; without a word such are
      left out.
  """
  shapes = run.attention if run is not None and run.is_of_kernels else {}
  rows = []
  for wanted in RATIOS:
    for lengths, published in wanted.published.items():
      cells = _cells(wanted, _at(shapes, lengths))
      if not cells and published and unmeasured:
        cells = unmeasured, ""
      if cells:
        rows.append((wanted.name, published, "/".join(map(str, lengths)), *cells))
  if run is not None and run.is_of_kernels:
    rows += _append(run)
    if rows:
      rows += _bytes(shapes)
  notes = [
    "Published ones are of other cards and shapes: compare what is divided, not the numbers."
  ]
  if any("emulated" in row[3] for row in rows):
    notes.append("Emulated A4Q shows what it computes; how fast it is takes FP4 tensor cores.")
  return Table("the published ratios", HEAD, rows, notes, left=3)


def a4q_times(run: Run) -> list[Table]:
  """Times of A4Q by kernels, which say something where a card has nothing to divide them by."""
  if not run.is_of_kernels:
    return []
  rows = []
  for shape, of in run.attention.items():
    found = [of.get(name) for name in ("a4q x1", "a4q x2")]
    if any(found):
      lengths = shape.batch, shape.q_len, shape.kv_len
      times = [number(row["us_median"]) if row else "" for row in found]
      rows.append(("/".join(map(str, lengths)), A4Q_US.get(lengths, ""), *times))
  head = "b/q/kv", "x2 published", "x1 here", "x2 here"
  return [Table("A4Q in us, Q in one level and in two", head, rows)] if rows else []


def _cells(wanted: Ratio, of: dict[str, dict]) -> tuple[str, ...]:
  """(ratio, times), or nothing where they were not measured."""
  value = ratio(of, wanted.of, wanted.to)
  if value is None:
    return ()
  mark = " emulated" * is_emulated(of[wanted.of])
  return factor(value) + mark, _times(of[wanted.of], of[wanted.to])


def _times(of: dict, to: dict) -> str:
  return f"{number(of['us_median'])} / {number(to['us_median'])}"


def _at(shapes: dict[Shape, dict], lengths: Lengths) -> dict[str, dict]:
  for shape, of in shapes.items():
    usual = shape.geometry == "8b" and shape.page_size == 64
    if usual and (shape.batch, shape.q_len, shape.kv_len) == lengths:
      return of
  return {}


def _append(run: Run) -> list[tuple[str, ...]]:
  """Appends by kernels without levers, of global scale 1."""
  found: dict[int, dict[str, dict]] = {}
  for row in run.newest_last(run.of_phase("append")):
    usual = row["data"] == "gaussian, global scale 1.0" and not row["levers"]
    if usual and row["implementation"] != "xla":
      found.setdefault(row["batch"], {})[row["k_format"]] = row
  return [
    (
      "stock / FP8, append",
      "2.79 (8.39 / 3.01 us)",
      f"{tokens} tokens",
      factor(value),
      _times(of["nvfp4"], of["fp8"]),
    )
    for tokens, of in sorted(found.items())
    if (value := ratio(of, "nvfp4", "fp8")) is not None
  ]


def _bytes(shapes: dict[Shape, dict]) -> list[tuple[str, ...]]:
  for of in shapes.values():
    ours, fp8 = (of.get(name, {}).get("bytes_per_token") for name in ("dequant", "fp8"))
    if ours and fp8:
      part = ours / fp8
      return [("cache bytes a token", "0.5625 (1.78 times as many)", "all", f"{part:.4f}", "")]
  return []
