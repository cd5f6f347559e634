"""Rows of the quality benchmark: through a file and back, stale when sources change."""

import dataclasses
import json
import math
import pathlib
import shutil
from unittest import mock

from absl.testing import absltest, parameterized

from benchmarks import measured, quality, quality_configs, quality_rows, sources
from benchmarks.quality_rows import QualityRow
from tests.base import TestCase


def example_row(**changes) -> QualityRow:
  fields = {
    "level": "attention",
    "config": quality_configs.NVFP4,
    "operation": "decode",
    "data": "gauss",
    "context": 1024,
    "head_dim": 128,
    "metric": "rel_l2",
    "value": 0.14,
    "bits_per_value": 4.5,
  }
  return QualityRow(**fields | changes)


class RowsTest(TestCase):
  def test_a_file_gives_back_what_was_written(self):
    rows = [
      example_row(ci_low=0.13, ci_high=0.15),
      example_row(config=quality_configs.BY_NAME["nvfp4 mean hadK 4/6 w64"], metric="kl"),
      example_row(value=math.inf, metric="snr_db", bits_per_value=None),
      example_row(
        config=quality_configs.CALIBRATED,
        calibrated_on=quality_configs.CalibratedOn("some text", 512, 2.0),
      ),
    ]
    path = pathlib.Path(self.create_tempdir().full_path) / "new" / "rows.jsonl"
    quality_rows.write(rows, path)
    self.assertEqual(quality_rows.read(path), rows)

  def test_numbers_of_a_case_share_a_line(self):
    rows = [
      example_row(),
      example_row(metric="kl", ci_low=0.1, ci_high=0.2),
      example_row(context=8),
    ]
    path = pathlib.Path(self.create_tempdir().full_path) / "rows.jsonl"
    quality_rows.write(rows, path)
    self.assertLen(path.read_text().splitlines(), 2)
    self.assertEqual(
      [dataclasses.replace(r, time="") for r in quality_rows.read(path)],
      [dataclasses.replace(r, time="") for r in rows],
    )

  def test_a_fault_stays_visible(self):
    line = quality_rows.to_json([example_row(value=math.nan)])
    json.loads(line, parse_constant=lambda name: self.fail(f"{name} is no JSON"))
    self.assertTrue(math.isnan(quality_rows.from_json(line)[0].value))

  def test_numbers_are_short(self):
    line = quality_rows.to_json([example_row(value=0.123456789)])
    self.assertIn('"numbers": {"rel_l2": 0.123457}', line)

  def test_a_level_must_be_known(self):
    with self.assertRaisesRegex(ValueError, "level must be one of .*, got 'layer'"):
      example_row(level="layer")

  def test_rows_of_other_sources_are_stale(self):
    row = example_row()
    self.assertFalse(row.stale)
    self.assertTrue(dataclasses.replace(row, source_hash="another").stale)
    self.assertNotEqual(row.source_hash, sources.definition_hash("mosaic_sm90"))

  def test_sources_are_those_that_make_numbers(self):
    modules = sources.definition_modules()
    self.assertContainsSubset({"format", "cache", "attention", "read_paths", "batch"}, modules)
    self.assertNoCommonElements({"policy", "debug", "checkpoint", "interop"}, modules)

  def test_kernels_of_other_implementations_make_no_row_stale(self):
    folder = pathlib.Path(self.create_tempdir().full_path) / "nvfp4_pallas"
    shutil.copytree(sources.KERNELS.parent, folder)
    kernels = folder / "kernels"
    self.enter_context(mock.patch.object(sources, "KERNELS", kernels))
    self.addCleanup(sources.definition_hash.cache_clear)
    self.addCleanup(sources._imports.cache_clear)

    def hashes():
      sources.definition_hash.cache_clear()
      sources._imports.cache_clear()
      return [sources.definition_hash(who) for who in ("xla", "mosaic_sm90", "another_sm0")]

    def same(these, those):
      return [this == that for this, that in zip(these, those, strict=True)]

    (kernels / "decode_another_sm0.py").write_text("from nvfp4_pallas.kernels import another\n")
    (kernels / "another.py").write_text("")
    first = hashes()
    (kernels / "another.py").write_text("x = 1\n")
    second = hashes()
    self.assertEqual(same(first, second), [True, True, False])
    (kernels / "decode_attend.py").write_text("")
    self.assertEqual(same(second, hashes()), [True, False, True])
    (folder / "format.py").write_text("")
    self.assertEqual(same(second, hashes()), [False, False, False])

  @parameterized.parameters(
    ("x = 1  # one", True),
    ('"""Of a module."""\n\nx = 1', True),
    ("x = (\n  # in between\n  1\n)", False),  # other tokens
    ("x = 2", False),
    ('x = 1\n"""At its\nend."""', True),
    ('x = 1\ny = """At its end."""', False),
    ('x = "1"', False),
  )
  def test_what_is_said_about_code_is_not_in_the_hash(self, source, same):
    self.assertEqual(sources.code_of(source + "\n") == sources.code_of("x = 1\n"), same)

  def test_timings_leave_quality_rows_alone(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    quality_rows.write([example_row()], folder / measured.QUALITY)
    self.assertEqual(measured.files((), folder), [])

  def test_committed_rows_are_shown_and_judged(self):
    path = pathlib.Path(self.create_tempdir().full_path) / "quality.jsonl"
    quality_rows.write([example_row(), example_row(source_hash="another", context=8192)], path)
    with mock.patch.object(quality_rows, "COMMITTED", path), mock.patch("builtins.print") as out:
      self.assertEqual(quality.main(["--committed"]), 1)  # most gates have no row
    printed = "\n".join(str(call.args[0]) for call in out.call_args_list)
    self.assertRegex(printed, r"nvfp4 .*0\.1400.* STALE")
    self.assertIn("1 of 2 rows are stale", printed)


class ConfigsTest(TestCase):
  def test_names_are_unique(self):
    self.assertLen(quality_configs.BY_NAME, len(quality_configs.CONFIGS))
    self.assertIn(quality_configs.RECOMMENDED, quality_configs.BY_NAME)

  @parameterized.parameters(("bf16", 16), ("fp8", 8), ("fp8/nvfp4", 6.25), ("nvfp4", 4.5))
  def test_bits_of_whole_pages(self, name, bits):
    config = quality_configs.BY_NAME[name]
    self.assertEqual(quality_configs.bits_per_value(config, 8192), bits)
    # A page that is begun is a page.
    self.assertEqual(quality_configs.bits_per_value(config, 8191), bits * 8192 / 8191)

  def test_bits_with_a_ring(self):
    config = quality_configs.BY_NAME["nvfp4 w64"]
    in_pages = 8192 - 64
    ring = 64 + 16
    bits = (4.5 * in_pages + 16 * ring) / 8192
    self.assertEqual(quality_configs.bits_per_value(config, 8192), bits)
    self.assertEqual(quality_configs.bits_per_value(config, 64), 16 * ring / 64)

  def test_calibration_must_be_given_where_it_is_needed(self):
    shape = {"num_pages": 1, "num_kv_heads": 1, "head_dim": 64}
    with self.assertRaisesRegex(ValueError, "k_mean must be given .* got nvfp4 mean"):
      quality_configs.make_cache(quality_configs.K_MEAN, **shape)
    with self.assertRaisesRegex(ValueError, "v_global_scale must be given .* got nvfp4"):
      quality_configs.make_cache(quality_configs.NVFP4, **shape, v_global_scale=2.0)


if __name__ == "__main__":
  absltest.main()
