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
  """What a program is compiled for, and what of caches and of attention is tried with it.

  Attributes:
    levers: of the cache: rotations, and whether K lacks a mean.
  """

  page_size: int = 16
  heads: int = 2
  group: int = 2
  head_dims: tuple[int, int] = (64, 64)
  max_pages: int = 6
  options: tuple[tuple[str, Any], ...] = ()
  levers: tuple[str, ...] = ()


SHAPES = (
  Shape(),
  Shape(32, 1, 3, (80, 64), 9, (("sm_scale", 0.31), ("window", 33)), ("k_rotation", "k_mean")),
  Shape(16, 3, 1, (64, 128), 7, (("soft_cap", 9.0),), ("k_rotation", "v_rotation")),
)


def with_levers(cache: nv.PagedKVCache, levers: tuple[str, ...]) -> nv.PagedKVCache:
  """The same bytes, of rows that were transformed."""
  mean = stored_rows.mean_of(np.random.default_rng(3), (cache.num_kv_heads, cache.k.head_dim))
  rotation = lambda name: "hadamard" if f"{name}_rotation" in levers else None
  return dataclasses.replace(
    cache,
    k=dataclasses.replace(
      cache.k, rotation=rotation("k"), mean=jnp.asarray(mean) if "k_mean" in levers else None
    ),
    v=dataclasses.replace(cache.v, rotation=rotation("v")),
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
    if not data.draw(st.booleans(), "with levers"):
      shape = dataclasses.replace(shape, levers=())
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

  @functools.cache  # noqa: B019 - of the class, in fact: pairs of formats in each shape
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
    cache = with_levers(cache, shape.levers)
    r = np.random.default_rng(0)
    filled = lambda a: jnp.asarray(
      r.integers(0, 256, np.asarray(a).view(np.uint8).shape, np.uint8).view(a.dtype)
    )
    rows = []
    for name, pool in (("k", cache.k), ("v", cache.v)):
      x = self.values(r, pool)
      rows.append(stored_rows.make(pool, x))
      scale = None if pool.block_scale is None else filled(pool.block_scale)
      pool = dataclasses.replace(pool, data=filled(pool.data), block_scale=scale)
      cache = dataclasses.replace(cache, **{name: pool})
    return cache, rows

  def values(self, r, pool):
    shape = self.WORDS, pool.num_kv_heads, pool.head_dim
    if pool.rotation is None and pool.mean is None:
      x = r.standard_normal(shape) * 2.0 ** r.integers(-9, 9, (*shape[1:2], 1))
      x[3, -1] = 1e38
    else:
      x = stored_rows.whole(r, shape)
      x[3, -1] = 1e30  # so that sums stay finite in any order
    x[0] = 0
    if pool.format != "bf16" or pool.rotation is None:  # where any NaN is as good
      x[1, 0, 5], x[2, -1, 60] = np.nan, np.inf
    return x


append = jax.jit(functools.partial(nv.append, implementation="xla"))


def cu(lens):
  return np.cumsum([0, *lens])


@dataclasses.dataclass(frozen=True)
class Reading:
  """How a cache is read.

  Attributes:
    new_kv: whether prefill reads this step's rows wide, of shapes with levers.
  """

  read_path: str
  formats: tuple[str, str]
  options: tuple[tuple[str, Any], ...] = ()
  recent_window: int = 0
  sinks: bool = False
  new_kv: bool = False


READINGS = (
  Reading("nvfp4_dequant", ("fp8", "nvfp4"), (("window", 19), ("soft_cap", 3.5)), sinks=True),
  Reading("nvfp4_dequant", ("nvfp4", "nvfp4"), recent_window=20, new_kv=True),
  Reading("nvfp4_a4q", ("nvfp4", "fp8"), (("q_levels", 1),), sinks=True),
  Reading("nvfp4_a8q", ("nvfp4", "bf16"), (("sm_scale", -0.2),), recent_window=5),
  Reading("fp8", ("fp8", "fp8"), (("window", 40),), new_kv=True),
  Reading("bf16", ("bf16", "bf16"), (("window", 1),), sinks=True),
)


class AttentionTest(AttentionTestCase):
  """Against float64, and that it matters to no bit where pages are, nor who else is there."""

  @parameterized.parameters(*READINGS)
  @examples.few(8)
  @given(data=st.data())
  def test_prefill_and_decode(self, reading, data):
    # Each reading in two shapes, plain and with levers: others compile more than they would show.
    both = SHAPES[0], SHAPES[2 - READINGS.index(reading) % 2]
    shape = data.draw(st.sampled_from(both), "shape")
    reading = dataclasses.replace(reading, options=reading.options + shape.options)
    built = self.drawn(reading, shape, data)
    new_kv = new_rows(built) if reading.new_kv and shape.levers else None
    sinks = None
    if reading.sinks:
      sinks = jnp.linspace(-3, data.draw(st.floats(-3, 9), "sink"), built.q.shape[1])
    chunk, token = built, last_tokens(built)
    if reading.recent_window:
      chunk = cases.with_window(built, reading.recent_window, past_only=new_kv is not None)
      token = last_tokens(cases.with_window(built, reading.recent_window))
    self.check(reading, data, chunk, sinks, new_kv)
    self.check(reading, data, token, sinks)

  def check(self, reading, data, one, sinks, *new_kv):
    """Prefill with new_kv, or None in its place; decode without."""
    run, batch = jitted(nv.prefill if new_kv else nv.decode, reading), one.batch
    got = run(one.q, one.cache, batch, sinks, *new_kv)
    want, real = expected(reading, one, sinks, *new_kv), int(batch.cu_q_lens[-1])
    self.assert_within_bounds([a[:real] for a in got], rows_of(want, slice(real)))
    moved = renumbered(one, data.draw(st.integers(1, NUM_PAGES - 1), "pages move by"))
    again = run(moved.q, moved.cache, moved.batch, sinks, *new_kv)
    jax.tree.map(np.testing.assert_array_equal, got, again)
    if new_kv:
      return
    seq = data.draw(st.integers(0, SEQS - 1), "alone")
    lens = jnp.where(jnp.arange(SEQS) == seq, batch.kv_lens, 0)
    alone = run(one.q, one.cache, dataclasses.replace(batch, kv_lens=lens), sinks)
    of = slice(seq, seq + 1)
    self.assert_within_bounds([a[of] for a in alone], rows_of(want, of))
    if not is_transformed(one.cache):
      jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[of], b[of]), got, alone)

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
    built = dataclasses.replace(built, cache=with_levers(built.cache, shape.levers))
    return dataclasses.replace(built, q=queries(built, built.q))


