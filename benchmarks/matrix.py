"""`python3 -m benchmarks matrix`: every read path over the same shapes, a row for each.

On a GPU: device times by trace, all kernels of a call summed, over memory that the L2 cache cannot
hold, in one run with the device's copy bandwidth and with what others take for the same work. A
whole run takes about {minutes} minutes of an H200, or by part, in seconds: {seconds}. On a CPU:
small shapes by the definition, with wall times that say nothing about a GPU's.

A pair of a shape and a read path that cannot run is a row with the reason, one that fails a row
with its error, and the run goes on; the exit code is 1 if anything failed, 2 if nothing was begun,
130 after Ctrl-C. Rows are written as they come, into a file that has none yet unless --overwrite or
--resume is given. A run that was cut short goes on with --resume: what this device, these
kernels and this JAX have timed is not timed again, and rows of others stay in the file. --batch,
--page-size, --layout and --geometry change all shapes of attention; the rows say in `varied` what
is not as usual.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import gc
import itertools
import pathlib
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import attention_cases, cases, measured, peers, records, report, storage_cases
from benchmarks.attention_cases import Shared
from benchmarks.cases import Case
from benchmarks.matrix_file import Found, Out
from benchmarks.pages import (
  ROTATED_BYTES,
  Pools,
  device_memory,
  most_pages,
  pages_for,
  tables_for,
)
from benchmarks.records import Row
from benchmarks.table import WIDTH
from benchmarks.trace import KernelTimes, kernel_times, wall_times
from benchmarks.turns import Timed, in_turns
from benchmarks.workloads import ATTENTION, heads_of
from nvfp4_pallas.cache import LAYOUT, check_head_dim, check_page_size
from nvfp4_pallas.dispatch import IMPLEMENTATIONS, current_target
from nvfp4_pallas.policy import Geometry
from nvfp4_pallas.read_paths import READ_PATHS

# What a case takes on an H200, most of it compilation, and the pages of a geometry and page size.
CASE_SECONDS, POOL_SECONDS = 0.75, 2.0
OUT = pathlib.Path("out/matrix.jsonl")
LEAST_COUNT = 8  # cases that say how long the others will take
INTERRUPTED = 130  # the exit code, as a shell has it


def main(argv: list[str]) -> int:
  options = _parse(argv)
  known = cases.default(device_of(options), tuple(options.implementations))
  chosen = _chosen(known, options)
  left_out = [part for part in options.parts if part not in {case.part for case in known}]
  if not chosen:
    print(
      "\n".join(["no case is left of what was asked for", *_not_here(left_out)]), file=sys.stderr
    )
    return 2
  return measure(chosen, options, left_out)


def measure(chosen: list[Case], options: argparse.Namespace, left_out: Sequence[str] = ()) -> int:
  """Runs cases and prints what came out; the exit code.

  Args:
    options: of `add_options`.
    left_out: parts that have no case on this device.
  """
  if options.list:
    print("\n".join(_listed(chosen)))
    return 0
  try:
    found = _found(options)
  except (OSError, ValueError) as error:
    print(error, file=sys.stderr)
    return 2
  done = found.done()
  left = [case for case in chosen if cases.key(case.fields) not in done]
  on_gpu = current_target().architecture.startswith("sm_")
  with Out(options.out, found.staying(left), options.revision) as out:
    run = _Run(out, left, on_gpu, options.seconds)
    if found.cut:
      run.say(f"the last line of {options.out} was half written, it is left out")
    run.say(f"{len(chosen)} cases, {len(chosen) - len(left)} of them kept, on {_device_name()}")
    try:
      run.all()
    except KeyboardInterrupt:
      print(f"\ninterrupted: {options.out} has the rows so far, the same with --resume goes on")
      return INTERRUPTED
  for measured_run in measured.runs([options.out]):
    print("\n".join(report.terminal(measured_run)))
  print("\n".join(summary(records.read(options.out), run, options.out, left_out)))
  if run.failures:
    return 1
  return 2 if left and run.left == len(left) else 0


def device_of(options: argparse.Namespace) -> cases.Device:
  """This one, and whether small shapes are for it."""
  architecture = current_target().architecture
  on_gpu = architecture.startswith("sm_")
  return cases.Device(
    architecture, options.size == "small" or (options.size is None and not on_gpu)
  )


def _parse(argv: list[str]) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    prog="python3 -m benchmarks matrix",
    description=__doc__.format(minutes=_minutes(), seconds=_seconds_by_part()),
  )
  add_options(parser, OUT)
  add = parser.add_argument
  add("--parts", nargs="+", choices=cases.PARTS, default=cases.PARTS)
  add("--paths", nargs="+", choices=READ_PATHS, help="of attention, these alone")
  add("--implementations", nargs="+", default=[], metavar="NAME", help="instead of the device's")
  add("--no-peers", action="store_true", help="nothing of cuDNN, JAX and FlashInfer")
  add("--batch", type=int, help="of all shapes of attention")
  add("--page-size", type=int)
  add("--layout", help=f"of pages; {LAYOUT} is the one that there is")
  add("--geometry", help="a name (8b, 70b-tp8, 30b-moe, smollm2) or query heads/KV heads/head_dim")
  return parsed(parser, argv, _check)


def parsed(
  parser: argparse.ArgumentParser,
  argv: list[str],
  check: Callable[[argparse.Namespace], None] | None = None,
) -> argparse.Namespace:
  """The options, those of `add_options` among them; an end with 2 and a sentence on bad ones.

  Args:
    check: of a command's own; it raises ValueError.
  """
  options = parser.parse_args(argv)
  try:
    if check is not None:
      check(options)
    _check_measuring(options)
  except ValueError as error:
    parser.error(str(error))
  return options


def add_options(parser: argparse.ArgumentParser, out: pathlib.Path) -> None:
  """Those of every command that measures cases, which `out` has the rows of unless asked for."""
  add = parser.add_argument
  add("--out", type=pathlib.Path, default=out, metavar="FILE.jsonl")
  how = parser.add_mutually_exclusive_group()
  how.add_argument(
    "--resume", action="store_true", help="keep the rows of FILE, run what they lack"
  )
  how.add_argument("--overwrite", action="store_true", help="lose the rows of FILE")
  add("--seconds", type=float, help="start nothing after so many")
  add("--size", choices=("full", "small"), help="of the shapes; by default the device's")
  add("--revision", help="of rows from a machine without a checkout")
  add("--list", action="store_true", help="the cases and what they would take; runs nothing")


def _check(options: argparse.Namespace) -> None:
  if options.batch is not None and options.batch < 1:
    raise ValueError(f"batch must be at least 1, got {options.batch}")
  if options.page_size is not None:
    check_page_size(options.page_size)
  for name in options.implementations:
    if name not in IMPLEMENTATIONS:
      raise ValueError(f"implementations must be of {', '.join(IMPLEMENTATIONS)}, got {name}")
  if options.geometry is not None:
    check_head_dim("geometry's head_dim", heads_of(options.geometry).head_dim)


def _check_measuring(options: argparse.Namespace) -> None:
  if options.seconds is not None and not options.seconds > 0:
    raise ValueError(f"seconds must be positive, got {options.seconds}")
  if options.out.is_dir():
    raise ValueError(f"out must be a file, {options.out} is a folder")


def _found(options: argparse.Namespace) -> Found:
  """Of the file of rows; ValueError where it must not or cannot be gone on with."""
  path = options.out
  if options.resume:
    return Found.of(path)
  if path.exists() and path.stat().st_size and not options.overwrite:
    raise ValueError(f"{path} has rows: --resume goes on with them, --overwrite loses them")
  return Found()


def _chosen(all_cases: list[Case], options: argparse.Namespace) -> list[Case]:
  changes = {
    name: value
    for name in ("batch", "page_size", "layout", "geometry")
    if (value := getattr(options, name)) is not None
  }

  def changed(case: Case) -> Case:
    if case.workload.phase not in ATTENTION:
      return case
    workload = dataclasses.replace(case.workload, **changes)
    return dataclasses.replace(case, workload=workload, of_any_batch="batch" in changes)

  def wanted(case: Case) -> bool:
    path = case.variant and case.variant.read_path
    return (
      case.part in options.parts
      and not (options.no_peers and case.kind in peers.PEERS)
      and not (options.paths and path not in options.paths)
    )

  return cases.once(changed(case) for case in all_cases if wanted(case))


def _listed(chosen: list[Case]) -> list[str]:
  here = current_target().architecture
  lines = [
    f"{part:12}{count:5} cases, about {seconds:.0f} s"
    for part, count, seconds in _by_part(chosen, here)
  ]
  total = _estimate(chosen, here)
  for case in chosen:
    fields = case.fields
    shape = f"{fields['phase']} {fields['batch']}/{fields['q_len']}/{fields['kv_len']}"
    what = fields["read_path"] or fields["k_format"], case.implementation
    line = "  ".join([f"{case.part:10}", shape, case.workload.geometry, *what])
    lines += _wrapped(line + varied_text(fields["varied"]))
  return [*lines, f"{len(chosen)} cases, about {total:.0f} s on an H200"]


def _by_part(chosen: list[Case], architecture: str) -> list[tuple[str, int, float]]:
  of = collections.defaultdict(list)
  for case in chosen:
    of[case.part].append(case)
  return [(part, len(some), _estimate(some, architecture)) for part, some in of.items()]


def _is_quick(case: Case, architecture: str) -> bool:
  """Whether it only says that it cannot run: by kernels of another device, or FlashInfer's."""
  own = cases.Device(architecture, small=False).own
  return case.implementation in {*IMPLEMENTATIONS, "flashinfer"} - {"xla", own}


