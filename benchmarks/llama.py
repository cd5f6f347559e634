"""A Llama in plain JAX, with the attention passed in as a function.

RMSNorm, rotary positions, grouped-query attention, SwiGLU. It exists to produce real attention
inputs, and to measure what a KV cache costs in logits: `forward` runs some tokens at given
positions, hands each layer's q, k and v to the caller's attention together with that layer's state
(its cache), and scans over layers whose weights and states lie on a leading axis, so that all of
them are one compiled loop. All arithmetic is float32; rounding is the attention's own business,
because it is what is being measured.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# (state of the layer, q [T, q_heads, d], k [T, kv_heads, d], v like k), float32
# -> (out like q, state).
Attention = Callable[[Any, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


@dataclasses.dataclass(frozen=True)
class Config:
  """What the weights do not say by their shapes. Query head h reads KV head h // group."""

  num_q_heads: int
  num_kv_heads: int
  head_dim: int
  rope_base: float
  rms_eps: float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Layers:
  """Weights of all blocks, float32, stacked on axis 0. Matrices are [inputs, outputs]: `x @ w`."""

  attn_norm: jax.Array
  wq: jax.Array
  wk: jax.Array
  wv: jax.Array
  wo: jax.Array
  ffn_norm: jax.Array
  w_gate: jax.Array
  w_up: jax.Array
  w_down: jax.Array


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["embedding", "layers", "norm", "output"],
  meta_fields=["config"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Model:
  """A pytree: pass it to jitted functions.

  Attributes:
    config: static.
    embedding: float32 [vocab, hidden].
    layers: the blocks.
    norm: float32 [hidden], the last one.
    output: float32 [vocab, hidden]; None: the embedding, tied.
  """

  config: Config
  embedding: jax.Array
  layers: Layers
  norm: jax.Array
  output: jax.Array | None = None

  @property
  def num_layers(self) -> int:
    return self.layers.attn_norm.shape[0]


def rope_table(config: Config, length: int) -> tuple[jax.Array, jax.Array]:
  """cos and sin of positions 0 .. length - 1, float32 [length, d / 2].

  From float64 on the host: the angles are then the same numbers on every device.
  """
  frequency = config.rope_base ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
  angle = np.arange(length)[:, None] * frequency
  return jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
  """Rotates channel i with channel i + d/2. x: [T, heads, d]; cos, sin: [T, d/2]."""
  cos, sin = cos[:, None], sin[:, None]
  x1, x2 = jnp.split(x, 2, axis=-1)
  return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
  return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight[None]


def forward(
  model: Model,
  tokens: jax.Array,
  positions: jax.Array,
  rope: tuple[jax.Array, jax.Array],
  states: Any,
  attention: Attention,
) -> tuple[jax.Array, Any]:
  """Some tokens through all layers.

  Args:
    model: the weights.
    tokens, positions: int32 [T]; rows may belong to several sequences, which is the attention's
      business.
    rope: of `rope_table`, long enough for every position.
    states: a pytree whose leaves have a leading layer axis, or None.
    attention: called once per trace, inside a scan.

  Returns:
    hidden states float32 [T, hidden], ready for `logits`, and the new states.
  """
  config = model.config
  cos, sin = (table[positions] for table in rope)

  def heads(y: jax.Array) -> jax.Array:
    return y.reshape(y.shape[0], -1, config.head_dim)

  def block(x, layer_and_state):
    w, state = layer_and_state
    h = rms_norm(x, w.attn_norm, config.rms_eps)
    q, k = (rotate(heads(h @ m), cos, sin) for m in (w.wq, w.wk))
    out, state = attention(state, q, k, heads(h @ w.wv))
    x = x + out.astype(x.dtype).reshape(x.shape[0], -1) @ w.wo
    h = rms_norm(x, w.ffn_norm, config.rms_eps)
    return x + (jax.nn.silu(h @ w.w_gate) * (h @ w.w_up)) @ w.w_down, state

  # Accelerators otherwise multiply float32 matrices in fewer bits.
  with jax.default_matmul_precision("float32"):
    x, states = lax.scan(block, model.embedding[tokens], (model.layers, states))
    return rms_norm(x, model.norm, config.rms_eps), states


def logits(model: Model, hidden: jax.Array) -> jax.Array:
  """hidden [T, hidden] f32 -> [T, vocab] f32. Pass rows in pieces: vocabularies are large."""
  output = model.embedding if model.output is None else model.output
  with jax.default_matmul_precision("float32"):
    return hidden @ output.T


def dense_causal_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
  """softmax(q k^T / sqrt(d)) v of one sequence from position 0, in float32, any input dtype."""
  tokens, num_q_heads, head_dim = q.shape
  num_kv_heads = k.shape[1]
  q, k, v = (y.astype(jnp.float32) for y in (q, k, v))
  q = q.reshape(tokens, num_kv_heads, num_q_heads // num_kv_heads, head_dim)
  scores = jnp.einsum("qngd,knd->ngqk", q, k) / np.sqrt(head_dim).astype(np.float32)
  causal = jnp.tril(jnp.ones((1, 1, tokens, tokens), bool))
  weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
  return jnp.einsum("ngqk,knd->qngd", weights, v).reshape(tokens, num_q_heads, -1)


def _dense(state, q, k, v):
  return dense_causal_attention(q, k, v), state


def _run_dense(model, tokens, attention) -> tuple[jax.Array, Any]:
  """One sequence from position 0, without a cache."""

  @jax.jit
  def run(model, tokens):
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    rope = rope_table(model.config, tokens.shape[0])
    return forward(model, tokens, positions, rope, None, attention)

  return run(model, jnp.asarray(tokens, jnp.int32))


def hidden_states(model: Model, tokens: np.ndarray, attention: Attention = _dense) -> jax.Array:
  """One sequence, tokens [T], from position 0, without a cache: [T, hidden] f32 for `logits`."""
  return _run_dense(model, tokens, attention)[0]


def capture_attention_inputs(
  model: Model, tokens: np.ndarray
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """q, k and v [layers, T, heads, d] of one sequence, rounded to bf16 as a cache would store them.

  The model itself runs on the unrounded values. Rounding inside it would turn each last-bit
  difference of a float32 sum into a bf16 step, and after a few layers two machines would agree on
  half of the values only.
  """

  def attention(_, q, k, v):
    return dense_causal_attention(q, k, v), tuple(x.astype(jnp.bfloat16) for x in (q, k, v))

  return _run_dense(model, tokens, attention)[1]
