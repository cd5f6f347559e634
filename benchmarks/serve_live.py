"""Live runs beside simulated ones: the same requests and scheduler, real steps and predicted ones.

What is decided must be the same, step by step, where it cannot hang on the clock: in a closed loop,
or where all requests are there from the start. On the device of the cost table a live run should
take what the simulator says to within a fifth; on another the two times mean nothing together. The
simulator knows attention and appends from the table, and all else from steps that the engine timed
without them, on the same machine, once for all formats.
"""

from __future__ import annotations

import dataclasses
import datetime
import textwrap
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import llama, serve_decoder
from benchmarks.records import git_revision
from benchmarks.serve_decoder import Weights
from benchmarks.serve_engine import Engine
from benchmarks.serve_formats import Format
from benchmarks.serve_metrics import measure
from benchmarks.serve_model import MODELS, Measured, Model
from benchmarks.serve_run import Interrupted, Run, serve
from benchmarks.serve_setup import Setup
from benchmarks.serve_workloads import Workload
from benchmarks.sources import kernel_hash
from benchmarks.table import WIDTH
from nvfp4_pallas.policy import CostTable

CLOSE = 0.2  # of the simulated time
OFTEN = 40  # steps of a kind that is judged: of fewer, a handful of slow ones decide
MOST_CHUNKS = 4  # unless something else is asked for
PRETRAINED = "smollm2-135m"
# Defaults that take a CPU some minutes; an 8B model's weights would fill its memory.
ON_A_CPU = {
  "model": PRETRAINED,
  "max_num_seqs": 4,
  "budget": 128,
  "pool_gib": 0.02,
  "requests": 4,
  "prompt": 300,
  "output": 20,
}


@dataclasses.dataclass(frozen=True)
class Decoder:
  """Weights, and what their shapes do not say."""

  weights: Weights
  config: llama.Config


def load(name: str, layers: int | None, dtype: Any) -> tuple[Decoder, Model]:
  """SmolLM2 from its file, or random weights of another of serve_model.MODELS.

  Args:
    layers: so many of the model's; None: all.

  Returns:
    the decoder and its geometry.

  Raises:
    ValueError: the model is no dense one, or has not so many layers.
  """
  model = MODELS[name]
  if model.experts != 1:
    raise ValueError(f"model must be a dense one to run live, got {name}")
  if layers is not None and not 1 <= layers <= model.layers:
    raise ValueError(f"layers must be from 1 to {model.layers} for {name}, got {layers}")
  if name == PRETRAINED:
    from benchmarks import llama_files

    read = llama_files.load().model
    weights = serve_decoder.weights_of(read, dtype)
    config = read.config
    weights = dataclasses.replace(weights, layers=weights.layers[:layers])
    model = dataclasses.replace(serve_decoder.geometry_of(read), layers=len(weights.layers))
  else:
    model = dataclasses.replace(model, layers=layers or model.layers)
    weights, config = serve_decoder.random_weights(model, dtype), serve_decoder.config_of(model)
  jax.block_until_ready(weights)
  return Decoder(weights, config), model


def defaults(model: str | None) -> dict[str, Any]:
  """Of options, on this device, with a model that was asked for or none."""
  small = jax.default_backend() == "cpu" and model in (None, PRETRAINED)
  return ON_A_CPU if small else {}


def dtype_of_device() -> Any:
  """Of weights: bf16, but for CPUs, which multiply float32 faster."""
  return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Kind:
  """Steps of one bucket.

  Attributes:
    rows, chunks: that it has room for; 0 of steps that only decode.
    steps: how many.
    live, simulated: seconds of all of them.
  """

  rows: int
  chunks: int
  steps: int
  live: float
  simulated: float

  @property
  def name(self) -> str:
    return f"up to {self.rows} tokens of {self.chunks}" if self.rows else "decodes alone"


