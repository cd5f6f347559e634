"""Rows as a table within 100 columns, and what it says."""

from __future__ import annotations

import statistics
import textwrap

import numpy as np

from benchmarks.records import Row

WIDTH = 100


def of_rows(rows: list[Row]) -> list[str]:
  head = (
    f"{'phase':8}{'data':>17} {'b/q/kv':>10}  {'read path':16}{'K, V':13}{'B/token':>8}"
    f"{'kernel':>9}{'format':>8}{'SNR K':>7}"
  )
  units = f"{'':8}{'':>17} {'':>10}  {'':16}{'':13}{'':>8}{'error':>9}{'error':>8}{'dB':>7}"
  lines, group = [head, units], None
  for row in rows:
    if (row.phase, row.data) != group:
      group = row.phase, row.data
      lines.append("-" * len(head))
    lines.append(_line(row))
  return lines


def _line(row: Row) -> str:
  data = row.data.replace("smollm2 layer", "SmolLM2 layer")
  snr = row.snr_db or {}
  db = snr.get("k", snr.get("x"))
  return (
    f"{row.phase:8}{data:>17} {f'{row.batch}/{row.q_len}/{row.kv_len}':>10}  "
    f"{_path(row):16}{_formats(row):13}"
    f"{_number(row.bytes_per_token, 8, '.0f')}{_number(row.kernel_error, 9, '.1e')}"
    f"{_number(row.format_error, 8, '.4f')}{_number(db, 7, '.1f')}"
  ).rstrip()


def _path(row: Row) -> str:
  if row.phase == "pack":
    return "1 level" if row.q_levels == 1 else f"{row.q_levels} levels"
  if row.read_path == "nvfp4_a4q":
    return f"nvfp4_a4q, Q x{row.q_levels}"
  return row.read_path or "-"


def _formats(row: Row) -> str:
  if row.phase == "pack":
    return row.q_rounding.split("; ")[1]
  return row.k_format if row.k_format == row.v_format else f"{row.k_format}, {row.v_format}"


def _number(value, width, spec) -> str:
  return f"{'':>{width}}" if value is None else f"{value:{width}{spec}}"


def reading(rows: list[Row]) -> str:
  """One paragraph: what the numbers are, and what they are not."""

  def mean(select, value):
    return statistics.fmean(value(r) for r in rows if select(r))

  attention = [r for r in rows if r.read_path]
  real = lambda path, k="nvfp4", levels=None: (
    lambda r: (
      r.read_path == path
      and r.data != "gaussian"
      and r.k_format == k
      and (levels is None or r.q_levels == levels)
    )
  )
  packed = next(r for r in rows if r.phase == "pack" and r.q_levels == 1)
  k_db = mean(real("nvfp4_dequant"), lambda r: r.snr_db["k"])
  error = lambda *a, **k: 100 * mean(real(*a, **k), lambda r: r.format_error)
  ratio = lambda levels: mean(real("nvfp4_a4q", levels=levels), lambda r: r.q_error_ratio)
  worst = float(np.max([r.kernel_error or 0.0 for r in attention]))
  who = sorted({r.implementation for r in rows})
  text = f"""
    Reading: run by {", ".join(who)} on {rows[0].device}. NVFP4 keeps {packed.snr_db["x"]:.1f} dB
    of Gaussian values and {k_db:.1f} dB of SmolLM2's keys at 4.5 bits a value, 9/16 of the bytes
    of FP8. On real activations the attention output is off by {error("nvfp4_dequant"):.1f} % with
    an NVFP4 cache, {error("nvfp4_dequant", "fp8"):.1f} % with FP8 keys and NVFP4 values, and
    {error("fp8", "fp8"):.1f} % with FP8; a BF16 cache is exact, its inputs being BF16. Quantising
    Q as well costs a factor {ratio(1):.2f} with one NVFP4 level and {ratio(2):.3f} with two. The
    arithmetic's own error, against float64 on the same bytes, is at most {worst:.0e}. No speed is
    claimed here: the rows hold wall times of what ran, kernels are timed on a GPU.
  """
  return "\n".join(textwrap.wrap(" ".join(text.split()), WIDTH))
