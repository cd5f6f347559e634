"""A Llama-style decoder for serving: one step over paged caches, of prompts and of decodes at once.

The rows of a step are those of chunks of prompts first, padding after them, then one of every
decoding place. All rows go through the same matrices, and in each layer through nv.attend, which
appends them and reads chunks by `prefill`, decodes by `decode`. Layers are a Python loop and not a
scan, so that every cache is appended to in place (kernels/in_place.py says why). Matrices, and what
goes into them, are of the weights' type; norms and sums between layers are float32.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import nvfp4_pallas as nv
from benchmarks import llama
from benchmarks.serve_formats import Format
from benchmarks.serve_model import Model

Ints = Any  # int32 arrays: NumPy's on the host, JAX's inside a step


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
  """Weights of a block; matrices are [inputs, outputs]."""

  attn_norm: jax.Array
  w_qkv: jax.Array
  w_out: jax.Array
  ffn_norm: jax.Array
  w_gate_up: jax.Array
  w_down: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Weights:
  """Of a model. `output` is [hidden, vocab]."""

  embedding: jax.Array
  layers: tuple[Layer, ...]
  norm: jax.Array
  output: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class StepRows:
  """A step as arrays; their shapes are its bucket, and all values are data.

  Attributes:
    tokens, positions: int32 [rows].
    chunk_pages, chunk_lens, chunk_starts: page_table, kv_lens and cu_q_lens of the chunks, whose
      rows are the first; of no sequences in a step without any.
    decode_pages, decode_lens: int32 [places, max_pages] and [places], of the last rows; a length
      of 0 is a free place.
    written: int32 [written], the rows whose next tokens are wanted.
  """

  tokens: Ints
  positions: Ints
  chunk_pages: Ints
  chunk_lens: Ints
  chunk_starts: Ints
  decode_pages: Ints
  decode_lens: Ints
  written: Ints


@dataclasses.dataclass(frozen=True)
class Reading:
  """How caches are read: static.

  Attributes:
    prefill_path, decode_path: read paths.
    implementation: None lets the device choose.
    attends: False leaves attention and append out, to time the rest.
  """

  prefill_path: str
  decode_path: str
  implementation: str | None = None
  attends: bool = True


def reading(format: Format, implementation: str | None = None) -> Reading:
  # Of several paths the last: nvfp4_repack widens ahead where that pays, and else as it goes.
  return Reading(format.prefill_paths[-1], format.decode_path, implementation)


def make_caches(
  format: Format, model: Model, num_pages: int, page_size: int
) -> tuple[nv.PagedKVCache, ...]:
  """Empty ones, of every layer."""
  create = functools.partial(
    nv.PagedKVCache.create,
    num_pages=num_pages,
    page_size=page_size,
    num_kv_heads=model.num_kv_heads,
    head_dim=model.head_dim,
    k_format=format.k_format,
    v_format=format.v_format,
  )
  return tuple(create() for _ in range(model.layers))


def random_weights(model: Model, dtype: Any, seed: int = 0) -> Weights:
  """Gaussian, as large as keeps the size of what goes through them. A dense model's."""
  keys = iter(jax.random.split(jax.random.key(seed), 2 + 4 * model.layers))

  def matrix(*shape: int) -> jax.Array:
    return _gaussian(next(keys), shape, dtype)

  heads = (model.num_q_heads + 2 * model.num_kv_heads) * model.head_dim
  ones = jnp.ones((model.hidden,), jnp.float32)
  layers = tuple(
    Layer(
      attn_norm=ones,
      w_qkv=matrix(model.hidden, heads),
      w_out=matrix(model.num_q_heads * model.head_dim, model.hidden),
      ffn_norm=ones,
      w_gate_up=matrix(model.hidden, 2 * model.ffn),
      w_down=matrix(model.ffn, model.hidden),
    )
    for _ in range(model.layers)
  )
  return Weights(matrix(model.vocab, model.hidden), layers, ones, matrix(model.hidden, model.vocab))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _gaussian(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
  return (shape[0] ** -0.5 * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def weights_of(model: llama.Model, dtype: Any) -> Weights:
  """Of a model that was read from a file."""
  cast = lambda x: jnp.asarray(x, dtype)
  join = lambda *parts: cast(jnp.concatenate(parts, axis=1))

  def layer(index: int) -> Layer:
    w = jax.tree.map(lambda a: a[index], model.layers)
    return Layer(
      attn_norm=w.attn_norm,
      w_qkv=join(w.wq, w.wk, w.wv),
      w_out=cast(w.wo),
      ffn_norm=w.ffn_norm,
      w_gate_up=join(w.w_gate, w.w_up),
      w_down=cast(w.w_down),
    )

  output = model.embedding if model.output is None else model.output
  layers = tuple(layer(i) for i in range(model.num_layers))
  return Weights(cast(model.embedding), layers, model.norm, cast(output.T))


def geometry_of(model: llama.Model) -> Model:
  config, layers = model.config, model.layers
  return Model(
    layers=model.num_layers,
    hidden=model.embedding.shape[1],
    num_q_heads=config.num_q_heads,
    num_kv_heads=config.num_kv_heads,
    head_dim=config.head_dim,
    ffn=layers.w_down.shape[1],
    vocab=model.embedding.shape[0],
    tied=model.output is None,
  )


def config_of(model: Model) -> llama.Config:
  """Of random weights, with Llama 3's constants."""
  return llama.Config(model.num_q_heads, model.num_kv_heads, model.head_dim, 5e5, 1e-5)


def step(
  weights: Weights,
  caches: tuple[nv.PagedKVCache, ...],
  rope: tuple[jax.Array, jax.Array],
  rows: StepRows,
  *,
  config: llama.Config,
  how: Reading,
) -> tuple[jax.Array, jax.Array, tuple[nv.PagedKVCache, ...]]:
  """Computes a step.

  Args:
    caches: of every layer; donate them.
    rope: of llama.rope_table, long enough for every position.

  Returns:
    the likeliest next token int32 [written] and its logit float32 [written], and the caches.
  """
  dtype = weights.embedding.dtype
  angles = tuple(table[rows.positions] for table in rope)
  x = weights.embedding[rows.tokens].astype(jnp.float32)
  written = []
  # Accelerators otherwise multiply float32 matrices in fewer bits.
  with jax.default_matmul_precision("float32" if dtype == jnp.float32 else "default"):
    for w, cache in zip(weights.layers, caches, strict=True):
      x, cache = _block(x, cache, w, angles, rows, config=config, how=how)
      written.append(cache)
    h = llama.rms_norm(x[rows.written], weights.norm, config.rms_eps).astype(dtype)
    logits = _product(h, weights.output)
  return jnp.argmax(logits, axis=1).astype(jnp.int32), jnp.max(logits, axis=1), tuple(written)


_product = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)


# Jitted, so that it is traced once for all layers.
@functools.partial(jax.jit, static_argnames=("config", "how"))
def _block(
  x: jax.Array,
  cache: nv.PagedKVCache,
  w: Layer,
  angles: tuple[jax.Array, jax.Array],
  rows: StepRows,
  *,
  config: llama.Config,
  how: Reading,
) -> tuple[jax.Array, nv.PagedKVCache]:
  dtype = w.w_qkv.dtype
  h = llama.rms_norm(x, w.attn_norm, config.rms_eps).astype(dtype)
  q, k, v = _heads(_product(h, w.w_qkv), config)
  q, k = (llama.rotate(y, *angles) for y in (q, k))
  out, cache = _attention(cache, *(y.astype(jnp.bfloat16) for y in (q, k, v)), rows, how)
  x += _product(out.reshape(x.shape[0], -1).astype(dtype), w.w_out)
  h = llama.rms_norm(x, w.ffn_norm, config.rms_eps).astype(dtype)
  gate, up = jnp.split(_product(h, w.w_gate_up), 2, axis=1)
  return x + _product((jax.nn.silu(gate) * up).astype(dtype), w.w_down), cache


def _heads(qkv: jax.Array, config: llama.Config) -> tuple[jax.Array, jax.Array, jax.Array]:
  heads = qkv.reshape(qkv.shape[0], -1, config.head_dim)
  ends = np.cumsum([config.num_q_heads, config.num_kv_heads])
  q, k, v = jnp.split(heads, ends, axis=1)
  return q, k, v


def _attention(cache: nv.PagedKVCache, q, k, v, rows: StepRows, how: Reading):
  if not how.attends:
    return jax.lax.optimization_barrier((q, k, v))[0], cache  # K and V are computed all the same
  chunks = None
  if q.shape[0] > rows.decode_lens.shape[0]:
    chunks = nv.RaggedBatch(rows.chunk_pages, rows.chunk_lens, rows.chunk_starts)
  cache, out = nv.attend(
    cache,
    q,
    k,
    v,
    chunks=chunks,
    decodes=nv.RaggedBatch.for_decode(rows.decode_pages, rows.decode_lens),
    read_path=how.prefill_path,
    decode_read_path=how.decode_path,
    implementation=how.implementation,
  )
  return out, cache