@dataclasses.dataclass(frozen=True)
class Pair:
  """One format, live and simulated.

  Attributes:
    traces, programs, buckets: how often the engine traced a step, how many it compiled, and how
      many kinds of steps there are.
    kernels: of the compiled steps, beside XLA's own.
    compiled: seconds until all of them were.
    kinds: what steps of each took.
    model_costs: as an engine timed them.
  """

  format: Format
  live: Run
  simulated: Run
  traces: int
  programs: int
  buckets: int
  kernels: tuple[str, ...]
  compiled: float
  kinds: tuple[Kind, ...]
  model_costs: Measured

  @property
  def same_decisions(self) -> bool:
    return self.live.decisions == self.simulated.decisions

  @property
  def times(self) -> Iterator[tuple[str, float, float]]:
    """What is compared: (what, live seconds, simulated ones)."""
    one, other = measure(self.live), measure(self.simulated)
    yield "to the last token", one.wall_seconds, other.wall_seconds
    yield "steps that read", self.live.reading.total, self.simulated.reading.total
    yield "steps that only decode", self.live.writing.total, self.simulated.writing.total
    for what, name, share in (
      ("to the first token, median", "time_to_first_token_seconds", "p50"),
      ("to the first token, p90", "time_to_first_token_seconds", "p90"),
      ("between tokens, median", "inter_token_latency_seconds", "p50"),
    ):
      a, b = getattr(one, name), getattr(other, name)
      if a is not None and b is not None:
        yield what, getattr(a, share), getattr(b, share)


def run(
  setup: Setup,
  decoder: Decoder,
  workload: Workload,
  format: Format,
  implementation: str | None = None,
  model_costs: Measured | None = None,
  *,
  compilers: int = 1,
) -> Pair:
  """Runs a workload live, then simulates it.

  Args:
    setup: its model is the decoder's, and most_chunks is a number.
    model_costs: of an engine of another format on this machine; None: they are timed first.
    compilers: steps that are compiled at a time.

  Raises:
    Interrupted: by the user; its run is the live one.
  """
  if setup.most_chunks is None:
    raise ValueError("most_chunks must be a number for a live run, got None")
  scheduler = setup.scheduler(format)
  fitting = [
    item.prompt + item.output
    for item in workload.items
    if scheduler.pages(item.prompt + item.output - 1) <= scheduler.pool.num_pages
  ]
  engine = Engine(
    decoder.weights,
    decoder.config,
    serve_decoder.make_caches(format, setup.model, scheduler.pool.num_pages, setup.page_size),
    serve_decoder.reading(format, implementation),
    context=max(fitting, default=1),
    budget=setup.budget,
    places=setup.most_running,
    most_chunks=setup.most_chunks,
    compilers=compilers,
  )
  start = time.perf_counter()
  engine.warm_up()
  if model_costs is None:
    model_costs = engine.model_costs(min(setup.most_running, setup.concurrency or len(fitting)))
  compiled = time.perf_counter() - start
  options = {"concurrency": setup.concurrency, "time_scale": setup.time_scale}
  live = serve(workload, scheduler, engine, keep_decisions=True, **options)
  predicted = dataclasses.replace(setup, model_costs=model_costs)
  try:
    simulated = predicted.simulate(workload, format, keep_decisions=True)
  except KeyboardInterrupt:
    live.error = "interrupted before it was simulated"
    raise Interrupted(live) from None
  return Pair(
    format,
    live,
    simulated,
    engine.traces,
    engine.programs,
    len(list(engine.buckets())),
    tuple(sorted(engine.kernels)),
    compiled,
    tuple(_kinds(engine, live, simulated)),
    model_costs,
  )


def _kinds(engine: Engine, live: Run, simulated: Run) -> Iterator[Kind]:
  def by_bucket(run: Run) -> dict[tuple[int, int], list[float]]:
    found: dict[tuple[int, int], list[float]] = {bucket: [] for bucket in engine.buckets()}
    for (decodes, chunks, _), seconds in zip(run.decisions, run.seconds, strict=True):
      if decodes or chunks:
        found[engine.bucket(sum(n for _, _, n in chunks), len(chunks))].append(seconds)
    return found

  lived, predicted = by_bucket(live), by_bucket(simulated)
  for (rows, chunks), seconds in lived.items():
    yield Kind(rows, chunks, len(seconds), sum(seconds), sum(predicted[rows, chunks]))


