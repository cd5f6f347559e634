"""prefill and decode by the Triton kernel: who is picked for sm_120 and why, and what comes out.

The kernel's source runs on a CPU (triton_emulator.py).
"""

import dataclasses
import importlib.metadata
from unittest import mock

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import nvfp4_pallas as nv
from benchmarks import oracle
from nvfp4_pallas.dispatch import Target, use_target
from nvfp4_pallas.kernels import triton_launch
from nvfp4_pallas.ops.decode import resolve_decode
from nvfp4_pallas.ops.prefill import resolve_prefill
from nvfp4_pallas.ops.request import attention_request
from nvfp4_pallas.read_paths import AttentionSpec
from tests import cases
from tests.base import TestCase
from tests.triton_shapes import LONG
from tests.triton_version import INTERPRETS, has_triton, need_triton

if has_triton(INTERPRETS):
  from tests import triton_emulator

RESOLVE = {"prefill": resolve_prefill, "decode": resolve_decode}


def request_of(read_path="nvfp4_a4q", **changes):
  built = cases.build(cases.MIXED)
  numerics = {"sm_scale": 0.1, "causal": True}
  numerics |= {name: changes.pop(name) for name in ("q_levels", "window") if name in changes}
  spec = AttentionSpec(read_path, **numerics)
  return dataclasses.replace(attention_request(built.q, built.cache, spec), **changes)


class ResolveTest(TestCase):
  def setUp(self):
    super().setUp()
    self.installed = self.enter_context(mock.patch.object(triton_launch, "check_installed"))

  @parameterized.product(operation=("prefill", "decode"), levels=(1, 2))
  def test_picked_on_its_device(self, operation, levels):
    with use_target(Target("sm_120")):
      chosen = RESOLVE[operation](request_of(q_levels=levels))
    self.assertEqual(chosen.implementation, "triton_sm120")
    words = {1: "one level", 2: "two levels"}[levels]
    self.assertIn("not mosaic_sm90: it needs sm_90, the device is sm_120", chosen.reason)
    self.assertIn(f"Q K^T in FP4 with block scales, {words} of Q, P V in BF16", chosen.reason)
    self.assertIn("compiled for this GPU, not yet run on one", chosen.reason)

  @parameterized.product(
    operation=("prefill", "decode"), device=("cpu", "sm_90", "sm_100", "sm_121")
  )
  def test_refused_elsewhere(self, operation, device):
    with use_target(Target(device)):
      with self.assertRaisesRegex(
        NotImplementedError, f"'triton_sm120' cannot run: it needs sm_120, the device is {device}"
      ):
        RESOLVE[operation](request_of(), "triton_sm120")
      self.assertNotEqual(RESOLVE[operation](request_of()).implementation, "triton_sm120")
    self.installed.assert_not_called()

  @parameterized.parameters(
    ({"head_dim": 256}, "head dims 64, 128, got head_dim 256"),
    ({"read_path": "nvfp4_a8q"}, "not nvfp4_a8q"),
    ({"recent_window": 64, "window": 5}, "from a sequence's last page, not from its ring"),
  )
  def test_says_why_the_definition_runs(self, changes, reason):
    for resolve in RESOLVE.values():
      with use_target(Target("sm_120")):
        chosen = resolve(request_of(**changes))
      self.assertEqual(chosen.implementation, "xla")
      self.assertRegex(chosen.reason, f"not triton_sm120: .*{reason}")
    self.installed.assert_not_called()

  def test_a_missing_package_is_no_reason_to_be_slow(self):
    """It raises, named or not, and says what to install."""
    error = importlib.metadata.PackageNotFoundError("jax-triton")
    self.installed.side_effect = lambda: check_installed(mock.Mock(side_effect=error))
    for resolve in RESOLVE.values():
      for name in (None, "triton_sm120"):
        with (
          use_target(Target("sm_120")),
          self.assertRaisesRegex(
            NotImplementedError, "pip install 'jax-triton>=0.4.1', or ask for implementation='xla'"
          ),
        ):
          resolve(request_of(), name)
      with use_target(Target("sm_120")):
        self.assertEqual(resolve(request_of(), "xla").implementation, "xla")

  def test_prefill_says_how_it_is_cut(self):
    shape = {"num_kv_heads": 8, "head_dim": 128, "v_head_dim": 128, "max_keys": 16384}
    with use_target(Target("sm_120")):
      tail = resolve_prefill(request_of(num_seqs=1, num_tokens=16, **shape))
      repack = resolve_prefill(request_of("nvfp4_repack", num_seqs=1, num_tokens=16384, **shape))
    self.assertIn("keys in 28 runs, joined by lse", tail.reason)
    self.assertIn("all keys are widened once, for 512.0 query tiles", repack.reason)

  def test_a_recent_window_is_read_in_parts(self):
    with use_target(Target("sm_120")):
      chosen = resolve_prefill(request_of(recent_window=64))
      self.assertIn("pages and ring apart, merged by lse; pages products Q K^T", chosen.reason)
      with_new = resolve_prefill(request_of(recent_window=64, new_kv=True))
    self.assertIn("not triton_sm120: the kernel reads all keys from the cache", with_new.reason)


