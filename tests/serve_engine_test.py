"""The live engine on a CPU, with a tiny decoder: its numbers, and that the simulator agrees."""

import contextlib
import dataclasses
import io
import json
import pathlib
import tempfile
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

from benchmarks import llama, serve, serve_decoder, serve_live, serve_model
from benchmarks.measured import RESULTS
from benchmarks.serve_decoder import Reading
from benchmarks.serve_engine import Engine, PageRow, prompt_tokens, row_buckets
from benchmarks.serve_formats import FORMATS
from benchmarks.serve_model import Measured, Model
from benchmarks.serve_run import serve as run_serve
from benchmarks.serve_scheduler import Request
from benchmarks.serve_setup import Setup
from benchmarks.serve_workloads import Item, generate
from benchmarks.table import WIDTH
from tests.base import TestCase

TINY = Model(2, 64, 4, 2, 64, 96, 97)
BF16 = FORMATS["bf16"]
LIVE_ROWS = RESULTS / "serve" / "h200_live.jsonl"


def tiny_llama(seed=0) -> llama.Model:
  """Of TINY's geometry, with weights that keep the size of what goes through them."""
  r = np.random.default_rng(seed)

  def matrix(*shape):
    return jnp.asarray(r.standard_normal(shape) / shape[-2] ** 0.5, jnp.float32)

  def ones(*shape):
    return jnp.ones(shape, jnp.float32)

  n, d, ffn = TINY.layers, TINY.hidden, TINY.ffn
  kv = TINY.num_kv_heads * TINY.head_dim
  layers = llama.Layers(
    attn_norm=ones(n, d),
    wq=matrix(n, d, 4 * 64),
    wk=matrix(n, d, kv),
    wv=matrix(n, d, kv),
    wo=matrix(n, 4 * 64, d),
    ffn_norm=ones(n, d),
    w_gate=matrix(n, d, ffn),
    w_up=matrix(n, d, ffn),
    w_down=matrix(n, ffn, d),
  )
  embedding = jnp.asarray(r.standard_normal((TINY.vocab, d)), jnp.float32)
  config = llama.Config(4, 2, 64, 1e4, 1e-5)
  return llama.Model(config, embedding, layers, ones(d), matrix(d, TINY.vocab).T)


class EngineTest(TestCase):
  """Requests that share prompts and give way, over a BF16 cache."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.model = tiny_llama()
    cls.workload = generate(7, prompt=620, output=30, spread=0.1, reuse=0.85, documents=2, seed=1)
    cls.setup = Setup(
      model=TINY,
      pool_bytes=60 * 16 * TINY.heads.token_bytes(BF16),
      page_size=16,
      budget=128,
      most_running=3,
      most_chunks=2,
      concurrency=4,
    )
    cls.scheduler = cls.setup.scheduler(BF16)
    cls.engine = Engine(
      serve_decoder.weights_of(cls.model, jnp.float32),
      cls.model.config,
      serve_decoder.make_caches(BF16, TINY, cls.scheduler.pool.num_pages, 16),
      serve_decoder.reading(BF16),
      context=max(i.prompt + i.output for i in cls.workload.items),
      budget=128,
      places=3,
      most_chunks=2,
      keep_logits=True,
    )
    cls.engine.warm_up()
    cls.live = run_serve(
      cls.workload, cls.scheduler, cls.engine, concurrency=4, keep_decisions=True
    )

  def test_the_case_has_everything(self):
    self.assertLen([t for t in self.live.timelines if t.finished is not None], 7)
    self.assertGreater(self.scheduler.preemptions, 0)
    self.assertGreater(self.scheduler.hits, 512)
    self.assertGreater(self.scheduler.pool.evictions, 0)
    kinds = {(bool(c), len(c) > 1, bool(d)) for d, c, _ in self.live.decisions}
    self.assertContainsSubset(
      [(False, False, True), (True, False, True), (True, True, True)], kinds
    )

  def test_nothing_is_traced_in_the_run(self):
    self.assertEqual(list(self.engine.buckets()), [(0, 0), (128, 1), (128, 2)])
    self.assertEqual((self.engine.traces, self.engine.programs), (3, 3))

  def test_the_simulator_decides_the_same(self):
    simulated = self.setup.simulate(self.workload, BF16, keep_decisions=True)
    self.assertEqual(self.live.decisions, simulated.decisions)
    self.assertEqual(
      (self.scheduler.preemptions, self.scheduler.hits),
      (simulated.scheduler.preemptions, simulated.scheduler.hits),
    )

  def test_logits_are_those_of_whole_texts(self):
    """Every token that was written against a dense forward of all before it, without a cache: what
    a wrong page, position or mask would change by far more than BF16's rounding does."""
    worst, longest = 0.0, max(t.request.last for t in self.live.timelines)
    for timeline in self.live.timelines:
      request = timeline.request
      tokens = self.engine.tokens_of(request)
      # Padded to one length, which is compiled once: what comes after a token is not seen by it.
      padded = np.pad(tokens, (0, longest - request.last))
      hidden = llama.hidden_states(self.model, padded)
      logits = np.asarray(llama.logits(self.model, hidden))
      logits = logits[request.prompt - 1 : request.last - 1]
      likeliest = np.asarray(self.engine.logits[request])
      chosen = logits[np.arange(len(logits)), tokens[request.prompt :]]
      self.assertLen(likeliest, request.item.output)
      worst = max(worst, np.abs(logits.max(1) - likeliest).max(), (logits.max(1) - chosen).max())
    # Of logits near 1: BF16's rounding makes .0018, one key of hundreds that is not seen .0086, a
    # page of another prompt .4.
    self.assertLess(worst, 0.004)

  def test_equal_ids_are_equal_tokens(self):
    one, two = (Request(i, Item(0.0, 700, 1, (5, 6 + i))) for i in range(2))
    a, b = (prompt_tokens(request, 97) for request in (one, two))
    np.testing.assert_array_equal(a[:512], b[:512])
    self.assertGreater((a[512:] != b[512:]).mean(), 0.9)
    self.assertBetween(a.min(), 0, 3)
    self.assertBetween(a.max(), 94, 96)
    alone, other = (prompt_tokens(Request(i, Item(0.0, 600, 1)), 97) for i in range(2))
    self.assertGreater((alone != other).mean(), 0.9)


