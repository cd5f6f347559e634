"""Runs the Triton kernel for sm_120 on a GPU of another kind, where FP4 products are emulated.

    python -m tests.triton_elsewhere export DIR     here: needs jax-triton, JAX's CUDA compiler (as
                                                    `benchmarks aot`) and flatbuffers, no GPU
    python -m tests.triton_elsewhere run DIR        there: needs JAX, flatbuffers and a Hopper GPU

Triton compiles `tl.dot_scaled` for sm_90 to products in BF16. So this proves nothing of the FP4
instruction, but of all the rest, as compiled and not as interpreted: pages, masks, the widening
assembly, quantised Q, softmax, and how jax-triton launches it.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import subprocess
import sys
from unittest import mock

ARCH = 90
FILE = "{}.{}"


def export(folder: pathlib.Path) -> int:
  """In a process that finds JAX's CUDA plugin, which need not be installed, before JAX."""
  from benchmarks.aot import DEFAULT_CACHE, _find_plugin

  plugin, _ = _find_plugin(DEFAULT_CACHE)
  command = [sys.executable, "-m", "tests.triton_elsewhere", str(plugin.parents[2]), str(folder)]
  return subprocess.run(command, check=False).returncode


def lower(plugin_root: str, folder: pathlib.Path) -> None:
  sys.path.insert(0, plugin_root)
  import jax
  import numpy as np
  from jax import export as jax_export

  from benchmarks import oracle
  from nvfp4_pallas.kernels import attention_triton_sm120 as kernel
  from nvfp4_pallas.kernels import triton_launch
  from tests import cases
  from tests.triton_shapes import DENSE, LONG, spec_of

  folder.mkdir(parents=True, exist_ok=True)
  calls = [
    (f"{case.name}_{path}_{levels}", case, spec_of(case, path, q_levels=levels), options)
    for case, path, levels, options in (
      (DENSE, "nvfp4_a4q", 2, {}),
      (DENSE, "nvfp4_a4q", 1, {}),
      (LONG, "nvfp4_a4q", 2, {"num_splits": 3}),
      (cases.MIXED, "nvfp4_dequant", 2, {}),
      (cases.PAGES[3], "nvfp4_dequant", 2, {}),
      (cases.GQA[3], "nvfp4_a4q", 2, {}),
      (dataclasses.replace(DENSE, options=(("window", 90),)), "nvfp4_dequant", 2, {}),
      (cases.with_formats(DENSE, "fp8", "fp8"), "fp8", 2, {}),
      (cases.with_formats(DENSE, "bf16", "bf16"), "bf16", 2, {}),
    )
  ]
  for name, case, spec, options in calls:
    built = cases.build(case)
    leaves, tree = jax.tree.flatten((built.q, built.cache, built.batch))

    @jax.jit
    def run(*leaves, tree=tree, spec=spec, options=options):
      return kernel.attention(*jax.tree.unflatten(tree, leaves), spec, **options)

    check = jax_export.DisabledSafetyCheck.custom_call("triton_kernel_call_ffi")
    with mock.patch.object(triton_launch, "COMPUTE_CAPABILITY", ARCH):
      exported = jax_export.export(run, platforms=("cuda",), disabled_checks=[check])(*leaves)
    (folder / FILE.format(name, "bin")).write_bytes(exported.serialize())
    batch = built.batch.page_table, built.batch.kv_lens, built.batch.cu_q_lens
    exact = oracle.attention(built.q, built.cache, *batch, **dataclasses.asdict(spec))
    arrays = {f"in{i}": np.asarray(leaf) for i, leaf in enumerate(leaves)}
    arrays = {key: a.view(np.uint8) if a.dtype.itemsize < 4 else a for key, a in arrays.items()}
    bounds = {"out_bound": exact.out_bound(bf16_weights=True), "lse_bound": exact.lse_bound()}
    np.savez(folder / FILE.format(name, "npz"), **arrays, out=exact.out, lse=exact.lse, **bounds)
    print(name, flush=True)


def run(folder: pathlib.Path) -> int:
  """0 when all agree with float64 within the bounds that oracle.Attention derives, four times that
  for lse, as exponents and logarithms of the GPU are approximate."""
  import jax
  import jax.numpy as jnp
  import numpy as np
  from jax import export as jax_export
  from jax._src.lib import gpu_triton  # its import makes the kernel call known to XLA

  from nvfp4_pallas.attention import merge_two

  del gpu_triton
  failed = 0
  for path in sorted(folder.glob(FILE.format("*", "bin"))):
    exported = jax_export.deserialize(bytearray(path.read_bytes()))
    data = np.load(path.with_suffix(".npz"))
    leaves = [
      jnp.asarray(data[f"in{i}"].view(aval.dtype).reshape(aval.shape))
      for i, aval in enumerate(exported.in_avals)
    ]
    out, lse = jax.block_until_ready(exported.call(*leaves))
    again = exported.call(*leaves)
    pairs = zip((out, lse), again, strict=True)
    same = all(bool(jnp.array_equal(a, b, equal_nan=True)) for a, b in pairs)
    if out.ndim == 4:
      state = out[0], lse[0]
      for part in range(1, len(out)):
        state = merge_two(state, (out[part], lse[part]))
      out, lse = state
    sees = np.isfinite(data["lse"])
    out, lse = np.asarray(out, np.float64), np.asarray(lse, np.float64)
    empty = (out[~sees] == 0).all() and np.isneginf(lse[~sees]).all()
    out_error = (np.abs(out - data["out"]) / data["out_bound"]).max()
    lse_error = (np.abs(lse[sees] - data["lse"][sees]) / data["lse_bound"][sees]).max()
    good = bool(empty and same and out_error <= 1 and lse_error <= 4)
    failed += not good
    errors = f"out {out_error:.2f}, lse {lse_error:.2f} of their bounds"
    others = f"rows that see nothing: {bool(empty)}, same bits twice: {same}"
    print(f"{'ok  ' if good else 'FAIL'} {path.stem}: {errors}; {others}", flush=True)
  return failed


if __name__ == "__main__":
  command, directory = sys.argv[1], pathlib.Path(sys.argv[2])
  commands = {"export": export, "run": run}
  sys.exit(commands.get(command, functools.partial(lower, command))(directory))
