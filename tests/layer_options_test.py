"""Options of `attend` and of `LlamaAttention`: each does here what it does to plain operations."""

import functools
import inspect
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import nvfp4_pallas as nv
from nvfp4_pallas import dispatch, layer
from tests import layer_test
from tests.base import TestCase
from tests.layer_test import DIM, HEADS, Q_HEADS, Wide, bits, new_cache, qkv, ragged, weights

SINKS = jnp.linspace(-2, 3, Q_HEADS, dtype=jnp.float32)
# Of the scores; each changes both parts of the step below.
SCORES: dict[str, Any] = {"sm_scale": 0.31, "window": 5, "soft_cap": 0.7, "sinks": SINKS}

# A step of 11 rows of one sequence after 9 that are cached, and of one row of another after 13.
PAST, NEW = (9, 13), (11, 1)
TABLE = jnp.asarray([[5, 0], [2, 7]], jnp.int32)
CHUNKS = ragged(TABLE[:1], [20], [11])
DECODES = nv.RaggedBatch.for_decode(TABLE[1:], jnp.asarray([14], jnp.int32))
TEXTS = [qkv(past + new, seed=seed) for seed, past, new in zip((0, 1), PAST, NEW, strict=True)]
ROWS = [jnp.concatenate([one[9:], other[13:]]) for one, other in zip(*TEXTS, strict=True)]
REPACK = {"read_path": "nvfp4_repack"}
append = jax.jit(nv.append)


@functools.cache
def cached(format: str) -> nv.PagedKVCache:
  _, k, v = (jnp.concatenate([one[:9], other[:13]]) for one, other in zip(*TEXTS, strict=True))
  return append(new_cache(format), k, v, ragged(TABLE, PAST, PAST))


def by_hand(cache, q, k, v, chunks, decodes, *, for_chunks=None, for_decodes=None, **options):
  """attend's step with newest="stored", of operations that are called one by one."""
  who = {"implementation": options.get("implementation")}
  rows = q.shape[0] - decodes.num_seqs
  cache = nv.append(cache, k[:rows], v[:rows], chunks, **who)
  cache = nv.append(cache, k[rows:], v[rows:], decodes, **who)
  out, _ = nv.prefill(q[:rows], cache, chunks, **options, **(for_chunks or {}))
  last, _ = nv.decode(q[rows:], cache, decodes, **options, **(for_decodes or {}))
  return cache, jnp.concatenate([out, last])


class ScoresTest(TestCase):
  """Against dense attention in float64, over BF16 caches."""

  def dense(self, **options):
    whole = [Wide(weights()).attention(*map(layer_test.bf16, text), **options) for text in TEXTS]
    return [rows[past:] for rows, past in zip(whole, PAST, strict=True)]

  def check(self, newest, options):
    run = functools.partial(nv.attend, chunks=CHUNKS, decodes=DECODES, newest=newest, **options)
    _, out = jax.jit(run)(cached("bf16"), *ROWS)
    got = np.split(np.asarray(out, np.float64).reshape(len(out), -1), [NEW[0]])
    for rows, want, without in zip(got, self.dense(**options), self.dense(), strict=True):
      # out is rounded to bfloat16, all else is exact or float32.
      np.testing.assert_allclose(rows, want, rtol=2.0**-8, atol=1e-5)
      if options:
        self.assertGreater(np.abs(want - without).max(), 0.1)

  @parameterized.parameters({}, *({name: value} for name, value in SCORES.items()))
  def test_one(self, **options):
    self.check("stored", options)

  def test_all_with_wide_chunks(self):
    self.check("wide", SCORES)

  def test_all_of_a_layer(self):
    """The same options given to LlamaAttention, with angles of another base."""
    w, x = weights(), layer_test.X[:20]
    rope = nv.rope_table(DIM, 20, base=500.0)
    call = functools.partial(w, chunks=ragged(TABLE[:1], [20], [20]), **SCORES)
    _, y = jax.jit(call)(new_cache("bf16"), x, rope)
    wide = Wide(w, base=500.0)
    want = wide.attention(*wide.qkv(x), **SCORES) @ wide.o_proj
    np.testing.assert_allclose(y, want, **layer_test.ROUNDING)
    self.assertGreater(np.abs(want - wide(x)).max(), 0.1)


