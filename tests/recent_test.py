"""The recent window: what is where after appends, and attention over pages and rings together."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import nvfp4_pallas as nv
from benchmarks import oracle
from nvfp4_pallas.cache import encode_rows, pool_arrays
from tests import cases
from tests.attention_test import AttentionTestCase, run_decode, run_prefill
from tests.base import TestCase

HEADS, DIM = 2, 64
ROWS = 170  # of every step, so that it compiles once; those past the last are padding
append = jax.jit(nv.append)


def exact(built, q, read_path, **options):
  batch = built.batch
  return oracle.attention(
    q,
    built.cache,
    batch.page_table,
    batch.kv_lens,
    batch.cu_q_lens,
    read_path=read_path,
    ring_ids=batch.ring_ids,
    **options,
  )


class AttentionTest(AttentionTestCase):
  @parameterized.parameters(
    (("nvfp4", "nvfp4"), 1),
    (("nvfp4", "nvfp4"), 40),
    (("fp8", "nvfp4"), 16),
    (("fp8", "fp8"), 20),
  )
  def test_decode(self, formats, tokens):
    case = cases.with_formats(cases.Case("", kv_lens=(70, 0, 1, 33, 129, 50)), *formats)
    built = cases.with_window(cases.build(cases.decode_case(case), padding_rows=0), tokens)
    path = "fp8" if formats == ("fp8", "fp8") else "nvfp4_dequant"
    for options in ({}, {"window": 35}, {"soft_cap": 4.0}):
      self.assert_within_bounds(
        run_decode(built, path, **options), exact(built, built.q, path, **options)
      )

  @parameterized.parameters("nvfp4_repack", "nvfp4_a4q", "nvfp4_a8q")
  def test_decode_read_paths(self, read_path):
    case = cases.decode_case(cases.Case("", kv_lens=(70, 0, 1, 33, 129)))
    built = cases.with_window(cases.build(case, padding_rows=0), 20)
    sinks = jnp.linspace(-3, 4, built.q.shape[1], dtype=jnp.float32)
    got = run_decode(built, read_path, sinks=sinks, num_splits=3)
    self.assert_within_bounds(got, exact(built, built.q, read_path, sinks=sinks))

  @parameterized.parameters(
    ("nvfp4_dequant", 1), ("nvfp4_dequant", 64), ("nvfp4_a4q", 20), ("nvfp4_a8q", 20)
  )
  def test_prefill_after_append(self, read_path, tokens):
    built = cases.with_window(cases.build(cases.MIXED), tokens)
    for options in ({}, {"window": 25}, {"causal": False}):
      got = run_prefill(built, read_path, **options)
      self.assert_within_bounds(got, exact(built, built.q, read_path, **options))

  @parameterized.product(past_only=(False, True), page_size=(16, 32))
  def test_prefill_with_new_kv(self, past_only, page_size):
    case = cases.Case("", q_lens=(5, 1, 24, 0, 3), kv_lens=(90, 1, 24, 70, 41), page_size=page_size)
    built = cases.build(case)
    r = np.random.default_rng(1)
    shape = (built.q.shape[0], case.num_kv_heads, case.head_dim)
    new_kv = tuple(jnp.asarray(r.standard_normal(shape), jnp.float32) for _ in range(2))
    built = cases.with_window(built, 20, past_only=past_only)
    for options in ({}, {"window": 11}):
      got = run_prefill(built, "nvfp4_a4q", new_kv=new_kv, **options)
      self.assert_within_bounds(got, exact(built, built.q, "nvfp4_a4q", new_kv=new_kv, **options))


@dataclasses.dataclass
class Model:
  """What a cache should hold: the rows of each sequence, and where its wide part begins."""

  tokens: int
  page_size: int
  rows: list
  starts: list

  def append(self, seq, rows):
    self.rows[seq] = np.concatenate([self.rows[seq], rows])
    left = max(len(self.rows[seq]) - self.tokens, 0) // self.page_size * self.page_size
    self.starts[seq] = max(self.starts[seq], left)


class AppendTest(TestCase):
  def setUp(self):
    super().setUp()
    self.r = np.random.default_rng(0)

  def make(self, tokens, page_size, num_seqs=3, pages=12, **options):
    cache = nv.PagedKVCache.create(
      num_pages=num_seqs * pages + 1,
      page_size=page_size,
      num_kv_heads=HEADS,
      head_dim=DIM,
      k_global_scale=jnp.asarray([0.5, 1.5], jnp.float32),
      recent_window=tokens,
      num_rings=num_seqs + 1,
      **options,
    )
    self.table = self.r.permutation(num_seqs * pages).reshape(num_seqs, pages).astype(np.int32)
    self.rings = self.r.permutation(num_seqs + 1)[:num_seqs].astype(np.int32)
    empty = [np.zeros((0, HEADS, DIM), np.float32) for _ in range(num_seqs)]
    return cache, Model(tokens, page_size, empty, [0] * num_seqs)

  def batch(self, lens, q_lens, rings=None):
    return nv.RaggedBatch(
      jnp.asarray(self.table),
      jnp.asarray(lens, jnp.int32),
      jnp.asarray(np.cumsum([0, *q_lens]), jnp.int32),
      jnp.asarray(self.rings if rings is None else rings, jnp.int32),
    )

  def step(self, cache, model, q_lens):
    rows = self.r.standard_normal((ROWS, HEADS, DIM)).astype(np.float32)
    rows = np.array(jnp.asarray(rows, jnp.bfloat16).astype(jnp.float32))
    first = 0
    for seq, count in enumerate(q_lens):
      model.append(seq, rows[first : first + count])
      first += count
    x = jnp.asarray(rows, jnp.bfloat16)
    batch = self.batch([len(rows) for rows in model.rows], q_lens)
    return append(cache, x, -x, batch)

  def check(self, cache, model):
    """Pages and rings hold the model's rows, bit for bit; starts are the model's."""
    recent = cache.recent
    np.testing.assert_array_equal(np.asarray(recent.starts)[self.rings], model.starts)
    page, count = model.page_size, recent.ring_pages
    for seq, rows in enumerate(model.rows):
      start = model.starts[seq]
      self.assertLessEqual(len(rows) - start, count * page)
      for pool, wide, sign in ((cache.k, recent.k, 1), (cache.v, recent.v, -1)):
        want = encode_rows(pool, jnp.asarray(sign * rows[:start], jnp.bfloat16))
        token = np.arange(start)
        for array, expected in zip(pool_arrays(pool), want, strict=True):
          got = np.asarray(array)[self.table[seq, token // page], :, token % page]
          np.testing.assert_array_equal(got.view(np.uint8), np.asarray(expected).view(np.uint8))
        token = np.arange(start, len(rows))
        at = self.rings[seq] * count + token // page % count
        got = np.asarray(wide.data.astype(jnp.float32))[at, :, token % page]
        np.testing.assert_array_equal(got, sign * rows[start:])

  @parameterized.parameters((1, 16, "nvfp4"), (16, 32, "fp8"), (20, 16, "nvfp4"), (64, 32, "nvfp4"))
  def test_steps_of_any_length(self, tokens, page_size, k_format):
    cache, model = self.make(tokens, page_size, k_format=k_format)
    steps = [(5, 0, 130), (1, 1, 1), (17, 40, 0), (1, 1, 33), (60, 3, 16), (0, 0, 0), (1, 1, 1)]
    for q_lens in [*steps, *[(1, 1, 0)] * 20]:
      cache = self.step(cache, model, q_lens)
      self.check(cache, model)

  def test_nothing_else_is_written(self):
    cache, model = self.make(20, 16)
    cache = self.step(cache, model, (99, 7, 35))

    def scramble(a):
      if a.dtype in (jnp.float32, jnp.int32):
        return a
      shape = np.asarray(a).view(np.uint8).shape
      return jnp.asarray(self.r.integers(0, 256, shape, dtype=np.uint8).view(a.dtype))

    before = jax.tree.map(scramble, cache)
    before = dataclasses.replace(before, recent=cache.recent)
    after = self.step(before, model, (1, 1, 1))
    # A page each of two sequences has left the window.
    self.assertEqual(model.starts, [80, 0, 16])
    for name, count in (("data", 32), ("block_scale", 32)):
      old, new = (np.asarray(getattr(c.k, name)).view(np.uint8) for c in (before, after))
      self.assertEqual(int((old != new).any(axis=(1, 3)).sum()), count)
    old, new = (np.asarray(c.recent.k.data).view(np.uint8) for c in (before, after))
    self.assertEqual(int((old != new).any(axis=(1, 3)).sum()), 3)

  def test_a_page_has_the_same_bits_by_any_way(self):
    results = []
    for lengths in ((96,), (1,) * 96, (50, 1, 45)):
      self.r = np.random.default_rng(3)
      cache, _ = self.make(32, 16, num_seqs=1)
      x = np.random.default_rng(4).standard_normal((96, HEADS, DIM))
      done = 0
      for length in lengths:
        rows = jnp.asarray(x[done : done + length], jnp.float32)
        done += length
        cache = append(cache, rows, -rows, self.batch([done], [length]))
      pools = cache.k, cache.v, cache.recent.starts
      results.append(jax.tree.map(lambda a: np.asarray(a).view(np.uint8), pools))
    for other in results[1:]:
      jax.tree.map(np.testing.assert_array_equal, results[0], other)

  def test_rejected_drafts(self):
    """Up to a window of the newest tokens may be given up: the others are where they were."""
    cache, model = self.make(32, 16)
    cache = self.step(cache, model, (100, 50, 16))
    cache = self.step(cache, model, (20, 32, 5))
    for seq, drop in enumerate((20, 32, 5)):
      model.rows[seq] = model.rows[seq][:-drop]
    for q_lens in ((3, 1, 7), (40, 40, 40)):
      cache = self.step(cache, model, q_lens)
      self.check(cache, model)

  def test_a_ring_goes_to_a_new_sequence(self):
    cache, model = self.make(32, 16)
    cache = self.step(cache, model, (90, 40, 40))
    model.rows[1], model.starts[1] = model.rows[1][:0], 0
    for q_lens in ((1, 20, 1), (1, 30, 1)):
      cache = self.step(cache, model, q_lens)
      self.check(cache, model)

  def test_shared_prefix(self):
    cache, model = self.make(32, 16)
    cache = self.step(cache, model, (100, 0, 0))
    self.assertEqual(model.starts[0], 64)
    self.table[1, :4] = self.table[0, :4]
    model.rows[1], model.starts[1] = model.rows[0][:64], 64
    ring, shared = jnp.asarray(self.rings[1:2]), jnp.asarray([64], jnp.int32)
    cache = jax.jit(nv.open_rings)(cache, ring, shared)
    for q_lens in ((1, 20, 1), (1, 30, 1)):
      cache = self.step(cache, model, q_lens)
      self.check(cache, model)

  def test_fork(self):
    cache, model = self.make(32, 16)
    cache = self.step(cache, model, (100, 0, 0))
    model.rows[2], model.starts[2] = model.rows[0], model.starts[0]
    self.table[2, :4] = self.table[0, :4]
    source = jnp.asarray([self.rings[0], -1, 99], jnp.int32)
    target = jnp.asarray([self.rings[2], self.rings[0], self.rings[0]], jnp.int32)
    cache = jax.jit(nv.copy_rings)(cache, source, target)
    cache = self.step(cache, model, (7, 3, 30))
    self.check(cache, model)

  @parameterized.parameters(20, 80)
  def test_no_ring(self, tokens):
    cache, _ = self.make(tokens, 16)
    plain = nv.PagedKVCache(cache.k, cache.v)
    x = jnp.asarray(self.r.standard_normal((60, HEADS, DIM)), jnp.bfloat16)
    with_rings = self.batch([20, 30, 10], [20, 30, 10], [-1, 99, 4])
    after = nv.append(cache, x, x, with_rings)
    want = nv.append(plain, x, x, dataclasses.replace(with_rings, ring_ids=None))
    for name in ("k", "v"):
      for got, expected in zip(
        pool_arrays(getattr(after, name)), pool_arrays(getattr(want, name)), strict=True
      ):
        np.testing.assert_array_equal(
          np.asarray(got).view(np.uint8), np.asarray(expected).view(np.uint8)
        )
    jax.tree.map(
      lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)),
      after.recent,
      cache.recent,
    )

  def test_layers_under_vmap(self):
    cache, model = self.make(20, 16)
    layers = jax.tree.map(lambda a: jnp.stack([a, a]), cache)
    x = jnp.asarray(self.r.standard_normal((2, 90, HEADS, DIM)), jnp.bfloat16)
    batch = self.batch([40, 50, 0], [40, 50, 0])
    got = jax.vmap(nv.append, in_axes=(0, 0, 0, None))(layers, x, x, batch)
    for i in range(2):
      want = nv.append(cache, x[i], x[i], batch)
      jax.tree.map(
        lambda a, b, i=i: np.testing.assert_array_equal(
          np.asarray(a)[i].view(np.uint8), np.asarray(b).view(np.uint8)
        ),
        got,
        want,
      )


class ErrorsTest(TestCase):
  def create(self, **options):
    options = {"recent_window": 16, "num_rings": 2} | options
    return nv.PagedKVCache.create(
      num_pages=4, page_size=16, num_kv_heads=HEADS, head_dim=DIM, **options
    )

  @parameterized.parameters(
    ({"recent_window": -1}, "recent_window must be from 1"),
    ({"recent_window": 0}, "recent_window must be from 1"),
    ({"recent_window": 2**17}, "recent_window must be from 1"),
    ({"num_rings": None}, "num_rings must be at least 1"),
    ({"num_rings": 2.0}, "num_rings must be a whole number, got 2.0"),
    ({"recent_window": None}, "recent_window must be a whole number, got None"),
    ({"recent_window": 20.0}, "recent_window must be a whole number, got 20.0"),
    ({"recent_window": True}, "recent_window must be a whole number, got True"),
    ({"num_rings": 0}, "num_rings must be at least 1"),
    ({"k_format": "bf16"}, "must be 0 for a bf16 cache"),
  )
  def test_create(self, options, message):
    with self.assertRaisesRegex(ValueError, message):
      self.create(**options)

  def test_calls(self):
    cache = self.create()
    x = jnp.zeros((3, HEADS, DIM), jnp.bfloat16)
    table = jnp.zeros((3, 1), jnp.int32)
    batch = nv.RaggedBatch.for_decode(table, jnp.ones((3,), jnp.int32))
    with self.assertRaisesRegex(ValueError, "ring_ids must be given for 3 sequences and 2 rings"):
      nv.append(cache, x, x, batch)
    with self.assertRaisesRegex(ValueError, "ring_ids must be given"):
      nv.decode(jnp.zeros((3, 4, DIM), jnp.bfloat16), cache, batch, read_path="nvfp4_dequant")
    with self.assertRaisesRegex(ValueError, "batch must be given, not slot_mapping"):
      nv.append(cache, x, x, slot_mapping=jnp.zeros((3,), jnp.int32))
    none = dataclasses.replace(batch, ring_ids=jnp.asarray([99, -1, 99], jnp.int32))
    nv.append(cache, x, x, none)
    twice = dataclasses.replace(batch, ring_ids=jnp.asarray([1, -1, 1], jnp.int32))
    with self.assertRaisesRegex(ValueError, r"ring_ids\[2\] must not repeat a ring, got 1"):
      nv.append(cache, x, x, twice)
    wrong = dataclasses.replace(batch, ring_ids=jnp.asarray([1, 0], jnp.int32))
    with self.assertRaisesRegex(ValueError, r"ring_ids must be int32 \[3\]"):
      nv.append(cache, x, x, wrong)

  def test_rings(self):
    cache, one = self.create(), jnp.asarray([1], jnp.int32)
    for lens in (17, -16):
      with self.assertRaisesRegex(
        ValueError, rf"kv_lens\[0\] must be a multiple of .* 16 .* {lens}"
      ):
        nv.open_rings(cache, one, jnp.asarray([lens], jnp.int32))
    with self.assertRaisesRegex(ValueError, "ring_ids must be an array, got list"):
      nv.open_rings(cache, [1], one)
    with self.assertRaisesRegex(ValueError, "must have a recent window"):
      nv.open_rings(nv.PagedKVCache(cache.k, cache.v), one, one)
    with self.assertRaisesRegex(ValueError, "equally long"):
      nv.copy_rings(cache, one, jnp.asarray([1, 0], jnp.int32))
    twice, pages = jnp.asarray([-1, 1, 99, -1, 1], jnp.int32), jnp.zeros((5,), jnp.int32)
    with self.assertRaisesRegex(ValueError, r"ring_ids\[4\] must not repeat a ring, got 1"):
      nv.open_rings(cache, twice, pages)
    with self.assertRaisesRegex(ValueError, r"target\[4\] must not repeat a ring, got 1"):
      nv.copy_rings(cache, pages, twice)
    nv.copy_rings(cache, twice, jnp.asarray([-1, 0, 99, -1, 1], jnp.int32))  # one source, two forks


if __name__ == "__main__":
  absltest.main()
