"""Caches in files, pages and rings on the host: bit for bit, refused by name where they differ.

A file is a safetensors file (https://github.com/huggingface/safetensors, format.md): eight bytes of
the header's length, the header in JSON, the arrays' bytes one after the other. Its `__metadata__`
says what the bytes mean: library, layout, version, and the formats of K and V; and where they are
not the usual ones, how K and V round (`k_scale_search`) and are rotated (`k_rotation`), and the
`recent_window`, whose rings are arrays of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import stat
import struct
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec, auto_axes

from nvfp4_pallas.cache import (
  KV_FORMATS,
  LAYOUT,
  LAYOUT_VERSION,
  MAX_RECENT_WINDOW,
  PagedKVCache,
  PagePool,
  RecentWindow,
  check_cache,
)
from nvfp4_pallas.explicit import in_auto_mode
from nvfp4_pallas.format import SCALE_SEARCHES
from nvfp4_pallas.rotation import ROTATIONS

LIBRARY = "nvfp4_pallas"
_DTYPES = {
  "U8": np.dtype(np.uint8),
  "F32": np.dtype(np.float32),
  "I32": np.dtype(np.int32),
  "BF16": np.dtype(ml_dtypes.bfloat16),
  "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
# Of a pool: what it is unless the file says so, and what else it may be.
_OPTIONS = {"scale_search": ("amax", SCALE_SEARCHES), "rotation": (None, ROTATIONS)}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_PAGED = ("data", "block_scale")
_LEAVES = (*_PAGED, "global_scale", "mean")


class CheckpointError(ValueError):
  """The file is not a cache that can be restored; the message names what differs."""


def save(cache: PagedKVCache, path: str | os.PathLike) -> None:
  """Writes all pages, whole or not at all: a file of this name appears when it is complete and on
  the disk. Of several that save under one name at a time, the last one's file stays.

  A file that is replaced hands its permissions on; owner and group are those of a new one. Where
  `path` is a symbolic link, the file that it leads to is replaced and the link stays. A process
  that is killed while it saves leaves a file `.<32 hexadecimal digits>.tmp` in the folder.

  Raises:
    ValueError: the cache is not as PagedKVCache says, and so could not be restored.
  """
  check_cache(cache)
  path = pathlib.Path(os.path.realpath(path))
  arrays = {name: np.asarray(array) for name, array in (_named(cache) | _rings(cache)).items()}
  header: dict[str, object] = {
    "__metadata__": {
      "library": LIBRARY,
      "layout": cache.layout,
      "version": str(cache.version),
      "k_format": cache.k.format,
      "v_format": cache.v.format,
      **_options(cache),
    }
  }
  end = 0
  for name, array in arrays.items():
    begin, end = end, end + array.nbytes
    entry = {"dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [begin, end]}
    header[name] = entry
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % 8)
  # A name of its own, since other threads may save to the same path; a short one, since a name that
  # is as long as names can be may not become longer.
  unfinished = path.with_name(f".{uuid.uuid4().hex}.tmp")
  try:
    with unfinished.open("xb") as file:
      with contextlib.suppress(FileNotFoundError):
        unfinished.chmod(stat.S_IMODE(path.stat().st_mode))
      file.write(struct.pack("<Q", len(text)) + text)
      for array in arrays.values():
        file.write(np.ascontiguousarray(array).tobytes())
      # Else the name might reach the disk before the bytes do.
      file.flush()
      os.fsync(file.fileno())
    unfinished.replace(path)
  finally:
    unfinished.unlink(missing_ok=True)


def restore(path: str | os.PathLike) -> PagedKVCache:
  """The cache that was saved, bit for bit.

  Raises:
    CheckpointError: another library's, layout's or version's file, or a truncated or damaged one.
      (Bytes of the arrays themselves have no checksum.)
  """
  raw = pathlib.Path(path).read_bytes()
  header, body = _split(raw)
  about = header.pop("__metadata__", {})
  if not isinstance(about, dict) or any(not isinstance(value, str) for value in about.values()):
    raise CheckpointError(f"the file's __metadata__ must be a table of texts, got {about!r}"[:300])
  end = _check_entries(header)
  for key, expected in (
    ("library", LIBRARY),
    ("layout", LAYOUT),
    ("version", str(LAYOUT_VERSION)),
  ):
    if about.get(key) != expected:
      raise CheckpointError(f"{key} must be {expected!r}, the file has {about.get(key)!r}")
  pools = {}
  for name in ("k", "v"):
    format = about.get(f"{name}_format")
    if format not in KV_FORMATS:
      raise CheckpointError(f"{name}_format must be one of {KV_FORMATS}, the file has {format!r}")
    leaves: Any = {leaf: _array(header, body, f"{name}.{leaf}") for leaf in _LEAVES}
    pools[name] = PagePool(**leaves, format=format, **_known_options(about, name))
    _check_leaves(pools[name], name)
  recent = _restored_rings(about, header, body)
  if header:
    raise CheckpointError(f"the file has arrays that no cache has: {sorted(header)}")
  if end != len(body):
    raise CheckpointError(f"the file must have {end} bytes of arrays, it has {len(body)}")
  cache = PagedKVCache(**pools, recent=recent)
  try:
    check_cache(cache)
  except ValueError as error:
    raise CheckpointError(f"the file's arrays do not belong together: {error}") from None
  return cache


def _rings(cache: PagedKVCache) -> dict[str, jax.Array]:
  recent = cache.recent
  if recent is None:
    return {}
  return {"recent.k": recent.k.data, "recent.v": recent.v.data, "recent.starts": recent.starts}


def _restored_rings(about: dict[str, str], header: dict, body: memoryview) -> RecentWindow | None:
  tokens = about.get("recent_window")
  if tokens is None:
    return None
  arrays: Any = {leaf: _array(header, body, f"recent.{leaf}") for leaf in ("k", "v", "starts")}
  lacking = [leaf for leaf, array in arrays.items() if array is None]
  # Python reads no integer of thousands of digits.
  number = int(tokens) if tokens.isdecimal() and len(tokens) <= len(str(MAX_RECENT_WINDOW)) else 0
  if lacking or not 1 <= number <= MAX_RECENT_WINDOW:
    raise CheckpointError(
      f"recent_window must be a number of tokens with rings, the file has {tokens[:20]!r} "
      f"and lacks {lacking}"
    )
  k, v = (PagePool(arrays[name], None, None, "bf16") for name in ("k", "v"))
  return RecentWindow(k, v, arrays["starts"], number)


def fetch_pages(cache: PagedKVCache, pages: Sequence[int]) -> dict[str, np.ndarray]:
  """Named pages on the host, in this order; restore_pages brings them back, to any place.

  Rings are no pages: what a sequence has in one stays there (fetch_rings).

  Raises:
    ValueError: a page's number is not the cache's.
  """
  check_cache(cache)
  index = _index("pages", pages, "num_pages", cache.num_pages)
  return {name: _rows(array, index) for name, array in _paged(cache).items()}


def restore_pages(
  cache: PagedKVCache, pages: Sequence[int], host: dict[str, np.ndarray]
) -> PagedKVCache:
  """The cache with fetched pages at `pages`, one after the other; all others are as they were.

  Raises:
    ValueError: a page's number is not the cache's, or stands twice; or the host's arrays are not of
      so many pages of such a cache.
  """
  check_cache(cache)
  index = _index("pages", pages, "num_pages", cache.num_pages, once=True)
  arrays = _paged(cache)
  changed = _with_rows(arrays, dict.fromkeys(arrays, index), host)
  pools = {
    name: dataclasses.replace(
      getattr(cache, name),
      **{key.partition(".")[2]: new for key, new in changed.items() if key[0] == name},
    )
    for name in ("k", "v")
  }
  return dataclasses.replace(cache, **pools)


def fetch_rings(cache: PagedKVCache, ring_ids: Sequence[int]) -> dict[str, np.ndarray]:
  """Named rings on the host, with what they know of their sequences; as fetch_pages.

  A sequence that is preempted leaves with its pages and its ring; brought back it may have others.

  Raises:
    ValueError: the cache has no recent window, or a ring's number is not its.
  """
  recent = _recent_of(cache)
  index = _index("ring_ids", ring_ids, "num_rings", recent.num_rings)
  places = _ring_places(recent, index)
  return {name: _rows(array, places[name]) for name, array in _rings(cache).items()}


def restore_rings(
  cache: PagedKVCache, ring_ids: Sequence[int], host: dict[str, np.ndarray]
) -> PagedKVCache:
  """The cache with fetched rings at `ring_ids`, one after the other; all others are as they were.

  Raises:
    ValueError: as fetch_rings; or a ring stands twice, or the host's arrays are not of so many
      rings of such a cache.
  """
  recent = _recent_of(cache)
  index = _index("ring_ids", ring_ids, "num_rings", recent.num_rings, once=True)
  changed = _with_rows(_rings(cache), _ring_places(recent, index), host)
  k, v = (
    dataclasses.replace(pool, data=changed[f"recent.{name}"])
    for name, pool in (("k", recent.k), ("v", recent.v))
  )
  recent = dataclasses.replace(recent, k=k, v=v, starts=changed["recent.starts"])
  return dataclasses.replace(cache, recent=recent)


def _recent_of(cache: PagedKVCache) -> RecentWindow:
  check_cache(cache)
  if cache.recent is None:
    raise ValueError("cache must have a recent window, this one was created without")
  return cache.recent


def _ring_places(recent: RecentWindow, index: np.ndarray) -> dict[str, np.ndarray]:
  """Where rings lie along the first axis of each of its arrays."""
  pages = index[:, None] * recent.ring_pages + np.arange(recent.ring_pages)
  return {"recent.k": pages, "recent.v": pages, "recent.starts": index}


def _rows(array: jax.Array, places: np.ndarray) -> np.ndarray:
  take: Callable = lambda array: array[places]
  sharding = getattr(array, "sharding", None)  # numpy's have none
  if isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types:
    # Found rows are not divided, what is in them as before.
    spec = PartitionSpec(*(None,) * places.ndim, *sharding.spec[1:])
    take = auto_axes(take, out_sharding=sharding.update(spec=spec))
  return np.asarray(take(array))


def _with_rows(
  arrays: dict[str, jax.Array], places: dict[str, np.ndarray], host: dict[str, np.ndarray]
) -> dict[str, jax.Array]:
  """The arrays with the host's at `places` of their first axis. Raises ValueError."""
  if set(host) != set(arrays):
    raise ValueError(f"host must have the arrays {sorted(arrays)}, got {sorted(host)}")
  for name, array in arrays.items():
    expected = (*places[name].shape, *array.shape[1:])
    if host[name].shape != expected or host[name].dtype != array.dtype:
      raise ValueError(
        f"host's {name} must be {array.dtype} {list(expected)}, got {host[name].dtype} "
        f"{list(host[name].shape)}"
      )

  def changed(name, array):
    put = lambda array, rows: array.at[places[name]].set(rows)
    return in_auto_mode(put, lambda: array, array, jnp.asarray(host[name]))

  return {name: changed(name, array) for name, array in arrays.items()}


