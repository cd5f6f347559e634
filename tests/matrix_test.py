"""The matrix: which cases it has, and what happens to them while it runs."""

import contextlib
import dataclasses
import io
import itertools
import json
import math
import pathlib
import tempfile
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized

from benchmarks import attention_cases, cases, cli, matrix, peers, records, storage_cases
from benchmarks import workloads as w
from benchmarks.trace import KernelTimes
from benchmarks.turns import Timed
from nvfp4_pallas.dispatch import Target, use_target
from nvfp4_pallas.read_paths import READ_PATHS
from tests.base import TestCase

H200 = cases.Device("sm_90", small=False)
TIMES = KernelTimes(("decode_attend_mosaic_gpu_kernel",), (1.0, 2.0, 4.0), {})


def wall_fields(times):
  return {"us_median": times.calls[0], "timer": "wall"}


def shapes_of(part, **fields):
  """(batch, q_len, kv_len) of attention by this package, in a part."""
  of = []
  for case in cases.default(H200):
    known = case.fields
    if case.part == part and all(known[name] == value for name, value in fields.items()):
      of.append((known["batch"], known["q_len"], known["kv_len"]))
  return of


class CasesTest(TestCase):
  def test_every_read_path_at_every_shape_that_is_asked_for(self):
    """The seeds' four query shapes, and decode of 1, 16 and 64 over 2K, 8K and 32K."""
    tails = [(batch, q_len, 16384) for batch in (1, 16) for q_len in (8, 16)]
    decode = list(itertools.product((1, 16, 64), (1,), (2048, 8192, 32768)))
    for part, shapes in (
      ("full", [(1, 8192, 8192), (1, 16384, 16384), (1, 32768, 32768)]),
      ("chunk", [(4, 128, 2048)]),
      ("tail", tails),
      ("decode", decode),
    ):
      for path in READ_PATHS:
        for levels in (1, 2) if path == "nvfp4_a4q" else (None,):
          known = {"read_path": path, "implementation": "mosaic_sm90"}
          if levels:
            known["q_levels"] = levels
          self.assertContainsSubset(shapes, shapes_of(part, **known), f"{part} {known}")
      self.assertContainsSubset(shapes, shapes_of(part, implementation="cudnn"))
    self.assertEqual(shapes_of("decode", implementation="jax_paged"), decode)
    for format in ("bf16", "fp8", "nvfp4"):
      self.assertEqual(shapes_of("decode", implementation="flashinfer", k_format=format), decode)
      appended = {tokens for tokens, _, _ in shapes_of("append", k_format=format)}
      self.assertEqual(appended, {1, 64, 512, 8192})

  def test_each_case_once(self):
    keys = [cases.key(case.fields) for case in cases.default(H200)]
    self.assertLen(set(keys), len(keys))

  def test_equal_work_is_together(self):
    """Whoever comes first would be the one that found the GPU cool."""
    for part in ("full", "chunk", "tail", "decode", "geometries", "grid"):
      some = [case.workload for case in cases.default(H200) if case.part == part]
      self.assertLen([work for work, _ in itertools.groupby(some)], len(set(some)))

  def test_one_thing_at_a_time_is_varied(self):
    varied = [case.fields["varied"] or {} for case in cases.default(H200)]
    several = [of for of in varied if len(of) > 1]
    # A window beside what it is compared with (pages of 16, batch invariance, K rotated), and the
    # recommended cache as a whole beside plain pages of 16.
    whole = {"page_size": 16, "recent_window": 96, "k_rotation": "hadamard"}
    self.assertCountEqual(
      [of for of in several if not whole.items() <= of.items()],
      [
        {"page_size": 16, "recent_window": 64},
        {"page_size": 16, "recent_window": 96},
        {"page_size": 16, "recent_window": 96},  # of an append
        *({"page_size": 16, "new_kv": True},) * 2,
        {"recent_window": 96, "k_rotation": "hadamard"},
        {"batch_invariant": True, "recent_window": 64},
      ],
    )
    scaled = whole | {"scale_search": "four_over_six"}  # appends see how scales are found
    counts = several.count(whole), several.count(scaled), several.count(whole | {"new_kv": True})
    self.assertEqual(counts, (3, 3, 2))
    for name in ("geometry", "page_size", "layout", *cases._USUAL):
      self.assertTrue(any(name in of for of in varied), name)

  def test_the_definition_is_timed_on_a_gpu_too(self):
    by_xla = [case for case in cases.default(H200) if case.implementation == "xla"]
    self.assertEqual(
      {case.workload.phase for case in by_xla},
      {"chunk", "tail", "decode", "append", "pack", "unpack"},
    )
    self.assertEqual({case.part for case in by_xla}, {"definition"})

  def test_the_grid_has_every_batch(self):
    found = shapes_of("grid", read_path="nvfp4_repack")
    self.assertEqual({batch for batch, _, _ in found}, {1, 4, 16, 64})
    self.assertContainsSubset([(1, 1024, 65536), (4, 1024, 16384), (64, 128, 4096)], found)
    self.assertTrue(all(q_len <= kv_len for _, q_len, kv_len in found))

  def test_other_implementations_are_asked_once_a_phase(self):
    for who in ("mosaic_sm100", "triton_sm120"):
      of_it = [case for case in cases.default(H200) if case.implementation == who]
      self.assertEqual({case.workload.phase for case in of_it}, set(w.ATTENTION))
      self.assertLen(of_it, 4 * len(cases.VARIANTS))

  def test_a_cpu_has_small_ones_by_the_definition(self):
    found = cases.default(cases.Device("cpu", small=True))
    self.assertEqual({case.workload.geometry for case in found}, {"small"})
    self.assertContainsSubset(
      ["xla", "mosaic_sm90", "cudnn", "flashinfer"], {case.implementation for case in found}
    )
    self.assertEqual(
      {case.workload.phase for case in found}, {*w.ATTENTION, "append", "pack", "unpack"}
    )

  def test_phases_follow_from_lengths(self):
    for lengths, phase in (
      ((1, 1, 64), "decode"),
      ((1, 64, 64), "prefill"),
      ((1, 16, 64), "tail"),
      ((1, 17, 64), "chunk"),
    ):
      self.assertEqual(w.attention(*lengths).phase, phase)


