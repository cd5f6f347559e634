"""The attention layer: order of a step's parts, drop-in for a Llama, donation, bad arguments."""

import functools
import re
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import nvfp4_pallas as nv
from benchmarks import llama, quality_serving
from benchmarks.quality_configs import BY_NAME
from nvfp4_pallas import layer
from tests import quality_model_test
from tests.base import TestCase

HIDDEN, HEADS, Q_HEADS, DIM, PAGE = 96, 2, 6, 64, 16
FORMATS = ("bf16", "fp8", "nvfp4")
ROPE = nv.rope_table(DIM, 256)


def new_cache(format="nvfp4", num_pages=16, **levers) -> nv.PagedKVCache:
  return nv.PagedKVCache.create(
    num_pages=num_pages, page_size=PAGE, num_kv_heads=HEADS, head_dim=DIM, k_format=format, **levers
  )


def weights(dtype=jnp.float32) -> nv.LlamaAttention:
  r = np.random.default_rng(0)
  matrix = lambda n, m: jnp.asarray(r.standard_normal((n, m)) / np.sqrt(n), dtype)
  kv = HEADS * DIM
  return nv.LlamaAttention(
    matrix(HIDDEN, Q_HEADS * DIM), matrix(HIDDEN, kv), matrix(HIDDEN, kv), matrix(6 * DIM, HIDDEN)
  )


def inputs(rows, seed=1, dtype=jnp.float32):
  return jnp.asarray(np.random.default_rng(seed).standard_normal((rows, HIDDEN)), dtype)


def ragged(table, kv_lens, q_lens, **rings) -> nv.RaggedBatch:
  starts = np.cumsum([0, *q_lens])
  return nv.RaggedBatch(
    jnp.asarray(table, jnp.int32),
    jnp.asarray(kv_lens, jnp.int32),
    jnp.asarray(starts, jnp.int32),
    **rings,
  )


def bits(tree) -> list[np.ndarray]:
  return [np.asarray(a).view(np.uint8) for a in jax.tree.leaves(tree)]


def bf16(x) -> np.ndarray:
  return np.asarray(jnp.asarray(x, jnp.bfloat16)).astype(np.float64)


