"""The kernels for whole query tiles, PTX run by an emulator, on what kernel_tail_test.py has."""

import dataclasses
import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized

import nvfp4_pallas as nv
from benchmarks import oracle
from nvfp4_pallas import dispatch
from nvfp4_pallas.kernels import prefill_mosaic_sm90, softmax, whole_attend
from tests import cases, kernel_tail_test, whole_emulation
from tests.base import TestCase
from tests.cases import Built, Case
from tests.judged import exact_of
from tests.kernel_tail_test import SHORT, variant
from tests.tail_emulation import bounds, spec_of


class FusedTest(kernel_tail_test.TailTest):
  """Without a workspace."""

  cuts = False
  read_path = "nvfp4_dequant"
  ahead = False
  most_rows = whole_attend.QUERY_ROWS

  def emulate(self, built, spec, *, config=None, **options):
    del config
    if spec.read_path == "nvfp4_dequant":
      spec = dataclasses.replace(spec, read_path=self.read_path)
    ahead = self.ahead and spec.read_path != "nvfp4_a4q"
    return whole_emulation.emulate(built, spec, ahead=ahead, **options)

  def width_of(self, built, config):
    del config
    return whole_attend.QUERY_ROWS // (built.q.shape[1] // built.cache.num_kv_heads)

  @parameterized.parameters(False, True)
  def test_many_items_in_one_block(self, reverse):
    """So many that everybody goes around the item feed several times."""
    case = variant(SHORT, q_lens=(1,) * 24, kv_lens=(3,) * 24, group=1)
    built = cases.build(case)
    out, lse = self.emulate(built, spec_of(built), blocks=1, reverse=reverse)
    self.check_close(out, lse, built, spec_of(built), self.width_of(built, None))

  def test_query_tiles_far_before_the_first_key(self):
    self.check(variant(SHORT, q_lens=(200,), kv_lens=(3,)))

  @parameterized.product(window=(64, 100, 128), hidden=(0, 1, 63, 64, 65, 127, 128, 129))
  def test_what_a_window_hides_of_tiles(self, window, hidden):
    self.check(variant(SHORT, q_lens=(1,), kv_lens=(window + hidden,)), window=window)

  def test_more_padding_rows_than_blocks(self):
    built = cases.build(SHORT, padding_rows=40)
    out, lse = self.emulate(built, spec_of(built))
    self.check_close(out, lse, built, spec_of(built), self.width_of(built, None))
    self.assertTrue(np.isneginf(lse[-40:]).all())

  def spread_faults(self, expected):
    """Beside the tokens 2 and 3 of the second sequence, which is one query tile."""
    expected[9:15, 2:, 32:48] = True
    expected[9:15, :2, 80:96] = True


class DenseTest(FusedTest):
  """With one."""

  read_path = "nvfp4_repack"
  ahead = True

  def spread_faults(self, expected):
    """Also where no row sees the key, but its tile."""
    super().spread_faults(expected)
    expected[15:17, :2, :16] = True


WHOLE = Case("whole", q_lens=(40, 0, 1, 5), kv_lens=(190, 40, 65, 3), head_dim=128, page_size=32)
DIMS = ((64, 64), (64, 256), (128, 64), (256, 128), (256, 256))
FORMATS = (
  ("fp8", "fp8"),
  ("bf16", "bf16"),
  ("fp8", "bf16"),
  ("nvfp4", "bf16"),
  ("bf16", "nvfp4"),
  ("nvfp4", "fp8"),
)


def judge(test, results, exact, built, spec, **options):
  out, lse = results
  width = whole_attend.QUERY_ROWS // (built.q.shape[1] // built.cache.num_kv_heads)
  out_bound, lse_bound = bounds(exact, built, spec, out.dtype, width, softmax.LATER_P, **options)
  sees = np.isfinite(exact.lse)
  np.testing.assert_array_equal(out[~sees], 0)
  np.testing.assert_array_equal(lse[~sees], -np.inf)
  out_error = np.abs(out[sees].astype(np.float64) - exact.out[sees])
  test.assertLessEqual((out_error / out_bound[sees]).max(), 1)
  lse_error = np.abs(lse[sees].astype(np.float64) - exact.lse[sees])
  test.assertLessEqual((lse_error / lse_bound[sees]).max(), 1)


