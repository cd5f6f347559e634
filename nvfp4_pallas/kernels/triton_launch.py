"""Calls of Triton kernels from JAX, through jax-triton, and what has to be installed for them."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from nvfp4_pallas.dispatch import current_target

# jax-triton brings Triton, but does not say so of versions that came later.
PACKAGES = {"jax-triton": (0, 4, 1), "triton": (3, 7)}
# The first version of PTX that has the block-scaled product. Left alone, Triton would ask for the
# newest one that its own assembler knows, which may be too new for the one that JAX calls.
PTX_VERSION = 87


def call(
  kernel: str,
  arrays: Sequence[jax.Array],
  out_type: Any,
  *,
  name: str,
  grid: tuple[int, int, int],
  num_warps: int,
  num_stages: int,
  **parameters,
) -> Any:
  """Runs a Triton kernel of this package, compiled for the target's architecture.

  Args:
    kernel: a module of nvfp4_pallas.kernels, and the function in it.
    arrays: its first parameters.
    out_type: shapes and dtypes of its results, which are parameters as well.
    name: what it is called in a trace.
    grid, num_warps, num_stages: of the launch.
    parameters: the others by name; all are known when the call is traced.

  Returns: the results. Under vmap the calls follow each other.

  Raises:
    NotImplementedError: something is not installed (message: what, and how to get it).
  """
  check_installed()
  check_plugin()
  import jax_triton

  module = importlib.import_module(f"nvfp4_pallas.kernels.{kernel}")

  @jax.custom_batching.sequential_vmap
  def run(*arrays):
    return jax_triton.triton_call(
      *arrays,
      kernel=getattr(module, kernel),
      out_type=out_type,
      name=name,
      grid=grid,
      num_warps=num_warps,
      num_stages=num_stages,
      compute_capability=int(current_target().architecture.removeprefix("sm_")),
      # Where Triton may fuse a product and a sum, it changes no number that is defined.
      backend_options={"ptx_version": PTX_VERSION, "enable_fp_fusion": True},
      **parameters,
    )

  return run(*arrays)


_version = functools.cache(importlib.metadata.version)


def check_installed(version: Callable[[str], str] = _version) -> None:
  """Raises NotImplementedError where a package is missing or too old."""
  for package, oldest in PACKAGES.items():
    try:
      found = version(package)
    except importlib.metadata.PackageNotFoundError:
      found = None
    if found is None or tuple(map(int, re.findall(r"\d+", found)[:3])) < oldest:
      wanted = ".".join(map(str, oldest))
      raise NotImplementedError(
        f"implementation 'triton_sm120' needs {package} {wanted} or later, found {found}: "
        f"pip install '{package}>={wanted}', or ask for implementation='xla'"
      )


def check_plugin() -> None:
  """Raises NotImplementedError where JAX's CUDA plugin is missing, which launches the kernels."""
  from jax._src.lib import gpu_triton  # jax-triton takes it from there

  if not hasattr(gpu_triton, "TritonKernelCall"):
    raise NotImplementedError(
      "implementation 'triton_sm120' needs JAX's CUDA plugin, which is not installed: "
      f"pip install 'jax[cuda13]=={jax.__version__}'"
    )
