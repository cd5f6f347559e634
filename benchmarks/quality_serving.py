"""A Llama served from paged caches of a config, step by step, by the library's own operations.

A `Server` holds a batch of equally long sequences on permuted pages. Each step is one compiled
function for its number of tokens: all layers are one scan over stacked weights and caches.

Two ways to treat the tokens of a step make different qualities (`newest`):
    wide    prefill with new_kv, then append: the step's own tokens are attended to in BF16, and so
            are, with a recent window, those that still are in the ring
    stored  append, then prefill or decode: everything is read from the cache, the newest token too
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import nvfp4_pallas as nv
from benchmarks import llama
from benchmarks.quality_configs import QualityConfig, calibrated, make_cache
from nvfp4_pallas.ops import decode as decode_op
from nvfp4_pallas.ops import prefill as prefill_op
from nvfp4_pallas.ops.request import attention_request
from nvfp4_pallas.read_paths import AttentionSpec

NEWEST = ("wide", "stored")


@dataclasses.dataclass(frozen=True)
class Step:
  """What a compiled step is made for, beside shapes: static."""

  read_path: str
  q_levels: int
  newest: str
  implementation: str | None


@functools.partial(jax.jit, static_argnames="step", donate_argnames="cache")
def run_step(
  model: llama.Model,
  cache: nv.PagedKVCache,
  rope: tuple[jax.Array, jax.Array],
  page_table: jax.Array,
  tokens: jax.Array,
  start: jax.Array,
  *,
  step: Step,
) -> tuple[jax.Array, nv.PagedKVCache]:
  """The next tokens of every sequence.

  Args:
    cache: every leaf with a leading layer axis; donated.
    page_table: int32 [num_seqs, max_pages].
    tokens: int32 [num_seqs, n], positions start .. start + n - 1.

  Returns:
    hidden states float32 [num_seqs, n, hidden], and the cache.
  """
  num_seqs, n = tokens.shape
  kv_lens = jnp.full((num_seqs,), start + n, jnp.int32)
  batch = nv.RaggedBatch(page_table, kv_lens, jnp.arange(num_seqs + 1, dtype=jnp.int32) * n)
  options = {
    "read_path": step.read_path,
    "q_levels": step.q_levels,
    "implementation": step.implementation,
  }

  def attention(cache, q, k, v):
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    if step.newest == "wide":
      out, _ = nv.prefill(q, cache, batch, new_kv=(k, v), **options)
      return out, nv.append(cache, k, v, batch, implementation=step.implementation)
    cache = nv.append(cache, k, v, batch, implementation=step.implementation)
    out, _ = (nv.decode if n == 1 else nv.prefill)(q, cache, batch, **options)
    return out, cache

  positions = jnp.tile(start + jnp.arange(n, dtype=jnp.int32), num_seqs)
  hidden, cache = llama.forward(model, tokens.reshape(-1), positions, rope, cache, attention)
  return hidden.reshape(num_seqs, n, -1), cache


def stacked_caches(
  config: QualityConfig,
  model: llama.Model,
  num_pages: int,
  num_seqs: int,
  calibration: Mapping[str, jax.Array],
) -> nv.PagedKVCache:
  """Empty caches of all layers. calibration: of `calibrate`, of no entry where none is needed."""

  def of_layer(index: int) -> nv.PagedKVCache:
    return make_cache(
      config,
      num_pages=num_pages,
      num_kv_heads=model.config.num_kv_heads,
      head_dim=model.config.head_dim,
      num_rings=num_seqs,
      **{name: of_layers[index] for name, of_layers in calibration.items()},
    )

  layers = [of_layer(i) for i in range(model.num_layers)]
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


@dataclasses.dataclass(eq=False)
class Server:
  """A model, a config, and room for `num_seqs` sequences of `context` tokens.

  Attributes:
    implementation: who runs the operations; None: dispatch's choice, which `who` says.
    calibration: of `calibrate`, for configs that need it.
    cache: of all layers; replaced by every step.
  """

  model: llama.Model
  config: QualityConfig
  num_seqs: int
  context: int
  implementation: str | None
  calibration: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    pages = -(-self.context // self.config.page_size)
    order = np.random.default_rng(0).permutation(self.num_seqs * pages)
    self.page_table = jnp.asarray(order.reshape(self.num_seqs, pages), jnp.int32)
    self.rope = llama.rope_table(self.model.config, self.context)
    self.reset()

  def reset(self) -> None:
    """Forgets all sequences."""
    arguments = (self.model, self.page_table.size, self.num_seqs, self.calibration)
    self.cache = stacked_caches(self.config, *arguments)
    self.length = 0

  def advance(self, tokens: jax.Array | np.ndarray, newest: str) -> jax.Array:
    """The next tokens [num_seqs, n] in one step: hidden states [num_seqs, n, hidden]."""
    if self.length + tokens.shape[1] > self.context:
      raise ValueError(
        f"tokens must fit into context {self.context}, got {tokens.shape[1]} after {self.length}"
      )
    step = Step(self.config.read_path, self.config.q_levels, newest, self.implementation)
    hidden, self.cache = run_step(
      self.model,
      self.cache,
      self.rope,
      self.page_table,
      jnp.asarray(tokens, jnp.int32),
      jnp.int32(self.length),
      step=step,
    )
    self.length += tokens.shape[1]
    return hidden

  def prefill(self, tokens: np.ndarray, chunk: int, newest: str) -> jax.Array:
    """tokens [num_seqs, n] in chunks, after what there is: hidden states [num_seqs, n, hidden]."""
    starts = range(0, tokens.shape[1], chunk)
    return join([self.advance(tokens[:, s : s + chunk], newest) for s in starts])

  def who(self, n: int, newest: str) -> str:
    """The implementation of the attention of a step of n tokens."""
    config = self.config
    q_shape = (self.num_seqs * n, self.model.config.num_q_heads, self.model.config.head_dim)
    q: Any = jax.ShapeDtypeStruct(q_shape, jnp.bfloat16)  # only its shape and type are asked for
    request = attention_request(
      q,
      jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), self.cache),
      AttentionSpec(config.read_path, causal=True, sm_scale=1.0, q_levels=config.q_levels),
      new_kv=newest == "wide",
      num_seqs=self.num_seqs,
      max_pages=self.page_table.shape[1],
    )
    by_decode = newest == "stored" and n == 1
    resolve = decode_op.resolve_decode if by_decode else prefill_op.resolve_prefill
    return resolve(request, self.implementation).implementation


def join(parts: list[jax.Array]) -> jax.Array:
  """Concatenates on axis 1, some at a time: compiling it for a thousand takes longer than a run."""
  while len(parts) > 1:
    some = range(0, len(parts), 32)
    parts = [jnp.concatenate(parts[i : i + 32], axis=1) for i in some]
  return parts[0]


def calibrate(config: QualityConfig, k: jax.Array, v: jax.Array) -> dict[str, jax.Array]:
  """What make_cache must be told for each layer, with a leading layer axis.

  k, v: bfloat16 [layers, tokens, kv_heads, head_dim] of some text, as append would get them.
  """
  layers = [calibrated(config, *of_layer) for of_layer in zip(k, v, strict=True)]
  return {name: jnp.stack([layer[name] for layer in layers]) for name in layers[0]}
