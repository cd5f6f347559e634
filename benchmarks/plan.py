"""`python3 -m benchmarks plan`: how many pages, tokens and sequences fit on each device.

    python3 -m benchmarks plan --layers 32 --kv-heads 8 --head-dim 128 --memory-gib 141 \
      --weights-gib 16 --tensor 1 --kv-len 8192

The bytes are those of the arrays that PagedKVCache.create would allocate, found without allocating.
With --recent-window each sequence has a ring of its newest tokens in bfloat16 beside its pages.
Rotations and four-over-six change no byte, and a mean of keys (--k-mean) is a row a head.
KV heads are divided over the tensor axis, a sequence's pages over the context axis; so a group of
tensor x context devices holds its sequences together, and the data axis has that many groups.
"""

from __future__ import annotations

import argparse
import dataclasses
import textwrap
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.table import WIDTH
from benchmarks.text_table import Table
from nvfp4_pallas import PagedKVCache
from nvfp4_pallas.cache import KV_FORMATS, PAGE_SIZES

# Of a device: more than any has, little enough to count in whole bytes and to print.
MAX_MEMORY_GIB = 2.0**20
WIDE = ("bf16", "bf16")
FORMATS = (WIDE, ("fp8", "fp8"), ("fp8", "nvfp4"), ("nvfp4", "nvfp4"))


