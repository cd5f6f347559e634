"""Rotations, K's mean and the scale search of a cache: callers see nothing of them but numbers."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import nvfp4_pallas as nv
from nvfp4_pallas import dispatch, interop
from nvfp4_pallas import format as nvfp4
from nvfp4_pallas.ops import append as append_op
from nvfp4_pallas.rotation import hadamard, transform_rows
from tests import cases, kernel_cases
from tests.base import TestCase

HEADS, GROUP, PAGE = 2, 3, 16
Q_LENS, KV_LENS = (1, 20, 0, 5), (40, 20, 17, 50)
BOTH = {"k_rotation": "hadamard", "v_rotation": "hadamard"}


append = jax.jit(nv.append)


def normal(r, shape):
  return r.standard_normal(shape)


def few_means(dim):
  mean = np.zeros(dim)
  mean[[2, 19, 40]] = 5, -3, 4
  return mean


def sparse(r, shape):
  """Small whole numbers, two in 16 channels: so small that their rotations fit into bfloat16."""
  few = np.zeros((*shape[:-1], shape[-1] // 16, 16))
  few[..., 3], few[..., 10] = r.integers(-3, 4, (2, *few.shape[:-1]))
  few[..., 1:, :] *= r.random((*few.shape[:-2], few.shape[-2] - 1, 1)) < 0.2
  return few.reshape(shape)


class Setup:
  """Sequences with a past in the cache and new rows; `options` are of the cache."""

  def __init__(self, dim=64, v_dim=None, values=normal, mean=0, dtype=jnp.float32, seed=0):
    r = np.random.default_rng(seed)
    self.dim, self.v_dim = dim, v_dim or dim
    pages = [-(-n // PAGE) for n in KV_LENS]
    order, table, start = r.permutation(sum(pages)), np.full((len(pages), max(pages)), 2**20), 0
    for s, n in enumerate(pages):
      table[s, :n] = order[start : start + n]
      start += n
    self.num_pages, self.table = start, jnp.asarray(table, jnp.int32)
    as_rows = lambda x: jnp.asarray(x, jnp.bfloat16)
    tokens, new = sum(KV_LENS), sum(Q_LENS)
    self.mean = jnp.asarray(np.broadcast_to(mean, (HEADS, dim)), jnp.float32)
    self.past_k = as_rows(values(r, (tokens, HEADS, dim)) + mean)
    self.past_v = as_rows(values(r, (tokens, HEADS, self.v_dim)))
    self.q = jnp.asarray(values(r, (new, HEADS * GROUP, dim)), jnp.bfloat16).astype(dtype)
    lens = jnp.asarray(KV_LENS, jnp.int32)
    self.all = nv.RaggedBatch(self.table, lens, jnp.asarray(np.cumsum([0, *KV_LENS]), jnp.int32))
    self.batch = nv.RaggedBatch(self.table, lens, jnp.asarray(np.cumsum([0, *Q_LENS]), jnp.int32))
    ends = np.cumsum(KV_LENS)
    rows = [np.arange(end - q, end) for end, q in zip(ends, Q_LENS, strict=True)]
    self.new_kv = self.past_k[np.concatenate(rows)], self.past_v[np.concatenate(rows)]

  def cache(self, format="bf16", **options):
    empty = nv.PagedKVCache.create(
      num_pages=self.num_pages,
      page_size=PAGE,
      num_kv_heads=HEADS,
      head_dim=self.dim,
      v_head_dim=self.v_dim,
      k_format=format,
      **options,
    )
    return append(empty, self.past_k, self.past_v, self.all)

  def attend(self, operation, cache, **options):
    options = {"read_path": "bf16"} | options
    if operation == "decode":
      batch = nv.RaggedBatch.for_decode(self.table, self.batch.kv_lens)
      q = self.q[: len(KV_LENS)]
      return jax.jit(functools.partial(nv.decode, **options))(q, cache, batch)
    arrays = {"new_kv": self.new_kv} if operation == "new_kv" else {}
    return jax.jit(functools.partial(nv.prefill, **options))(self.q, cache, self.batch, **arrays)


SINKS = jnp.linspace(-2, 3, HEADS * GROUP, dtype=jnp.float32)


class PlainResultsTest(TestCase):
  """A cache with levers gives what one without gives."""

  def check(self, got, want, out_error, lse_error):
    out, lse = (np.asarray(a, np.float64) for a in got)
    want_out, want_lse = (np.asarray(a, np.float64) for a in want)
    self.assertEqual(got[0].dtype, want[0].dtype)
    empty = np.isneginf(want_lse)
    np.testing.assert_array_equal(np.isneginf(lse), empty)
    self.assertTrue((out[empty] == 0).all())
    self.assertLess(np.linalg.norm(out - want_out) / np.linalg.norm(want_out), out_error)
    self.assertLess(np.abs(lse - want_lse)[~empty].max(), lse_error)

  @parameterized.parameters(
    *((dim, "prefill") for dim in (64, 80, 112, 192, 256)), (64, "decode"), (64, "new_kv")
  )
  def test_where_nothing_is_rounded(self, dim, operation):
    """Only float32 sums differ, where the root of the blocks' length divides a bfloat16."""
    setup = Setup(dim, {80: 64}.get(dim), sparse, few_means(dim))
    plain = setup.attend(operation, setup.cache())
    got = setup.attend(operation, setup.cache(**BOTH, k_mean=setup.mean))
    self.check(got, plain, 2e-6, 3e-5)

  @parameterized.parameters(
    *((dim, "float32") for dim in (64, 80, 96, 128, 144, 192, 256)), (128, "bfloat16")
  )
  def test_rotations_to_rounding(self, dim, dtype):
    """Of q, k and v to bfloat16: some 2^-9 each; a forgotten rotation is off by 1."""
    setup = Setup(dim, 96 if dim == 80 else None, dtype=dtype)
    plain = setup.attend("prefill", setup.cache())
    self.check(setup.attend("prefill", setup.cache(**BOTH)), plain, 1e-2, 2e-2)

  def test_one_lever(self):
    setup = Setup(values=sparse, mean=few_means(64))
    plain = setup.attend("prefill", setup.cache())
    for name, value in (*BOTH.items(), ("k_mean", setup.mean)):
      self.check(setup.attend("prefill", setup.cache(**{name: value})), plain, 2e-6, 3e-5)

  @parameterized.product(
    options=(
      {"sinks": SINKS},
      {"sm_scale": -0.2},
      {"window": 9, "sinks": SINKS, "sm_scale": 0.3},
    ),
    operation=("prefill", "decode", "new_kv"),
  )
  def test_options(self, options, operation):
    setup = Setup(values=sparse, mean=few_means(64))
    plain = setup.attend(operation, setup.cache(), **options)
    got = setup.attend(operation, setup.cache(**BOTH, k_mean=setup.mean), **options)
    self.check(got, plain, 2e-6, 1e-4)

  def test_not_causal_and_split(self):
    setup = Setup(values=sparse, mean=few_means(64))
    plain, cache = setup.cache(), setup.cache(**BOTH, k_mean=setup.mean)
    for operation, options in (("prefill", {"causal": False}), ("decode", {"num_splits": 3})):
      got, want = (setup.attend(operation, c, **options) for c in (cache, plain))
      self.check(got, want, 2e-6, 3e-5)

  def test_rows_that_see_nothing(self):
    """Padding, with NaN in q, and a free place: out 0 and lse -inf, corrected or not."""
    setup = Setup(mean=3)
    cache = setup.cache(**BOTH, k_mean=setup.mean)
    q = jnp.concatenate([setup.q, jnp.full((2, *setup.q.shape[1:]), jnp.nan)])
    for sinks in (None, SINKS):
      out, lse = nv.prefill(q, cache, setup.batch, read_path="bf16", sinks=sinks)
      np.testing.assert_array_equal(out[-2:], 0)
      np.testing.assert_array_equal(lse[-2:], -np.inf)
      self.assertTrue(np.isfinite(out[:-2]).all() and np.isfinite(lse[:-2]).all())
      free = nv.RaggedBatch.for_decode(setup.table, jnp.asarray([40, 0, 17, 0], jnp.int32))
      out, lse = nv.decode(setup.q[:4], cache, free, read_path="bf16", sinks=sinks)
      np.testing.assert_array_equal(np.isneginf(lse).all(1), [False, True, False, True])
      np.testing.assert_array_equal(out[1::2], 0)

  def test_helps(self):
    """Keys with a few large channels, all of one sign: NVFP4 keeps more of them with levers."""

    def outliers(r, shape):
      x = r.standard_normal(shape)
      x[..., 5] *= 8
      return x

    mean = np.zeros(64)
    mean[[5, 40]] = 30, -20
    setup = Setup(values=outliers, mean=mean)
    want = np.asarray(setup.attend("prefill", setup.cache())[0], np.float64)

    def error(**options):
      cache = setup.cache("nvfp4", **options)
      out = np.asarray(setup.attend("prefill", cache, read_path="nvfp4_dequant")[0], np.float64)
      return np.linalg.norm(out - want)

    plain = error()
    self.assertLess(error(k_rotation="hadamard"), 0.8 * plain)
    self.assertLess(error(k_rotation="hadamard", k_mean=setup.mean), 0.6 * plain)