class BucketsTest(TestCase):
  def test_rows_up_to_the_budget(self):
    self.assertEqual(row_buckets(8192), (128, 512, 2048, 8192))
    self.assertEqual(row_buckets(1001), (251, 1001))
    self.assertEqual(row_buckets(64), (64,))

  def test_a_row_of_pages_follows_its_list(self):
    pages = [7]
    row = PageRow(pages, np.zeros(4, np.int32))
    np.testing.assert_array_equal(row.now(), [7, 0, 0, 0])
    pages += [9, 3]
    np.testing.assert_array_equal(row.now(), [7, 9, 3, 0])


class ReadingTest(TestCase):
  def test_paths(self):
    self.assertEqual(serve_decoder.reading(FORMATS["nvfp4"]).prefill_path, "nvfp4_repack")
    a8q = serve_decoder.reading(FORMATS["nvfp4_a8q"])
    self.assertEqual((a8q.prefill_path, a8q.decode_path), ("nvfp4_a8q", "nvfp4_dequant"))

  def test_random_weights_keep_the_size(self):
    weights = serve_decoder.random_weights(TINY, jnp.float32)
    shapes = lambda tree: [leaf.shape for leaf in jax.tree.leaves(tree)]
    expected = serve_decoder.weights_of(tiny_llama(), jnp.float32)
    self.assertEqual(shapes(weights), shapes(expected))
    self.assertAlmostEqual(float(jnp.std(weights.layers[1].w_down)), 96**-0.5, delta=0.01)
    self.assertIsInstance(Reading("bf16", "bf16"), Reading)

  def test_geometry_of_a_model_from_a_file(self):
    self.assertEqual(serve_decoder.geometry_of(tiny_llama()), TINY)