def _estimate(chosen: list[Case], architecture: str) -> float:
  """Seconds, as if an H200 were of that architecture."""
  timed = [case for case in chosen if not _is_quick(case, architecture)]
  pools = {(case.workload.geometry, case.workload.page_size) for case in timed}
  return CASE_SECONDS * len(timed) + POOL_SECONDS * len(pools)


def _minutes() -> int:
  return round(_estimate(cases.default(cases.Device("sm_90", small=False)), "sm_90") / 60)


def _seconds_by_part() -> str:
  all_cases = cases.default(cases.Device("sm_90", small=False))
  return ", ".join(f"{part} {seconds:.0f}" for part, _, seconds in _by_part(all_cases, "sm_90"))


class _Run:
  """Cases, workload by workload; a failing one is named and the rest goes on.

  Attributes:
    failures: one line each.
    left: cases not started, for lack of time.
    count: cases that are ready to be timed, or were.
  """

  def __init__(self, out: Out, left: list[Case], on_gpu: bool, seconds: float | None):
    self.failures: list[str] = []
    self.left = 0
    self.count = 0
    self._out, self._cases, self._seconds = out, left, seconds
    self._timer = kernel_times if on_gpu else wall_times
    self._on_gpu = on_gpu
    self._rotated = ROTATED_BYTES if on_gpu else 0
    self._pools: dict[tuple[str, int], Pools] = {}
    self._began = time.monotonic()

  def say(self, text: str) -> None:
    spent = time.monotonic() - self._began
    left = len(self._cases) - self.count
    if self.count >= LEAST_COUNT and left:
      each = spent / self.count
      print(f"[{spent:4.0f} s, about {each * left:.0f} s left] {text}", flush=True)
    else:
      print(f"[{spent:4.0f} s] {text}", flush=True)

  def all(self) -> None:
    self._copy_rate = self._copy_bandwidth() if self._on_gpu else None
    for work, group in itertools.groupby(self._cases, key=lambda case: case.workload):
      some = list(group)
      if self._seconds is not None and time.monotonic() - self._began > self._seconds:
        self.left += len(some)
        continue
      self._workload(work, some)
      self._drop_pools()

  def _copy_bandwidth(self) -> float:
    rate, row = copy_bandwidth()
    self._out.write(row)
    self.say(f"device copy {rate / 1e9:.0f} GB/s")
    return rate

  def _workload(self, work, some: list[Case]) -> None:
    began = time.monotonic()
    self.say(f"{work.phase} {work.batch}/{work.q_len}/{work.kv_len}, {len(some)} cases:")
    rows = [functools.partial(Row, **case.fields) for case in some]
    prepare = self._prepare(work, some, rows)
    results = in_turns(prepare, self._timer)
    seconds = round((time.monotonic() - began) / len(some), 3)
    for row, result in zip(rows, results, strict=True):
      if isinstance(result, Exception):
        result = _row_of_failure(row, result)
      elif not records.is_finite(result):
        result = row(error=records.NOT_FINITE, kernel_names=result.kernel_names)
      if result.error:
        self.failures.append(describe(result))
      result = dataclasses.replace(result, seconds=seconds)
      self._out.write(result)
      if result.error or result.us_median is not None:  # the summary names the rest
        print("\n".join(_wrapped(f"  {describe(result)}")), flush=True)
    if any(isinstance(result, Exception) for result in results):
      gc.collect()  # what an error's traceback holds, device memory too

  def _prepare(self, work, some: list[Case], rows: list[functools.partial]) -> list:
    shared = functools.cache(lambda: self._shared(work))

    def prepare(case: Case, row: functools.partial) -> Timed:
      try:
        if work.phase not in ATTENTION:
          return _storage(case, row, self._copy_rate)
        return _attention(case, shared, row)
      finally:
        self.count += 1
        if not _is_quick(case, current_target().architecture):
          self.say(f"  prepared {case.fields['read_path'] or case.kind} {case.implementation}")

    return [functools.partial(prepare, *of) for of in zip(some, rows, strict=True)]

  def _shared(self, work) -> Shared:
    pools = self._pools_of(work)
    pages = pages_for(work, self._rotated)
    if pages > pools.num_pages:
      raise NotImplementedError(
        f"the shape's tables are over {pages} pages; pools of all formats have {pools.num_pages} "
        "in this device's memory"
      )
    return Shared.of(work, pools, tables_for(work, self._rotated), self._copy_rate)

  def _pools_of(self, work) -> Pools:
    of = work.geometry, work.page_size
    if of not in self._pools:
      most = most_pages(work.heads, work.page_size, device_memory())
      wanted = [
        pages_for(case.workload, self._rotated)
        for case in self._cases
        if (case.workload.geometry, case.workload.page_size) == of
        and case.workload.phase in ATTENTION
      ]
      fitting = [pages for pages in wanted if pages <= most]
      self._pools[of] = Pools(work.heads, work.page_size, max(fitting, default=1))
    return self._pools[of]

  def _drop_pools(self) -> None:
    """Those that no later case reads."""
    later = {
      (case.workload.geometry, case.workload.page_size) for case in self._cases[self.count :]
    }
    self._pools = {of: pools for of, pools in self._pools.items() if of in later}


