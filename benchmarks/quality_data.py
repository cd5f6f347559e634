"""What the quality benchmark measures on: distributions of values, and patterns of attention.

Values stand for the shapes that K and V have been seen to take. Attention patterns say what a row
looks for: `gauss` averages over all keys, where errors of K and V average too; `peaky` and `needle`
have K with biased channels that rotary embedding turns slowly, and queries with 4 or 1 dominant
keys, made for the purpose; `sink` gives most of its weight to a first token with hardly any value.
TINY is `gauss` with small keys and values and large queries: with a global scale of 1 all of it
becomes zero. These are stress, never a model's quality. Everything comes from fixed seeds.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from benchmarks import activations

OUTLIER_CHANNELS = (5, 37, 70, 101)
DISTRIBUTIONS = (
  "gauss",
  "uniform",
  "laplace",
  "student-t4",
  "outliers x10",
  "biased +10",
  "tiny 2^-20",
  "huge 2^20",
)
PATTERNS = ("gauss", "peaky", "needle", "sink")
TINY = "gauss x 2^-12"
QUERIES = 64
CALIBRATION_TOKENS = 64  # of a text; what comes after is judged


def values(name: str, rows: int, head_dim: int = 128) -> np.ndarray:
  """float32 [rows, head_dim] of a distribution."""
  same_as_gauss = name in ("tiny 2^-20", "huge 2^20")
  rng = np.random.default_rng(0 if same_as_gauss else DISTRIBUTIONS.index(name))
  shape = rows, head_dim
  if name == "uniform":
    return rng.uniform(-1, 1, shape).astype(np.float32)
  if name == "laplace":
    return rng.laplace(size=shape).astype(np.float32)
  if name == "student-t4":
    return rng.standard_t(4, shape).astype(np.float32)
  x = rng.standard_normal(shape, np.float32)
  if name == "outliers x10":
    x[:, OUTLIER_CHANNELS] *= 10
  if name == "biased +10":
    x[:, OUTLIER_CHANNELS] += 10
  return x * np.float32({"tiny 2^-20": 2.0**-20, "huge 2^20": 2.0**20}.get(name, 1.0))


@dataclasses.dataclass(frozen=True, eq=False)
class Inputs:
  """Wide inputs of one sequence, float32.

  Attributes:
    name: of the data.
    q: [rows, num_q_heads, head_dim].
    k, v: [tokens, num_kv_heads, head_dim].
    causal: the rows are the newest tokens and see what is not after them; else they see all keys.
    first_judged: rows before it are not judged.
    sample: other k and v of the same kind, to calibrate on.
    sample_name: what they are.
  """

  name: str
  q: np.ndarray
  k: np.ndarray
  v: np.ndarray
  causal: bool
  first_judged: int
  sample: tuple[np.ndarray, np.ndarray]
  sample_name: str


def pattern(name: str, tokens: int, head_dim: int = 128, *, causal: bool = False) -> Inputs:
  """QUERIES rows of one head over `tokens` keys of one head; name: of PATTERNS, or TINY."""
  if name == TINY:
    return _tiny(pattern("gauss", tokens, head_dim, causal=causal))
  rng = np.random.default_rng([PATTERNS.index(name), tokens, head_dim])
  k, v = _keys(name, tokens, head_dim, rng)
  q = _queries(name, k, rng)
  if name == "sink":
    v[0] *= 0.05
  sample_k, sample_v = _keys(name, tokens, head_dim, np.random.default_rng([99, tokens, head_dim]))
  return Inputs(
    f"{name}, causal" if causal else name,
    q[:, None],
    k[:, None],
    v[:, None],
    causal,
    first_judged=0,
    sample=(sample_k[:, None], sample_v[:, None]),
    sample_name=f"another {name}",
  )


def _tiny(inputs: Inputs) -> Inputs:
  """The same scores from keys and values by a power of two smaller."""
  small = np.float32(2.0**-12)
  return dataclasses.replace(
    inputs,
    name=TINY,
    q=inputs.q / small,
    k=inputs.k * small,
    v=inputs.v * small,
    sample=(inputs.sample[0] * small, inputs.sample[1] * small),
  )


def _keys(name: str, tokens: int, head_dim: int, rng) -> tuple[np.ndarray, np.ndarray]:
  k, v = rng.standard_normal((2, tokens, head_dim), np.float32)
  if name in ("gauss", "sink"):
    return k, v
  k[:, _slow_channels(head_dim)] += np.array([9, -7, 8, -6], np.float32)
  k = _rotate(k, np.arange(tokens))
  k[0] *= 0.3
  v[0] *= 0.05
  return k, v


def _queries(name: str, k: np.ndarray, rng) -> np.ndarray:
  tokens, head_dim = k.shape
  noise = rng.standard_normal((QUERIES, head_dim), np.float32)
  if name == "gauss":
    return noise
  if name == "sink":  # the weight of token 0 is about that of all others together
    score = (np.log(tokens) + 0.5) * np.sqrt(head_dim)
    return noise + score / np.sum(k[0] ** 2) * k[0]
  dominant, margin = {"peaky": (4, 2.0), "needle": (1, 6.0)}[name]
  score = (np.log(tokens) + margin) * np.sqrt(head_dim)
  centred = k - k.mean(axis=0)
  q = 0.6 * noise
  for row in q:
    targets = rng.choice(np.arange(1, tokens), dominant, replace=False)
    # The shortest q that has this score, over the mean, with all of its targets.
    row += score * (np.linalg.pinv(centred[targets]) @ np.ones(dominant, np.float32))
  q[:, _slow_channels(head_dim)] += 1.0  # where K is biased Q has outliers too
  return q


def _slow_channels(head_dim: int) -> list[int]:
  """Channels that rotary embedding turns slowly, so that a bias of K stays visible."""
  return [head_dim // 2 - 3, head_dim // 2 - 8, head_dim - 3, head_dim - 12]


def _rotate(x: np.ndarray, positions: np.ndarray, base: float = 1e4) -> np.ndarray:
  """Rotary embedding, channel i with channel i + head_dim / 2."""
  head_dim = x.shape[-1]
  angle = positions[:, None] * base ** (-np.arange(0, head_dim, 2) / head_dim)
  cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
  a, b = np.split(x, 2, axis=-1)
  return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def captured() -> list[Inputs]:
  """Layers of a model on text (data/README.md), every token a row."""

  def of_layer(layer: activations.Activations) -> Inputs:
    q, k, v = (np.asarray(x).astype(np.float32) for x in (layer.q, layer.k, layer.v))
    return Inputs(
      f"SmolLM2 layer {layer.layer}",
      q,
      k,
      v,
      causal=True,
      first_judged=CALIBRATION_TOKENS,
      sample=(k[:CALIBRATION_TOKENS], v[:CALIBRATION_TOKENS]),
      sample_name="its beginning, before what is judged",
    )

  return [of_layer(layer) for layer in activations.load()]
