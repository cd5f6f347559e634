"""Real attention inputs to test on: three layers of SmolLM2-135M-Instruct on 256 tokens of text.

Gaussian inputs have no outlier channels, no attention sink and no peaked softmax; a format that
looks good on them alone has not been tried. `benchmarks.make_fixture` says how these were made.
"""

import dataclasses
import hashlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

_DATA = pathlib.Path(__file__).parent / "data"
FIXTURE_PATH = _DATA / "smollm2_activations.npz"
PASSAGE_PATH = _DATA / "passage.txt"


@dataclasses.dataclass(frozen=True)
class Provenance:
  """What the activations were computed from."""

  wheel: str
  gguf_sha256: str
  passage_sha256: str


@dataclasses.dataclass(frozen=True, eq=False)
class Activations:
  """One layer's attention inputs, bf16, rotary positions 0..T-1 already applied to q and k.

  q is [T, num_q_heads, head_dim]; k and v are [T, num_kv_heads, head_dim]. The attention is
  causal, scaled by head_dim**-0.5, and query head h reads key/value head
  h // (num_q_heads // num_kv_heads). token_ids is [T] int32.
  """

  layer: int
  q: jax.Array
  k: jax.Array
  v: jax.Array
  token_ids: np.ndarray
  provenance: Provenance


def read_passage() -> str:
  return PASSAGE_PATH.read_text(encoding="utf-8")


def passage_sha256() -> str:
  """Hash of the text, not of the file: the same where a checkout changes line endings."""
  return hashlib.sha256(read_passage().encode()).hexdigest()


def save(layers: list[Activations], path: pathlib.Path = FIXTURE_PATH) -> None:
  """Writes layers of one run. npz has no bf16, so q, k and v are stored as uint16 bit patterns."""

  def bits(name: str) -> np.ndarray:
    return np.stack([np.asarray(getattr(a, name)).view(np.uint16) for a in layers])

  np.savez_compressed(
    path,
    layers=np.array([a.layer for a in layers], np.int32),
    q=bits("q"),
    k=bits("k"),
    v=bits("v"),
    token_ids=layers[0].token_ids,
    **dataclasses.asdict(layers[0].provenance),
  )


def load(path: pathlib.Path = FIXTURE_PATH) -> list[Activations]:
  """Reads the committed activations, ordered by layer."""
  with np.load(path) as file:
    stored = dict(file)
  provenance = Provenance(**{f.name: str(stored[f.name]) for f in dataclasses.fields(Provenance)})
  q, k, v = (jnp.asarray(stored[name].view(jnp.bfloat16)) for name in "qkv")
  return [
    Activations(int(layer), q[i], k[i], v[i], stored["token_ids"], provenance)
    for i, layer in enumerate(stored["layers"])
  ]