class FormatsTest(TestCase):
  """What tiles may be made of, and how wide they may be."""

  def check(self, case, ahead=True, blocks=3, **options):
    built = cases.build(case)
    spec = spec_of(built, **{"sm_scale": case.head_dim**-0.5} | options)
    results = whole_emulation.emulate(built, spec, ahead=ahead, blocks=blocks)
    judge(self, results, exact_of(built, spec), built, spec)

  @parameterized.parameters(*FORMATS)
  def test_formats(self, k_format, v_format):
    for group, options in ((4, {}), (3, {"window": 50, "soft_cap": 9.0, "sm_scale": -0.1})):
      case = variant(WHOLE, k_format=k_format, v_format=v_format, group=group)
      self.check(case, read_path=path_of(case), **options)

  @parameterized.product(dims=DIMS, path=("nvfp4_repack", "nvfp4_a8q", "nvfp4_dequant"))
  def test_head_dims(self, dims, path):
    case = variant(WHOLE, head_dim=dims[0], v_head_dim=dims[1])
    self.check(case, ahead=path != "nvfp4_dequant", read_path=path)

  @parameterized.product(dims=((64, 64), (64, 256), (256, 256)), page_size=(16, 64), ahead=(0, 1))
  def test_head_dims_under_masks(self, dims, page_size, ahead):
    """Fused, tiles of 256 columns then have 32 keys."""
    case = variant(WHOLE, head_dim=dims[0], v_head_dim=dims[1], page_size=page_size)
    path = "nvfp4_repack" if ahead else "nvfp4_dequant"
    self.check(case, ahead=bool(ahead), read_path=path, window=45, soft_cap=9.0)

  @parameterized.product(dims=((64, 64), (256, 256)), q_levels=(1, 2))
  def test_head_dims_of_a4q(self, dims, q_levels):
    case = variant(WHOLE, head_dim=dims[0], v_head_dim=dims[1])
    self.check(case, ahead=False, read_path="nvfp4_a4q", q_levels=q_levels)

  @parameterized.product(dims=((64, 64), (256, 256)), format=("fp8", "bf16"))
  def test_head_dims_of_wide_formats(self, dims, format):
    case = variant(
      WHOLE, head_dim=dims[0], v_head_dim=dims[1], k_format=format, v_format=format, group=7
    )
    self.check(case, read_path=format)

  @parameterized.parameters(
    {},
    {"window": 33},
    {"soft_cap": 5.0},
    {"sm_scale": -0.3},
    {"causal": False},
    {"causal": False, "window": 20, "soft_cap": 30.0},
  )
  def test_a8q(self, **options):
    self.check(WHOLE, read_path="nvfp4_a8q", **options)

  @parameterized.parameters((1, 16), (2, 64), (5, 256), (16, 128), (128, 64))
  def test_a8q_of_groups_and_pages(self, group, page_size):
    case = variant(WHOLE, group=group, num_kv_heads=1, page_size=page_size, q_lens=(9, 0, 1, 5))
    self.check(case, read_path="nvfp4_a8q")


