"""Serving runs: times of requests, metrics, tables, and the command with good and bad input."""

import contextlib
import dataclasses
import io
import itertools
import json
import math
import os
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized

from benchmarks import cli, serve, serve_sweeps, serve_table
from benchmarks.serve_costs import Times
from benchmarks.serve_formats import FORMATS
from benchmarks.serve_metrics import Percentiles, Slo, measure
from benchmarks.serve_pages import PagePool
from benchmarks.serve_run import Interrupted, Usage
from benchmarks.serve_run import serve as run_serve
from benchmarks.serve_scheduler import Scheduler
from benchmarks.serve_setup import GIB, Setup
from benchmarks.serve_workloads import Item, Workload, generate
from benchmarks.table import WIDTH
from tests.base import TestCase
from tests.serve_workloads_test import GOOD


class Seconds:
  """An executor of steps that take one second for every token of a chunk and two for a decode."""

  def execute(self, step):
    return Times(prefill=float(step.chunk_tokens), decode=2.0 if step.decodes else 0.0)


def scheduler(num_pages=100, **options):
  return Scheduler(PagePool(num_pages), 16, **options)


class RunTest(TestCase):
  def test_the_life_of_a_request(self):
    """Four tokens are read in 4 s, then two are written in 2 s each; the second waits for that."""
    items = (Item(1.0, 4, 3), Item(2.0, 3, 1))
    run = run_serve(Workload("", items), scheduler(most_running=1), Seconds())
    one, two = run.timelines
    self.assertEqual((one.arrival, one.started, one.first, one.finished), (1.0, 1.0, 5.0, 9.0))
    self.assertEqual((two.arrival, two.started, two.first, two.finished), (2.0, 9.0, 12.0, 12.0))
    self.assertEqual((list(run.gaps), run.wall, run.steps), ([2.0, 2.0], 12.0, 4))
    self.assertEqual((run.prefill_tokens, run.decode_tokens), (7, 2))
    self.assertEqual((run.reading.total, run.writing.total), (7.0, 4.0))

  def test_a_gap_without_requests(self):
    run = run_serve(Workload("", (Item(0.0, 1, 1), Item(50.0, 1, 1))), scheduler(), Seconds())
    self.assertEqual([t.started for t in run.timelines], [0.0, 50.0])
    self.assertEqual((run.wall, run.times.total), (51.0, 2.0))

  def test_time_scale(self):
    items = (Item(0.0, 1, 1), Item(50.0, 1, 1))
    run = run_serve(Workload("", items), scheduler(), Seconds(), time_scale=0.1)
    self.assertEqual([t.arrival for t in run.timelines], [0.0, 5.0])

  def test_closed_loop(self):
    """Two at a time; the third is sent when the first is done, whatever the trace says."""
    items = (Item(0.0, 4, 2), Item(9.0, 4, 3), Item(99.0, 4, 1))
    run = run_serve(Workload("", items), scheduler(), Seconds(), concurrency=2)
    self.assertEqual([t.arrival for t in run.timelines], [0.0, 0.0, 10.0])
    self.assertEqual(run.usage.peak_running, 2)

  def test_the_time_of_usage(self):
    """Of 4 pages 1 for 16 s, then 2 for 2 s, which the request writes."""
    run = run_serve(Workload("", (Item(0.0, 16, 2),)), scheduler(4), Seconds())
    self.assertEqual(run.usage.peak, 0.5)
    self.assertAlmostEqual(run.usage.mean, (0.25 * 16 + 0.5 * 2) / 18)

  def test_what_a_log_shows(self):
    """The step that is under way when ten seconds are over, whatever was in between."""
    usage = Usage()
    usage.step(0.5, 5, 9.0)
    usage.step(0.9, 9, 0.5)
    self.assertEqual((usage.seen, usage.seen_running), (0.0, 0))
    usage.step(0.3, 3, 1.0)
    usage.step(0.8, 8, 2.0)
    self.assertEqual((usage.seen, usage.seen_running), (0.3, 3))
    usage.step(0.2, 9, 20.0)
    self.assertEqual((usage.seen, usage.seen_running), (0.3, 9))
    self.assertEqual((usage.peak, usage.peak_running), (0.9, 9))

  def test_too_large_is_rejected_and_others_go_on(self):
    items = (Item(0.0, 4, 1), Item(0.0, 1000, 1), Item(1.0, 1601, 1), Item(2.0, 4, 1))
    for concurrency in (None, 1):
      run = run_serve(Workload("", items), scheduler(50), Seconds(), concurrency=concurrency)
      self.assertLen(run.timelines, 2)
      self.assertRegex(run.rejected[0], "request 1 needs 63 pages of 16 tokens .* the pool has 50")
      self.assertLen(run.rejected, 2)
      self.assertEqual((measure(run).request_success, measure(run).rejected), (2, 2))

  def test_only_requests_that_are_too_large(self):
    run = run_serve(Workload("", (Item(3.0, 1000, 1),)), scheduler(2), Seconds())
    self.assertEqual((len(run.rejected), measure(run).request_success), (1, 0))

  def test_interrupted(self):
    class Impatient(Seconds):
      def execute(self, step):
        if step.decodes:
          raise KeyboardInterrupt
        return super().execute(step)

    items = (Item(0.0, 4, 1), Item(3.0, 4, 2))
    with self.assertRaises(Interrupted) as raised:
      run_serve(Workload("", items), scheduler(), Impatient())
    run = raised.exception.run
    self.assertEqual(run.error, "interrupted in step 2")
    metrics = measure(run)
    self.assertEqual((metrics.request_success, metrics.generation_tokens), (1, 1))

  @parameterized.parameters(
    ({"concurrency": 0}, "concurrency must be at least 1, got 0"),
    ({"time_scale": 0.0}, "time_scale must be positive and finite, got 0.0"),
    ({"time_scale": math.nan}, "time_scale must be positive and finite, got nan"),
    ({"time_scale": math.inf}, "time_scale must be positive and finite, got inf"),
  )
  def test_wrong_options(self, options, message):
    with self.assertRaisesRegex(ValueError, message):
      run_serve(Workload("", ()), scheduler(), Seconds(), **options)


