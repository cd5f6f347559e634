"""What the contract promises when values are faulty, shared, reused or at a limit, by `xla`.

All batches but the largest have the same shapes, so that an operation is compiled once: free places
follow the sequences, wild numbers their pages, and NaN the rows.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import nvfp4_pallas as nv
from nvfp4_pallas import checkpoint
from tests.base import TestCase

HEADS, GROUP, DIM, PAGE = 2, 2, 64, 16
PAGES, SEQS, WIDTH, ROWS = 10, 5, 4, 49  # of a pool, a batch, a page table, and of q, k and v
WILD = 2**30 + 3
PATH = {"bf16": "bf16", "fp8": "fp8", "nvfp4": "nvfp4_dequant"}

append = jax.jit(functools.partial(nv.append, implementation="xla"))
NAMES = ("read_path", "window")
prefill = jax.jit(functools.partial(nv.prefill, implementation="xla"), static_argnames=NAMES)
decode = jax.jit(functools.partial(nv.decode, implementation="xla"), static_argnames=NAMES)


def new_cache(format="nvfp4", num_pages=PAGES, heads=HEADS, **options):
  scale = {} if format == "bf16" else {"k_global_scale": 0.7, "v_global_scale": 1.3}
  return nv.PagedKVCache.create(
    num_pages=num_pages,
    page_size=PAGE,
    num_kv_heads=heads,
    head_dim=DIM,
    k_format=format,
    **scale,
    **options,
  )


def random(tokens, heads=HEADS, seed=0, rows=ROWS):
  values = np.full((max(tokens, rows), heads, DIM), np.nan)
  values[:tokens] = np.random.default_rng(seed).standard_normal((tokens, heads, DIM))
  return jnp.asarray(values, jnp.bfloat16)


def kv(tokens, seed=0):
  return random(tokens, seed=2 * seed), random(tokens, seed=2 * seed + 1)


def queries(tokens, heads=HEADS, rows=ROWS):
  return random(tokens, heads * GROUP, 99, rows)


def ragged(page_table, kv_lens, q_lens=None):
  table = np.full((SEQS, WIDTH), WILD)
  table[: len(page_table), : len(page_table[0])] = page_table
  lens = np.zeros((2, SEQS), int)
  lens[:, : len(kv_lens)] = kv_lens, (kv_lens if q_lens is None else q_lens)
  cu_q_lens = np.cumsum([0, *lens[1]])
  return nv.RaggedBatch(*(jnp.asarray(a, jnp.int32) for a in (table, lens[0], cu_q_lens)))


def one_more(batch):
  """The last token of every sequence as its query."""
  return nv.RaggedBatch.for_decode(batch.page_table, batch.kv_lens)


def attended(cache, batch, tokens, path="nvfp4_dequant"):
  """prefill of all tokens and decode of the last ones, as float32."""
  states = (
    prefill(queries(tokens), cache, batch, read_path=path),
    decode(queries(SEQS, rows=SEQS), cache, one_more(batch), read_path=path),
  )
  return [np.asarray(a).astype(np.float32) for state in states for a in state]


def raw(cache):
  return [np.asarray(a).view(np.uint8) for a in jax.tree.leaves(cache)]


class FaultsTestCase(TestCase):
  def assert_same_bits(self, got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


class NonFiniteTest(FaultsTestCase):
  """One bad value in K or V, from append to attention: its token, head and block, no others."""

  BATCH = ([[4, 1], [3, 0]], [20, 9])
  TOKEN, HEAD, ELEMENT = 7, 1, 37  # of the first sequence; its block is 32..47

  def states(self, format, which, value):
    k, v = kv(29)
    if which is not None:
      x = (k, v)[which].at[self.TOKEN, self.HEAD, self.ELEMENT].set(value)
      k, v = (x, v) if which == 0 else (k, x)
    batch = ragged(*self.BATCH)
    cache = append(new_cache(format), k, v, batch)
    return cache, attended(cache, batch, 29, PATH[format])

  @parameterized.product(
    format=("nvfp4", "fp8", "bf16"), which=(0, 1), value=(np.nan, np.inf, -np.inf)
  )
  def test_one_value(self, format, which, value):
    clean_cache, clean = self.states(format, None, None)
    cache, (out, lse, last, last_lse) = self.states(format, which, value)
    width = 16 if format == "nvfp4" else 1
    first = self.ELEMENT // width * width
    block = slice(first, first + width)
    # In the cache: nothing but this row of this head.
    rows = np.zeros((PAGES, HEADS, PAGE), bool)
    rows[4, self.HEAD, self.TOKEN] = True
    for got, want in zip(raw(cache), raw(clean_cache), strict=True):
      if got.ndim == 4:
        self.assertFalse((got != want).any(axis=-1)[~rows].any())
    # In attention: the rows of its sequence that see it, in its query heads.
    heads = slice(self.HEAD * GROUP, None)
    where = slice(None) if which == 0 else block
    wrong, wrong_last = np.zeros(out.shape, bool), np.zeros(last.shape, bool)
    wrong[self.TOKEN : 20, heads, where] = wrong_last[0, heads, where] = True
    np.testing.assert_array_equal(out[~wrong], clean[0][~wrong])
    np.testing.assert_array_equal(last[~wrong_last], clean[2][~wrong_last])
    rows, rows_last = (
      w.any(-1) if which == 0 else np.zeros(w.shape[:2], bool) for w in (wrong, wrong_last)
    )
    np.testing.assert_array_equal(lse[~rows], clean[1][~rows])
    np.testing.assert_array_equal(last_lse[~rows_last], clean[3][~rows_last])
    if format == "bf16" and np.isinf(value):  # kept, and in V so is the result
      self.assertEqual(float((cache.k, cache.v)[which].data[4, 1, 7, 37]), value)
      if which == 1:
        self.assertTrue((out[wrong] == value).all() and (last[wrong_last] == value).all())
      return
    self.assertTrue(np.isnan(out[wrong]).all() and np.isnan(last[wrong_last]).all())
    self.assertTrue(np.isnan(lse[rows]).all() and np.isnan(last_lse[rows_last]).all())

  def test_one_value_in_a_recent_window(self):
    """In the ring it stays what it was; in the pages, which it reaches later, it is NaN."""
    batches = [ragged(self.BATCH[0], [n, 9], q) for n, q in ((20, [20, 9]), (32, [12, 0]))]
    # Token 7 is wide at first; with 32 tokens its page has left the window.
    rings = {"recent_window": 12, "num_rings": SEQS}
    results = []
    for value in (np.inf, None):
      cache, states = new_cache(**rings), []
      for batch, tokens in zip(batches, (29, 12), strict=True):
        k, v = kv(tokens, seed=tokens)
        if tokens == 29 and value is not None:
          v = v.at[self.TOKEN, self.HEAD, self.ELEMENT].set(value)
        cache = append(cache, k, v, batch)
        q = queries(SEQS, rows=SEQS)
        out, _ = decode(q, cache, one_more(batch), read_path="nvfp4_dequant")
        states.append(np.asarray(out).astype(np.float32))
      results.append(states)
    self.assertEqual([int(s) for s in cache.recent.starts[:2]], [16, 0])
    first = self.ELEMENT // 16 * 16
    for step, (got, want) in enumerate(zip(*results, strict=True)):
      wrong = np.zeros(got.shape, bool)
      if step == 0:
        wrong[0, self.HEAD * GROUP :, self.ELEMENT] = True
        self.assertTrue((got[wrong] == np.inf).all())
      else:
        wrong[0, self.HEAD * GROUP :, first : first + 16] = True
        self.assertTrue(np.isnan(got[wrong]).all())
      np.testing.assert_array_equal(got[~wrong], want[~wrong])

  @parameterized.parameters("nvfp4", "fp8", "bf16")
  def test_every_token_is_bad(self, format):
    """NaN everywhere in one sequence leaves the other as it is."""
    k, v = (x.at[:20].set(jnp.nan) for x in kv(29))
    batch = ragged(*self.BATCH)
    out, _, last, _ = attended(append(new_cache(format), k, v, batch), batch, 29, PATH[format])
    _, clean = self.states(format, None, None)
    self.assertTrue(np.isnan(out[:20]).all() and np.isnan(last[0]).all())
    np.testing.assert_array_equal(out[20:29], clean[0][20:29])
    np.testing.assert_array_equal(last[1], clean[2][1])


class PagesTest(FaultsTestCase):
  """Pages that are used again, shared, all taken, or not there."""

  @parameterized.parameters("nvfp4", "fp8", "bf16")
  def test_a_page_used_again_by_shorter_content(self, format):
    first = ragged([[2, 5]], [32])
    dirty = append(new_cache(format), *(x * jnp.bfloat16(jnp.nan) for x in kv(32)), first)
    second = ragged([[5, 2]], [19])
    results = []
    for cache in (dirty, new_cache(format)):
      cache = append(cache, *kv(19, seed=1), second)
      results.append(attended(cache, second, 19, PATH[format]))
    self.assert_same_bits(*results)
    self.assertTrue(np.isfinite(results[0][0]).all())

  def test_two_sequences_that_share_their_prefix(self):
    prefix, alone = ragged([[3, 1]], [32]), [[4], [2]]
    cache = append(new_cache(), *kv(32), prefix)
    table = [[3, 1, *alone[0]], [3, 1, *alone[1]]]
    tails = ragged(table, [37, 41], [5, 9])
    shared = append(cache, *kv(14, seed=1), tails)
    for page in (3, 1):
      self.assert_same_bits(shared.k.data[page], cache.k.data[page])
    got = attended(shared, tails, 14)
    # Each with a copy of the prefix of its own.
    own = nv.copy_pages(shared, *(jnp.asarray(a, jnp.int32) for a in ((3, 1), (0, 5))))
    apart = ragged([table[0], [0, 5, *alone[1]]], [37, 41], [5, 9])
    self.assert_same_bits(got, attended(own, apart, 14))
    # And what one writes does not reach the other.
    more = ragged([table[0]], [38], [1])
    grown = append(shared, *kv(1, seed=2), more)
    self.assert_same_bits(attended(grown, tails, 14), got)

  @parameterized.parameters("nvfp4_dequant", "nvfp4_a8q", "nvfp4_a4q")
  def test_entries_that_are_not_used(self, path):
    good = [[4, 2, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    wild = [[4, 2, -1, 2**31 - 1], [1, PAGES, -(2**31), 99], [-7, WILD, PAGES, -1]]
    results = []
    for table in (good, wild):
      batch = ragged(table, [20, 9, 0])
      cache = append(new_cache(), *kv(29), batch)
      results.append((raw(cache), attended(cache, batch, 29, path)))
    self.assert_same_bits(*results)

  @parameterized.parameters(PAGES, WILD, 2**27, 2**31 - 1, -1, -(2**31))
  def test_entries_that_are_used_and_name_no_page(self, page):
    """Nothing is promised for that sequence but an end; the other one is as ever."""
    good, bad = (ragged([[4, 2], [1, other]], [20, 20]) for other in (3, page))
    empty = new_cache()
    cache = append(empty, *kv(40), bad)
    want = append(empty, *kv(40), good)
    for before, got, wanted in zip(raw(empty), raw(cache), raw(want), strict=True):
      if got.ndim == 4:  # rows without a page are skipped
        np.testing.assert_array_equal(got[[4, 2, 1]], wanted[[4, 2, 1]])
        np.testing.assert_array_equal(got[[0, 3, 5, 6]], before[[0, 3, 5, 6]])
    got, wanted = attended(cache, bad, 40), attended(want, good, 40)
    np.testing.assert_array_equal(got[0][:36], wanted[0][:36])  # 16 rows need one page only
    np.testing.assert_array_equal(got[2][0], wanted[2][0])
    self.assertTrue(np.isfinite(got[0]).all())

  def test_a_pool_without_a_free_slot(self):
    """Every slot of every page is taken and read; one more row is skipped, the rest stays."""
    table = np.random.default_rng(3).permutation(PAGES).reshape(SEQS, 2)
    full, k, v = new_cache("bf16"), *kv(SEQS * 32)
    for s in range(SEQS):  # one after the other
      rows = slice(s * 32, s * 32 + ROWS)
      lens = np.zeros(SEQS, int)
      lens[s] = 32
      new = (jnp.resize(x[rows], (ROWS, HEADS, DIM)) for x in (k, v))
      full = append(full, *new, ragged(table, lens))
    for pool, rows in ((full.k, k), (full.v, v)):
      stored = np.asarray(pool.data)[table].swapaxes(2, 3).reshape(-1, HEADS, DIM)
      np.testing.assert_array_equal(stored, rows)
    batch = ragged(table, [32] * SEQS, [9] * SEQS)
    self.assertTrue(all(np.isfinite(a[:45]).all() for a in attended(full, batch, 45, "bf16")))
    # A sequence's next row has no page; nor has one past the page table, which is refused if known.
    for length in (33, 65):
      past = ragged(table, [length], [1])
      self.assert_same_bits(raw(append(full, *kv(1, seed=1), past)), raw(full))
    with self.assertRaisesRegex(ValueError, r"4 pages of 16 hold 64 tokens, kv_lens\[0\] is 65"):
      nv.append(full, *kv(1, seed=1), past)


class CallsTest(FaultsTestCase):
  @parameterized.parameters(0, 2)
  def test_slot_mapping_shorter_than_the_tokens(self, length):
    slots = jnp.zeros((length,), jnp.int32)
    for run in (nv.append, jax.jit(nv.append)):
      message = rf"slot_mapping must be int32 \[49\], got int32 \({length},\)"
      with self.assertRaisesRegex(ValueError, message):
        run(new_cache(), *kv(3), slot_mapping=slots)

  def test_a_donated_cache_that_is_used_again(self):
    batch = ragged([[0]], [3])
    cache = new_cache()
    kept = jax.jit(nv.append, donate_argnums=0)(cache, *kv(3), batch)
    for use in (  # JAX's own error
      lambda: append(cache, *kv(3), batch),
      lambda: decode(queries(SEQS, rows=SEQS), cache, one_more(batch), read_path="nvfp4_dequant"),
    ):
      with self.assertRaisesRegex((RuntimeError, ValueError), "deleted|donated"):
        use()
    q, pages = queries(SEQS, rows=SEQS), checkpoint.fetch_pages(kept, [0])
    by_head = nv.MeshOps(jax.sharding.Mesh(jax.devices()[:1], "heads"), heads="heads")
    for use in (
      lambda: nv.append(cache, *kv(3), batch),
      lambda: nv.decode(q, cache, one_more(batch), read_path="nvfp4_dequant"),
      lambda: nv.prefill(q, cache, one_more(batch), read_path="nvfp4_dequant"),
      lambda: nv.copy_pages(cache, jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32)),
      lambda: checkpoint.fetch_pages(cache, [0]),
      lambda: checkpoint.restore_pages(cache, [0], pages),
      lambda: by_head.place(cache),
      lambda: by_head.append(cache, *kv(3), batch),
    ):
      message = (
        r"cache must be the one that the last call returned: .* got a deleted cache\.k\.data"
      )
      with self.assertRaisesRegex(ValueError, message):
        use()
    self.assert_same_bits(raw(kept), raw(append(new_cache(), *kv(3), batch)))

  def test_inputs_in_other_memory_orders(self):
    """numpy views with strides, reversed and transposed, and Fortran order."""
    k, v = (np.asarray(x) for x in kv(20))
    q = np.asarray(queries(20))
    batch = jax.tree.map(np.asarray, ragged([[4, 2]], [20]))
    spread = lambda a: np.repeat(a, 3, axis=-1)[..., ::3]
    reverse = lambda a: np.ascontiguousarray(a[::-1])[::-1]
    turned = lambda a: np.ascontiguousarray(a.T).T
    want = None
    for change in (np.ascontiguousarray, spread, reverse, turned, np.asfortranarray):
      moved = jax.tree.map(change, batch)
      if change is not np.ascontiguousarray:
        self.assertFalse(change(k).flags.c_contiguous)
      cache = append(new_cache(), change(k), change(v), moved)
      slots = change(np.asarray(nv.slot_mapping(batch, PAGE, ROWS)))
      by_slot = nv.append(new_cache(), change(k), change(v), slot_mapping=slots)
      state = prefill(change(q), cache, moved, read_path="nvfp4_dequant")
      got = raw(cache), raw(by_slot), [np.asarray(a) for a in state]
      want = want or got
      self.assert_same_bits(got, want)


class SizesTest(FaultsTestCase):
  LENS = (0, 1, PAGE - 1, PAGE, PAGE + 1)

  @parameterized.parameters("nvfp4", "fp8", "bf16")
  def test_lengths_around_a_page(self, format):
    """Token by token gives the bytes of all at once; decode sees just kv_len keys."""
    table = np.random.default_rng(4).permutation(PAGES).reshape(SEQS, 2)
    whole = ragged(table, self.LENS)
    tokens = sum(self.LENS)
    k, v = kv(tokens)
    at_once = append(new_cache(format), k, v, whole)
    cache = new_cache(format)
    start = np.asarray(whole.cu_q_lens)[:-1]
    for step in range(PAGE + 1):
      lens = np.minimum(self.LENS, step + 1)
      new = lens > np.minimum(self.LENS, step)
      rows = start[new] + step
      batch = ragged(table, lens, new.astype(int))
      rows = np.resize(rows, ROWS)  # those past the last belong to nobody
      cache = append(cache, k[rows], v[rows], batch)
    self.assert_same_bits(raw(cache), raw(at_once))
    out, lse, last, last_lse = attended(cache, whole, tokens, PATH[format])
    self.assertTrue((last[0] == 0).all() and np.isneginf(last_lse[0]).all())
    self.assertTrue(np.isfinite(out).all() and np.isfinite(lse).all())
    # One key: its value is the result, whatever the query.
    scale, data = cache.v.decode_scale, cache.v.data
    if format != "nvfp4":
      value = np.asarray(data[table[1, 0], :, 0]).astype(np.float32) * np.asarray(scale)[:, None]
      want = np.repeat(value, GROUP, axis=0)
      np.testing.assert_allclose(last[1], want, rtol=2**-8, atol=0)

  def test_many_sequences(self):
    """10,000 sequences of decode in one batch, each as if it were alone."""
    num_seqs, heads = 10_000, 1
    r = np.random.default_rng(5)
    lens = r.integers(0, PAGE + 1, num_seqs)
    table = r.permutation(num_seqs)[:, None]
    cache = new_cache(num_pages=num_seqs, heads=heads)
    rows = random(num_seqs, heads)
    slots = jnp.arange(num_seqs * PAGE, dtype=jnp.int32)
    rows = jnp.repeat(rows, PAGE, axis=0)
    cache = append(cache, rows, rows, slot_mapping=slots)
    batch = nv.RaggedBatch.for_decode(*(jnp.asarray(a, jnp.int32) for a in (table, lens)))
    q = queries(num_seqs, heads)
    out, lse = decode(q, cache, batch, read_path="nvfp4_dequant")
    # All keys of a page are equal: out is the value, and lse grows by log(kv_len).
    np.testing.assert_array_equal(np.asarray(out[lens == 0]), 0)
    self.assertTrue(np.isneginf(np.asarray(lse)[lens == 0]).all())
    for s in (0, 1, num_seqs // 2, num_seqs - 1):
      one = nv.RaggedBatch.for_decode(batch.page_table[s : s + 1], batch.kv_lens[s : s + 1])
      alone = decode(q[s : s + 1], cache, one, read_path="nvfp4_dequant")
      self.assert_same_bits((out[s], lse[s]), (alone[0][0], alone[1][0]))
    # By a batch one token is appended for each; and prefill takes as many as decode.
    grown = dataclasses.replace(batch, kv_lens=jnp.minimum(batch.kv_lens + 1, PAGE))
    new = rows[::PAGE] * 2
    longer = np.asarray(append(cache, new, new, grown).k.data)
    row = np.asarray(grown.kv_lens) - 1
    by_slot = jnp.asarray(table[:, 0] * PAGE + row, jnp.int32)
    want = append(cache, new, new, slot_mapping=by_slot).k.data
    np.testing.assert_array_equal(longer, want)
    _, many = prefill(q, cache, batch, read_path="nvfp4_dequant")
    np.testing.assert_allclose(many, lse, rtol=1e-6, atol=1e-5)
    key = jnp.ones_like(batch.kv_lens)
    first = decode(q, cache, dataclasses.replace(batch, kv_lens=key), read_path="nvfp4_dequant")
    some = lens > 0
    bf16 = lambda a: np.asarray(a).astype(np.float32)[some]
    # The weights of equal keys sum to 1 within some units of float32; out is bfloat16.
    np.testing.assert_allclose(bf16(out), bf16(first[0]), rtol=2**-7, atol=1e-6)
    grown = np.asarray(first[1])[some] + np.log(lens[some])[:, None]
    np.testing.assert_allclose(np.asarray(lse)[some], grown, rtol=1e-6, atol=1e-5)


if __name__ == "__main__":
  absltest.main()
