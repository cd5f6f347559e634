"""Runs a PTX program (ptx.py) as a Pallas Mosaic GPU kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mosaic_gpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm

from nvfp4_pallas.kernels.ptx import WARPGROUP, Ptx

MIN_SMEM = 16


def launch(
  program: Ptx,
  *,
  name: str,
  programs: int,
  threads: int = WARPGROUP,
  smem_bytes: int,
  out_type: Sequence[jax.ShapeDtypeStruct],
) -> Callable[..., Any]:
  """A function of the program's pointers: its inputs, then its outputs, which are made here.

  An input may be a jax.Ref, which the program changes in place.

  Args:
    program: run by `programs` blocks of `threads`, whole warpgroups.
    name: the kernel's in a trace.
    smem_bytes: shared memory of a block.
    out_type: of the last pointers.
  """
  pointers = len(program.parameters) - 2
  text = program.text()

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * (pointers + 1))
  def run(ctx, *refs):
    del ctx
    i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
    *addresses, smem = [mosaic_gpu.utils.memref_ptr(ref) for ref in refs]
    llvm.inline_asm(
      ir.Type.parse("!llvm.void"),
      [
        *(llvm.ptrtoint(i64, address) for address in addresses),
        llvm.ptrtoint(i32, smem),
        arith.index_cast(i32, gpu.block_id(gpu.Dimension.x)),
      ],
      text,
      ",".join(["l"] * pointers + ["r", "r", "~{memory}"]),
      has_side_effects=True,
    )

  def kernel(*refs):
    run(*refs)

  count = threads // WARPGROUP
  warpgroups = {"num_threads": count, "thread_name": "warpgroup"} if count > 1 else {}
  return plgpu.kernel(
    kernel,
    out_type=tuple(out_type),
    grid=(programs,),
    grid_names=("program",),
    **warpgroups,
    scratch_types=[plgpu.SMEM((max(smem_bytes, MIN_SMEM),), jnp.uint8)],
    compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0),
    kernel_name=name,
  )


@dataclasses.dataclass(frozen=True)
class Kernel:
  """A program and how it is launched.

  Attributes:
    name: in a trace.
    program: its pointers are names of arrays.
    blocks: of threads.
    smem_bytes: shared memory of a block.
    makes: the arrays that it makes; they are its last pointers.
    threads: of a block.
  """

  name: str
  program: Ptx
  blocks: int
  smem_bytes: int
  makes: dict[str, jax.ShapeDtypeStruct]
  threads: int = WARPGROUP

  def launch(self, arrays: dict[str, Any]) -> dict[str, jax.Array]:
    """Runs it on the arrays, or references to them, that have its pointers' names."""
    run = launch(
      self.program,
      name=self.name,
      programs=self.blocks,
      threads=self.threads,
      smem_bytes=self.smem_bytes,
      out_type=tuple(self.makes.values()),
    )
    pointers = self.program.parameters[:-2]
    given = (name for name in pointers if name not in self.makes)
    return dict(zip(self.makes, run(*(arrays[name] for name in given)), strict=True))