class MetricsTest(TestCase):
  def metrics(self, items, slo=None, **options):
    return measure(run_serve(Workload("", items), scheduler(**options), Seconds()), slo)

  def test_of_two_requests(self):
    found = self.metrics((Item(1.0, 4, 3), Item(2.0, 3, 1)), most_running=1)
    self.assertEqual((found.prompt_tokens, found.generation_tokens), (7, 4))
    self.assertAlmostEqual(found.generation_tokens_per_second, 4 / 12)
    self.assertEqual(found.time_to_first_token_seconds, Percentiles(7.0, 9.4, 9.94))
    self.assertEqual(found.e2e_request_latency_seconds, Percentiles(9.0, 9.8, 9.98))
    self.assertEqual(found.request_queue_time_seconds, Percentiles(3.5, 6.3, 6.93))
    self.assertEqual(found.inter_token_latency_seconds, Percentiles(2.0, 2.0, 2.0))
    self.assertEqual(found.seconds, {"prefill": 7.0, "decode": 4.0, "append": 0.0, "other": 0.0})

  @parameterized.parameters((10.0, 2.0, 2), (9.9, 2.0, 1), (10.0, 1.9, 1), (3.0, 1.0, 0))
  def test_goodput_keeps_both_limits(self, first, between, kept):
    """The first takes 4 s and 2 s a token, the second 10 s and has one token."""
    items = (Item(1.0, 4, 3), Item(2.0, 3, 1))
    found = self.metrics(items, Slo(first, between), most_running=1)
    self.assertAlmostEqual(found.request_goodput, kept / 12)

  def test_cold_prompts_and_hits(self):
    """The second finds all but the last page of its prompt, the third too little to count."""
    items = (
      Item(0.0, 1024, 1, (1, 2)),
      Item(0.0, 1024, 1, (1, 2)),
      Item(0.0, 7000, 1, (1, *range(10, 23))),
    )
    found = self.metrics(items, num_pages=1000, budget=10**4)
    self.assertEqual((found.cold.requests, found.cold.prompt_tokens), (2, 8024))
    self.assertEqual((found.hits.requests, found.hits.cached_tokens), (1, 1008))
    self.assertEqual(found.cold.cached_tokens, 512)
    self.assertEqual((found.prefix_cache_queries, found.prefix_cache_hits), (9048, 1520))
    self.assertAlmostEqual(found.hit_share, 1520 / 9048)

  def test_nothing_ran(self):
    found = self.metrics(())
    self.assertIsNone(found.time_to_first_token_seconds)
    self.assertEqual((found.wall_seconds, found.hit_share, found.request_goodput), (0.0, 0.0, 0.0))


