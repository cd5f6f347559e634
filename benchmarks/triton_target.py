"""Lowers one call of a Triton kernel for a GPU that is not here; triton_aot.py starts it.

    python -m benchmarks.triton_target CASE PLUGIN_ROOT

Own process, because jax-triton reads from the environment where to leave what it compiled
($JAX_TRITON_DUMP_DIR: PTX and Triton's own stages), and because JAX's CUDA plugin, which need not
be installed, has to be found before JAX is imported.
"""

from __future__ import annotations

import sys


def main(argv: list[str]) -> None:
  name, plugin_root = argv
  sys.path.insert(0, plugin_root)
  import jax

  from benchmarks import triton_cases
  from nvfp4_pallas.dispatch import Target, use_target

  case = triton_cases.named(name)
  function, arguments = case.build()
  with use_target(Target(triton_cases.TARGET)):
    traced = jax.jit(function).trace(*arguments)
  traced.lower(lowering_platforms=("cuda",))


if __name__ == "__main__":
  main(sys.argv[1:])
