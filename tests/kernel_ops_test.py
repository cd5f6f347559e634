"""The operations with their Mosaic kernels, interpreted on a CPU: the glue in ops/.

The kernels themselves are judged in kernel_*_test.py; here the same calls that users make resolve
to them, and must give what the definition gives: the same bytes, or the same numbers to bfloat16.
"""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import nvfp4_pallas as nv
from benchmarks import oracle
from nvfp4_pallas import dispatch
from nvfp4_pallas.ops import decode as decode_op
from nvfp4_pallas.ops import decode_sm90
from nvfp4_pallas.ops.request import attention_request
from nvfp4_pallas.read_paths import AttentionSpec
from tests import cases, kernel_cases
from tests.base import TestCase


def on_sm90(function, *arguments):
  """jit(function)(*arguments) as on Hopper, kernels interpreted; a data race is an error."""

  def run(*arguments, interpret):
    with dispatch.use_target(dispatch.Target("sm_90", interpret)):
      return jax.jit(function)(*arguments)

  return kernel_cases.interpret(run, *arguments)


class OperationsTest(TestCase):
  def test_pack_and_unpack(self):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 3, 32)), jnp.bfloat16)
    scale = jnp.asarray([0.3, 1.0, 4.0], jnp.float32)
    packed = on_sm90(nv.pack, x, scale)
    jax.tree.map(np.testing.assert_array_equal, packed, nv.pack(x, scale))
    np.testing.assert_array_equal(on_sm90(nv.unpack, packed), nv.unpack(packed))

  def test_append(self):
    case = cases.Case("append", q_lens=(3, 0), kv_lens=(20, 5))
    built = cases.build(case, padding_rows=1)
    r = np.random.default_rng(1)
    k, v = (jnp.asarray(r.standard_normal((4, 2, 64)), jnp.bfloat16) for _ in range(2))
    got = on_sm90(nv.append, built.cache, k, v, built.batch)
    want = nv.append(built.cache, k, v, built.batch, implementation="xla")
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))

  @parameterized.parameters("nvfp4_dequant", "nvfp4_a4q")
  def test_prefill_with_sinks(self, read_path):
    built = cases.build(cases.Case("prefill", q_lens=(1, 6), kv_lens=(40, 6)))
    sinks = jnp.linspace(-1, 2, 8, dtype=jnp.float32)
    prefill = functools.partial(nv.prefill, read_path=read_path, sinks=sinks)
    self.check(
      on_sm90(prefill, built.q, built.cache, built.batch), built, built.q, read_path, sinks
    )

  @parameterized.parameters(None, 3)
  def test_decode(self, num_splits):
    """Interpreted, so by prefill's kernel."""
    built = cases.build(cases.decode_case(cases.Case("decode", kv_lens=(300, 0, 17))))
    q = built.q[:3]
    decode = functools.partial(nv.decode, read_path="nvfp4_dequant", num_splits=num_splits)
    self.check(on_sm90(decode, q, built.cache, built.batch), built, q, "nvfp4_dequant", None)

  def check(self, got, built, q, read_path, sinks):
    want = oracle.attention(
      q,
      built.cache,
      built.batch.page_table,
      built.batch.kv_lens,
      built.batch.cu_q_lens,
      read_path=read_path,
      sinks=sinks,
    )
    out, lse = (np.asarray(a).astype(np.float64) for a in got)
    bound = want.out_bound(bf16_weights=True, bf16_out=True)
    self.assertTrue((np.abs(out - want.out) <= bound).all())
    empty = np.isneginf(want.lse)
    np.testing.assert_array_equal(np.isneginf(lse), empty)
    error = np.abs(lse[~empty] - want.lse[~empty])
    self.assertTrue((error <= want.lse_bound()[~empty]).all())

  def test_what_a_kernel_lacks_goes_to_the_definition_with_the_reason(self):
    built = cases.build(cases.decode_case(cases.MIXED))
    spec = AttentionSpec("nvfp4_a8q", True, 1.0)
    request = attention_request(built.q, built.cache, spec)
    with dispatch.use_target(dispatch.Target("sm_90")):
      resolved = decode_op.resolve_decode(request)
      self.assertEqual(resolved.implementation, "xla")
      self.assertRegex(resolved.reason, "not mosaic_sm90: .* read paths .* not nvfp4_a8q")
      with self.assertRaisesRegex(NotImplementedError, "read paths .* not nvfp4_a8q"):
        decode_op.resolve_decode(request, "mosaic_sm90")
      packing = jnp.zeros((2, 16), jnp.bfloat16)
      with self.assertRaisesRegex(
        NotImplementedError, "'mosaic_sm90' cannot run: the kernel packs"
      ):
        nv.pack(packing, levels=2, implementation="mosaic_sm90")

  @parameterized.parameters(
    ({}, "split_kv", "by the split-KV kernel"),
    ({"group": 16, "head_dim": 256, "formats": ("bf16", "fp8")}, "split_kv", "split-KV"),
    ({"group": 17}, "plain", "not the split-KV kernel: .* up to 16 query heads .* got 17"),
    ({"head_dim": 96}, "plain", "head dims 64, 128, 256, got head_dim 96"),
    ({"v_head_dim": 96}, "plain", "head dims 64, 128, 256, got v_head_dim 96"),
    ({"num_splits": 1}, "plain", "it cuts the batch itself, and num_splits is given"),
  )
  def test_which_kernel_decodes(self, changes, kernel, reason):
    built = cases.build(cases.decode_case(cases.MIXED))
    spec = AttentionSpec("nvfp4_dequant", True, 1.0)
    request = dataclasses.replace(attention_request(built.q, built.cache, spec), **changes)
    with dispatch.use_target(dispatch.Target("sm_90")):
      chosen, why = decode_sm90.choose_kernel(request)
      self.assertEqual(chosen.__name__, kernel)
      self.assertRegex(why, reason)
      for implementation in (None, "mosaic_sm90"):
        resolved = decode_op.resolve_decode(request, implementation)
        self.assertEqual(resolved.implementation, "mosaic_sm90")
        self.assertEndsWith(resolved.reason, why)
        self.assertIs(resolved.function, chosen)
    with dispatch.use_target(dispatch.Target("sm_90", interpret=object())):
      self.assertIs(decode_sm90.choose_kernel(request)[0], decode_sm90.plain)

  def test_only_the_split_kv_kernel_has_room_for_bf16_of_head_dim_256(self):
    built = cases.build(cases.decode_case(cases.MIXED))
    spec = AttentionSpec("bf16", True, 1.0)
    request = dataclasses.replace(
      attention_request(built.q, built.cache, spec),
      head_dim=256,
      v_head_dim=256,
      formats=("bf16", "bf16"),
    )
    with dispatch.use_target(dispatch.Target("sm_90")):
      self.assertEqual(decode_op.resolve_decode(request).implementation, "mosaic_sm90")
      split = dataclasses.replace(request, num_splits=2)
      resolved = decode_op.resolve_decode(split)
      self.assertEqual(resolved.implementation, "xla")
      self.assertRegex(resolved.reason, "not mosaic_sm90: .* bytes of shared memory")

  @parameterized.product(
    dtype=(jnp.bfloat16, jnp.float16, jnp.float32), sinks=(False, True), invariant=(False, True)
  )
  def test_split_kv_is_rounded_once(self, dtype, sinks, invariant):
    """The kernel, replaced by one that notes its options, gives q's dtype or what sinks change."""
    built = cases.build(cases.decode_case(cases.MIXED), padding_rows=0)
    q, noted = built.q.astype(dtype), []

    def fake(q, cache, batch, spec, **options):
      noted.append(options)
      value = jnp.full(q.shape, 1 + 3 * 2.0**-12, options["out_dtype"])
      return value, jnp.zeros(q.shape[:2], jnp.float32)

    with (
      mock.patch("nvfp4_pallas.kernels.decode_mosaic_sm90.decode", fake),
      dispatch.use_target(dispatch.Target("sm_90")),
    ):
      out, _ = nv.decode(
        q,
        built.cache,
        built.batch,
        read_path="nvfp4_dequant",
        batch_invariant=invariant,
        sinks=jnp.full((q.shape[1],), np.log(3), jnp.float32) if sinks else None,
      )
    inner = jnp.float32 if sinks else dtype
    self.assertEqual(noted, [{"batch_invariant": invariant, "out_dtype": inner}])
    self.assertEqual(out.dtype, dtype)
    exact = (1 + 3 * 2.0**-12) / (4 if sinks else 1)
    self.assertAlmostEqual(
      float(out[0, 0, 0]), float(jnp.asarray(exact, dtype)), delta=2.0**-22 if sinks else 0
    )

  def test_batch_invariant_splits_do_not_depend_on_the_batch(self):
    used = {}
    for invariant in (False, True):
      for num_seqs, max_pages in ((1, 256), (40, 256), (1, 64)):
        # The split-KV kernel has no such head_dim, and sees to it itself: kernel_decode_test.py.
        cache = nv.PagedKVCache.create(num_pages=1, page_size=64, num_kv_heads=1, head_dim=96)
        batch = nv.RaggedBatch.for_decode(
          jnp.zeros((num_seqs, max_pages), jnp.int32), jnp.ones((num_seqs,), jnp.int32)
        )
        q = jnp.zeros((num_seqs, 1, 96), jnp.bfloat16)

        def fake(q, *_, num_splits, **__):
          used.setdefault(invariant, set()).add(num_splits)  # noqa: B023 - called in the loop
          out, lse = jnp.zeros(q.shape, jnp.float32), jnp.zeros(q.shape[:2], jnp.float32)
          return (out, lse) if num_splits == 1 else (out[None], lse[None])

        with (
          mock.patch("nvfp4_pallas.kernels.attention_mosaic_sm90.attention", fake),
          dispatch.use_target(dispatch.Target("sm_90")),
        ):
          nv.decode(q, cache, batch, read_path="nvfp4_dequant", batch_invariant=invariant)
    self.assertLen(used[True], 1)
    self.assertGreater(len(used[False]), 1)

  def test_splits_fill_a_gpu(self):
    make = lambda seqs, pages: (
      jax.eval_shape(
        lambda: nv.PagedKVCache.create(num_pages=8, page_size=64, num_kv_heads=8, head_dim=128)
      ),
      nv.RaggedBatch.for_decode(jnp.zeros((seqs, pages), jnp.int32), jnp.zeros((seqs,), jnp.int32)),
    )
    splits = decode_sm90._splits_to_fill_a_gpu
    self.assertEqual(splits(*make(64, 128)), 1)  # 512 programs are enough
    self.assertEqual(splits(*make(1, 512)), 32)
    self.assertEqual(splits(*make(1, 32)), 4)  # 2048 keys: no split under 512
    self.assertEqual(splits(*make(1, 1)), 1)


if __name__ == "__main__":
  absltest.main()