def by_the_clock(setup: Setup, workload: Workload) -> bool:
  """Whether what is decided hangs on how long steps take."""
  return setup.concurrency is None and any(item.arrival for item in workload.items)


def lines(setup: Setup, workload: Workload, pair: Pair) -> list[str]:
  """How the simulator did."""
  name = pair.format.name
  if by_the_clock(setup, workload):
    decided = "arrivals hang on the clock: decisions are not compared"
  else:
    decided = f"the simulator's decisions are {'the same' if pair.same_decisions else 'OTHERS'}"
  told = [
    f"{name}: {pair.live.steps:,} steps of {pair.buckets} kinds, traced {pair.traces} times; "
    f"{decided}",
    *textwrap.wrap(
      f"compiled, and the model timed, in {pair.compiled:.1f} s; kernels: "
      f"{', '.join(pair.kernels) or 'XLA alone'}",
      WIDTH,
      initial_indent="  ",
      subsequent_indent="    ",
    ),
    f"  {'seconds':28}{'live':>10}{'simulated':>12}{'ratio':>8}",
  ]
  for what, a, b in pair.times:
    told.append(f"  {what:28}{a:>10.4f}{b:>12.4f}{_ratio(a, b):>8.2f}")
  told.append(
    f"  {'milliseconds of a step':28}{'live':>10}{'simulated':>12}{'ratio':>8}{'steps':>8}"
  )
  for kind in pair.kinds:
    if kind.steps:
      ratio = _ratio(kind.live, kind.simulated)
      a, b = (1e3 * seconds / kind.steps for seconds in (kind.live, kind.simulated))
      told.append(f"  {kind.name:28}{a:>10.3f}{b:>12.3f}{ratio:>8.2f}{kind.steps:>8,}")
  return told


def _ratio(live: float, simulated: float) -> float:
  return live / simulated if simulated else 1.0


def judge(setup: Setup, workload: Workload, pair: Pair) -> list[str]:
  """What is wrong with a pair."""
  name = pair.format.name
  if not pair.traces == pair.programs == pair.buckets:
    return [
      f"{name}: steps were traced {pair.traces} times and compiled {pair.programs} times, of "
      f"{pair.buckets} kinds"
    ]
  timed = by_the_clock(setup, workload)
  if not timed and not pair.same_decisions:
    return [f"{name}: the simulator decides otherwise"]
  table = CostTable.h200() if setup.table is None else setup.table
  if jax.devices()[0].device_kind != table.device:
    return []
  # Steps of a kind are the simulator's own only where it decided the same.
  return [f"{name}: {what}" for what in far_off(pair.times, () if timed else pair.kinds)]


def far_off(times: Iterable[tuple[str, float, float]], kinds: Iterable[Kind]) -> list[str]:
  """What is off by more than CLOSE, of times as Pair has them and of kinds with OFTEN steps."""
  often = ((f"a step: {k.name}", k.live, k.simulated) for k in kinds if k.steps >= OFTEN)
  return [
    f"{what} takes {_ratio(a, b):.2f} of the simulated time"
    for what, a, b in (*times, *often)
    if abs(_ratio(a, b) - 1) > CLOSE
  ]


def where(revision: str | None) -> dict[str, Any]:
  """Of a row: where and when it was run."""
  return {
    "device": jax.devices()[0].device_kind,
    "jax_version": jax.__version__,
    "git_revision": revision or git_revision(),
    "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
  }


def row_fields(pair: Pair, revision: str | None) -> dict[str, Any]:
  """Of a row: where and by what it was run, and how the simulator did."""
  return {
    **where(revision),
    "kernel_names": pair.kernels,
    "kernel_hash": kernel_hash(pair.kernels),
    "traces": pair.traces,
    "kinds": [dataclasses.asdict(kind) for kind in pair.kinds],
    "same_decisions": pair.same_decisions,
    "live_over_simulated": {what: _ratio(a, b) for what, a, b in pair.times},
    "model_costs": dataclasses.asdict(pair.model_costs),
    "compile_seconds": pair.compiled,
  }
