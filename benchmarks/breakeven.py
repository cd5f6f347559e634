"""`python3 -m benchmarks breakeven`: does a smaller cache repay its kernels for these requests?

    breakeven                                               generated requests
    breakeven --reuse 0 --output 64                         a mix of cold prompts
    breakeven --trace conversation_trace.jsonl.gz --limit 500 --pool-gib 40 --time-scale 4

Requests, server and costs are those of `benchmarks serve --simulate`, and so are their options.
Compared are the requests that the pool holds in every format. For each format the command prints
the sum from FP8's time to its own (serve_balance.py), then which format and read path takes least
of the device's time, by what margin, and what would flip that, against FP8 and against the next
best: other kernels, or another mix of requests or pool (serve_flips.py). The exit code is 1 where
nothing can be compared, or a trace breaks off.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import textwrap

from benchmarks import serve_ignored, serve_options
from benchmarks.serve_balance import Balance, balance, rejections
from benchmarks.serve_costs import committed_appends
from benchmarks.serve_flips import Mix, dials
from benchmarks.serve_formats import BASELINE, FORMATS
from benchmarks.serve_run import Run
from benchmarks.serve_workloads import Workload
from benchmarks.table import WIDTH
from nvfp4_pallas.policy import EXACT_PATHS

SOME = ("bf16", "fp8_nvfp4", "nvfp4_dequant", "nvfp4_repack", "nvfp4_a8q")
MESSAGES = 4  # of requests that one format rejects


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
  parser.add_argument(
    "--no-mix", action="store_true", help="look for no other mix: many more runs, long for traces"
  )
  serve_options.add_workload(parser)
  serve_options.add_server(parser)
  options = serve_ignored.parse(parser, argv)
  try:
    server, workload = serve_options.setup(options), serve_options.workload(options)
    server = dataclasses.replace(server, appends=committed_appends())  # read once for all runs
    server.step_costs(BASELINE)
    rejected = {BASELINE.name: rejections(server, workload, BASELINE)}
  except (ValueError, OSError) as error:
    parser.error(str(error))
  print(f"{workload.name}: {len(workload.items):,} requests\n{serve_options.costs_told(server)}")
  names = [name for name in dict.fromkeys(options.formats) if name != BASELINE.name]
  for name in names:
    try:
      server.step_costs(FORMATS[name])
      rejected[name] = rejections(server, workload, FORMATS[name])
    except ValueError as error:  # a pool without a page of it, costs that were not measured
      print(f"{name}: {error}", file=sys.stderr)
  held = _held_by_all(workload, rejected)
  if held.items:
    base = server.simulate(held, BASELINE)
    balances = [balance(server, held, FORMATS[n], base) for n in names if n in rejected]
    for one in balances:
      print("\n".join(("", *sum_lines(one))), flush=True)
    mix = Mix(() if options.no_mix else dials(options, server, held))
    print("\n".join(("", *verdict_lines(base, balances, mix))))
  else:
    print("the pool holds no request in every format: nothing to compare", file=sys.stderr)
  if workload.error is not None:
    print(f"the workload ends early: {workload.error}", file=sys.stderr)
  return 1 if workload.error is not None or not held.items else 0


def _held_by_all(workload: Workload, rejected: dict[str, dict[int, str]]) -> Workload:
  """The requests that no format rejects; tells which do."""
  for name, messages in rejected.items():
    for message in list(messages.values())[:MESSAGES]:
      print(f"rejected, {name}: {message}", file=sys.stderr)
    if len(messages) > MESSAGES:
      print(f"and {len(messages) - MESSAGES:,} more by {name}", file=sys.stderr)
  dropped = set().union(*rejected.values())
  if not dropped:
    return workload
  count = len(workload.items)
  served = ", ".join(f"{name} {count - len(found):,}" for name, found in rejected.items())
  items = tuple(item for index, item in enumerate(workload.items) if index not in dropped)
  print(
    f"Of {count:,} requests the pool holds: {served}\nCompared below: the {len(items):,} of all"
  )
  return dataclasses.replace(workload, items=items)


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


def verdict_lines(base: Run, balances: list[Balance], mix: Mix) -> list[str]:
  """Which format takes least, by how much, and what would change that."""
  exact = [one for one in balances if set(one.format.prefill_paths) <= set(EXACT_PATHS)]
  lines = _verdict("Of all", base, balances, mix)
  if len(exact) != len(balances):
    lines += _verdict("Of those whose Q stays bf16", base, exact, mix)
  return lines


def _verdict(of_what: str, base: Run, balances: list[Balance], mix: Mix) -> list[str]:
  by_name = {one.format.name: one for one in balances}
  times = {BASELINE.name: base.times.total, **{name: b.seconds for name, b in by_name.items()}}
  first, *others = sorted(times, key=lambda name: times[name])
  line = f"{of_what}: {first}, {times[first]:.3f} s"
  if not others:
    return [line]
  lines = [f"{line}; {others[0]} takes {100 * (times[others[0]] / times[first] - 1):.1f} % more"]
  if first == BASELINE.name:
    told, asked, rivals = "would beat", by_name[others[0]], [BASELINE.name]
  else:
    told, asked, rivals = "would lose to", by_name[first], [BASELINE.name]
    rivals += [others[0]] * (others[0] != BASELINE.name)
  for rival in rivals:
    mine = asked.format.name
    behind = rival if first == mine else mine
    flips = [*asked.flips(by_name.get(rival)), *mix.flips(first, behind)]
    lines.append(f"  {mine} {told} {'FP8' if rival == BASELINE.name else rival} with, each alone:")
    lines += [f"    {what} {would} instead of {now}" for what, now, would in flips]
    if not flips:
      lines.append("    nothing of this alone")
    tried = ", ".join(mix.tried(first, behind))
    if tried:
      lines += textwrap.wrap(f"    (tried: {tried})", WIDTH, subsequent_indent="     ")
  return lines