@dataclasses.dataclass(frozen=True)
class Model:
  """What has a cache, and how it is spread.

  Attributes:
    layers, kv_heads, head_dim, v_head_dim: of the model.
    page_size: tokens of a page.
    tensor, context, data: sizes of the mesh axes.
    recent_window: tokens that stay wide, of caches that are not bf16.
    k_mean: whether keys are stored without a mean, which the cache then holds.
  """

  layers: int
  kv_heads: int
  head_dim: int
  v_head_dim: int
  page_size: int
  tensor: int = 1
  context: int = 1
  data: int = 1
  recent_window: int = 0
  k_mean: bool = False

  @property
  def heads(self) -> int:
    """Of a device."""
    return self.kv_heads // self.tensor

  def __post_init__(self):
    for name in ("layers", "kv_heads", "tensor", "context", "data"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
    if self.recent_window < 0:
      raise ValueError(f"recent_window must not be negative, got {self.recent_window}")
    if self.recent_window and self.context > 1:
      raise ValueError(f"context must be 1 with a recent window, got {self.context}")
    if self.kv_heads % self.tensor:
      raise ValueError(f"tensor must divide kv_heads, got {self.tensor} and {self.kv_heads}")


@dataclasses.dataclass(frozen=True)
class Plan:
  """Of one pair of formats.

  Attributes:
    pages: of each layer, on each device.
    ring_bytes: of a sequence on a device, all layers.
    cache_bytes: of a device, all layers, as allocated, rings included.
    group_tokens: in the pages of a group of tensor x context devices, if every one is full.
    group_sequences: of the wanted length, in such a group.
    tokens, sequences: of all groups together.
  """

  k_format: str
  v_format: str
  pages: int
  ring_bytes: int
  cache_bytes: int
  group_tokens: int
  group_sequences: int
  tokens: int
  sequences: int


def cache_bytes(
  model: Model, num_pages: int, k_format: str, v_format: str, num_rings: int = 0
) -> int:
  """What a device's caches of all layers take, from the arrays' own shapes."""
  rings: Any = {"recent_window": model.recent_window, "num_rings": num_rings} if num_rings else {}

  def create():
    return PagedKVCache.create(
      num_pages=num_pages,
      page_size=model.page_size,
      num_kv_heads=model.heads,
      head_dim=model.head_dim,
      v_head_dim=model.v_head_dim,
      k_format=k_format,
      v_format=v_format,
      k_mean=jnp.zeros((model.heads, model.head_dim), jnp.float32) if model.k_mean else None,
      **rings,
    )

  arrays = jax.tree.leaves(jax.eval_shape(create))
  return model.layers * sum(a.size * a.dtype.itemsize for a in arrays)


def plan(model: Model, budget: int, kv_len: int, k_format: str, v_format: str) -> Plan:
  """The most pages whose caches stay within `budget` bytes of a device.

  Args:
    kv_len: tokens of a sequence. On each device of the context axis it takes whole pages.
  """
  if kv_len < 1:
    raise ValueError(f"kv_len must be at least 1, got {kv_len}")
  one, two = (cache_bytes(model, n, k_format, v_format) for n in (1, 2))
  a_page, base = two - one, 2 * one - two
  window = 0 if (k_format, v_format) == WIDE else model.recent_window
  a_ring = 0
  if window:
    with_rings = [cache_bytes(model, 1, k_format, v_format, n) for n in (1, 2)]
    a_ring = with_rings[1] - with_rings[0]
  in_pages = -(-kv_len // (model.page_size * model.context))
  if window:
    in_pages = max(kv_len - window, 0) // model.page_size
  # A cache has a page at least, and with a window a ring, whether a sequence needs it or not.
  room = budget - base - (a_page if in_pages == 0 else 0)
  sequences = max(room, 0) // (in_pages * a_page + a_ring)
  rings = max(sequences, 1) if window else 0
  pages = max(budget - base - rings * a_ring, 0) // a_page
  if not pages:
    sequences = rings = 0
  used = base + pages * a_page + rings * a_ring if pages else 0
  tokens = pages * model.page_size * model.context
  in_all = tokens * model.data, sequences * model.data
  return Plan(k_format, v_format, pages, a_ring, used, tokens, sequences, *in_all)


def budget_of(memory_gib: float, weights_gib: float) -> int:
  """Bytes that a device has for caches. Raises ValueError."""
  # Comparisons that a NaN fails.
  if not 0 < memory_gib <= MAX_MEMORY_GIB:
    raise ValueError(f"memory_gib must be above 0, at most {MAX_MEMORY_GIB:.0f}, got {memory_gib}")
  if not 0 <= weights_gib < memory_gib:
    raise ValueError(
      f"weights_gib must be from 0 to below memory_gib = {memory_gib}, got {weights_gib}"
    )
  return int((memory_gib - weights_gib) * 2**30)


def formats_of(
  k_format: str | None, v_format: str | None, recent_window: int
) -> tuple[tuple[str, str], ...]:
  """The pair that is asked for, by the defaults of PagedKVCache.create; else the usual ones."""
  if k_format is None and v_format is None:
    return FORMATS
  k_format = "nvfp4" if k_format is None else k_format
  pair = k_format, k_format if v_format is None else v_format
  if pair == WIDE and recent_window:
    raise ValueError(f"recent_window must be 0 for a bf16 cache, got {recent_window}")
  return (pair,)


def lines(model: Model, budget: int, kv_len: int, formats=FORMATS) -> list[str]:
  rows = [plan(model, budget, kv_len, *pair) for pair in formats]
  several = lambda count, what: f"{count} {what}{'s' if count > 1 else ''}"
  of_model = (
    f"{model.layers} layers, {model.kv_heads} KV heads of {model.head_dim}, pages of "
    f"{model.page_size}; tensor {model.tensor}, context {model.context}, data {model.data}: "
    f"{several(model.data, 'group')} of {several(model.tensor * model.context, 'device')}"
  )
  name = lambda row: f"{row.k_format}, {row.v_format}"
  notes = []
  if ring := max(row.ring_bytes for row in rows):
    notes.append(
      f"The newest {model.recent_window} tokens of a sequence are not in pages: its ring takes "
      f"{ring / 2**20:.2f} MiB of each device of its group, none in {', '.join(WIDE)}."
    )
  if lacking := [name(row) for row in rows if not row.pages]:
    notes.append(f"No page: the smallest cache takes more ({'; '.join(lacking)}).")
  table = Table(
    title=f"{budget / 2**30:.1f} GiB a device for caches; sequences of {kv_len:,} tokens",
    head=(
      "K, V",
      "pages a device",
      "GiB",
      "tokens a group",
      "tokens in all",
      "sequences a group",
      "sequences in all",
    ),
    rows=[
      (
        name(row),
        f"{row.pages:,}",
        f"{row.cache_bytes / 2**30:.2f}",
        f"{row.group_tokens:,}",
        f"{row.tokens:,}",
        f"{row.group_sequences:,}",
        f"{row.sequences:,}",
      )
      for row in rows
    ],
    notes=notes,
  )
  return [*textwrap.wrap(of_model, WIDTH), *table.terminal()]


def main(argv: list[str]) -> int:
  parser = argparse.ArgumentParser(prog="python3 -m benchmarks plan", description=__doc__)
  add = parser.add_argument
  add("--layers", type=int, default=32)
  add("--kv-heads", type=int, default=8)
  add("--head-dim", type=int, default=128)
  add("--v-head-dim", type=int, help="where it is another than K's")
  add("--page-size", type=int, default=64, choices=PAGE_SIZES)
  add("--memory-gib", type=float, default=141.0, help="of a device")
  add("--weights-gib", type=float, default=16.0, help="of a device, and what else is not the cache")
  add("--kv-len", type=int, default=8192, help="tokens of a sequence")
  add("--k-format", choices=KV_FORMATS, help="one pair, not the usual four; default: nvfp4")
  add("--v-format", choices=KV_FORMATS, help="of that pair; default: K's")
  add("--recent-window", type=int, default=0, help="newest tokens of a sequence that stay bf16")
  add("--k-mean", action="store_true", help="keys are stored without a mean")
  for axis in ("tensor", "context", "data"):
    add(f"--{axis}", type=int, default=1, help=f"devices of the {axis} axis")
  o = parser.parse_args(argv)
  try:
    budget = budget_of(o.memory_gib, o.weights_gib)
    model = Model(
      layers=o.layers,
      kv_heads=o.kv_heads,
      head_dim=o.head_dim,
      v_head_dim=o.head_dim if o.v_head_dim is None else o.v_head_dim,
      page_size=o.page_size,
      tensor=o.tensor,
      context=o.context,
      data=o.data,
      recent_window=o.recent_window,
      k_mean=o.k_mean,
    )
    formats = formats_of(o.k_format, o.v_format, o.recent_window)
    printed = lines(model, budget, o.kv_len, formats)
  except ValueError as error:
    parser.error(str(error))
  print("\n".join(printed))
  return 0
