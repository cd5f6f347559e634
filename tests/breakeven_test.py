"""The sum from FP8's time to a format's, what would flip it, and the command."""

import argparse
import contextlib
import dataclasses
import io
import pathlib
import tempfile

from absl.testing import absltest, parameterized

from benchmarks import breakeven, cli, serve_case, serve_options
from benchmarks.serve_balance import Balance, TwoPrices, balance, rejections
from benchmarks.serve_costs import LayerCosts, StepCosts
from benchmarks.serve_flips import Mix, dials, first_loss
from benchmarks.serve_formats import BASELINE, FORMATS
from benchmarks.serve_model import Linear
from benchmarks.serve_pages import PagePool
from benchmarks.serve_run import SimulatedExecutor, serve
from benchmarks.serve_scheduler import Scheduler
from benchmarks.serve_setup import Setup
from benchmarks.serve_workloads import Item, Workload, generate
from tests.base import TestCase
from tests.serve_workloads_test import GOOD

# 16,384 tokens of FP8: too few for these requests, and for their documents.
SETUP = Setup(pool_bytes=2**30, concurrency=12)
WORKLOAD = generate(40, prompt=3000, output=60, spread=0.5, reuse=0.6, documents=6)


@dataclasses.dataclass(frozen=True)
class Flipped:
  """A format's costs, but for one kind of kernels: FP8's, so many times as long."""

  costs: LayerCosts
  base: LayerCosts
  kind: str
  factor: float

  def prefill(self, q_len, kv_len):
    if self.kind == "prefill":
      return self.factor * self.base.prefill(q_len, kv_len)
    return self.costs.prefill(q_len, kv_len)

  def decode(self, sequences, keys):
    if self.kind == "decode":
      return self.factor * self.base.decode(sequences, keys)
    return self.costs.decode(sequences, keys)

  def append(self, tokens):
    return self.costs.append(tokens)


@dataclasses.dataclass(frozen=True)
class Plain:
  """Seconds of a token read, a sequence that decodes, and an append, however long."""

  token: float
  sequence: float
  appended: float

  def prefill(self, q_len, kv_len):
    return self.token * q_len

  def decode(self, sequences, keys):
    return self.sequence * sequences

  def append(self, tokens):
    return self.appended


def of(name, setup=SETUP, workload=WORKLOAD) -> Balance:
  return balance(setup, workload, FORMATS[name], setup.simulate(workload, BASELINE))


