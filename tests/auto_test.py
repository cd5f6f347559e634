"""read_path="auto": of paths with the same numbers, the one that measured costs name."""

import dataclasses

import jax
import numpy as np
from absl.testing import absltest, parameterized

import nvfp4_pallas as nv
from nvfp4_pallas import policy
from nvfp4_pallas.policy import CostTable
from tests import cases
from tests.base import TestCase
from tests.policy_test import cost

CASE = cases.Case("auto")
PHASES = ("prefill", "decode")


def built(phase, **changes):
  case = dataclasses.replace(CASE, **changes)
  return cases.build(cases.decode_case(case) if phase == "decode" else case, padding_rows=0)


def table(device="a card", **us_of_path):
  rows = [
    cost(path, (1, 1, 1024), us, phase=phase, workspace_bytes=1000 * (path == "nvfp4_repack"))
    for path, us in us_of_path.items()
    for phase in PHASES
  ]
  return CostTable(device, "a revision", {}, tuple(rows))


class AutoTest(TestCase):
  @parameterized.product(
    phase=PHASES,
    formats=(("bf16", "bf16"), ("fp8", "fp8"), ("bf16", "fp8"), ("nvfp4", "nvfp4")),
  )
  def test_numbers_of_the_path_it_takes(self, phase, formats):
    """Without costs: here nothing was measured, so it is the path with no workspace."""
    b = built(phase, k_format=formats[0], v_format=formats[1])
    expected = {"nvfp4": "nvfp4_dequant", "fp8": "fp8", "bf16": "bf16"}
    path = expected[formats[0] if formats[0] == formats[1] else "fp8"]
    chosen = nv.resolve_read_path(phase, b.q, b.cache, b.batch)
    self.assertEqual(chosen.read_path, path)
    self.assertIsNone(chosen.predicted_us)
    run = getattr(nv, phase)
    got = run(b.q, b.cache, b.batch, read_path="auto")
    want = run(b.q, b.cache, b.batch, read_path=path)
    for one, other in zip(got, want, strict=True):
      np.testing.assert_array_equal(np.asarray(one), np.asarray(other))

  @parameterized.parameters(*PHASES)
  def test_costs_decide(self, phase):
    b = built(phase)
    for times, path in (((10.0, 20.0), "nvfp4_dequant"), ((20.0, 10.0), "nvfp4_repack")):
      costs = table(**dict(zip(("nvfp4_dequant", "nvfp4_repack"), times, strict=True)))
      with policy.use_costs(costs):
        chosen = nv.resolve_read_path(phase, b.q, b.cache, b.batch)
      self.assertEqual(chosen.read_path, path)
      self.assertIn("measured on a card, which stands for", chosen.reason)
    self.assertEqual(policy.costs_for("a card"), None)  # no longer given

  def test_the_call_takes_what_is_resolved(self):
    b = built("prefill")
    seen = []
    original = nv.ops.prefill.resolve_prefill

    def spy(request, implementation):
      seen.append(request.spec.read_path)
      return original(request, implementation)

    nv.ops.prefill.resolve_prefill = spy
    self.addCleanup(setattr, nv.ops.prefill, "resolve_prefill", original)
    with policy.use_costs(table(nvfp4_dequant=20.0, nvfp4_repack=10.0)):
      nv.prefill(b.q, b.cache, b.batch, read_path="auto")
      nv.prefill(b.q, b.cache, b.batch, read_path="auto", max_workspace_bytes=0)
    self.assertEqual(seen, ["nvfp4_repack", "nvfp4_dequant"])  # without room: no workspace

  def test_same_inside_jit(self):
    b = built("prefill")
    chosen = []

    @jax.jit
    def run(q, cache, batch):
      chosen.append(nv.resolve_read_path("prefill", q, cache, batch))
      return nv.prefill(q, cache, batch, read_path="auto")

    with policy.use_costs(table(nvfp4_dequant=20.0, nvfp4_repack=10.0)):
      run(b.q, b.cache, b.batch)
      self.assertEqual(chosen, [nv.resolve_read_path("prefill", b.q, b.cache, b.batch)])

  def test_never_a_path_with_other_numbers(self):
    b = built("prefill")
    with policy.use_costs(table(nvfp4_dequant=20.0, nvfp4_a8q=1.0, nvfp4_a4q=1.0)):
      chosen = nv.resolve_read_path("prefill", b.q, b.cache, b.batch)
    self.assertEqual(chosen.read_path, "nvfp4_dequant")

  def test_formats_without_costs(self):
    b = built("prefill", k_format="fp8")
    with policy.use_costs(table(nvfp4_dequant=20.0, nvfp4_repack=10.0)):
      chosen = nv.resolve_read_path("prefill", b.q, b.cache, b.batch)
    self.assertEqual(chosen.read_path, "nvfp4_dequant")
    self.assertIn("no costs of prefill over K fp8 and V nvfp4 on a card", chosen.reason)

  def test_no_rows(self):
    b = built("prefill", q_lens=(), kv_lens=())
    out, lse = nv.prefill(b.q, b.cache, b.batch, read_path="auto")
    self.assertEqual((out.shape[0], lse.shape[0]), (0, 0))
    with policy.use_costs(table(nvfp4_dequant=20.0)):
      chosen = nv.resolve_read_path("prefill", b.q, b.cache, b.batch)
    self.assertEqual(chosen.reason, "no row sees a key")

  def test_mistakes(self):
    b = built("decode")
    with self.assertRaisesRegex(ValueError, "read_path must be one of .*'auto'.*, got 'automatic'"):
      nv.decode(b.q, b.cache, b.batch, read_path="automatic")
    with self.assertRaisesRegex(ValueError, r"phase must be one of .*, got 'tail'"):
      nv.resolve_read_path("tail", b.q, b.cache, b.batch)


if __name__ == "__main__":
  absltest.main()
