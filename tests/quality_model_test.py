"""The model level of the quality benchmark: its parts, and orders of formats on a small model.

The small model is made to depend on its cache: attention that is peaked and weighs as much as the
feed-forward block. What must hold between formats holds there too, in seconds and without weights.
"""

import dataclasses
import functools
import importlib.util
import itertools
import json
import pathlib
import re
import zlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from benchmarks import (
  llama,
  llama_export,
  llama_files,
  llama_hf,
  quality_compare,
  quality_decode,
  quality_model,
  quality_recall,
  quality_serving,
  quality_texts,
)
from benchmarks.quality_configs import BF16, BY_NAME, CalibratedOn
from nvfp4_pallas import calibration
from tests.base import TestCase

VOCAB = 256
# Steps of few shapes, which all tests share: a compilation takes longer than a run.
PLAN = dataclasses.replace(
  quality_model.SMOKE,
  windows=(("docs", 1), ("code", 1)),
  chunks=((64, "wide"), (16, "wide"), (16, "stored")),
  recall_chunks=((16, "stored"),),
  recall_prompts=2,
)


def encode_bytes(text: str) -> list[int]:
  return list(text.encode())


def encode_words(text: str) -> list[int]:
  """About as many tokens as real tokenizers make, digits apart."""
  return [zlib.crc32(w.encode()) % VOCAB for w in re.findall(r"\d|[^\W\d]+|[^\w\s]", text)]


@functools.cache
def small_model() -> llama.Model:
  """Two layers: 4 query heads, 2 key/value heads of 64."""
  hidden, inner, rng = 128, 128, np.random.default_rng(0)

  def matrix(rows: int, columns: int, gain: float = 1.0) -> jax.Array:
    return jnp.asarray(rng.normal(0, gain * rows**-0.5, (2, rows, columns)), jnp.float32)

  return llama.Model(
    config=llama.Config(4, 2, 64, rope_base=1e4, rms_eps=1e-5),
    embedding=jnp.asarray(rng.normal(0, 0.2, (VOCAB, hidden)), jnp.float32),
    layers=llama.Layers(
      attn_norm=jnp.ones((2, hidden)),
      wq=matrix(hidden, 256, 1.5),
      wk=matrix(hidden, 128, 1.5),
      wv=matrix(hidden, 128),
      wo=matrix(256, hidden),
      ffn_norm=jnp.ones((2, hidden)),
      w_gate=matrix(hidden, inner, 0.5),
      w_up=matrix(hidden, inner, 0.5),
      w_down=matrix(inner, hidden, 0.5),
    ),
    norm=jnp.ones(hidden),
  )


@functools.cache
def material() -> quality_texts.Material:
  return quality_texts.make(encode_words, recall_lengths=(256,))


def server(name: str, num_seqs: int = 2) -> quality_serving.Server:
  return quality_serving.Server(small_model(), BY_NAME[name], num_seqs, 256, "xla")


@functools.cache
def kl_of_rows(name: str, newest: str, chunk: int = 16) -> np.ndarray:
  """KL to a BF16 cache of 2 windows of 256 tokens."""
  windows = material().windows("docs", 2, 256)
  reference, hidden = (server(n).prefill(windows, chunk, newest) for n in ("bf16", name))
  return quality_compare.compare(small_model(), reference, hidden, windows).kl


def kl(*arguments) -> float:
  return float(kl_of_rows(*arguments).mean())


