"""The tables of a report, each of one run (measured.Run)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import measured, split
from benchmarks.measured import COLUMNS, NVFP4, Run, Shape, fastest_nvfp4, is_stale, ratio
from benchmarks.text_table import Table, factor, number, share
from benchmarks.workloads import PAGE_SIZE

STALE = "~"
_TIMES = "times of attention, us"
_SHORT = {"a4q x1": "a4q1", "a4q x2": "a4q2"}


def tables(run: Run, *, all_of_them: bool = True) -> list[Table]:
  """Those that have rows; the times, and with `all_of_them` what explains them."""
  found = [*attention(run), storage(run), options(run), definition(run)]
  if all_of_them:
    found += [*limits(run), costs(run), launched(run)]
  if all_of_them or not run.is_of_kernels:  # errors are then what there is to see
    found.append(errors(run))
  return [table for table in (*found, not_measured(run)) if table.rows]


def _of_heads(run: Run) -> Iterator[tuple[str, dict[Shape, dict[str, dict]]]]:
  """Of each geometry and page size a title, and its shapes."""
  groups: dict[tuple[str, int], dict] = {}
  for shape, of in run.attention.items():
    groups.setdefault((shape.geometry, shape.page_size), {})[shape] = of
  for (geometry, page_size), shapes in groups.items():
    row = next(iter(next(iter(shapes.values())).values()))
    heads = f"{row['num_q_heads']}/{row['num_kv_heads']} heads, D {row['head_dim']}"
    yield f"{geometry} ({heads}, pages of {page_size})", shapes


def attention(run: Run) -> Iterator[Table]:
  """Times of every read path and of the peers, shape by shape."""
  for title, shapes in _of_heads(run):
    seen = {name for of in shapes.values() for name in of}
    known = [name for name in COLUMNS if name in seen]
    ours = [name for name in known if name in (*NVFP4, "bf16", "fp8", "cuDNN")]
    peers = [name for name in known if name not in ours]
    over = [name for name in ("fp8", "cuDNN") if name in seen and run.is_of_kernels]
    head = ("b/q/kv", *(_SHORT.get(name, name) for name in ours))
    if run.is_of_kernels:
      head += ("limit", *(f"/{name}" for name in over))
    rows = [_times(run, shape, of, ours, over) for shape, of in shapes.items()]
    notes = []
    if run.is_of_kernels:
      notes.append(
        "* is the faster of dequant and repack, which are equal as numbers; limit is theirs; "
        "/fp8 and /cuDNN are its time over those."
      )
    else:
      notes.append("Wall times of the definition: what is right, not what is fast.")
    if any(measured.is_emulated(row) for of in shapes.values() for row in of.values()):
      notes.append("a4q is emulated on 16-bit tensor cores: its numbers, not its speed.")
    if any("no mask" in row["data"] for of in shapes.values() for row in of.values()):
      notes.append("cuDNN runs chunks and tails without their mask.")
    if any(is_stale(row) for of in shapes.values() for row in of.values()):
      notes.append(f"{STALE} is of other kernel sources than these.")
    yield Table(f"{title}: {_TIMES}", head, rows, notes)
    if peers:
      rows = [
        (shape.lengths, *(_us(of.get(name)) for name in (*peers, *ours)))
        for shape, of in shapes.items()
        if any(name in of for name in peers)
      ]
      yield Table(f"{title}: beside others, us", ("b/q/kv", *peers, *ours), rows)


def _times(
  run: Run, shape: Shape, of: dict[str, dict], columns: list[str], over: list[str]
) -> tuple[str, ...]:
  if not run.is_of_kernels:
    return (shape.lengths, *(_us(of.get(name)) for name in columns))
  best = fastest_nvfp4(of)
  cells = [_us(of.get(name)) + ("*" if name == best else "") for name in columns]
  limit = of.get("dequant", {}).get("floor_us")
  return (shape.lengths, *cells, number(limit), *(factor(ratio(of, best, to)) for to in over))


def _us(row: dict | None) -> str:
  if row is None:
    return "-"
  return number(row["us_median"]) + (STALE if is_stale(row) else "")


def limits(run: Run) -> Iterator[Table]:
  """Which part of its limit each path reaches: bytes over the copy bandwidth, or products."""
  for title, shapes in _of_heads(run):
    names = [name for name in COLUMNS if any(_fraction(of, name) for of in shapes.values())]
    rows = [
      (shape.lengths, *(share(_fraction(of, name)) for name in names))
      for shape, of in shapes.items()
    ]
    if names:
      head = ("b/q/kv", *(_SHORT.get(name, name) for name in names))
      note = "The limit is bytes over the copy bandwidth of the run, or products over their rate."
      yield Table(f"{title}: part of the limit", head, rows, [note])


def _fraction(of: dict[str, dict], name: str) -> float | None:
  return of.get(name, {}).get("floor_fraction")


def storage(run: Run) -> Table:
  """Append, pack and unpack."""
  rows = []
  for row in run.of_phase("append", "pack", "unpack"):
    count = row["batch"] * row["q_len"]
    by = "by XLA" if run.is_of_kernels and row["implementation"] == "xla" else None
    what = row["data"].removeprefix("gaussian, "), row["levers"], _pages(row["page_size"]), by
    rows.append(
      (
        f"{row['phase']} {count}",
        row["k_format"],
        ", ".join(filter(None, what)),
        _us(row),
        number(row["floor_us"]),
        share(row.get("floor_fraction")),
      )
    )
  head = ("rows", "format", "what", "us", "limit", "part")
  return Table("append, pack and unpack", head, rows, left=3)


def options(run: Run) -> Table:
  """What options of a cache or a call cost, beside the same without them."""
  shapes, rows = run.attention, []
  for row in run.of_phase("decode", "chunk", "tail", "prefill"):
    if not measured.is_optional(row):
      continue
    shape, name = measured.shape_of(row), measured.column(row)
    without = shapes.get(shape, {}).get(name)
    same = without is not None and is_stale(without) == is_stale(row)
    levers = [row["levers"] or "", "batch invariant" if row["batch_invariant"] else ""]
    rows.append(
      (
        f"{shape.phase} {shape.lengths}",
        name,
        ", ".join(filter(None, (*levers, _pages(shape.page_size)))),
        _us(row),
        _us(without if same else None),
        factor(row["us_median"] / without["us_median"] if same else None),
      )
    )
  return Table("options", ("b/q/kv", "path", "with", "us", "without", "ratio"), rows, left=3)


def _pages(page_size: int) -> str:
  return "" if page_size == PAGE_SIZE else f"pages of {page_size}"


def definition(run: Run) -> Table:
  """What XLA makes of the definition on a GPU, beside the device's own kernels."""
  rows = []
  for row in run.of_phase("decode", "chunk", "tail", "prefill") if run.is_of_kernels else ():
    if row["implementation"] == "xla":
      shape, name = measured.shape_of(row), measured.column(row)
      ours = run.attention.get(shape, {}).get(name)
      rows.append((f"{shape.phase} {shape.lengths}", name, _us(row), _us(ours)))
  return Table("the definition, us", ("b/q/kv", "path", "by XLA", "by kernels"), rows, left=2)


