"""Options of the commands that serve requests, and what they make."""

from __future__ import annotations

import argparse
import math
import pathlib

from benchmarks import serve_files
from benchmarks.serve_costs import COSTS
from benchmarks.serve_model import MODELS, Measured
from benchmarks.serve_policies import POLICIES, Vllm
from benchmarks.serve_setup import GIB, MEASURED_PAGE_SIZE, Setup
from benchmarks.serve_workloads import Workload, generate, read, write
from benchmarks.sources import kernel_hash
from nvfp4_pallas.policy import CostTable

DEFAULT_GIB = 20


def add_workload(parser: argparse.ArgumentParser) -> None:
  add = parser.add_argument_group("requests").add_argument
  add("--trace", type=pathlib.Path, metavar="FILE", help="Mooncake .jsonl or Azure .csv, or .gz")
  add("--limit", type=int, metavar="N", help="the first requests of it")
  add("--requests", type=int, default=128, help="generated ones")
  add("--prompt", type=int, default=8192, help="mean tokens")
  add("--output", type=int, default=256, help="mean tokens")
  add("--spread", type=float, default=0.3, help="lengths are uniform within mean * (1 -+ this)")
  add("--reuse", type=float, default=0.5, help="share of a prompt that begins a document")
  add("--documents", type=int, default=32, help="that requests draw from")
  add("--interval", type=float, default=0.0, metavar="S", help="mean seconds between arrivals")
  add("--poisson", action="store_true", help="arrivals at random")
  add("--seed", type=int, default=0)
  add("--keep", type=pathlib.Path, metavar="FILE.jsonl", help="write them down, for --trace")
  add("--overwrite", action="store_true", help="lose what is in the files that are written")


def workload(options: argparse.Namespace) -> Workload:
  """Raises ValueError where options make no requests, OSError where a file cannot be opened."""
  made = _workload(options)
  if not made.items:
    raise ValueError(made.error or f"trace must have at least a request, {made.name} has none")
  if options.keep is not None:
    write(made.items, options.keep)
  return made


def _workload(options: argparse.Namespace) -> Workload:
  if options.trace is not None:
    return read(options.trace, limit=options.limit)
  return generated(options)


def generated(options: argparse.Namespace) -> Workload:
  return generate(
    options.requests,
    prompt=options.prompt,
    output=options.output,
    spread=options.spread,
    reuse=options.reuse,
    documents=options.documents,
    interval=options.interval,
    poisson=options.poisson,
    seed=options.seed,
  )


def add_server(parser: argparse.ArgumentParser) -> None:
  add = parser.add_argument_group("server").add_argument
  add("--concurrency", type=int, metavar="N", help="requests under way at a time; else arrivals")
  add("--time-scale", type=float, default=1.0, metavar="X", help="arrivals X times as far apart")
  add("--model", choices=MODELS, default="llama-8b")
  add(
    "--pool-gib",
    type=float,
    metavar="GIB",
    help=f"of all caches; default: {DEFAULT_GIB}, of fewer layers their share",
  )
  add("--page-size", type=int, default=64, help="tokens")
  add("--recent-window", type=int, default=0, help="tokens in bf16 beside pages with nvfp4")
  add("--budget", type=int, default=8192, help="tokens of a step")
  add("--max-num-seqs", type=int, default=256, help="requests that run at a time")
  add("--max-chunks", type=int, help="requests that read in one step; default: any number")
  add("--policy", choices=POLICIES, default="vllm")
  add("--watermark", type=float, default=0.0, help="share of pages kept free, policy vllm")
  add("--first-chunk", action="store_true", help="a prompt starts when its first chunk fits")
  add("--no-prefix-cache", action="store_true")
  add("--costs", choices=COSTS, default="alike", help="of attention")
  add("--cost-table", type=pathlib.Path, metavar="FILE.json", help="of `benchmarks costs`")
  add("--model-costs", type=pathlib.Path, metavar="FILE.json", help="of a live run")


def setup(options: argparse.Namespace) -> Setup:
  """Raises ValueError where options do not go together, OSError where a file cannot be read or
  written."""
  serve_files.check(options)
  policy = POLICIES[options.policy]
  if options.policy == "vllm":
    policy = lambda: Vllm(options.watermark, not options.first_chunk)
  elif options.watermark or options.first_chunk:
    raise ValueError(f"watermark and first_chunk need policy vllm, got {options.policy}")
  policy()  # checks its options
  gib = DEFAULT_GIB if options.pool_gib is None else options.pool_gib
  if not 0 < gib < math.inf:
    raise ValueError(f"pool_gib must be positive and finite, got {gib}")
  return Setup(
    model=MODELS[options.model],
    pool_bytes=round(gib * GIB),
    page_size=options.page_size,
    recent_window=options.recent_window,
    budget=options.budget,
    most_running=options.max_num_seqs,
    most_chunks=options.max_chunks,
    policy=policy,
    prefix_cache=not options.no_prefix_cache,
    concurrency=options.concurrency,
    time_scale=options.time_scale,
    costs=options.costs,
    table=None if options.cost_table is None else CostTable.load(options.cost_table),
    model_costs=None if options.model_costs is None else Measured.load(options.model_costs),
  )


def costs_told(server: Setup) -> str:
  """Where the costs of attention come from, whether they are of these kernels, and in a line of
  its own what is not in them."""
  if server.costs == "seeds":
    return "attention costs: the articles', RTX PRO 5000"
  table = CostTable.h200() if server.table is None else server.table
  stale = any(kernel_hash(names) != key for key, names in table.kernel_hashes.items())
  told = (
    f"attention costs: {server.costs}, {table.device}, {table.revision}"
    f"{'; STALE, kernels changed since' if stale else ''}"
  )
  here = []
  if server.page_size != MEASURED_PAGE_SIZE:
    here.append(f"pages of {server.page_size}")
  if server.recent_window:
    here.append(f"a window of {server.recent_window}")
  if here:
    told += (
      f"\n  as measured with pages of {MEASURED_PAGE_SIZE} tokens and no window, taken for "
      f"{' and '.join(here)}"
    )
  return told