class Wide:
  """The same layer with all keys and values of a sequence in float64, rounded to bfloat16 as a
  BF16 cache has them; written from a Llama's description, not from the layer."""

  def __init__(self, w: nv.LlamaAttention, base: float = 10_000.0):
    self.base = base
    self.w = {n: np.asarray(getattr(w, n), np.float64) for n in ("q_proj", "k_proj", "v_proj")}
    self.o_proj = np.asarray(w.o_proj, np.float64)

  def rotated(self, x, positions):
    angle = positions[:, None] * self.base ** (-np.arange(DIM // 2) / (DIM // 2))
    turned = np.exp(1j * angle)[:, None] * (x[..., : DIM // 2] + 1j * x[..., DIM // 2 :])
    return np.concatenate([turned.real, turned.imag], axis=-1)

  def qkv(self, x):
    x, positions = np.asarray(x, np.float64), np.arange(len(x))
    q, k, v = ((x @ w).reshape(len(x), -1, DIM) for w in self.w.values())
    return bf16(self.rotated(q, positions)), bf16(self.rotated(k, positions)), bf16(v)

  def attention(self, q, k, v, *, sm_scale=DIM**-0.5, window=None, soft_cap=None, sinks=None):
    """[rows, Q_HEADS * DIM] of one whole sequence."""
    rows = []
    for i in range(len(q)):
      oldest = 0 if window is None else max(i + 1 - window, 0)
      heads = []
      for h in range(Q_HEADS):
        keys, values = (x[oldest : i + 1, h // (Q_HEADS // HEADS)] for x in (k, v))
        score = keys @ q[i, h] * sm_scale
        if soft_cap is not None:
          score = soft_cap * np.tanh(score / soft_cap)
        sink = -np.inf if sinks is None else sinks[h]
        p = np.exp(score - score.max())
        heads.append(p @ values / (p.sum() + np.exp(sink - score.max())))
      rows.append(np.concatenate(heads))
    return np.stack(rows)

  def __call__(self, x):
    return self.attention(*self.qkv(x)) @ self.o_proj


# The layer rounds q, k and v of float32 sums to bfloat16, the reference those of float64 ones: a
# value near a tie may go the other way, by 2^-8 of itself. Such are rare; out is a mean of many.
ROUNDING = {"rtol": 0.0, "atol": 2.0**-8}


@functools.partial(jax.jit, static_argnames=("newest",))
def step(w, cache, x, rope, *, chunks=None, decodes=None, newest=None):
  return w(cache, x, rope, chunks=chunks, decodes=decodes, newest=newest)


X = inputs(47)
CHUNKS = (21, 21)  # no page ends there
TABLE = jnp.asarray([[5, 0, 9, 3]], jnp.int32)


@functools.cache
def served(format: str, lengths: tuple[int, ...], newest: str | None = None):
  """(cache, y) of X as one sequence, in chunks of these lengths, then decodes for the rest."""
  cache, outs, done = new_cache(format), [], 0
  for length in lengths:
    batch = ragged(TABLE, [done + length], [length])
    cache, y = step(weights(), cache, X[done : done + length], ROPE, chunks=batch, newest=newest)
    outs.append(y)
    done += length
  for at in range(done, len(X)):
    batch = nv.RaggedBatch.for_decode(TABLE, jnp.asarray([at + 1]))
    cache, y = step(weights(), cache, X[at : at + 1], ROPE, decodes=batch)
    outs.append(y)
  return cache, np.concatenate(outs)


class LlamaTest(TestCase):
  @parameterized.parameters("stored", "wide")
  def test_bf16_cache_is_wide_attention(self, newest):
    """A prompt in two chunks, then decodes."""
    _, y = served("bf16", CHUNKS, newest)
    np.testing.assert_allclose(y, Wide(weights())(X), **ROUNDING)

  def test_the_tolerance_sees_wrong_positions(self):
    """Queries of one chunk that are rotated by one position too many."""
    wide = Wide(weights())
    q, k, v = wide.qkv(X)
    q = wide.rotated(q, np.r_[np.ones(21), np.zeros(26)])
    moved = wide.attention(q, k, v) @ wide.o_proj
    self.assertGreater(np.abs(moved - wide(X)).max(), 8 * ROUNDING["atol"])

  @parameterized.parameters("fp8", "nvfp4")
  def test_other_formats_read_what_is_stored(self, format):
    """Wide attention over the decoded pages, which differ from k and v by the format's error."""
    cache, y = served(format, CHUNKS)
    pages = np.asarray(TABLE[0, :3])

    def stored(pool):
      values = pool.data.astype(jnp.float32)
      if format == "nvfp4":
        packed = nv.NvFp4Array(pool.data, pool.block_scale, jnp.float32(1))
        values = nv.unpack(packed, jnp.float32)
      rows = np.asarray(values, np.float64)[pages].swapaxes(1, 2)
      return rows.reshape(-1, HEADS, DIM)[: len(X)]

    wide = Wide(weights())
    q, k, v = wide.qkv(X)
    kept = stored(cache.k), stored(cache.v)
    np.testing.assert_allclose(y, wide.attention(q, *kept) @ wide.o_proj, **ROUNDING)
    for decoded, original in zip(kept, (k, v), strict=True):
      error = np.linalg.norm(decoded - original) / np.linalg.norm(original)
      self.assertBetween(error, 0.01, 0.15)

  def test_stored_does_not_depend_on_chunks(self):
    """The same bytes, and rows to rounding. XLA's products of more rows may sum otherwise, which
    moves a value near a tie."""
    cache, y = served("nvfp4", CHUNKS)
    whole_cache, whole = served("nvfp4", (47,))
    for a, b in zip(bits(cache), bits(whole_cache), strict=True):
      self.assertLess(np.mean(a != b), 1e-3)
    np.testing.assert_allclose(y, whole, **ROUNDING)

  def test_bfloat16_weights(self):
    batch = ragged(TABLE, [23], [23])
    x = X[:23].astype(jnp.bfloat16)
    _, y = step(weights(jnp.bfloat16), new_cache("bf16"), x, ROPE, chunks=batch)
    self.assertEqual(y.dtype, jnp.bfloat16)
    want = Wide(weights(jnp.bfloat16))(x)
    # out and y are rounded too: 2^-9 of values to 4.
    np.testing.assert_allclose(np.asarray(y).astype(np.float64), want, atol=2.0**-6)

  def test_is_a_pytree_of_its_weights(self):
    halved = jax.tree.map(lambda a: a / 2, weights())
    self.assertIsInstance(halved, nv.LlamaAttention)
    self.assertLen(jax.tree.leaves(halved), 4)


def qkv(rows, seed=2):
  r = np.random.default_rng(seed)
  shape = lambda heads: (rows, heads, DIM)
  return [jnp.asarray(r.standard_normal(shape(h)), jnp.bfloat16) for h in (Q_HEADS, HEADS, HEADS)]


class PartsTest(TestCase):
  """Chunks and decodes of one step, against the operations one by one."""

  def test_a_mixed_step(self):
    """Two chunks, three rows of padding, and three places of which one is free: as two steps."""
    cache = new_cache("bf16")
    chunks = ragged([[5, 0], [2, 3]], [18, 5], [18, 5])
    decodes = nv.RaggedBatch.for_decode(
      jnp.asarray([[6, 7], [4, 1], [8, 9]], jnp.int32), jnp.asarray([1, 20, 0], jnp.int32)
    )
    rows = qkv(23 + 3 + 3)

    @jax.jit
    def both(cache, rows, chunks, decodes):
      first, last = [x[:26] for x in rows], [x[26:] for x in rows]
      want, out_chunks = nv.attend(cache, *first, chunks=chunks)
      want, out_decodes = nv.attend(want, *last, decodes=decodes)
      mixed = nv.attend(cache, *rows, chunks=chunks, decodes=decodes)
      return mixed, (want, jnp.concatenate([out_chunks, out_decodes]))

    (got, out), (want, apart) = both(cache, rows, chunks, decodes)
    for a, b in zip(bits(got), bits(want), strict=True):
      np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(bits(out)[0], bits(apart)[0])
    unused = np.r_[23:26, 28]
    np.testing.assert_array_equal(np.asarray(out[unused], np.float32), 0)
    self.assertTrue(np.asarray(out[np.r_[0:23, 26, 27]]).any(axis=(1, 2)).all())
    with nv.debug_checks():  # what is unused breaks no rule, known or not
      for run in (nv.attend, jax.jit(nv.attend)):
        again, _ = run(cache, *rows, chunks=chunks, decodes=decodes)
        np.testing.assert_array_equal(bits(again)[0], bits(want)[0])
    positions = layer.row_positions(29, chunks=chunks, decodes=decodes)
    np.testing.assert_array_equal(positions, [*range(18), *range(5), -1, -1, -1, 0, 19, -1])

  def test_with_a_recent_window_a_chunk_is_read_before_it_is_written(self):
    """17 tokens after 24 and one after 40, of which 20 to 35 are wide; then 46 rows of padding."""
    table = [[5, 0, 9], [2, 3, 1]]
    chunks, more = ragged(table, [24, 40], [24, 40]), ragged(table, [41, 41], [17, 1])
    rows, new_rows = qkv(64), qkv(64, seed=4)
    attend, append = jax.jit(nv.attend), jax.jit(nv.append)
    prefill = jax.jit(functools.partial(nv.prefill, read_path="auto"))
    cache, _ = attend(new_cache("fp8", recent_window=20, num_rings=2), *rows, chunks=chunks)
    got, out = attend(cache, *new_rows, chunks=more)
    want = append(cache, *new_rows[1:], more)
    for a, b in zip(bits(got), bits(want), strict=True):
      np.testing.assert_array_equal(a, b)
    read = functools.partial(prefill, new_rows[0], batch=more, new_kv=new_rows[1:])
    np.testing.assert_array_equal(bits(out)[0], bits(read(cache=cache)[0])[0])
    late = np.asarray(read(cache=want)[0] - out, np.float32)
    self.assertGreater(np.abs(late).max(), 0.01)

  def test_with_a_recent_window_a_decoding_token_is_wide(self):
    """It attends to itself alone here, and finds its value."""
    decodes = nv.RaggedBatch.for_decode(TABLE, jnp.asarray([1], jnp.int32))
    rows, cache = qkv(1), new_cache("fp8", recent_window=16, num_rings=1)
    _, out = jax.jit(nv.attend)(cache, *rows, decodes=decodes)
    np.testing.assert_array_equal(out, jnp.repeat(rows[2], Q_HEADS // HEADS, axis=1))

  @parameterized.parameters((None, "nvfp4_a8q"), ("nvfp4_dequant", "nvfp4_dequant"))
  def test_read_paths(self, decode_read_path, expected):
    """Of chunks and of decodes apart."""
    rows, chunks = qkv(4), ragged(TABLE, [3], [3])
    decodes = nv.RaggedBatch.for_decode(TABLE + 1, jnp.asarray([1], jnp.int32))
    paths = {"read_path": "nvfp4_a8q", "decode_read_path": decode_read_path}
    run = functools.partial(nv.attend, chunks=chunks, decodes=decodes, **paths)
    reads = lambda q, *_, **__: (q, None)
    with (
      mock.patch.object(layer, "prefill", side_effect=reads) as prefill,
      mock.patch.object(layer, "decode", side_effect=reads) as decode,
    ):
      jax.eval_shape(run, new_cache(), *rows)
    self.assertEqual(prefill.call_args.kwargs["read_path"], "nvfp4_a8q")
    self.assertEqual(decode.call_args.kwargs["read_path"], expected)


class LlamaOfBenchmarksTest(TestCase):
  """`attend` as the attention of benchmarks/llama.py, in a scan over layers."""

  def test_gives_what_quality_measures(self):
    """A chunk that is read wide and a decoding step, against quality's server."""
    model, tokens = quality_model_test.small_model(), np.arange(2 * 9).reshape(2, 9) % 7
    server = quality_serving.Server(model, BY_NAME["fp8"], 2, 32, "xla")
    caches = jax.tree.map(jnp.copy, server.cache)  # the server donates its own
    table, rope = server.page_table, server.rope

    @functools.partial(jax.jit, static_argnames="newest")
    def step(caches, tokens, batch, positions, newest):
      def attention(cache, q, k, v):
        rows = (x.astype(jnp.bfloat16) for x in (q, k, v))
        parts = {"decodes": batch} if tokens.shape[1] == 1 else {"chunks": batch, "newest": newest}
        return nv.attend(cache, *rows, **parts)[::-1]

      flat = tokens.reshape(-1)
      return llama.forward(model, flat, positions, rope, caches, attention)

    for begin, end, newest in ((0, 8, "wide"), (8, 9, "stored")):
      want = server.advance(tokens[:, begin:end], newest)
      count = end - begin
      batch = ragged(table, [end, end], [count, count])
      positions = layer.row_positions(2 * count, chunks=batch)
      hidden, caches = step(caches, tokens[:, begin:end], batch, positions, newest)
      np.testing.assert_array_equal(hidden.reshape(want.shape), want)
    for a, b in zip(bits(caches), bits(server.cache), strict=True):
      np.testing.assert_array_equal(a, b)


class DonationTest(TestCase):
  """Under jit with a donated cache no copy of its pages is made, whatever the order."""

  @parameterized.parameters("stored", "wide", "decodes")
  def test_a_donated_cache_is_the_result(self, part):
    rings = {"recent_window": 16, "num_rings": 1} if part == "wide" else {}
    cache = new_cache(num_pages=512, **rings)
    rows = 1 if part == "decodes" else 8
    table = jnp.arange(4, dtype=jnp.int32)[None]
    batch = ragged(table, [rows], [rows])
    parts = {"decodes": batch} if part == "decodes" else {"chunks": batch}
    run = jax.jit(lambda w, c, x, rope, parts: w(c, x, rope, **parts), donate_argnums=1)
    compiled = run.lower(weights(), cache, X[:rows], ROPE, parts).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    # Parameters 0 to 3 are weights, and results begin with the cache: each leaf is its own.
    aliases = re.findall(r"\{(\d+)\}: \((\d+), ", text.partition("\n")[0])
    leaves = len(jax.tree.leaves(cache))
    self.assertEqual(aliases, [(str(i), str(i + 4)) for i in range(leaves)])
    self.assertGreaterEqual(memory.alias_size_in_bytes, cache.nbytes)
    # XLA on a CPU writes E4M3 scales anew (put() in cache.py); codes must not be copied.
    codes = str(list(cache.k.data.shape)).replace(" ", "")
    self.assertEmpty(re.findall(rf"u8{re.escape(codes)}\S* copy(?:-start)?\(.*", text))


class ArgumentsTest(TestCase):
  def test_bad_parts(self):
    cache, rows = new_cache(), qkv(3)
    chunks = ragged(TABLE, [3], [3])
    four = nv.RaggedBatch.for_decode(jnp.tile(TABLE, (4, 1)), jnp.ones(4, jnp.int32))
    two = nv.RaggedBatch.for_decode(jnp.tile(TABLE, (2, 1)), jnp.ones(2, jnp.int32))
    for parts, message in (
      ({}, "chunks or decodes must be given, got neither"),
      ({"decodes": two}, "q must have exactly a row for each of 2 decodes, got 3"),
      ({"chunks": chunks, "decodes": four}, "at least a row for each of 4 decodes, got 3"),
      ({"chunks": TABLE}, "chunks must be a RaggedBatch, got ArrayImpl"),
      ({"chunks": chunks, "newest": "recent"}, r"newest must be one of .*, got 'recent'"),
      ({"chunks": chunks, "read_path": "bf16"}, "read_path 'bf16' needs a cache with K and V in"),
      ({"chunks": ragged(TABLE, [2], [3])}, "kv_lens must count this step's tokens"),
    ):
      with self.assertRaisesRegex(ValueError, message):
        jax.eval_shape(functools.partial(nv.attend, **parts), cache, *rows)
    with self.assertRaisesRegex(ValueError, r"k must be \[rows, heads, dim\] of q's rows"):
      nv.attend(cache, rows[0], rows[1][:2], rows[2], chunks=chunks)
    how = {"chunks": chunks, "implementation": "mosaic_sm90"}
    with self.assertRaisesRegex(NotImplementedError, "'mosaic_sm90' cannot run"):
      jax.eval_shape(functools.partial(nv.attend, **how), cache, *rows)

  def attend_nothing(self):
    """attend's place is taken by a copy of q: what compiles is rope and its checks."""
    attend = lambda cache, q, k, v, **_: (cache, q)
    self.enter_context(mock.patch.object(layer, "attend", side_effect=attend))

  @parameterized.parameters("chunks", "decodes")
  def test_positions_past_the_rope(self, part):
    """40 tokens, of which the newest stand past a table of 39: known lengths, and inside jit."""
    self.attend_nothing()
    w, cache, rope = weights(), new_cache(), nv.rope_table(DIM, 39)
    rows = 1 if part == "decodes" else 3
    call = lambda rope, batch: w(cache, X[:rows], rope, **{part: batch})[1]
    batch, shorter = (ragged(TABLE, [kv_len], [rows]) for kv_len in (40, 39))
    message = rf"{part}' kv_lens\[0\] must be at most rope's 39 positions, got 40"
    with self.assertRaisesRegex(ValueError, message):
      call(rope, batch)
    jitted = jax.jit(call)
    jitted(rope, batch).block_until_ready()  # clipped, as long as nobody asks
    with nv.debug_checks():
      jitted(rope, shorter).block_until_ready()
      with self.assertRaisesRegex(jax.errors.JaxRuntimeError, message):
        jitted(rope, batch).block_until_ready()
        jax.effects_barrier()

  def test_places_without_rows_need_no_angles(self):
    self.attend_nothing()
    rope, batch = nv.rope_table(DIM, 16), ragged([[5, 0, 9], [1, 2, 3]], [40, 3], [0, 3])
    _, y = weights()(new_cache(), X[:3], rope, chunks=batch)
    self.assertTrue(np.asarray(y).any())

  @parameterized.parameters(
    (lambda: None, "rope must be a pair of cos and sin, got NoneType"),
    (lambda: (*ROPE, ROPE[0]), "rope must be a pair of cos and sin, got 3 of them"),
    (lambda: (ROPE[0], None), "rope's sin must be an array, got NoneType"),
    (lambda: (ROPE[0], ROPE[1][:9]), r"must be equally long, 1 or more, got \(256, 9\)"),
    (lambda: (ROPE[0][:0],) * 2, r"must be equally long, 1 or more, got \(0, 0\)"),
    (lambda: nv.rope_table(DIM, 0), "length must be at least 1, got 0"),
    (lambda: nv.rope_table(DIM, -1), "length must be at least 1, got -1"),
    (lambda: nv.rope_table(0, 16), "head_dim must be even and at least 2, got 0"),
  )
  def test_bad_rope(self, rope, message):
    with self.assertRaisesRegex(ValueError, message):
      weights()(new_cache(), X[:3], rope(), chunks=ragged(TABLE, [3], [3]))

  def test_no_cache(self):
    none: Any = None
    batch = ragged(TABLE, [3], [3])
    with self.assertRaisesRegex(ValueError, "cache must be a PagedKVCache, got NoneType"):
      nv.attend(none, *qkv(3), chunks=batch)
    with self.assertRaisesRegex(ValueError, "cache must be a PagedKVCache, got NoneType"):
      weights()(none, X[:3], ROPE, chunks=batch)

  def test_bad_parts_of_a_layer(self):
    call = lambda **parts: weights()(new_cache(), X[:3], ROPE, **parts)
    with self.assertRaisesRegex(ValueError, "chunks or decodes must be given, got neither"):
      call()
    with self.assertRaisesRegex(ValueError, "chunks must be a RaggedBatch, got ArrayImpl"):
      call(chunks=TABLE)
    with self.assertRaisesRegex(ValueError, "x must have exactly a row for each of 1 decodes"):
      call(decodes=nv.RaggedBatch.for_decode(TABLE, jnp.ones(1, jnp.int32)))

  def test_bad_weights_and_rows(self):
    w, cache, batch = weights(), new_cache(), ragged(TABLE, [3], [3])
    call = lambda w=w, x=X[:3], rope=ROPE: w(cache, x, rope, chunks=batch)
    wide = nv.LlamaAttention(w.q_proj, w.q_proj, w.v_proj, w.o_proj)
    with self.assertRaisesRegex(ValueError, r"k_proj must be float32 \(96, 128\) for 2 KV heads"):
      call(w=wide)
    turned = nv.LlamaAttention(w.q_proj, w.k_proj, w.v_proj, w.o_proj.T)
    with self.assertRaisesRegex(ValueError, r"o_proj must be float32 \(384, 96\) .*\(96, 384\)"):
      call(w=turned)
    with self.assertRaisesRegex(ValueError, r"q_proj must be bfloat16"):
      call(x=X[:3].astype(jnp.bfloat16))
    with self.assertRaisesRegex(
      ValueError, r"x must be .*\[rows, hidden\], got float32 \(1, 3, 96\)"
    ):
      call(x=X[None, :3])
    with self.assertRaisesRegex(ValueError, r"rope's cos must be float32 \[positions, 32\]"):
      call(rope=nv.rope_table(128, 16))
    with self.assertRaisesRegex(ValueError, "head_dim must be even and at least 2, got 63"):
      nv.rope_table(63, 4)


if __name__ == "__main__":
  absltest.main()