class CompositionTest(TestCase):
  """What is stored and attended to is what was transformed by hand, for every format and path."""

  @parameterized.parameters(
    *((path, k, v) for path, pairs in cases.FORMATS_OF_PATH.items() for k, v in pairs)
  )
  def test_read_paths(self, read_path, k_format, v_format):
    setup = Setup(64, 80, mean=np.arange(64) % 5)
    formats = {"format": k_format, "v_format": v_format}
    cache = setup.cache(**formats, **BOTH, k_mean=setup.mean)

    by_hand = Setup(64, 80, mean=np.arange(64) % 5)
    by_hand.past_k = transform_rows(setup.past_k, "hadamard", setup.mean)
    by_hand.past_v = hadamard(setup.past_v).astype(jnp.bfloat16)
    by_hand.q = hadamard(setup.q)
    plain = by_hand.cache(**formats)
    for name in ("k", "v"):
      a, b = getattr(cache, name), getattr(plain, name)
      for stored, wanted in ((a.data, b.data), (a.block_scale, b.block_scale)):
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(*map(raw, (x, y))), stored, wanted)

    operation = "decode" if k_format == v_format else "prefill"
    out, lse = setup.attend(operation, cache, read_path=read_path)
    want_out, want_lse = by_hand.attend(operation, plain, read_path=read_path)
    q = np.asarray(setup.q[: len(out)], np.float64).reshape(len(out), HEADS, GROUP, 64)
    shift = np.einsum("thgd,hd->thg", q, np.asarray(setup.mean, np.float64)) / 8
    np.testing.assert_allclose(lse, want_lse + shift.reshape(lse.shape), rtol=0, atol=1e-5)
    np.testing.assert_allclose(out, hadamard(want_out), rtol=0, atol=1e-6)

  def test_new_rows_of_every_dtype_round_once(self):
    setup = Setup(mean=2)
    for dtype in ("float16", "float32"):
      k, v = (x.astype(dtype) / 3 for x in (setup.past_k, setup.past_v))
      levers = setup.cache("nvfp4", **BOTH, k_mean=setup.mean)
      plain = setup.cache("nvfp4")
      got = nv.append(levers, k, v, setup.all)
      rows = transform_rows(k, "hadamard", setup.mean), transform_rows(v, "hadamard")
      want = nv.append(plain, *rows, setup.all)
      for a, b in ((got.k, want.k), (got.v, want.v)):
        np.testing.assert_array_equal(a.data, b.data)
        np.testing.assert_array_equal(raw(a.block_scale), raw(b.block_scale))


