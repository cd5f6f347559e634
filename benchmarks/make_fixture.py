"""Computes the committed activations: `python -m benchmarks.make_fixture [--check]`.

Runs SmolLM2 over benchmarks/data/passage.txt on the CPU and writes what three of its layers hand
to their attention (benchmarks/activations.py reads it). With --check nothing is written: the
activations are computed again and compared with the committed ones. Needs the `quality` extra,
1.6 GB of memory and, the first time, a 93 MB download.
"""

import argparse
import dataclasses
import sys

import jax
import numpy as np

from benchmarks import activations, llama, llama_files

NUM_TOKENS = 256

# Of layers 0..29, spread over the depth, and each close to the median layer in how much NVFP4 K and
# V disturb its attention output: a single layer is anything from 10 dB (20) to 24 dB (0).
LAYERS = (6, 16, 26)

# Another summation order (another CPU, BLAS or JAX) moves the float32 values by about 1e-6 of
# their row, which carries a few of them over a bf16 rounding boundary.
#   Share: the same model with its hidden channels shuffled agrees on 99.8 % of the bf16 values;
#     the limit allows five times as many differences.
#   Size: one bf16 step. Steps are at most 2**-7 of the value, and the value at most the largest
#     of its row (one token, one head); values near zero may move by many steps of their own.
MIN_SHARE_EQUAL = 0.99
MAX_STEP = 2.0**-7


def compute() -> list[activations.Activations]:
  source = llama_files.load()
  # No start token: the passage reads as a cut from a longer text.
  token_ids = np.array(source.encode(activations.read_passage())[:NUM_TOKENS], np.int32)
  if token_ids.size < NUM_TOKENS:
    raise ValueError(f"the passage has {token_ids.size} tokens, needs {NUM_TOKENS=}")
  provenance = activations.Provenance(
    wheel=llama_files.WHEEL,
    gguf_sha256=llama_files.GGUF_SHA256,
    passage_sha256=activations.passage_sha256(),
  )
  q, k, v = llama.capture_attention_inputs(source.model, token_ids)
  return [activations.Activations(i, q[i], k[i], v[i], token_ids, provenance) for i in LAYERS]


@dataclasses.dataclass(frozen=True)
class Agreement:
  """How one array compares with its committed counterpart."""

  array: str
  share_equal: float
  largest_step: float

  @property
  def sufficient(self) -> bool:
    return self.share_equal >= MIN_SHARE_EQUAL and self.largest_step <= MAX_STEP


def compare(
  computed: list[activations.Activations], committed: list[activations.Activations]
) -> list[Agreement]:
  """Raises ValueError where the two were not computed from the same inputs."""
  agreements = []
  for a, b in zip(computed, committed, strict=True):
    if (a.layer, a.provenance) != (b.layer, b.provenance):
      raise ValueError(
        f"other inputs: {a.layer} {a.provenance}, committed {b.layer} {b.provenance}"
      )
    if not np.array_equal(a.token_ids, b.token_ids):
      raise ValueError(f"other tokens: {a.token_ids}, committed {b.token_ids}")
    for name in ("q", "k", "v"):
      x, y = (np.asarray(getattr(side, name), np.float32) for side in (a, b))
      step = np.abs(x - y) / np.max(np.abs(y), axis=-1, keepdims=True)
      agreements.append(
        Agreement(f"layer {a.layer} {name}", float(np.mean(x == y)), float(np.max(step)))
      )
  return agreements


def main() -> None:
  parser = argparse.ArgumentParser(description="Computes the committed activations.")
  parser.add_argument("--check", action="store_true", help="compare, write nothing")
  arguments = parser.parse_args()
  with jax.default_device(jax.devices("cpu")[0]):
    computed = compute()
    if not arguments.check:
      activations.save(computed)
      print(f"wrote {activations.FIXTURE_PATH}")
      return
    agreements = compare(computed, activations.load())
  for a in agreements:
    print(f"{a.array}: {a.share_equal:.3%} equal, largest step {a.largest_step:.1e} of its row")
  if not all(a.sufficient for a in agreements):
    sys.exit(f"differs: needs {MIN_SHARE_EQUAL=:.1%} and {MAX_STEP=:.1e}")


if __name__ == "__main__":
  main()
