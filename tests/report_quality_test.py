"""The report's section on accuracy, from the committed rows."""

import importlib.util
import pathlib

from absl.testing import absltest

from benchmarks import quality_configs, quality_rows, report_quality
from benchmarks.quality_gates import GATES
from tests.base import TestCase


class ReportQualityTest(TestCase):
  def test_gates_tables_and_provenance(self):
    rows = quality_rows.read(quality_rows.COMMITTED)
    said = report_quality.lines(rows, [pathlib.Path("error_against_length.png")])
    text = "\n".join(said)
    for gate in GATES:
      self.assertIn(gate.name[:40], text)
    self.assertIn(f"Recommended: `{quality_configs.RECOMMENDED}`", text)
    self.assertIn("![error against length](error_against_length.png)", text)
    for row in rows[:: len(rows) // 20]:
      self.assertIn(row.git_revision, text)

  @absltest.skipUnless(importlib.util.find_spec("matplotlib"), "matplotlib is not installed")
  def test_files(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    written = report_quality.write(folder)
    self.assertEqual(written[0].name, "quality.md")
    self.assertTrue(all(path.exists() for path in written))


if __name__ == "__main__":
  absltest.main()
