"""append, prefill and decode over a mesh of devices: by KV heads, by sequences and by pages.

    axis        divides                     what goes between devices
    heads       KV heads and query heads    nothing
    sequences   sequences and their pages   nothing
    pages       each sequence's pages       out and lse of the rows, merged by lse; never the cache

By heads and sequences, append and decode with batch_invariant=True give the same bits as on one
device (to rounding where a cache is rotated or lacks a mean). So does the definition (`xla`) by
sequences; by heads it does for some shapes, for others to a few units in float32's last place, as
XLA orders sums by shapes. The Hopper kernels otherwise cut the keys of decode, and of prefill of
few queries, by all the work that a device has, so that results agree to rounding.

Each operation is a shard_map of the one for a single device, so that its kernel runs on every
device on what lies there: under jit, on arrays placed by NamedSharding, nothing is gathered. (What
XLA alone runs, the definition, it can also divide by heads by itself.)

Page p of a sequence lies on device p mod n of the n devices of the `pages` axis, so that all have
equally much to read at any length. Page numbers are those of a device's own pages: of num_pages
pages in all, it has num_pages / (devices of `sequences` times devices of `pages`).

    ops = nv.MeshOps(mesh, heads="tensor", sequences="data", pages="context")
    cache = ops.place(nv.PagedKVCache.create(...))  # num_pages and num_kv_heads of all devices
    batch = ops.lay_out(batches)  # a RaggedBatch of each device of `sequences`
    cache = ops.append(cache, k, v, batch)
    out, lse = ops.decode(q, cache, batch, read_path="auto")
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nvfp4_pallas import attention, debug
from nvfp4_pallas.batch import RaggedBatch, slot_mapping
from nvfp4_pallas.cache import PagedKVCache
from nvfp4_pallas.mesh_checks import Divided, check_batches, check_mesh
from nvfp4_pallas.ops.append import append
from nvfp4_pallas.ops.checks import check_cache, check_is_array, check_kv
from nvfp4_pallas.ops.decode import decode
from nvfp4_pallas.ops.prefill import prefill
from nvfp4_pallas.read_paths import AttentionSpec
from nvfp4_pallas.sharding import cache_specs, merge_over

States = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class MeshOps:
  """How a cache is divided over a mesh, and the operations on it.

  Arguments that lie elsewhere than `rows`, cache_specs, batch_specs and, of sinks,
  PartitionSpec(heads) say are moved, on axes of the type Auto; on Explicit ones, jax.make_mesh's
  default, JAX refuses them.

  Attributes:
    mesh: the devices; it may have other axes, over which everything is copied.
    heads, sequences, pages: names of its axes; None: not divided so.
  """

  mesh: Mesh
  heads: str | None = None
  sequences: str | None = None
  pages: str | None = None

  def __post_init__(self):
    check_mesh(self.mesh)
    for name in ("heads", "sequences", "pages"):
      axis = getattr(self, name)
      if axis is not None and axis not in self.mesh.shape:
        raise ValueError(f"{name} must be an axis of {tuple(self.mesh.shape)}, got {axis!r}")
    named = [axis for axis in (self.heads, self.sequences, self.pages) if axis is not None]
    if len(set(named)) < len(named):
      raise ValueError(f"heads, sequences and pages must be different axes, got {named}")

  def size(self, axis: str | None) -> int:
    """Devices along an axis; 1 for None."""
    return 1 if axis is None else self.mesh.shape[axis]

  def cache_specs(self, cache: PagedKVCache) -> PagedKVCache:
    """PartitionSpecs of the cache's arrays. ValueError: a size that an axis does not divide."""
    places = self.size(self.sequences) * self.size(self.pages)
    for name, size, devices in (
      ("num_kv_heads", cache.num_kv_heads, self.size(self.heads)),
      ("num_pages", cache.num_pages, places),
      ("num_rings", cache.recent.num_rings if cache.recent else 0, self.size(self.sequences)),
    ):
      if size % devices:
        raise ValueError(f"{name} must be a multiple of {devices} devices, got {size}")
    return cache_specs(cache, heads=self.heads, pages=self.pages, sequences=self.sequences)

  def place(self, cache: PagedKVCache) -> PagedKVCache:
    """The cache on its devices. One that is too large for any device is created under jit, with
    out_shardings of `shardings`.

    Donating it leaves the original as it was, with one exception: pages and rings that a device has
    whole already (no axis of several devices divides them, or the cache was placed before) are not
    copied, as that would take twice their memory. Then the original ends with the placed one.
    """
    check_cache(cache)
    # device_put shares what a device has whole, whatever its may_alias says. Pages have four axes.
    cache = jax.tree.map(lambda a: a if a.ndim == 4 else jnp.copy(a), cache)
    return jax.device_put(cache, self.shardings(cache))

  def shardings(self, cache: PagedKVCache) -> PagedKVCache:
    """NamedShardings of the cache's arrays; of abstract ones too."""
    return jax.tree.map(functools.partial(NamedSharding, self.mesh), self.cache_specs(cache))

  def lay_out(self, batches: Sequence[RaggedBatch]) -> RaggedBatch:
    """The batches of all devices of `sequences` as the operations here take them.

    Args:
      batches: equally shaped; entry (s, p) of a page_table is the number that page p of sequence s
        has on its device of `pages`, device p mod n.

    Returns:
      Their arrays one after the other, and the columns of page_table device by device.
    """
    check_batches(batches, self.size(self.sequences))
    devices = self.size(self.pages)

    def by_device(table):
      table = jnp.asarray(table)
      table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % devices)))
      dealt = table.reshape(table.shape[0], -1, devices)
      return jnp.swapaxes(dealt, 1, 2).reshape(table.shape)

    dealt = [dataclasses.replace(b, page_table=by_device(b.page_table)) for b in batches]
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *dealt)

  def batch_specs(self, batch: RaggedBatch) -> RaggedBatch:
    """PartitionSpecs of a laid out batch's arrays."""
    by_sequence = PartitionSpec(self.sequences)
    return dataclasses.replace(
      jax.tree.map(lambda _: by_sequence, batch),
      page_table=PartitionSpec(self.sequences, self.pages),
    )

  @property
  def rows(self) -> PartitionSpec:
    """Of q, k and v, and of out and lse."""
    return PartitionSpec(self.sequences, self.heads)

  def append(
    self, cache: PagedKVCache, k: jax.Array, v: jax.Array, batch: RaggedBatch, **options: Any
  ) -> PagedKVCache:
    """nv.append: each device writes what lies in its own pages.

    Args:
      cache: as `place` returns it; donate it under jit.
      k, v: [rows, num_kv_heads, dim]: the rows of each device of `sequences`, equally many, one
        after the other; padding at the end of each.
      batch: of `lay_out`.
      options: implementation, as in nv.append.
    """
    check_cache(cache)
    specs = self.cache_specs(cache)
    check_kv(k, v, cache)
    batch = self._divided(k.shape[0], appends=True).checked(cache, batch)

    def on_device(cache, k, v, batch):
      if self.pages is None:
        return append(cache, k, v, _with_ring_ids(cache, batch), **options)
      slots = slot_mapping(self._own_columns(batch), cache.page_size, k.shape[0])
      return append(cache, k, v, slot_mapping=slots, **options)

    rows = self.rows
    return self._map(on_device, (specs, rows, rows, self.batch_specs(batch)), specs)(
      cache, k, v, batch
    )

  def decode(
    self,
    q: jax.Array,
    cache: PagedKVCache,
    batch: RaggedBatch,
    *,
    sinks: jax.Array | None = None,
    window: int | None = None,
    **options: Any,
  ) -> States:
    """nv.decode.

    Args:
      q: [num_seqs, num_q_heads, head_dim], sequence by sequence of the laid out batch.
      cache, batch: as in `append`.
      window: None over a `pages` axis, whose devices know no positions.
      options: as in nv.decode.
    """
    self._check_window(window)
    self._check_queries(q, cache, sinks)
    attends = _spec(window, options)
    checks = self._divided(q.shape[0], attends=attends, one_token_each=True)
    batch = checks.checked(cache, batch)

    def on_device(q, cache, batch, sinks):
      how = {"window": window, **options}
      if self.pages is None:
        return decode(q, cache, batch, sinks=sinks, **how)
      own = dataclasses.replace(batch, kv_lens=self._own_tokens(batch.kv_lens, cache.page_size))
      # float32 out of the same numbers, so that merging rounds nothing twice.
      state = decode(q.astype(jnp.float32), cache, own, **how)
      return self._joined(q, state, None, sinks)

    return self._attend(on_device, q, cache, batch, sinks)

  def prefill(
    self,
    q: jax.Array,
    cache: PagedKVCache,
    batch: RaggedBatch,
    *,
    new_kv: States | None = None,
    sinks: jax.Array | None = None,
    window: int | None = None,
    **options: Any,
  ) -> States:
    """nv.prefill. Over a `pages` axis with new_kv only, and before `append`: each device attends to
    what it has of the keys before this step, and to the step itself.

    Args:
      q: [rows, num_q_heads, head_dim], rows as those of k in `append`.
      cache, batch, window: as in `decode`.
      new_kv: (k, v) as in `append`.
      options: as in nv.prefill.
    """
    self._check_window(window)
    if self.pages is not None and (new_kv is None or not options.get("causal", True)):
      raise ValueError(
        f"new_kv must be given, and causal be True, over the axis {self.pages!r} of pages: what a "
        "row sees of stored keys would depend on positions"
      )
    self._check_queries(q, cache, sinks)
    if new_kv is not None:
      if not isinstance(new_kv, tuple | list) or len(new_kv) != 2:
        count = f" of {len(new_kv)}" if isinstance(new_kv, tuple | list) else ""
        raise ValueError(f"new_kv must be a pair (k, v), got {type(new_kv).__name__}{count}")
      check_kv(*new_kv, cache, prefix="new_kv's ")
      if len(new_kv[0]) != len(q):
        raise ValueError(f"new_kv must have q's {len(q)} tokens, got {len(new_kv[0])}")
    checks = self._divided(len(q), appends=new_kv is not None, attends=_spec(window, options))
    batch = checks.checked(cache, batch)

    def on_device(q, cache, batch, sinks, *new_kv):
      how = {"window": window, "new_kv": new_kv or None, **options}
      if self.pages is None:
        return prefill(q, cache, batch, sinks=sinks, **how)
      wide = q.astype(jnp.float32)
      before = jnp.maximum(batch.kv_lens - batch.q_lens, 0)
      own = dataclasses.replace(batch, kv_lens=self._own_tokens(before, cache.page_size))
      past = prefill(wide, cache, own, **how | {"new_kv": None, "causal": False})
      step = dataclasses.replace(batch, kv_lens=batch.q_lens)
      return self._joined(q, past, prefill(wide, cache, step, **how), sinks)

    return self._attend(on_device, q, cache, batch, sinks, *(new_kv or ()))

  def _attend(self, on_device, q, cache, batch, sinks, *new_kv) -> States:
    rows, heads = self.rows, PartitionSpec(self.heads)
    specs = (rows, self.cache_specs(cache), self.batch_specs(batch))
    specs += (None if sinks is None else heads, *(rows for _ in new_kv))
    return self._map(on_device, specs, (rows, rows))(q, cache, batch, sinks, *new_kv)

  def _map(self, on_device, in_specs, out_specs):
    def unchecked(*arguments):
      with debug.without_checks():  # which were of the whole
        return on_device(*arguments)

    # pallas_call says nothing of how its results vary over a mesh.
    return jax.shard_map(
      unchecked, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )

  def _divided(self, rows: int, **what) -> Divided:
    return Divided(self.mesh, self.size(self.sequences), self.size(self.pages), rows, **what)

  def _check_queries(self, q: jax.Array, cache: PagedKVCache, sinks) -> None:
    """What must hold for q and sinks to be divided; the rest each device checks."""
    check_cache(cache)
    check_is_array("q", q)
    if q.ndim != 3:
      raise ValueError(f"q must be [tokens, num_q_heads, head_dim], got {q.shape}")
    if q.shape[1] % cache.num_kv_heads:
      raise ValueError(
        f"num_q_heads must be a multiple of num_kv_heads {cache.num_kv_heads}, got {q.shape[1]}"
      )
    if sinks is not None:
      check_is_array("sinks", sinks)
      if sinks.shape != (q.shape[1],):
        raise ValueError(f"sinks must be of shape ({q.shape[1]},), got {sinks.shape}")

  def _check_window(self, window: int | None) -> None:
    if window is not None and self.pages is not None:
      raise ValueError(f"window must be None over the axis {self.pages!r} of pages, got {window}")

  def _own_tokens(self, lens: jax.Array, page_size: int) -> jax.Array:
    """How many of each sequence's first `lens` tokens lie in this device's pages."""
    devices, device = self.size(self.pages), lax.axis_index(self.pages)
    pages = lens // page_size
    own_pages = (pages + devices - 1 - device) // devices
    return own_pages * page_size + jnp.where(pages % devices == device, lens % page_size, 0)

  def _own_columns(self, batch: RaggedBatch) -> RaggedBatch:
    """The batch with a page table of all pages, -1 for those of other devices."""
    devices, device = self.size(self.pages), lax.axis_index(self.pages)
    page = jnp.arange(batch.max_pages * devices, dtype=jnp.int32)
    table = jnp.where(page % devices == device, batch.page_table[:, page // devices], -1)
    return dataclasses.replace(batch, page_table=table)

  def _joined(self, q: jax.Array, state: States, other: States | None, sinks) -> States:
    """The states of all devices of `pages`, one more that all of them have, and sinks."""
    assert self.pages is not None
    out, lse = merge_over(self.pages, *state)
    if other is not None:
      out, lse = attention.merge_two((out, lse), other)
    out, lse = attention.add_sinks((out, lse), sinks)
    return out.astype(q.dtype), lse


def _with_ring_ids(cache: PagedKVCache, batch: RaggedBatch) -> RaggedBatch:
  """The batch with ring_ids said where the cache has rings.

  Rings that are written without are a slice; where that is all of them, the slice's empty index is
  a constant that nothing uses, at which XLA of jax 0.11.2 ends the process, inside shard_map.
  """
  if cache.recent is None or batch.ring_ids is not None:
    return batch
  return dataclasses.replace(batch, ring_ids=jnp.arange(batch.num_seqs, dtype=jnp.int32))


def _spec(window: int | None, options: dict[str, Any]) -> AttentionSpec:
  """As far as it says which pages are read."""
  return AttentionSpec(options.get("read_path", "auto"), causal=True, sm_scale=1.0, window=window)
