"""The benchmark module's commands.

python3 -m benchmarks            every read path on small shapes and on real activations, with
                                 errors and bytes; needs no GPU, takes about a minute
python3 -m benchmarks matrix     every read path over the same shapes: on a GPU their times beside
                                 others', on a CPU small shapes; a row for each
python3 -m benchmarks report     measured rows, the committed ones or others, as tables and plots
python3 -m benchmarks published  the published times of NVFP4, FP8 and A4Q beside this card's
python3 -m benchmarks compare    what moved between two files of rows, beyond noise
python3 -m benchmarks costs      a table of measured costs, from which policy.py chooses read paths
python3 -m benchmarks gpu        checks the kernels on the GPU of this machine
python3 -m benchmarks sanitize   the same under NVIDIA's compute-sanitizer
python3 -m benchmarks dispatch   who runs each phase on a device, and by which instructions
python3 -m benchmarks aot        compiles every kernel for a GPU that need not be here
python3 -m benchmarks plan       how many pages, tokens and sequences fit on a device
python3 -m benchmarks quality    what each cache format costs in accuracy, and gates on it
python3 -m benchmarks serve      what a cache format does to a server: simulated, or live
python3 -m benchmarks breakeven  whether a smaller cache repays its kernels, for given requests
python3 -m benchmarks scale      what two GPUs of a host make of a decoding step
python3 -m benchmarks rates      cycles of the instructions that kernels are made of, on a GPU
"""

from __future__ import annotations

import sys


def main(argv: list[str]) -> int:
  command, rest = (argv[0], argv[1:]) if argv and argv[0] in _COMMANDS else ("small", argv)
  try:
    return _COMMANDS[command](rest)
  except KeyboardInterrupt:  # commands that have something to keep catch it themselves
    print("interrupted", file=sys.stderr)
    return 130


def _small(argv):
  from benchmarks import small

  return small.main(argv)


def _aot(argv):
  from benchmarks import aot

  return aot.main(argv) or 0


def _gpu(argv):
  from benchmarks import gpu

  return gpu.main(argv)


def _sanitize(argv):
  from benchmarks import sanitize

  return sanitize.main(argv)


def _dispatch(argv):
  from benchmarks import dispatch

  return dispatch.main(argv)


def _matrix(argv):
  from benchmarks import matrix

  return matrix.main(argv)


def _rates(argv):
  from benchmarks import rates

  return rates.main(argv)


def _plan(argv):
  from benchmarks import plan

  return plan.main(argv)


def _report(argv):
  from benchmarks import report

  return report.main(argv)


def _published(argv):
  from benchmarks import published

  return published.main(argv)


def _compare(argv):
  from benchmarks import compare

  return compare.main(argv)


def _quality(argv):
  from benchmarks import quality

  return quality.main(argv)


def _serve(argv):
  from benchmarks import serve

  return serve.main(argv)


def _breakeven(argv):
  from benchmarks import breakeven

  return breakeven.main(argv)


def _scale(argv):
  from benchmarks import scale

  return scale.main(argv)


def _costs(argv):
  from benchmarks import costs

  return costs.main(argv)


_COMMANDS = {
  "small": _small,
  "aot": _aot,
  "gpu": _gpu,
  "sanitize": _sanitize,
  "dispatch": _dispatch,
  "matrix": _matrix,
  "plan": _plan,
  "report": _report,
  "published": _published,
  "compare": _compare,
  "costs": _costs,
  "quality": _quality,
  "serve": _serve,
  "breakeven": _breakeven,
  "rates": _rates,
  "scale": _scale,
}

if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
