"""Who runs what: named choices, reasons, refusals; and the package's import direction."""

import ast
import pathlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import nvfp4_pallas as nv
from nvfp4_pallas import dispatch
from nvfp4_pallas.dispatch import Entry, Target
from nvfp4_pallas.kernels import triton_launch
from nvfp4_pallas.ops.decode import resolve_decode
from nvfp4_pallas.ops.prefill import resolve_prefill
from nvfp4_pallas.ops.request import attention_request
from nvfp4_pallas.read_paths import AttentionSpec
from tests import cases
from tests.base import TestCase

PACKAGE = pathlib.Path(nv.__file__).parent


def definition():
  pass


def kernel():
  pass


def table():
  return {
    "xla": Entry(definition),
    "mosaic_sm90": Entry(
      kernel, lambda request: None if request == "even" else f"{request} is odd"
    ),
  }


class ResolveTest(TestCase):
  def test_the_device_s_own_kernel_first(self):
    with dispatch.use_target(Target("sm_90")):
      chosen = dispatch.resolve(table(), "even", None)
    self.assertEqual((chosen.implementation, chosen.function), ("mosaic_sm90", kernel))
    self.assertIn("sm_90", chosen.reason)

  def test_says_why_the_definition_runs(self):
    with dispatch.use_target(Target("sm_90")):
      chosen = dispatch.resolve(table(), "seven", None)
    self.assertEqual(chosen.implementation, "xla")
    self.assertIn("not mosaic_sm90: seven is odd", chosen.reason)
    chosen = dispatch.resolve(table(), "even", None)
    self.assertIn("not mosaic_sm90: it needs sm_90, the device is cpu", chosen.reason)

  def test_one_of_several_kernels(self):
    kernels = {"two": (definition, "by the second"), "four": (kernel, "by the first")}
    several = {"xla": Entry(kernel, choose=kernels.__getitem__)}
    for request, (function, why) in kernels.items():
      for name, because in ((None, "not mosaic_sm90: .*"), ("xla", "asked for by name")):
        chosen = dispatch.resolve(several, request, name)
        self.assertIs(chosen.function, function)
        self.assertRegex(chosen.reason, f"{because}; {why}$")

  def test_a_named_one_runs_or_raises(self):
    self.assertEqual(dispatch.resolve(table(), "even", "xla").function, definition)
    with self.assertRaisesRegex(NotImplementedError, "it needs sm_90, the device is cpu"):
      dispatch.resolve(table(), "even", "mosaic_sm90")
    with dispatch.use_target(Target("sm_90")):
      with self.assertRaisesRegex(NotImplementedError, "'mosaic_sm90' cannot run: nine is odd"):
        dispatch.resolve(table(), "nine", "mosaic_sm90")
      with self.assertRaisesRegex(NotImplementedError, "no such kernel"):
        dispatch.resolve(table(), "even", "triton_sm120")
    with self.assertRaisesRegex(ValueError, "implementation must be one of .* got 'cuda'"):
      dispatch.resolve(table(), "even", "cuda")

  def test_target_ends_with_its_block(self):
    with dispatch.use_target(Target("sm_100")):
      self.assertEqual(dispatch.current_target().architecture, "sm_100")
    self.assertEqual(dispatch.current_target().architecture, "cpu")


class DeviceTest(TestCase):
  """A4Q on GPUs as JAX describes them, without a target."""

  def resolved(self, capability, operation, implementation=None):
    built = cases.build(cases.MIXED)
    request = attention_request(built.q, built.cache, AttentionSpec("nvfp4_a4q", True, 0.1))
    gpu = mock.Mock(compute_capability=capability, device_kind="a GPU", platform="gpu")
    with (
      mock.patch.object(jax, "default_backend", lambda: "gpu"),
      mock.patch.object(jax, "devices", lambda: [gpu]),
      mock.patch.object(triton_launch, "check_installed"),
    ):
      return operation(request, implementation)

  @parameterized.product(
    operation=(resolve_prefill, resolve_decode),
    device=(
      ("9.0", "mosaic_sm90"),
      ("10.0", "mosaic_sm100"),
      ("12.0", "triton_sm120"),
      ("8.9", "xla"),
      ("10.3", "xla"),
      ("12.1", "xla"),
    ),
  )
  def test_its_own_kernel_and_no_other(self, operation, device):
    capability, expected = device
    chosen = self.resolved(capability, operation)
    self.assertEqual(chosen.implementation, expected)
    architecture = "sm_" + capability.replace(".", "")
    for name in {"mosaic_sm90", "mosaic_sm100", "triton_sm120"} - {expected}:
      needed = "sm_" + name.rpartition("_sm")[2]
      with self.assertRaisesRegex(
        NotImplementedError,
        f"'{name}' cannot run: it needs {needed}, the device is {architecture}$",
      ):
        self.resolved(capability, operation, name)