class ServingTest(TestCase):
  @parameterized.parameters((64, "wide"), (16, "wide"), (16, "stored"), (1, "stored"))
  def test_bf16_caches_agree_with_dense_attention(self, chunk, newest):
    tokens = material().windows("docs", 2, 64)

    def rounded(state, q, k, v):
      q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
      return llama.dense_causal_attention(q, k, v).astype(jnp.bfloat16), state

    expected = jnp.stack([llama.hidden_states(small_model(), t, rounded) for t in tokens])
    hidden = server("bf16").prefill(tokens, chunk, newest)
    # Another order of summation moves a few values over a bf16 boundary, 2^-8 of a value of 3.
    np.testing.assert_allclose(hidden, expected, atol=0.02)

  def test_reset_forgets(self):
    tokens = material().windows("docs", 2, 32)
    served = server("nvfp4")
    first = served.prefill(tokens, 16, "stored")
    served.reset()
    np.testing.assert_array_equal(served.prefill(tokens, 16, "stored"), first)

  def test_more_tokens_than_context(self):
    served = server("bf16")
    served.length = 250
    with self.assertRaisesRegex(ValueError, "context 256, got 16 after 250"):
      served.advance(material().windows("docs", 2, 16), "wide")

  def test_every_row_names_who_ran_it(self):
    self.assertEqual(server("nvfp4").who(16, "wide"), "xla")
    self.assertEqual(server("nvfp4").who(1, "stored"), "xla")


class CalibrationTest(TestCase):
  def setUp(self):
    super().setUp()
    _, k, v = llama.capture_attention_inputs(small_model(), material().calibration)
    self.seen = k, v

  def test_scales_are_of_each_layer_and_head(self):
    found = quality_serving.calibrate(BY_NAME["nvfp4 cal"], *self.seen)
    self.assertEqual(set(found), {"k_global_scale", "v_global_scale"})
    for name, rows in zip(("k_global_scale", "v_global_scale"), self.seen, strict=True):
      largest = np.abs(np.asarray(rows, np.float32)).max(axis=(1, 3))
      np.testing.assert_allclose(found[name], largest * calibration.HEADROOM / 2688, rtol=1e-6)

  def test_means_and_scales_of_a_cache_with_both(self):
    """The largest value is that of rows without their mean, which are rounded to bfloat16."""
    config = dataclasses.replace(BY_NAME["nvfp4 cal"], k_mean=True)
    found = quality_serving.calibrate(config, *self.seen)
    k = np.asarray(self.seen[0], np.float32)
    np.testing.assert_allclose(found["k_mean"], k.mean(axis=1), atol=1e-5)
    largest = np.abs(k - k.mean(axis=1, keepdims=True)).max(axis=(1, 3))
    np.testing.assert_allclose(
      found["k_global_scale"], largest * calibration.HEADROOM / 2688, rtol=2**-8
    )

  @parameterized.parameters("nvfp4 hadK 4/6 cal w64", "nvfp4 mean")
  def test_a_model_is_served_from_calibrated_caches(self, name):
    source = llama_files.Source("small", small_model(), encode_words)
    plan = dataclasses.replace(
      PLAN, chunks=((16, "stored"),), recall_lengths=(), recall_chunks=(), generated=0
    )
    run = quality_model.Run(source, material(), plan, "xla")
    config = BY_NAME[name]
    served = run.server(config)
    scales = np.asarray(served.cache.k.global_scale)
    self.assertEqual(len(np.unique(scales)), scales.size if config.global_scale != "1" else 1)
    headroom = 2.0 if config.global_scale != "1" else None
    expected = CalibratedOn("the end of docs", 512, headroom)
    for row in run.rows(config):
      self.assertEqual(row.calibrated_on, expected)
      if row.metric == "kl":  # of nvfp4: .1
        self.assertBetween(row.value, 0, 0.2)

  def test_nothing_else_reads_that_text(self):
    windows = material().windows("docs", 4, 8192).reshape(-1)
    docs = material().texts["docs"]
    np.testing.assert_array_equal(docs[-512:], material().calibration)
    self.assertLessEqual(windows.size, docs.size - 512)


