"""What a gate of the quality benchmark is, and the judge: rows and gates to verdicts.

A gate selects rows, takes one number of them, and compares it with a threshold. A gate whose rows
are missing fails: what was not measured is not known to be good. quality_gates.py has the table.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.quality_rows import QualityRow

RULES = ("<=", ">=", ">", "<", "within")
OVER = ("worst", "median", "mean")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gate:
  """One line of the table.

  Attributes:
    name: unique.
    level: of the rows.
    where: field of a row -> its value, or a tuple of values; `config` is a config's name, `text`
      what stands last in `data`.
    metric: of the rows.
    rule, threshold: what must hold for the number; `within` is a distance to `expected`.
    why: what the threshold comes from.
    over: how rows become one number: the worst of them by the rule, the median or the mean.
    texts: that must all have been read, of a gate over several.
    relative_to: a config; the number is then the ratio to that config's row on the same data.
    expected: data -> number, for `within`; each must have been measured.
    field: of the row that holds the number.
    full_only: rows exist in full runs only.
    two_implementations: the number compares a kernel with the definition.
  """

  name: str
  level: str
  where: Mapping[str, object]
  metric: str
  rule: str
  threshold: float
  why: str
  over: str = "worst"
  texts: tuple[str, ...] = ()
  relative_to: str | None = None
  expected: Mapping[str, float] | None = None
  field: str = "value"
  full_only: bool = False
  two_implementations: bool = False


def gates_on(
  level: str, where: Mapping[str, object], *lines: tuple[str, str | None, str, str], **shared
) -> list[Gate]:
  """Gates on the same rows of several configs.

  Args:
    where, shared: as in Gate.
    lines: (name, config or None for any, "metric rule threshold", why).
  """
  gates = []
  for name, config, rule, why in lines:
    metric, rule, threshold = rule.rsplit(" ", 2)
    of = dict(where) if config is None else {"config": config} | dict(where)
    numbers = {"metric": metric, "rule": rule, "threshold": float(threshold)}
    gates.append(Gate(name=name, level=level, where=of, why=why, **numbers, **shared))
  return gates


@dataclasses.dataclass(frozen=True)
class Verdict:
  """What came of a gate; `passed` is None where it was not asked for. `note`: the deciding row."""

  gate: Gate
  passed: bool | None
  value: float | None
  note: str

  @property
  def word(self) -> str:
    return {True: "pass", False: "FAIL", None: "-"}[self.passed]


def judge(
  rows: Sequence[QualityRow],
  levels: Iterable[str],
  *,
  smoke: bool = False,
  kernels: bool = False,
  gates: Sequence[Gate],
  contexts: Iterable[int] | None = None,
) -> list[Verdict]:
  """The verdict of every gate of these levels.

  Args:
    rows: of one state of the sources.
    levels: that were measured.
    smoke: whether sizes were small; gates that need full ones are then left open.
    kernels: whether kernels should have run; gates that compare them with the definition are else
      left open.
    contexts: tokens of the texts that level `model` was asked to read; None: all that gates name.
  """
  levels = set(levels)
  chosen = [g for g in gates if g.level in levels]
  verdicts = []
  for gate in chosen:
    if gate.two_implementations and not kernels:
      verdicts.append(Verdict(gate, None, None, "the definition alone"))
    elif gate.full_only and smoke:
      verdicts.append(Verdict(gate, None, None, "a smoke run"))
    elif gate.level == "model" and contexts is not None and not _asked(gate, contexts):
      verdicts.append(Verdict(gate, None, None, "not asked for"))
    else:
      verdicts.append(_judge(gate, rows))
  return verdicts


def _asked(gate: Gate, contexts: Iterable[int]) -> bool:
  wanted = gate.where.get("context")
  if wanted is None:
    return True
  return not set(contexts).isdisjoint(wanted if isinstance(wanted, tuple) else (wanted,))


def _judge(gate: Gate, rows: Sequence[QualityRow]) -> Verdict:
  selected = [row for row in rows if row.metric == gate.metric and _selects(gate, row)]
  numbers = [(_number(gate, row, rows), row) for row in selected]
  measured = [(number, row) for number, row in numbers if number is not None]
  absent = set(gate.expected or ()) - {row.data for _, row in measured}
  absent |= set(gate.texts) - {_field(row, "text") for _, row in measured}
  if not measured or absent:
    return Verdict(gate, False, None, "no measurement" + "".join(f", {d}" for d in sorted(absent)))
  if any(math.isnan(number) for number, _ in measured):
    return Verdict(gate, False, math.nan, "not a number")
  if gate.over == "worst":
    pick = min if gate.rule in (">=", ">") else max
    value, row = pick(measured, key=lambda pair: pair[0])
    note = _place(row)
  else:
    value = getattr(statistics, gate.over)([number for number, _ in measured])
    note = f"{gate.over} of {len(measured)}"
  return Verdict(gate, _holds(value, gate), value, note)


def _selects(gate: Gate, row: QualityRow) -> bool:
  if row.level != gate.level or (gate.expected is not None and row.data not in gate.expected):
    return False
  for field, wanted in gate.where.items():
    if _field(row, field) not in (wanted if isinstance(wanted, tuple) else (wanted,)):
      return False
  return True


def _field(row: QualityRow, name: str):
  if name == "config":
    return row.config.name
  return row.data.split(", ")[-1] if name == "text" else getattr(row, name)


def _number(gate: Gate, row: QualityRow, rows: Sequence[QualityRow]) -> float | None:
  value = getattr(row, gate.field)
  if value is not None and gate.expected is not None:
    return abs(value - gate.expected[row.data])
  if value is None or gate.relative_to is None:
    return value
  same = lambda r: (r.level, r.metric, r.data, r.context, r.head_dim)
  peers = [r for r in rows if r.config.name == gate.relative_to and same(r) == same(row)]
  if not peers:
    return None
  # Where there are more: by the same operation, and by the same implementation.
  alike = lambda r: (r.operation == row.operation, r.implementation == row.implementation)
  base = getattr(max(peers, key=alike), gate.field)
  return value / base if base else math.nan


def _holds(value: float, gate: Gate) -> bool:
  return {
    "<=": value <= gate.threshold,
    "within": value <= gate.threshold,
    "<": value < gate.threshold,
    ">=": value >= gate.threshold,
    ">": value > gate.threshold,
  }[gate.rule]


def _place(row: QualityRow) -> str:
  return row.data if row.level == "format" else f"{row.data}, {row.context}"
