"""Attention of one layer in a serving step: what takes the place of a model's KV cache.

A step's rows belong to chunks of prompts first, padding after them, then one to each decoding
sequence; either part may be missing.

    part      new tokens of a sequence    read by
    chunks    any number                  prefill
    decodes   one, the newest             decode

`newest` says how a chunk reads its own tokens:

    stored    append, then prefill: everything as the cache keeps it, so that neither where a prompt
              was cut nor what of it was cached before changes what a row reads
    wide      prefill, then append: what came before from the cache, the chunk itself as bfloat16

With a recent window it is `wide` unless asked for otherwise: appending a chunk pushes out of the
window what its first rows should still find there. A decoding row reads everything from the cache,
where a window keeps its own token wide.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nvfp4_pallas.batch import RaggedBatch, check_batch, token_places
from nvfp4_pallas.cache import PagedKVCache
from nvfp4_pallas.debug import check_positions
from nvfp4_pallas.ops.append import append
from nvfp4_pallas.ops.checks import FLOAT_DTYPES, check_cache, check_is_array
from nvfp4_pallas.ops.decode import decode
from nvfp4_pallas.ops.prefill import prefill
from nvfp4_pallas.policy import MAX_WORKSPACE_BYTES

NEWEST = ("wide", "stored")


def attend(
  cache: PagedKVCache,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  chunks: RaggedBatch | None = None,
  decodes: RaggedBatch | None = None,
  newest: str | None = None,
  read_path: str = "auto",
  decode_read_path: str | None = None,
  implementation: str | None = None,
  sm_scale: float | None = None,
  window: int | None = None,
  soft_cap: float | None = None,
  sinks: jax.Array | None = None,
  q_levels: int = 2,
  batch_invariant: bool = False,
  max_workspace_bytes: int = MAX_WORKSPACE_BYTES,
) -> tuple[PagedKVCache, jax.Array]:
  """Puts a step's keys and values into the cache and attends to it, in the order that is right.

  Args:
    cache: of this layer; donate it under jit, then no copy of it is made.
    q: bfloat16, float16 or float32 [rows, num_q_heads, head_dim], rotary embedding applied.
    k, v: such rows [rows, num_kv_heads, head_dim] of the same tokens.
    chunks: whose the first rows are; kv_lens count them already. Rows from its cu_q_lens[-1] on, up
      to those of `decodes`, are padding.
    decodes: whose the last num_seqs rows are, as of RaggedBatch.for_decode. Its sequences (and
      their rings) are others than those of `chunks`.
    newest: `stored` or `wide`, for chunks; None is `wide` with a recent window, else `stored`.
    read_path: the numerics, of chunks and, unless `decode_read_path` is given, of decodes.
    implementation, sm_scale, window, soft_cap, sinks, q_levels: as in `prefill` and `decode`.
    batch_invariant: as in `decode`.
    max_workspace_bytes: as in `prefill`.

  Returns:
    The cache with the rows written, and out [rows, num_q_heads, v_head_dim] in q's dtype. Padding
    and free places have out 0.

  Raises:
    ValueError: an argument breaks a rule (message: argument, rule, value).
    NotImplementedError: the named implementation cannot run (message: why).
  """
  _check_is_cache(cache)
  places = _check_parts(q, k, v, chunks, decodes)
  if newest is None:
    newest = "stored" if cache.recent is None else "wide"
  if newest not in NEWEST:
    raise ValueError(f"newest must be one of {NEWEST}, got {newest!r}")
  first = lambda x: x[: x.shape[0] - places] if places else x
  last = lambda x: x[x.shape[0] - places :] if chunks is not None else x
  who: dict[str, Any] = {"implementation": implementation}
  how = who | {
    "sm_scale": sm_scale,
    "window": window,
    "soft_cap": soft_cap,
    "sinks": sinks,
    "q_levels": q_levels,
  }

  def read_chunks(cache, batch, **new_kv):
    options = how | new_kv | {"read_path": read_path, "max_workspace_bytes": max_workspace_bytes}
    return prefill(first(q), cache, batch, **options)[0]

  out = []
  if chunks is not None and newest == "wide":
    read = read_chunks(cache, chunks, new_kv=(first(k), first(v)))
    # So that append waits: XLA would copy the cache rather than order its reader and its writer.
    cache, read = lax.optimization_barrier((cache, read))
    out.append(read)
  if chunks is not None:
    cache = append(cache, first(k), first(v), chunks, **who)
  if decodes is not None:
    cache = append(cache, last(k), last(v), decodes, **who)
  if chunks is not None and newest == "stored":
    out.append(read_chunks(cache, chunks))
  if decodes is not None:
    path = read_path if decode_read_path is None else decode_read_path
    options = how | {"read_path": path, "batch_invariant": batch_invariant}
    out.append(decode(last(q), cache, decodes, **options)[0])
  return cache, out[0] if len(out) == 1 else jnp.concatenate(out)


def _check_is_cache(cache: PagedKVCache) -> None:
  if not isinstance(cache, PagedKVCache):
    raise ValueError(f"cache must be a PagedKVCache, got {type(cache).__name__}")


def _check_parts(
  q: jax.Array, k: jax.Array, v: jax.Array, chunks: RaggedBatch | None, decodes: RaggedBatch | None
) -> int:
  """How many of the rows, the last, are those of decodes."""
  for name, x in (("q", q), ("k", k), ("v", v)):
    check_is_array(name, x)
    if x.ndim != 3 or x.shape[0] != q.shape[0]:
      raise ValueError(
        f"{name} must be [rows, heads, dim] of q's rows, got {x.shape} and {q.shape}"
      )
  return _places("q", q.shape[0], chunks, decodes)


def _places(name: str, rows: int, chunks: RaggedBatch | None, decodes: RaggedBatch | None) -> int:
  """_check_parts of the parts alone."""
  if chunks is None and decodes is None:
    raise ValueError("chunks or decodes must be given, got neither")
  for part, batch in (("chunks", chunks), ("decodes", decodes)):
    if batch is not None and not isinstance(batch, RaggedBatch):
      raise ValueError(f"{part} must be a RaggedBatch, got {type(batch).__name__}")
  if decodes is None:
    return 0
  places = decodes.num_seqs
  if places > rows or (chunks is None and places != rows):
    rule = "at least" if chunks is not None else "exactly"
    raise ValueError(f"{name} must have {rule} a row for each of {places} decodes, got {rows}")
  return places


def row_positions(
  rows: int, *, chunks: RaggedBatch | None = None, decodes: RaggedBatch | None = None
) -> jax.Array:
  """int32 [rows]: where the rows of `attend` stand in their sequences; -1 for padding."""
  places = 0 if decodes is None else decodes.num_seqs
  parts = [(chunks, rows - places), (decodes, places)]
  found = []
  for batch, count in parts:
    if batch is not None:
      _, position, real = token_places(batch, count)
      found.append(jnp.where(real, position, -1))
  return jnp.concatenate(found)


def rope_table(
  head_dim: int, length: int, *, base: float = 10_000.0
) -> tuple[jax.Array, jax.Array]:
  """cos and sin of the angles of positions 0 .. length - 1: float32 [length, head_dim / 2].

  From float64 on the host, so that the angles are the same numbers on every device. A model that
  scales its frequencies brings a table of its own.
  """
  if head_dim < 2 or head_dim % 2:
    raise ValueError(f"head_dim must be even and at least 2, got {head_dim}")
  if length < 1:
    raise ValueError(f"length must be at least 1, got {length}")
  frequency = base ** (-np.arange(0, head_dim, 2) / head_dim)
  angle = np.arange(length)[:, None] * frequency
  return jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["q_proj", "k_proj", "v_proj", "o_proj"],
  meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class LlamaAttention:
  """The attention of a Llama-type layer over a paged cache: a pytree of its weights, and a call.

      cache, y = attention(cache, x, rope, chunks=batch)

  Grouped queries, rotary positions (channel i with channel i + head_dim / 2), no biases. Whatever
  else a model does to q, k or v, it does itself and calls `attend`.

  Attributes:
    q_proj: [hidden, num_q_heads * head_dim]; matrices are [inputs, outputs], the transposes of
      what checkpoints of Hugging Face have.
    k_proj: [hidden, num_kv_heads * head_dim].
    v_proj: [hidden, num_kv_heads * v_head_dim].
    o_proj: [num_q_heads * v_head_dim, hidden].
  """

  q_proj: jax.Array
  k_proj: jax.Array
  v_proj: jax.Array
  o_proj: jax.Array

  def __call__(
    self,
    cache: PagedKVCache,
    x: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    *,
    chunks: RaggedBatch | None = None,
    decodes: RaggedBatch | None = None,
    **options: Any,
  ) -> tuple[PagedKVCache, jax.Array]:
    """One step.

    Args:
      cache: of this layer; donate it under jit. Head counts and dims are the cache's.
      x: bfloat16, float16 or float32 [rows, hidden], normalised already; in bfloat16 all kernels
        take its rows.
      rope: cos and sin of every position there may be, as of `rope_table`. Inside jit a position
        past its end takes the last one's angles, unless `debug_checks` is on.
      chunks, decodes, options: as in `attend`.

    Returns:
      The cache with the step's rows written, and y [rows, hidden] in x's dtype, before the
      residual sum.

    Raises:
      ValueError, NotImplementedError: as `attend`; or kv_lens go past the end of rope.
    """
    self._check(cache, x, rope)
    self._check_positions(cache, x, rope, chunks, decodes)
    product = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    heads = lambda w, dim: product(x, w).reshape(x.shape[0], -1, dim)
    position = row_positions(x.shape[0], chunks=chunks, decodes=decodes)
    angles = tuple(table.at[position].get(mode="clip") for table in rope)
    q, k = (rotate(heads(w, cache.k.head_dim), *angles) for w in (self.q_proj, self.k_proj))
    v = heads(self.v_proj, cache.v.head_dim)
    rows = (y.astype(x.dtype) for y in (q, k, v))
    cache, out = attend(cache, *rows, chunks=chunks, decodes=decodes, **options)
    return cache, product(out.reshape(x.shape[0], -1), self.o_proj).astype(x.dtype)

  @staticmethod
  def _check_positions(cache, x, rope, chunks, decodes) -> None:
    """Every row must have angles of its own: the batches as `attend` checks them, and their end."""
    rows = x.shape[0]
    places = _places("x", rows, chunks, decodes)
    for name, batch, count in (("chunks", chunks, rows - places), ("decodes", decodes, places)):
      if batch is not None:
        check_batch(batch, num_tokens=count, page_size=cache.page_size, appends=True)
        check_positions(name, batch, rope[0].shape[0])

  def _check(self, cache: PagedKVCache, x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> None:
    _check_is_cache(cache)
    check_cache(cache)
    check_is_array("x", x)
    if x.ndim != 2 or x.dtype not in FLOAT_DTYPES:
      raise ValueError(
        f"x must be bfloat16, float16 or float32 [rows, hidden], got {x.dtype} {x.shape}"
      )
    hidden, k_dim, v_dim = x.shape[1], cache.k.head_dim, cache.v.head_dim
    q_heads = self.q_proj.shape[-1] // k_dim
    expected = {
      "q_proj": (hidden, q_heads * k_dim),
      "k_proj": (hidden, cache.num_kv_heads * k_dim),
      "v_proj": (hidden, cache.num_kv_heads * v_dim),
      "o_proj": (q_heads * v_dim, hidden),
    }
    for name, shape in expected.items():
      weight = getattr(self, name)
      if weight.shape != shape or weight.dtype != x.dtype:
        raise ValueError(
          f"{name} must be {x.dtype} {shape} for {cache.num_kv_heads} KV heads of {k_dim} and "
          f"{v_dim}, got {weight.dtype} {weight.shape}"
        )
    several = isinstance(rope, (tuple, list))
    if not several or len(rope) != 2:
      got = f"{len(rope)} of them" if several else type(rope).__name__
      raise ValueError(f"rope must be a pair of cos and sin, got {got}")
    for name, table in zip(("cos", "sin"), rope, strict=True):
      check_is_array(f"rope's {name}", table)
      if table.ndim != 2 or table.shape[1] != k_dim // 2 or table.dtype != jnp.float32:
        raise ValueError(
          f"rope's {name} must be float32 [positions, {k_dim // 2}], got {table.dtype} "
          f"{table.shape}"
        )
    lengths = tuple(len(table) for table in rope)
    if lengths[0] != lengths[1] or not lengths[0]:
      raise ValueError(f"rope's cos and sin must be equally long, 1 or more, got {lengths}")


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
  """Rotary positions. x: float32 [rows, heads, head_dim]; cos, sin: [rows, head_dim / 2]."""
  cos, sin = cos[:, None], sin[:, None]
  one, two = jnp.split(x, 2, axis=-1)
  return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1)