check_installed = triton_launch.check_installed


class OperationsTest(TestCase):
  def setUp(self):
    super().setUp()
    need_triton(self, INTERPRETS)

  def run_on_sm_120(self, operation, built, **options):
    with (
      triton_emulator.emulated(),
      mock.patch.object(triton_launch, "check_installed"),
      use_target(Target("sm_120")),
    ):
      options = {"read_path": "nvfp4_a4q", "implementation": "triton_sm120"} | options
      return operation(built.q, built.cache, built.batch, **options)

  def check(self, operation, built, exact_options=None, **options):
    out, lse = self.run_on_sm_120(operation, built, **options)
    self.assertEqual(out.dtype, jnp.bfloat16)
    for name in ("num_splits", "batch_invariant"):
      options.pop(name, None)
    exact = oracle.attention(
      built.q,
      built.cache,
      built.batch.page_table,
      built.batch.kv_lens,
      built.batch.cu_q_lens,
      **{"read_path": "nvfp4_a4q"} | options | (exact_options or {}),
    )
    sees = np.isfinite(exact.lse)
    np.testing.assert_array_equal(np.asarray(lse)[~sees], -np.inf)
    error = np.abs(np.asarray(out, np.float64) - exact.out)
    # Parts that are merged round once more each.
    bound = exact.out_bound(bf16_weights=True, bf16_out=True) + 2.0**-20 * exact.spread
    self.assertTrue((error <= bound).all())
    lse_error = np.abs(np.asarray(lse, np.float64)[sees] - exact.lse[sees])
    self.assertTrue((lse_error <= exact.lse_bound()[sees] + 1e-6).all())

  def test_prefill_with_sinks(self):
    sinks = jnp.asarray([0.5, -1.0], jnp.float32)
    self.check(nv.prefill, cases.build(LONG), sinks=sinks)

  @parameterized.parameters(
    {"num_splits": 3}, {"batch_invariant": True}, {"read_path": "nvfp4_dequant"}
  )
  def test_decode(self, **options):
    self.check(nv.decode, cases.build(cases.decode_case(LONG), padding_rows=0), **options)

  def test_prefill_with_a_recent_window(self):
    case = dataclasses.replace(LONG, q_lens=(1, 0, 20), page_size=16)
    built = cases.with_window(cases.build(case), 32)
    self.check(nv.prefill, built, {"ring_ids": built.batch.ring_ids})

  def test_decode_with_a_recent_window(self):
    case = dataclasses.replace(cases.decode_case(LONG), page_size=16)
    built = cases.with_window(cases.build(case, padding_rows=0), 32)
    self.check(nv.decode, built, {"ring_ids": built.batch.ring_ids})


if __name__ == "__main__":
  absltest.main()
