"""A model and its tokens as files that numpy alone can read, for machines without packages.

meta.json      name, config, and the type of each tensor
weights.*.npz  the tensors under GGUF's names, as the GGUF holds them (blocks of codes and
               scales stay such blocks); no file is larger than MAX_FILE_BYTES by much, so that
               they can be carried in pieces, and a large tensor is cut by rows
tokens.npz     texts and prompts (quality_texts.py)
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import zipfile

import numpy as np

from benchmarks.llama import Config
from benchmarks.llama_hf import read_json, required

META = "meta.json"
MAX_FILE_BYTES = 45_000_000
BLOCK = 32  # values of a block of Q4_1 and of Q8_0


def _q4_1(rows: np.ndarray) -> np.ndarray:
  """uint8 [rows, blocks * 20]: scale f16, least f16, then 16 bytes: first half low, second high."""
  blocks = rows.reshape(len(rows), -1, 4 + BLOCK // 2)
  scale, least = (blocks[..., i : i + 2].view(np.float16).astype(np.float32) for i in (0, 2))
  codes = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], axis=-1)
  return (scale * codes.astype(np.float32) + least).reshape(len(rows), -1)


def _q8_0(rows: np.ndarray) -> np.ndarray:
  """uint8 [rows, blocks * 34]: scale f16, then 32 signed bytes."""
  blocks = rows.reshape(len(rows), -1, 2 + BLOCK)
  scale = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
  codes = np.ascontiguousarray(blocks[..., 2:]).view(np.int8).astype(np.float32)
  return (scale * codes).reshape(len(rows), -1)


DEQUANTISE = {
  "F32": lambda x: x,
  "F16": lambda x: x.astype(np.float32),
  "Q4_1": _q4_1,
  "Q8_0": _q8_0,
}


def check_type(name: str, type_name: str) -> None:
  if type_name not in DEQUANTISE:
    raise ValueError(
      f"tensor {name!r} must be of type {', '.join(DEQUANTISE)} to be exported, got {type_name}"
    )


def write(
  folder: pathlib.Path, name: str, config: Config, tensors: dict[str, tuple[str, np.ndarray]]
) -> list[pathlib.Path]:
  """Writes meta.json and the weights; tensors: name -> (type, data as in the GGUF)."""
  for tensor, (type_name, _) in tensors.items():
    check_type(tensor, type_name)
  folder.mkdir(parents=True, exist_ok=True)
  meta = {
    "name": name,
    "config": dataclasses.asdict(config),
    "types": {tensor: type_name for tensor, (type_name, _) in tensors.items()},
  }
  (folder / META).write_text(json.dumps(meta, indent=1) + "\n")
  paths, piece, size = [folder / META], {}, 0

  def flush():
    nonlocal piece, size
    if piece:
      paths.append(folder / f"weights.{len(paths)}.npz")
      np.savez(paths[-1], **piece)
    piece, size = {}, 0

  for tensor, (_, data) in tensors.items():
    for number, rows in enumerate(_pieces_of_rows(data)):
      if size + rows.nbytes > MAX_FILE_BYTES:
        flush()
      piece[f"{tensor}:{number}"] = rows
      size += rows.nbytes
  flush()
  return paths


def _pieces_of_rows(data: np.ndarray) -> list[np.ndarray]:
  count = -(-data.nbytes // MAX_FILE_BYTES)
  return np.array_split(data, count) if count > 1 else [data]


def open_npz(path: pathlib.Path):
  """np.load of an archive. Raises ValueError where it is none."""
  try:
    return np.load(path)
  except (ValueError, EOFError, zipfile.BadZipFile) as error:
    raise ValueError(f"{path.name} must be an archive of numpy: {error}") from error


def read(folder: pathlib.Path) -> tuple[dict, dict[str, np.ndarray]]:
  """(meta, weights in float32). Raises ValueError where something is missing or not as written."""
  meta = read_json((folder / META).read_bytes(), META)
  for key in ("name", "config", "types"):
    required(meta, key, META)
  sizes = {field.name for field in dataclasses.fields(Config)}
  if set(meta["config"]) != sizes:
    raise ValueError(f"{META}: config must have {sorted(sizes)}, got {sorted(meta['config'])}")
  for tensor, type_name in meta["types"].items():
    check_type(tensor, type_name)
  found: dict[str, dict[int, np.ndarray]] = {}
  for path in folder.glob("weights.*.npz"):
    with open_npz(path) as file:
      for key in file.files:
        tensor, number = key.rsplit(":", 1)
        found.setdefault(tensor, {})[int(number)] = file[key]
  missing = sorted(set(meta["types"]) - set(found))
  if missing:
    raise ValueError(f"{folder} must hold every tensor of {META}, {missing[0]!r} is missing")
  return meta, {
    name: DEQUANTISE[type_name](np.concatenate([p for _, p in sorted(found[name].items())]))
    for name, type_name in meta["types"].items()
  }
