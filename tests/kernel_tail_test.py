"""The kernels for short queries, PTX run by an emulator, against float64 on the same decoded bytes.

The caches of cases.build hold poison wherever nothing may be read (NaN scales and data in unused
slots and pages, wild page numbers in table tails), pages in random order, codes of both signs,
scales with zeros and subnormals among them, and a global scale for each head. What the kernels have
no reason to read they may not: see tail_emulation.py.
"""

import dataclasses
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized

import nvfp4_pallas as nv
from benchmarks import aot_calls
from nvfp4_pallas import dispatch
from nvfp4_pallas.kernels import decode_attend, short_attend, softmax, tail_layout, wide_layout
from nvfp4_pallas.kernels import tail_mosaic_sm90 as kernel
from nvfp4_pallas.kernels.tail_mosaic_sm90 import TailConfig
from nvfp4_pallas.ops import prefill as prefill_op
from nvfp4_pallas.ops import prefill_sm90
from nvfp4_pallas.ops.decode import resolve_decode
from nvfp4_pallas.ops.request import attention_request
from nvfp4_pallas.read_paths import AttentionSpec
from tests import cases
from tests.base import TestCase
from tests.cases import Built, Case
from tests.judged import exact_of, poisoned
from tests.tail_emulation import SMALL, bounds, emulate, spec_of

# Free places, queries with no keys, with fewer keys than queries, and of several query tiles.
RAGGED = Case(
  "ragged",
  q_lens=(9, 0, 1, 3, 5, 0),
  kv_lens=(130, 70, 64, 0, 3, 0),
  head_dim=128,
  group=2,
)
SHORT = Case("short", q_lens=(5, 2), kv_lens=(150, 33), num_kv_heads=1, group=4, head_dim=128)


def variant(case: Case, **changes) -> Case:
  return dataclasses.replace(case, **changes)


def config_of(**changes) -> TailConfig:
  return dataclasses.replace(SMALL, **changes)


def with_q(built: Built, q: np.ndarray) -> Built:
  return dataclasses.replace(built, q=jnp.asarray(q, jnp.bfloat16))


def with_pools(built: Built, **pools) -> Built:
  return dataclasses.replace(built, cache=dataclasses.replace(built.cache, **pools))


