"""`python3 -m benchmarks scale`: what more GPUs of this host make of a decoding step.

    heads    many sequences, KV heads divided over the GPUs
    pages    one long sequence, its pages divided over the GPUs, states merged by lse

Steps are timed in a loop inside one program, each with the last one's results for its queries, so
that neither the host's part nor a wait of one GPU for another is left out or counted twice. Results
are compared with one GPU's first: bit for bit by heads, with batch_invariant=True (timed steps do
without it, and cut the keys by what a GPU has to do), and to rounding by pages.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.table import WIDTH
from benchmarks.workloads import PAGE_SIZE, heads_of
from nvfp4_pallas import MeshOps, PagedKVCache, RaggedBatch
from nvfp4_pallas.policy import Geometry

READ_PATH = "nvfp4_dequant"
# Largest difference from one device, of the largest value: two roundings to bfloat16.
TOLERANCE = 2.0**-7


@dataclasses.dataclass(frozen=True)
class Case:
  """What is divided.

  Attributes:
    axis: `heads` or `pages`, see MeshOps.
    batch, kv_len: sequences, and tokens of each.
    target: times as fast as one GPU that two are to be.
  """

  axis: str
  batch: int
  kv_len: int
  target: float
  geometry: Geometry = heads_of("8b")
  page_size: int = PAGE_SIZE


CASES = (Case("heads", 64, 8192, 1.8), Case("pages", 1, 512 * 1024, 1.7))


@dataclasses.dataclass(frozen=True)
class Scaled:
  """Of a case: microseconds of a step on one device and on all, and the difference of results,
  relative to the largest."""

  case: Case
  devices: int
  us_one: float
  us_all: float
  error: float

  @property
  def ratio(self) -> float:
    return self.us_one / self.us_all

  @property
  def same(self) -> bool:
    """Whether the results are what they must be."""
    return self.error <= (0.0 if self.case.axis == "heads" else TOLERANCE)

  def line(self) -> str:
    case = self.case
    shape = f"{case.batch}/1/{case.kv_len // 1024}K" if case.kv_len >= 1024 else "small"
    target = "no target"
    if self.devices == 2:
      target = f"target {case.target:.1f}, {'met' if self.ratio >= case.target else 'MISSED'}"
    same = "results are one GPU's" if self.same else f"WRONG RESULTS, off by {self.error:.1e}"
    return (
      f"decode {shape} by {case.axis}: 1 GPU {self.us_one:.1f} us, {self.devices} GPUs "
      f"{self.us_all:.1f} us, {self.ratio:.2f} times as fast ({target}); {same}"
    )


def measure(case: Case, devices: Sequence[Any], few: int = 20, many: int = 120) -> Scaled:
  """Times the case on the first of the devices and on all of them."""
  us, outs = [], []
  for count in (1, len(devices)):
    # The same bytes on the same pages, whoever has them.
    ops = MeshOps(Mesh(np.asarray(devices[:count]), ("devices",)), **{case.axis: "devices"})
    arguments = _arguments(case, ops, len(devices))
    once = _steps(*arguments, ops=ops, steps=1, batch_invariant=case.axis == "heads")
    outs.append(np.asarray(once).astype(np.float32))
    us.append(_us_a_step(functools.partial(_steps, *arguments, ops=ops), few, many))
    del arguments
  error = float(np.abs(outs[1] - outs[0]).max() / np.abs(outs[0]).max())
  return Scaled(case, len(devices), us[0], us[1], error)


def _us_a_step(run, few: int, many: int, repeats: int = 5) -> float:
  """By the difference of a short and a long loop, which take equally long to start."""

  def seconds(steps: int) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run(steps=steps))
    return time.perf_counter() - start

  for steps in (few, many):
    seconds(steps)
  return statistics.median(
    1e6 * (seconds(many) - seconds(few)) / (many - few) for _ in range(repeats)
  )


@functools.partial(jax.jit, static_argnames=("ops", "steps", "batch_invariant"))
def _steps(
  q: jax.Array,
  cache: PagedKVCache,
  batch: RaggedBatch,
  *,
  ops: MeshOps,
  steps: int,
  batch_invariant: bool = False,
):
  """Steps of which each asks with what the last one found."""
  how = {"read_path": READ_PATH, "batch_invariant": batch_invariant}
  step = lambda _, q: ops.decode(q, cache, batch, **how)[0]
  return lax.fori_loop(0, steps, step, q)


def _arguments(case: Case, ops: MeshOps, devices: int):
  """q, cache and batch, with page tables for pages that are dealt to `devices`."""
  heads, in_pages = case.geometry, case.kv_len // case.page_size
  dealt = devices if case.axis == "pages" else 1
  own = -(-in_pages // dealt)  # of a sequence on a device
  create = functools.partial(
    PagedKVCache.create,
    num_pages=case.batch * own * dealt,
    page_size=case.page_size,
    num_kv_heads=heads.num_kv_heads,
    head_dim=heads.head_dim,
  )

  def fill(key):
    """Any codes, and scales from 2^-2 to 2: nothing of what is read is a NaN."""
    cache = create()
    keys = iter(jax.random.split(key, 4))
    bits = lambda shape: jax.random.bits(next(keys), shape, jnp.uint8)

    def pool(p):
      scale = lax.bitcast_convert_type(bits(p.block_scale.shape) % 24 + 40, jnp.float8_e4m3fn)
      return dataclasses.replace(p, data=bits(p.data.shape), block_scale=scale)

    return dataclasses.replace(cache, k=pool(cache.k), v=pool(cache.v))

  shardings = ops.shardings(jax.eval_shape(create))
  cache = jax.jit(fill, out_shardings=shardings)(jax.random.key(0))
  order = np.random.default_rng(0).permutation(case.batch * own).reshape(case.batch, own)
  page = np.arange(in_pages)
  table = order[:, page // dealt]
  if ops.size(ops.pages) == 1:  # one device has the pages of all
    table = table + page % dealt * order.size
  kv_lens = jnp.full((case.batch,), case.kv_len, jnp.int32)
  batch = ops.lay_out([RaggedBatch.for_decode(jnp.asarray(table, jnp.int32), kv_lens)])
  q = jax.random.normal(
    jax.random.key(1), (case.batch, heads.num_q_heads, heads.head_dim), jnp.bfloat16
  )
  place = lambda a, spec: jax.device_put(a, NamedSharding(ops.mesh, spec))
  q = place(q, PartitionSpec(None, ops.heads))
  return q, cache, jax.tree.map(place, batch, ops.batch_specs(batch))


def main(argv: list[str]) -> int:
  parser = argparse.ArgumentParser(prog="python3 -m benchmarks scale", description=__doc__)
  parser.add_argument("--devices", type=int, default=2, help="GPUs to divide over, 2 or more")
  options = parser.parse_args(argv)
  if options.devices < 2:
    parser.error(f"--devices must be at least 2, got {options.devices}")
  for case in CASES:
    if case.axis == "heads" and case.geometry.num_kv_heads % options.devices:
      heads = case.geometry.num_kv_heads
      parser.error(f"--devices must divide the {heads} KV heads, got {options.devices}")
  gpus = jax.devices() if jax.default_backend() == "gpu" else []
  if len(gpus) < options.devices:
    print(
      f"this needs {options.devices} GPUs of one host, of 12 GB or more each, JAX sees {len(gpus)}",
      file=sys.stderr,
    )
    return 1
  print(f"{options.devices} of {len(gpus)} {gpus[0].device_kind}, jax {jax.__version__}")
  good = True
  for case in CASES:
    scaled = measure(case, gpus[: options.devices])
    lines = textwrap.wrap(scaled.line(), WIDTH, subsequent_indent="  ")
    print("\n".join(lines), flush=True)
    good &= scaled.same and (options.devices > 2 or scaled.ratio >= case.target)
  return 0 if good else 1
