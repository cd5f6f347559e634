"""`python3 -m benchmarks serve`: what a cache format does to a server under load.

    serve --simulate                                        generated requests, every format
    serve --simulate --trace conversation_trace.jsonl.gz --limit 1000 --time-scale 4
    serve --simulate --case seeds                           the two articles' thirty requests
    serve --simulate --sweep capacity --plot a.png          context length and concurrency
    serve --simulate --sweep reuse                          prefix reuse from 0 to 95 %
    serve --live --concurrency 32 --max-num-seqs 64 --budget 2048 --layers 8 --pool-gib 3 \\
      --output 512                                          real kernels, beside the simulator
    serve --live                                            on a CPU: SmolLM2, few requests

Formats get pages of the same bytes and requests at the same times. A step's attention takes as
long as was measured on an H200 (serve_costs.py, also for the choices of --costs), everything else
as long for every format (serve_model.py). The live engine takes the same scheduler's steps with a
decoder of random weights, or with SmolLM2; the simulator knows the decoder without attention from
steps timed on the same machine, attention and appends from the costs. The exit code is 1 where it
decides otherwise or, on the device of the costs, one of its times is off by more than a fifth: to
the last token, of steps that read and that only decode, of each kind of step that is taken often,
to the first token (median and p90) and between two. A trace that breaks off is served up to there;
the exit code is then 1 too, and where nothing is served at all. After Ctrl-C it is 130: what was
served until then is told and written, with `error` in the row of the format that was cut.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Iterable

from benchmarks import serve_case, serve_ignored, serve_options, serve_sweeps, serve_table
from benchmarks.serve_formats import BASELINE, FORMATS
from benchmarks.serve_metrics import Metrics, Slo, measure
from benchmarks.serve_run import Interrupted, Run
from benchmarks.serve_setup import GIB, Setup
from benchmarks.serve_workloads import Workload

SOME = ("bf16", "fp8", "fp8_nvfp4", "nvfp4", "nvfp4_dequant", "nvfp4_repack", "nvfp4_a8q")
LIVE = ("fp8", "nvfp4")
INTERRUPTED = 130  # the exit code, as a shell has it
MESSAGES = 8  # of rejected requests that are printed


def main(argv: list[str]) -> int:
  parser = argparse.ArgumentParser(
    prog="python3 -m benchmarks serve",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  add = parser.add_argument
  kind = parser.add_mutually_exclusive_group(required=True)
  kind.add_argument("--simulate", action="store_true")
  kind.add_argument("--live", action="store_true", help="run it, then simulate it")
  add("--case", choices=("seeds",), help="instead: a published case")
  add("--sweep", choices=serve_sweeps.SWEEPS, help="instead: against FP8, many servers")
  add("--plot", type=pathlib.Path, metavar="FILE.png", help="also draw the sweep")
  told = f"of {', '.join(FORMATS)}; default: most, live {' and '.join(LIVE)}, of sweeps nvfp4"
  add("--formats", nargs="+", choices=FORMATS, metavar="FORMAT", help=told)
  add("--slo", nargs=2, type=float, default=(2.0, 0.1), metavar=("TTFT", "ITL"))
  add(
    "--out",
    type=pathlib.Path,
    metavar="FILE.jsonl",
    help="also write rows as they come, to a new file",
  )
  serve_options.add_workload(parser)
  serve_options.add_server(parser)
  live = parser.add_argument_group("live").add_argument
  live("--layers", type=int, metavar="N", help="of the model's; default: all")
  live("--implementation", help="who runs the operations; default: the device's kernels")
  live("--compilers", type=int, default=4, metavar="N", help="steps compiled at a time")
  live("--revision", help="of rows from a machine without a checkout")
  live("--write-model-costs", type=pathlib.Path, metavar="FILE.json", help="for --model-costs")
  options = serve_ignored.parse(parser, argv)
  if options.live:
    from benchmarks import serve_live

    asked = options.model if "model" in options.given else None
    parser.set_defaults(**serve_live.defaults(asked))
    options = serve_ignored.parse(parser, argv)
  if options.plot and not options.sweep:
    parser.error("--plot needs --sweep")
  if options.live and (options.case or options.sweep):
    parser.error("--live serves requests, neither a --case nor a --sweep")
  if options.compilers < 1:
    parser.error(f"compilers must be at least 1, got {options.compilers}")
  try:
    Slo(*options.slo)  # checks them
    if options.case:
      print("\n".join(serve_case.lines(serve_case.run())))
      return 0
    server = serve_options.setup(options)
    if options.sweep:
      return _sweep(server, options)
    if options.live:
      return _live(server, serve_options.workload(options), options)
    return _simulate(server, serve_options.workload(options), options)
  except (ValueError, OSError) as error:
    parser.error(str(error))
  except ImportError as error:
    if options.live:
      parser.error(str(error))
    parser.error(f"--plot needs matplotlib, which the extra `reports` installs: {error}")


def _simulate(server: Setup, workload: Workload, options) -> int:
  print(f"{workload.name}: {len(workload.items):,} requests\n{serve_options.costs_told(server)}")
  found: dict[str, Metrics] = {}
  rejected, rows, interrupted = [], [], None

  def keep(name: str, run: Run) -> None:
    found[name] = measure(run, Slo(*options.slo))
    rejected.extend(f"{name}: {message}" for message in run.rejected)
    rows.append(_row(server, workload, name, found[name], run.error))
    _write(rows, options.out)

  for name in options.formats or SOME:
    try:
      keep(name, server.simulate(workload, FORMATS[name]))
    except ValueError as error:  # a pool without a page of it, costs that were not measured
      print(f"{name}: {error}", file=sys.stderr)
    except KeyboardInterrupt as error:
      interrupted = _interrupted(name, error, keep)
      break
  print("\n".join(serve_table.lines(server, found)))
  _tell(rejected, workload)
  if interrupted is not None:
    print(interrupted, file=sys.stderr)
    return INTERRUPTED
  return 1 if workload.error is not None or _nothing_served(found) else 0


def _nothing_served(found: dict[str, Metrics]) -> bool:
  if any(m.request_success for m in found.values()):
    return False
  print("no request was served", file=sys.stderr)
  return True


def _interrupted(name: str, error: KeyboardInterrupt, keep: Callable[[str, Run], None]) -> str:
  """Keeps what was served of a format; returns what is to be told."""
  if not isinstance(error, Interrupted):
    return f"interrupted before {name} was served"
  keep(name, error.run)
  return f"{name}: {error.run.error}; its row counts what was served until then"


def _tell(rejected: list[str], workload: Workload) -> None:
  """What went wrong with requests."""
  for message in rejected[:MESSAGES]:
    print(f"rejected, {message}", file=sys.stderr)
  if len(rejected) > MESSAGES:
    print(f"and {len(rejected) - MESSAGES} more were rejected", file=sys.stderr)
  if workload.error is not None:
    print(f"the workload ends early: {workload.error}", file=sys.stderr)


def _live(server: Setup, workload: Workload, options) -> int:
  from benchmarks import serve_live

  decoder, model = serve_live.load(options.model, options.layers, serve_live.dtype_of_device())
  if options.pool_gib is None:
    pool_bytes = server.pool_bytes * model.layers // server.model.layers
    server = dataclasses.replace(server, pool_bytes=pool_bytes)
  chunks = server.most_chunks or serve_live.MOST_CHUNKS
  # Kernels as they are: FP8's for short chunks too.
  server = dataclasses.replace(server, model=model, most_chunks=chunks, costs="measured")
  print(
    f"{workload.name}: {len(workload.items):,} requests, live, {model.layers} layers\n"
    f"{serve_options.costs_told(server)}",
    flush=True,
  )
  found: dict[str, Metrics] = {}
  rejected, faults, rows, interrupted = [], [], [], None
  model_costs = None

  def keep(name: str, run: Run, of: dict | None = None) -> None:
    found[name] = measure(run, Slo(*options.slo))
    rejected.extend(f"{name}: {message}" for message in run.rejected)
    row = _row(server, workload, name, found[name], run.error)
    rows.append({"run": "live", **row, **(of or serve_live.where(options.revision))})
    _write(rows, options.out)

  for name in options.formats or LIVE:
    try:
      pair = serve_live.run(
        server,
        decoder,
        workload,
        FORMATS[name],
        options.implementation,
        model_costs,
        compilers=options.compilers,
      )
    except KeyboardInterrupt as error:
      interrupted = _interrupted(name, error, keep)
      break
    model_costs = pair.model_costs
    faults += serve_live.judge(server, workload, pair)
    print("\n".join(serve_live.lines(server, workload, pair)), flush=True)
    of = serve_live.row_fields(pair, options.revision)
    keep(name, pair.live, of)
    predicted = measure(pair.simulated, Slo(*options.slo))
    row = _row(server, workload, name, predicted, pair.simulated.error)
    rows.append({"run": "simulated", **row, **of})
    _write(rows, options.out)
    if options.write_model_costs is not None:
      pair.model_costs.save(options.write_model_costs)
  print("\n".join(("", *serve_table.lines(server, found))))
  _tell(rejected, workload)
  for fault in faults:
    print(f"FAILED: {fault}", file=sys.stderr)
  if interrupted is not None:
    print(interrupted, file=sys.stderr)
    return INTERRUPTED
  return 1 if faults or workload.error is not None or _nothing_served(found) else 0


def _sweep(server: Setup, options) -> int:
  names = options.formats or ("nvfp4",)
  if len(names) != 1:
    raise ValueError(f"formats must be one for a sweep, which is against FP8, got {names}")
  other = FORMATS[names[0]]
  told = serve_options.costs_told(server)
  print(told)
  points: list[serve_sweeps.Point] = []
  if options.sweep == "capacity":
    contexts = [tokens for tokens in serve_sweeps.CONTEXTS if tokens > options.output]
    if not contexts:
      raise ValueError(
        f"output must be less than the longest context of {max(serve_sweeps.CONTEXTS):,} tokens, "
        f"got {options.output:,}"
      )
    found = serve_sweeps.capacity(
      server,
      other,
      output=options.output,
      contexts=contexts,
      concurrencies=serve_sweeps.CONCURRENCIES,
    )
  else:
    given = ("requests", "prompt", "output", "spread", "documents", "seed")
    sizes = {name: getattr(options, name) for name in given}
    found = serve_sweeps.reuse(server, other, reuses=serve_sweeps.REUSES, **sizes)
  interrupted = False
  try:
    for point in found:
      points.append(point)
      _write(map(dataclasses.asdict, points), options.out)
  except KeyboardInterrupt:  # half a point says nothing
    interrupted = True
  if interrupted:
    print(f"interrupted after {len(points)} points", file=sys.stderr)
  lines = {"capacity": serve_sweeps.capacity_lines, "reuse": serve_sweeps.reuse_lines}
  print("\n".join(lines[options.sweep](points, other)))
  if options.plot is not None and not interrupted:
    from benchmarks import serve_plot

    title = f"{options.model}, {server.pool_bytes / GIB:g} GiB of cache\n{told}"
    if options.sweep == "capacity":
      tokens = [server.pages(f) * server.page_size for f in (BASELINE, other)]
      serve_plot.draw_capacity(points, other, title, tokens, options.plot)
    else:
      serve_plot.draw_reuse(points, other, title, options.plot)
    print(f"drawn: {options.plot}")
  return INTERRUPTED if interrupted else 0


def _row(server: Setup, workload: Workload, name: str, m: Metrics, error: str | None) -> dict:
  return {
    "workload": workload.name,
    "format": name,
    "error": error,
    "costs": " ".join(serve_options.costs_told(server).split()),
    "pages": server.pages(FORMATS[name]),
    "bytes_per_token": server.model.heads.token_bytes(FORMATS[name]),
    **dataclasses.asdict(m),
  }


def _write(rows: Iterable[dict], path: pathlib.Path | None) -> None:
  """A JSON line each; called again with all there is whenever there is one more."""
  if path is not None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