class TableTest(TestCase):
  def test_fits_a_terminal(self):
    setup = Setup(pool_bytes=3 * GIB, page_size=16)
    workload = generate(60, prompt=9000, output=300, spread=0.5, reuse=0.5, documents=5)
    found = {name: measure(setup.simulate(workload, FORMATS[name])) for name in ("fp8", "nvfp4")}
    lines = serve_table.lines(setup, found)
    self.assertLessEqual(max(map(len, lines)), WIDTH)
    titles = [
      line.split("  ")[0].strip()
      for line, rule in zip(lines, lines[1:], strict=False)
      if rule.startswith("---")
    ]
    self.assertContainsSubset(["Cold prompts", "Prefix hits", "Decode", "Share of time, %"], titles)
    self.assertEqual(sum(line.startswith("nvfp4 ") for line in lines), len(titles))

  def test_a_long_trace_fits_a_terminal(self):
    """Tens of millions of tokens, a hundred thousand requests and latencies of days."""
    setup = Setup(pool_bytes=500 * GIB, page_size=16)
    small = measure(setup.simulate(generate(4, prompt=600, output=9), FORMATS["fp8"]))
    days, millions = Percentiles(9e4, 9e5, 9e5), 98_765_432
    prompts = dataclasses.replace(
      small.cold,
      requests=123_456,
      prompt_tokens=millions,
      cached_tokens=millions,
      time_to_first_token_seconds=days,
    )
    long = dataclasses.replace(
      small,
      request_success=123_456,
      rejected=123_456,
      wall_seconds=9e5,
      prompt_tokens_per_second=123_456.7,
      generation_tokens_per_second=123_456.7,
      request_goodput=1234.56,
      time_to_first_token_seconds=days,
      e2e_request_latency_seconds=days,
      request_queue_time_seconds=days,
      inter_token_latency_seconds=days,
      num_preemptions=123_456,
      recomputed_tokens=millions,
      evictions=millions,
      prefix_cache_queries=millions,
      prefix_cache_hits=millions,
      cold=prompts,
      hits=prompts,
      decode_tokens=millions,
      steps=millions,
    )
    lines = serve_table.lines(setup, {"nvfp4_dequant": long, "fp8": small})
    self.assertLessEqual(max(map(len, lines)), WIDTH)

  def test_of_nothing(self):
    setup = Setup()
    empty = measure(setup.simulate(Workload("", ()), FORMATS["fp8"]))
    self.assertTrue(any(" - " in line for line in serve_table.lines(setup, {"fp8": empty})))