class BalanceTest(TestCase):
  @parameterized.parameters("bf16", "fp8_nvfp4", "nvfp4_dequant", "nvfp4_a8q")
  def test_terms_sum_to_the_difference(self, name):
    one = of(name)
    self.assertAlmostEqual(sum(t.seconds for t in one.terms), one.extra)
    self.assertAlmostEqual(one.extra, one.run.wall - one.base.wall)
    for term in one.terms:
      if term.price is not None:
        self.assertAlmostEqual(term.count * term.price, term.seconds)

  def test_terms_by_hand(self):
    """Two requests of 16 tokens that write 3. FP8 has two pages: the second gives way for the
    first one's 17th token, and reads 17 again. Its steps take 10 s, and 1 s for each token read,
    each sequence that decodes, and an append: 43, 12, 12, 28 and 12 s. The format has pages for
    both, and takes 2 s, 1/2 s and 1/4 s: 74.25, 11.25 and 11.25 s; FP8's kernels would 43, 13 and
    13 s."""
    model = Linear(per_token=0.0, overhead=10.0)
    base_costs = StepCosts(Plain(1.0, 1.0, 1.0), 1, model)
    two_prices = TwoPrices(StepCosts(Plain(2.0, 0.5, 0.25), 1, model), base_costs)
    runs = []
    for pages, executor in ((2, SimulatedExecutor(base_costs)), (4, two_prices)):
      scheduler = Scheduler(PagePool(pages, prefix_cache=False), 16)
      runs.append(serve(Workload("", (Item(0.0, 16, 3),) * 2), scheduler, executor))
    one = Balance(FORMATS["nvfp4"], *runs, two_prices.reading, two_prices.writing)
    token = (43 + 28) / (32 + 17)
    expected = {
      "prefill kernels": (32, 32.0),
      "append kernels": (36, -2.25),
      "decode kernels": (4, -2.0),
      "prompt tokens found in the cache": (1, -token),  # the token that it wrote, and read again
      "tokens not computed again": (16, -16 * token),
      "steps without a prompt, not taken": (1, -12.0),
      "prompt tokens in other steps": (32, 43 - 32 * token),
      "steps without a prompt, by load": (2, 2.0),
    }
    terms = {t.name: (t.count, t.seconds) for t in one.terms}
    self.assertEqual(terms.keys(), expected.keys())
    for name, (count, seconds) in expected.items():
      self.assertEqual(terms[name][0], count)
      self.assertAlmostEqual(terms[name][1], seconds, msg=name)
    self.assertAlmostEqual(one.extra, 96.75 - 107)

  def test_signs(self):
    """Decode reads less, more is found, more fit into a step; stock prefill takes longer."""
    terms = {t.name: t for t in of("nvfp4_dequant").terms}
    self.assertGreater(terms["prefill kernels"].seconds, 0)
    self.assertLess(terms["decode kernels"].seconds, 0)
    self.assertGreater(terms["prompt tokens found in the cache"].count, 0)
    self.assertLess(terms["prompt tokens found in the cache"].seconds, 0)
    self.assertLess(terms["steps without a prompt, not taken"].seconds, 0)
    self.assertGreater(terms["steps without a prompt, by load"].seconds, 0)

  def test_tokens_are_counted(self):
    one = of("nvfp4")
    terms = {t.name: t.count for t in one.terms}
    fewer = one.base.prefill_tokens - one.run.prefill_tokens
    found, again = terms["prompt tokens found in the cache"], terms["tokens not computed again"]
    self.assertEqual(found + again, fewer)
    self.assertEqual(again, one.base.scheduler.recomputed - one.run.scheduler.recomputed)

  def test_at_equal_costs_only_pages_count(self):
    one = of("nvfp4", dataclasses.replace(SETUP, costs="equal"))
    for term in one.terms[:3]:
      self.assertAlmostEqual(term.seconds, 0.0)
    self.assertLess(one.extra, 0)

  def test_fp8_against_itself(self):
    one = of("fp8")
    self.assertEqual(one.extra, 0.0)
    for term in one.terms:
      self.assertAlmostEqual(term.seconds, 0.0)

  @parameterized.parameters("prefill", "decode")
  def test_kernels_at_the_flip_break_even(self, kind):
    """What is told is tried: the same run with FP8's kernels so many times as long."""
    one = of("nvfp4")
    self.assert_flip(one, None, kind, one.base.times.total)

  @parameterized.parameters("prefill", "decode")
  def test_kernels_at_the_flip_equal_the_next_best(self, kind):
    one, rival = of("nvfp4"), of("nvfp4_dequant")
    self.assertLess(one.seconds, rival.seconds)
    self.assert_flip(one, rival, kind, rival.seconds)

  def assert_flip(self, one, rival, kind, seconds):
    told = {what.split()[0]: flip for what, _, flip in one.flips(rival)}
    mine, base = SETUP.step_costs(FORMATS["nvfp4"]), SETUP.step_costs(BASELINE)
    factors = {kind: float(told[kind])}
    costs = StepCosts(Flipped(mine.layer, base.layer, kind, factors[kind]), mine.layers, mine.model)
    executor = SimulatedExecutor(costs)
    run = serve(WORKLOAD, SETUP.scheduler(FORMATS["nvfp4"]), executor, concurrency=12)
    # Factors are told to two digits.
    within = 0.005 * getattr(one.at_base, kind)
    self.assertAlmostEqual(run.wall, seconds, delta=within)

  def test_different_requests_are_not_balanced(self):
    """FP8's 4,096 tokens hold some of these prompts, NVFP4's 7,281 all."""
    small = dataclasses.replace(SETUP, pool_bytes=2**28)
    requests = generate(6, prompt=4096, output=8, spread=0.3)
    refused = [len(rejections(small, requests, FORMATS[name])) for name in ("fp8", "nvfp4")]
    self.assertEqual(refused, [5, 0])
    with self.assertRaisesRegex(ValueError, "the requests that FP8 serves, got 6 of nvfp4 and 1"):
      of("nvfp4", small, requests)

  def test_two_prices_do_not_change_a_run(self):
    one = of("nvfp4_dequant")
    alone = SETUP.simulate(WORKLOAD, FORMATS["nvfp4_dequant"])
    self.assertEqual(one.run.wall, alone.wall)
    executor = TwoPrices(SETUP.step_costs(BASELINE), SETUP.step_costs(BASELINE))
    run = serve(WORKLOAD, SETUP.scheduler(BASELINE), executor, concurrency=12)
    for own, base in ((run.reading, executor.reading), (run.writing, executor.writing)):
      for name, seconds in dataclasses.asdict(base).items():
        self.assertAlmostEqual(seconds, getattr(own, name))