def _row_of_failure(row: functools.partial, error: Exception) -> Row:
  """What cannot run gives a reason, everything else is an error."""
  if isinstance(error, NotImplementedError):
    return row(reason=str(error))
  return row(error=f"{type(error).__name__}: {str(error)[:500]}")


def _attention(case: Case, shared, row: functools.partial) -> Timed:
  prepare: Any = attention_cases.prepare
  if case.kind not in peers.PEERS:
    return prepare(shared(), case.variant, case.implementation, row, **dict(case.options))
  peer = peers.PEERS[case.kind]
  missing = peer.missing()
  if missing is not None:
    return Timed((), lambda _: row(reason=missing))
  prepare = peer.prepare
  return prepare(shared(), case.variant, row)


_STORAGE = {
  "append": storage_cases.prepare_append,
  "step": storage_cases.prepare_step,
  "prompt": storage_cases.prepare_prompt,
  "pack": storage_cases.prepare_pack,
}


def _storage(case: Case, row: functools.partial, copy_rate: float | None) -> Timed:
  prepare: Any = _STORAGE[case.kind]
  return prepare(case.workload, case.implementation, row, copy_rate, **dict(case.options))


def copy_bandwidth() -> tuple[float, Row]:
  """Bytes read plus written per second by an elementwise copy of 1 GiB."""
  # 32-bit elements: XLA's kernels for narrower ones do not reach the memory's speed.
  x = [jnp.full((2**28,), i, jnp.uint32) for i in range(3)]
  flip = jax.jit(lambda a: a ^ jnp.uint32(1))
  times = kernel_times([functools.partial(flip, a) for a in x * 4])
  nbytes = 2 * x[0].nbytes
  rate = nbytes / (statistics.median(times.calls) * 1e-6)
  return rate, _copy_row(nbytes, rate, times)


