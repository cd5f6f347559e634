"""Costs from rows of the matrix, and how well choices from them do at shapes left out."""

import contextlib
import dataclasses
import io
import math
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest

from benchmarks import costs, held_out, matrix, measured, records
from nvfp4_pallas.dispatch import Target, use_target
from nvfp4_pallas.policy import CostTable, Geometry
from tests.base import TestCase
from tests.report_test import timed

HEADS = Geometry(32, 8, 128)


def at(path, us, *lengths, **changes):
  batch, q_len, kv_len = lengths
  phase = "decode" if q_len == 1 else "chunk"
  shape = {"phase": phase, "batch": batch, "q_len": q_len, "kv_len": kv_len}
  return timed(path, us, **{"part": "grid", "batch_invariant": False} | shape | changes)


def grid(us_of):
  """Rows of a grid by functions of q_len and kv_len."""
  return [
    at(path, us(q_len, kv_len), 1, q_len, kv_len)
    for path, us in us_of.items()
    for q_len in (16, 64, 256, 1024)
    for kv_len in (1024, 4096, 16384)
    if q_len <= kv_len
  ]


# Repack pays from 128 queries on; work grows with both.
TIMES = {
  "nvfp4_dequant": lambda q, kv: 5 + 1e-5 * q * kv,
  "nvfp4_repack": lambda q, kv: 5 + 1e-5 * kv * (0.7 * q + 38),
}