def slots_of(built: Built, seq: int) -> tuple[np.ndarray, np.ndarray]:
  """Pages and offsets of a sequence's keys."""
  keys, page_size = np.arange(int(built.batch.kv_lens[seq])), built.cache.page_size
  return np.asarray(built.batch.page_table)[seq, keys // page_size], keys % page_size


def rising(built: Built, tops) -> Built:
  """Of each tile of keys the block scales are its `tops`, and all scores are positive.

  So a row's scores are about 50 |q| tops / sqrt(128), more or less as they always are.
  """
  data = np.array(built.cache.k.data) & 0x77
  scales = np.array(built.cache.k.block_scale)
  for seq in range(built.batch.num_seqs):
    pages, offsets = slots_of(built, seq)
    of_key = np.asarray(tops)[np.arange(len(pages)) // 64 % len(tops)]
    scales[pages, :, offsets] = of_key.astype(scales.dtype)[:, None, None]
  k = dataclasses.replace(built.cache.k, data=jnp.asarray(data), block_scale=jnp.asarray(scales))
  return with_q(with_pools(built, k=k), np.abs(np.asarray(built.q).astype(np.float32)))


def by_engine(engine: str, most_rows: int, parts: int = 1):
  """emulate with an engine, and query tiles that it can take.

  Args:
    parts: the number of blocks is a multiple of this.
  """

  def by(built, spec, *, config: TailConfig | None = SMALL, **options):
    if config is not None:
      group = built.q.shape[1] // built.cache.num_kv_heads
      width = max(1, min(config.width, most_rows // group))
      blocks = -(-config.blocks // parts) * parts
      config = dataclasses.replace(config, engine=engine, width=width, blocks=blocks)
    return emulate(built, spec, config=config, **options)

  return by


class TailTest(TestCase):
  """By wgmma."""

  cuts = True  # the keys of a query tile
  least_top = softmax.LATER_P  # log2 of a row's largest weight, at least
  most_rows = tail_layout.MAX_ROWS
  emulate = staticmethod(by_engine("wgmma", most_rows))

  def check(self, case, config: TailConfig | None = SMALL, out_dtype=None, **options):
    built = cases.build(case)
    return self.check_built(built, spec_of(built, **options), config, out_dtype)

  def check_built(self, built, spec, config: TailConfig | None = SMALL, out_dtype=None):
    out, lse = self.emulate(built, spec, config=config, out_dtype=out_dtype)
    self.check_close(out, lse, built, spec, self.width_of(built, config))
    return out, lse

  def check_close(self, out, lse, built, spec, width, rows: Any = True):
    """Where `rows`, [tokens, heads]."""
    exact = exact_of(built, spec)
    empty, sees = rows & np.isneginf(exact.lse), rows & np.isfinite(exact.lse)
    np.testing.assert_array_equal(out[empty], 0)
    np.testing.assert_array_equal(lse[empty], -np.inf)
    out_bound, lse_bound = bounds(exact, built, spec, out.dtype, width, self.least_top)
    out_error = np.abs(out.astype(np.float64) - exact.out)[sees]
    lse_error = np.abs(lse[sees].astype(np.float64) - exact.lse[sees])
    self.assertTrue((out_error <= out_bound[sees]).all(), f"{out_error / out_bound[sees]}")
    self.assertTrue((lse_error <= lse_bound[sees]).all(), f"{lse_error / lse_bound[sees]}")

  def width_of(self, built, config: TailConfig | None) -> int:
    """Tokens that share a unit of q."""
    return (config or self.chosen(built)).width

  def chosen(self, built) -> TailConfig:
    tokens, q_heads, _ = built.q.shape
    heads = built.cache.num_kv_heads
    num_seqs, group = built.batch.num_seqs, q_heads // heads
    return kernel.choose_config(tokens, num_seqs, heads, group)[0]

  def check_equal_bits(self, results, expected):
    for a, b in zip(results, expected, strict=True):
      np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))

  # Shapes.

  @parameterized.parameters((1, 16), (3, 5), (4, 16), (7, 9), (16, 3), (64, 1))
  def test_groups(self, group, width):
    if group > self.most_rows:
      return  # not a shape of this engine
    case = variant(SHORT, q_lens=(width + 1, 0, 2), kv_lens=(70, 64, 5), group=group)
    self.check(variant(case, num_kv_heads=1 + group % 2), config_of(width=width))

  @parameterized.parameters(True, False)
  def test_ragged(self, causal):
    self.check(RAGGED, causal=causal)

  def test_q_lens(self):
    q_lens = np.random.default_rng(0).permutation(18)
    kv_lens = tuple((q_lens * 5 % 67).tolist())
    case = variant(SHORT, q_lens=tuple(q_lens.tolist()), kv_lens=kv_lens, group=3)
    self.check(case, config_of(width=5))

  @parameterized.parameters(*(case.page_size for case in cases.PAGES))
  def test_pages(self, page_size):
    lens = (page_size - 1, page_size, page_size + 1, 0, 1)
    case = variant(SHORT, q_lens=(2, 1, 5, 0, 1), kv_lens=lens, page_size=page_size, group=2)
    self.check(case, config_of(width=3))

  def test_ends_of_tiles(self):
    lens = (1, 63, 64, 65, 127, 128, 129)
    self.check(variant(SHORT, q_lens=(3,) * 7, kv_lens=lens, page_size=32, group=2))

  @parameterized.parameters(
    (jnp.float16, None),
    (jnp.float32, None),
    (jnp.bfloat16, jnp.float32),
    (jnp.float32, jnp.float16),
  )
  def test_dtypes(self, dtype, out_dtype):
    built = cases.build(SHORT)
    built = dataclasses.replace(built, q=built.q.astype(dtype))
    # Twice the same: O of one piece is stored by one program, O of several by the other.
    for blocks in (1, 20):
      out, _ = self.check_built(built, spec_of(built), config_of(blocks=blocks), out_dtype)
      self.assertEqual(out.dtype, jnp.dtype(out_dtype or dtype))

  # Numerics.

  @parameterized.parameters(
    (1, True, None), (20, True, 3.5), (64, True, None), (65, False, None), (999, False, 50.0)
  )
  def test_window(self, window, causal, soft_cap):
    case = variant(SHORT, q_lens=(6, 1, 0, 9), kv_lens=(200, 70, 90, 3), group=2)
    self.check(case, window=window, causal=causal, soft_cap=soft_cap)

  @parameterized.parameters((0.31, None), (-0.2, None), (-0.2, 3.5), (0.1, 50.0))
  def test_scores(self, sm_scale, soft_cap):
    self.check(SHORT, sm_scale=sm_scale, soft_cap=soft_cap)

  @parameterized.parameters((1, 0.1), (2, 0.1), (2, -0.1))
  def test_a4q(self, q_levels, sm_scale):
    self.check(SHORT, read_path="nvfp4_a4q", q_levels=q_levels, sm_scale=sm_scale)

  def test_a4q_of_many_rows(self):
    """All warps have some."""
    case = variant(SHORT, q_lens=(17, 30), kv_lens=(150, 33))
    self.check(case, config_of(width=16), read_path="nvfp4_a4q", q_levels=2)

  @parameterized.product(tops=((1, 4, 16, 64, 448), (64, 1, 448), (448, 1, 2)), sign=(1, -1))
  def test_scores_that_rise(self, tops, sign):
    """By far more than the 2^9 that references leave, and to 10^4, positive and negative."""
    case = variant(SHORT, q_lens=(6, 1), kv_lens=(300, 129), group=2)
    built = rising(cases.build(case), tops)
    spec = spec_of(built, sm_scale=sign * 128**-0.5)
    _, lse = self.check_built(built, spec, config_of(blocks=2 if sign > 0 else 9))
    self.assertGreater(lse[:7].max(), 5e3 if sign > 0 else -200)

  def test_rows_whose_first_tile_is_not_seen_and_whose_scores_are_far_below_zero(self):
    case = variant(SHORT, q_lens=(8,), kv_lens=(71,), group=2)
    built = rising(cases.build(case), (4,))
    spec = spec_of(built, sm_scale=-(128**-0.5), window=2)
    _, lse = self.check_built(built, spec, config_of(width=8, blocks=1))
    self.assertLess(lse[:8].max(), -20)

  def test_scores_that_rise_under_a_cap(self):
    built = rising(cases.build(variant(SHORT, kv_lens=(300, 129))), (0.25, 0.5, 1, 2, 4))
    self.check_built(built, spec_of(built, soft_cap=60.0))

  @parameterized.parameters(1, 2, 20)
  def test_rows_whose_first_tile_is_not_seen(self, window):
    """Their references are set later, where the other rows have theirs already."""
    case = variant(SHORT, q_lens=(8,), kv_lens=(71 + window // 2,), group=2)
    self.check(case, config_of(width=8, blocks=1), window=window)

  def test_rows_that_see_nothing_beside_rows_that_do(self):
    self.check(variant(SHORT, q_lens=(70,), kv_lens=(66,), group=1), config_of(width=16))

  @parameterized.parameters(20, 27, 36)
  def test_size_of_q(self, exponent):
    """All rows of a tile are in the unit of its largest value, which here meets keys that are 0."""
    built = cases.build(SHORT)
    data = np.array(built.cache.k.data)
    data[..., 2] &= 0x0F  # column 5
    k = dataclasses.replace(built.cache.k, data=jnp.asarray(data))
    q = np.array(built.q).astype(np.float64)
    q[1, 2, 5] = 2.0**exponent
    q[:, 1] *= 2.0**-3
    self.check_built(with_q(with_pools(built, k=k), q), spec_of(built))

  @parameterized.parameters(20, -20)
  def test_rows_of_different_size(self, exponent):
    built = cases.build(SHORT)
    q = np.asarray(built.q).astype(np.float64)
    q[:, ::2] *= 2.0**exponent
    self.check_built(with_q(built, q), spec_of(built))

  @parameterized.parameters(-130, -100, 22)
  def test_size_of_all_of_q(self, exponent):
    built = cases.build(variant(SHORT, kv_lens=(70, 33)))
    q = np.asarray(built.q).astype(np.float64) * 2.0**exponent
    self.check_built(with_q(built, q), spec_of(built))

  @parameterized.parameters(np.nan, np.inf)
  def test_rows_that_are_not_finite(self, value):
    """They are NaN, and the other rows as good as if those were not there."""
    built = cases.build(SHORT)
    faulty = dataclasses.replace(built, q=built.q.at[1, 2, 77].set(value))
    out, lse = self.emulate(faulty, spec_of(built))
    self.assertTrue(np.isnan(out[1, 2]).all() and np.isnan(lse[1, 2]))
    others = np.ones(lse.shape, bool)
    others[1, 2] = False
    width = self.width_of(built, SMALL)
    self.check_close(out, lse, built, spec_of(built), width, others)
    # What is finite in the row must not count either.
    large = dataclasses.replace(faulty, q=faulty.q.at[1, 2, 3].set(3e38))
    out, lse = self.emulate(large, spec_of(built))
    self.check_close(out, lse, built, spec_of(built), width, others)

  @parameterized.parameters((2.0**-64, False), (2.0**-64, True), (2.0**64, True))
  def test_rows_of_zeros(self, global_scale, all_rows):
    built = cases.build(SHORT)
    k = dataclasses.replace(built.cache.k, global_scale=jnp.full((1,), global_scale, jnp.float32))
    zeros = built.q.at[:, slice(None) if all_rows else 1].set(0)
    built = dataclasses.replace(with_pools(built, k=k), q=zeros)
    _, lse = self.check_built(built, spec_of(built))
    np.testing.assert_allclose(lse[:7, 1], np.log([146, 147, 148, 149, 150, 32, 33]), rtol=1e-6)

  @parameterized.parameters(12, 16, 20, 24)
  def test_attention_sink(self, octaves):
    """The first key outweighs each other one by 2^octaves, but its value is zero."""
    built = cases.build(variant(SHORT, q_lens=(2,), kv_lens=(900,), num_kv_heads=1, page_size=64))
    pages, offsets = slots_of(built, 0)
    ones = np.full_like(np.asarray(built.cache.k.data), 0x22)
    k_scales, v_scales = (np.array(p.block_scale) for p in (built.cache.k, built.cache.v))
    k_scales[pages, :, offsets], k_scales[pages[0], :, offsets[0]] = 0, 1
    v_scales[pages[0], :, offsets[0]] = 0
    unit = jnp.ones((1,), jnp.float32)
    k = dataclasses.replace(
      built.cache.k,
      data=jnp.asarray(ones),
      block_scale=jnp.asarray(k_scales),
      global_scale=unit,
    )
    v = dataclasses.replace(built.cache.v, block_scale=jnp.asarray(v_scales))
    built = with_q(with_pools(built, k=k, v=v), np.ones(built.q.shape))
    spec = spec_of(built, sm_scale=octaves * np.log(2) / 128)
    out, _ = self.check_built(built, spec)
    exact = exact_of(built, spec).out
    rows = slice(0, 2)
    error = np.linalg.norm((out - exact)[rows], axis=-1) / np.linalg.norm(exact[rows], axis=-1)
    self.assertLess(error.max(), 5e-3)

  # The cut.

  @parameterized.parameters((18, 1), (18, 4), (7, 4))
  def test_many_pieces(self, blocks, join_warps):
    """More than a warp or a block of the join loads at once."""
    case = variant(SHORT, q_lens=(4, 0, 1), kv_lens=(1300, 5, 20), page_size=64, group=2)
    self.check(case, config_of(blocks=blocks, join_warps=join_warps))

  @parameterized.parameters(1, 4)
  def test_first_pieces_of_which_rows_see_no_key(self, join_warps):
    """The window of a query tile begins where that of its sequence's first token does."""
    case = variant(SHORT, q_lens=(100,), kv_lens=(140,), group=1)
    self.check(case, config_of(width=16, blocks=40, join_warps=join_warps), window=20)

  def test_more_blocks_than_units(self):
    self.check(RAGGED, config_of(blocks=64))

  @parameterized.parameters(31, 130, 300)
  def test_many_sequences(self, num_seqs):
    number = np.arange(num_seqs)
    q_lens, kv_lens = np.where(number % 24 == 5, 2, 0), np.where(number % 3, 40, 0)
    q_lens[-1], kv_lens[-1] = 3, 130
    q_lens[:2], kv_lens[:2] = 1, 1
    q_lens, kv_lens = (tuple(a.tolist()) for a in (q_lens, kv_lens))
    self.check(variant(SHORT, q_lens=q_lens, kv_lens=kv_lens, group=1), config_of(blocks=7))

  def test_config_of_its_own(self):
    self.check(variant(RAGGED, page_size=64), None)

  def test_nothing_to_see(self):
    self.check(variant(SHORT, q_lens=(3, 2, 0), kv_lens=(0, 0, 5)))
    built = cases.build(SHORT)
    no_pages = dataclasses.replace(built.batch, page_table=jnp.zeros((2, 0), jnp.int32))
    for q, batch in ((built.q[:0], built.batch), (built.q, no_pages)):
      out, lse = kernel.attention(q, built.cache, batch, spec_of(built))
      self.assertEqual((out.shape, out.dtype), (q.shape, q.dtype))
      np.testing.assert_array_equal(out, 0)
      np.testing.assert_array_equal(lse, np.full(q.shape[:2], -np.inf, np.float32))

  # The same bits.

  def test_same_bits_again(self):
    case = variant(RAGGED, num_kv_heads=1)
    built, config = cases.build(case), config_of(blocks=5, join_warps=4)
    expected = self.emulate(built, spec_of(built), config=config)
    for reverse in (False, True):
      again = self.emulate(built, spec_of(built), config=config, reverse=reverse)
      self.check_equal_bits(again, expected)

  # What must not matter, and what must.

  def test_faulty_blocks_surface(self):
    """In the rows that see the key, of that head only, and for V in those columns only.

    One exception: for V, rows that do not see the key are as those of their query tile that do.
    """
    case = variant(RAGGED, q_lens=(9, 6, 2), kv_lens=(90, 70, 40))
    built = cases.build(case, padding_rows=0)
    spec = spec_of(built, window=36)
    k, v = built.cache.k, built.cache.v
    places = [slots_of(built, seq) for seq in range(3)]

    def place(seq, head, key, block):
      pages, offsets = places[seq]
      return pages[key], head, offsets[key], block

    k = poisoned(k, place(0, 0, 84, 1))  # seen by the tokens 3 to 8
    k = poisoned(k, place(0, 1, 45, 1))  # not seen: the oldest that is is 81 - 35 = 46
    k = poisoned(k, place(0, 1, 47, 1))  # by the tokens 0 and 1
    v = poisoned(v, place(1, 1, 66, 2))  # by the tokens 2 to 5
    v = poisoned(v, place(1, 0, 31, 5))  # by the tokens 0 to 2
    v = poisoned(v, place(2, 0, 2, 0))  # not seen
    built = with_pools(built, k=k, v=v)
    exact = exact_of(built, spec)
    self.assertEqual(np.isnan(exact.lse).sum(), 2 * (6 + 2))
    expected = np.isnan(exact.out)
    self.assertEqual(expected.sum(), 2 * (8 * 128 + (4 + 3) * 16))
    self.spread_faults(expected)
    out, lse = self.emulate(built, spec)
    np.testing.assert_array_equal(np.isnan(lse), np.isnan(exact.lse))
    np.testing.assert_array_equal(np.isnan(out), expected)
    if self.cuts:  # alone in a query tile there is no exception
      out, _ = self.emulate(built, spec, config=config_of(width=1))
      np.testing.assert_array_equal(np.isnan(out), np.isnan(exact.out))

  def spread_faults(self, expected):
    """Beside the tokens 2 and 3 of the second sequence, in their query tile."""
    expected[9 : 9 + SMALL.width, 2:, 32:48] = True
    expected[9 : 9 + SMALL.width, :2, 80:96] = True

  @parameterized.parameters(0x7F, 0x78)
  def test_what_nobody_owns_does_not_matter(self, filling):
    """Not even for rows past a query tile's last one, which no key is masked for."""
    case = variant(SHORT, q_lens=(3, 1), kv_lens=(278, 70))
    built = cases.build(case)
    expected = self.emulate(built, spec_of(built))
    pools = {}
    for name in ("k", "v"):
      pool = getattr(built.cache, name)
      scales = np.array(pool.block_scale).view(np.uint8)
      free = np.ones(scales.shape, bool)
      for seq in range(2):
        pages, offsets = slots_of(built, seq)
        free[pages, :, offsets] = False
      scales[free] = filling
      data = np.where(free.any(-1)[..., None], np.uint8(0x77), np.asarray(pool.data))
      scales = jnp.asarray(scales.view(ml_dtypes.float8_e4m3fn))
      pools[name] = dataclasses.replace(pool, data=jnp.asarray(data), block_scale=scales)
    self.check_equal_bits(self.emulate(with_pools(built, **pools), spec_of(built)), expected)

  @parameterized.parameters(2**30, -5)
  def test_wrong_page_numbers_do_not_fault(self, number):
    built = cases.build(SHORT)
    table = built.batch.page_table.at[1, 1].set(number)
    wrong = dataclasses.replace(built.batch, page_table=table)
    results = self.emulate(dataclasses.replace(built, batch=wrong), spec_of(built))
    expected = self.emulate(built, spec_of(built))
    self.check_equal_bits((a[:5] for a in results), (a[:5] for a in expected))


class ShortTest(TailTest):
  """The same by mma, as far as its query tiles go."""

  least_top = decode_attend.P_EXPONENT
  most_rows = short_attend.MAX_COLUMNS
  emulate = staticmethod(by_engine("mma", most_rows))


class WideTest(TailTest):
  """By teams of warpgroups."""

  most_rows = wide_layout.ROWS
  emulate = staticmethod(by_engine("teams", most_rows, wide_layout.TEAMS))


LONG = {"num_tokens": 3 * 16 * 32, "group": 4}


def name_of(function) -> str:
  """Also of a function with some of its arguments."""
  return getattr(function, "func", function).__name__


class DispatchTest(TestCase):
  @parameterized.parameters(
    ({}, "tail", "by the kernel for short queries"),
    ({"num_tokens": 3 * prefill_sm90.MAX_TAIL}, "tail", "by the kernel for short queries"),
    ({"group": 64}, "tail", "by the kernel for short queries"),
    (
      {"num_tokens": 3 * prefill_sm90.MAX_TAIL + 1},
      "whole",
      "not the one for short queries: sequences have more than 128 new tokens on average",
    ),
    ({"num_tokens": 3 * 128, "num_kv_heads": 16}, "whole", "fill the GPU without cutting"),
    ({"num_tokens": 3 * 16, "num_kv_heads": 999}, "tail", "by the kernel for short queries"),
    ({"group": 65}, "whole", "up to 64 query heads a KV head, got 65"),
    ({"group": 129}, "plain", "up to 128 query heads a KV head, got 129"),
    ({"spec": AttentionSpec("nvfp4_repack", True, 1.0)}, "tail", "by the kernel for short"),
    ({"spec": AttentionSpec("nvfp4_repack", True, 1.0)} | LONG, "whole", "16.0 blocks that read"),
    (
      {"spec": AttentionSpec("nvfp4_repack", True, 1.0), "max_keys": 2**24} | LONG,
      "whole",
      r"the workspace would have \d+ bytes, more than 17179869184",
    ),
    (
      {"spec": AttentionSpec("nvfp4_a8q", True, 1.0), "max_keys": 2**24} | LONG,
      "none",
      r"workspace of \d+ bytes, the limit is 17179869184",
    ),
    ({"head_dim": 64}, "whole", "has head_dim 128, got head_dim 64"),
    ({"v_head_dim": 64}, "whole", "has head_dim 128, got v_head_dim 64"),
    ({"v_head_dim": 96}, "plain", "has head dims 64, 128, 256, got v_head_dim 96"),
    ({"formats": ("nvfp4", "bf16")}, "plain", "K and V in nvfp4, got nvfp4 and bf16"),
    ({"formats": ("fp8", "nvfp4")}, "plain", "K and V in nvfp4, got fp8 and nvfp4"),
    ({"new_kv": True}, "whole", "reads all keys from the cache, not new_kv"),
    ({"spec": AttentionSpec("nvfp4_dequant", True, 0.0)}, "plain", "sm_scale must not be 0"),
    ({"spec": AttentionSpec("nvfp4_a4q", True, -1.0)}, "tail", "by the kernel for short.*emulated"),
    ({"spec": AttentionSpec("nvfp4_a8q", True, 1.0)}, "whole", "not nvfp4_a8q"),
  )
  def test_which_kernel_prefills(self, changes, name, reason):
    built = cases.build(variant(SHORT, q_lens=(1, 1, 1), kv_lens=(1, 1, 1)), padding_rows=0)
    request = attention_request(
      built.q,
      built.cache,
      AttentionSpec("nvfp4_dequant", True, 1.0),
      num_seqs=3,
    )
    request = dataclasses.replace(request, **changes)
    with dispatch.use_target(dispatch.Target("sm_90")):
      chosen, why = prefill_sm90.choose_kernel(request)
      self.assertRegex(why, reason)
      resolved = prefill_op.resolve_prefill(request)
      if resolved.implementation == "mosaic_sm90":
        self.assertEndsWith(resolved.reason, why)
        self.assertEqual(name_of(resolved.function), name)
      else:
        self.assertIn(name, ("plain", "none"))
      if name != "none":
        self.assertEqual(name_of(chosen), name)
    with dispatch.use_target(dispatch.Target("sm_90", interpret=object())):
      chosen, why = prefill_sm90.choose_kernel(request)
      self.assertIs(chosen, prefill_sm90.plain)
      self.assertRegex(why, "its PTX cannot be interpreted")

  def test_an_out_that_is_too_large(self):
    built = cases.build(SHORT)
    spec = AttentionSpec("nvfp4_dequant", True, 1.0)
    request = attention_request(built.q, built.cache, spec, num_seqs=2)
    with dispatch.use_target(dispatch.Target("sm_90")):
      # Shapes of the plain kernel, which alone counts in 32 bits.
      request = dataclasses.replace(request, head_dim=96)
      for tokens, runs in ((2**23 - 1, "mosaic_sm90"), (2**23, "xla")):
        request = dataclasses.replace(request, num_tokens=tokens)
        for resolve in (prefill_op.resolve_prefill, resolve_decode):
          self.assertEqual(resolve(request).implementation, runs)
      with self.assertRaisesRegex(
        NotImplementedError, "less than 2.32 elements, this one has 4294"
      ):
        prefill_op.resolve_prefill(request, "mosaic_sm90")

  def test_repack_is_dequant_to_decode(self):
    """Whose kernels widen each value once."""
    built = cases.build(SHORT)
    for head_dim, reason in ((128, "split-KV"), (96, "prefill's kernel")):
      requests = [
        dataclasses.replace(
          attention_request(built.q, built.cache, AttentionSpec(path, True, 1.0), num_seqs=7),
          head_dim=head_dim,
        )
        for path in ("nvfp4_dequant", "nvfp4_repack")
      ]
      with dispatch.use_target(dispatch.Target("sm_90")):
        dequant, repack = (resolve_decode(request) for request in requests)
      self.assertEqual(dequant, repack)
      self.assertEqual(repack.implementation, "mosaic_sm90")
      self.assertRegex(repack.reason, reason)

  def test_reasons_of_both_kernels(self):
    built = cases.build(SHORT)
    spec = AttentionSpec("nvfp4_a8q", True, 1.0, soft_cap=2000.0)
    request = attention_request(built.q, built.cache, spec, num_seqs=2)
    with dispatch.use_target(dispatch.Target("sm_90")):
      with self.assertRaisesRegex(
        NotImplementedError, "soft cap loses digits.*; and the kernel has"
      ):
        prefill_op.resolve_prefill(request, "mosaic_sm90")

  @parameterized.product(
    q_len=(1, 2, 4, 8, 11, 12, 16, 100), num_seqs=(1, 16), path=("nvfp4_dequant", "nvfp4_a4q")
  )
  def test_blocks_have_room(self, q_len, num_seqs, path):
    """As many as are launched, on a multiprocessor of 228 KiB, of which each takes 1 KiB more."""
    cache = aot_calls.abstract_cache()
    tokens = num_seqs * q_len
    q = jax.ShapeDtypeStruct((tokens, 4 * cache.num_kv_heads, 128), jnp.bfloat16)
    lens, starts = (jax.ShapeDtypeStruct((num_seqs + i,), jnp.int32) for i in range(2))
    batch = nv.RaggedBatch(jax.ShapeDtypeStruct((num_seqs, 256), jnp.int32), lens, starts)
    spec = AttentionSpec(path, True, 0.1, q_levels=2)
    attend, _ = kernel.kernels(q, cache, batch, spec, jnp.bfloat16)
    of_multiprocessor = -(-attend.blocks // kernel.MULTIPROCESSORS)
    self.assertLessEqual(of_multiprocessor * (attend.smem_bytes + 1024), 228 * 1024)
    self.assertLessEqual(of_multiprocessor * attend.threads, 2048)

  @parameterized.parameters(
    ({"engine": "mma", "width": 5}, "up to 16 rows"),
    ({"engine": "wgmma", "width": 13}, "up to 48 rows"),
    ({"engine": "teams", "width": 17}, "up to 64 rows"),
    ({"engine": "teams", "blocks": 5}, "multiple of 2, got .*blocks=5"),
  )
  def test_impossible_configurations(self, changes, message):
    built = cases.build(SHORT)
    with self.assertRaisesRegex(ValueError, message):
      kernel.kernels(
        built.q, built.cache, built.batch, spec_of(built), jnp.float32, config_of(**changes)
      )

  @parameterized.product(dtype=(jnp.bfloat16, jnp.float16, jnp.float32), sinks=(False, True))
  def test_is_rounded_once(self, dtype, sinks):
    """The kernel, replaced by one that notes its options, gives q's dtype or what sinks change."""
    built = cases.build(SHORT)
    q, noted = built.q.astype(dtype), []

    def fake(q, cache, batch, spec, **options):
      noted.append(options)
      value = jnp.full(q.shape, 1 + 3 * 2.0**-12, options["out_dtype"])
      return value, jnp.zeros(q.shape[:2], jnp.float32)

    with (
      mock.patch("nvfp4_pallas.kernels.tail_mosaic_sm90.attention", fake),
      dispatch.use_target(dispatch.Target("sm_90")),
    ):
      out, _ = nv.prefill(
        q,
        built.cache,
        built.batch,
        read_path="nvfp4_dequant",
        sinks=jnp.full((q.shape[1],), np.log(3), jnp.float32) if sinks else None,
      )
    self.assertEqual(noted, [{"out_dtype": jnp.float32 if sinks else dtype}])
    self.assertEqual(out.dtype, dtype)
    exact = (1 + 3 * 2.0**-12) / (4 if sinks else 1)
    rounded = float(jnp.asarray(exact, dtype))
    self.assertAlmostEqual(float(out[0, 0, 0]), rounded, delta=2.0**-22 if sinks else 0)

  @parameterized.parameters(
    # tokens, num_seqs, group, width, engine, blocks
    (16, 16, 4, 1, "mma", 396),
    (64, 16, 4, 4, "mma", 396),
    (8, 4, 4, 2, "mma", 264),  # few sequences
    (128, 16, 4, 8, "wgmma", 264),
    (176, 16, 4, 11, "wgmma", 264),
    (192, 16, 4, 12, "teams", 264),
    (256, 16, 4, 16, "teams", 264),
    (4000, 16, 4, 16, "teams", 264),
    (32, 4, 4, 8, "teams", 264),  # few sequences
    (256, 2, 1, 64, "teams", 264),
    (96, 32, 7, 3, "wgmma", 264),
    (128, 1, 64, 1, "teams", 264),
    (3, 9, 4, 1, "mma", 396),
    (33, 4, 4, 9, "teams", 264),
    (40, 5, 4, 8, "wgmma", 264),  # the fewest that are not few
  )
  def test_query_tiles(self, tokens, num_seqs, group, width, engine, blocks):
    """As wide as sequences are on average, 64 rows at most, and by what is fastest at that."""
    config, why = kernel.choose_config(tokens, num_seqs, 8, group)
    self.assertEqual((config.width, config.engine, config.blocks), (width, engine, blocks))
    self.assertIn(f"query tiles of {width} tokens", why)
    self.assertIn(f"by {engine}: ", why)
    self.assertEqual(config.join_warps, 4 if tokens * 8 * group < 2112 else 1)


if __name__ == "__main__":
  absltest.main()