class VerdictTest(TestCase):
  def lines(self, *names, setup=SETUP, workload=WORKLOAD):
    base = setup.simulate(workload, BASELINE)
    return breakeven.verdict_lines(
      base, [balance(setup, workload, FORMATS[name], base) for name in names], Mix(())
    )

  def test_the_fastest_with_its_margin(self):
    all_, told, *_ = self.lines("bf16", "nvfp4_dequant", "nvfp4_repack")
    self.assertRegex(all_, r"Of all: nvfp4_repack, [0-9.]+ s; nvfp4_dequant takes [0-9.]+ % more")
    self.assertIn("nvfp4_repack would lose to FP8 with, each alone:", told)

  def test_what_flips_the_margin_is_told(self):
    """The first of the next best's kernels, whose time is the margin's."""
    lines = self.lines("nvfp4_dequant", "nvfp4_repack")
    self.assertIn("  nvfp4_repack would lose to nvfp4_dequant with, each alone:", lines)
    alone = self.lines("nvfp4_repack")
    self.assertLen([line for line in alone if "would lose to" in line], 1)

  def test_what_changes_numbers_is_apart(self):
    lines = self.lines("nvfp4_a8q", "nvfp4_repack")
    self.assertLen([line for line in lines if line.startswith("Of those whose Q stays bf16")], 1)

  def test_the_articles_case(self):
    """With their kernels FP8 wins; NVFP4's prefill may take a little longer than its, for what FP8
    reads again."""
    workload = generate(serve_case.REQUESTS, prompt=serve_case.PROMPT, output=serve_case.OUTPUT)
    setup = serve_case.THEIRS.setup
    all_, told, flip, *_ = self.lines("nvfp4_dequant", setup=setup, workload=workload)
    self.assertRegex(all_, r"Of all: fp8, 65\.[0-9]+ s; nvfp4_dequant takes 5[0-9]\.. % more")
    self.assertIn("nvfp4_dequant would beat FP8 with", told)
    self.assertRegex(flip, r"prefill kernels over FP8's 1\.1[0-9] instead of 1\.89")

  def test_nothing_to_compare(self):
    self.assertEqual(self.lines()[0].split(",")[0], "Of all: fp8")


class MixTest(TestCase):
  def test_the_place_between_two_stops(self):
    """A lead that is lost from 5 on: found to a 64th between the stops 4 and 8."""
    found = first_loss(lambda x: x < 5, 2.0, (4.0, 8.0, 16.0))
    self.assertBetween(found, 5.0, 5.0 * 2 ** (1 / 64))
    self.assertIsNone(first_loss(lambda x: True, 2.0, (4.0, 8.0)))
    # From 3 on nothing can be compared.
    self.assertIsNone(first_loss(lambda x: None if x > 3 else True, 2.0, (4.0, 8.0)))
    self.assertAlmostEqual(first_loss(lambda x: x > 0.25, 0.5, (0.0,)), 0.25, delta=0.5 / 64)

  def test_of_a_mix_that_flips(self):
    """With the articles' kernels long outputs and small pools are NVFP4's. On either side of what
    is told somebody else is ahead."""
    mix = ("--requests", "24", "--prompt", "3000", "--output", "40", "--documents", "6")
    server = ("--pool-gib", "1", "--costs", "seeds")
    parser = argparse.ArgumentParser()
    serve_options.add_workload(parser)
    serve_options.add_server(parser)
    options = parser.parse_args([*mix, *server])
    setup, workload = serve_options.setup(options), serve_options.workload(options)
    found = Mix(dials(options, setup, workload))
    flips = {what: would for what, _, would in found.flips("nvfp4_dequant", "fp8")}
    self.assertContainsSubset({"output tokens", "GiB of the pool"}, flips)

    def leads(setup, workload):
      runs = [setup.simulate(workload, FORMATS[name]) for name in ("nvfp4_dequant", "fp8")]
      return runs[0].times.total < runs[1].times.total

    gib = float(flips["GiB of the pool"])
    for factor, expected in ((0.95, True), (1.05, False)):
      pool = round(factor * gib * 2**30)
      self.assertEqual(leads(dataclasses.replace(setup, pool_bytes=pool), workload), expected)
    output = int(flips["output tokens"])
    for tokens, expected in ((output, False), (output + 4, True)):
      options.output = tokens
      self.assertEqual(leads(setup, serve_options.workload(options)), expected)
    tried = list(found.tried("nvfp4_dequant", "fp8"))
    self.assertIn("reuse from 0 to 0.95", tried)
    # An eighth of the pool is too small for some, above 2 GiB nothing was left to be found.
    self.assertIn("GiB of the pool from 0.25 to 2", tried)