def is_transformed(cache) -> bool:
  return cache.k.mean is not None or (cache.k.rotation, cache.v.rotation) != (None, None)


def queries(built, q):
  """Eighths, where a rotation's sums must be exact."""
  return jnp.round(q * 8) / 8 if is_transformed(built.cache) else q


def new_rows(built):
  """K and V of a step, up to 16."""
  r, cache = np.random.default_rng(2), built.cache
  shape = ROWS, cache.num_kv_heads
  of = lambda dim: jnp.asarray(stored_rows.whole(r, (*shape, dim)) / 256, jnp.bfloat16)
  return of(cache.k.head_dim), of(cache.v.head_dim)


@functools.cache
def jitted(operation, reading):
  options = dict(reading.options)
  if operation is nv.decode:
    options["batch_invariant"] = True

  def run(q, cache, batch, sinks, *new_kv):
    how = options | {"new_kv": new_kv[0]} if new_kv else options
    return operation(
      q, cache, batch, read_path=reading.read_path, implementation="xla", sinks=sinks, **how
    )

  return jax.jit(run)


def expected(reading, one, sinks, new_kv=None) -> oracle.Attention:
  """The oracle's over rows as they are stored, and what that is of plain ones."""
  cache, batch, q = one.cache, one.batch, np.asarray(one.q)
  pools = cache.k, cache.v
  if new_kv is not None:
    rows = zip(new_kv, pools, strict=True)
    new_kv = [stored_rows.transformed(np.asarray(x), p.rotation, p.mean) for x, p in rows]
  options, mean = dict(reading.options), cache.k.mean
  want = oracle.attention(
    stored_rows.transformed(q, cache.k.rotation),
    cache,
    batch.page_table,
    batch.kv_lens,
    batch.cu_q_lens,
    read_path=reading.read_path,
    ring_ids=batch.ring_ids,
    new_kv=new_kv,
    sinks=sinks if mean is None else None,
    **options,
  )
  if mean is not None:
    heads = np.repeat(np.asarray(mean, np.float64), q.shape[1] // len(mean), axis=0)
    shift = np.einsum("thd,hd->th", q.astype(np.float64), heads)
    want = moved_back(want, shift * options.get("sm_scale", q.shape[-1] ** -0.5), sinks)
  if cache.v.rotation is None:
    return want
  signs = stored_rows.hadamard_signs(cache.v.head_dim)
  matrix = signs / np.sqrt(np.abs(signs).sum(axis=0))
  return dataclasses.replace(
    want,
    out=want.out @ matrix,
    spread=want.spread @ np.abs(matrix),
    keys=want.keys + len(matrix),  # as many terms more in float32
  )


def moved_back(want, shift, sinks) -> oracle.Attention:
  """Scores without a mean are all less by `shift`; then sinks join, as one more key."""
  shift = np.where(np.isneginf(want.lse), 0, shift)
  lse, delta = want.lse + shift, want.delta + 8 * oracle.F32_UNIT * np.abs(shift)
  if sinks is None:
    return dataclasses.replace(want, lse=lse, delta=delta)
  before = dataclasses.replace(want, lse=lse, delta=delta)
  joined = np.where(np.isneginf(lse), lse, np.logaddexp(lse, np.asarray(sinks, np.float64)))
  share = np.where(np.isneginf(lse), 0, np.exp(lse - np.where(np.isneginf(lse), 0, joined)))
  return dataclasses.replace(
    want,
    lse=joined,
    delta=delta + before.lse_bound(),  # of the exponent of what out is multiplied by
    keys=want.keys + 1,
    out=want.out * share[..., None],
    spread=want.spread * share[..., None],
  )


def last_tokens(built):
  """As decode: one query for each sequence."""
  batch = built.batch
  batch = nv.RaggedBatch.for_decode(batch.page_table, batch.kv_lens, batch.ring_ids)
  q = jnp.asarray(
    np.random.default_rng(0).standard_normal((SEQS, *built.q.shape[1:])), jnp.bfloat16
  )
  return dataclasses.replace(built, q=queries(built, q), batch=batch)


def rows_of(want, rows):
  fields = dataclasses.asdict(want)
  return oracle.Attention(**{name: array[rows] for name, array in fields.items()})


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