class MatrixTestCase(TestCase):
  """The command with cases that do nothing."""

  def setUp(self):
    super().setUp()
    self.out = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory())) / "rows.jsonl"
    self.prepared = []
    self.faults, self.errors = {}, {}

    def prepare(shared, variant, implementation, row, **options):
      del shared
      return self.prepare(variant.read_path, implementation, row, **options)

    def peer(shared, variant, row):
      del shared
      return self.prepare(variant.read_path, "a peer", row)

    def storage(work, implementation, row, copy_rate, **options):
      del work, copy_rate
      return self.prepare("storage", implementation, row, **options)

    for module, name, fake in (
      (attention_cases, "prepare", prepare),
      (matrix, "_STORAGE", dict.fromkeys(matrix._STORAGE, storage)),
      (matrix, "copy_bandwidth", lambda: (4e12, matrix._copy_row(1, 4e12, TIMES))),
      (matrix, "kernel_times", self.time),
      (matrix, "wall_times", self.time),
      (matrix._Run, "_shared", lambda run, work: None),
    ):
      self.enter_context(mock.patch.object(module, name, fake))
    for name, of in peers.PEERS.items():
      fake = mock.Mock(wraps=of, missing=lambda: None, prepare=peer, fields=of.fields)
      fake.variants, fake.phases = of.variants, of.phases
      self.enter_context(mock.patch.dict(peers.PEERS, {name: fake}))

  def prepare(self, path, implementation, row, **options):
    del options
    self.prepared.append((path, implementation))
    fault = self.faults.get(path)
    if isinstance(fault, BaseException):
      raise fault
    if fault is not None:
      fault()
    errors = self.errors.get(path, {})
    return Timed([lambda: None], lambda times: row(**times.row_fields(), **errors))

  def time(self, calls, wait=None, warm_up=0):
    del calls, wait, warm_up
    return TIMES

  def run_matrix(self, *argv, architecture="sm_90"):
    """The exit code, the rows and what was printed."""
    printed = io.StringIO()
    with use_target(Target(architecture)), contextlib.redirect_stdout(printed):
      code = matrix.main(["--out", str(self.out), *argv])
    rows = records.read(self.out) if self.out.exists() else []
    return code, rows, printed.getvalue()


