"""Rules that must hold for whatever values, tables and lengths: hypothesis draws them.

Shapes are few, since each compiles; what is drawn is data. The judges are the oracle's numpy.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import nvfp4_pallas as nv
from benchmarks import oracle
from nvfp4_pallas.cache import pool_arrays
from tests import cases, examples, stored_rows
from tests.attention_test import AttentionTestCase
from tests.base import TestCase

BLOCKS, WIDTH = 5, 32
SCALES = st.sampled_from((1.0, 0.37, 2.0**-64, 2.0**64, 3.7e7))
FLOATS = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}

NUM_PAGES, SEQS = 24, 4
ROWS = 40  # of a step; those past the last are padding
seeds = st.integers(0, 2**32 - 1)


@dataclasses.dataclass(frozen=True)
class Shape:
  """What a program is compiled for, and options of attention that are tried with it."""

  page_size: int = 16
  heads: int = 2
  group: int = 2
  head_dims: tuple[int, int] = (64, 64)
  max_pages: int = 6
  options: tuple[tuple[str, Any], ...] = ()


SHAPES = (
  Shape(),
  Shape(32, 1, 3, (80, 64), 9, (("sm_scale", 0.31), ("window", 33))),
  Shape(16, 3, 1, (64, 128), 7, (("soft_cap", 9.0),)),
)


class PackTest(TestCase):
  """Every bit pattern of a dtype is a value that may come."""

  @parameterized.product(dtype=tuple(FLOATS), search=("amax", "four_over_six"))
  @examples.few(25)
  @given(data=st.data())
  def test_pack_and_unpack(self, data, dtype, search):
    bits = hnp.arrays(FLOATS[dtype], (BLOCKS, WIDTH), fill=st.nothing())
    x = data.draw(bits, "bits").view(dtype)
    scale = data.draw(SCALES, "global scale")
    packed = pack(jnp.asarray(x), jnp.float32(scale), levels=2, scale_search=search)
    got = np.asarray(unpack(packed))
    with np.errstate(all="ignore"):  # NaN, infinities, and what saturates
      wide = x.astype(np.float32)
      values = []
      for level in (packed, packed.residual):
        codes, scales = oracle.encode(wide, np.float32(scale), search)
        np.testing.assert_array_equal(level.codes, codes)
        np.testing.assert_array_equal(np.asarray(level.block_scale).view(np.uint8), scales)
        values.append(oracle.decode(codes, scales, np.float32(scale)).astype(np.float32))
        wide = wide - values[-1]
      np.testing.assert_array_equal(got, values[0] + values[1])


pack = jax.jit(
  functools.partial(nv.pack, implementation="xla"), static_argnames=("levels", "scale_search")
)
unpack = jax.jit(lambda packed: nv.unpack(packed, jnp.float32, implementation="xla"))


class AppendTest(TestCase):
  """Against numpy that writes stored rows to their places: all bytes of the cache."""

  FORMATS = (("nvfp4", "nvfp4"), ("fp8", "nvfp4"), ("bf16", "fp8"))
  WORDS = 24

  @parameterized.parameters(*FORMATS)
  @examples.few(30)
  @given(data=st.data())
  def test_append(self, k_format, v_format, data):
    shape = data.draw(st.sampled_from(SHAPES), "shape")
    page_size = shape.page_size
    cache, rows = self.made(k_format, v_format, shape)
    r = np.random.default_rng(data.draw(seeds, "seed"))
    lens = st.integers(0, 3 * page_size)
    kv_lens = np.asarray(data.draw(st.lists(lens, min_size=3, max_size=3), "kv_lens"))
    q_lens = [data.draw(st.integers(0, min(n, ROWS // 3))) for n in kv_lens]
    table = r.integers(-(2**31), 2**31, (3, 4))
    pages = r.permutation(9).reshape(3, 3)
    for s, count in enumerate(-(-kv_lens // page_size)):
      table[s, :count] = pages[s, :count]
    words = r.integers(0, self.WORDS, ROWS)
    batch = nv.RaggedBatch(*(jnp.asarray(a, jnp.int32) for a in (table, kv_lens, cu(q_lens))))
    got = append(cache, rows[0].values[words], rows[1].values[words], batch)
    seq = np.repeat(np.arange(3), q_lens)
    at = np.concatenate([np.arange(n - q, n) for n, q in zip(kv_lens, q_lens, strict=True)])
    where = table[seq, at // page_size], slice(None), at % page_size
    for before, after, row in zip((cache.k, cache.v), (got.k, got.v), rows, strict=True):
      arrays = zip(pool_arrays(before), pool_arrays(after), row.stored, strict=True)
      for old, new, stored in arrays:
        want = np.array(old).view(np.uint8)
        want[where] = stored[words[: len(at)]]
        np.testing.assert_array_equal(np.asarray(new).view(np.uint8), want)

  @functools.cache  # noqa: B019 - of the class, in fact: three pairs of formats in each shape
  def made(self, k_format, v_format, shape):
    """A cache of random bytes, and rows with everything in them."""
    scales = {"k": jnp.asarray([0.7, 1.6, 3.0]), "v": jnp.asarray([1.1, 0.4, 0.02])}
    formats = {"k": k_format, "v": v_format}
    global_scales: dict[str, Any] = {
      f"{n}_global_scale": scales[n][: shape.heads] for n in "kv" if formats[n] != "bf16"
    }
    cache = nv.PagedKVCache.create(
      num_pages=9,
      page_size=shape.page_size,
      num_kv_heads=shape.heads,
      head_dim=shape.head_dims[0],
      v_head_dim=shape.head_dims[1],
      k_format=k_format,
      v_format=v_format,
      **global_scales,
    )
    r = np.random.default_rng(0)
    filled = lambda a: jnp.asarray(
      r.integers(0, 256, np.asarray(a).view(np.uint8).shape, np.uint8).view(a.dtype)
    )
    rows = []
    for name, pool in (("k", cache.k), ("v", cache.v)):
      x = r.standard_normal((self.WORDS, shape.heads, pool.head_dim)) * 2.0 ** r.integers(
        -9, 9, (shape.heads, 1)
      )
      x[0], x[1, 0, 5], x[2, -1, 60], x[3, -1] = 0, np.nan, np.inf, 1e38
      rows.append(stored_rows.make(pool, x))
      scale = None if pool.block_scale is None else filled(pool.block_scale)
      pool = dataclasses.replace(pool, data=filled(pool.data), block_scale=scale)
      cache = dataclasses.replace(cache, **{name: pool})
    return cache, rows


append = jax.jit(functools.partial(nv.append, implementation="xla"))


def cu(lens):
  return np.cumsum([0, *lens])


@dataclasses.dataclass(frozen=True)
class Reading:
  """How a cache is read."""

  read_path: str
  formats: tuple[str, str]
  options: tuple[tuple[str, Any], ...] = ()
  recent_window: int = 0
  sinks: bool = False


READINGS = (
  Reading("nvfp4_dequant", ("fp8", "nvfp4"), (("window", 19), ("soft_cap", 3.5)), sinks=True),
  Reading("nvfp4_dequant", ("nvfp4", "nvfp4"), recent_window=20),
  Reading("nvfp4_a4q", ("nvfp4", "fp8"), (("q_levels", 1),), sinks=True),
  Reading("nvfp4_a8q", ("nvfp4", "bf16"), (("sm_scale", -0.2),), recent_window=5),
  Reading("fp8", ("fp8", "fp8"), (("window", 40),)),
  Reading("bf16", ("bf16", "bf16"), (("window", 1),)),
)


class AttentionTest(AttentionTestCase):
  """Against float64, and that it matters to no bit where pages are."""

  @parameterized.parameters(*READINGS)
  @examples.few(8)
  @given(data=st.data())
  def test_prefill_and_decode(self, reading, data):
    # Each reading in two shapes: others compile more than they would show.
    both = SHAPES[0], SHAPES[1 + READINGS.index(reading) % 2]
    shape = data.draw(st.sampled_from(both), "shape")
    reading = dataclasses.replace(reading, options=reading.options + shape.options)
    built = self.drawn(reading, shape, data)
    options = dict(reading.options)
    if reading.sinks:
      options["sinks"] = jnp.linspace(-3, data.draw(st.floats(-3, 9), "sink"), built.q.shape[1])
    for operation, one in ((nv.prefill, built), (nv.decode, last_tokens(built))):
      run = jitted(operation, reading)
      sinks = options.get("sinks")
      got = run(one.q, one.cache, one.batch, sinks)
      batch = one.batch
      want = oracle.attention(
        one.q,
        one.cache,
        batch.page_table,
        batch.kv_lens,
        batch.cu_q_lens,
        read_path=reading.read_path,
        ring_ids=batch.ring_ids,
        **options,
      )
      real = int(batch.cu_q_lens[-1])
      self.assert_within_bounds([a[:real] for a in got], first_rows(want, real))
      moved = renumbered(one, data.draw(st.integers(1, NUM_PAGES - 1), "pages move by"))
      jax.tree.map(
        np.testing.assert_array_equal, got, run(moved.q, moved.cache, moved.batch, sinks)
      )

  def drawn(self, reading, shape, data):
    page = shape.page_size
    near = st.sampled_from((0, 1, page - 1, page, page + 1, 4 * page))
    lens = st.lists(st.one_of(near, st.integers(0, 4 * page)), min_size=SEQS, max_size=SEQS)
    kv_lens = tuple(data.draw(lens, "kv_lens"))
    q_lens = tuple(data.draw(st.integers(0, min(n, ROWS // SEQS))) for n in kv_lens)
    case = cases.Case(
      "",
      q_lens,
      kv_lens,
      shape.heads,
      shape.group,
      head_dim=shape.head_dims[0],
      v_head_dim=shape.head_dims[1],
      page_size=page,
      k_format=reading.formats[0],
      v_format=reading.formats[1],
    )
    built = cases.build(case, data.draw(seeds, "seed"), padding_rows=0)
    built = cases.padded(built, NUM_PAGES, shape.max_pages, ROWS)
    return cases.with_window(built, reading.recent_window) if reading.recent_window else built


@functools.cache
def jitted(operation, reading):
  options = dict(reading.options)
  return jax.jit(
    lambda q, cache, batch, sinks: operation(
      q, cache, batch, read_path=reading.read_path, implementation="xla", sinks=sinks, **options
    )
  )


def last_tokens(built):
  """As decode: one query for each sequence."""
  batch = built.batch
  batch = nv.RaggedBatch.for_decode(batch.page_table, batch.kv_lens, batch.ring_ids)
  q = np.random.default_rng(0).standard_normal((SEQS, *built.q.shape[1:]))
  return dataclasses.replace(built, q=jnp.asarray(q, jnp.bfloat16), batch=batch)


def first_rows(want, count):
  fields = dataclasses.asdict(want)
  return oracle.Attention(**{name: array[:count] for name, array in fields.items()})


def renumbered(built, by):
  """The same pages under other numbers."""

  def moved(pool):
    arrays = {
      name: jnp.asarray(np.roll(np.asarray(array), by, axis=0))
      for name in ("data", "block_scale")
      if (array := getattr(pool, name)) is not None
    }
    return dataclasses.replace(pool, **arrays)

  table = np.asarray(built.batch.page_table)
  table = np.where(table < NUM_PAGES, (table + by) % NUM_PAGES, table).astype(np.int32)
  cache = dataclasses.replace(built.cache, k=moved(built.cache.k), v=moved(built.cache.v))
  batch = dataclasses.replace(built.batch, page_table=jnp.asarray(table))
  return dataclasses.replace(built, cache=cache, batch=batch)


if __name__ == "__main__":
  absltest.main()
