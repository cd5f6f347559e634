"""The file of a matrix's rows: what stays in it when a run goes on, and rows as they come.

A run that goes on takes away only what it takes again: rows of its own cases without a time. All
others stay, those of other devices, kernels and versions of JAX too; the report tells them apart.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable

import jax

from benchmarks import cases, records
from benchmarks.measured import is_stale
from benchmarks.records import Row


@dataclasses.dataclass(frozen=True)
class Found:
  """What a file has.

  Attributes:
    rows: all of them.
    cut: whether a last line was left out, which a run that was killed has half written.
  """

  rows: tuple[dict, ...] = ()
  cut: bool = False

  @classmethod
  def of(cls, path: pathlib.Path) -> Found:
    """ValueError, which names the line, where one but the last is no row."""
    if not path.exists():
      return cls()
    text = path.read_text(encoding="utf-8")
    last = text.rpartition("\n")[-1]
    cut = bool(last) and not _is_json(last)
    return cls(tuple(records.parse(text.removesuffix(last) if cut else text, path)), cut)

  def done(self) -> set[tuple]:
    """Keys of the cases that this device, kernels and JAX have timed."""
    return {cases.key(row) for row in self.rows if _is_timed_here(row)}

  def staying(self, again: Iterable[cases.Case]) -> list[dict]:
    """The rows beside those of a run of `again`."""
    keys = {cases.key(case.fields) for case in again}
    return [
      row
      for row in self.rows
      if row["us_median"] is not None or not _is_of_here(row) or cases.key(row) not in keys
    ]


def _is_json(text: str) -> bool:
  try:
    json.loads(text)
  except json.JSONDecodeError:
    return False
  return True


def _is_of_here(row: dict) -> bool:
  here = jax.devices()[0].device_kind, jax.__version__
  return (row["device"], row["jax_version"]) == here


def _is_timed_here(row: dict) -> bool:
  timed = row["us_median"] is not None and not row["error"]
  return timed and not is_stale(row) and _is_of_here(row)


class Out:
  """The file while a run writes it; each row is in it as soon as it is known."""

  def __init__(self, path: pathlib.Path, staying: list[dict], revision: str | None):
    self._path, self._staying, self._revision = path, staying, revision

  def __enter__(self) -> Out:
    self._path.parent.mkdir(parents=True, exist_ok=True)
    # Written whole beside it, so that whatever ends this leaves the old rows or the new ones.
    whole = self._path.with_name(self._path.name + ".new")
    whole.write_text("".join(map(records.line_of, self._staying)), encoding="utf-8")
    os.replace(whole, self._path)
    self._file = self._path.open("a", encoding="utf-8")
    return self

  def __exit__(self, *error) -> None:
    self._file.close()

  def write(self, row: Row) -> None:
    if self._revision:
      row = dataclasses.replace(row, git_revision=self._revision)
    self._file.write(records.line(row))
    self._file.flush()