class MatrixTest(MatrixTestCase):
  def test_a_row_for_each_case(self):
    code, rows, printed = self.run_matrix()
    self.assertEqual(code, 0)
    self.assertEqual(
      [cases.key(row) for row in rows[1:]], [cases.key(c.fields) for c in cases.default(H200)]
    )
    self.assertEqual(rows[0]["phase"], "copy")
    self.assertTrue(all(row["us_median"] == 2.0 and row["us_count"] == 3 * 4 for row in rows[1:]))
    self.assertIn("  prefill 1/8192/8192 bf16 mosaic_sm90: 2.0 us\n", printed)
    self.assertRegex(printed, r"about \d+ s left\] chunk 4/128/2048, \d+ cases:")
    self.assertRegex(printed, r"about \d+ s left\]   prepared nvfp4_a8q mosaic_sm90\n")
    self.assertNotIn("Left out: ", printed)

  def test_what_cannot_run_has_a_reason_and_what_fails_an_error(self):
    self.faults = {
      "nvfp4_a8q": NotImplementedError("no such kernel"),
      "fp8": ValueError("a fault"),
    }
    code, rows, printed = self.run_matrix("--parts", "chunk", "append", "--no-peers")
    self.assertEqual(code, 1)
    by_path = {row["read_path"]: row for row in rows if row["implementation"] == "mosaic_sm90"}
    self.assertEqual(by_path["nvfp4_a8q"]["reason"], "no such kernel")
    self.assertIsNone(by_path["nvfp4_a8q"]["error"])
    self.assertEqual(by_path["fp8"]["error"], "ValueError: a fault")
    self.assertEqual((by_path["fp8"]["us_median"], by_path["bf16"]["us_median"]), (None, 2.0))
    self.assertIn("FAILED: chunk 4/128/2048 fp8 mosaic_sm90: FAILED: ValueError: a fault", printed)
    self.assertRegex(printed, r"\nmosaic_sm90 +1 +no such kernel\n")
    self.assertEqual([row["phase"] for row in rows[-3:]], ["append"] * 3)

  def test_rows_are_in_the_file_before_the_next_case_begins(self):
    """So that whatever ends a run leaves them."""
    found = []
    self.faults = {"storage": lambda: found.append(len(records.read(self.out)))}
    self.run_matrix("--parts", "chunk", "tail", "append")
    before = [case for case in cases.default(H200) if case.part in ("chunk", "tail")]
    self.assertEqual(found[0], 1 + len(before))
    self.assertGreater(found[-1], found[0])

  def test_resume(self):
    """Rows of now stay as they are; errors and rows of other kernels are taken again."""
    chosen = "--parts", "decode", "--paths", "bf16", "fp8", "nvfp4_dequant", "--no-peers"
    self.faults = {"fp8": ValueError("a fault")}
    _, first, _ = self.run_matrix(*chosen)
    lines = [json.loads(line) for line in self.out.read_text().splitlines()]
    stale = next(line for line in lines if line.get("read_path") == "nvfp4_dequant")
    stale["kernel_hash"] = "another"
    self.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    self.faults, self.prepared = {}, []
    code, rows, printed = self.run_matrix(*chosen, "--resume")
    self.assertEqual(code, 0)
    again = self.prepared
    fp8 = [row for row in first if row["read_path"] == "fp8"]
    self.assertEqual([path for path, _ in again].count("fp8"), len(fp8))
    self.assertEqual([path for path, _ in again].count("nvfp4_dequant"), 1)
    self.assertNotIn("bf16", [path for path, _ in again])
    self.assertCountEqual(
      {cases.key(row) for row in rows if row["phase"] != "copy"},
      {cases.key(row) for row in first if row["phase"] != "copy"},
    )
    self.assertIn(f"{len(first) - 1 - len(again)} of them kept", printed)

  @parameterized.parameters(
    {"device": "a GPU"}, {"kernel_hash": "another"}, {"jax_version": "0"}, {"us_median": None}
  )
  def test_rows_of_others_are_taken_again_and_stay(self, **changes):
    """But not those without a time."""
    self.run_matrix("--parts", "append")
    was = [json.loads(line) | changes for line in self.out.read_text().splitlines()]
    self.out.write_text("".join(json.dumps(row) + "\n" for row in was))
    self.prepared = []
    _, rows, _ = self.run_matrix("--parts", "append", "--resume")
    self.assertLen(self.prepared, 16)
    stay = 1 if "us_median" in changes else 1 + 16  # what the bandwidth was, is no case
    self.assertLen(rows, stay + 1 + 16)
    (name,) = changes
    self.assertLen([row for row in rows if row[name] == changes[name]], stay)

  def test_of_a_changed_definition_nothing_is_kept(self):
    """On a CPU no kernel tells."""
    argv = "--parts", "append", "--implementations", "xla"
    self.enter_context(mock.patch.object(TIMES.__class__, "row_fields", wall_fields))
    for source, prepared in (("one", 4), ("one", 0), ("another", 4)):
      self.prepared = []
      with mock.patch.object(records, "definition_hash", lambda _, source=source: source):
        self.run_matrix(*argv, "--resume", architecture="cpu")
      self.assertLen(self.prepared, 3 * prepared, source)

  def test_rows_are_not_overwritten_unless_asked_for(self):
    self.run_matrix("--parts", "append")
    was = self.out.read_text()
    error = io.StringIO()
    with contextlib.redirect_stderr(error):
      code, _, _ = self.run_matrix("--parts", "append")
    self.assertEqual((code, self.out.read_text()), (2, was))
    self.assertIn(f"{self.out} has rows: --resume goes on with them", error.getvalue())
    self.assertEqual(self.run_matrix("--parts", "pack", "--overwrite")[0], 0)
    self.assertLen(records.read(self.out), 1 + 4)

  def test_a_half_written_line_is_dropped(self):
    self.run_matrix("--parts", "append")
    self.out.write_text(self.out.read_text()[:-40])
    self.prepared = []
    code, rows, printed = self.run_matrix("--parts", "append", "--resume")
    self.assertEqual((code, len(self.prepared)), (0, 1))
    self.assertLen(rows, 2 + 16)
    self.assertIn(f"the last line of {self.out} was half written, it is left out", printed)

  @parameterized.parameters("{broken", "[]", "{}")
  def test_other_lines_must_be_rows(self, line):
    self.run_matrix("--parts", "append")
    was = line + "\n" + self.out.read_text()
    self.out.write_text(was)
    error = io.StringIO()
    with use_target(Target("sm_90")), contextlib.redirect_stderr(error):
      self.assertEqual(matrix.main(["--out", str(self.out), "--parts", "append", "--resume"]), 2)
    self.assertIn(f"{self.out}, line 1 is no row", error.getvalue())
    self.assertEqual(self.out.read_text(), was)

  def test_interrupted(self):
    asked = "--parts", "append", "pack"
    work = []

    def interrupt():
      work.append(None)
      if len(work) == 5:
        raise KeyboardInterrupt

    self.faults = {"storage": interrupt}
    code, rows, printed = self.run_matrix(*asked)
    self.assertEqual((code, len(rows)), (130, 1 + 4))
    self.assertIn(f"interrupted: {self.out} has the rows so far, the same with --resume", printed)
    self.faults = {}
    self.assertEqual(self.run_matrix(*asked, "--resume")[0], 0)
    self.assertLen({cases.key(row) for row in records.read(self.out)}, 1 + 16 + 4)

  @parameterized.parameters("kernel_error", "format_error")
  def test_output_that_is_not_finite_is_a_failure(self, name):
    for value in (math.nan, math.inf):
      self.errors = {"fp8": {name: value}}
      code, rows, printed = self.run_matrix("--parts", "chunk", "--no-peers", "--overwrite")
      self.assertEqual(code, 1)
      row, *others = [row for row in rows if row["implementation"] == "mosaic_sm90"][1:]
      self.assertEqual((row["error"], row["us_median"]), ("output is not finite", None))
      self.assertNotEmpty(others)
      self.assertIn("\nFAILED: chunk 4/128/2048 fp8 mosaic_sm90: FAILED: output is not", printed)
      self.assertNotIn("output is not finite", [row["error"] for row in others])

  def test_lack_of_time(self):
    code, rows, printed = self.run_matrix("--seconds", "1e-9")
    self.assertEqual((code, len(rows)), (2, 1))
    self.assertIn(f"Not started for lack of time: {len(cases.default(H200))} cases", printed)

  def test_changes_are_in_the_rows(self):
    _, rows, _ = self.run_matrix(
      *("--parts", "decode", "append", "--paths", "fp8", "--no-peers"),
      *("--batch", "3", "--page-size", "32", "--geometry", "40/8/128", "--revision", "abc"),
    )
    attention = [row for row in rows if row["phase"] == "decode"]
    self.assertEqual({row["kv_len"] for row in attention}, {2048, 8192, 32768})
    for row in attention:
      self.assertEqual((row["batch"], row["page_size"], row["num_q_heads"]), (3, 32, 40))
      self.assertEqual(row["varied"], {"batch": 3, "geometry": "40/8/128", "page_size": 32})
    self.assertEqual({row["git_revision"] for row in rows}, {"abc"})

  @parameterized.parameters(
    (("--geometry", "huge"), "geometry must be one of 8b, .* or query heads/KV .*, got huge"),
    (("--geometry", "8/x/128"), "geometry must be one of .*, got 8/x/128"),
    (("--geometry", "8/2"), "geometry must be one of .*, got 8/2"),
    (("--geometry", "8/3/128"), "num_q_heads must be a multiple of num_kv_heads 3, got 8"),
    (("--geometry", "4/2/100"), "geometry's head_dim must be a multiple of 16 .*, got 100"),
    (("--seconds", "nan"), "seconds must be positive, got nan"),
    (("--seconds", "0"), "seconds must be positive, got 0.0"),
    (("--batch", "0"), "batch must be at least 1, got 0"),
    (("--batch=-3",), "batch must be at least 1, got -3"),
    (("--page-size", "0"), r"page_size must be one of \(16, .*\), got 0"),
    (("--page-size", "24"), r"page_size must be one of \(16, .*\), got 24"),
    (("--implementations", "cuda"), "implementations must be of mosaic_sm90, .*, got cuda"),
    (("--resume", "--overwrite"), "--resume and --overwrite must not both be given"),
  )
  def test_bad_options(self, argv, message):
    error = io.StringIO()
    with contextlib.redirect_stderr(error), self.assertRaises(SystemExit) as raised:
      self.run_matrix(*argv)
    self.assertEqual(raised.exception.code, 2)
    self.assertRegex(error.getvalue(), message)
    self.assertFalse(self.out.exists())

  def test_a_cpu_copies_nothing(self):
    _, rows, printed = self.run_matrix(architecture="cpu")
    self.assertNotIn("copy", {row["phase"] for row in rows})
    self.assertIn(
      "Left out: definition, geometries, pages, levers, grid, which are of full", printed
    )

  def test_list_runs_nothing(self):
    code, rows, printed = self.run_matrix("--list")
    self.assertEqual((code, rows, self.prepared), (0, [], []))
    lines = [line for line in printed.splitlines() if line[0] != " "]  # some go on below
    self.assertLen(lines, len(cases.default(H200)) + len(cases.PARTS) + 1)
    _, _, printed = self.run_matrix("--list", "--layout", "token_major")
    self.assertLessEqual(max(map(len, printed.splitlines())), 100)

  def test_a_folder_is_no_file_of_rows(self):
    error = io.StringIO()
    with contextlib.redirect_stderr(error), self.assertRaises(SystemExit):
      matrix.main(["--out", str(self.out.parent)])
    self.assertIn(f"out must be a file, {self.out.parent} is a folder", error.getvalue())
    with contextlib.redirect_stderr(error):
      self.assertEqual(matrix.main(["--out", str(self.out / "a"), "--resume", "--list"]), 0)

  def test_it_is_a_command(self):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), self.assertRaises(SystemExit) as raised:
      cli.main(["matrix", "--help"])
    self.assertEqual(raised.exception.code, 0)
    self.assertIn("by part, in seconds: full ", " ".join(printed.getvalue().split()))
    for command in cli._COMMANDS:
      self.assertIn("" if command == "small" else f"benchmarks {command} ", cli.__doc__)


