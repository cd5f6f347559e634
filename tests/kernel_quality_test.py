"""A gate of the quality benchmark without a GPU: kernels add at most 2 % to the definition's error.

Both errors are against wide float64 attention over real activations; the kernels' PTX is emulated.
On a GPU `python3 -m benchmarks quality` judges the same (rel_l2_over_xla).
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import nvfp4_pallas as nv
from benchmarks import activations, oracle
from nvfp4_pallas.read_paths import AttentionSpec
from tests import decode_emulation, whole_emulation
from tests.base import TestCase
from tests.cases import Built

MOST = 1.02
LENS = (64, 130, 256)
PAGE = 16


def built_of(layer, q_len: int, **options) -> tuple[Built, Built]:
  """The newest q_len tokens of three lengths of a layer, over a cache and over a wide one."""
  pages = -(-max(LENS) // PAGE)
  order = np.random.default_rng(0).permutation(len(LENS) * pages).reshape(len(LENS), pages)
  tokens = np.concatenate([np.arange(n) for n in LENS])
  q = jnp.concatenate([layer.q[n - q_len : n] for n in LENS])
  lens = jnp.asarray(LENS, jnp.int32)
  whole = nv.RaggedBatch(
    jnp.asarray(order, jnp.int32), lens, jnp.asarray(np.cumsum([0, *LENS]), jnp.int32)
  )
  batch = dataclasses.replace(whole, cu_q_lens=jnp.arange(len(LENS) + 1, dtype=jnp.int32) * q_len)

  def built(**options):
    cache = nv.PagedKVCache.create(
      num_pages=order.size,
      page_size=PAGE,
      num_kv_heads=layer.k.shape[1],
      head_dim=layer.k.shape[2],
      **options,
    )
    return Built(q, nv.append(cache, layer.k[tokens], layer.v[tokens], whole), batch, {})

  return built(**options), built(k_format="bf16")


def rel_l2(out, wide) -> float:
  error = np.linalg.norm(np.asarray(out, np.float64) - wide, axis=-1)
  return float((error / np.linalg.norm(wide, axis=-1)).mean())


class KernelQualityTest(TestCase):
  def check(self, kernel_out, built: Built, wide: Built, spec: AttentionSpec, operation):
    batch = wide.batch.page_table, wide.batch.kv_lens, wide.batch.cu_q_lens
    exact = oracle.attention(wide.q, wide.cache, *batch, read_path="bf16").out
    options = {"read_path": spec.read_path, "q_levels": spec.q_levels, "implementation": "xla"}
    out, _ = operation(built.q, built.cache, built.batch, **options)
    definition, kernel = rel_l2(out, exact), rel_l2(kernel_out, exact)
    self.assertGreater(definition, 1e-3)  # else the ratio says nothing
    self.assertLessEqual(kernel, MOST * definition)

  @parameterized.named_parameters(
    ("nvfp4", "nvfp4_dequant", {}),
    ("fp8", "fp8", {"k_format": "fp8"}),
    ("four_over_six", "nvfp4_dequant", {"scale_search": "four_over_six"}),
    ("window", "nvfp4_dequant", {"recent_window": 64, "num_rings": 3}),
    ("fp8_nvfp4", "nvfp4_dequant", {"k_format": "fp8", "v_format": "nvfp4"}),
    ("a4q", "nvfp4_a4q", {}),
  )
  def test_decode(self, read_path, options):
    for layer in activations.load():
      built, wide = built_of(layer, 1, **options)
      spec = AttentionSpec(read_path, True, layer.q.shape[-1] ** -0.5)
      out, _ = decode_emulation.emulate(built, spec, config=None)
      self.check(out, built, wide, spec, nv.decode)

  @parameterized.parameters(
    ("nvfp4_dequant", False, {}),
    ("nvfp4_repack", True, {"scale_search": "four_over_six"}),
    ("nvfp4_a8q", True, {}),
    ("fp8", True, {"k_format": "fp8"}),
  )
  def test_prefill(self, read_path, ahead, options):
    layer = activations.load()[1]
    built, wide = built_of(layer, 16, **options)
    spec = AttentionSpec(read_path, True, layer.q.shape[-1] ** -0.5)
    out, _ = whole_emulation.emulate(built, spec, ahead=ahead)
    self.check(out, built, wide, spec, nv.prefill)


if __name__ == "__main__":
  absltest.main()