def _copy_row(nbytes: int, rate: float, times: KernelTimes) -> Row:
  heads = Geometry(1, 1, 1)
  return Row(
    phase="copy",
    data="1 GiB",
    batch=1,
    q_len=1,
    kv_len=1,
    page_size=1,
    num_q_heads=heads.num_q_heads,
    num_kv_heads=heads.num_kv_heads,
    head_dim=heads.head_dim,
    k_format="bf16",
    v_format="bf16",
    read_path=None,
    implementation="xla",
    bytes=nbytes,
    copy_gbs=rate / 1e9,
    **times.row_fields(),
  )


def describe(row: Row) -> str:
  """A line of progress."""
  shape = f"{row.phase} {row.batch}/{row.q_len}/{row.kv_len}"
  path = row.read_path or row.k_format
  if row.read_path == "nvfp4_a4q":
    path += f" x{row.q_levels}"
  who = f"{shape} {path} {row.implementation}{varied_text(row.varied)}"
  if row.error:
    return f"{who}: FAILED: {row.error}"
  if row.us_median is None:
    return f"{who}: not run: {row.reason}"
  share = f", {100 * row.floor_us / row.us_median:.0f} % of its limit" if row.floor_us else ""
  error = f", error {row.kernel_error:.1e}" if row.kernel_error is not None else ""
  return f"{who}: {row.us_median:.1f} us{share}{error}"


