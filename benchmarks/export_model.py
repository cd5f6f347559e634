"""Writes a model for a machine without packages: `python -m benchmarks.export_model DIR`.

The folder holds the weights of a GGUF as they are and the tokens of all texts and prompts of the
quality benchmark, in files that numpy reads (llama_export.py); `quality --model DIR` takes it.
"""

from __future__ import annotations

import argparse
import pathlib

from benchmarks import llama_export, llama_files, quality_texts


def export(folder: pathlib.Path, path: pathlib.Path | None = None) -> list[pathlib.Path]:
  """Exports the GGUF at `path`, by default the pinned one. Returns the files."""
  path = llama_files.fetch_gguf() if path is None else path
  reader = llama_files.open_gguf(path)
  tensors = {t.name: (t.tensor_type.name, t.data) for t in reader.tensors}
  config = llama_files.gguf_config(reader)
  files = llama_export.write(folder, path.stem, config, tensors)
  tokens = folder / quality_texts.FILE
  quality_texts.save(quality_texts.make(llama_files.gguf_encode(reader)), tokens)
  return [*files, tokens]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("folder", type=pathlib.Path)
  parser.add_argument("--model", type=pathlib.Path, help="a GGUF; by default the pinned SmolLM2")
  arguments = parser.parse_args()
  for path in export(arguments.folder, arguments.model):
    print(f"{path.stat().st_size / 1e6:6.1f} MB  {path}")


if __name__ == "__main__":
  main()
