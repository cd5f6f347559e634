"""Which tokens belong to which sequence, and where their keys and values lie."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["page_table", "kv_lens", "cu_q_lens", "ring_ids"],
  meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class RaggedBatch:
  """One step of a ragged batch. All values are data: other lengths or pages never retrace.

  Attributes:
    page_table: int32 [num_seqs, max_pages]; entry (s, p) holds tokens
      p * page_size .. (p + 1) * page_size - 1 of sequence s. Entries past a sequence's last page
      may hold anything.
    kv_lens: int32 [num_seqs], tokens of each sequence, those of this step included; 0 is a free
      place in the batch.
    cu_q_lens: int32 [num_seqs + 1], ascending from 0: the tokens of this step of sequence s are
      rows cu_q_lens[s] .. cu_q_lens[s + 1] - 1 of q, k and v. They are the newest of their
      sequence. Rows from cu_q_lens[-1] on are padding and belong to nobody.
    ring_ids: int32 [num_seqs], of a cache with a recent window: the ring of each sequence, no two
      alike. One that is no ring's number: all of that sequence is in the pages. None: sequence s
      has ring s.
  """

  page_table: jax.Array
  kv_lens: jax.Array
  cu_q_lens: jax.Array
  ring_ids: jax.Array | None = None

  @property
  def num_seqs(self) -> int:
    return self.page_table.shape[0]

  @property
  def max_pages(self) -> int:
    return self.page_table.shape[1]

  @property
  def q_lens(self) -> jax.Array:
    return self.cu_q_lens[1:] - self.cu_q_lens[:-1]

  @classmethod
  def for_decode(
    cls, page_table: jax.Array, kv_lens: jax.Array, ring_ids: jax.Array | None = None
  ) -> RaggedBatch:
    """One query token a sequence: row s of q belongs to sequence s."""
    rows = jnp.arange(page_table.shape[0] + 1, dtype=jnp.int32)
    return cls(page_table, kv_lens, rows, ring_ids)


def token_places(batch: RaggedBatch, num_tokens: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """(sequence, position in it, whether the row is real), each [num_tokens]."""
  row = jnp.arange(num_tokens, dtype=jnp.int32)
  # A binary search is a loop, each round of which a GPU would start anew.
  after = jnp.searchsorted(batch.cu_q_lens, row, side="right", method="compare_all")
  after = after.astype(jnp.int32)
  seq = jnp.clip(after - 1, 0, max(batch.num_seqs - 1, 0))
  newest = batch.kv_lens[seq] - batch.cu_q_lens[seq + 1]
  return seq, newest + row, row < batch.cu_q_lens[-1]


def slot_mapping(batch: RaggedBatch, page_size: int, num_tokens: int) -> jax.Array:
  """int32 [num_tokens]: page * page_size + offset of each row of this step; -1 for padding.

  A row whose position is negative (q_len > kv_len) or past the page table also gets -1.
  """
  if batch.num_seqs == 0 or batch.max_pages == 0:
    return jnp.full((num_tokens,), -1, jnp.int32)
  batch = jax.tree.map(jnp.asarray, batch)
  seq, position, real = token_places(batch, num_tokens)
  index = position // page_size
  page = batch.page_table.at[seq, index].get(mode="fill", fill_value=-1)
  # A page number whose slots do not fit into int32 is past every pool.
  real &= (position >= 0) & (page >= 0) & (page < (2**31 - 1) // page_size)
  return jnp.where(real, page * page_size + position % page_size, -1)


def check_batch(
  batch: RaggedBatch, *, num_tokens: int, page_size: int, appends: bool = False
) -> None:
  """Raises ValueError where shapes, dtypes or, where they are known, values break a rule.

  With `appends`, kv_lens must count the step's new rows, but for a free place's one row, which goes
  nowhere; attention allows more queries than keys.
  """
  if batch.page_table.ndim != 2:
    raise ValueError(f"page_table must be [num_seqs, max_pages], got {batch.page_table.shape}")
  for name, expected in (("kv_lens", batch.num_seqs), ("cu_q_lens", batch.num_seqs + 1)):
    shape = getattr(batch, name).shape
    if shape != (expected,):
      raise ValueError(f"{name} must have shape ({expected},), got {shape}")
  for name in ("page_table", "kv_lens", "cu_q_lens"):
    dtype = getattr(batch, name).dtype
    if dtype != jnp.int32:
      raise ValueError(f"{name} must be int32, got {dtype}")
  if batch.ring_ids is not None:
    _check_ring_ids(batch.ring_ids, batch.num_seqs)
  lens_known, cu_known = (not isinstance(a, Tracer) for a in (batch.kv_lens, batch.cu_q_lens))
  if cu_known:
    _check_cu_q_lens(np.asarray(batch.cu_q_lens), num_tokens)
  if lens_known:
    _check_kv_lens(np.asarray(batch.kv_lens), batch.max_pages, page_size)
  if appends and lens_known and cu_known:
    _check_counted(np.asarray(batch.kv_lens), np.diff(np.asarray(batch.cu_q_lens)))


def check_one_token_each(batch: RaggedBatch) -> None:
  """Raises ValueError where cu_q_lens are known and not those of RaggedBatch.for_decode."""
  if isinstance(batch.cu_q_lens, Tracer):
    return
  cu_q_lens = np.asarray(batch.cu_q_lens)
  wrong = cu_q_lens != np.arange(batch.num_seqs + 1)
  if wrong.any():
    s = int(np.argmax(wrong))
    raise ValueError(f"cu_q_lens must be 0..{batch.num_seqs} for decode, got {cu_q_lens[s]} at {s}")


def _check_ring_ids(ring_ids, num_seqs: int) -> None:
  if ring_ids.shape != (num_seqs,) or ring_ids.dtype != jnp.int32:
    raise ValueError(f"ring_ids must be int32 [{num_seqs}], got {ring_ids.dtype} {ring_ids.shape}")


def _check_cu_q_lens(cu_q_lens: np.ndarray, num_tokens: int) -> None:
  if cu_q_lens[0] != 0:
    raise ValueError(f"cu_q_lens must start at 0, got {cu_q_lens[0]}")
  q_lens = np.diff(cu_q_lens)
  if (q_lens < 0).any():
    s = int(np.argmax(q_lens < 0))
    raise ValueError(
      f"cu_q_lens must ascend, got {cu_q_lens[s]} then {cu_q_lens[s + 1]} at {s} and {s + 1}"
    )
  if cu_q_lens[-1] > num_tokens:
    raise ValueError(f"cu_q_lens must end at most at {num_tokens} tokens, got {cu_q_lens[-1]}")


def _check_kv_lens(kv_lens: np.ndarray, max_pages: int, page_size: int) -> None:
  if (kv_lens < 0).any():
    s = int(np.argmax(kv_lens < 0))
    raise ValueError(f"kv_lens must not be negative, got {kv_lens[s]} at {s}")
  room = max_pages * page_size
  if (kv_lens > room).any():
    s = int(np.argmax(kv_lens > room))
    raise ValueError(
      f"page_table must be wide enough for kv_lens: {max_pages} pages of {page_size} hold "
      f"{room} tokens, kv_lens[{s}] is {kv_lens[s]}"
    )


def _check_counted(kv_lens: np.ndarray, q_lens: np.ndarray) -> None:
  # A place of 0 tokens with one row is free, as a batch for decode has them; with more rows it is
  # a prompt that somebody forgot to count.
  free = (kv_lens == 0) & (q_lens == 1)
  missing = (q_lens > kv_lens) & ~free
  if missing.any():
    s = int(np.argmax(missing))
    raise ValueError(
      "kv_lens must count this step's tokens, "
      f"kv_lens[{s}] is {kv_lens[s]} for {q_lens[s]} new rows"
    )