class CommandTest(TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))

  def run_serve(self, *argv):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
      try:
        code = serve.main(["--simulate", *argv])
      except SystemExit as error:
        code = error.code
    return code, out.getvalue(), err.getvalue()

  def test_generated_requests(self):
    rows = self.folder / "out" / "rows.jsonl"
    small = ("--requests", "6", "--prompt", "900", "--output", "5", "--formats", "fp8", "nvfp4")
    code, out, err = self.run_serve(*small, "--out", str(rows))
    self.assertEqual((code, err), (0, ""))
    self.assertIn("attention costs: alike, NVIDIA H200", out)
    fp8, nvfp4 = map(json.loads, rows.read_text().splitlines())
    self.assertEqual((fp8["format"], nvfp4["format"]), ("fp8", "nvfp4"))
    self.assertEqual((fp8["bytes_per_token"], nvfp4["bytes_per_token"]), (65536, 36864))
    self.assertEqual(fp8["request_success"], 6)

  def test_kept_requests_are_a_trace(self):
    """Served again from the file, they take as long."""
    path, walls = self.folder / "kept.jsonl", []
    small = ("--requests", "5", "--prompt", "900", "--output", "5", "--interval", "0.125")
    for argv in ((*small, "--keep", str(path)), ("--trace", str(path))):
      rows = self.folder / "rows.jsonl"
      written = ("--formats", "nvfp4", "--out", str(rows), "--overwrite")
      code, _, err = self.run_serve(*argv, *written)
      self.assertEqual((code, err), (0, ""))
      walls.append(json.loads(rows.read_text())["wall_seconds"])
    self.assertEqual(walls[0], walls[1])

  def test_a_trace_that_breaks_off_is_served_up_to_there(self):
    trace = self.folder / "a.jsonl"
    trace.write_text(GOOD * 3 + "{\n")
    code, out, err = self.run_serve("--trace", str(trace), "--formats", "nvfp4")
    self.assertEqual(code, 1)
    self.assertRegex(err, "the workload ends early: a.jsonl, line 4: ")
    self.assertRegex(out, r"nvfp4 .* 3 +0\n")

  def test_what_is_too_large_is_told(self):
    trace = self.folder / "a.jsonl"
    trace.write_text(GOOD * 12)
    pool = ("--pool-gib", "0.03", "--page-size", "16", "--formats", "nvfp4", "fp8")
    code, out, err = self.run_serve("--trace", str(trace), *pool)
    self.assertEqual(code, 0)
    self.assertRegex(err, "rejected, fp8: request 0 needs 38 pages .* the pool has 30")
    self.assertIn("and 4 more were rejected", err)
    self.assertRegex(out, r"fp8 .* 0 +12\n")
    self.assertRegex(out, r"nvfp4 .* 12 +0\n")

  def test_no_page_of_one_format(self):
    small = ("--page-size", "16", "--pool-gib", "0.0015", "--prompt", "10", "--output", "2")
    code, out, err = self.run_serve(*small)
    self.assertEqual(code, 0)
    self.assertIn("bf16: pool_bytes must hold at least a page of 2,097,152 bytes of bf16", err)
    self.assertNotRegex(out, "\nbf16 ")

  def interrupted_at(self, step):
    """Interrupts that scheduling step, of all runs together: not where a step is executed."""
    real, taken = Scheduler.schedule, itertools.count(1)

    def schedule(scheduler):
      if next(taken) == step:
        raise KeyboardInterrupt
      return real(scheduler)

    return mock.patch.object(Scheduler, "schedule", schedule)

  def test_interrupted(self):
    """The first format is whole, the second is cut and says so, the third does not run."""
    rows = self.folder / "rows.jsonl"
    small = ("--requests", "4", "--prompt", "900", "--output", "9", "--spread", "0")
    formats = ("--formats", "fp8", "nvfp4", "bf16")
    with self.interrupted_at(14):  # each takes 9 steps
      code, out, err = self.run_serve(*small, *formats, "--out", str(rows))
    self.assertEqual(code, 130)
    self.assertIn("nvfp4: interrupted in step 4; its row counts what was served until then", err)
    self.assertRegex(out, r"fp8 .* 4 +0\n")
    self.assertRegex(out, r"nvfp4 .* 0 +0\n")
    self.assertNotIn("bf16", out)
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    self.assertEqual(
      [(row["format"], row["error"], row["steps"]) for row in found],
      [("fp8", None, 9), ("nvfp4", "interrupted in step 4", 4)],
    )

  def test_an_interrupted_sweep_keeps_its_points(self):
    rows = self.folder / "rows.jsonl"
    small = ("--requests", "4", "--prompt", "900", "--output", "9", "--spread", "0")
    with self.interrupted_at(23):  # in the second point, 18 a point
      code, out, err = self.run_serve("--sweep", "reuse", *small, "--out", str(rows))
    self.assertEqual(code, 130)
    self.assertIn("interrupted after 1 points", err)
    self.assertRegex(out, "\n0 % nvfp4 ")
    self.assertNotIn("25 %", out)
    self.assertLen(rows.read_text().splitlines(), 1)

  def test_an_interrupted_capacity_sweep(self):
    """In the second point of the second context: its cell is empty."""
    of = {"CONTEXTS": (64, 128), "CONCURRENCIES": (1, 2)}
    with mock.patch.multiple(serve_sweeps, **of), self.interrupted_at(50):
      code, out, err = self.run_serve("--sweep", "capacity", "--output", "4")
    self.assertEqual(code, 130)
    self.assertIn("interrupted after 3 points", err)
    self.assertRegex(out, r"\n128 +1\.[0-9]+ +\n")

  def test_an_interrupt_without_a_run(self):
    with mock.patch.object(Setup, "simulate", side_effect=KeyboardInterrupt):
      code, _, err = self.run_serve("--formats", "fp8")
      self.assertEqual((code, err), (130, "interrupted before fp8 was served\n"))
      with contextlib.redirect_stderr(io.StringIO()) as told:
        self.assertEqual(cli.main(["breakeven"]), 130)
    self.assertEqual(told.getvalue(), "interrupted\n")

  @parameterized.parameters(
    (("--trace", "none.jsonl"), "No such file"),
    (("--requests", "0"), "requests must be at least 1, got 0"),
    (("--output", "0"), "output must be at least 1 token, got 0"),
    (("--watermark", "1"), "watermark must be from 0 up to less than 1, got 1.0"),
    (("--policy", "no_evict", "--watermark", ".1"), "need policy vllm, got no_evict"),
    (("--page-size", "24"), "page_size must divide 512, got 24"),
    (("--formats", "nvfp4_a4q"), "prefill by nvfp4_a4q"),
    (("--sweep", "reuse", "--formats", "nvfp4", "bf16"), "formats must be one for a sweep"),
    (("--plot", "a.png"), "--plot needs --sweep"),
    (("--pool-gib", "inf"), "pool_gib must be positive and finite, got inf"),
    (("--pool-gib", "nan"), "pool_gib must be positive and finite, got nan"),
    (("--pool-gib", "0"), "pool_gib must be positive and finite, got 0.0"),
    (("--seed", "-1"), "seed must be at least 0, got -1"),
    (("--interval", "nan"), "interval must be seconds from 0 on, got nan"),
    (("--recent-window", "-5"), "recent_window must be at least 0 tokens, got -5"),
    (("--slo", "nan", "1"), "slo's time_to_first_token must be positive seconds, got nan"),
    (("--slo", "1", "-3"), "slo's inter_token_latency must be positive seconds, got -3.0"),
    (("--sweep", "capacity", "--output", "131072"), "output must be less than the longest context"),
    (("--case", "seeds", "--trace", "none.jsonl"), "--trace is not for --case"),
    (("--case", "seeds", "--pool-gib", "3"), "--pool-gib is not for --case"),
    (("--layers", "2"), "--layers is for --live"),
    (("--compilers", "4"), "--compilers is for --live"),
    (("--limit", "3"), "--limit needs --trace"),
    (("--trace", "none.jsonl", "--prompt", "8192"), "--prompt is of generated requests"),
    (("--sweep", "reuse", "--reuse", "0.5"), "--reuse is not for --sweep reuse"),
    (("--sweep", "capacity", "--prompt", "9"), "--prompt is not for --sweep capacity"),
  )
  def test_wrong_arguments(self, argv, message):
    code, _, err = self.run_serve(*argv)
    self.assertNotEqual(code, 0)
    self.assertIn(message, err)

  @parameterized.parameters(
    ('{"a": 1}', "it has no 'read'"),
    ("[1]", "list indices"),
    ('{"read": [0], "times": ["x"]}', "not supported"),
    ('{"read": [0], "times": 3}', "not iterable"),
    ("{", "Expecting"),
  )
  def test_model_costs_that_are_none(self, text, message):
    path = self.folder / "model.json"
    path.write_text(text)
    code, _, err = self.run_serve("--model-costs", str(path))
    self.assertEqual(code, 2)
    self.assertRegex(err, f"model.json must be costs of a model.*{message}")

  @parameterized.parameters(("", "has none"), ("{\n", "line 1: Expecting"))
  def test_a_trace_without_requests(self, text, message):
    trace = self.folder / "a.jsonl"
    trace.write_text(text)
    code, _, err = self.run_serve("--trace", str(trace))
    self.assertEqual(code, 2)
    self.assertIn(message, err)

  def test_what_costs_were_not_measured_with_is_told(self):
    """Other pages and a window; in a line of its own, and in rows."""
    rows = self.folder / "rows.jsonl"
    small = ("--requests", "1", "--prompt", "90", "--output", "2", "--formats", "nvfp4")
    told = "as measured with pages of 64 tokens and no window, taken for pages of 16 and a window"
    _, out, _ = self.run_serve(*small)
    self.assertNotIn("as measured", out)
    other = ("--page-size", "16", "--recent-window", "128", "--max-num-seqs", "4")
    _, out, _ = self.run_serve(*small, *other, "--out", str(rows))
    self.assertIn(f"\n  {told} of 128\n", out)
    self.assertLessEqual(max(map(len, out.splitlines())), WIDTH)
    self.assertIn(told, json.loads(rows.read_text())["costs"])

  def test_nothing_is_served(self):
    small = ("--requests", "2", "--pool-gib", "0.1", "--formats", "fp8", "nvfp4")
    code, _, err = self.run_serve(*small)
    self.assertEqual(code, 1)
    self.assertIn("no request was served", err)

  def test_contexts_that_the_output_fills_are_left_out(self):
    of = {"CONTEXTS": (64, 128), "CONCURRENCIES": (1,)}
    with mock.patch.multiple(serve_sweeps, **of):
      code, out, err = self.run_serve("--sweep", "capacity", "--output", "64")
    self.assertEqual((code, err), (0, ""))
    self.assertRegex(out, r"\n128 ")
    self.assertNotRegex(out, r"\n64 ")

  def test_a_trace_is_not_written_over(self):
    """By its name, or through a link."""
    trace, link = self.folder / "a.jsonl", self.folder / "b.jsonl"
    trace.write_text(GOOD * 9)
    link.symlink_to(trace)
    small = ("--trace", str(trace), "--limit", "2", "--overwrite")
    for command, option in ((self.run_serve, "--keep"), (self.run_serve, "--out")):
      for path in (trace, link):
        code, _, err = command(*small, option, str(path))
        self.assertEqual(code, 2)
        self.assertIn(f"{option} must be another file than --trace, got {path}", err)
    with contextlib.redirect_stderr(io.StringIO()), self.assertRaises(SystemExit):
      cli.main(["breakeven", *small, "--keep", str(trace)])
    self.assertEqual(trace.read_text(), GOOD * 9)

  def test_results_are_not_written_over(self):
    rows = self.folder / "rows.jsonl"
    rows.write_text("earlier\n")
    small = ("--requests", "1", "--prompt", "90", "--output", "2", "--formats", "fp8")
    for option in ("--out", "--keep"):
      code, _, err = self.run_serve(*small, option, str(rows))
      self.assertEqual(code, 2)
      self.assertIn(f"{option} must be a new file, {rows} has rows: --overwrite loses them", err)
      self.assertEqual(rows.read_text(), "earlier\n")
    code, _, _ = self.run_serve(*small, "--out", str(rows), "--overwrite")
    self.assertEqual(code, 0)
    self.assertNotIn("earlier", rows.read_text())

  def test_what_cannot_be_written_is_found_first(self):
    for path in (self.folder, pathlib.Path("/proc/none/rows.jsonl")):
      with mock.patch.object(Setup, "simulate", side_effect=AssertionError("it ran")):
        code, _, err = self.run_serve("--out", str(path))
      self.assertEqual(code, 2)
      self.assertIn(str(path.parent), err)

  def test_it_is_a_command(self):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), self.assertRaises(SystemExit) as raised:
      cli.main(["serve", "--help"])
    self.assertEqual(raised.exception.code, 0)
    self.assertIn("python3 -m benchmarks serve", printed.getvalue())

  @parameterized.parameters("serve", "breakeven")
  def test_help_fits_a_terminal(self, command):
    printed = io.StringIO()
    with mock.patch.dict(os.environ, COLUMNS=str(WIDTH)), contextlib.redirect_stdout(printed):
      self.assertRaises(SystemExit, cli.main, [command, "--help"])
    self.assertLessEqual(max(map(len, printed.getvalue().splitlines())), WIDTH)
    self.assertIn("nvfp4_a8q", printed.getvalue())


if __name__ == "__main__":
  absltest.main()