def costs(run: Run) -> Table:
  """What each kernel of a call takes, of calls that launch several."""
  rows = []
  for shape, of in run.attention.items():
    for name in COLUMNS:
      by_kernel = split.costs(of.get(name, {}))
      if len(by_kernel) > 1 and shape.page_size == PAGE_SIZE and of[name]["part"] != "grid":
        kernels = ", ".join(f"{kernel} {number(us)}" for kernel, us in by_kernel.items())
        rows.append((f"{shape.geometry} {shape.lengths}", name, _us(of[name]), kernels))
  return Table("kernels of a call, us", ("b/q/kv", "path", "us", "kernels"), rows, left=4)


def launched(run: Run) -> Table:
  """What ran, as the trace and the compiled call have it: once for each set of kernels."""
  seen: dict[tuple, list[str]] = {}
  for shape, of in run.attention.items():
    for name in COLUMNS:
      if name in of and of[name]["operand_dtypes"]:
        seen.setdefault((name, _program(of[name])), []).append(shape.lengths)
  rows = [
    (name, f"{shapes[0]} and {len(shapes) - 1} more" if shapes[1:] else shapes[0], what)
    for (name, what), shapes in seen.items()
  ]
  head = ("path", "b/q/kv", "kernels (operands): products")
  note = "Names are the trace's, operands and products those of the compiled call."
  return Table("which kernels ran, in which numbers", head, rows, [note], left=3)


def _program(row: dict) -> str:
  kernels = []
  products: dict[str, Any] = row["products"] or {}
  traced = " ".join(row["kernel_names"])
  for kernel, operands in row["operand_dtypes"].items():
    if kernel in traced or not measured.is_ours(row):
      said = f"{kernel} ({', '.join(dict.fromkeys(operands))})"
      of = ", ".join(products.get(kernel, ()))
      kernels.append(f"{said}: {of}" if of else said)
  return "; ".join(kernels) or ", ".join(row["kernel_names"])


def errors(run: Run) -> Table:
  """The worst of each path, over shapes."""
  worst: dict[str, dict[str, float]] = {}
  for of in run.attention.values():
    for name, row in of.items():
      for which in ("kernel_error", "format_error"):
        if row[which] is not None:
          errors_of = worst.setdefault(name, {})
          errors_of[which] = max(errors_of.get(which, 0.0), row[which])
  rows = [
    (name, *(_error(worst[name].get(which)) for which in ("kernel_error", "format_error")))
    for name in COLUMNS
    if name in worst
  ]
  head = ("path", "to float64 on the same bytes", "to float64 on wide K, V and Q")
  notes = [
    "Rows with levers or new_kv, and cuDNN's without its mask, are timed only: "
    "`python3 -m benchmarks gpu` and the tests judge what levers compute."
  ]
  return Table("output error, relative L2, of the worst shape", head, rows, notes)


def _error(value: float | None) -> str:
  return "" if value is None else f"{value:.1e}"


def not_measured(run: Run) -> Table:
  """What has no time, and why; what failed first."""
  found: dict[tuple[str, str], int] = {}
  for row in run.rows:
    if row["us_median"] is None:
      why = f"FAILED: {row['error']}" if row["error"] else str(row["reason"])
      who = row["implementation"], why
      found[who] = found.get(who, 0) + 1
  failed: Callable = lambda item: not item[0][1].startswith("FAILED")
  rows = [(who, str(n), why) for (who, why), n in sorted(found.items(), key=failed)]
  return Table("not measured", ("by", "cases", "why"), rows, left=3)
