"""Live runs beside simulated ones: the same requests and scheduler, real steps and predicted ones.

What is decided must be the same, step by step, where it cannot hang on the clock: in a closed loop,
or where all requests are there from the start. On the device of the cost table a live run should
take what the simulator says to within a fifth; on another the two times mean nothing together. The
simulator knows attention and appends from the table, and all else from steps that the engine timed
without them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import llama, serve_decoder
from benchmarks.serve_decoder import Weights
from benchmarks.serve_engine import Engine
from benchmarks.serve_formats import Format
from benchmarks.serve_metrics import measure
from benchmarks.serve_model import MODELS, Measured, Model
from benchmarks.serve_run import Run, serve
from benchmarks.serve_setup import Setup
from benchmarks.serve_workloads import Workload
from nvfp4_pallas.policy import CostTable

CLOSE = 0.2  # of the simulated time
MOST_CHUNKS = 4  # unless something else is asked for
PRETRAINED = "smollm2-135m"


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


def dtype_of_device() -> Any:
  """Of weights: bf16, but for CPUs, which multiply float32 faster."""
  return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Pair:
  """One format, live and simulated.

  Attributes:
    traces, buckets: how often the engine traced a step, and how many kinds of steps there are.
    model_costs: as the engine timed them.
  """

  format: Format
  live: Run
  simulated: Run
  traces: int
  buckets: int
  model_costs: Measured

  @property
  def same_decisions(self) -> bool:
    return self.live.decisions == self.simulated.decisions

  @property
  def ratio(self) -> float:
    """Of the live run's time to the simulated one's."""
    return self.live.wall / self.simulated.wall if self.simulated.wall else 1.0


def run(
  setup: Setup,
  decoder: Decoder,
  workload: Workload,
  format: Format,
  implementation: str | None = None,
) -> Pair:
  """Runs a workload live, then simulates it.

  Args:
    setup: its model is the decoder's, and most_chunks is a number.
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
  )
  engine.warm_up()
  costs = engine.model_costs()
  options = {"concurrency": setup.concurrency, "time_scale": setup.time_scale}
  live = serve(workload, scheduler, engine, keep_decisions=True, **options)
  # Kernels as they are: FP8's for short chunks too.
  predicted = dataclasses.replace(setup, costs="measured", model_costs=costs)
  simulated = predicted.simulate(workload, format, keep_decisions=True)
  return Pair(format, live, simulated, engine.traces, len(list(engine.buckets())), costs)


def by_the_clock(setup: Setup, workload: Workload) -> bool:
  """Whether what is decided hangs on how long steps take."""
  return setup.concurrency is None and any(item.arrival for item in workload.items)


def lines(setup: Setup, workload: Workload, pair: Pair) -> list[str]:
  """How the simulator did."""
  live, simulated = pair.live, pair.simulated
  name = pair.format.name
  if by_the_clock(setup, workload):
    decided = "arrivals hang on the clock: decisions are not compared"
  else:
    decided = f"the simulator's decisions are {'the same' if pair.same_decisions else 'OTHERS'}"
  told = [
    f"{name}: {live.steps:,} steps of {pair.buckets} kinds, traced {pair.traces} times; {decided}",
    f"  {'seconds':24}{'live':>10}{'simulated':>12}{'ratio':>8}",
  ]
  first, gap = (
    lambda run, of=of: getattr(measure(run), of).p50 if run.gaps else 0.0
    for of in ("time_to_first_token_seconds", "inter_token_latency_seconds")
  )
  for what, value in (
    ("steps that read", lambda run: run.reading.total),
    ("steps that only decode", lambda run: run.writing.total),
    ("to the last token", lambda run: run.wall),
    ("to the first, median", first),
    ("between tokens, median", gap),
  ):
    a, b = value(live), value(simulated)
    told.append(f"  {what:24}{a:>10.4f}{b:>12.4f}{a / b if b else 1:>8.2f}")
  return told


def judge(setup: Setup, workload: Workload, pair: Pair) -> str | None:
  """What is wrong with a pair, or None."""
  if pair.traces != pair.buckets:
    return f"{pair.format.name}: steps were traced {pair.traces} times, of {pair.buckets} kinds"
  if not by_the_clock(setup, workload) and not pair.same_decisions:
    return f"{pair.format.name}: the simulator decides otherwise"
  table = CostTable.h200() if setup.table is None else setup.table
  here = jax.devices()[0].device_kind
  if here == table.device and abs(pair.ratio - 1) > CLOSE:
    return f"{pair.format.name}: live takes {pair.ratio:.2f} of the simulated time"
  return None
