"""`python3 -m benchmarks breakeven`: does a smaller cache repay its kernels for these requests?

    breakeven                                               generated requests
    breakeven --reuse 0 --output 64                         a mix of cold prompts
    breakeven --trace conversation_trace.jsonl.gz --limit 500 --pool-gib 40 --time-scale 4

Requests, server and costs are those of `benchmarks serve --simulate`, and so are their options.
For each format the command prints the sum from FP8's time to its own (serve_balance.py), then which
format and read path takes least of the device's time, by what margin, and what would flip that.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks import serve_ignored, serve_options
from benchmarks.serve_balance import Balance, balance
from benchmarks.serve_formats import BASELINE, FORMATS
from benchmarks.serve_run import Run
from nvfp4_pallas.policy import EXACT_PATHS

SOME = ("bf16", "fp8_nvfp4", "nvfp4_dequant", "nvfp4_repack", "nvfp4_a8q")


def main(argv: list[str]) -> int:
  parser = argparse.ArgumentParser(
    prog="python3 -m benchmarks breakeven",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument(
    "--formats",
    nargs="+",
    choices=FORMATS,
    default=SOME,
    metavar="FORMAT",
    help=f"of {', '.join(FORMATS)}; default: {' '.join(SOME)}",
  )
  serve_options.add_workload(parser)
  serve_options.add_server(parser)
  options = serve_ignored.parse(parser, argv)
  try:
    server, workload = serve_options.setup(options), serve_options.workload(options)
    base = server.simulate(workload, BASELINE)
  except (ValueError, OSError) as error:
    parser.error(str(error))
  print(f"{workload.name}: {len(workload.items):,} requests\n{serve_options.costs_told(server)}")
  balances = []
  for name in options.formats:
    if name == BASELINE.name:
      continue
    try:
      balances.append(balance(server, workload, FORMATS[name], base))
    except ValueError as error:  # a pool without a page of it, costs that were not measured
      print(f"{name}: {error}", file=sys.stderr)
  for one in balances:
    print("\n".join(("", *sum_lines(one))))
  print("\n".join(("", *verdict_lines(base, balances))))
  for message in base.rejected:
    print(f"rejected with FP8, {message}", file=sys.stderr)
  if workload.error is not None:
    print(f"the workload ends early: {workload.error}", file=sys.stderr)
  return 1 if workload.error is not None else 0


def sum_lines(of: Balance) -> list[str]:
  """From FP8's seconds to the format's, a term a line."""
  line = lambda name, seconds, why="": f"  {name:36}{seconds:>12.3f} s{why}"
  terms = []
  for term in of.terms:
    why = ""
    if term.price is not None:
      why = f"  {term.count:>12,} {term.unit:6} x {1e6 * term.price:>9.2f} us"
    terms.append(line(term.name, term.seconds, why))
  total = line(
    of.format.name, of.seconds, f"  {100 * of.extra / (of.base.times.total or 1):+.1f} %"
  )
  head = f"{of.format.name}, seconds of the device:"
  return [head, line(BASELINE.name, of.base.times.total), *terms, "  " + "-" * 50, total]


def verdict_lines(base: Run, balances: list[Balance]) -> list[str]:
  """Which format takes least, by how much, and what would change that."""
  exact = [one for one in balances if set(one.format.prefill_paths) <= set(EXACT_PATHS)]
  lines = _verdict("Of all", base, balances)
  if len(exact) != len(balances):
    lines += _verdict("Of those whose Q stays bf16", base, exact)
  return lines


def _verdict(of_what: str, base: Run, balances: list[Balance]) -> list[str]:
  times = {BASELINE.name: base.times.total, **{b.format.name: b.seconds for b in balances}}
  first, *others = sorted(times, key=lambda name: times[name])
  lines = [f"{of_what}: {first}, {times[first]:.3f} s"]
  if others and times[first]:
    margin = times[others[0]] / times[first] - 1
    lines[0] += f"; {others[0]} takes {100 * margin:.1f} % more"
  if first == BASELINE.name:
    asked = min(balances, key=lambda one: one.seconds, default=None)
    told = "would beat FP8 with"
  else:
    asked = next(one for one in balances if one.format.name == first)
    told = "would lose to FP8 with"
  if asked is not None:
    flips = [f"    {what} {b:.2f} instead of {a:.2f}" for what, a, b in asked.flips()]
    none = ["    nothing of this alone"]
    lines += [f"  {asked.format.name} {told}, each alone:", *(flips or none)]
  return lines
