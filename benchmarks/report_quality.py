"""The report's section on accuracy: gates, tables and plots of the committed rows of `quality`."""

from __future__ import annotations

import pathlib

from benchmarks import quality, quality_configs, quality_plot, quality_rows, quality_table
from benchmarks.quality_rows import LEVELS, QualityRow

FILE = "quality.md"


def write(folder: pathlib.Path) -> list[pathlib.Path]:
  """quality.md and its plots; nothing where no rows are committed."""
  if not quality_rows.COMMITTED.exists():
    return []
  rows = quality_rows.read(quality_rows.COMMITTED)
  drawn = [pathlib.Path(path) for path in quality_plot.draw(rows, folder)]
  path = folder / FILE
  path.write_text("\n".join(lines(rows, drawn)) + "\n", encoding="utf-8")
  return [path, *drawn]


def lines(rows: list[QualityRow], drawn: list[pathlib.Path]) -> list[str]:
  current = [row for row in rows if not row.stale]
  verdicts = quality.verdicts_of(current, list(LEVELS))
  failed = sum(verdict.passed is False for verdict in verdicts)
  said = [
    "# Accuracy",
    "",
    f"{len(rows)} numbers, {len(rows) - len(current)} of them stale; {len(verdicts)} gates, "
    f"{failed} of them fail. Recommended: `{quality_configs.RECOMMENDED}`.",
    "",
    *(f"- {line}" for line in provenance(rows)),
    "",
  ]
  for path in drawn:
    said += [f"![{path.stem.replace('_', ' ')}]({path.name})", ""]
  tables = [("gates", quality_table.of_verdicts(verdicts))]
  tables += [(level, quality_table.of_rows(rows, level)) for level in LEVELS]
  for title, table in tables:
    said += [f"## {title}", "", "```", *table, "```", ""]
  return said


def provenance(rows: list[QualityRow]) -> list[str]:
  """Who measured which level, where and with which revision."""
  places = {(row.level, row.device, row.implementation, row.git_revision) for row in rows}
  return [f"{level}: {who} on {device}, {rev}" for level, device, who, rev in sorted(places)]