class WholeTest(TestCase):
  """What does not depend on formats, or is not like others in one."""

  def test_a8q_of_rows_of_any_size(self):
    """Each row has a scale of its own: zeros, and rows far from each other."""
    built = cases.build(WHOLE)
    q = np.array(built.q).astype(np.float64)
    q[::2] *= 2.0 ** -np.arange(0, 140, 140 / len(q[::2])).reshape(-1, 1, 1)
    q[1], q[2] = 0, q[2] * 2.0**10
    built = dataclasses.replace(built, q=jnp.asarray(q, jnp.bfloat16))
    spec = spec_of(built, read_path="nvfp4_a8q")
    results = whole_emulation.emulate(built, spec, ahead=True)
    judge(self, results, exact_of(built, spec), built, spec)

  @parameterized.parameters(np.nan, np.inf)
  def test_a8q_of_rows_that_are_not_finite(self, value):
    built = cases.build(WHOLE)
    spec = spec_of(built, read_path="nvfp4_a8q")
    want, _ = whole_emulation.emulate(built, spec, ahead=True)
    faulty = dataclasses.replace(built, q=built.q.at[1, 2, 77].set(value))
    out, lse = whole_emulation.emulate(faulty, spec, ahead=True)
    self.assertTrue(np.isnan(out[1, 2]).all() and np.isnan(lse[1, 2]))
    others = np.ones(lse.shape, bool)
    others[1, 2] = False
    np.testing.assert_array_equal(out[others].view("u2"), want[others].view("u2"))

  def test_faulty_scales_of_wide_formats(self):
    """A NaN among the keys of fp8 or bf16 comes out in the rows that see it."""
    for format in ("fp8", "bf16"):
      case = variant(WHOLE, k_format=format, v_format=format)
      built = cases.build(case)
      page = int(built.batch.page_table[0, 5])  # key 165, which the rows from token 15 on see
      data = built.cache.k.data.at[page, 1, 5, 9].set(np.nan)
      k = dataclasses.replace(built.cache.k, data=data)
      built = dataclasses.replace(built, cache=dataclasses.replace(built.cache, k=k))
      spec = spec_of(built, read_path=format)
      out, _ = whole_emulation.emulate(built, spec, ahead=True)
      faulty = np.isnan(out.astype(np.float32)).any(axis=-1)
      want = np.zeros_like(faulty)
      want[15:40, 4:] = True
      np.testing.assert_array_equal(faulty, want)

  @parameterized.parameters("nvfp4_dequant", "nvfp4_repack", "nvfp4_a8q")
  def test_turns_of_warps_do_not_matter(self, path):
    built = cases.build(WHOLE)
    spec = spec_of(built, read_path=path)
    run = lambda **options: whole_emulation.emulate(
      built, spec, ahead=path != "nvfp4_dequant", **options
    )
    want = run()
    for options in ({"reverse": True}, {"blocks": 1}, {"blocks": 7}):
      for a, b in zip(run(**options), want, strict=True):
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))

  @parameterized.parameters("nvfp4_dequant", "nvfp4_repack", "nvfp4_a8q", "nvfp4_a4q")
  def test_a_sequence_alone(self, path):
    """Has the bits that it has in the batch."""
    built = cases.build(variant(WHOLE, q_lens=(40, 0, 33, 5), kv_lens=(190, 40, 165, 3)))
    spec = spec_of(built, read_path=path)
    ahead = path in ("nvfp4_repack", "nvfp4_a8q")
    together = whole_emulation.emulate(built, spec, ahead=ahead)
    batch = built.batch
    table, lens, starts = map(np.asarray, (batch.page_table, batch.kv_lens, batch.cu_q_lens))
    for s in range(4):
      rows = slice(starts[s], starts[s + 1])
      batch = type(built.batch)(
        *(
          jnp.asarray(a) for a in (table[s : s + 1], lens[s : s + 1], starts[s : s + 2] - starts[s])
        )
      )
      if rows.start < rows.stop:
        alone = dataclasses.replace(built, q=built.q[rows], batch=batch)
        for a, b in zip(whole_emulation.emulate(alone, spec, ahead=ahead), together, strict=True):
          np.testing.assert_array_equal(a.view(np.uint8), b[rows].view(np.uint8))

  @parameterized.parameters((1, False), (5, True))
  def test_more_sequences_than_lanes(self, blocks, reverse):
    """The walk looks at 32 of them at a time; some have no queries."""
    r = np.random.default_rng(0)
    q_lens = tuple(int(n) for n in r.choice((0, 0, 1, 2), 75))
    case = variant(SHORT, q_lens=q_lens, kv_lens=(9,) * 75, num_kv_heads=2, head_dim=64, group=64)
    built = cases.build(case)
    spec = spec_of(built)
    results = whole_emulation.emulate(built, spec, ahead=True, blocks=blocks, reverse=reverse)
    judge(self, results, exact_of(built, spec), built, spec)