class StepBytesTest(TestCase):
  """Two sequences, of which one gives up a page of 64 in the 8 steps."""

  @parameterized.parameters(
    (0, 2 * (100 + 10)),  # each new token read wide, written stored
    (64, 2 * 2 * 100 + 64 // 8 * (100 + 10)),  # read and written wide; what leaves the window
  )
  def test_of_a_step(self, window, expected):
    lens = np.array([128 + 60, 128 + 8])
    found = storage_cases.step_bytes(lens, window, page_size=64, wide=100, stored=10.0)
    self.assertEqual(found, expected)


class SmallestTest(TestCase):
  """One workload for real, on this CPU."""

  def test_rows_hold_what_ran(self):
    out = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory())) / "rows.jsonl"
    paths = "nvfp4_dequant", "nvfp4_a8q"
    variants = tuple(v for v in cases.VARIANTS if v.read_path in paths)
    some = [
      *cases._attention("decode", w.attention(2, 1, 128, geometry="small"), variants, ("xla",)),
      cases._append("append", "append", 64, "small", "xla", format="nvfp4", scale=1.0),
      cases._append("levers", "step", 4, "small", "xla"),
      *(
        dataclasses.replace(
          cases._by_batch("prompt", 1, 200, "xla", options),
          workload=w.Workload(phase="append", batch=1, q_len=200, kv_len=200, geometry="small"),
        )
        for options in ({}, {"recent_window": 64, "k_rotation": "hadamard"})
      ),
    ]
    self.enter_context(mock.patch.object(cases, "default", lambda *_: some))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
      self.assertEqual(matrix.main(["--out", str(out)]), 0)
    self.assertIn("No time here may stand beside a GPU's", printed.getvalue())
    dequant, a8q, append, step, prompt, recent = records.read(out)
    self.assertEqual(step["bytes"], 4 * 2 * (2 * 2 * 128 + 2 * 72))
    # Two heads' K and V: 512 bytes wide, 144 stored. Of 200 tokens in pages of 64, 72 stay wide.
    self.assertEqual(prompt["bytes"], 200 * 2 * (512 + 144))
    self.assertEqual(recent["bytes"], 200 * 2 * 512 + 72 * 2 * 512 + 128 * 2 * 144)
    self.assertEqual((prompt["levers"], recent["levers"]), (None, "w64 hadK"))
    for row in (dequant, a8q):
      self.assertEqual((row["timer"], row["us_count"], row["floor_us"]), ("wall", 8, None))
      self.assertEqual(row["bytes_per_token"], 2 * 2 * 72)
      self.assertBetween(row["kernel_error"], 1e-5, 4e-3)  # bfloat16's rounding of the result
      self.assertIn("dot_general", row["operand_dtypes"])
    self.assertBetween(dequant["format_error"], 0.05, 0.3)
    self.assertGreater(a8q["format_error"], dequant["format_error"])
    self.assertBetween(append["format_error"], 0.05, 0.15)
    self.assertEqual((append["batch"], append["timer"]), (64, "wall"))


if __name__ == "__main__":
  absltest.main()