class LiveCommandTest(TestCase):
  """The command with a tiny model of random weights over an NVFP4 cache."""

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    one_layer = dataclasses.replace(TINY, layers=1)
    self.enter_context(mock.patch.dict(serve_model.MODELS, {"llama-8b": one_layer}))

  def run_live(self, *argv):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
      try:
        code = serve.main(["--live", "--model", "llama-8b", *argv])
      except SystemExit as error:
        code = error.code
    return code, out.getvalue(), err.getvalue()

  def test_live_beside_simulated(self):
    costs, path = self.folder / "model.json", self.folder / "rows.jsonl"
    code, out, err = self.run_live(
      *("--formats", "bf16", "nvfp4", "--budget", "64", "--max-num-seqs", "2"),
      *("--max-chunks", "1", "--pool-gib", "0.0001", "--requests", "4", "--prompt", "60"),
      *("--output", "6", "--reuse", "0", "--write-model-costs", str(costs), "--out", str(path)),
      *("--revision", "abc"),
    )
    self.assertEqual((code, err), (0, ""))
    self.assertRegex(out, "nvfp4: [0-9]+ steps of 2 kinds, traced 2 times; .* are the same")
    self.assertRegex(out, r"to the last token +[0-9.]+ +[0-9.]+ +[0-9.]+\n")
    self.assertRegex(out, r"decodes alone +[0-9.]+ +[0-9.]+ +[0-9.]+ +[0-9]+\n")
    self.assertLessEqual(max(map(len, out.splitlines())), WIDTH)
    self.assertEqual(Measured.load(costs).read, (0, 64))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    self.assertEqual(
      [(row["format"], row["run"]) for row in rows],
      [("bf16", "live"), ("bf16", "simulated"), ("nvfp4", "live"), ("nvfp4", "simulated")],
    )
    live, simulated = rows[2:]
    self.assertEqual((live["request_success"], live["git_revision"]), (4, "abc"))
    self.assertEqual((live["traces"], live["same_decisions"]), (2, True))
    self.assertEqual(live["device"], jax.devices()[0].device_kind)
    self.assertEqual(sum(kind["steps"] for kind in live["kinds"]), live["steps"])
    self.assertEqual(live["steps"], simulated["steps"])
    ratio = live["wall_seconds"] / simulated["wall_seconds"]
    self.assertAlmostEqual(live["live_over_simulated"]["to the last token"], ratio)
    # The model is timed once, for all formats.
    self.assertEqual(rows[0]["model_costs"], live["model_costs"])

  def test_interrupted(self):
    """In a step, and when the live run is done and its simulation is not."""
    small = ("--formats", "bf16", "--budget", "64", "--max-num-seqs", "2", "--max-chunks", "1")
    small += ("--pool-gib", "0.0001", "--requests", "2", "--prompt", "60", "--output", "6")
    path = self.folder / "rows.jsonl"
    for of, method, error, served in (
      (Engine, "execute", "interrupted in step 0", 0),
      (Setup, "simulate", "interrupted before it was simulated", 2),
    ):
      with mock.patch.object(of, method, side_effect=KeyboardInterrupt):
        code, out, err = self.run_live(*small, "--out", str(path))
      self.assertEqual(code, 130)
      self.assertIn(f"bf16: {error}; its row counts", err)
      self.assertRegex(out, r"\nbf16 .* 0\n")
      (row,) = map(json.loads, path.read_text().splitlines())
      self.assertEqual((row["run"], row["error"]), ("live", error))
      self.assertEqual(row["request_success"], served)
      path.unlink()

  def test_a_pool_of_fewer_layers_is_their_share(self):
    """Of 20 GiB for two layers one has 10."""
    self.enter_context(mock.patch.dict(serve_model.MODELS, {"llama-8b": TINY}))
    served = mock.Mock(side_effect=ValueError("seen"))
    with mock.patch.object(serve_live, "run", served):
      self.run_live("--layers", "1")
      self.run_live("--layers", "1", "--pool-gib", "3")
    of = [call.args[0].pool_bytes / 2**30 for call in served.call_args_list]
    self.assertEqual(of, [10, 3])

  def test_defaults_of_a_cpu(self):
    """SmolLM2 and little to do, unless another model is asked for; numbers asked for are kept."""
    seen = mock.Mock(side_effect=ValueError("seen"))
    for argv, (model, prompt, pool) in (
      ((), ("smollm2-135m", 300, 0.02)),
      (("--prompt", "8192"), ("smollm2-135m", 8192, 0.02)),
      (("--model", "llama-8b"), ("llama-8b", 8192, 20)),
    ):
      with mock.patch.object(serve, "_live", seen), contextlib.redirect_stderr(io.StringIO()):
        self.assertRaises(SystemExit, serve.main, ["--live", *argv])
      server, _, options = seen.call_args.args
      self.assertEqual((options.model, options.prompt), (model, prompt))
      self.assertEqual(server.pool_bytes, round(pool * 2**30))
    with mock.patch.object(jax, "default_backend", return_value="gpu"):
      self.assertEqual(serve_live.defaults(None), {})

  def test_wrong_arguments(self):
    for argv, message in (
      (("--layers", "2"), "layers must be from 1 to 1 for llama-8b, got 2"),
      (("--model", "moe-30b-a3b"), "model must be a dense one to run live, got moe-30b-a3b"),
      (("--sweep", "reuse"), "--live serves requests, neither a --case nor a --sweep"),
      (("--simulate",), "not allowed with argument"),
      (("--model-costs", "a.json"), "--live times the model itself"),
      (("--recent-window", "64"), "--live has caches without a window"),
      (("--costs", "equal"), "--live compares with the measured ones"),
      (("--compilers", "0"), "compilers must be at least 1, got 0"),
    ):
      code, _, err = self.run_live(*argv)
      self.assertEqual(code, 2)
      self.assertIn(message, err)