class NewKeysTest(FormatsTest):
  """This step's keys in wide form, the past from the cache, merged by lse."""

  def check(self, case, ahead=True, blocks=3, **options):
    lens = zip(case.kv_lens, case.q_lens, strict=True)
    case = variant(case, kv_lens=tuple(max(pair) for pair in lens))
    built = cases.build(case)
    spec = spec_of(built, **{"sm_scale": case.head_dim**-0.5} | options)
    r = np.random.default_rng(1)
    dims = case.head_dim, case.v_head_dim or case.head_dim
    shape = built.q.shape[0], case.num_kv_heads
    new_kv = [r.standard_normal((*shape, dim)) for dim in dims]
    new_kv = tuple(jnp.asarray(x.astype(ml_dtypes.bfloat16)) for x in new_kv)
    lens = jnp.maximum(built.batch.kv_lens - built.batch.q_lens, 0)
    past = dataclasses.replace(built, batch=dataclasses.replace(built.batch, kv_lens=lens))
    run = {"blocks": blocks, "out_dtype": jnp.float32}
    of_past = whole_emulation.emulate(past, spec, ahead=ahead, queries_after=True, **run)
    of_rows = whole_emulation.emulate_rows(built, new_kv, spec, **run)
    batch = built.batch.page_table, built.batch.kv_lens, built.batch.cu_q_lens
    exact = oracle.attention(
      built.q, built.cache, *batch, new_kv=new_kv, **dataclasses.asdict(spec)
    )
    results = merged(of_past, of_rows)
    judge(self, results, exact, built, spec, wide_keys=True)

  def test_rows_that_begin_within_tiles(self):
    case = variant(WHOLE, q_lens=(130, 1, 200, 64, 0), kv_lens=(140, 9, 200, 64, 3), group=1)
    self.check(case, read_path="nvfp4_repack")


