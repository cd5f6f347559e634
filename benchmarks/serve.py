"""`python3 -m benchmarks serve --simulate`: what a cache format does to a server under load.

    serve --simulate                                        generated requests, every format
    serve --simulate --trace conversation_trace.jsonl.gz --limit 1000 --time-scale 4
    serve --simulate --case seeds                           the two articles' thirty requests
    serve --simulate --sweep capacity --plot a.png          context length and concurrency
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
from collections.abc import Iterable

from benchmarks import serve_case, serve_options, serve_sweeps, serve_table
from benchmarks.serve_formats import BASELINE, FORMATS
from benchmarks.serve_metrics import Metrics, Slo, measure
from benchmarks.serve_setup import Setup
from benchmarks.serve_workloads import Workload

SOME = ("bf16", "fp8", "fp8_nvfp4", "nvfp4", "nvfp4_dequant", "nvfp4_repack", "nvfp4_a8q")
MESSAGES = 8  # of rejected requests that are printed


def main(argv: list[str]) -> int:
  parser = argparse.ArgumentParser(
    prog="python3 -m benchmarks serve",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  add = parser.add_argument
  add("--simulate", action="store_true", required=True)
  add("--case", choices=("seeds",), help="instead: a published case")
  add("--sweep", choices=serve_sweeps.SWEEPS, help="instead: against FP8, many servers")
  add("--plot", type=pathlib.Path, metavar="FILE.png", help="also draw the sweep")
  add("--formats", nargs="+", choices=FORMATS, help="default: most; of sweeps nvfp4")
  add("--slo", nargs=2, type=float, default=(2.0, 0.1), metavar=("TTFT", "ITL"))
  add("--out", type=pathlib.Path, metavar="FILE.jsonl", help="also write rows as they come")
  serve_options.add_workload(parser)
  serve_options.add_server(parser)
  options = parser.parse_args(argv)
  if options.plot and not options.sweep:
    parser.error("--plot needs --sweep")
  try:
    if options.case:
      print("\n".join(serve_case.lines(serve_case.run())))
      return 0
    server = serve_options.setup(options)
    if options.sweep:
      return _sweep(server, options)
    return _simulate(server, serve_options.workload(options), options)
  except (ValueError, OSError) as error:
    parser.error(str(error))
  except ImportError as error:
    parser.error(f"--plot needs matplotlib, which the extra `reports` installs: {error}")


def _simulate(server: Setup, workload: Workload, options) -> int:
  print(f"{workload.name}: {len(workload.items):,} requests\n{serve_options.costs_told(server)}")
  found: dict[str, Metrics] = {}
  rejected: list[str] = []
  for name in options.formats or SOME:
    try:
      run = server.simulate(workload, FORMATS[name])
    except ValueError as error:  # a pool without a page of it, costs that were not measured
      print(f"{name}: {error}", file=sys.stderr)
      continue
    found[name] = measure(run, Slo(*options.slo))
    rejected += [f"{name}: {message}" for message in run.rejected]
    _write((_row(server, workload, name, m) for name, m in found.items()), options.out)
  print("\n".join(serve_table.lines(server, found)))
  for message in rejected[:MESSAGES]:
    print(f"rejected, {message}", file=sys.stderr)
  if len(rejected) > MESSAGES:
    print(f"and {len(rejected) - MESSAGES} more were rejected", file=sys.stderr)
  if workload.error is not None:
    print(f"the workload ends early: {workload.error}", file=sys.stderr)
  return 1 if workload.error is not None or not found else 0


def _sweep(server: Setup, options) -> int:
  names = options.formats or ("nvfp4",)
  if len(names) != 1:
    raise ValueError(f"formats must be one for a sweep, which is against FP8, got {names}")
  other = FORMATS[names[0]]
  told = serve_options.costs_told(server)
  print(told)
  points: list[serve_sweeps.Point] = []
  if options.sweep == "capacity":
    found = serve_sweeps.capacity(
      server,
      other,
      output=options.output,
      contexts=serve_sweeps.CONTEXTS,
      concurrencies=serve_sweeps.CONCURRENCIES,
    )
  else:
    given = ("requests", "prompt", "output", "spread", "documents", "seed")
    sizes = {name: getattr(options, name) for name in given}
    found = serve_sweeps.reuse(server, other, reuses=serve_sweeps.REUSES, **sizes)
  for point in found:
    points.append(point)
    _write(map(dataclasses.asdict, points), options.out)
  lines = {"capacity": serve_sweeps.capacity_lines, "reuse": serve_sweeps.reuse_lines}
  print("\n".join(lines[options.sweep](points, other)))
  if options.plot is not None:
    from benchmarks import serve_plot

    title = f"{options.model}, {options.pool_gib:g} GiB of cache; {told}"
    if options.sweep == "capacity":
      tokens = [server.pages(f) * server.page_size for f in (BASELINE, other)]
      serve_plot.draw_capacity(points, other, title, tokens, options.plot)
    else:
      serve_plot.draw_reuse(points, other, title, options.plot)
    print(f"drawn: {options.plot}")
  return 0


def _row(server: Setup, workload: Workload, name: str, m: Metrics) -> dict:
  return {
    "workload": workload.name,
    "format": name,
    "costs": serve_options.costs_told(server),
    "pages": server.pages(FORMATS[name]),
    "bytes_per_token": server.model.heads.token_bytes(FORMATS[name]),
    **dataclasses.asdict(m),
  }


def _write(rows: Iterable[dict], path: pathlib.Path | None) -> None:
  """A JSON line each; called again with all there is whenever there is one more."""
  if path is not None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
