"""The split-KV decode kernels, PTX run by an emulator, against float64 on the same decoded bytes.

The caches of cases.build hold poison wherever nothing may be read (NaN scales and data in unused
slots and pages, wild page numbers in table tails), pages in random order, codes of both signs,
scales with zeros and subnormals among them, and a global scale for each head. What the kernels have
no reason to read they may not: see decode_emulation.py.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from nvfp4_pallas import RaggedBatch
from nvfp4_pallas.kernels import decode_mosaic_sm90 as kernel
from nvfp4_pallas.kernels.decode_mosaic_sm90 import DecodeConfig
from nvfp4_pallas.ops.request import attention_request
from tests import cases
from tests.base import TestCase
from tests.cases import Case
from tests.decode_emulation import SMALL, bounds, emulate, spec_of
from tests.judged import exact_of, poisoned

# Around the ends of SMALL's tiles of 32 keys, and free places.
RAGGED = Case("ragged", kv_lens=(70, 0, 1, 31, 32, 33, 129, 0))
SHORT = Case("short", kv_lens=(33, 0, 150), num_kv_heads=1, group=2)
FORMATS = ("nvfp4", "fp8", "bf16")


def build(case: Case) -> cases.Built:
  return cases.build(cases.decode_case(case), padding_rows=0)


def variant(case: Case, **changes) -> Case:
  return dataclasses.replace(case, **changes)


def variant_of(**changes) -> DecodeConfig:
  return dataclasses.replace(SMALL, **changes)


def part(built: cases.Built, rows) -> cases.Built:
  """Some of the sequences, in some order."""
  rows = np.asarray(rows)
  batch = RaggedBatch.for_decode(built.batch.page_table[rows], built.batch.kv_lens[rows])
  return dataclasses.replace(built, q=built.q[rows], batch=batch)


def one_head(built: cases.Built, head: int) -> cases.Built:
  """One KV head, with its query heads."""

  def pool(pool):
    data, scale, overall = (
      a[:, head : head + 1] if a.ndim == 4 else a[head : head + 1]
      for a in (pool.data, pool.block_scale, pool.global_scale)
    )
    return dataclasses.replace(pool, data=data, block_scale=scale, global_scale=overall)

  cache = dataclasses.replace(built.cache, k=pool(built.cache.k), v=pool(built.cache.v))
  group = built.q.shape[1] // built.cache.num_kv_heads
  return dataclasses.replace(built, q=built.q[:, head * group : (head + 1) * group], cache=cache)


class DecodeTestCase(TestCase):
  def check(self, case, spec=None, **options):
    self.check_built(build(case), spec or spec_of(case), **options)

  def check_built(self, built, spec, **options):
    out, lse = emulate(built, spec, **options)
    self.check_close(out, lse, built, spec)
    return out, lse

  def check_close(self, out, lse, built, spec):
    exact = exact_of(built, spec)
    sees = np.isfinite(exact.lse)
    np.testing.assert_array_equal(out[~sees], 0)
    np.testing.assert_array_equal(lse[~sees], -np.inf)
    out_bound, lse_bound = bounds(exact, built, spec, out.dtype)
    out_error = np.abs(out.astype(np.float64) - exact.out)
    lse_error = np.abs(lse[sees].astype(np.float64) - exact.lse[sees])
    self.assertTrue((out_error <= out_bound).all(), f"{np.nanmax(out_error / out_bound)}")
    self.assertTrue((lse_error <= lse_bound[sees]).all())

  def check_equal_bits(self, results, expected):
    for a, b in zip(results, expected, strict=True):
      np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


class DecodeTest(DecodeTestCase):
  # Shapes.

  @parameterized.parameters(*range(1, 17))
  def test_groups(self, group):
    self.check(variant(SHORT, group=group, num_kv_heads=1 + group % 2, kv_lens=(33, 5)))

  @parameterized.product(head_dim=kernel.HEAD_DIMS, v_head_dim=kernel.HEAD_DIMS)
  def test_head_dims(self, head_dim, v_head_dim):
    self.check(variant(SHORT, head_dim=head_dim, v_head_dim=v_head_dim, group=3))

  @parameterized.product(k_format=FORMATS, v_format=FORMATS)
  def test_formats(self, k_format, v_format):
    case = cases.with_formats(variant(SHORT, head_dim=128, v_head_dim=64), k_format, v_format)
    self.check(case)
    self.check(variant(case, head_dim=64, v_head_dim=128, group=9))

  @parameterized.product(format=("fp8", "bf16"), group=(1, 16))
  def test_wide_formats_of_head_dim_256(self, format, group):
    case = variant(SHORT, head_dim=256, group=group, kv_lens=(40, 17))
    self.check(cases.with_formats(case, format, format), config=variant_of(tile=16))

  @parameterized.product(q_levels=(1, 2), formats=((64, "nvfp4"), (128, "fp8"), (256, "nvfp4")))
  def test_a4q(self, q_levels, formats):
    head_dim, v_format = formats
    case = variant(SHORT, head_dim=head_dim, v_head_dim=64, v_format=v_format)
    self.check(case, spec_of(case, read_path="nvfp4_a4q", q_levels=q_levels))

  @parameterized.product(case=cases.PAGES, tile=(16, 32, 64))
  def test_pages(self, case, tile):
    self.check(case, config=variant_of(tile=tile))

  @parameterized.parameters(16, 32, 64)
  def test_ends_of_tiles(self, tile):
    lens = (0, 1, tile - 1, tile, tile + 1, 4 * tile - 1, 4 * tile, 4 * tile + 1, 0, 9 * tile)
    self.check(variant(SHORT, kv_lens=lens), config=variant_of(tile=tile))
    case = cases.with_formats(variant(SHORT, kv_lens=lens), "fp8", "bf16")
    self.check(case, config=variant_of(tile=tile, slots=4))

  @parameterized.parameters(
    (jnp.float16, None),
    (jnp.float32, None),
    (jnp.bfloat16, jnp.float32),
    (jnp.float32, jnp.float16),
  )
  def test_dtypes(self, dtype, out_dtype):
    built = build(RAGGED)
    built = dataclasses.replace(built, q=built.q.astype(dtype))
    # Twice the same: O of one piece is stored by one program, O of several by the other.
    for config in (SMALL, variant_of(blocks=40)):
      out, _ = self.check_built(built, spec_of(RAGGED), config=config, out_dtype=out_dtype)
      self.assertEqual(out.dtype, jnp.dtype(out_dtype or dtype))

  # Numerics.

  @parameterized.product(
    window=(1, 19, 32, 33, 1000), batch_invariant=(False, True), soft_cap=(None, 3.5)
  )
  def test_window(self, window, batch_invariant, soft_cap):
    options = ("window", window), ("soft_cap", soft_cap)
    case = variant(SHORT, kv_lens=(70, 1, 0, 33, 129), options=options)
    self.check(case, batch_invariant=batch_invariant)

  def test_long_window(self):
    """Of several units, which begin at the window's first tile."""
    case = variant(SHORT, kv_lens=(700,), page_size=64, options=(("window", 289),))
    for batch_invariant in (False, True):
      self.check(case, batch_invariant=batch_invariant)

  @parameterized.product(sm_scale=(0.31, -0.2, 0.0), soft_cap=(None, 3.5, 50.0))
  def test_scores(self, sm_scale, soft_cap):
    self.check(variant(RAGGED, options=(("sm_scale", sm_scale), ("soft_cap", soft_cap))))

  @parameterized.product(format=FORMATS, exponent=(-130, -100, -20, 20, 30, 60, 100))
  def test_size_of_q(self, format, exponent):
    """Rows of q of very different sizes: large scores make softmax one-hot."""
    case = cases.with_formats(variant(SHORT, group=4), format, format)
    built = build(case)
    factor = np.where(np.arange(case.num_q_heads) % 2, 2.0**exponent, 1)[:, None]
    q = jnp.asarray(np.asarray(built.q).astype(np.float64) * factor, jnp.bfloat16)
    self.check_built(dataclasses.replace(built, q=q), spec_of(case))

  @parameterized.product(format=FORMATS, global_scale=(2.0**-64, 1.0, 2.0**64))
  def test_rows_of_zeros(self, format, global_scale):
    case = cases.with_formats(SHORT, format, format)
    built = build(case)
    if format != "bf16":
      k = dataclasses.replace(built.cache.k, global_scale=jnp.full((1,), global_scale, jnp.float32))
      built = dataclasses.replace(built, cache=dataclasses.replace(built.cache, k=k))
    built = dataclasses.replace(built, q=built.q.at[:, 1].set(0))
    _, lse = emulate(built, spec_of(case))
    np.testing.assert_allclose(lse[[0, 2], 1], np.log([33, 150]), rtol=1e-6)
    self.check_built(built, spec_of(case))

  # The cut.

  @parameterized.product(
    config=(
      DecodeConfig(16, 3, 18, 1, 1),
      DecodeConfig(16, 2, 18, 4, 1),
      DecodeConfig(16, 4, 7, 4, 3),
    ),
    batch_invariant=(False, True),
  )
  def test_many_pieces(self, config, batch_invariant):
    """More than a warp or a block of the join loads at once."""
    case = variant(SHORT, kv_lens=(1100, 0, 20), page_size=64)
    self.check(case, config=config, batch_invariant=batch_invariant)

  @parameterized.parameters(False, True)
  def test_more_blocks_than_units(self, batch_invariant):
    self.check(RAGGED, config=variant_of(blocks=64), batch_invariant=batch_invariant)

  @parameterized.parameters(False, True)
  def test_nothing_cached(self, batch_invariant):
    case = variant(RAGGED, kv_lens=(0, 0, 0))
    self.check(case, config=None, batch_invariant=batch_invariant)

  @parameterized.parameters(31, 130, 300)
  def test_many_sequences(self, num_seqs):
    lens = np.where(np.arange(num_seqs) % 12 == 5, 40, 0)
    lens[-1] = 200
    self.check(variant(SHORT, kv_lens=tuple(lens.tolist()), num_kv_heads=2, group=1))

  def test_config_of_its_own(self):
    self.check(variant(RAGGED, head_dim=128, page_size=64), config=None)
    invariant = variant(SHORT, kv_lens=(2500, 7), group=1)
    self.check(invariant, config=None, batch_invariant=True)

  def test_no_sequences(self):
    built = build(RAGGED)
    for batch in (
      RaggedBatch.for_decode(jnp.zeros((0, 3), jnp.int32), jnp.zeros((0,), jnp.int32)),
      RaggedBatch.for_decode(jnp.zeros((8, 0), jnp.int32), jnp.zeros((8,), jnp.int32)),
    ):
      q = built.q[: batch.num_seqs]
      out, lse = kernel.decode(q, built.cache, batch, spec_of(RAGGED), batch_invariant=False)
      self.assertEqual((out.shape, out.dtype), (q.shape, q.dtype))
      np.testing.assert_array_equal(out, 0)
      np.testing.assert_array_equal(lse, np.full(q.shape[:2], -np.inf, np.float32))

  # The same bits.

  @parameterized.parameters(False, True)
  def test_same_bits_again(self, batch_invariant):
    built, spec = build(RAGGED), spec_of(RAGGED)
    expected = emulate(built, spec, batch_invariant=batch_invariant)
    for reverse in (False, True):
      again = emulate(built, spec, batch_invariant=batch_invariant, reverse=reverse)
      self.check_equal_bits(again, expected)

  @parameterized.parameters("nvfp4", "bf16")
  def test_same_bits_in_any_batch(self, format):
    """Alone, among others, on more blocks and with a wider page table; else equal to rounding."""
    case = variant(RAGGED, kv_lens=(70, 0, 300, 33, 129), options=(("window", 250),))
    case = cases.with_formats(case, format, format)
    built, spec = build(case), spec_of(case)
    expected = emulate(built, spec, batch_invariant=True)
    tail = jnp.full((5, 40), -7, jnp.int32)
    wider = jnp.concatenate([built.batch.page_table, tail], axis=1)
    wider = RaggedBatch.for_decode(wider, built.batch.kv_lens)
    for rows, other, config in (
      ((2,), built, SMALL),
      ((4, 2), built, variant_of(blocks=2)),
      ((0, 1, 2, 3, 4), dataclasses.replace(built, batch=wider), variant_of(blocks=9)),
      ((3, 2, 2, 2, 0, 4, 1), built, SMALL),
    ):
      got = emulate(part(other, rows), spec, batch_invariant=True, config=config)
      self.check_equal_bits(got, (a[np.asarray(rows)] for a in expected))
    alone, among = (emulate(part(built, rows), spec)[0] for rows in ((2,), (3, 2, 4)))
    self.assertTrue((alone[0] != among[1]).any())  # so that the above says something

  def test_same_bits_of_heads_alone(self):
    """As devices have them that divide KV heads; without batch_invariant only to rounding."""
    case = variant(SHORT, kv_lens=(300, 33), num_kv_heads=2)
    built, spec = build(case), spec_of(case)
    for batch_invariant in (False, True):
      whole = emulate(built, spec, batch_invariant=batch_invariant)
      parts = [
        emulate(one_head(built, head), spec, batch_invariant=batch_invariant) for head in (0, 1)
      ]
      joined = [np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True)]
      if batch_invariant:
        self.check_equal_bits(joined, whole)
      else:
        self.check_close(*joined, built, spec)
        self.assertTrue((joined[0] != whole[0]).any())  # so that the other says something

  # What must not matter, and what must.

  def test_faulty_blocks_surface(self):
    """In the rows that see the key, of that head only, and for V in those columns only."""
    case = variant(RAGGED, kv_lens=(70, 33, 40), options=(("window", 36),))
    built, spec = build(case), spec_of(case)
    table = np.asarray(built.batch.page_table)
    k, v = built.cache.k, built.cache.v
    k = poisoned(k, (table[0, 50 // 16], 0, 50 % 16, 1))
    k = poisoned(k, (table[0, 33 // 16], 1, 33 % 16, 1))  # not seen: the oldest that is is 34
    v = poisoned(v, (table[1, 32 // 16], 1, 32 % 16, 2))
    v = poisoned(v, (table[2, 3 // 16], 0, 3 % 16, 0))  # not seen
    built = dataclasses.replace(built, cache=dataclasses.replace(built.cache, k=k, v=v))
    exact = exact_of(built, spec)
    self.assertEqual(np.isnan(exact.lse).sum(), 4)
    self.assertEqual(np.isnan(exact.out).sum(), 4 * 64 + 4 * 16)
    for batch_invariant in (False, True):
      out, lse = emulate(built, spec, batch_invariant=batch_invariant)
      np.testing.assert_array_equal(np.isnan(lse), np.isnan(exact.lse))
      np.testing.assert_array_equal(np.isnan(out), np.isnan(exact.out))

  @parameterized.parameters(2**30, -5)
  def test_wrong_page_numbers_do_not_fault(self, number):
    built, spec = build(RAGGED), spec_of(RAGGED)
    table = built.batch.page_table.at[0, 1].set(number)
    wrong = RaggedBatch.for_decode(table, built.batch.kv_lens)
    results = emulate(dataclasses.replace(built, batch=wrong), spec)
    expected = emulate(built, spec)
    self.check_equal_bits((a[1:] for a in results), (a[1:] for a in expected))


class RecentTest(DecodeTestCase):
  """With the newest tokens in rings; the last sequence has none."""

  CASE = Case("recent", kv_lens=(70, 0, 1, 33, 133, 16, 40), num_kv_heads=1, group=2)

  def recent(self, case=CASE, tokens=20):
    return cases.with_window(build(case), tokens)

  @parameterized.product(tokens=(1, 16, 20, 64), page_size=(16, 32, 64), tile=(16, 32, 64))
  def test_windows(self, tokens, page_size, tile):
    case = variant(self.CASE, page_size=page_size)
    config = variant_of(tile=tile)
    self.check_built(self.recent(case, tokens), spec_of(case), config=config)

  @parameterized.parameters(1, 3, 8, 9, 16)
  def test_groups(self, group):
    case = variant(self.CASE, group=group, num_kv_heads=2, kv_lens=(70, 33, 5))
    self.check_built(self.recent(case), spec_of(case))

  @parameterized.product(head_dim=kernel.HEAD_DIMS, v_head_dim=kernel.HEAD_DIMS)
  def test_head_dims(self, head_dim, v_head_dim):
    case = variant(self.CASE, head_dim=head_dim, v_head_dim=v_head_dim, kv_lens=(70, 33, 5))
    self.check_built(self.recent(case), spec_of(case))

  @parameterized.parameters(("fp8", "fp8"), ("fp8", "nvfp4"), ("nvfp4", "bf16"), ("bf16", "nvfp4"))
  def test_formats(self, k_format, v_format):
    case = cases.with_formats(self.CASE, k_format, v_format)
    self.check_built(self.recent(case), spec_of(case))

  @parameterized.product(q_levels=(1, 2), soft_cap=(None, 3.5))
  def test_a4q(self, q_levels, soft_cap):
    spec = spec_of(self.CASE, read_path="nvfp4_a4q", q_levels=q_levels, soft_cap=soft_cap)
    self.check_built(self.recent(), spec)

  @parameterized.product(
    sm_scale=(0.31, -0.2, 0.0, 30.0), soft_cap=(None, 3.5), batch_invariant=(False, True)
  )
  def test_scores(self, sm_scale, soft_cap, batch_invariant):
    spec = spec_of(self.CASE, sm_scale=sm_scale, soft_cap=soft_cap)
    self.check_built(self.recent(), spec, batch_invariant=batch_invariant)

  @parameterized.parameters(False, True)
  def test_cuts(self, batch_invariant):
    for config in (variant_of(blocks=64), DecodeConfig(16, 2, 18, 4, 1), None):
      self.check_built(
        self.recent(), spec_of(self.CASE), config=config, batch_invariant=batch_invariant
      )

  def test_same_bits(self):
    built, spec = self.recent(), spec_of(self.CASE)
    expected = emulate(built, spec, batch_invariant=True)
    again = emulate(built, spec, batch_invariant=True, reverse=True)
    self.check_equal_bits(again, expected)
    rows = np.asarray([4, 0])
    ids = built.batch.ring_ids[rows]
    alone = part(built, rows)
    alone = dataclasses.replace(alone, batch=dataclasses.replace(alone.batch, ring_ids=ids))
    self.check_equal_bits(
      emulate(alone, spec, batch_invariant=True, config=variant_of(blocks=2)),
      (a[rows] for a in expected),
    )

  def test_rings_by_number(self):
    built = self.recent()
    ids = np.asarray(built.batch.ring_ids)
    starts = np.asarray(built.cache.recent.starts)
    # Those with rings, in the order of their rings.
    rows = np.asarray([s for s in np.argsort(ids) if 0 <= ids[s] < len(starts)])
    self.assertGreater(len(rows), 4)
    some = part(built, rows)
    pages = built.cache.recent.ring_pages
    keep = (ids[rows][:, None] * pages + np.arange(pages)).reshape(-1)
    recent = built.cache.recent
    recent = dataclasses.replace(
      recent,
      k=dataclasses.replace(recent.k, data=recent.k.data[keep]),
      v=dataclasses.replace(recent.v, data=recent.v.data[keep]),
      starts=recent.starts[ids[rows]],
    )
    some = dataclasses.replace(some, cache=dataclasses.replace(built.cache, recent=recent))
    self.check_built(some, spec_of(self.CASE))

  def test_a_window_is_refused(self):
    spec = spec_of(self.CASE, window=30)
    built = self.recent()
    request = attention_request(built.q, built.cache, spec)
    self.assertRegex(kernel.unsupported(request), "sliding window")


if __name__ == "__main__":
  absltest.main()
