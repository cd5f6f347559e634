"""A Llama from a Hugging Face folder: config.json and *.safetensors, read without their packages.

A safetensors file is eight bytes (the length n of a header, little-endian), n bytes of JSON that
say for each tensor its dtype, shape and place, and the data.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from benchmarks.llama import Config, Layers, Model

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(np.uint16)}
NAMES = {
  "attn_norm": "input_layernorm",
  "wq": "self_attn.q_proj",
  "wk": "self_attn.k_proj",
  "wv": "self_attn.v_proj",
  "wo": "self_attn.o_proj",
  "ffn_norm": "post_attention_layernorm",
  "w_gate": "mlp.gate_proj",
  "w_up": "mlp.up_proj",
  "w_down": "mlp.down_proj",
}
# What a config may say beside the sizes; anything else computes something that this code does not.
REQUIRED = {
  "model_type": ("llama",),
  "hidden_act": ("silu", None),
  "rope_scaling": (None,),
  "attention_bias": (False, None),
  "mlp_bias": (False, None),
}


def read_json(text: bytes, name: str) -> dict:
  """The object of a file called `name`. Raises ValueError where it is none."""
  try:
    found = json.loads(text)
  except ValueError as error:
    raise ValueError(f"{name} must be JSON, got {text[:40]!r}: {error}") from error
  if not isinstance(found, dict):
    raise ValueError(f"{name} must be a JSON object, got {text[:40]!r}")
  return found


def required(mapping: Mapping, key: str, name: str):
  """mapping[key]. Raises ValueError where `name`, which it is of, lacks it."""
  if key not in mapping:
    raise ValueError(f"{name} must have {key!r}, which is missing")
  return mapping[key]


def read_safetensors(path: pathlib.Path) -> dict[str, np.ndarray]:
  """All tensors of a file as float32. Raises ValueError where it is none of these, or its dtype."""
  size = path.stat().st_size
  raw = np.memmap(path, np.uint8, mode="r") if size else np.zeros(0, np.uint8)
  length = int(raw[:8].view("<u8")[0]) if size >= 8 else 0
  if not 2 <= length <= size - 8:
    raise ValueError(f"{path.name} must begin with its header's length, got {length} of {size=}")
  header = read_json(raw[8 : 8 + length].tobytes(), f"the header of {path.name}")
  header.pop("__metadata__", None)
  tensors = {}
  for name, about in header.items():
    if about["dtype"] not in DTYPES:
      raise ValueError(
        f"{path.name}: dtype of {name!r} must be one of {tuple(DTYPES)}, got {about['dtype']!r}"
      )
    begin, end = (8 + length + offset for offset in about["data_offsets"])
    # A copy: tensors may lie at odd places.
    values = np.frombuffer(raw[begin:end].tobytes(), DTYPES[about["dtype"]]).reshape(about["shape"])
    if about["dtype"] == "BF16":
      values = (values.astype(np.uint32) << 16).view(np.float32)
    tensors[name] = values.astype(np.float32)
  return tensors


def read(folder: pathlib.Path) -> tuple[dict, dict[str, np.ndarray]]:
  """(config.json, weights). Raises ValueError where it is not a plain Llama."""
  if not (folder / "config.json").exists():
    raise ValueError(f"{folder} must hold config.json, or come from benchmarks.export_model")
  config = read_json((folder / "config.json").read_bytes(), "config.json")
  for key, allowed in REQUIRED.items():
    if config.get(key) not in allowed:
      raise ValueError(f"config.json: {key} must be {allowed[0]!r}, got {config.get(key)!r}")
  # Newer files keep what was rope_theta and rope_scaling in one place.
  rope = config.get("rope_parameters") or {}
  if rope.get("rope_type", "default") != "default":
    raise ValueError(f"config.json: rope_type must be 'default', got {rope['rope_type']!r}")
  files = sorted(folder.glob("*.safetensors"))
  if not files:
    raise ValueError(f"{folder} must hold *.safetensors, found none")
  return config, {k: v for file in files for k, v in read_safetensors(file).items()}


def model(config: dict, weights: dict[str, np.ndarray]) -> Model:
  """Hugging Face keeps q and k in the half-split order already."""

  of_config = lambda key: required(config, key, "config.json")
  weight = lambda name: required(weights, f"{name}.weight", "*.safetensors")
  layers = range(of_config("num_hidden_layers"))

  def stacked(name: str):
    return jnp.asarray(np.stack([weight(f"model.layers.{i}.{NAMES[name]}").T for i in layers]))

  num_q_heads = of_config("num_attention_heads")
  rope = config.get("rope_parameters") or {}
  tied = config.get("tie_word_embeddings", False)
  return Model(
    config=Config(
      num_q_heads=num_q_heads,
      num_kv_heads=config.get("num_key_value_heads") or num_q_heads,
      head_dim=config.get("head_dim") or of_config("hidden_size") // num_q_heads,
      rope_base=float(rope.get("rope_theta", config.get("rope_theta", 10_000.0))),
      rms_eps=of_config("rms_norm_eps"),
    ),
    embedding=jnp.asarray(weight("model.embed_tokens")),
    layers=Layers(**{name: stacked(name) for name in NAMES}),
    norm=jnp.asarray(weight("model.norm")),
    output=None if tied else jnp.asarray(weight("lm_head")),
  )
