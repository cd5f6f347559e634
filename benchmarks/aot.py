"""Ahead-of-time compilation of the kernels, on a machine with no GPU.

    python -m benchmarks aot [--arch ARCH] [--keep DIR] [--cache DIR] [NAME ...]

compiles the cases of aot_cases.py (all, or those whose name starts with a NAME) to machine code
and prints what a thread needs. It fails where a case does not compile, spills, takes more
registers or machine instructions than the case allows, or has wgmma that wait for each other.

It needs JAX's CUDA compiler, which comes from the installed CUDA plugin or else from two wheels
that are downloaded once and unpacked into the cache directory, not installed; and ptxas and
nvdisasm, from a CUDA toolkit or from Triton's wheel. `--keep DIR` leaves PTX, SASS, HLO and the
compiler's dumps in DIR.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import importlib.metadata
import importlib.util
import operator
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence

from benchmarks import aot_cases
from benchmarks.aot_cases import Case
from benchmarks.sass import TENSOR_CORE_OPS, Code, alu

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEFAULT_CACHE = pathlib.Path.home() / ".cache" / "nvfp4_pallas"
WHEELS = ("jax-cuda13-pjrt", "jax-cuda13-plugin")
PLUGIN = pathlib.PurePath("jax_plugins", "xla_cuda13", "xla_cuda_plugin.so")
RUNTIME = pathlib.PurePath("jax_cuda13_plugin", "libmosaic_gpu_runtime.so")
# ptxas: any toolkit's serves, as Mosaic GPU asks it for the PTX version that it understands.
TOOLS = ("ptxas", "nvdisasm")
TIMEOUT_S = 600


class AotError(Exception):
  """A case did not compile, or something that compilation needs is missing."""


class MissingError(AotError):
  """Something that compilation needs is not here and could not be had."""


@dataclasses.dataclass(frozen=True)
class Kernel:
  """One Mosaic GPU kernel of a case."""

  name: str
  registers: int
  spills: int
  smem: int
  ptx: str
  sass: str
  serialised: bool = False  # ptxas put a wait after each wgmma, as it could not tell it is safe

  @functools.cached_property
  def code(self) -> Code:
    return Code.parse(self.sass)

  @property
  def ops(self) -> collections.Counter[str]:
    """Machine instructions by opcode."""
    return self.code.count()


@dataclasses.dataclass(frozen=True)
class AotReport:
  """What the compiler made of a case.

  Attributes:
    kernels: the Mosaic GPU kernels, in the order of compilation; XLA's own are not among them.
    hlo: the optimised HLO module, which shows aliasing and copies; without the kernels' own code.
    seconds: tracing, lowering and compilation.
  """

  kernels: tuple[Kernel, ...]
  hlo: str
  seconds: float

  @property
  def registers(self) -> int:
    """Registers a thread, of the kernel that takes the most."""
    return max((k.registers for k in self.kernels), default=0)

  @property
  def spills(self) -> int:
    """Bytes of spill stores and loads of all kernels."""
    return sum(k.spills for k in self.kernels)

  @property
  def smem(self) -> int:
    """Bytes of shared memory, static and dynamic, of the kernel that takes the most."""
    return max((k.smem for k in self.kernels), default=0)

  @property
  def ptx(self) -> str:
    return "\n".join(k.ptx for k in self.kernels)

  @property
  def sass(self) -> str:
    return "\n".join(k.sass for k in self.kernels)

  @property
  def ops(self) -> collections.Counter[str]:
    return sum((k.ops for k in self.kernels), collections.Counter())

  @property
  def torn(self) -> list[str]:
    """Kernels that change operands in place and stand in a fusion: see kernels/in_place.py."""
    fused = re.findall(r"^%dynamic-slice-fusion[\s\S]*?^}", self.hlo, re.MULTILINE)
    calls = (line for text in fused for line in text.splitlines() if "custom-call(" in line)
    return [call.split()[0] for call in calls if "output_to_operand_aliasing=" in call]


def compile_case(
  case: Case,
  *,
  arch: str | None = None,
  keep: pathlib.Path | None = None,
  cache: pathlib.Path = DEFAULT_CACHE,
) -> AotReport:
  """Compiles a case of aot_cases.CASES in a process of its own.

  Args:
    case: the case.
    arch: sm_90, sm_100 or sm_120; None: the case's.
    keep: a directory to leave everything in, under the case's name.
    cache: where downloaded wheels are kept.

  Raises:
    MissingError: a compiler or tool is missing (message: what, and how to get it).
    AotError: the case does not compile (message: the last lines of the compiler).
  """
  plugin, runtime = _find_plugin(cache)
  with tempfile.TemporaryDirectory(prefix="aot-") as temporary:
    out = pathlib.Path(temporary) if keep is None else keep / case.name.replace("/", "_")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    tools = out / "cuda"
    _link_tools(tools / "bin")
    environment = os.environ | {
      "CUDA_ROOT": str(tools),
      "MOSAIC_GPU_DUMP_TO": str(out),
      "MOSAIC_GPU_RUNTIME_LIB_PATH": str(runtime),
      "PATH": os.pathsep.join((str(tools / "bin"), os.environ.get("PATH", ""))),
      "JAX_PLATFORMS": "cpu",
      "JAX_ENABLE_COMPILATION_CACHE": "0",  # a cached executable would leave no dumps
    }
    command = (sys.executable, "-m", "benchmarks.aot_target")
    try:
      done = subprocess.run(
        (*command, case.name, arch or case.arch, str(plugin), str(out)),
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
      )
    except subprocess.TimeoutExpired:
      raise AotError(f"{case.name} did not compile within {TIMEOUT_S} s") from None
    if done.returncode:
      last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-20:])
      raise AotError(f"{case.name} does not compile:\n{last}")
    return _read_report(case, out)


def _read_report(case: Case, out: pathlib.Path) -> AotReport:
  reports = sorted(out.glob("*.ptxas"), key=lambda path: int(path.stem.rpartition("_")[2]))
  kernels = tuple(_read_kernel(path) for path in reports)
  if not kernels and case.max_registers:
    raise AotError(f"{case.name} holds no Mosaic GPU kernel")
  seconds = float((out / "seconds.txt").read_text())
  return AotReport(kernels, (out / "hlo.txt").read_text(), seconds)


def _read_kernel(report: pathlib.Path) -> Kernel:
  text = report.read_text()

  def total(pattern: str) -> int:
    return sum(map(int, re.findall(pattern, text)))

  # The launch states the dynamic shared memory: `dynamic_shared_memory_size %c2048_i32`.
  sass = report.with_suffix(".sass_ctrl")  # Mosaic GPU leaves none for sm_100
  launch = r"gpu\.launch_func .*dynamic_shared_memory_size %c(\d+)_i32"
  dynamic = re.findall(launch, report.with_suffix(".mlir-passes.log").read_text())
  return Kernel(
    name=report.stem.rpartition("_")[0],
    registers=total(r"Used (\d+) registers"),
    spills=total(r"(\d+) bytes spill (?:stores|loads)"),
    smem=total(r"(\d+) bytes smem") + int(dynamic[-1] if dynamic else 0),
    ptx=report.with_suffix(".ptx").read_text(),
    sass=sass.read_text() if sass.exists() else assemble(report.with_suffix(".ptx"))[1],
    serialised="wgmma.mma_async instructions are serialized" in text,
  )


def assemble(ptx: pathlib.Path) -> tuple[str, str]:
  """(what ptxas reports of a PTX file, its machine code as nvdisasm prints it)."""
  target = re.search(r"^\.target (\w+)", ptx.read_text(), re.MULTILINE)
  assert target is not None, ptx
  ptxas, cubin = _find_tool("ptxas"), ptx.with_suffix(".cubin")
  command = (ptxas, "-v", f"-arch={target[1]}", str(ptx), "-o", str(cubin))
  report = run(command, f"{ptxas} does not take {ptx.name} for {target[1]}")
  return report, run((_find_tool("nvdisasm"), "-c", str(cubin)), "nvdisasm failed")


def ptxas_version() -> str:
  """Of the assembler that is used here, whose choice registers and spills are."""
  ptxas = _find_tool("ptxas")
  said = run((ptxas, "--version"), f"{ptxas} does not say its version")
  release = re.search(r"\bV(\d[\d.]*)", said)
  return release[1] if release else "of an unknown version"


def run(command: Sequence[str], failure: str, **options) -> str:
  """What a command printed. Raises AotError with its last lines where it fails."""
  done = subprocess.run(
    command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, **options
  )
  if done.returncode:
    last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-20:])
    raise AotError(f"{failure}:\n{last}")
  return done.stdout + done.stderr


def _find_plugin(cache: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
  """The compiler's and the Mosaic runtime's shared libraries: installed, cached or downloaded."""
  version = importlib.metadata.version("jax")
  for root in _installed_roots(version):
    if (root / PLUGIN).exists() and (root / RUNTIME).exists():
      return root / PLUGIN, root / RUNTIME
  # The plugin has modules for one version of Python.
  root = cache / f"jax-cuda13-{version}-{sys.implementation.cache_tag}"
  if not root.exists():
    _download(version, root)
  return root / PLUGIN, root / RUNTIME


def _installed_roots(version: str) -> list[pathlib.Path]:
  try:
    wheels = [importlib.metadata.distribution(name) for name in WHEELS]
  except importlib.metadata.PackageNotFoundError:
    return []
  same = all(wheel.version == version for wheel in wheels)
  return [pathlib.Path(str(wheels[0].locate_file("")))] if same else []


def _download(version: str, target: pathlib.Path) -> None:
  """Unpacks the wheels of `version` into `target`, which appears only when it is complete."""
  target.parent.mkdir(parents=True, exist_ok=True)
  names = [f"{name}=={version}" for name in WHEELS]
  command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
  with tempfile.TemporaryDirectory(dir=target.parent, prefix="wheels-") as temporary:
    done = subprocess.run([*command, "--dest", temporary, *names], capture_output=True, text=True)
    if done.returncode:
      last = "\n".join(done.stderr.strip().splitlines()[-3:])
      raise MissingError(
        f"the CUDA compiler of jax {version} is missing and could not be downloaded. Install "
        f"{' and '.join(names)}, or make pip reach a package index. pip said:\n{last}"
      )
    unpacked = pathlib.Path(temporary, "unpacked")
    for wheel in pathlib.Path(temporary).glob("*.whl"):
      with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    try:
      unpacked.rename(target)
    except OSError:  # another process was faster
      if not target.exists():
        raise


def _link_tools(bin_directory: pathlib.Path) -> None:
  """A CUDA root as Mosaic GPU wants it, of tools that may lie in different places."""
  bin_directory.mkdir(parents=True)
  for tool in TOOLS:
    (bin_directory / tool).symlink_to(_find_tool(tool))


def _find_tool(tool: str) -> str:
  places = [os.environ.get("PATH", "")]
  for variable in ("CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"):
    if variable in os.environ:
      places.append(os.path.join(os.environ[variable], "bin"))
  spec = importlib.util.find_spec("triton")
  if spec and spec.origin:
    places.append(str(pathlib.Path(spec.origin).parent / "backends" / "nvidia" / "bin"))
  found = shutil.which(tool, path=os.pathsep.join(places))
  if found is None:
    raise MissingError(
      f"{tool} is missing: install a CUDA toolkit and put its bin directory on PATH, or install "
      "the triton wheel, which brings it"
    )
  return found


def verdict(case: Case, report: AotReport) -> str:
  """`ok`, or what is wrong with a case that compiles."""
  if report.spills:
    return f"FAIL spills {report.spills} bytes"
  if report.torn:
    return f"FAIL {len(report.torn)} calls in place are part of a fusion"
  if any(kernel.serialised for kernel in report.kernels):
    return "FAIL serialised wgmma"
  if report.registers > case.max_registers:
    return f"FAIL more than {case.max_registers} registers"
  if 0 < case.max_instructions < report.ops.total():
    return f"FAIL more than {case.max_instructions} instructions"
  if case.loop_values and not all(map(operator.le, of_loop(case, report), case.max_loop)):
    return f"FAIL more than {case.max_loop} instructions a value"
  return "ok"


def of_loop(case: Case, report: AotReport) -> tuple[float, float]:
  """Instructions of the inner loop, and slots of the integer pipe, for each value of the cache."""
  loop = report.kernels[0].code.inner_loop()
  if loop is None:
    raise AotError(f"{case.name} has no loop around its tensor core instructions")
  return loop.total() / case.loop_values, alu(loop) / case.loop_values


_ROW = "{:<34} {:>9} {:>6} {:>7} {:>6} {:>5} {:>5} {:>5} {:>5}  {}"


def main(argv: list[str]) -> int:
  """Prints the table; 0 when every case compiles within its bounds."""
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks aot", description="Compiles the kernels with no GPU."
  )
  parser.add_argument("names", nargs="*", metavar="NAME", help="compile cases that start so")
  choices = ("sm_90", "sm_100", "sm_120")
  parser.add_argument("--arch", choices=choices, help="another one than a case's own")
  parser.add_argument("--keep", type=pathlib.Path, metavar="DIR", help="leave the dumps there")
  parser.add_argument("--cache", type=pathlib.Path, metavar="DIR", default=DEFAULT_CACHE)
  options = parser.parse_args(argv)
  unknown = [n for n in options.names if not any(c.name.startswith(n) for c in aot_cases.CASES)]
  if unknown:
    print(f"no case starts with {' or '.join(unknown)}; there are:", file=sys.stderr)
    print("\n".join(case.name for case in aot_cases.CASES), file=sys.stderr)
    return 2
  wanted = tuple(options.names) or ("",)
  cases = [case for case in aot_cases.CASES if case.name.startswith(wanted)]
  print(
    f"{options.arch or 'compiled'}; registers / the case's bound; bytes; machine instructions; "
    "those of the inner loop, and of the integer pipe there, for each value of the cache; seconds"
  )
  titles = ("case", "registers", "spills", "smem", "instr", "mma", "loop", "int", "s", "")
  print(_ROW.format(*titles))
  failed = False
  for case in cases:
    try:
      report = compile_case(case, arch=options.arch, keep=options.keep, cache=options.cache)
    except MissingError as error:
      print(error, file=sys.stderr)
      return 1
    except AotError as error:
      print(f"{case.name}: FAIL")
      print(error, file=sys.stderr)
      failed = True
      continue
    result = verdict(case, report)
    failed |= result != "ok"
    registers = f"{report.registers}/{case.max_registers}"
    mma = sum(report.ops[op] for op in TENSOR_CORE_OPS)
    row = (case.name, registers, report.spills, report.smem, report.ops.total(), mma)
    loop = [f"{x:.2f}" for x in of_loop(case, report)] if case.loop_values else ["", ""]
    print(_ROW.format(*row, *loop, f"{report.seconds:.1f}", result), flush=True)
  return int(failed)


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
