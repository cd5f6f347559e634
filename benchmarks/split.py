"""What each kernel of a call costs, of rows whose calls launch more than one."""

from __future__ import annotations

from benchmarks.sources import launcher
from benchmarks.table import WIDTH
from nvfp4_pallas.dispatch import IMPLEMENTATIONS

_INDENT = " " * 8
_LONGEST = 40  # of a name; cuDNN's are longer


def costs(row: dict) -> dict[str, float]:
  """Microseconds by kernel, in order of launching; XLA's together where there are many.

  What XLA's kernels are called says nothing. Empty for rows of before kernels were timed apart.
  """
  by_kernel = row.get("us_by_kernel") or {}
  of_a_peer = row.get("implementation", "xla") not in IMPLEMENTATIONS  # its names say something
  of_xla = [name for name in by_kernel if not of_a_peer and _is_of_xla(name)]
  together = f"xla ({len(of_xla)})" if len(of_xla) > 1 else None
  summed: dict[str, float] = {}
  for name, us in by_kernel.items():
    shown = together if together and name in of_xla else _short(name)
    summed[shown] = summed.get(shown, 0.0) + us
  return summed


def lines(row: dict) -> list[str]:
  """The costs, below the row's own line."""
  printed = [""]
  for name, us in costs(row).items():
    cell = f"  {name} {us:.1f}"
    if len(_INDENT + printed[-1] + cell) > WIDTH:
      printed.append("")
    printed[-1] += cell
  return [_INDENT + line for line in printed]


def _is_of_xla(name: str) -> bool:
  return launcher(name) is None and not name.startswith("cudnn")


def _short(name: str) -> str:
  return name.removesuffix("_mosaic_gpu_kernel")[:_LONGEST]
