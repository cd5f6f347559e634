"""Compiles one case for a GPU that is not here; benchmarks/aot.py starts it in its own process.

Own process, because ptxas' architecture is fixed by the first compilation, and because Mosaic GPU
reads the places of its tools from the environment.

    python -m benchmarks.aot_target CASE ARCH PLUGIN OUT

writes OUT/hlo.txt and OUT/seconds.txt; Mosaic GPU itself writes PTX, SASS and the ptxas report
of each kernel to $MOSAIC_GPU_DUMP_TO.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import sys
import time

import jax
from jax._src import xla_bridge  # the way JAX's own plugins register; there is no public one
from jax.experimental import topologies

from benchmarks import aot_cases


@dataclasses.dataclass(frozen=True)
class Gpu:
  """What the compiler wants to know about a device. Sizes in bytes."""

  name: str
  cores: int
  shared_memory_per_core: int
  memory: int
  memory_bandwidth: int
  l2_cache: int

  def config(self, arch: str) -> str:
    """XLA's GpuTargetConfigProto as text. `arch`: sm_90, ... ."""
    number = arch.removeprefix("sm_")
    # Without this, ptxas is asked for sm_120 and refuses PTX that Mosaic GPU wrote for sm_120a.
    feature = "" if arch == "sm_90" else "feature_extension: ACCELERATED_FEATURES"
    return f"""
      gpu_device_info {{
        threads_per_block_limit: 1024
        threads_per_warp: 32
        shared_memory_per_block: 49152
        shared_memory_per_core: {self.shared_memory_per_core}
        threads_per_core_limit: 2048
        core_count: {self.cores}
        fpus_per_core: 128
        block_dim_limit_x: 2147483647
        block_dim_limit_y: 65535
        block_dim_limit_z: 65535
        memory_bandwidth: {self.memory_bandwidth}
        l2_cache_size: {self.l2_cache}
        clock_rate_ghz: 1.98
        device_memory_size: {self.memory}
        shared_memory_per_block_optin: {self.shared_memory_per_core - 1024}
        cuda_compute_capability {{ major: {number[:-1]} minor: {number[-1]} {feature} }}
        registers_per_core_limit: 65536
        registers_per_block_limit: 65536
      }}
      platform_name: "CUDA"
      dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
      runtime_version {{ major: 13 }}
      device_description_str: "{self.name}"
    """


GPUS = {
  "sm_90": Gpu("NVIDIA H200", 132, 233472, 150 * 10**9, 4800 * 10**9, 60 * 2**20),
  "sm_100": Gpu("NVIDIA B200", 148, 233472, 190 * 10**9, 8000 * 10**9, 126 * 2**20),
  "sm_120": Gpu("NVIDIA RTX PRO 6000", 188, 102400, 96 * 10**9, 1792 * 10**9, 128 * 2**20),
}


def abstract_devices(arch: str, plugin: str, count: int = 1) -> list:
  """Devices of `arch`, of one host, for which programs compile and cannot run."""
  config = GPUS[arch].config(arch)
  options = {"platform": "cuda", "topology": f"1x1x{count}", "target_config": config}
  try:
    topology = topologies.get_topology_desc(**options)
  except NotImplementedError:  # no installed plugin has registered itself
    xla_bridge.register_plugin("cuda", priority=-100, library_path=plugin)
    topology = topologies.get_topology_desc(**options)
  return list(topology.devices)


def abstract_sharding(arch: str, plugin: str) -> jax.sharding.SingleDeviceSharding:
  """The placement on such a device."""
  return jax.sharding.SingleDeviceSharding(abstract_devices(arch, plugin)[0])


def build(case: aot_cases.Case, arch: str, plugin: str):
  """The case's function, and its arguments with their shardings."""
  if case.devices > 1:
    return case.build(abstract_devices(arch, plugin, case.devices))
  function, arguments = case.build()
  sharding = abstract_sharding(arch, plugin)
  place = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
  return function, jax.tree.map(place, arguments)


def main(argv: list[str]) -> None:
  name, arch, plugin, out = argv
  case = next(case for case in aot_cases.CASES if case.name == name)
  function, arguments = build(case, arch, plugin)
  start = time.perf_counter()
  traced = jax.jit(function, donate_argnums=case.donate).trace(*arguments)
  compiled = traced.lower(lowering_platforms=("cuda",)).compile()
  seconds = time.perf_counter() - start
  # The serialised kernels inside it are longer than all the rest.
  hlo = re.sub(r'module = "[^"]*"', 'module = "..."', compiled.as_text() or "")
  pathlib.Path(out, "hlo.txt").write_text(hlo)
  pathlib.Path(out, "seconds.txt").write_text(f"{seconds:.2f}")


if __name__ == "__main__":
  main(sys.argv[1:])
