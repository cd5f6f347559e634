"""The rules of MeshOps' arguments, tried on the arrays of all devices before they are divided.

Inside shard_map values are not known, and a device that ended with an error there would leave the
others waiting for it in the next reduction, until the runtime ends the process. So under
debug_checks each device tries the whole batch, and all end alike, before the lengths that all else
follows from. (Collectives of the caller's own that do not wait for results of MeshOps may still
begin on some devices only: debug those apart.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nvfp4_pallas import debug, recent
from nvfp4_pallas.batch import RaggedBatch, check_batch, check_one_token_each
from nvfp4_pallas.cache import PagedKVCache
from nvfp4_pallas.read_paths import AttentionSpec


@dataclasses.dataclass(frozen=True)
class Divided:
  """What an operation is called for.

  Attributes:
    sequences, pages: devices of these axes.
    rows: of q, k or v, of all devices.
    appends: whether kv_lens must count this step's rows.
    attends: None of an append.
    one_token_each: whether it is a decode.
  """

  mesh: Mesh
  sequences: int
  pages: int
  rows: int
  appends: bool = False
  attends: AttentionSpec | None = None
  one_token_each: bool = False

  def checked(self, cache: PagedKVCache, batch: RaggedBatch) -> RaggedBatch:
    """The batch, which under debug_checks waits for its checks.

    Raises:
      ValueError: a shape or, where it is known, a value breaks a rule of RaggedBatch.
    """
    self._check_sizes(batch)
    small = _small_arrays(cache), batch
    small = jax.tree.map(lambda a: np.asarray(a) if _is_known(a) else a, small)
    self._check_rules(cache, *small)
    if not debug.is_on():
      return batch
    if all(isinstance(a, np.ndarray) for a in jax.tree.leaves(small)):
      self._debug(cache, *small)
      return batch
    return self._on_every_device(cache, small[0], batch)

  def _check_rules(self, cache: PagedKVCache, small, batch) -> None:
    """The rules of shapes, and of the values that are known.

    Of the others shapes alone are cut into parts: on Explicit axes JAX cuts no array along an axis
    that is divided.
    """
    leaves, tree = jax.tree.flatten((small, batch))
    shape = lambda a: None if isinstance(a, np.ndarray) else jax.ShapeDtypeStruct(a.shape, a.dtype)

    def check(unknown):
      of_leaf = [a if of is None else of for a, of in zip(leaves, unknown, strict=True)]
      for own, part in self._parts(cache, *tree.unflatten(of_leaf)):
        check_batch(
          part, num_tokens=self._own_rows, page_size=cache.page_size, appends=self.appends
        )
        if self.one_token_each:
          check_one_token_each(part)
        recent.check_rings(own.recent, part)

    jax.eval_shape(check, list(map(shape, leaves)))

  @property
  def _own_rows(self) -> int:
    return self.rows // self.sequences

  def _check_sizes(self, batch: RaggedBatch) -> None:
    if not isinstance(batch, RaggedBatch):
      raise ValueError(f"batch must be a RaggedBatch, got {type(batch).__name__}")
    if batch.page_table.ndim != 2:
      raise ValueError(f"page_table must be [num_seqs, max_pages], got {batch.page_table.shape}")
    sizes = [("rows of q, k and v", self.rows), ("num_seqs", batch.num_seqs)]
    arrays = {"kv_lens": batch.kv_lens, "cu_q_lens": batch.cu_q_lens, "ring_ids": batch.ring_ids}
    for name, array in arrays.items():
      if array is not None and array.ndim != 1:
        raise ValueError(f"{name} must have one axis, got {array.shape}")
      sizes += [] if array is None else [(f"entries of {name}", len(array))]
    for name, size in sizes:
      if size % self.sequences:
        raise ValueError(f"{name} must be a multiple of {self.sequences} devices, got {size}")
    if batch.max_pages % self.pages:
      raise ValueError(
        f"max_pages must be a multiple of {self.pages} devices, got {batch.max_pages}: lay_out pads"
      )

  def _parts(self, cache, small, batch) -> Iterator[tuple[PagedKVCache, RaggedBatch]]:
    """Of each device of `sequences`: its cache without the bytes, and its batch, pages in order."""
    table = batch.page_table.reshape(batch.num_seqs, self.pages, -1)
    table = table.swapaxes(1, 2).reshape(batch.page_table.shape)
    batch = dataclasses.replace(batch, page_table=table)
    for device in range(self.sequences):

      def own(array, device=device):
        size = len(array) // self.sequences
        return array[device * size : (device + 1) * size]

      yield self._own_cache(cache, small, own), jax.tree.map(own, batch)

  def _own_cache(self, cache: PagedKVCache, small, own) -> PagedKVCache:
    def pool(pool, arrays):
      shape = (pool.num_pages // (self.sequences * self.pages), *pool.data.shape[1:])
      data = jax.ShapeDtypeStruct(shape, pool.data.dtype)
      return dataclasses.replace(pool, data=data, **arrays)

    window = cache.recent
    if window is not None:
      window = dataclasses.replace(window, starts=own(small["starts"]))
    return dataclasses.replace(
      cache, k=pool(cache.k, small["k"]), v=pool(cache.v, small["v"]), recent=window
    )

  def _debug(self, cache: PagedKVCache, small, batch) -> None:
    """The checks of debug.py, on numpy arrays."""
    with debug.debug_checks():
      for own, part in self._parts(cache, small, batch):
        recent.check_rings(own.recent, part)
        if self.attends is not None:
          debug.check_attention(
            own,
            part,
            self.attends,
            self._own_rows,
            new_kv=self.appends,
            one_token_each=self.one_token_each,
          )
          continue
        check_batch(part, num_tokens=self._own_rows, page_size=own.page_size, appends=True)
        for slots in self._slots(part, own.page_size):
          debug.check_append(own, part, slots, self._own_rows)

  def _slots(self, part: RaggedBatch, page_size: int) -> Iterator[np.ndarray]:
    """Of each device of `pages`, the slots of all rows; -1 for what lies elsewhere."""
    q_lens = np.diff(part.cu_q_lens)
    seq = np.repeat(np.arange(part.num_seqs), q_lens)
    position = np.arange(len(seq)) + (part.kv_lens - part.cu_q_lens[1:])[seq]
    page = position // page_size
    number = part.page_table[seq, page].astype(np.int64)
    slots = np.where(number < 0, -1, number * page_size + position % page_size)
    for device in range(self.pages):
      yield np.where(page % self.pages == device, slots, -1)

  def _on_every_device(self, cache: PagedKVCache, small, batch: RaggedBatch) -> RaggedBatch:
    def on_host(small, batch):
      self._debug(cache, *jax.tree.map(np.asarray, (small, batch)))
      return np.int32(0)

    def on_device(small, batch):
      result = jax.ShapeDtypeStruct((), np.int32)
      return jax.pure_callback(on_host, result, small, batch, vmap_method="sequential")

    whole = PartitionSpec()
    # On Auto axes shard_map itself makes them whole.
    arguments = jax.reshard((lax.stop_gradient(small), batch), NamedSharding(self.mesh, whole))
    done = jax.shard_map(
      on_device, mesh=self.mesh, in_specs=(whole, whole), out_specs=whole, check_vma=False
    )(*arguments)
    return dataclasses.replace(batch, kv_lens=batch.kv_lens + done)


def check_mesh(mesh) -> None:
  if not isinstance(mesh, Mesh):
    raise ValueError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")


def check_batches(batches, count: int) -> None:
  """`count` batches that are equally shaped."""
  if not isinstance(batches, tuple | list):
    raise ValueError(
      f"batches must be a list of a RaggedBatch for each device, got {type(batches).__name__}"
    )
  for batch in batches:
    if not isinstance(batch, RaggedBatch):
      raise ValueError(f"batches must be of RaggedBatch, got {type(batch).__name__}")
  if len(batches) != count:
    raise ValueError(f"batches must be {count}, got {len(batches)}")
  shapes = [[a.shape for a in jax.tree.leaves(batch)] for batch in batches]
  if any(shape != shapes[0] for shape in shapes):
    raise ValueError(f"batches must be equally shaped, got {shapes}")


def _small_arrays(cache: PagedKVCache) -> dict:
  pool = lambda pool: {"global_scale": pool.global_scale, "mean": pool.mean}
  starts = None if cache.recent is None else cache.recent.starts
  return {"k": pool(cache.k), "v": pool(cache.v), "starts": starts}


def _is_known(array) -> bool:
  """Outside jit, and not in part on another process' devices."""
  return not isinstance(array, Tracer) and getattr(array, "is_fully_addressable", True)