class TransformationsTest(TestCase):
  """jit, donation, vmap, scan, pages."""

  def test_layers_under_vmap_and_scan(self):
    setups = [Setup(mean=m, seed=s) for s, m in enumerate((1, 4))]
    options = [BOTH | {"k_mean": s.mean} for s in setups]
    layers = [s.cache("nvfp4", **o) for s, o in zip(setups, options, strict=True)]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *layers)
    batch = setups[0].batch  # tables differ: attend with the first's over both
    q, k, v = (jnp.stack(x) for x in zip(*((s.q, *s.new_kv) for s in setups), strict=True))

    def step(cache, q, k, v):
      cache = nv.append(cache, k, v, batch)
      return cache, nv.prefill(q, cache, batch, read_path="nvfp4_dequant", sinks=SINKS)

    by_vmap = jax.jit(jax.vmap(step))(stacked, q, k, v)
    by_scan = jax.jit(lambda *x: jax.lax.scan(lambda _, x: (None, step(*x)), None, x)[1])(
      stacked, q, k, v
    )
    for layer in range(2):
      want = jax.jit(step)(layers[layer], q[layer], k[layer], v[layer])
      for got in (by_vmap, by_scan):
        self.assertEqual(got[0].k.rotation, "hadamard")
        of_layer = jax.tree.map(lambda a, layer=layer: a[layer], got)
        for a, b in zip(jax.tree.leaves(of_layer), jax.tree.leaves(want), strict=True):
          if a.dtype == jnp.float32:
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
          else:
            self.assertGreater(np.mean(raw(a) == raw(b)), 0.999)  # rotated sums may round otherwise

  def test_donation_is_in_place(self):
    setup = Setup(dtype=jnp.bfloat16)
    cache = setup.cache("bf16", **BOTH, k_mean=setup.mean)

    def step(cache, k, v, batch):
      return nv.append(cache, k, v, batch)

    step = jax.jit(step, donate_argnums=0)
    arguments = (cache, *setup.new_kv, setup.batch)
    hlo = step.lower(*arguments).compile().as_text()
    aliases = hlo[hlo.index("input_output_alias") :].partition("entry_computation")[0]
    self.assertEqual(aliases.count("alias)"), 3)  # K, V and the mean
    after = step(*arguments)
    self.assertTrue(cache.k.data.is_deleted())
    np.testing.assert_array_equal(after.k.mean, setup.mean)

  def test_copied_pages_keep_the_levers(self):
    setup = Setup()
    cache = setup.cache("nvfp4", **BOTH, k_mean=setup.mean + 1, scale_search="four_over_six")
    ids = jnp.asarray([0, 1], jnp.int32)
    copied = jax.jit(nv.copy_pages)(cache, ids, ids + 3)
    self.assertEqual(jax.tree.structure(copied), jax.tree.structure(cache))
    np.testing.assert_array_equal(copied.k.mean, cache.k.mean)
    np.testing.assert_array_equal(copied.k.data[3:5], cache.k.data[:2])