class KlTest(TestCase):
  """Orders that hold for every model. The ratios asked for lie half way, in the logarithm, between
  none and what was measured: 13, 1.27, 1.73, 1.57 and 16."""

  def test_formats(self):
    self.assertGreater(kl("fp8", "stored"), 0)
    self.assertGreater(kl("nvfp4", "stored"), 4 * kl("fp8", "stored"))

  def test_a_wide_chunk_hides_the_cost(self):
    self.assertGreater(kl("nvfp4", "stored", 16), 1.1 * kl("nvfp4", "wide", 16))
    self.assertGreater(kl("nvfp4", "wide", 16), 1.3 * kl("nvfp4", "wide", 64))

  def test_the_first_chunk_does_not_look_into_its_cache(self):
    rows = kl_of_rows("nvfp4", "wide", 64)
    np.testing.assert_array_equal(rows[:, :64], 0)
    self.assertGreater(rows[:, 64:].min(), 0)

  def test_one_level_of_q_costs_more_than_two(self):
    self.assertGreater(kl("nvfp4, Q x1", "stored"), 1.25 * kl("nvfp4, Q x2", "stored"))

  def test_broken_k_scale(self):
    windows, half = material().windows("docs", 2, 256), 128
    states = []
    for factor in (1.0, 2.0):
      served = server("nvfp4")
      served.prefill(windows[:, :half], 16, "stored")
      k = served.cache.k
      k = dataclasses.replace(k, global_scale=factor * k.global_scale)
      served.cache = dataclasses.replace(served.cache, k=k)
      states.append(served.prefill(windows[:, half:], 16, "stored"))
    compared = quality_compare.compare(small_model(), *states, windows[:, half:])
    self.assertGreater(compared.kl.mean(), 4 * kl("nvfp4", "stored"))


class CompareTest(TestCase):
  def test_against_numpy(self):
    model, rng = small_model(), np.random.default_rng(0)
    # More rows than a piece has, and not a multiple of it.
    p, q = (rng.normal(size=(2, 150, 128)).astype(np.float32) for _ in range(2))
    targets = rng.integers(0, VOCAB, (2, 150))
    got = quality_compare.compare(model, jnp.asarray(p), jnp.asarray(q), targets)

    def log_softmax(h):
      logits = h.astype(np.float64) @ np.asarray(model.embedding, np.float64).T
      return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    log_p, log_q = log_softmax(p), log_softmax(q)
    of_targets = lambda x: -np.take_along_axis(x, targets[..., None], -1)[..., 0]
    expected = quality_compare.Compared(
      kl=np.sum(np.exp(log_p) * (log_p - log_q), -1),
      tv=np.abs(np.exp(log_p) - np.exp(log_q)).sum(-1) / 2,
      same_top=log_p.argmax(-1) == log_q.argmax(-1),
      nll=of_targets(log_q),
      reference_nll=of_targets(log_p),
      hit=log_q.argmax(-1) == targets,
    )
    for name, a, b in zip(got._fields, got, expected, strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=name)

  def test_intervals_cover_the_mean(self):
    rng, covered = np.random.default_rng(0), 0
    for _ in range(200):
      number = quality_compare.mean_of_rows(rng.normal(1.0, 3.0, (2, 512)))
      covered += number.ci_low <= 1.0 <= number.ci_high
    self.assertBetween(covered / 200, 0.9, 0.99)

  def test_few_samples_have_no_interval(self):
    self.assertIsNone(quality_compare.mean_of_samples(np.arange(3.0)).ci_low)


