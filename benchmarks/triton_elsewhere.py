"""The kernel for sm_120, run on a GPU that is none: its own source, its FP4 products emulated.

    python3 -m benchmarks.triton_elsewhere export FOLDER [--arch sm_90] [--only NAME ...]
    python3 -m benchmarks.triton_elsewhere run [FOLDER] [--only NAME ...]

`run` checks calls on this machine's GPU against float64 on the same bytes, prints a line for each
and goes on after those that fail. It takes them from FOLDER, and then needs nothing but JAX; or
lowers them itself, with jax-triton. `export` makes that folder, on a machine with jax-triton, JAX's
CUDA plugin (as `aot`) and flatbuffers, with no GPU.

For GPUs without block-scaled products Triton decodes both operands of `tl.dot_scaled` to BF16,
which is exact, and multiplies those. All else is what sm_120 would run, by the same compiler: Q's
rounding, pages, masks, softmax, PV, splits. Not seen: the FP4 instruction, the layouts of its
operands, sums in its order. How long a call takes says nothing about sm_120.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import export

from benchmarks import oracle, program
from benchmarks.aot import DEFAULT_CACHE, ROOT, AotError, _find_plugin
from benchmarks.gpu_checks import count_different, ragged_decode, ragged_prefill, worst_row
from benchmarks.sources import kernel_hash
from nvfp4_pallas.dispatch import Target, current_target, use_target
from nvfp4_pallas.kernels import attention_triton_sm120 as kernel
from nvfp4_pallas.ops.merge import merge_splits
from nvfp4_pallas.read_paths import AttentionSpec

REPEATS = 20
HASH = "kernel_hash.txt"  # in a folder: of the sources that its calls were made of
# The bound is for sums that are rounded; tensor cores cut theirs, which is twice as far.
LSE_BOUNDS = 2.0
# The numbers of a ragged batch: keys, and query tokens where it is no decode.
KEYS, QUERIES = (500, 0, 1, 333), (90, 0, 1, 70)
DECODE_KEYS = (1500, 0, 1, 777)


@dataclasses.dataclass(frozen=True)
class Case:
  """A call of kernel.attention.

  Attributes:
    name: of its file, too.
    formats: of K and V.
    shape: what of gpu_checks.ragged_prefill's is not as usual (dim, v_dim, page_size, group).
    options: of read_paths.AttentionSpec.
    decodes: whether each sequence has one query token.
    num_splits, ahead: as in kernel.attention.
  """

  name: str
  read_path: str
  options: dict[str, Any] = dataclasses.field(default_factory=dict)
  shape: dict[str, int] = dataclasses.field(default_factory=dict)
  formats: tuple[str, str] = ("nvfp4", "nvfp4")
  decodes: bool = False
  num_splits: int = 1
  ahead: bool = False

  @property
  def spec(self) -> AttentionSpec:
    return AttentionSpec(
      **{"read_path": self.read_path, "causal": True, "sm_scale": 0.1} | self.options
    )

  def inputs(self) -> tuple[Any, ...]:
    """(q, cache, batch): random bytes, and NaN wherever nothing may be read."""
    if self.decodes:
      k_format, v_format = self.formats
      return ragged_decode(DECODE_KEYS, k_format, v_format, **self.shape)
    return ragged_prefill(KEYS, QUERIES, self.formats, padding_rows=3, **self.shape)

  def function(self) -> tuple[Callable[..., Any], list[jax.Array]]:
    """The call, as a function of arrays, and those."""
    arrays, tree = jax.tree.flatten(self.inputs())

    def run(*arrays):
      splits: Any = {"num_splits": self.num_splits, "one_each": self.decodes, "ahead": self.ahead}
      q, cache, batch = jax.tree.unflatten(tree, arrays)
      results = kernel.attention(q, cache, batch, self.spec, **splits)
      return results if self.num_splits == 1 else merge_splits(*results)

    return run, arrays

  def exact(self) -> oracle.Attention:
    q, cache, batch = self.inputs()
    where = batch.page_table, batch.kv_lens, batch.cu_q_lens
    return oracle.attention(q, cache, *where, **dataclasses.asdict(self.spec))


A4Q, DEQUANT = "nvfp4_a4q", "nvfp4_dequant"
ONE, TWO = {"q_levels": 1}, {"q_levels": 2}
MASKS = {"window": 90, "soft_cap": 30.0}
CASES = (
  Case("a4q_2_levels", A4Q, TWO),
  Case("a4q_1_level", A4Q, ONE),
  Case("a4q_dim_64_page_16", A4Q, TWO, {"dim": 64, "page_size": 16}),
  Case("a4q_1_level_dim_64_page_32_group_7", A4Q, ONE, {"dim": 64, "page_size": 32, "group": 7}),
  Case("a4q_page_128_group_1", A4Q, TWO, {"page_size": 128, "group": 1}),
  Case("a4q_masks", A4Q, TWO | MASKS),
  Case("a4q_not_causal", A4Q, TWO | {"causal": False}),
  Case("a4q_v_dim_64_v_fp8", A4Q, TWO, {"v_dim": 64}, formats=("nvfp4", "fp8")),
  Case("a4q_splits", A4Q, TWO, num_splits=3),
  Case("dequant", DEQUANT),
  Case("dequant_dim_64_page_16", DEQUANT, {}, {"dim": 64, "page_size": 16}),
  Case("dequant_page_128_masks", DEQUANT, MASKS, {"page_size": 128}),
  Case("repack_ahead", "nvfp4_repack", ahead=True),
  Case("fp8", "fp8", formats=("fp8", "fp8")),
  Case("bf16", "bf16", formats=("bf16", "bf16")),
  Case("decode_a4q", A4Q, TWO, {"page_size": 16}, decodes=True, num_splits=4),
  Case("decode_a4q_1_level_dim_64", A4Q, ONE, {"dim": 64}, decodes=True),
  Case("decode_dequant", DEQUANT, {}, {"page_size": 128}, decodes=True, num_splits=2),
)


def main(argv: list[str]) -> int:
  """0 when all calls are right, or were exported; 2 where none can be tried."""
  parser = argparse.ArgumentParser(prog="benchmarks.triton_elsewhere", description=__doc__)
  parser.add_argument("what", choices=("export", "run", "lower"), help="lower: of export, a part")
  parser.add_argument("folder", nargs="?", type=pathlib.Path)
  parser.add_argument("--arch", default="sm_90", help="to export for")
  parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES], metavar="NAME")
  options = parser.parse_args(argv)
  some = [case for case in CASES if options.only is None or case.name in options.only]
  if options.what == "run":
    return run_all(some, options.folder)
  if options.folder is None:
    parser.error(f"{options.what} needs a folder")
  if options.what == "lower":
    for case in some:
      lower(case, options.folder, options.arch)
    return 0
  return export_all(argv, options.folder)


def export_all(argv: list[str], folder: pathlib.Path) -> int:
  """In a process that finds JAX's CUDA plugin, which need not be installed."""
  try:
    plugin, _ = _find_plugin(DEFAULT_CACHE)
  except AotError as error:
    print(error, file=sys.stderr)
    return 2
  folder.mkdir(parents=True, exist_ok=True)
  (folder / HASH).write_text(sources_now())
  paths = filter(None, (str(plugin.parents[2]), os.environ.get("PYTHONPATH")))
  environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths)}
  command = sys.executable, "-m", "benchmarks.triton_elsewhere", "lower", *argv[1:]
  return subprocess.run(command, cwd=ROOT, env=environment).returncode


