"""Attention by others, with modules in the place of those that are not installed."""

import sys
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from benchmarks import peers, peers_cudnn, peers_flashinfer, peers_jax
from benchmarks import workloads as w
from benchmarks.trace import KernelTimes
from tests.attention_cases_test import blank_row, shared_by
from tests.base import TestCase

TIMES = KernelTimes(("a",), (2.0,), {})


class Tensor:
  """As much of torch's as the adapter asks for."""

  def __init__(self, array, dtype=None):
    self.array = np.asarray(array)
    self.dtype = dtype or f"torch.{self.array.dtype}"

  def view(self, dtype):
    return Tensor(self.array, dtype)

  def float(self):
    return self

  def cpu(self):
    return self

  def numpy(self):
    return self.array.astype(np.float32)


class Wrapper:
  """Takes down what it is asked, and attends to nothing."""

  made: list = []

  def __init__(self, workspace, layout, **options):
    self.asked = {"layout": layout, **options}
    self.made.append(self)

  def plan(self, *arguments, **options):
    self.asked |= {"plan": arguments, **options}

  def run(self, q, kv, **options):
    self.asked |= {"q": q, "kv": kv, "run": options}
    return q


class Decode(Wrapper):
  made: list = []


class Prefill(Wrapper):
  made: list = []


def fake_modules():
  torch = types.ModuleType("torch")
  torch.from_dlpack = Tensor
  torch.as_tensor = lambda values, device: Tensor(values)
  torch.empty = lambda size, dtype, device: None
  torch.uint8, torch.float8_e4m3fn = "torch.uint8", "torch.float8_e4m3fn"
  torch.cuda = types.SimpleNamespace(synchronize=lambda: None)
  torch.__version__ = "2.11"
  flashinfer = types.ModuleType("flashinfer")
  flashinfer.__version__ = "0.7.4"
  flashinfer.BatchDecodeWithPagedKVCacheWrapper = Decode
  flashinfer.BatchPrefillWithPagedKVCacheWrapper = Prefill
  for module in (torch, flashinfer):
    module.__spec__ = types.SimpleNamespace()
  return mock.patch.dict(sys.modules, {"torch": torch, "flashinfer": flashinfer})


class FlashInferTest(TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(fake_modules())
    Decode.made, Prefill.made = [], []

  def prepared(self, variant, *lengths):
    work = w.attention(*lengths, geometry="small")
    shared = shared_by(work)
    return shared, peers_flashinfer.prepare(shared, variant, blank_row())

  def test_decode_over_nvfp4(self):
    """Pages and scales as they are, in layout HND; sizes in bytes, not widened."""
    shared, timed = self.prepared(peers.NVFP4, 2, 1, 200)
    ((asked),) = (wrapper.asked for wrapper in Decode.made)
    cache = shared.pools.cache("nvfp4", "nvfp4")
    self.assertEqual(asked["layout"], "HND")
    indptr, indices, last, *shape = asked["plan"]
    self.assertEqual(indptr.array.tolist(), [0, 4, 8])
    np.testing.assert_array_equal(indices.array, np.asarray(shared.tables.tables[0]).reshape(-1))
    self.assertEqual(last.array.tolist(), [8, 8])
    self.assertEqual(shape, [8, 2, 128, 64])
    self.assertEqual(
      (asked["q_data_type"], asked["kv_data_type"]), ("torch.bfloat16", "torch.uint8")
    )
    for tensor, pool in zip(asked["kv"], (cache.k, cache.v), strict=True):
      np.testing.assert_array_equal(tensor.array, pool.data)
    for tensor, pool in zip(asked["run"]["kv_cache_sf"], (cache.k, cache.v), strict=True):
      self.assertEqual(tensor.dtype, "torch.float8_e4m3fn")
      np.testing.assert_array_equal(
        tensor.array, jax.lax.bitcast_convert_type(pool.block_scale, jnp.uint8)
      )
    row = timed.row(TIMES)
    self.assertEqual(row.version, "flashinfer 0.7.4, torch 2.11")
    self.assertEqual(row.operand_dtypes["run"][1], "k torch.uint8")
    self.assertGreater(row.kernel_error, 0.5)  # it attended to nothing, and is found out
    self.assertEqual(row.bytes_per_token, 2 * 2 * 72)

  @parameterized.parameters((peers.BF16, "torch.bfloat16"), (peers.FP8, "torch.float8_e4m3fn"))
  def test_prefill(self, variant, dtype):
    _, timed = self.prepared(variant, 1, 16, 200)
    ((asked),) = (wrapper.asked for wrapper in Prefill.made)
    self.assertEqual(asked["plan"][0].array.tolist(), [0, 16])
    self.assertEqual((asked["causal"], asked["kv_data_type"]), (True, dtype))
    self.assertNotIn("kv_cache_sf", asked["run"])
    self.assertEqual("k_scale" in asked["run"], variant is peers.FP8)
    self.assertLen(timed.calls, 8)

  def test_it_is_found(self):
    with mock.patch.object(peers_flashinfer.importlib.util, "find_spec", lambda name: object()):
      self.assertIsNone(peers_flashinfer.missing())
    lacking = lambda name: None if name == "torch" else object()
    with mock.patch.object(peers_flashinfer.importlib.util, "find_spec", lacking):
      self.assertEqual(peers_flashinfer.missing(), "not installed: torch")


class MissingTest(TestCase):
  def test_on_a_cpu(self):
    self.assertEqual(peers_cudnn.missing(), "cuDNN needs an NVIDIA GPU")
    self.assertIn("GPU", peers_jax.missing())

  def test_a_jax_without_paged_attention(self):
    gone = mock.patch.object(peers_jax, "_paged_attention", side_effect=ImportError("no module"))
    with gone, mock.patch.object(jax, "default_backend", lambda: "gpu"):
      self.assertEqual(peers_jax.missing(), "this JAX has no paged attention: no module")

  def test_jax_s_is_there(self):
    """Imported with its warning of deprecation, which is an error in these tests."""
    self.assertEqual(peers_jax._paged_attention().__name__, "paged_attention")


if __name__ == "__main__":
  absltest.main()
