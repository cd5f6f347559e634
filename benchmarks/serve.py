"""`python3 -m benchmarks serve --simulate`: what a cache format does to a server under load.

    serve --simulate                                        generated requests, every format
    serve --simulate --trace conversation_trace.jsonl.gz --limit 1000 --time-scale 4
    serve --simulate --case seeds                           the two articles' thirty requests
    serve --simulate --sweep capacity --plot DIR            context length and concurrency
    serve --simulate --sweep reuse                          prefix reuse from 0 to 95 %

Formats get pages of the same bytes and requests at the same times. A step's attention takes as
long as was measured on an H200 (serve_costs.py, also for the choices of --costs), everything else
as long for every format (serve_model.py). The scheduler is serve_scheduler.py's, and the same as
the live engine's. A trace that breaks off is served up to there; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys

from benchmarks import serve_table
from benchmarks.serve_costs import COSTS
from benchmarks.serve_formats import FORMATS
from benchmarks.serve_metrics import Metrics, Slo, measure
from benchmarks.serve_model import MODELS, Measured
from benchmarks.serve_policies import POLICIES, Vllm
from benchmarks.serve_setup import GIB, Setup
from benchmarks.serve_workloads import Workload, generate, read
from benchmarks.sources import kernel_hash
from nvfp4_pallas.policy import CostTable

SOME = ("bf16", "fp8", "fp8_nvfp4", "nvfp4", "nvfp4_dequant", "nvfp4_repack", "nvfp4_a8q")


def main(argv: list[str]) -> int:
  parser = argparse.ArgumentParser(
    prog="python3 -m benchmarks serve",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("--simulate", action="store_true", required=True)
  parser.add_argument("--case", choices=("seeds",))
  parser.add_argument("--formats", nargs="+", choices=FORMATS, default=SOME)
  parser.add_argument("--slo", nargs=2, type=float, default=(2.0, 0.1), metavar=("TTFT", "ITL"))
  parser.add_argument("--out", type=pathlib.Path, metavar="FILE.jsonl", help="a row a format")
  add_workload_options(parser)
  add_server_options(parser)
  options = parser.parse_args(argv)
  try:
    if options.case:
      from benchmarks import serve_case

      print("\n".join(serve_case.lines(serve_case.run())))
      return 0
    server, workload = setup(options), read_workload(options)
    return _simulate(server, workload, options)
  except (ValueError, OSError) as error:
    parser.error(str(error))


def _simulate(server: Setup, workload: Workload, options) -> int:
  print(about(server, workload))
  found: dict[str, Metrics] = {}
  rejected: list[str] = []
  for name in options.formats:
    try:
      run = server.simulate(workload, FORMATS[name])
    except ValueError as error:  # a pool without a page of it, costs that were not measured
      print(f"{name}: {error}", file=sys.stderr)
      continue
    found[name] = measure(run, Slo(*options.slo))
    rejected += [f"{name}: {message}" for message in run.rejected]
    if options.out is not None:
      write_rows(server, workload, found, options.out)
  print("\n".join(serve_table.lines(server, found)))
  for message in rejected[:MESSAGES]:
    print(f"rejected, {message}", file=sys.stderr)
  if len(rejected) > MESSAGES:
    print(f"and {len(rejected) - MESSAGES} more were rejected", file=sys.stderr)
  if workload.error is not None:
    print(f"the workload ends early: {workload.error}", file=sys.stderr)
  return 1 if workload.error is not None or not found else 0


MESSAGES = 8


def add_workload_options(parser: argparse.ArgumentParser) -> None:
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


def read_workload(options) -> Workload:
  if options.trace is not None:
    return read(options.trace, limit=options.limit)
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


def add_server_options(parser: argparse.ArgumentParser) -> None:
  add = parser.add_argument_group("server").add_argument
  add("--concurrency", type=int, metavar="N", help="requests under way at a time; else arrivals")
  add("--time-scale", type=float, default=1.0, metavar="X", help="arrivals X times as far apart")
  add("--model", choices=MODELS, default="llama-8b")
  add("--pool-gib", type=float, default=20.0, help="of all caches")
  add("--page-size", type=int, default=16, help="tokens")
  add("--recent-window", type=int, default=0, help="tokens in bf16 beside pages with nvfp4")
  add("--budget", type=int, default=8192, help="tokens of a step")
  add("--max-num-seqs", type=int, default=256, help="requests that run at a time")
  add("--policy", choices=POLICIES, default="vllm")
  add("--watermark", type=float, default=0.0, help="share of pages kept free, policy vllm")
  add("--first-chunk", action="store_true", help="a prompt starts when its first chunk fits")
  add("--no-prefix-cache", action="store_true")
  add("--costs", choices=COSTS, default="alike", help="of attention")
  add("--cost-table", type=pathlib.Path, metavar="FILE.json", help="of `benchmarks costs`")
  add("--model-costs", type=pathlib.Path, metavar="FILE.json", help="of a live run")


def setup(options) -> Setup:
  policy = POLICIES[options.policy]
  if options.policy == "vllm":
    policy = lambda: Vllm(options.watermark, not options.first_chunk)
  elif options.watermark or options.first_chunk:
    raise ValueError(f"watermark and first_chunk need policy vllm, got {options.policy}")
  policy()  # checks its options
  return Setup(
    model=MODELS[options.model],
    pool_bytes=round(options.pool_gib * GIB),
    page_size=options.page_size,
    recent_window=options.recent_window,
    budget=options.budget,
    most_running=options.max_num_seqs,
    policy=policy,
    prefix_cache=not options.no_prefix_cache,
    concurrency=options.concurrency,
    time_scale=options.time_scale,
    costs=options.costs,
    table=None if options.cost_table is None else CostTable.load(options.cost_table),
    model_costs=None if options.model_costs is None else Measured.load(options.model_costs),
  )


def about(server: Setup, workload: Workload) -> str:
  """What is simulated, in a few lines."""
  return f"{workload.name}: {len(workload.items):,} requests\n{costs_told(server)}"


def costs_told(server: Setup) -> str:
  if server.costs == "seeds":
    return "attention costs: the articles', RTX PRO 5000"
  table = CostTable.h200() if server.table is None else server.table
  stale = any(kernel_hash(names) != key for key, names in table.kernel_hashes.items())
  return (
    f"attention costs: {server.costs}, {table.device}, {table.revision}"
    f"{'; STALE, kernels changed since' if stale else ''}"
  )


def write_rows(
  server: Setup, workload: Workload, found: dict[str, Metrics], path: pathlib.Path
) -> None:
  """A JSON line a format; everything that is known so far, again after every run."""
  path.parent.mkdir(parents=True, exist_ok=True)
  rows = (
    {
      "workload": workload.name,
      "format": name,
      "costs": costs_told(server),
      "pages": server.pages(FORMATS[name]),
      "bytes_per_token": server.model.heads.token_bytes(FORMATS[name]),
      **dataclasses.asdict(m),
    }
    for name, m in found.items()
  )
  path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