class ScaleSearchTest(TestCase):
  @parameterized.parameters("bfloat16", "float32")
  def test_append_is_bit_identical_to_pack(self, dtype):
    setup = Setup(128)
    cache = setup.cache("nvfp4", k_global_scale=jnp.asarray([0.2, 3.3]))
    searched = setup.cache(
      "nvfp4", k_global_scale=jnp.asarray([0.2, 3.3]), scale_search="four_over_six"
    )
    self.assertFalse(np.array_equal(raw(searched.k.block_scale), raw(cache.k.block_scale)))
    k, v = (x.astype(dtype) * 1.1 for x in setup.new_kv)
    slots = nv.slot_mapping(setup.batch, PAGE, len(k))
    searched = nv.append(searched, k, v, setup.batch)
    page, offset = np.asarray(slots) // PAGE, np.asarray(slots) % PAGE
    for pool, x in ((searched.k, k), (searched.v, v)):
      packed = nvfp4.encode(x, pool.global_scale, scale_search="four_over_six")
      np.testing.assert_array_equal(raw(pool.data)[page, :, offset], packed.codes)
      np.testing.assert_array_equal(raw(pool.block_scale)[page, :, offset], raw(packed.block_scale))

  def test_only_what_is_in_nvfp4_searches(self):
    cache = Setup().cache("fp8", v_format="nvfp4", scale_search="four_over_six")
    self.assertEqual((cache.k.scale_search, cache.v.scale_search), ("amax", "four_over_six"))

  def test_who_appends(self):
    cache = Setup().cache("nvfp4", scale_search="four_over_six")
    rows = lambda dtype: (jnp.zeros((1, HEADS, 64), dtype),) * 2
    request = lambda dtype: append_op.append_request(cache, *rows(dtype))
    with dispatch.use_target(dispatch.Target("sm_90")):
      resolved = append_op.resolve_append(request("bfloat16"))
      self.assertEqual(resolved.implementation, "mosaic_sm90")
      resolved = append_op.resolve_append(request("float32"))
      self.assertEqual(resolved.implementation, "xla")
      reason = "only its PTX searches scales by four_over_six, and that takes rows of bfloat16"
      self.assertRegex(resolved.reason, reason)
      with self.assertRaisesRegex(NotImplementedError, reason):
        append_op.resolve_append(request("float16"), "mosaic_sm90")
      large = dataclasses.replace(request("bfloat16"), num_pages=2**27)
      self.assertRegex(append_op.resolve_append(large).reason, "counts up to 2.32 scale blocks")
      plain = dataclasses.replace(request("float32"), scale_searches=("amax", "amax"))
      self.assertEqual(append_op.resolve_append(plain).implementation, "mosaic_sm90")
    with dispatch.use_target(dispatch.Target("sm_90", interpret=object())):
      resolved = append_op.resolve_append(request("bfloat16"))
      self.assertRegex(resolved.reason, "PTX cannot be interpreted")


