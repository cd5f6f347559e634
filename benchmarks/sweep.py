"""When does each read path pay: the same lengths by each, timed by `gpu --only sweep`.

The lengths go far beyond those that gpu_timings.py has a floor to reach for, with fewer calls each.
Cases of one cache follow each other, since gpu_timings.random_cache keeps only one, and so do those
of a batch and key length, so that a run that is cut short has compared what it timed.
paths.py shows the rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from benchmarks.gpu_timings import A8Q, NVFP4, REPACK, WIDE, attention_times

CALLS = 5
VARIANTS = (NVFP4, REPACK, A8Q, *WIDE)
# Batch, and what query and key lengths it is timed with.
LENGTHS = (
  (1, (1, 4, 16, 64, 128, 512, 1024, 8192), (1024, 4096, 16384, 65536)),
  (16, (1, 16, 128), (1024, 4096, 16384)),
)
WITHOUT_DECODE = (A8Q,)  # no implementation for a GPU has it


def _cases() -> Iterator[functools.partial]:
  for batch, q_lens, kv_lens in LENGTHS:
    for kv_len in kv_lens:
      for variant in VARIANTS:
        for q_len in q_lens:
          if q_len <= kv_len and not (q_len == 1 and variant in WITHOUT_DECODE):
            shape = batch, q_len, kv_len
            yield functools.partial(attention_times, "sweep", variant, shape, calls=CALLS)


CASES = tuple(_cases())
