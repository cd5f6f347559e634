"""Ahead-of-time compilation of the Triton kernels for sm_120, on a machine with no GPU.

What jax-triton puts into a JAX program is PTX. It is lowered here as it would be on such a device,
and then assembled, so that tests and people see which instructions run. It needs what `aot` needs,
with a ptxas that knows PTX 8.7 (CUDA 12.8; Triton's wheel has one), and jax-triton.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import pathlib
import re
import sys
import tempfile

from benchmarks.aot import DEFAULT_CACHE, AotError, _find_plugin, assemble, run
from benchmarks.sass import TENSOR_CORE_OPS, Code
from benchmarks.triton_cases import MAX_REGISTERS, SMEM_BYTES, Case

FP4_PRODUCT = "kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3"
FP4_OPCODE = "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X"
BF16_PRODUCT = "m16n8k16.row.col.f32.bf16.bf16.f32"
BF16_OPCODE = "HMMA.16816.F32.BF16"


@dataclasses.dataclass(frozen=True)
class TritonReport:
  """What the compilers made of a case.

  Attributes:
    ptx, sass: the kernel's programs.
    registers: of a thread.
    spills: bytes of spill stores and loads.
    smem: bytes of shared memory.
  """

  ptx: str
  sass: str
  registers: int
  spills: int
  smem: int

  @functools.cached_property
  def code(self) -> Code:
    return Code.parse(self.sass)

  @property
  def products(self) -> collections.Counter[str]:
    """Tensor core instructions in machine code, with their modifiers."""
    return self.code.with_modifiers(*TENSOR_CORE_OPS)

  @property
  def spills_of_loops(self) -> int:
    """Instructions that spill, or load what was, in the loops over keys."""
    return self.code.in_tensor_core_loops("STL", "LDL")


def compile_case(case: Case, cache: pathlib.Path = DEFAULT_CACHE) -> TritonReport:
  """Lowers a case in a process of its own, and assembles its kernel.

  Raises:
    aot.MissingError: a compiler or tool is missing (message: what, and how to get it).
    AotError: the case does not compile (message: the last lines of the compiler).
  """
  plugin, _ = _find_plugin(cache)
  with tempfile.TemporaryDirectory(prefix="triton-aot-") as temporary:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_TRITON_DUMP_DIR": temporary}
    environment.pop("TRITON_INTERPRET", None)
    command = (sys.executable, "-m", "benchmarks.triton_target", case.name, str(plugin.parents[2]))
    run(command, f"{case.name} does not compile", env=environment)
    kernels = list(pathlib.Path(temporary).glob("*/*.ptx"))
    if len(kernels) != 1:
      raise AotError(f"{case.name} holds {len(kernels)} Triton kernels, not one")
    (kernel,) = kernels
    report, sass = assemble(kernel)
    smem = re.search(r"shared_mem_bytes: *(\d+)", kernel.with_suffix(".compile_info").read_text())
    assert smem is not None
    return TritonReport(
      ptx=kernel.read_text(),
      sass=sass,
      registers=sum(map(int, re.findall(r"Used (\d+) registers", report))),
      spills=sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", report))),
      smem=int(smem[1]),
    )


def verdict(case: Case, report: TritonReport) -> str:
  """`ok`, or what is wrong with a case that compiles."""
  if report.spills > case.max_spills:
    return f"FAIL spills {report.spills} bytes, more than {case.max_spills}"
  if report.spills_of_loops:
    return f"FAIL {report.spills_of_loops} spills in loops over keys"
  if report.registers > MAX_REGISTERS:
    return f"FAIL more than {MAX_REGISTERS} registers"
  if report.smem > SMEM_BYTES:
    return f"FAIL {report.smem} bytes of shared memory, there are {SMEM_BYTES}"
  wanted = {FP4_OPCODE: case.products()["OMMA"], BF16_OPCODE: case.products()["HMMA"]}
  wanted = {op: count for op, count in wanted.items() if count}
  if report.products != wanted:
    return f"FAIL products are {dict(report.products)}, not {wanted}"
  if "e2m1x2" in report.ptx:
    return "FAIL E2M1 is converted"
  return "ok"