class KernelsTest(TestCase):
  """The device's kernels get the same rows, and what they return is rounded once."""

  def on_sm90(self, function, *arguments):
    def run(*arguments, interpret):
      with dispatch.use_target(dispatch.Target("sm_90", interpret)):
        return jax.jit(function)(*arguments)

    return kernel_cases.interpret(run, *arguments)

  def test_interpreted(self):
    setup = Setup(mean=np.arange(64) % 5, dtype=jnp.bfloat16)
    cache = setup.cache("nvfp4", **BOTH, k_mean=setup.mean)
    got = self.on_sm90(nv.append, cache, *setup.new_kv, setup.batch)
    want = nv.append(cache, *setup.new_kv, setup.batch, implementation="xla")
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      np.testing.assert_array_equal(raw(a), raw(b))
    prefill = functools.partial(nv.prefill, read_path="nvfp4_dequant", sinks=SINKS)
    out, lse = self.on_sm90(prefill, setup.q, cache, setup.batch)
    want_out, want_lse = prefill(setup.q, cache, setup.batch, implementation="xla")
    np.testing.assert_allclose(lse, want_lse, rtol=0, atol=1e-3)
    out, want_out = (np.asarray(a, np.float64) for a in (out, want_out))
    self.assertLess(np.linalg.norm(out - want_out) / np.linalg.norm(want_out), 6e-3)

  @parameterized.product(
    options=({"v_rotation": "hadamard"}, {"k_mean": 1}, {"k_rotation": "hadamard"}),
    operation=("decode", "tail", "whole"),
    sinks=(None, SINKS),
  )
  def test_rounded_once(self, options, operation, sinks):
    """A kernel, replaced by one that notes its options, rounds only what is the result."""
    setup = Setup(128, mean=1, dtype=jnp.bfloat16)
    if "k_mean" in options:
      options = {"k_mean": setup.mean}
    cache, noted = setup.cache("nvfp4", **options), []

    def fake(q, cache, batch, spec, *, out_dtype, **_):
      noted.append((out_dtype, q))
      return jnp.ones(q.shape, out_dtype), jnp.zeros(q.shape[:2], jnp.float32)

    module, function = {
      "decode": ("decode_mosaic_sm90", "decode"),
      "tail": ("tail_mosaic_sm90", "attention"),
      "whole": ("prefill_mosaic_sm90", "attention"),
    }[operation]
    path = {"read_path": "nvfp4_a8q" if operation == "whole" else "nvfp4_dequant"}
    with (
      mock.patch(f"nvfp4_pallas.kernels.{module}.{function}", fake),
      dispatch.use_target(dispatch.Target("sm_90")),
      jax.disable_jit(),
    ):
      out, lse = setup.attend(operation, cache, sinks=sinks, **path)
    ((out_dtype, q),) = noted
    done = sinks is None and "k_rotation" in options
    self.assertEqual(out_dtype, jnp.bfloat16 if done else jnp.float32)
    self.assertEqual(out.dtype, jnp.bfloat16)
    plain = setup.q[: len(out)]
    np.testing.assert_array_equal(
      q, hadamard(plain).astype(jnp.bfloat16) if "k_rotation" in options else plain
    )
    shift = np.sum(np.asarray(plain, np.float64), -1) / np.sqrt(128) if "k_mean" in options else 0
    weight = 0 if sinks is None else np.exp(np.asarray(sinks, np.float64))
    want_lse = np.log(np.exp(np.broadcast_to(shift, lse.shape)) + weight)
    np.testing.assert_allclose(lse, want_lse, rtol=0, atol=1e-5)
    want = np.exp(shift - want_lse)[..., None] * np.ones(128)
    if "v_rotation" in options:
      want = np.asarray(hadamard(jnp.asarray(want, jnp.float32)))
    np.testing.assert_allclose(np.asarray(out, np.float64), want, rtol=2.0**-8, atol=1e-4)


