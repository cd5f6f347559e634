"""Rows and verdicts of the quality benchmark as tables within 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from benchmarks.quality_judge import Verdict
from benchmarks.quality_rows import QualityRow

WIDTH = 100
_NAME = 24
_CELL = 8  # the width of a number
_OPERATION = 20
_METRICS = 5  # that fit beside an operation
# Of the levels that have them: (metric, heading, how to write it).
_COLUMNS = {
  "attention": (
    ("rel_l2", "rel L2", ".4f"),
    ("snr_db", "SNR dB", ".1f"),
    ("cos", "cosine", ".4f"),
    ("kl", "KL", ".1e"),
    ("top1", "top 1", ".3f"),
    ("rel_l2, q only", "Q only", ".3f"),
    ("rel_l2, k only", "K only", ".3f"),
    ("rel_l2, v only", "V only", ".3f"),
  ),
}
_Q_PATHS = ("nvfp4_a4q", "nvfp4_a8q")
FREE_Q = 1.02  # a quantised Q within this of a BF16 one holds


def of_rows(rows: Sequence[QualityRow], level: str) -> list[str]:
  """The level's table; a row whose sources have changed since is marked STALE."""
  of_level = [row for row in rows if row.level == level]
  if not of_level:
    return []
  if level == "format":
    return _of_format(of_level)
  return _of_cases(of_level, _COLUMNS.get(level))


def _of_format(rows: Sequence[QualityRow]) -> list[str]:
  data = list(dict.fromkeys(row.data for row in rows))
  head = f"{'SQNR, dB':13}{'bits':>4}" + "".join(f"{_short(name):>10}" for name in data)
  lines = [head, "-" * len(head)]
  for name, group in _grouped(rows, lambda row: row.config.name):
    of = {row.data: row.value for row in group}
    bits = group[0].bits_per_value
    cells = "".join(f"{of[d]:>10.2f}" if d in of else f"{'':>10}" for d in data)
    lines.append(f"{name:13}{'' if bits is None else f'{bits:.1f}':>4}{cells}{_stale(group)}")
  return lines


def _short(distribution: str) -> str:
  short = {"student-": "", "outliers": "outl.", "biased": "bias", "tiny ": "", "huge ": ""}
  for long, instead in short.items():
    distribution = distribution.replace(long, instead)
  return distribution


def _of_cases(rows: Sequence[QualityRow], columns) -> list[str]:
  """A block for each case, a line for each config."""
  lines = []
  case = lambda row: (row.data, row.context, row.head_dim)
  for (data, context, head_dim), group in _grouped(rows, case):
    if lines:
      lines.append("")
    title = f"{data}, {context} keys, D {head_dim}"
    # What a model did, and what came of it, differs by data; of one layer it does not.
    shown = columns or _first_metrics(group)
    name_width = _NAME if columns else _NAME + _OPERATION
    head = f"{'':{name_width}}{'bits':>5}" + "".join(f"{h:>{_CELL}}" for _, h, _ in shown)
    lines += [title, head, "-" * len(head)]
    for (_, operation), of_config in _grouped(group, lambda r: (r.config.name, r.operation)):
      lines.append(_line(of_config, shown, group, "" if columns else operation))
  return lines


def _first_metrics(rows: Sequence[QualityRow]):
  metrics = list(dict.fromkeys(row.metric for row in rows))[:_METRICS]
  return [(metric, metric.replace("answer_", "")[: _CELL - 1], ".2g") for metric in metrics]


def _line(rows: Sequence[QualityRow], columns, others: Sequence[QualityRow], operation: str) -> str:
  of, config, bits = {row.metric: row.value for row in rows}, rows[0].config, rows[0].bits_per_value
  cells = "".join(f"{f'{of[m]:{spec}}' if m in of else '':>{_CELL}}" for m, _, spec in columns)
  name = f"{config.name:{_NAME}}" + (f"{operation:{_OPERATION}}" if operation else "")
  line = f"{name}{'' if bits is None else f'{bits:.2f}':>5}{cells}"
  return f"{line}{_of_q(rows[0], of, others)}{_stale(rows)}".rstrip()


def _of_q(row: QualityRow, of: dict[str, float], others: Sequence[QualityRow]) -> str:
  """Whether a quantised Q costs as good as nothing beside the same cache with Q in BF16."""
  base = row.config.name.split(", Q ")[0]
  wide = [r.value for r in others if r.config.name == base and r.metric == "rel_l2"]
  if row.config.read_path not in _Q_PATHS or not wide or "rel_l2" not in of:
    return ""
  return "" if of["rel_l2"] <= FREE_Q * wide[0] else " fails"


def _stale(rows: Sequence[QualityRow]) -> str:
  return " STALE" if any(row.stale for row in rows) else ""


def _grouped(rows: Iterable[QualityRow], key) -> list[tuple]:
  groups: dict = {}
  for row in rows:
    groups.setdefault(key(row), []).append(row)
  return list(groups.items())


def of_verdicts(verdicts: Sequence[Verdict]) -> list[str]:
  """A line for each gate, with the reason of the threshold below one that failed."""
  head = f"{'gate':48}{'value':>8} {'':6} {'needs':>6}  {'':4}  at"
  lines = [head, "-" * len(head)]
  for verdict in verdicts:
    gate = verdict.gate
    value = "-" if verdict.value is None else f"{verdict.value:.3g}"
    line = f"{gate.name:48}{value:>8} {gate.rule:6} {gate.threshold:>6g}  {verdict.word:4}"
    lines.append(f"{line}  {verdict.note}"[:WIDTH])
    if verdict.passed is False:
      lines += textwrap.wrap(gate.why, WIDTH, initial_indent="    ", subsequent_indent="    ")
  counted = [sum(v.passed is state for v in verdicts) for state in (True, False, None)]
  lines.append(f"{counted[0]} gates pass, {counted[1]} fail, {counted[2]} not measured")
  return lines
