"""What moved between two files of rows."""

import contextlib
import dataclasses
import io
import pathlib
import tempfile

from absl.testing import absltest, parameterized

from benchmarks import compare, records
from benchmarks.table import WIDTH
from tests.base import TestCase
from tests.report_test import cudnn, timed


def ranged(path, us, spread=0.01, **changes):
  return timed(path, us, us_min=us * (1 - spread), us_max=us * (1 + spread), **changes)


class CompareTest(TestCase):
  def compare(self, a, b, *, same_sources=False):
    if not same_sources:
      b = [dataclasses.replace(row, kernel_hash="another") for row in b]
    folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    for name, rows in (("a", a), ("b", b)):
      records.write(rows, folder / f"{name}.jsonl")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
      code = compare.main([str(folder / "a.jsonl"), str(folder / "b.jsonl")])
    lines = printed.getvalue().splitlines()
    self.assertLessEqual(max(map(len, lines)), WIDTH)
    return code, lines

  @parameterized.parameters(
    (100.0, 110.0, 0.01, "1 slower, 0 faster, 0 within", 1),
    (100.0, 90.0, 0.01, "0 slower, 1 faster, 0 within", 0),
    (100.0, 110.0, 0.12, "0 slower, 0 faster, 1 within", 0),  # ranges reach beyond both medians
    (100.0, 104.5, 0.001, "0 slower, 0 faster, 1 within", 0),  # two machines differ by as much
    (1.0, 1.45, 0.001, "0 slower, 0 faster, 1 within", 0),  # a launch does
  )
  def test_beyond_noise(self, before, after, spread, verdict, code):
    got, lines = self.compare([ranged("fp8", before, spread)], [ranged("fp8", after, spread)])
    self.assertEqual(got, code)
    self.assertStartsWith(lines[0], f"1 pairs: {verdict} noise; without a partner 0 before, 0")

  def test_the_same_sources_decide_nothing(self):
    a, b = ([ranged("fp8", us), cudnn(us, us_min=us - 0.1, us_max=us + 0.1)] for us in (10.0, 12.0))
    code, lines = self.compare(a, b, same_sources=True)
    self.assertEqual(code, 0)
    self.assertStartsWith(lines[0], "2 pairs: 0 slower, 0 faster, 0 within noise; ")
    said = "2 of the same sources: 20.0% apart in the middle, 20% at most, 2 more than 5%"
    self.assertEqual(lines[1:], [said])
    newer = [dataclasses.replace(row, jax_version="another") for row in b]
    self.assertEqual(self.compare(a[:1], newer[:1], same_sources=True)[0], 1)

  @parameterized.product(
    outlier=(
      ({"us_max": 500.0}, {}),
      ({"us_min": 50.0}, {}),
      ({}, {"us_max": 500.0}),
      ({}, {"us_min": 50.0}),
    ),
    slower=(True, False),
  )
  def test_one_outlier_hides_nothing(self, outlier, slower):
    a, b = (ranged("fp8", us) for us in ((100.0, 110.0) if slower else (110.0, 100.0)))
    a, b = (dataclasses.replace(row, **odd) for row, odd in zip((a, b), outlier, strict=True))
    code, lines = self.compare([a], [b])
    self.assertEqual(code, int(slower))
    self.assertIn("1 slower, 0" if slower else "0 slower, 1 faster", lines[0])

  @parameterized.parameters({"error": "ValueError: a fault"}, {"reason": "no such kernel"})
  def test_what_is_timed_no_more_is_named(self, **why):
    a = [ranged("fp8", 9.0), ranged("nvfp4_a8q", 9.0)]
    lost = timed("nvfp4_a8q", None, timer=None, kernel_names=(), **why)
    for b in ([a[0], lost], [lost]):
      code, lines = self.compare(a, b)
      self.assertEqual(code, 1)
      self.assertIn("timed no more", "\n".join(lines))
      self.assertRegex(lines[-1], f"decode 1/1/8192 a8q +{next(iter(why.values()))}")
    self.assertEqual(self.compare(a, [*a, lost])[0], 0)  # timed in another try
    self.assertEqual(self.compare([a[0], lost], [a[0], lost])[0], 0)  # as before

  @parameterized.parameters(
    {"kv_len": 64},
    {"levers": "w64"},
    {"page_size": 16},
    {"device": "another"},
    {"timer": "wall"},
    {"data": "random"},
    {"implementation": "xla"},
  )
  def test_other_work_is_no_partner(self, **changes):
    code, (line,) = self.compare([ranged("fp8", 1.0)], [ranged("fp8", 9.0, **changes)])
    self.assertEqual(code, 2)
    self.assertIn("equal work, device and timer are needed", line)

  def test_wall_times_are_no_verdict(self):
    a, b = ([ranged("fp8", us, timer="wall")] for us in (1.0, 9.0))
    code, lines = self.compare(a, b)
    self.assertEqual(code, 0)
    self.assertIn("Wall times also move with whatever else the machine does", lines[1])

  def test_what_is_alone_is_counted(self):
    a = [ranged("fp8", 9.0), ranged("bf16", 9.0), timed("nvfp4_a8q", None, reason="no kernel")]
    b = [ranged("fp8", 9.0), ranged("fp8", 9.0, kv_len=64), ranged("fp8", 9.0, kv_len=65)]
    self.assertEndsWith(
      self.compare(a, b)[1][0], "1 within noise; without a partner 1 before, 2 after"
    )

  def test_the_worst_first_and_named(self):
    a = [ranged("fp8", 10.0, kv_len=n) for n in (64, 128)]
    a.append(ranged("nvfp4_dequant", 10.0, levers="w64", page_size=16))
    b = [ranged("fp8", us, kv_len=n) for us, n in ((12.0, 64), (20.0, 128))]
    b.append(ranged("nvfp4_dequant", 5.0, levers="w64", page_size=16))
    code, lines = self.compare(a, b)
    self.assertEqual(code, 1)
    cells = [" ".join(line.split()) for line in lines[5:]]
    self.assertEqual(
      cells,
      [
        "decode 1/1/128 fp8 10.0 20.0 2.00",
        "decode 1/1/64 fp8 10.0 12.0 1.20",
        "decode 1/1/8192 dequant, w64, pages of 16 10.0 5.00 0.50",
      ],
    )

  def test_an_error_that_grew_fails(self):
    a, b = ([ranged("fp8", 9.0, kernel_error=e)] for e in (1e-3, 2e-3))
    code, lines = self.compare(a, b)
    self.assertEqual(code, 1)
    self.assertIn("decode 1/1/8192 fp8  1.0e-03  2.0e-03", lines[-1])
    self.assertEqual(self.compare(b, a)[0], 0)

  def test_other_kernels_are_named(self):
    names = {"kernel_names": ("loop_fusion", "dense_attend_mosaic_gpu_kernel", "loop_add")}
    _, lines = self.compare([ranged("fp8", 9.0)], [ranged("fp8", 9.0, **names)])
    self.assertRegex(lines[-1], r"decode 1/1/8192 fp8 +decode_attend +others dense_attend")

  def test_rows_of_before_the_matrix_have_partners(self):
    new = [ranged("fp8", 9.0, batch_invariant=False), cudnn(9.0, us_min=8.9, us_max=9.1)]
    old = [
      ranged("fp8", 9.0, layout=None, part=None),
      cudnn(9.0, us_min=8.9, us_max=9.1, layout=None),
    ]
    self.assertStartsWith(self.compare(old, new)[1][0], "2 pairs")


if __name__ == "__main__":
  absltest.main()