class ErrorsTest(TestCase):
  @parameterized.named_parameters(
    ("k_rotation", {"k_rotation": "random"}, "k_rotation must be None or one of .* got 'random'"),
    ("v_rotation", {"v_rotation": True}, "v_rotation must be None or one of .* got True"),
    ("search", {"scale_search": "mse"}, "scale_search must be one of .* got 'mse'"),
    (
      "search_format",
      {"k_format": "fp8", "scale_search": "four_over_six"},
      r"scale_search must be 'amax' without nvfp4, got 'four_over_six' for \('fp8', 'fp8'\)",
    ),
    (
      "mean_shape",
      {"k_mean": jnp.zeros((64,))},
      r"k_mean must be float32 \(2, 64\), got float32 \(64,\)",
    ),
    (
      "mean_dtype",
      {"k_mean": jnp.zeros((2, 64), jnp.bfloat16)},
      r"k_mean must be float32 \(2, 64\), got bfloat16",
    ),
    ("mean_list", {"k_mean": [0.0]}, r"k_mean must be float32 \(2, 64\), got list"),
    (
      "mean_value",
      {"k_mean": jnp.zeros((2, 64)).at[1, 3].set(jnp.nan)},
      r"k_mean must be finite, got nan at \[1, 3\]",
    ),
  )
  def test_create(self, options, message):
    arguments = {"num_pages": 1, "page_size": 16, "num_kv_heads": 2, "head_dim": 64}
    with self.assertRaisesRegex(ValueError, message):
      nv.PagedKVCache.create(**arguments | options)

  @parameterized.named_parameters(
    ("rotation", {"rotation": "x"}, r"cache.k.rotation must be None or one of .* got 'x'"),
    ("search", {"scale_search": "x"}, "cache.k.scale_search must be one of .* got 'x'"),
    ("mean", {"mean": jnp.zeros((1, 64))}, r"cache.k.mean must be float32 \(2, 64\), got .*1, 64"),
  )
  def test_cache(self, changes, message):
    setup = Setup()
    cache = setup.cache("nvfp4")
    broken = dataclasses.replace(cache, k=dataclasses.replace(cache.k, **changes))
    with self.assertRaisesRegex(ValueError, message):
      nv.append(broken, *setup.new_kv, setup.batch)
    with self.assertRaisesRegex(ValueError, message):
      setup.attend("prefill", broken, read_path="nvfp4_dequant")

  def test_values_have_no_mean(self):
    cache = Setup().cache("nvfp4")
    broken = dataclasses.replace(cache, v=dataclasses.replace(cache.v, mean=jnp.zeros((2, 64))))
    with self.assertRaisesRegex(ValueError, r"cache.v.mean must be None, got float32 \(2, 64\)"):
      nv.copy_pages(broken, jnp.zeros((1,), jnp.int32), jnp.zeros((1,), jnp.int32))

  def test_soft_cap_with_a_mean(self):
    setup = Setup()
    cache = setup.cache(k_mean=setup.mean)
    for operation in ("prefill", "decode"):
      with self.assertRaisesRegex(ValueError, "soft_cap must be None .* k_mean: .* got 5.0"):
        setup.attend(operation, cache, soft_cap=5.0)
    setup.attend("prefill", setup.cache(**BOTH), soft_cap=5.0)  # rotations leave scores alone

  def test_engines_that_know_no_levers(self):
    for options in ({"v_rotation": "hadamard"}, {"k_mean": Setup().mean}):
      cache = Setup().cache("nvfp4", **options)
      for export in (interop.to_flashinfer, interop.to_sglang, interop.to_vllm):
        with self.assertRaisesRegex(NotImplementedError, "knows no rotation and no mean, [kv] has"):
          export(cache)

  def test_debug_checks_see_the_mean(self):
    setup = Setup()
    cache = setup.cache(k_mean=setup.mean)
    broken = dataclasses.replace(
      cache, k=dataclasses.replace(cache.k, mean=setup.mean.at[0, 1].set(jnp.inf))
    )
    with (
      nv.debug_checks(),
      self.assertRaisesRegex(jax.errors.JaxRuntimeError, "cache.k.mean must be finite, got inf"),
    ):
      run = jax.jit(lambda c, b: nv.prefill(setup.q, c, b, read_path="bf16"))
      jax.block_until_ready(run(broken, setup.batch))
      jax.effects_barrier()


def raw(array) -> np.ndarray:
  return np.asarray(array).view(np.uint8)


if __name__ == "__main__":
  absltest.main()