class CommandTest(TestCase):
  def run_breakeven(self, *argv):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
      try:
        code = breakeven.main(list(argv))
      except SystemExit as error:
        code = error.code
    return code, out.getvalue(), err.getvalue()

  def test_a_given_mix(self):
    mix = ("--requests", "8", "--prompt", "900", "--output", "9", "--formats", "nvfp4", "fp8")
    code, out, err = self.run_breakeven(*mix)
    self.assertEqual((code, err), (0, ""))
    for part in ("nvfp4, seconds of the device:", "decode kernels", "Of all: ", "(tried: reuse"):
      self.assertIn(part, out)
    self.assertNotIn("fp8, seconds of the device:", out)

  def test_only_requests_that_all_formats_hold_are_compared(self):
    """Who rejects what is told before the verdict, which is over the same requests."""
    mix = ("--requests", "16", "--pool-gib", "0.5", "--formats", "nvfp4", "--no-mix")
    code, out, err = self.run_breakeven(*mix)
    self.assertEqual(code, 0)
    self.assertRegex(
      out, "pool holds: fp8 7, nvfp4 16\nCompared below: the 7 of all\n(.*\n)*Of all: nvfp4,"
    )
    self.assertIn("rejected, fp8: request 0 needs 142 pages of 64", err)
    self.assertIn("and 5 more by fp8", err)

  def test_nothing_that_all_formats_hold(self):
    mix = ("--requests", "4", "--pool-gib", "0.2", "--formats", "nvfp4")
    code, out, err = self.run_breakeven(*mix)
    self.assertEqual(code, 1)
    self.assertIn("pool holds: fp8 0, nvfp4 0\n", out)
    self.assertNotIn("Of all", out)
    self.assertIn("rejected, nvfp4: request 3 needs 137 pages", err)
    self.assertIn("the pool holds no request in every format: nothing to compare", err)

  def test_a_trace_that_breaks_off(self):
    with tempfile.TemporaryDirectory() as folder:
      trace = pathlib.Path(folder) / "a.jsonl"
      trace.write_text(GOOD * 3 + "{\n")
      code, out, err = self.run_breakeven("--trace", str(trace), "--formats", "nvfp4")
    self.assertEqual(code, 1)
    self.assertIn("Of all: nvfp4", out)
    self.assertIn("the workload ends early: a.jsonl, line 4: ", err)

  def test_costs_that_are_lacking(self):
    few = ("--requests", "2", "--prompt", "9", "--output", "2", "--formats", "nvfp4_a4q", "nvfp4")
    code, out, err = self.run_breakeven(*few)
    self.assertEqual(code, 0)
    self.assertIn("nvfp4_a4q: costs of NVIDIA H200, prefill by nvfp4_a4q", err)
    self.assertIn("nvfp4, seconds", out)
    code, _, err = self.run_breakeven("--requests", "0")
    self.assertEqual(code, 2)
    self.assertIn("requests must be at least 1, got 0", err)

  def test_it_is_a_command(self):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), self.assertRaises(SystemExit) as raised:
      cli.main(["breakeven", "--help"])
    self.assertEqual(raised.exception.code, 0)


if __name__ == "__main__":
  absltest.main()