def _options(cache: PagedKVCache) -> dict[str, str]:
  """What is not as in a cache that was created without options."""
  recent = {} if cache.recent is None else {"recent_window": str(cache.recent.tokens)}
  return recent | {
    f"{name}_{option}": value
    for name, pool in (("k", cache.k), ("v", cache.v))
    for option, (usual, _) in _OPTIONS.items()
    if (value := getattr(pool, option)) != usual
  }


def _known_options(about: dict[str, str], name: str) -> dict[str, Any]:
  options = {}
  for option, (usual, others) in _OPTIONS.items():
    value = options[option] = about.get(f"{name}_{option}", usual)
    if value not in (usual, *others):
      raise CheckpointError(f"{name}_{option} must be one of {others}, the file has {value!r}")
  return options


def _named(cache: PagedKVCache) -> dict[str, jax.Array]:
  named = {
    f"{pool}.{leaf}": getattr(getattr(cache, pool), leaf) for pool in "kv" for leaf in _LEAVES
  }
  return {name: array for name, array in named.items() if array is not None}


def _paged(cache: PagedKVCache) -> dict[str, jax.Array]:
  return {name: a for name, a in _named(cache).items() if name.partition(".")[2] in _PAGED}


def _index(name: str, ids: Sequence[int], of: str, count: int, once: bool = False) -> np.ndarray:
  """Numbers from 0 to count - 1, with `once` none of them twice. Raises ValueError."""
  index = np.asarray(ids)
  if index.size and not np.issubdtype(index.dtype, np.integer):
    raise ValueError(f"{name} must be whole numbers, got {index.dtype}")
  index = index.reshape(-1)
  wrong = index[(index < 0) | (index >= count)]
  if len(wrong):
    raise ValueError(f"{name} must be below {of} = {count}, got {wrong.tolist()}")
  index = index.astype(np.int64)
  if once and len(set(index.tolist())) != len(index):
    raise ValueError(f"{name} must not name one twice, got {index.tolist()}")
  return index


