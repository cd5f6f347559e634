"""Files of the commands that serve requests, looked at before anything runs.

What is written must not be what is read, must not lose earlier results unasked, and must be
writable: a run of hours is no time to find out.
"""

from __future__ import annotations

import argparse
import os
import pathlib

READ = ("trace", "cost_table", "model_costs")
WRITTEN = ("keep", "out", "write_model_costs", "plot")
DRAWN = ("plot",)  # again from rows, so that nothing is lost with it


def check(options: argparse.Namespace) -> None:
  """Options that the command has not, or that were not given, are passed over.

  Raises:
    ValueError: two options name one file, or one to be written has something in it.
    OSError: a file cannot be written.
  """
  named: dict[object, str] = {}
  for name in READ + WRITTEN:
    path = getattr(options, name, None)
    if path is None:
      continue
    other = named.setdefault(_identity(path), name)
    if name in WRITTEN:
      if other != name:
        raise ValueError(f"{_option(name)} must be another file than {_option(other)}, got {path}")
      _claim(path, name, name in DRAWN or options.overwrite)


def _claim(path: pathlib.Path, name: str, overwrite: bool) -> None:
  if path.is_file() and path.stat().st_size and not overwrite:
    raise ValueError(f"{_option(name)} must be a new file, {path} has rows: --overwrite loses them")
  path.parent.mkdir(parents=True, exist_ok=True)
  new = not path.exists()
  path.open("a", encoding="utf-8").close()
  if new:
    path.unlink()


def _identity(path: pathlib.Path) -> object:
  """Equal for one file by two names."""
  if path.exists():
    found = os.stat(path)
    return found.st_dev, found.st_ino
  return path.resolve()


def _option(name: str) -> str:
  return f"--{name.replace('_', '-')}"