def sources_now() -> str:
  return kernel_hash(["triton_attend"])


def lower(case: Case, folder: pathlib.Path, arch: str) -> None:
  exported = lowered(case, arch)
  (folder / f"{case.name}.bin").write_bytes(exported.serialize())
  print(f"{case.name}: {products(exported)}", flush=True)


def lowered(case: Case, arch: str) -> export.Exported:
  """Raises what triton_launch.call raises."""
  function, arrays = case.function()
  allowed = [export.DisabledSafetyCheck.custom_call("triton_kernel_call_ffi")]
  with use_target(Target(arch)):
    return export.export(jax.jit(function), platforms=["cuda"], disabled_checks=allowed)(*arrays)


def products(exported: export.Exported) -> str:
  """What the call's program multiplies with."""
  found = program.products(exported.mlir_module())
  return ", ".join(kind for kinds in found.values() for kind in kinds)


def run_all(some: Sequence[Case], folder: pathlib.Path | None) -> int:
  architecture = current_target().architecture
  if not architecture.startswith("sm_"):
    print(f"this needs a GPU, JAX sees only {architecture}", file=sys.stderr)
    return 2
  if folder is not None and (exported := (folder / HASH).read_text()) != sources_now():
    print(
      f"{folder} has the kernel of other sources, {exported}, than these, {sources_now()}: "
      "export it again",
      file=sys.stderr,
    )
    return 2
  device = jax.devices()[0].device_kind
  print(f"the kernel for sm_120, sources {sources_now()}, emulated on {device}, {architecture}")
  print(f"{'':36}{'worst row':>10}{'lse/bound':>10}{'seconds':>9}  products")
  failed = 0
  for case in some:
    began = time.monotonic()
    try:
      said = check(case, functools.partial(call_of, case, folder, architecture))
    except Exception as error:  # noqa: BLE001 - any fault of one call is named, the others go on
      said = f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:400]}"
      failed += 1
    seconds = time.monotonic() - began
    if isinstance(said, str):
      print(f"{case.name:36}{said}", flush=True)
    else:
      row, lse, what = said
      print(f"{case.name:36}{row:10.1e}{lse:10.2f}{seconds:9.1f}  {what}", flush=True)
  print(f"{len(some)} calls, {failed} failed")
  return 1 if failed else 0


def call_of(case: Case, folder: pathlib.Path | None, arch: str) -> export.Exported:
  if folder is None:
    return lowered(case, arch)
  return export.deserialize(bytearray((folder / f"{case.name}.bin").read_bytes()))


def check(case: Case, load: Callable[[], Any]) -> tuple[float, float, str]:
  """(relative L2 error of the worst row, the worst lse's in its bounds, the products).

  Raises AssertionError where one is too large, or where the same inputs give other bits.
  """
  exported = load()
  _, arrays = case.function()
  run = jax.jit(exported.call)
  results = jax.block_until_ready(run(*arrays))
  for _ in range(REPEATS):
    if count_different(run(*arrays), results):
      raise AssertionError("the same inputs gave other bits")
  exact = case.exact()
  row = worst_row(case.name, results, exact)
  sees = np.isfinite(exact.lse)
  lse = np.abs(np.asarray(results[1], np.float64)[sees] - exact.lse[sees])
  lse /= exact.lse_bound()[sees]
  if not lse.max() <= LSE_BOUNDS:
    raise AssertionError(f"lse is {lse.max():.1f} times its bound off, {LSE_BOUNDS} are allowed")
  return row, float(lse.max()), products(exported)


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