def varied_text(varied: dict[str, Any] | None) -> str:
  return "".join(f", {name} {value}" for name, value in (varied or {}).items())


def _wrapped(line: str) -> list[str]:
  return textwrap.wrap(line, WIDTH, subsequent_indent=" " * 4)


def summary(rows: list[dict], run: _Run, path: pathlib.Path, left_out: Sequence[str]) -> list[str]:
  """What is measured; what is not, and why, the report's last table says.

  Args:
    left_out: parts without a case on this device.
  """
  here = [row for row in rows if row["device"] == _device_name()]
  by_timer = collections.Counter(row["timer"] for row in here if row["us_median"] is not None)
  lines = [f"{path}: {len(rows)} rows, {by_timer.total()} of them timed."]
  if by_timer["trace"]:
    lines.append(f"Measured: device time of {by_timer['trace']} cases on {_device_name()}.")
  if by_timer["wall"]:
    lines.append(
      f"Measured: errors and wall time of {by_timer['wall']} cases by the definition on "
      f"{_device_name()}. Not measured: how fast anything is. No time here may stand beside a "
      "GPU's."
    )
  lines += _not_here(left_out)
  if run.left:
    lines.append(f"Not started for lack of time: {run.left} cases; --resume goes on.")
  wrapped = [part for line in lines for part in textwrap.wrap(line, WIDTH)]
  return wrapped + [f"FAILED: {failure}" for failure in run.failures]


def _not_here(left_out: Sequence[str]) -> list[str]:
  if not left_out:
    return []
  return [f"Left out: {', '.join(left_out)}, which are of full shapes (--size full) alone."]


def _device_name() -> str:
  return jax.devices()[0].device_kind