class DecodeTest(TestCase):
  def setUp(self):
    super().setUp()
    self.prompts = material().windows("docs", 2, 64)

  def test_divergence(self):
    a = np.array([[1, 2, 3], [1, 2, 3], [1, 2, 3]])
    b = np.array([[1, 2, 3], [1, 0, 3], [0, 2, 3]])
    np.testing.assert_array_equal(quality_decode.divergence(a, b), [3, 1, 0])

  def test_bf16_does_not_part_from_itself(self):
    served = server("bf16")
    numbers = quality_decode.measure(
      served, self.prompts, 64, quality_decode.reference(served, self.prompts, 64, 6)
    )
    self.assertEqual(numbers["greedy", "divergence"].value, 6)
    self.assertEqual(numbers["greedy", "identical"].value, 1)
    self.assertEqual(numbers["sampled", "kl"].value, 0)

  def test_greedy_is_what_prefill_predicts(self):
    served = server("bf16")
    generated = quality_decode.generate(served, self.prompts, 64, 16, sample=False)
    served.reset()
    whole = np.concatenate([self.prompts, generated.tokens], axis=1)
    hidden = served.prefill(whole, 16, "stored")[:, 63:79]
    compared = quality_compare.compare(small_model(), hidden, hidden, generated.tokens)
    np.testing.assert_array_equal(compared.hit, 1)

  def test_formats_are_told_apart(self):
    reference = quality_decode.reference(server("bf16"), self.prompts, 64, 32)
    tv = [
      quality_decode.measure(server(name), self.prompts, 64, reference)["sampled", "tv"].value
      for name in ("fp8", "nvfp4")
    ]
    self.assertGreater(tv[0], 0)
    # Measured: 0.0137 and 0.0473.
    self.assertGreater(tv[1], 1.8 * tv[0])


class TextsTest(TestCase):
  @parameterized.parameters(*quality_texts.TEXTS)
  def test_windows_do_not_overlap(self, text):
    made = material()
    windows = made.windows(text, 4, 8192)
    self.assertEqual(windows.shape, (4, 8192))
    np.testing.assert_array_equal(windows.reshape(-1), made.texts[text][: 4 * 8192])

  def test_too_many_windows(self):
    with self.assertRaisesRegex(ValueError, "fit into 39488 tokens, got 5 of 8192"):
      material().windows("docs", 5, 8192)

  def test_reasoning_is_right(self):
    text = "".join(itertools.islice(quality_texts._reasoning(), 100))
    steps = [line for line in text.splitlines() if line.startswith("Step 3: ") and "bring" in line]
    self.assertGreater(len(steps), 20)
    for line in steps:
      a, b, product = (int(word) for word in line.split("bring ")[1].split() if word.isdigit())
      self.assertEqual(a * b, product)

  @parameterized.parameters(768, 4096)
  def test_recall_prompts(self, length):
    recall = quality_texts.recall_prompts(encode_bytes, length)
    self.assertEqual(recall.tokens.shape, (8, length))
    self.assertEqual(set(recall.kinds), set(quality_texts.KINDS))
    for ids, depth, answer_len in zip(
      recall.tokens, recall.depths, recall.answer_lens, strict=True
    ):
      text = bytes(ids.tolist()).decode()
      key = text[-answer_len:]
      self.assertRegex(key, r"^\d{5}$")
      # It was told once, near its depth (a passkey is told twice, in one place).
      self.assertAlmostEqual(text.index(key) / length, depth, delta=0.25)
      self.assertNotIn(key, text[int(0.95 * length) : -answer_len])

  def test_files(self):
    path = pathlib.Path(self.create_tempdir().full_path) / "tokens.npz"
    quality_texts.save(material(), path)
    back = quality_texts.read(path)
    for name in quality_texts.TEXTS:
      np.testing.assert_array_equal(back.texts[name], material().texts[name])
    for length, recall in material().recall.items():
      self.assertEqual(back.recall[length].kinds, recall.kinds)
      self.assertEqual(back.recall[length].depths, recall.depths)
      np.testing.assert_array_equal(back.recall[length].tokens, recall.tokens)
      np.testing.assert_array_equal(back.recall[length].answer_lens, recall.answer_lens)


class RecallTest(TestCase):
  def test_answers_are_judged_by_their_own_tokens(self):
    recall = quality_model._first(material().recall[256], 2)
    served = server("bf16")
    nll, exact = quality_recall.answers(served, recall, 16, "stored")
    served.reset()
    hidden = served.prefill(recall.tokens, 16, "stored")
    logits = np.stack([llama.logits(small_model(), h) for h in hidden])
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    rows = np.arange(256 - 6, 256 - 1)
    for i in range(2):
      expected = -log_p[i, rows, recall.tokens[i, rows + 1]].sum()
      self.assertAlmostEqual(nll[i] / expected, 1, places=4)
      hits = log_p[i, rows].argmax(-1) == recall.tokens[i, rows + 1]
      self.assertEqual(exact[i], hits.all())

  def test_prompts_fill_whole_batches(self):
    with self.assertRaisesRegex(ValueError, "multiple of server.num_seqs=3, got 8"):
      quality_recall.answers(server("bf16", num_seqs=3), material().recall[256], 64, "wide")


