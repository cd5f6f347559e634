"""The shapes of the benchmark matrix, as data: what is asked, of which heads, over which pages.

Four query shapes are the ones that the reports this project began with ask for: a full prompt of
8K and of 32K tokens (they time one of 16K too), a query of 128 over 2K keys, tails of 8 and 16 over
16K; and decode, append and pack beside them. `LENGTHS` is a grid between and beyond them, for
policy.py to interpolate in.
"""

from __future__ import annotations

import dataclasses

from nvfp4_pallas.cache import LAYOUT
from nvfp4_pallas.policy import Geometry

# Heads of one layer on one device.
GEOMETRIES = {
  "8b": Geometry(32, 8, 128),  # Llama 3.1 8B, Qwen3 8B
  "70b-tp8": Geometry(8, 1, 128),  # Llama 3.1 70B, one of eight shards
  "30b-moe": Geometry(32, 4, 128),  # Qwen3 30B A3B
  "smollm2": Geometry(9, 3, 64),  # SmolLM2 135M
  "small": Geometry(8, 2, 128),  # what a CPU can do
}
PAGE_SIZE = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
  """What is timed, by whichever read path: equal work is an equal Workload.

  Attributes:
    phase: `prefill`, `chunk`, `tail` or `decode` (all of them attention), `append`, `pack` or
      `unpack`.
    batch: sequences; of append tokens.
    q_len, kv_len: query and key tokens of each; q_len is rows of `pack` and `unpack`.
    geometry: a name of GEOMETRIES, or heads as `32/8/128`.
    layout: of the pages; `cache.LAYOUT` is the one that exists.
  """

  phase: str
  batch: int
  q_len: int
  kv_len: int
  geometry: str = "8b"
  page_size: int = PAGE_SIZE
  layout: str = LAYOUT

  @property
  def heads(self) -> Geometry:
    return heads_of(self.geometry)


def heads_of(geometry: str) -> Geometry:
  """ValueError where it is neither a name nor heads as `32/8/128`."""
  if geometry in GEOMETRIES:
    return GEOMETRIES[geometry]
  numbers = geometry.split("/")
  if len(numbers) != 3 or not all(number.isdecimal() for number in numbers):
    raise ValueError(
      f"geometry must be one of {', '.join(GEOMETRIES)} or query heads/KV heads/head_dim, "
      f"got {geometry}"
    )
  return Geometry(*map(int, numbers))


ATTENTION = ("prefill", "chunk", "tail", "decode")
# Up to how many query tokens of more keys are a tail.
LONGEST_TAIL = 16


def attention(batch: int, q_len: int, kv_len: int, **where) -> Workload:
  """The workload of a shape; its phase follows from its lengths."""
  if q_len == 1:
    phase = "decode"
  elif q_len == kv_len:
    phase = "prefill"
  else:
    phase = "tail" if q_len <= LONGEST_TAIL else "chunk"
  return Workload(phase=phase, batch=batch, q_len=q_len, kv_len=kv_len, **where)


FULL = ((1, 8192, 8192), (1, 16384, 16384), (1, 32768, 32768))
CHUNK = ((4, 128, 2048),)
TAILS = tuple((batch, q_len, 16384) for batch in (1, 16) for q_len in (8, 16))
DECODE = tuple((batch, 1, kv_len) for batch in (1, 16, 64) for kv_len in (2048, 8192, 32768))
SHORT_TAILS = ((1, 4, 16384), (16, 4, 16384))
PREFILLS = ((4, 2048, 2048),)
APPEND_TOKENS = (1, 64, 512, 8192)
# One of each kind, for what is compared with the rest in one thing only.
ONE_OF_EACH = ((1, 8192, 8192), (4, 128, 2048), (16, 16, 16384), (16, 1, 8192))
# What the definition is timed at on a GPU, where nobody serves with it.
DEFINITION = ((4, 128, 2048), (1, 16, 16384), (1, 1, 2048))
PAGE_SIZES = (16, 128)
# Batch, and the query and key lengths that it is timed with.
LENGTHS = (
  (1, (1, 4, 16, 64, 128, 512, 1024, 8192), (1024, 4096, 16384, 65536)),
  (1, (512,), (2048, 8192, 32768)),  # where the paths are closest to each other
  (4, (1, 16, 128, 1024), (1024, 4096, 16384)),
  (16, (1, 4, 16, 128, 512), (1024, 4096, 16384)),
  (64, (1, 16, 128), (1024, 4096)),
)
# What a CPU can do of the same kinds, in a minute or two.
SMALL_ATTENTION = ((1, 256, 256), (2, 64, 256), (1, 16, 512), (4, 1, 512))
SMALL_APPEND_TOKENS = (1, 64, 256)
PACK_ROWS = 2**19  # of 128 values: 64 Mi
SMALL_PACK_ROWS = 2**12
STEP_SEQUENCES = (16, 64)
PROMPT_TOKENS = 2048


def grid() -> list[tuple[int, int, int]]:
  """The shapes of LENGTHS: of one batch and key length one after the other."""
  return [
    (batch, q_len, kv_len)
    for batch, q_lens, kv_lens in LENGTHS
    for kv_len in kv_lens
    for q_len in q_lens
    if q_len <= kv_len
  ]
