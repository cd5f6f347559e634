"""The committed activations are whole, come from the committed text, and look like attention."""

import dataclasses
import pathlib
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from benchmarks import activations, llama, llama_files, make_fixture
from tests.base import TestCase

NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 9, 3, 64


def nvfp4_round(x: np.ndarray) -> np.ndarray:
  """NVFP4 by its definition: blocks of 16, e4m3 scale amax / 6, nearest-even e2m1 codes."""
  blocks = x.reshape(*x.shape[:-1], -1, 16)
  scale = (np.abs(blocks).max(-1, keepdims=True) / 6).astype(jnp.float8_e4m3fn).astype(x.dtype)
  # A scale that was rounded down lets a quotient pass the largest code.
  codes = np.clip(blocks / scale, -6, 6).astype(jnp.float4_e2m1fn).astype(x.dtype)
  return (codes * scale).reshape(x.shape)


def sqnr_db(x: np.ndarray, y: np.ndarray) -> float:
  return 10 * np.log10(np.sum(x**2) / np.sum((x - y) ** 2))


class FixtureTest(TestCase):
  def setUp(self):
    super().setUp()
    self.layers = activations.load()

  def test_shapes_and_types(self):
    tokens = make_fixture.NUM_TOKENS
    self.assertEqual(tuple(a.layer for a in self.layers), make_fixture.LAYERS)
    for a in self.layers:
      self.assertEqual(a.q.shape, (tokens, NUM_Q_HEADS, HEAD_DIM))
      self.assertEqual(a.k.shape, (tokens, NUM_KV_HEADS, HEAD_DIM))
      self.assertEqual(a.v.shape, (tokens, NUM_KV_HEADS, HEAD_DIM))
      self.assertEqual(a.token_ids.shape, (tokens,))
      for x in (a.q, a.k, a.v):
        self.assertEqual(x.dtype, jnp.bfloat16)
        self.assertTrue(np.isfinite(np.asarray(x, np.float32)).all())

  def test_file_is_small(self):
    self.assertLess(activations.FIXTURE_PATH.stat().st_size, 2_000_000)

  def test_provenance_is_what_the_generator_would_use(self):
    for a in self.layers:
      self.assertEqual(a.provenance.wheel, llama_files.WHEEL)
      self.assertEqual(a.provenance.gguf_sha256, llama_files.GGUF_SHA256)
      self.assertEqual(a.provenance.passage_sha256, activations.passage_sha256())

  def test_saved_layers_load_unchanged(self):
    path = pathlib.Path(self.create_tempdir().full_path) / "saved.npz"
    activations.save(self.layers, path)
    agreements = make_fixture.compare(activations.load(path), self.layers)
    self.assertLen(agreements, 3 * len(make_fixture.LAYERS))
    self.assertEqual({(a.share_equal, a.largest_step) for a in agreements}, {(1.0, 0.0)})

  def test_comparison_sees_a_changed_array(self):
    first, *others = self.layers
    changed = dataclasses.replace(first, k=jnp.flip(first.k, axis=-1))
    agreements = make_fixture.compare([changed, *others], self.layers)
    (failed,) = (a for a in agreements if not a.sufficient)
    self.assertEqual(failed.array, f"layer {first.layer} k")

  def test_comparison_refuses_other_tokens(self):
    first, *others = self.layers
    changed = dataclasses.replace(first, token_ids=first.token_ids[::-1])
    with self.assertRaisesRegex(ValueError, "other tokens"):
      make_fixture.compare([changed, *others], self.layers)

  @parameterized.parameters("q", "k", "v")
  def test_nvfp4_error_is_typical(self, name):
    # All 30 layers on 1,024 tokens average 20.6 (v) and 20.7 dB (q, k); Gaussian data 20.44 dB.
    values = [np.asarray(getattr(a, name), np.float32) for a in self.layers]
    mean = np.mean([sqnr_db(x, nvfp4_round(x)) for x in values])
    self.assertBetween(mean, 20.5, 20.8)

  def test_first_token_attends_to_itself(self):
    for a in self.layers:
      out = llama.dense_causal_attention(a.q, a.k, a.v)
      v = jnp.repeat(a.v[0].astype(jnp.float32), NUM_Q_HEADS // NUM_KV_HEADS, axis=0)
      np.testing.assert_allclose(out[0], v, rtol=1e-6)

  def test_later_tokens_do_not_reach_back(self):
    a, cut = self.layers[0], 100
    k, v = (x.at[cut:].set(7.0) for x in (a.k, a.v))
    expected = llama.dense_causal_attention(a.q, a.k, a.v)
    out = llama.dense_causal_attention(a.q, k, v)
    np.testing.assert_array_equal(out[:cut], expected[:cut])
    self.assertFalse(np.array_equal(out[cut:], expected[cut:]))

  def test_attention_prefers_the_first_and_the_newest_tokens(self):
    # Trained attention does; with q and k rotated or ordered wrongly the share is the uniform one.
    for a in self.layers:
      tokens = a.q.shape[0]
      position = np.arange(tokens)
      age = position[:, None] - position[None]
      preferred = (position[None] == 0) | ((age >= 0) & (age < 16))
      # One-hot values make the output the attention weights, [T, q_heads, T].
      one_hot = jnp.broadcast_to(jnp.eye(tokens)[:, None], (tokens, NUM_KV_HEADS, tokens))
      weights = np.asarray(llama.dense_causal_attention(a.q, a.k, one_hot))
      share = np.sum(weights * preferred[:, None], axis=-1)[64:].mean()
      uniform_share = np.mean(17 / (position[64:] + 1))
      self.assertGreater(share, 2 * uniform_share)


def tiny_model() -> llama.Model:
  """Two layers of random weights in SmolLM2's form: 4 query heads, 2 key/value heads of 8."""
  hidden, inner, vocab = 32, 48, 50
  rng = np.random.default_rng(0)

  def matrix(rows: int, columns: int) -> jax.Array:
    return jnp.asarray(rng.normal(0, rows**-0.5, (2, rows, columns)), jnp.float32)

  return llama.Model(
    config=llama.Config(4, 2, 8, rope_base=1e4, rms_eps=1e-5),
    embedding=jnp.asarray(rng.normal(size=(vocab, hidden)), jnp.float32),
    layers=llama.Layers(
      attn_norm=jnp.ones((2, hidden)),
      wq=matrix(hidden, 32),
      wk=matrix(hidden, 16),
      wv=matrix(hidden, 16),
      wo=matrix(32, hidden),
      ffn_norm=jnp.ones((2, hidden)),
      w_gate=matrix(hidden, inner),
      w_up=matrix(hidden, inner),
      w_down=matrix(inner, hidden),
    ),
    norm=jnp.ones(hidden),
  )


class ModelTest(TestCase):
  """The forward pass that made the fixture, without its weights."""

  def test_later_tokens_do_not_reach_back(self):
    model, ids = tiny_model(), np.arange(12)
    changed = np.where(np.arange(12) < 8, ids, 40)
    a, b = (llama.logits(model, llama.hidden_states(model, x)) for x in (ids, changed))
    self.assertEqual(a.shape, (12, 50))
    np.testing.assert_array_equal(a[:8], b[:8])
    self.assertFalse(np.array_equal(a[8:], b[8:]))

  def test_attention_sees_relative_positions_only(self):
    # The same tokens four places later, with the four new ones hidden from them.
    model, ids = tiny_model(), np.arange(12)

    def hide_first_four(state, q, k, v):
      late = llama.dense_causal_attention(q[4:], k[4:], v[4:])
      return jnp.concatenate([q[:4], late]), state

    expected = llama.hidden_states(model, ids)
    shifted = llama.hidden_states(model, np.concatenate([ids[:4], ids]), hide_first_four)
    np.testing.assert_allclose(shifted[4:], expected, atol=2e-5)

  def test_capture_rounds_what_the_attention_gets(self):
    model, ids = tiny_model(), np.arange(12)

    def attention(_, q, k, v):
      return llama.dense_causal_attention(q, k, v), (q, k, v)

    positions, rope = jnp.arange(12, dtype=jnp.int32), llama.rope_table(model.config, 12)
    run = jax.jit(lambda model: llama.forward(model, ids, positions, rope, None, attention)[1])
    captured = llama.capture_attention_inputs(model, ids)
    for x, rounded in zip(run(model), captured, strict=True):
      self.assertEqual(x.shape[0], 2)
      np.testing.assert_array_equal(x.astype(jnp.bfloat16), rounded)

  def test_untied_output(self):
    model = tiny_model()
    hidden = llama.hidden_states(model, np.arange(12))
    untied = dataclasses.replace(model, output=-model.embedding)
    np.testing.assert_array_equal(llama.logits(untied, hidden), -llama.logits(model, hidden))

  def test_missing_package_names_the_extra(self):
    path = pathlib.Path(self.create_tempfile("model.gguf", "GGUF").full_path)
    with mock.patch.dict(sys.modules, {"gguf": None}):
      with self.assertRaisesRegex(ImportError, r"pip install nvfp4_pallas\[quality\]"):
        llama_files.load(path)


if __name__ == "__main__":
  absltest.main()