class OperationTest(TestCase):
  """What prefill makes of a call on Hopper, traced: there is no such GPU here."""

  def traced(self, built, **options):
    numerics = {"implementation": "mosaic_sm90"} | options
    with dispatch.use_target(dispatch.Target("sm_90")):
      prefill = functools.partial(nv.prefill, **numerics)
      return jax.make_jaxpr(prefill)(built.q, built.cache, built.batch)

  def launches(self, built, **options):
    """Names of the kernels launched."""
    return re.findall(r"name=((?:dense|fused|k)_\w+)", str(self.traced(built, **options)))

  @parameterized.parameters(
    ("nvfp4_dequant", ["fused_attend"]),
    ("nvfp4_a4q", ["fused_attend"]),
    ("nvfp4_repack", ["fused_attend"]),
    ("nvfp4_a8q", ["k_scan", "dense_widen", "dense_attend"]),
  )
  def test_launches(self, path, names):
    built = cases.build(variant(WHOLE, q_lens=(600,), kv_lens=(700,), group=1, head_dim=64))
    sinks = jnp.zeros((2,), jnp.float32)
    for options in ({}, {"sinks": sinks}):
      self.assertEqual(self.launches(built, read_path=path, **options), names)
      jaxpr = self.traced(built, read_path=path, **options)
      out, lse = jaxpr.out_avals
      self.assertEqual((out.shape, out.dtype), (built.q.shape, jnp.bfloat16))
      self.assertEqual((lse.shape, lse.dtype), (built.q.shape[:2], jnp.float32))

  def test_new_kv(self):
    """A pass over the past and one over the rows of this step."""
    built = cases.build(variant(WHOLE, q_lens=(40, 0), kv_lens=(140, 9)))
    new_kv = (jnp.zeros((len(built.q), 2, 128), jnp.bfloat16),) * 2
    rows = ["dense_widen", "dense_attend"]
    for path, past in (("nvfp4_dequant", ["fused_attend"]), ("nvfp4_a8q", ["k_scan", *rows])):
      self.assertEqual(self.launches(built, read_path=path, new_kv=new_kv), [*past, *rows])

  @parameterized.parameters(None, 9)
  def test_numbers_of_new_kv(self, window):
    """With sinks, by kernels that are emulated."""
    built = cases.build(variant(WHOLE, q_lens=(40, 0, 2), kv_lens=(140, 9, 2)))
    emulated = {
      "attention": lambda q, cache, batch, spec, **options: whole_emulation.emulate(
        Built(q, cache, batch, {}), spec, **options
      ),
      "attention_to_rows": lambda q, new_kv, batch, spec, **options: whole_emulation.emulate_rows(
        Built(q, built.cache, batch, {}), new_kv, spec, **options
      ),
    }
    r = np.random.default_rng(0)
    k, v = (r.standard_normal((len(built.q), 2, 128)).astype(ml_dtypes.bfloat16) for _ in range(2))
    options = {"read_path": "nvfp4_repack", "window": window, "sinks": jnp.linspace(-1, 1, 8)}
    options["new_kv"] = jnp.asarray(k), jnp.asarray(v)
    with mock.patch.multiple(prefill_mosaic_sm90, **emulated):
      with dispatch.use_target(dispatch.Target("sm_90")):
        out, lse = nv.prefill(
          built.q, built.cache, built.batch, implementation="mosaic_sm90", **options
        )
    batch = built.batch.page_table, built.batch.kv_lens, built.batch.cu_q_lens
    exact = oracle.attention(built.q, built.cache, *batch, **options)
    spec = spec_of(built, read_path="nvfp4_repack")
    judge(self, (np.asarray(out), np.asarray(lse)), exact, built, spec, wide_keys=True)

  def test_workspace(self):
    """As large as the option allows, and what it holds."""
    case = variant(WHOLE, q_lens=(2600,), kv_lens=(2600,), head_dim=64, v_head_dim=128)
    built = cases.build(case)
    tiles = -(-built.batch.max_pages * 32 // 128)
    nbytes = 2 * tiles * 128 * (128 + 256)
    for limit, names in (
      (nbytes, ["dense_widen", "dense_attend"]),
      (nbytes - 1, ["fused_attend"]),
    ):
      options = {"read_path": "nvfp4_repack", "max_workspace_bytes": limit}
      self.assertEqual(self.launches(built, **options), names)
    jaxpr = str(self.traced(built, read_path="nvfp4_repack"))
    self.assertIn(f"u8[{2 * tiles},{128 * 128}]", jaxpr)
    self.assertIn(f"u8[{2 * tiles},{128 * 256}]", jaxpr)
    nbytes = 2 * tiles * 128 * (128 + 256)  # K as E4M3 fills half of rows of 128 bytes
    # With new_kv's rows beside, of bfloat16.
    rows = 2 * (len(built.q) // 128 + 1) * 128 * (128 + 256)
    new_kv = tuple(jnp.zeros((len(built.q), 2, dim), jnp.bfloat16) for dim in (64, 128))
    of_rows = ["dense_widen", "dense_attend"]
    for limit, names in ((nbytes + rows, of_rows), (nbytes + rows - 1, ["fused_attend"])):
      options = {"read_path": "nvfp4_repack", "max_workspace_bytes": limit, "new_kv": new_kv}
      self.assertEqual(self.launches(built, **options), [*names, *of_rows])
    with self.assertRaisesRegex(NotImplementedError, f"a workspace of {nbytes} bytes, the limit"):
      self.traced(built, read_path="nvfp4_a8q", max_workspace_bytes=nbytes - 1)

  @parameterized.parameters(
    (-1, "not be negative, got -1"),
    (2.5, "be a whole number, got 2.5"),
    (True, "be a whole number, got True"),
    (None, "be a whole number, got None"),
  )
  def test_limits_that_are_none(self, limit, message):
    built = cases.build(SHORT)
    with self.assertRaisesRegex(ValueError, f"max_workspace_bytes must {message}"):
      self.traced(built, read_path="nvfp4_repack", max_workspace_bytes=limit)


def merged(first, second):
  """Of two states over disjoint keys."""
  (a, lse_a), (b, lse_b) = ((x.astype(np.float64) for x in state) for state in (first, second))
  lse = np.logaddexp(lse_a, lse_b)
  finite = np.where(np.isfinite(lse), lse, 0)
  weights = (np.exp(x - finite)[..., None] for x in (lse_a, lse_b))
  out = sum(weight * x for weight, x in zip(weights, (a, b), strict=True))
  return out.astype(np.float32), lse.astype(np.float32)


def path_of(case: Case) -> str:
  formats = case.k_format, case.v_format
  return "nvfp4_repack" if "nvfp4" in formats else "fp8" if "fp8" in formats else "bf16"


if __name__ == "__main__":
  absltest.main()
