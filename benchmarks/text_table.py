"""A table of text: for a terminal within 100 columns, and as Markdown."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence

from benchmarks.table import WIDTH


@dataclasses.dataclass(frozen=True)
class Table:
  """Cells of text; the first `left` columns are set to the left.

  Attributes:
    notes: what a reader must know, below it.
  """

  title: str
  head: Sequence[str]
  rows: Sequence[Sequence[str]]
  notes: Sequence[str] = ()
  left: int = 1

  def terminal(self) -> list[str]:
    """Lines; a last column that is too long goes on below itself, and numbers that do not fit are
    in a second table below the first, with the left columns once more."""
    cells = [list(self.head), *map(list, self.rows)]
    widths = [max(map(len, of)) for of in zip(*cells, strict=True)]
    if sum(widths) + len(widths) - 1 > WIDTH and not self._has_prose:
      return self._in_two(widths)
    gap = "  " if sum(widths) + 2 * len(widths) <= WIDTH or self._has_prose else " "
    before = sum(widths[:-1]) + len(gap) * len(widths[:-1])
    lines = []
    for row in cells:
      shown = [
        cell.ljust(width) if i < self.left else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))
      ]
      first, *more = textwrap.wrap(shown[-1].rstrip(), WIDTH - before) or [""]
      lines.append(gap.join([*shown[:-1], first]).rstrip())
      lines += [" " * before + line for line in more]
    lines.insert(1, "-" * max(map(len, lines)))
    notes = [line for note in self.notes for line in textwrap.wrap(note, WIDTH)]
    return [self.title, *lines, *notes]

  def _in_two(self, widths: list[int]) -> list[str]:
    fitting = self.left + 1  # columns, one number at least
    while sum(widths[: fitting + 1]) + fitting <= WIDTH:
      fitting += 1
    part = lambda row, first: [*row[: self.left], *row[first:]]
    first = dataclasses.replace(
      self, head=self.head[:fitting], rows=[row[:fitting] for row in self.rows], notes=()
    )
    rest = dataclasses.replace(
      self, head=part(self.head, fitting), rows=[part(row, fitting) for row in self.rows]
    )
    return [*first.terminal(), "", *rest.terminal()]

  @property
  def _has_prose(self) -> bool:
    """Whether the last column is set to the left, and may be broken."""
    return self.left == len(self.head)

  def markdown(self) -> list[str]:
    rule = [":--" if i < self.left else "--:" for i in range(len(self.head))]
    rows = [self.head, rule, *self.rows]
    notes = [line for note in self.notes for line in ("", note)]
    lines = ("| " + " | ".join(map(_in_markdown, row)) + " |" for row in rows)
    return [f"### {self.title}", "", *lines, *notes]


def _in_markdown(cell: str) -> str:
  return " ".join(cell.split()).replace("|", "\\|")


def number(us: float | None) -> str:
  """Microseconds: a decimal where it says something."""
  if us is None:
    return "-"
  return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 1000 else f"{us:.0f}"


def share(value: float | None) -> str:
  return "" if value is None else f"{100 * value:.0f} %"


def factor(value: float | None) -> str:
  return "" if value is None else f"{value:.2f}"
