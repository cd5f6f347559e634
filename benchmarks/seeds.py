"""`python -m benchmarks seeds`: the published comparison of NVFP4, FP8 and A4Q, on this GPU.

    python -m benchmarks seeds [--out out/seeds.jsonl] [--timer trace|wall] [--seconds N]

Four shapes that serving meets, and the prompt of 16K that was published, each over BF16, FP8 and
NVFP4 caches: widened in the loop (`dequant`), once ahead (`repack`), or multiplied as FP4 (`a4q`,
with Q in one level and in two). First every path is compared with the definition on the same GPU;
then all are timed, and the published numbers stand beside what was measured. Whose kernel ran is in
each row, with the kernels' names as they were traced.

The published numbers are those of an RTX PRO 5000 (sm_120): flashinfer issue 4269 and vllm issue
50416. Their number of heads was not given, so times do not compare; ratios may.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import nvfp4_pallas as nv
from benchmarks.gpu_timings import COPIES, DIM, GROUP, HEADS, random_cache
from benchmarks.records import Row, q_quantisation, write
from benchmarks.small import Variant
from benchmarks.trace import KernelTimes, kernel_times
from nvfp4_pallas.dispatch import Resolved, current_target
from nvfp4_pallas.ops.prefill import resolve_prefill
from nvfp4_pallas.ops.request import attention_request, attention_spec

PAGE_SIZE = 16
CALLS = 12
LONG = 2**24  # queries times keys, from which half as many calls will do
WORST_ERROR = 1e-2  # of a row, relative L2: P is rounded to BF16

VARIANTS = {
  "bf16": Variant("bf16", "bf16", "bf16"),
  "fp8": Variant("fp8", "fp8", "fp8"),
  "dequant": Variant("nvfp4_dequant", "nvfp4", "nvfp4"),
  "repack": Variant("nvfp4_repack", "nvfp4", "nvfp4"),
  "a4q 2": Variant("nvfp4_a4q", "nvfp4", "nvfp4", 2),
  "a4q 1": Variant("nvfp4_a4q", "nvfp4", "nvfp4", 1),
}
# (batch, new tokens, keys)
SHAPES = {
  "prompt of 8K": (1, 8192, 8192),
  "prompt of 32K": (1, 32768, 32768),
  "128 over 2K": (4, 128, 2048),
  "16 over 16K": (1, 16, 16384),
  "prompt of 16K": (1, 16384, 16384),
}
CHECKED = (2, 96, 1024)


@dataclasses.dataclass(frozen=True)
class Published:
  """A published ratio of two paths at a shape; `of_ms` over `to_ms` milliseconds."""

  what: str
  shape: str
  path: str
  base: str
  of_ms: float
  to_ms: float


PUBLISHED = (
  Published("stock NVFP4 over FP8, 48 prefills", "prompt of 8K", "dequant", "fp8", 145.81, 84.03),
  Published("stock NVFP4 over FP8, 16K", "prompt of 16K", "dequant", "fp8", 21.0, 11.1),
  Published("A4Q over FP8, 16K", "prompt of 16K", "a4q 2", "fp8", 18.0, 11.1),
  Published("A4Q over stock NVFP4, 16K", "prompt of 16K", "a4q 2", "dequant", 18.0, 21.0),
)


def main(argv: list[str]) -> int:
  """0 when every path ran and agreed with the definition."""
  parser = argparse.ArgumentParser(prog="python -m benchmarks seeds", description=__doc__)
  parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/seeds.jsonl"))
  parser.add_argument("--timer", choices=("trace", "wall"), default="trace")
  parser.add_argument("--seconds", type=float, help="start nothing after so many seconds")
  options = parser.parse_args(argv)
  target = current_target()
  if not target.architecture.startswith("sm_"):
    print(f"this needs a GPU, JAX sees only {target.architecture}", file=sys.stderr)
    return 1
  return Run(options.out, TIMERS[options.timer], options.seconds).all()


class Run:
  """Checks and timings; a failing one is named and the rest goes on."""

  def __init__(
    self,
    out: pathlib.Path,
    timer: Callable[[Sequence[Callable[[], Any]]], KernelTimes],
    seconds: float | None = None,
  ):
    self.out, self.timer, self.seconds = out, timer, seconds
    self.rows: list[Row] = []
    self.ms: dict[tuple[str, str], float] = {}
    self.failed = 0
    self._began = time.monotonic()

  def all(self) -> int:
    device, arch = jax.devices()[0].device_kind, current_target().architecture
    heads = f"{HEADS * GROUP} query heads, {HEADS} KV heads, head_dim {DIM}"
    self.say(f"{device}, {arch}; {heads}, pages of {PAGE_SIZE}")
    for name, variant in VARIANTS.items():
      self.attempt(f"check {name}", functools.partial(check, variant))
    for shape_name in SHAPES:
      for name in VARIANTS:
        self.attempt(f"{shape_name}, {name}", functools.partial(self.time, shape_name, name))
    print("\n".join(["", *table(self.ms), "", *beside_published(self.ms)]))
    print(f"\nrows: {self.out}")
    return 1 if self.failed else 0

  def say(self, text: str) -> None:
    print(f"[{time.monotonic() - self._began:5.0f} s] {text}", flush=True)

  def attempt(self, what: str, action: Callable[[], str]) -> None:
    if self.seconds is not None and time.monotonic() - self._began > self.seconds:
      self.say(f"{what}: left out, the time is over")
      return
    try:
      self.say(f"{what}: {action()}")
    except Exception as error:  # noqa: BLE001 - the other cases go on
      self.failed += 1
      self.say(f"{what}: FAILED: {type(error).__name__}: {str(error)[:300]}")

  def time(self, shape_name: str, name: str) -> str:
    variant, shape = VARIANTS[name], SHAPES[shape_name]
    call = Call.of(variant, shape)
    times = self.timer(call.repeated(CALLS if np.prod(shape) < LONG else CALLS // 2))
    self.rows.append(call.row(variant, shape, times))
    write(self.rows, self.out)
    self.ms[shape_name, name] = statistics.median(times.calls) / 1e3
    kernels = ", ".join(times.names)
    return f"{self.ms[shape_name, name]:.3f} ms by {call.resolved.implementation} ({kernels})"


@dataclasses.dataclass(frozen=True)
class Call:
  """Calls of one path at one shape, on memory that changes from call to call."""

  run: Callable[..., Any]
  q: list[jax.Array]
  cache: nv.PagedKVCache
  batches: list[nv.RaggedBatch]
  resolved: Resolved

  @classmethod
  def of(cls, variant: Variant, shape: tuple[int, int, int], implementation=None) -> Call:
    seqs, q_len, kv_len = shape
    cache, tables = random_cache(variant.k_format, variant.v_format, seqs, kv_len, PAGE_SIZE)
    lens = jnp.full((seqs,), kv_len, jnp.int32)
    cu_q_lens = jnp.arange(seqs + 1, dtype=jnp.int32) * q_len
    rows = (seqs * q_len, HEADS * GROUP, DIM)
    q = [jax.random.normal(jax.random.key(i), rows, jnp.bfloat16) for i in range(COPIES)]
    numerics = {"read_path": variant.read_path, "q_levels": variant.q_levels}
    spec = attention_spec(q[0], causal=True, sm_scale=None, window=None, soft_cap=None, **numerics)
    pages = tables[0].shape[1]
    request = attention_request(q[0], cache, spec, num_seqs=seqs, max_pages=pages)
    run = jax.jit(functools.partial(nv.prefill, implementation=implementation, **numerics))
    batches = [nv.RaggedBatch(table, lens, cu_q_lens) for table in tables]
    return cls(run, q, cache, batches, resolve_prefill(request, implementation))

  def repeated(self, count: int) -> list[Callable[[], Any]]:
    at = lambda items, i: items[i % len(items)]
    return [
      functools.partial(self.run, at(self.q, i), self.cache, at(self.batches, i))
      for i in range(count)
    ]

  def row(self, variant: Variant, shape: tuple[int, int, int], times: KernelTimes) -> Row:
    seqs, q_len, kv_len = shape
    return Row(
      phase="prefill" if q_len == kv_len else "chunk" if q_len > 16 else "tail",
      data="random",
      batch=seqs,
      q_len=q_len,
      kv_len=kv_len,
      page_size=PAGE_SIZE,
      num_q_heads=HEADS * GROUP,
      num_kv_heads=HEADS,
      head_dim=DIM,
      k_format=variant.k_format,
      v_format=variant.v_format,
      read_path=variant.read_path,
      implementation=self.resolved.implementation,
      reason=self.resolved.reason,
      bytes_per_token=self.cache.bytes_per_token,
      **q_quantisation(variant.read_path, variant.q_levels),
      **times.row_fields(),
    )


def check(variant: Variant) -> str:
  """The device's kernel against the definition, on this device."""
  call, by_definition = Call.of(variant, CHECKED), Call.of(variant, CHECKED, "xla")
  found, exact = (np.asarray(c.repeated(1)[0]()[0], np.float64) for c in (call, by_definition))
  error = np.linalg.norm(found - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
  if not error.max() <= WORST_ERROR:  # NaN as well
    raise ValueError(
      f"rows must be within {WORST_ERROR} of the definition, the worst is {error.max():.2e} off"
    )
  return f"worst row {error.max():.1e} off the definition, by {call.resolved.implementation}"


def by_wall(calls: Sequence[Callable[[], Any]]) -> KernelTimes:
  """Host time of each call, launches included; names no kernels."""
  jax.block_until_ready([call() for call in calls[:2]])
  microseconds = []
  for call in calls:
    began = time.perf_counter()
    jax.block_until_ready(call())
    microseconds.append(1e6 * (time.perf_counter() - began))
  return KernelTimes((), tuple(microseconds), {})


TIMERS = {"trace": kernel_times, "wall": by_wall}


def table(ms: dict[tuple[str, str], float]) -> list[str]:
  """Milliseconds, and in brackets times that of FP8."""
  lines = [f"{'ms (x FP8)':<16}" + "".join(f"{name:>14}" for name in VARIANTS)]
  for shape_name in SHAPES:
    cells = []
    for name in VARIANTS:
      one, fp8 = ms.get((shape_name, name)), ms.get((shape_name, "fp8"))
      ratio = f" ({one / fp8:.2f})" if one and fp8 else ""
      cells.append(f"{one:#.3g}{ratio}" if one else "-")
    lines.append(f"{shape_name:<16}" + "".join(f"{cell:>14}" for cell in cells))
  return lines


def beside_published(ms: dict[tuple[str, str], float]) -> list[str]:
  """Each published ratio, and what was measured."""
  lines = [f"{'':<42}{'published':>24}{'measured':>24}"]
  for claim in PUBLISHED:
    theirs = f"{claim.of_ms:g} / {claim.to_ms:g} = {claim.of_ms / claim.to_ms:.2f}x"
    one, base = ms.get((claim.shape, claim.path)), ms.get((claim.shape, claim.base))
    ours = f"{one:#.3g} / {base:#.3g} = {one / base:.2f}x" if one and base else "-"
    lines.append(f"{claim.what:<42}{theirs:>24}{ours:>24}")
  lines.append("(milliseconds; the first row is here one prompt of 8K)")
  return lines
