"""How good policy.py's choices are at shapes that a table of costs does not know."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator

from nvfp4_pallas.policy import EXACT_PATHS, PHASES, Cost, CostTable, Geometry, choose_read_path

NVFP4 = ("nvfp4", "nvfp4")
TOLERANCE = 1.05  # of the best measured time
BASELINES = ("nvfp4_dequant", "nvfp4_repack")
LISTED = 8  # of the worst
ALLOWED = {"exact": EXACT_PATHS, "with a8q": (*EXACT_PATHS, "nvfp4_a8q")}
Place = tuple[str, Geometry, tuple[int, int, int]]  # phase, heads, (batch, q_len, kv_len)


@dataclasses.dataclass(frozen=True)
class Judgement:
  """One choice.

  Attributes:
    loss: the chosen path's measured time over the best one's.
    always: the same of paths that one could always take, those of BASELINES that were timed.
  """

  phase: str
  geometry: Geometry
  shape: tuple[int, int, int]
  chosen: str
  best: str
  loss: float
  always: dict[str, float]

  @property
  def said(self) -> str:
    heads = f"{self.geometry.num_q_heads}/{self.geometry.num_kv_heads}/{self.geometry.head_dim}"
    shape = "/".join(map(str, self.shape))
    return f"{self.phase} {shape}, heads {heads}: {self.chosen}, best {self.best}, {self.loss:.2f}"


def times(rows: Iterable[Cost], allowed: tuple[str, ...]) -> dict[Place, dict[str, float]]:
  """Over NVFP4 keys and values, of each place the time by each path."""
  found: dict[Place, dict[str, float]] = {}
  for row in rows:
    if (row.k_format, row.v_format) == NVFP4 and row.read_path in allowed:
      found.setdefault((row.phase, row.geometry, row.shape), {})[row.read_path] = row.us
  return found


def left_out(
  table: CostTable, allowed: tuple[str, ...], *, everywhere: bool = False
) -> Iterator[Judgement]:
  """Of each shape between others, chosen from the table without it.

  Args:
    everywhere: also of those at the table's edges, which the rest must be extrapolated to.
  """
  known = times(table.rows, allowed)
  for phase in PHASES:
    shapes = [place[2] for place in known if place[0] == phase]
    for place in known:
      if place[0] == phase and (everywhere or is_interior(place[2], shapes)):
        rest = tuple(row for row in table.rows if row.shape != place[2])
        judged = _judge(place, known[place], dataclasses.replace(table, rows=rest), allowed)
        if judged is not None:
          yield judged


def unknown(
  table: CostTable, rows: Iterable[Cost], allowed: tuple[str, ...]
) -> Iterator[Judgement]:
  """Of rows that are none of the table's."""
  for place, of in times(rows, allowed).items():
    judged = _judge(place, of, table, allowed)
    if judged is not None:
      yield judged


def is_interior(shape, shapes) -> bool:
  """Whether others differ from it in q_len alone or in kv_len alone, on both sides."""
  for axis in (1, 2):
    rest = shape[:axis] + shape[axis + 1 :]
    line = [other[axis] for other in shapes if other[:axis] + other[axis + 1 :] == rest]
    if min(line) < shape[axis] < max(line):
      return True
  return False


def _judge(place: Place, of: dict[str, float], table: CostTable, allowed) -> Judgement | None:
  """None where the chosen path was not timed there."""
  phase, geometry, (batch, q_len, kv_len) = place
  chosen = choose_read_path(
    phase, q_len, kv_len, batch, geometry, table.device, table, formats=NVFP4, allowed=allowed
  ).read_path
  if chosen not in of:
    return None
  best = min(of, key=lambda path: of[path])
  always = {path: of[path] / of[best] for path in BASELINES if path in of}
  return Judgement(phase, geometry, place[2], chosen, best, of[chosen] / of[best], always)


def lines(table: CostTable, others: Iterable[Cost]) -> list[str]:
  """For people: how many choices are within TOLERANCE, of policy.py and of none; the worst."""
  said, others = [], list(others)
  for name, allowed in ALLOWED.items():
    for what, judged in (
      ("each shape left out", list(left_out(table, allowed))),
      ("at the edges too", list(left_out(table, allowed, everywhere=True))),
      ("other heads", list(unknown(table, others, allowed))),
    ):
      good = sum(one.loss <= TOLERANCE for one in judged)
      percent = round(100 * (TOLERANCE - 1))
      said.append(f"{name}, {what}: {good} of {len(judged)} choices within {percent} % of the best")
      counts = (
        f"always {path.removeprefix('nvfp4_')} {sum(loss <= TOLERANCE for loss in losses)}"
        for path in BASELINES
        if (losses := [one.always.get(path, math.inf) for one in judged])
      )
      said.append(f"  {', '.join(counts)}")
      worst = sorted(judged, key=lambda one: -one.loss)[:LISTED]
      said += [f"  {one.said}" for one in worst if one.loss > TOLERANCE]
  return said