def _split(raw: bytes) -> tuple[dict, memoryview]:
  if len(raw) < 8:
    raise CheckpointError(f"the file is truncated: {len(raw)} bytes")
  (length,) = struct.unpack("<Q", raw[:8])
  if length > len(raw) - 8:
    raise CheckpointError(f"the file is truncated: a header of {length} bytes in {len(raw)}")
  try:
    header = json.loads(raw[8 : 8 + length], object_pairs_hook=_without_doubles)
  except CheckpointError:
    raise
  # ValueError: not UTF-8, not JSON, or an integer of more digits than Python reads.
  except (ValueError, RecursionError) as error:
    raise CheckpointError(f"the file's header is not JSON: {error}") from None
  if not isinstance(header, dict):
    raise CheckpointError("the file's header is not a table of arrays")
  return header, memoryview(raw)[8 + length :]


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """A table of JSON, of whose entries of one name Python would take the last."""
  table: dict[str, Any] = {}
  for name, value in pairs:
    if name in table:
      raise CheckpointError(f"the file's header must not have an entry twice, got {name!r}"[:300])
    table[name] = value
  return table


def _check_entries(header: dict[str, Any]) -> int:
  """Where the arrays end, of entries that are sound and lie one after the other."""
  whole = lambda x: isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 2**63
  spans = []
  for name, entry in header.items():
    entry: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    lists = isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2
    if not (isinstance(dtype, str) and lists and all(map(whole, shape + offsets))):
      raise CheckpointError(f"{name} must have dtype, shape and data_offsets, got {entry!r}"[:300])
    if dtype not in _DTYPES:
      raise CheckpointError(f"{name} has the dtype {dtype!r}")
    if offsets[1] - offsets[0] != math.prod(shape) * _DTYPES[dtype].itemsize:
      raise CheckpointError(f"{name} has {offsets[1] - offsets[0]} bytes for the shape {shape}")
    spans.append((*offsets, name))
  end = 0
  for begin, after, name in sorted(spans):
    if begin != end:
      raise CheckpointError(f"{name} must begin where the last array ends, at {end}, got {begin}")
    end = after
  return end


def _array(header: dict, body: memoryview, name: str) -> jax.Array | None:
  """The array of an entry that _check_entries has seen."""
  entry = header.pop(name, None)
  if entry is None:
    return None
  begin, end = entry["data_offsets"]
  if end > len(body):
    raise CheckpointError(f"the file is truncated: {name} ends at byte {end} of {len(body)}")
  return jnp.asarray(
    np.frombuffer(body[begin:end], _DTYPES[entry["dtype"]]).reshape(entry["shape"])
  )


def _check_leaves(pool: PagePool, name: str) -> None:
  """What the format needs is there, and nothing else."""
  needed = {
    "bf16": ("data",),
    "fp8": ("data", "global_scale"),
    "nvfp4": (*_PAGED, "global_scale"),
  }[pool.format]
  for leaf in _LEAVES:
    if leaf == "mean" and name == "k":
      continue  # as it likes
    if (getattr(pool, leaf) is not None) != (leaf in needed):
      what = "lacks" if leaf in needed else "must not have"
      raise CheckpointError(f"{name} in {pool.format} {what} {leaf}")