class AttentionArgumentsTest(TestCase):
  """Bad input of prefill and decode: ValueError naming argument, rule and value."""

  def setUp(self):
    super().setUp()
    self.built = cases.build(cases.Case("two", q_lens=(1, 1), kv_lens=(20, 3)), padding_rows=0)

  @parameterized.named_parameters(
    ("read_path", {"read_path": "fp4"}, "read_path must be one of .* got 'fp4'"),
    (
      "other_cache",
      {"read_path": "bf16"},
      "'bf16' needs a cache with K and V in bf16, got K nvfp4",
    ),
    ("fp8_cache", {"read_path": "fp8"}, "'fp8' needs a cache with fp8 in K or V .* got K nvfp4"),
    ("q_dim", {"q": jnp.zeros((2, 8, 32))}, r"q must be .* 64\], got \(2, 8, 32\)"),
    ("q_rank", {"q": jnp.zeros((2, 64))}, r"q must be .* got \(2, 64\)"),
    ("q_dtype", {"q": jnp.zeros((2, 8, 64), jnp.int32)}, "q must be bfloat16.* got int32"),
    ("ratio", {"q": jnp.zeros((2, 7, 64))}, "num_q_heads must be a multiple .* 2, got 7"),
    ("no_heads", {"q": jnp.zeros((2, 0, 64))}, "num_q_heads must be a multiple .* 2, got 0"),
    ("q_list", {"q": [1.0]}, "q must be an array, got list"),
    ("sinks_list", {"sinks": [0.0] * 8}, "sinks must be an array, got list"),
    (
      "int_sinks",
      {"sinks": jnp.zeros((8,), jnp.int32)},
      "sinks must be a float array .* int32",
    ),
    ("part_window", {"window": 2.5}, "window must be a whole number, got 2.5"),
    ("window", {"window": 0}, "window must be at least 1 .* got 0"),
    ("soft_cap", {"soft_cap": -1.0}, "soft_cap must be positive, got -1.0"),
    ("sm_scale", {"sm_scale": float("nan")}, "sm_scale must be finite, got nan"),
    ("q_levels", {"q_levels": 3}, "q_levels must be one of .* got 3"),
    ("sinks", {"sinks": jnp.zeros((2,))}, r"sinks must be a float array of shape \(8,\)"),
    ("who", {"implementation": "gpu"}, "implementation must be one of .* got 'gpu'"),
  )
  def test_error_names_argument_rule_and_value(self, changes, message):
    for operation in (nv.prefill, nv.decode):
      arguments = {
        "q": self.built.q,
        "cache": self.built.cache,
        "batch": self.built.batch,
        "read_path": "nvfp4_dequant",
      } | changes
      with self.assertRaisesRegex(ValueError, message):
        operation(**arguments)

  def test_decode_wants_one_token_each(self):
    arguments = {"cache": self.built.cache, "read_path": "nvfp4_dequant"}
    batch = self.built.batch
    with self.assertRaisesRegex(ValueError, "q must have one row for each of 2 sequences, got 1"):
      nv.decode(self.built.q[:1], batch=batch, **arguments)
    uneven = nv.RaggedBatch(batch.page_table, batch.kv_lens, jnp.asarray([0, 2, 2], jnp.int32))
    with self.assertRaisesRegex(ValueError, r"cu_q_lens must be 0..2 for decode"):
      nv.decode(self.built.q, batch=uneven, **arguments)
    with self.assertRaisesRegex(ValueError, "num_splits must be a whole number .* got 0"):
      nv.decode(self.built.q, batch=batch, num_splits=0, **arguments)

  def test_numbers_that_make_the_kernel_must_be_known(self):
    for name in ("sm_scale", "window", "soft_cap"):
      for operation in (nv.prefill, nv.decode):

        @jax.jit
        def call(value, name=name, operation=operation):
          built = self.built
          options = {"read_path": "nvfp4_dequant", name: value}
          return operation(built.q, built.cache, built.batch, **options)

        with self.assertRaisesRegex(ValueError, f"{name} must be a number known when"):
          call(2)

  def test_numpy_arrays_are_as_good(self):
    built = self.built
    arguments = built.q, built.cache, built.batch
    for operation in (nv.prefill, nv.decode):
      for given in (arguments, jax.tree.map(np.asarray, arguments)):
        out, _ = operation(*given, read_path="nvfp4_dequant", sm_scale=np.float32(0.1))
        np.testing.assert_array_equal(
          out, operation(*arguments, read_path="nvfp4_dequant", sm_scale=float(np.float32(0.1)))[0]
        )
    k = np.ones((2, 2, 64), np.float32)
    for batch in (built.batch, jax.tree.map(np.asarray, built.batch)):
      appended = nv.append(built.cache, k, k, batch)
      np.testing.assert_array_equal(
        appended.k.data, nv.append(built.cache, *(jnp.asarray(k),) * 2, built.batch).k.data
      )

  def test_new_kv(self):
    arguments = {"cache": self.built.cache, "batch": self.built.batch, "read_path": "nvfp4_dequant"}
    with self.assertRaisesRegex(ValueError, r"new_kv's k must be \[tokens, 2, 64\]"):
      nv.prefill(self.built.q, new_kv=(jnp.zeros((2, 1, 64)),) * 2, **arguments)
    with self.assertRaisesRegex(ValueError, "new_kv must have q's 2 tokens, got 3"):
      nv.prefill(self.built.q, new_kv=(jnp.zeros((3, 2, 64)),) * 2, **arguments)

  def test_an_implementation_that_lacks_a_path_says_why(self):
    for operation in (nv.prefill, nv.decode):
      for path in ("nvfp4_dequant", "nvfp4_a4q", "nvfp4_a8q"):
        with self.assertRaisesRegex(
          NotImplementedError, "'mosaic_sm90' cannot run: it needs sm_90"
        ):
          operation(
            self.built.q,
            self.built.cache,
            self.built.batch,
            read_path=path,
            implementation="mosaic_sm90",
          )


