"""Calls of Triton kernels from JAX: what must be installed, and what they are in a program."""

import importlib.metadata
import importlib.util
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized

from benchmarks.triton_cases import CASES, TARGET
from nvfp4_pallas.dispatch import Target, use_target
from nvfp4_pallas.kernels import triton_launch
from tests.base import TestCase


class InstalledTest(TestCase):
  @parameterized.parameters(
    ({"jax-triton": None}, "needs jax-triton 0.4.1 or later, found None: pip install 'jax-triton>"),
    ({"jax-triton": "0.3.9"}, "needs jax-triton 0.4.1 or later, found 0.3.9"),
    ({"triton": "3.6.0"}, "needs triton 3.7 or later, found 3.6.0: pip install 'triton>=3.7'"),
    ({"triton": None}, "needs triton 3.7 or later, found None"),
  )
  def test_what_is_missing_or_old_is_named(self, changes, message):
    versions = {"jax-triton": "0.4.1", "triton": "3.7.0"} | changes

    def version(package):
      if versions[package] is None:
        raise importlib.metadata.PackageNotFoundError(package)
      return versions[package]

    with self.assertRaisesRegex(NotImplementedError, message):
      triton_launch.check_installed(version)

  @parameterized.parameters("0.4.1", "0.4.2", "0.10", "1.0.dev3")
  def test_newer_ones_will_do(self, version):
    versions = {"jax-triton": version, "triton": "3.10.0+git123"}
    triton_launch.check_installed(versions.__getitem__)

  def test_the_plugin_is_named(self):
    with mock.patch("jax._src.lib.gpu_triton", object()):
      with self.assertRaisesRegex(NotImplementedError, r"CUDA plugin.*pip install 'jax\[cuda13\]="):
        triton_launch.check_plugin()


class CallTest(TestCase):
  """As traced, which needs no GPU."""

  def setUp(self):
    super().setUp()
    if importlib.util.find_spec("jax_triton") is None:
      self.skipTest("jax-triton is not installed")
    self.enter_context(mock.patch.object(triton_launch, "check_plugin"))

  def jaxpr(self, name, transform=lambda f: f):
    (case,) = (case for case in CASES if case.name == name)
    function, arguments = case.build()
    with use_target(Target(TARGET)):
      return str(jax.make_jaxpr(transform(function))(*arguments))

  def test_one_call_with_its_options(self):
    jaxpr = self.jaxpr("decode/a4q")
    self.assertEqual(jaxpr.count("triton_kernel_call["), 1)
    for text in ("compute_capability=120", "'ptx_version': 87", "'SEQS': 0", "'Q_LEVELS': 2"):
      self.assertIn(text, jaxpr)

  def test_vmap_is_a_loop(self):
    def mapped(function):
      return lambda *a: jax.vmap(function)(*jax.tree.map(lambda x: jnp.stack([x] * 3), a))

    jaxpr = self.jaxpr("prefill/a4q", mapped)
    self.assertEqual(jaxpr.count("triton_kernel_call["), 1)
    self.assertRegex(jaxpr, r"(scan|while)\[")

  def test_nothing_is_imported_before_it_is_needed(self):
    code = (
      "import sys, nvfp4_pallas; from nvfp4_pallas.kernels import attention_triton_sm120; "
      "assert not {'triton', 'jax_triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


if __name__ == "__main__":
  absltest.main()