class RunTest(TestCase):
  def test_rows(self):
    source = llama_files.Source("small", small_model(), encode_words)
    run = quality_model.Run(source, material(), PLAN, "xla")
    rows = [*run.reference_rows(), *run.rows(BY_NAME["nvfp4"])]
    by_key = {(r.config.name, r.operation, r.data, r.metric): r for r in rows}
    self.assertLen(by_key, len(rows))
    value = lambda config, *key: by_key[config, *key].value
    for text in ("small, docs", "small, code"):
      for operation in ("prefill 64 wide", "prefill 16 wide", "prefill 16 stored"):
        floor, cost = (value(c, operation, text, "kl") for c in (BF16.name, "nvfp4"))
        self.assertGreater(cost, 3 * floor)
        row = by_key["nvfp4", operation, text, "kl"]
        self.assertEqual(row.bits_per_value, 4.5)
        # The paired difference is what the two perplexities say.
        log_ratio = np.log(value("nvfp4", operation, text, "perplexity"))
        log_ratio -= np.log(value(BF16.name, operation, text, "perplexity"))
        self.assertAlmostEqual(log_ratio, value("nvfp4", operation, text, "delta_nll"), places=2)
    self.assertEqual({r.metric for r in rows if r.operation == "decode sampled"}, {"kl", "tv"})
    self.assertEqual({r.implementation for r in rows}, {"xla"})