class OperationsTest(TestCase):
  """Against append, prefill and decode."""

  def test_q_levels(self):
    """One level, not the usual two: the same bits, and those of two levels are others."""
    how = {"read_path": "nvfp4_a4q"}

    @jax.jit
    def run(cache, rows):
      hand = functools.partial(by_hand, cache, *rows, CHUNKS, DECODES, **how)
      got = nv.attend(cache, *rows, chunks=CHUNKS, decodes=DECODES, q_levels=1, **how)
      return got, hand(q_levels=1), hand(q_levels=2)[1]

    got, same, two_levels = run(cached("nvfp4"), ROWS)
    for a, b in zip(bits(got), bits(same), strict=True):
      np.testing.assert_array_equal(a, b)
    for part in (slice(0, NEW[0]), slice(NEW[0], None)):
      self.assertTrue((bits(got[1][part])[0] != bits(two_levels[part])[0]).any())

  @parameterized.parameters(
    ({"implementation": "xla"}, {"implementation": "xla"}),
    ({"max_workspace_bytes": 0}, {"for_chunks": {"max_workspace_bytes": 0}}),
    ({"batch_invariant": True}, {"for_decodes": {"batch_invariant": True}}),
  )
  def test_what_only_kernels_see(self, option, by_hands):
    """The programs that a Hopper GPU would get, of a long prompt and of decodes."""
    parts = lambda chunks, decodes: {"chunks": chunks, "decodes": decodes}
    got = hopper(lambda cache, rows, *of: nv.attend(cache, *rows, **parts(*of), **REPACK, **option))
    self.assertEqual(got, hopper(lambda c, rows, *of: by_hand(c, *rows, *of, **REPACK, **by_hands)))
    self.assertNotEqual(got, hopper(lambda c, rows, *of: by_hand(c, *rows, *of, **REPACK)))

  def test_a_layer_hands_all_on(self):
    options = SCORES | {
      "newest": "wide",
      "read_path": "bf16",
      "decode_read_path": "fp8",
      "implementation": "xla",
      "q_levels": 1,
      "batch_invariant": True,
      "max_workspace_bytes": 7,
    }
    known = {
      n for n, p in inspect.signature(nv.attend).parameters.items() if p.kind is p.KEYWORD_ONLY
    }
    self.assertEqual(known, {"chunks", "decodes", *options})
    nothing = mock.patch.object(layer, "attend", side_effect=lambda cache, q, *_, **__: (cache, q))
    with nothing as attend:
      weights()(
        new_cache(), layer_test.X[:12], layer_test.ROPE, chunks=CHUNKS, decodes=DECODES, **options
      )
    self.assertEqual(attend.call_args.kwargs, {"chunks": CHUNKS, "decodes": DECODES} | options)


def hopper(step) -> str:
  """What `step` is on a Hopper GPU: 2048 rows of one sequence, and four that decode."""
  cache = jax.eval_shape(
    lambda: nv.PagedKVCache.create(num_pages=64, page_size=64, num_kv_heads=HEADS, head_dim=128)
  )
  rows = [jax.ShapeDtypeStruct((2052, h, 128), jnp.bfloat16) for h in (Q_HEADS, HEADS, HEADS)]
  chunks = ragged([list(range(32))], [2048], [2048])
  table = jnp.arange(32, 64, dtype=jnp.int32).reshape(4, 8)
  decodes = nv.RaggedBatch.for_decode(table, jnp.asarray([5, 100, 3, 0], jnp.int32))
  with dispatch.use_target(dispatch.Target("sm_90")):
    return str(jax.make_jaxpr(step)(cache, rows, chunks, decodes))


class RopeTableTest(TestCase):
  @parameterized.product(base=(10_000.0, 500_000.0), head_dim=(64, 80))
  def test_is_a_turn_for_each_position(self, base, head_dim):
    """By multiplication: position p has turned p times by base^(-2 i / head_dim)."""
    turn = np.exp(1j / base ** (np.arange(head_dim // 2) / (head_dim // 2)))
    want = np.cumprod(np.tile(turn, (300, 1)), axis=0) / turn
    tables = nv.rope_table(head_dim, 300, base=base)
    for table, exact in zip(tables, (want.real, want.imag), strict=True):
      self.assertEqual(table.dtype, jnp.float32)
      np.testing.assert_allclose(table, exact, rtol=0, atol=2.0**-24)
    if base == 10_000:
      for table, usual in zip(tables, nv.rope_table(head_dim, 300), strict=True):
        np.testing.assert_array_equal(table, usual)


if __name__ == "__main__":
  absltest.main()