class CostsTestCase(TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    self.rows, self.out = self.folder / "rows.jsonl", self.folder / "costs.json"

  def table(self, rows):
    return costs.table(self.as_read(rows))

  def as_read(self, rows):
    records.write(rows, self.rows)
    return records.read(self.rows)

  def run_costs(self, *argv):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
      code = costs.main(list(argv))
    return code, printed.getvalue().splitlines()


class TableTest(CostsTestCase):
  def test_what_is_a_cost(self):
    rows = [
      at("nvfp4_dequant", 1.0, 1, 1, 64),
      at("nvfp4_dequant", 2.0, 1, 16, 64, part="tail"),
      at("nvfp4_dequant", 3.0, 1, 16, 65, part="geometries"),
      at("nvfp4_dequant", 4.0, 1, 16, 66, part="pages", page_size=16),
      at("nvfp4_dequant", 5.0, 1, 1, 67, part="levers", levers="w64"),
      at("nvfp4_dequant", 5.0, 1, 1, 67, part=None, levers="w64"),
      at("nvfp4_dequant", 6.0, 1, 1, 68, batch_invariant=True),
      at("nvfp4_dequant", 7.0, 1, 1, 69, implementation="flashinfer"),
      at("nvfp4_a4q", 8.0, 1, 1, 70, q_levels=1),
      at("nvfp4_dequant", None, 1, 1, 71, timer=None),
      at("nvfp4_dequant", 9.0, 1, 1, 72, timer="wall"),
    ]
    made = self.table(rows)
    self.assertEqual(
      [(row.phase, row.us) for row in made.rows], [("decode", 1.0), ("prefill", 2.0)]
    )

  def test_the_newest_of_the_matrix_counts(self):
    times = [f"202{n}-01-01T00:00:00+00:00" for n in (6, 7, 8)]
    rows = [
      at("fp8", us, 1, 1, 64, time=time, part=part)
      for us, time, part in zip((1.0, 2.0, 3.0), times, ("grid", "decode", None), strict=True)
    ]
    for order in (rows, rows[::-1]):
      self.assertEqual([row.us for row in self.table(order).rows], [2.0])

  def test_one_command_records_a_card_s_own(self):
    asked = []

    def run(argv):
      asked.append(argv)
      here = [dataclasses.replace(row, device="cpu") for row in grid(TIMES)]
      records.write([*here, at("nvfp4_dequant", 1.0, 1, 1, 64)], self.rows)
      return 1  # some case failed: the others are a table all the same

    with mock.patch.object(matrix, "main", run), use_target(Target("sm_90")):
      code, lines = self.run_costs(str(self.rows), "--record", "--out", str(self.out))
    self.assertEqual(code, 0)
    ((argv),) = asked
    self.assertEqual(argv[:4], ["--out", str(self.rows), "--resume", "--no-peers"])
    self.assertContainsSubset(["grid", "decode", "geometries"], argv[5:])
    self.assertEqual(CostTable.load(self.out).device, "cpu")  # not of the other row in the file
    self.assertLen(CostTable.load(self.out).rows, len(grid(TIMES)))
    self.assertIn("costs of cpu, abc", lines[-1])

  def test_recording_needs_a_gpu(self):
    error = io.StringIO()
    with contextlib.redirect_stderr(error), self.assertRaises(SystemExit):
      costs.main([str(self.rows), "--record", "--out", str(self.out)])
    self.assertIn("--record needs a GPU, JAX sees only cpu", error.getvalue())

  def test_recording_names_one_file(self):
    error = io.StringIO()
    with contextlib.redirect_stderr(error), self.assertRaises(SystemExit):
      costs.main(["--record", "--out", str(self.out)])
    self.assertIn("--record takes one ROWS.jsonl to write, got 0", error.getvalue())


class HeldOutTest(CostsTestCase):
  def test_smooth_times_are_chosen_right(self):
    """At every shape between others, from the rest, within 5 % of the best."""
    judged = list(held_out.left_out(self.table(grid(TIMES)), held_out.ALLOWED["exact"]))
    self.assertLen(judged, 8)
    self.assertLessEqual(max(one.loss for one in judged), held_out.TOLERANCE)
    self.assertEqual({one.chosen for one in judged}, {"nvfp4_dequant", "nvfp4_repack"})

  def test_a_bad_choice_is_seen(self):
    """One shape is unlike all around it: from those it cannot be guessed."""
    rows = grid(TIMES)
    odd = next(
      row for row in rows if (row.read_path, row.q_len, row.kv_len) == ("nvfp4_dequant", 64, 4096)
    )
    rows[rows.index(odd)] = at("nvfp4_dequant", 10 * odd.us_median, 1, 64, 4096)
    records.write(rows, self.rows)
    code, lines = self.run_costs(str(self.rows), "--judge")
    self.assertEqual(code, 0)
    self.assertEqual(lines[0], "exact, each shape left out: 7 of 8 choices within 5 % of the best")
    self.assertIn("prefill 1/64/4096, heads 32/8/128: nvfp4_dequant, best nvfp4_repack", lines[2])
    # By the times above repack is slower below 128 queries, dequant from there on.
    self.assertRegex(lines[1], r"^  always dequant 3, always repack 6$")
    self.assertRegex(lines[3], r"exact, at the edges too: \d+ of 12 choices")

  def test_other_heads_are_judged_by_the_table_s(self):
    """A model of a quarter of the heads, at times that follow from its heads."""
    few = {"num_q_heads": 8, "num_kv_heads": 2, "part": "geometries"}
    others = [at(path, us(64, 4096), 4, 64, 4096, **few) for path, us in TIMES.items()]
    made = self.table(grid(TIMES))
    rows = [costs._cost(row) for row in self.as_read(others)]
    (judged,) = held_out.unknown(made, rows, held_out.ALLOWED["exact"])
    self.assertEqual((judged.geometry, judged.loss), (Geometry(8, 2, 128), 1.0))
    self.assertEqual(judged.chosen, judged.best)

  def test_what_was_not_timed_is_not_judged(self):
    rows = [row for row in grid(TIMES) if (row.read_path, row.q_len) != ("nvfp4_repack", 256)]
    judged = list(held_out.left_out(self.table(rows), held_out.ALLOWED["exact"]))
    self.assertFalse(
      [one for one in judged if one.chosen == "nvfp4_repack" and one.shape[1] == 256]
    )

  def test_the_committed_matrix_judges_the_shipped_costs(self):
    """Heads that the table does not know."""
    rows = [
      row
      for path in measured.files()
      for row in records.read(path)
      if costs._is_cost(row, (costs.OTHER_HEADS,)) and row["device"] == CostTable.h200().device
    ]
    self.assertNotEmpty(rows)
    rows = [costs._cost(row) for row in rows]
    judged = list(held_out.unknown(CostTable.h200(), rows, held_out.ALLOWED["exact"]))
    self.assertNotEmpty(judged)
    losses = [one.loss for one in judged]
    # Heads are scaled, not measured, so single choices may miss; most may not.
    self.assertLessEqual(math.prod(losses) ** (1 / len(losses)), held_out.TOLERANCE, judged)


if __name__ == "__main__":
  absltest.main()