class FilesTest(TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def write_hf(self, dtype: str = "F32", **changes) -> llama.Model:
    """The small model as Hugging Face keeps it, by hand."""
    model = small_model()
    config = {
      "model_type": "llama",
      "hidden_act": "silu",
      "hidden_size": 128,
      "num_hidden_layers": 2,
      "num_attention_heads": 4,
      "num_key_value_heads": 2,
      "head_dim": 64,
      "rms_norm_eps": 1e-5,
      "rope_theta": 1e4,
      "tie_word_embeddings": True,
    }
    (self.folder / "config.json").write_text(json.dumps(config | changes))
    tensors = {
      "model.embed_tokens.weight": np.asarray(model.embedding),
      "model.norm.weight": np.asarray(model.norm),
    }
    for field, name in llama_hf.NAMES.items():
      for i in range(2):
        w = np.asarray(getattr(model.layers, field)[i]).T
        tensors[f"model.layers.{i}.{name}.weight"] = w
    header, data = {}, b""
    for name, w in tensors.items():
      w = np.ascontiguousarray(w)
      raw = {
        "F32": lambda w: w,
        "F16": lambda w: w.astype(np.float16),
        "BF16": lambda w: np.asarray(jnp.asarray(w, jnp.bfloat16)).view(np.uint16),
        "F64": lambda w: w.astype(np.float64),
      }[dtype](w).tobytes()
      offsets = [len(data), len(data) + len(raw)]
      header[name] = {"dtype": dtype, "shape": w.shape, "data_offsets": offsets}
      data += raw
    text = json.dumps(header).encode()
    (self.folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return model

  @absltest.skipUnless(importlib.util.find_spec("gguf"), "gguf is not installed")
  @parameterized.parameters("Q4_1", "Q8_0", "F16", "F32")
  def test_exported_blocks_are_those_of_the_gguf(self, type_name):
    import gguf

    quant = gguf.GGMLQuantizationType[type_name]
    w = np.random.default_rng(0).normal(size=(64, 96)).astype(np.float32)
    data = gguf.quantize(w, quant)
    config, tensors = small_model().config, {"a.weight": (type_name, data)}
    with mock.patch.object(llama_export, "MAX_FILE_BYTES", data.nbytes // 2):
      files = llama_export.write(self.folder, "small", config, tensors)
    self.assertLen(files, 3)
    meta, weights = llama_export.read(self.folder)
    self.assertEqual(llama.Config(**meta["config"]), config)
    np.testing.assert_array_equal(weights["a.weight"], gguf.dequantize(data, quant))

  def test_exported_model(self):
    """Under GGUF's names, with q and k in GGUF's order."""
    model = small_model()
    tensors = {
      "token_embd.weight": np.asarray(model.embedding),
      "output_norm.weight": np.asarray(model.norm),
    }
    for field, name in llama_files.GGUF_NAMES.items():
      for i in range(2):
        w = np.asarray(getattr(model.layers, field)[i]).T
        if field in ("wq", "wk"):
          w = w.reshape(-1, 2, 32, 128).swapaxes(1, 2).reshape(w.shape)
        tensors[f"blk.{i}.{name}.weight"] = w
    tensors = {name: ("F32", w) for name, w in tensors.items()}
    files = llama_export.write(self.folder, "small", model.config, tensors)
    quality_texts.save(material(), self.folder / quality_texts.FILE)
    source, read = quality_model.load(self.folder)
    self.assertEqual((source.name, source.model.config), ("small", model.config))
    for a, b in zip(jax.tree.leaves(source.model), jax.tree.leaves(model), strict=True):
      np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(read.calibration, material().calibration)
    with self.assertRaisesRegex(ValueError, "it has no tokenizer"):
      source.encode("text")
    files[-1].unlink()
    with self.assertRaisesRegex(ValueError, "is missing"):
      llama_files.load(self.folder)

  def test_other_blocks_are_not_exported(self):
    with self.assertRaisesRegex(ValueError, "'a' must be of type F32, F16, Q4_1, Q8_0"):
      llama_export.write(self.folder, "x", small_model().config, {"a": ("Q6_K", np.zeros(1))})

  @parameterized.parameters(
    ({"general.architecture": "gemma"}, "general.architecture must be 'llama', got 'gemma'"),
    ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type must be absent or none"),
    ({}, "the GGUF must have llama.attention.head_count, which is missing"),
  )
  def test_other_ggufs_are_refused(self, fields, message):
    fields = {"general.architecture": "llama"} | fields
    reader = mock.Mock(
      tensors=[],
      fields={k: mock.Mock(contents=functools.partial(str, v)) for k, v in fields.items()},
    )
    with self.assertRaisesRegex(ValueError, message):
      llama_files.gguf_config(reader)

  @parameterized.parameters(("F32", 0), ("F16", 2**-11), ("BF16", 2**-8))
  def test_hugging_face(self, dtype, rounding):
    model = self.write_hf(dtype)
    read = llama_hf.model(*llama_hf.read(self.folder))
    self.assertEqual(read.config, model.config)
    for a, b in zip(jax.tree.leaves(read), jax.tree.leaves(model), strict=True):
      np.testing.assert_allclose(a, b, rtol=rounding, atol=1e-7)

  @parameterized.parameters(
    ({"model_type": "qwen2"}, "model_type must be 'llama', got 'qwen2'"),
    ({"attention_bias": True}, "attention_bias must be False, got True"),
    ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling must be None"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type must be 'default', got 'yarn'"),
  )
  def test_other_models_are_refused(self, changes, message):
    self.write_hf(**changes)
    with self.assertRaisesRegex(ValueError, message):
      llama_files.load(self.folder)

  def test_other_dtypes_are_refused(self):
    self.write_hf("F64")
    with self.assertRaisesRegex(ValueError, "dtype of 'model.embed_tokens.weight' must be"):
      llama_files.load(self.folder)

  def test_a_folder_of_something_else(self):
    with self.assertRaisesRegex(ValueError, "must hold config.json"):
      llama_files.load(self.folder)


if __name__ == "__main__":
  absltest.main()