# Modules of the package that are made of its operations.
ABOVE_OPS = ("layer.py", "mesh.py")


class ImportDirectionTest(TestCase):
  """format -> cache, batch -> read_paths, attention -> ops -> kernels; benchmarks on top."""

  def imports(self, path):
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
      elif isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)

  def assert_never(self, paths, forbidden):
    for path in paths:
      for name in self.imports(path):
        for bad in forbidden:
          self.assertFalse(name == bad or name.startswith(bad + "."), f"{path.name} imports {name}")

  def test_kernels_do_not_import_ops(self):
    self.assert_never((PACKAGE / "kernels").glob("*.py"), ["nvfp4_pallas.ops"])

  def test_lower_layers_do_not_import_higher_ones(self):
    higher = ["nvfp4_pallas.ops", "nvfp4_pallas.kernels"]
    above = ("__init__.py", *ABOVE_OPS)
    lower = [p for p in PACKAGE.glob("*.py") if p.name not in above]
    self.assert_never(lower, higher)
    on_top = [f"nvfp4_pallas.{name.removesuffix('.py')}" for name in ABOVE_OPS]
    self.assert_never([*lower, *(PACKAGE / "ops").glob("*.py")], on_top)
    self.assert_never([PACKAGE / "format.py"], ["nvfp4_pallas"])
    self.assert_never([PACKAGE / "dispatch.py"], ["nvfp4_pallas"])

  def test_the_package_imports_neither_benchmarks_nor_tests(self):
    self.assert_never(PACKAGE.rglob("*.py"), ["benchmarks", "tests"])

  def test_jax_triton_is_imported_lazily(self):
    for path in PACKAGE.rglob("*.py"):
      for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
          names = [getattr(node, "module", None), *(a.name for a in node.names)]
          self.assertNotIn("jax_triton", names, path.name)


if __name__ == "__main__":
  absltest.main()