class JudgeTest(TestCase):
  def pair(self, **changes):
    setup = Setup(pool_bytes=2**30)
    workload = generate(3, prompt=100, output=5)
    runs = [setup.simulate(workload, BF16, keep_decisions=True) for _ in range(2)]
    pair = serve_live.Pair(
      BF16,
      *runs,
      traces=2,
      programs=2,
      buckets=2,
      kernels=("decode_attend",),
      compiled=1.0,
      kinds=(),
      model_costs=Measured((0,), (1.0,)),
    )
    return setup, workload, dataclasses.replace(pair, **changes)

  def ratio(self, pair):
    (found,) = (a / b for what, a, b in pair.times if what == "to the last token")
    return found

  def test_what_is_wrong(self):
    setup, workload, pair = self.pair()
    self.assertEqual(serve_live.judge(setup, workload, pair), [])
    self.assertEqual(self.ratio(pair), 1.0)
    for changed in ({"traces": 3}, {"programs": 3}):
      again = dataclasses.replace(pair, **changed)
      self.assertRegex(serve_live.judge(setup, workload, again)[0], " 3 times.*, of 2 kinds")
    pair.live.decisions.pop()
    self.assertIn("decides otherwise", serve_live.judge(setup, workload, pair)[0])
    self.assertIn("are OTHERS", serve_live.lines(setup, workload, pair)[0])

  def test_arrivals_by_the_clock_are_not_compared(self):
    setup, _, pair = self.pair()
    timed = generate(3, prompt=100, output=5, interval=1.0)
    pair.live.decisions.pop()
    self.assertEqual(serve_live.judge(setup, timed, pair), [])
    self.assertIn("hang on the clock", serve_live.lines(setup, timed, pair)[0])
    closed = dataclasses.replace(setup, concurrency=2)
    self.assertIn("decides otherwise", serve_live.judge(closed, timed, pair)[0])

  def test_a_fifth_on_the_device_of_the_costs(self):
    """Of each time by itself: all of it, steps of either kind, and what a request sees."""
    setup, workload, pair = self.pair()
    here = jax.devices()[0].device_kind
    table = dataclasses.replace(serve_live.CostTable.h200(), device=here)
    there, setup = setup, dataclasses.replace(setup, table=table)
    live, predicted = pair.live, pair.simulated
    for factor, wrong in ((1.19, False), (1.21, True), (0.81, False), (0.79, True)):
      live.wall = factor * predicted.wall
      found = serve_live.judge(setup, workload, pair)
      self.assertEqual([f"{factor:.2f} of" in one for one in found], [True] * wrong)
      self.assertEqual(serve_live.judge(there, workload, pair), [])
    live.wall = predicted.wall
    live.writing.decode += 0.3 * predicted.writing.total
    for i, gap in enumerate(live.gaps):
      live.gaps[i] = 0.7 * gap
    first, second = serve_live.judge(setup, workload, pair)
    self.assertIn("steps that only decode takes 1.30", first)
    self.assertIn("between tokens, median takes 0.70", second)

  def test_the_slowest_tenth_is_judged(self):
    """Of three requests the last one's first token comes late: the median does not see it."""
    setup, workload, pair = self.pair()
    table = dataclasses.replace(serve_live.CostTable.h200(), device=jax.devices()[0].device_kind)
    setup = dataclasses.replace(setup, table=table)
    pair.live.timelines[-1].first *= 1.5
    (found,) = serve_live.judge(setup, workload, pair)
    self.assertRegex(found, "bf16: to the first token, p90 takes 1.[34]")

  def test_kinds_of_steps_are_judged(self):
    """Those that are taken often, and where the simulator's steps are the same ones."""
    setup, workload, pair = self.pair()
    table = dataclasses.replace(serve_live.CostTable.h200(), device=jax.devices()[0].device_kind)
    setup = dataclasses.replace(setup, table=table)
    for steps, live, wrong in ((40, 1.21, True), (39, 1.21, False), (40, 1.19, False)):
      of = dataclasses.replace(pair, kinds=(serve_live.Kind(2048, 4, steps, live, 1.0),))
      found = serve_live.judge(setup, workload, of)
      expected = "bf16: a step: up to 2048 tokens of 4 takes 1.21 of the simulated time"
      self.assertEqual(found, [expected] * wrong)
      timed = generate(3, prompt=100, output=5, interval=1.0)
      self.assertEqual(serve_live.judge(setup, timed, of), [])

  def test_the_run_on_an_h200_is_close(self):
    rows = [json.loads(line) for line in LIVE_ROWS.read_text().splitlines()]
    for live, simulated in zip(rows[::2], rows[1::2], strict=True):
      self.assertEqual((live["run"], simulated["run"]), ("live", "simulated"))
      kinds = [serve_live.Kind(**kind) for kind in live["kinds"]]
      self.assertGreaterEqual(sum(kind.steps >= serve_live.OFTEN for kind in kinds), 3)
      first = [row["time_to_first_token_seconds"]["p90"] for row in (live, simulated)]
      times = [(what, ratio, 1.0) for what, ratio in live["live_over_simulated"].items()]
      self.assertEqual(serve_live.far_off([*times, ("p90", *first)], kinds), [])


if __name__ == "__main__":
  absltest.main()
