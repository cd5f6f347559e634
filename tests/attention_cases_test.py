"""The timed cases, lowered for a GPU that is not there: what they ask for and what would run."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from benchmarks import attention_cases, peers_cudnn, peers_jax, program, storage_cases
from benchmarks import workloads as w
from benchmarks.attention_cases import Shared
from benchmarks.pages import Pools, tables_for
from benchmarks.records import Row
from benchmarks.small import Variant
from benchmarks.trace import KernelTimes
from nvfp4_pallas.dispatch import Target, use_target
from tests.base import TestCase
from tests.benchmarks_test import example_row

RATE = 4e12
TIMES = KernelTimes(names=("a", "b"), calls=(1.5, 2.0, 2.5), by_kernel={"a": 0.5, "b": 1.5})
PATHS = {"nvfp4": "nvfp4_dequant", "fp8": "fp8", "bf16": "bf16"}


def lowered_for_cuda(function, *arguments):
  """In place of program.compiled: what would run, and results of zeros."""
  text = function.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
  results = jax.tree.map(
    lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(function, *arguments)
  )
  facts = {"operand_dtypes": program.operands(text), "products": program.products(text) or None}
  return lambda *_: results, facts


def blank_row(**fields):
  """A row of a case of which nothing but these fields is known."""
  return functools.partial(example_row, **{"kernel_error": None, "format_error": None} | fields)


@functools.cache
def shared_by(work):
  return Shared.of(work, pools_of(work.geometry), tables_for(work, 0), RATE)


@functools.cache
def pools_of(geometry):
  """Enough pages for every shape here; made once, as compiling takes longest."""
  return Pools(w.heads_of(geometry), w.PAGE_SIZE, 8)


class CaseTest(TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(use_target(Target("sm_90")))
    self.enter_context(mock.patch.object(program, "compiled", lowered_for_cuda))
    device = mock.Mock(device_kind="NVIDIA H200")
    self.h200 = mock.patch.object(attention_cases.jax, "devices", lambda: [device])

  def shared(self, *lengths, **where):
    return shared_by(w.attention(*lengths, **where))

  def row(self, shared, variant, **options):
    timed = attention_cases.prepare(shared, variant, "mosaic_sm90", blank_row(), **options)
    with self.h200:
      return timed.row(TIMES if timed.calls else None)

  @parameterized.product(format=("nvfp4", "fp8", "bf16"), q_len=(1, 3, 200))
  def test_what_is_asked_and_what_runs(self, format, q_len):
    shared = self.shared(2, q_len, 256)
    row = self.row(shared, Variant(PATHS[format], format, format))
    self.assertEqual((row.us_median, row.us_min, row.us_max, row.us_count), (2.0, 1.5, 2.5, 3))
    seen = sum(256 - q_len + 1 + i for i in range(q_len))
    flops = 2 * 32 * seen * 2 * 2 * 128
    self.assertAlmostEqual(row.tflops, flops / 2e-6 / 1e12)
    self.assertAlmostEqual(row.floor_us, max(row.bytes / RATE, flops / 800e12) * 1e6)
    bytes_per_token = {"nvfp4": 2 * 8 * 72, "fp8": 2 * 8 * 128, "bf16": 2 * 8 * 256}[format]
    self.assertEqual(row.bytes_per_token, bytes_per_token)
    self.assertEqual(row.bytes, 2 * 256 * bytes_per_token + 2 * (2 * q_len * 32 * 128 * 2))
    kernel = {1: "split-KV", 3: "for short queries", 200: "for whole query tiles"}[q_len]
    if format != "nvfp4" and q_len > 1:
      kernel = "for whole query tiles"
    self.assertIn(kernel, row.reason)
    names = {1: "decode_attend", 3: "short_attend", 200: "wide_attend"}
    stored = {"nvfp4": {"u8", "e4m3"}, "fp8": {"e4m3"}, "bf16": {"bf16"}}[format]
    reader = {1: "decode_attend"}.get(q_len, "dense_widen") if format != "nvfp4" else None
    reader = reader or next(n for n in row.operand_dtypes if n in (*names.values(), "fused_attend"))
    self.assertContainsSubset(stored, row.operand_dtypes[reader])
    product = "bf16 x bf16" if format == "bf16" else "f16 x f16"
    self.assertTrue(all(p.endswith(product) for of in row.products.values() for p in of))

  def test_a8q_multiplies_fp8_and_a4q_does_not_multiply_fp4(self):
    shared = self.shared(1, 512, 512)
    a8q = self.row(shared, Variant("nvfp4_a8q", "nvfp4", "nvfp4"))
    (products,) = a8q.products.values()
    self.assertLen([p for p in products if p.endswith("e4m3 x e4m3")], 1)
    self.assertLen([p for p in products if p.endswith("f16 x f16")], 1)
    flops = attention_cases.attention_flops(shared.workload)
    self.assertAlmostEqual(a8q.floor_us, max(a8q.bytes / RATE, 0.75 * flops / 800e12) * 1e6)
    for levels in (1, 2):
      a4q = self.row(shared, Variant("nvfp4_a4q", "nvfp4", "nvfp4", levels))
      self.assertTrue(all("f16 x f16" in p for of in a4q.products.values() for p in of))
      self.assertIn("emulated", a4q.reason)

  def test_what_no_kernel_runs_has_a_reason_and_no_time(self):
    row = self.row(self.shared(2, 1, 64), Variant("nvfp4_a8q", "nvfp4", "nvfp4"))
    self.assertIn("cannot run", row.reason)
    self.assertEqual((row.us_median, row.tflops, row.kernel_names), (None, None, ()))
    row = self.row(
      self.shared(2, 1, 64, layout="token_major"), Variant("nvfp4_dequant", "nvfp4", "nvfp4")
    )
    self.assertIn("pages have the layout head_major", row.reason)

  def test_options_of_decode(self):
    shared = self.shared(2, 1, 256)
    nvfp4 = Variant("nvfp4_dequant", "nvfp4", "nvfp4")
    plain, window = (self.row(shared, nvfp4, recent_window=n) for n in (0, 64))
    self.assertGreater(window.bytes, plain.bytes)
    self.assertIsNotNone(plain.kernel_error)
    self.assertIsNone(window.kernel_error)  # the reference knows no rings
    self.assertIsNotNone(self.row(shared, nvfp4, batch_invariant=True).us_median)
    for changed in ({"k_rotation": "hadamard"}, {"v_rotation": "hadamard"}, {"k_mean": True}):
      row = self.row(shared, nvfp4, **changed)
      self.assertIsNotNone(row.us_median)
      self.assertIsNone(row.kernel_error)  # nor what was done to rows before

  def test_new_keys_in_wide_form(self):
    shared = self.shared(2, 64, 256)
    nvfp4 = Variant("nvfp4_repack", "nvfp4", "nvfp4")
    plain, wide, recent = (
      self.row(shared, nvfp4, **options)
      for options in ({}, {"new_kv": True}, {"new_kv": True, "recent_window": 64})
    )
    kv_heads = shared.workload.heads.num_kv_heads
    self.assertEqual(wide.bytes - plain.bytes, 2 * 64 * kv_heads * 2 * (2 * 128 - 72))
    # Of 192 cached tokens 64 and, of the sequence that is shorter by 37, 91 are in the ring.
    self.assertEqual(recent.bytes - wide.bytes, (64 + 91) * kv_heads * 2 * (2 * 128 - 72))
    self.assertIsNone(wide.kernel_error)

  def test_other_devices_have_a_floor_of_bytes(self):
    shared = self.shared(1, 128, 128)
    timed = attention_cases.prepare(
      shared, Variant("bf16", "bf16", "bf16"), "mosaic_sm90", blank_row()
    )
    row = timed.row(TIMES)
    self.assertAlmostEqual(row.floor_us, 1e6 * row.bytes / RATE)

  def test_calls_take_turns_with_memory(self):
    work = w.attention(1, 1, 64)
    tables = tables_for(work, 20 * 8 * 64 * 144)
    self.assertLen(tables.tables, 12)
    shared = dataclasses.replace(self.shared(1, 1, 64), tables=tables)
    timed = attention_cases.prepare(
      shared, Variant("bf16", "bf16", "bf16"), "mosaic_sm90", blank_row()
    )
    used = [np.asarray(call.args[2].page_table)[0, 0] for call in timed.calls]
    self.assertLen(set(used), len(used))

  @parameterized.parameters(
    ((2, 1, 256), False, "gaussian, contiguous keys", 256),
    ((2, 256, 256), True, "gaussian, contiguous keys", 128.5),
    ((2, 64, 256), False, "gaussian, contiguous keys, no mask", 256),
  )
  def test_cudnn(self, lengths, causal, data, seen):
    """A mask that cuDNN cannot align is left out, said, and its work counted."""
    asked = []

    def attend(q, k, v, **options):
      asked.append((k.shape, options))
      return q

    shared = self.shared(*lengths, geometry="small")
    fields = peers_cudnn.fields(shared.workload)
    self.assertEqual(fields, {"data": data, "page_size": 256, "layout": "contiguous"})
    with mock.patch.object(jax.nn, "dot_product_attention", attend), self.h200:
      timed = peers_cudnn.prepare(shared, Variant("bf16", "bf16", "bf16"), blank_row(**fields))
      row = timed.row(TIMES)
    self.assertEqual(asked[0], ((2, 256, 2, 128), {"is_causal": causal, "implementation": "cudnn"}))
    flops = 2 * 8 * lengths[1] * seen * 4 * 128
    self.assertAlmostEqual(row.tflops, flops / 2e-6 / 1e12)
    self.assertEqual(row.kernel_error is None, "no mask" in data)

  def test_jax_s_paged_attention(self):
    asked = []

    def attend(q, k, v, table, lengths, **options):
      asked.append((k.shape, table.shape, lengths, options))
      return q

    shared = self.shared(2, 1, 256, geometry="small")
    with mock.patch.object(peers_jax, "_paged_attention", lambda: attend):
      timed = peers_jax.prepare(shared, Variant("bf16", "bf16", "bf16"), blank_row())
    row = timed.row(TIMES)
    options = {"pages_per_compute_block": 2, "k_splits": 2}
    self.assertEqual(asked[0], ((2, 8, 64, 128), (2, 4), None, options))
    self.assertEqual(row.version, f"jax {jax.__version__}")
    with self.assertRaisesRegex(NotImplementedError, "it cuts 192 keys"):
      peers_jax.prepare(
        self.shared(1, 1, 192, geometry="small"), Variant("bf16", "bf16", "bf16"), blank_row()
      )


class StorageTest(TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(use_target(Target("sm_90")))
    self.enter_context(mock.patch.object(program, "compiled", lowered_for_cuda))

  def row(self, prepare, work, **options) -> Row:
    return prepare(work, "mosaic_sm90", blank_row(), RATE, **options).row(TIMES)

  @parameterized.parameters(("nvfp4", 1), ("nvfp4", 128), ("fp8", 64), ("bf16", 64))
  def test_append(self, format, tokens):
    work = w.Workload(phase="append", batch=tokens, q_len=1, kv_len=1)
    row = self.row(storage_cases.prepare_append, work, format=format)
    written = {"nvfp4": 72, "fp8": 128, "bf16": 256}[format]
    self.assertEqual(row.bytes, tokens * 8 * 2 * (256 + written))
    self.assertIn("kv_append", "".join(row.operand_dtypes))
    self.assertIsNone(row.tflops)

  def test_pack_and_unpack(self):
    for phase in ("pack", "unpack"):
      work = w.Workload(phase=phase, batch=1, q_len=64, kv_len=1)
      row = self.row(storage_cases.prepare_pack, work, scale=0.5)
      self.assertEqual(row.bytes, 64 * 128 * 2 + 64 * 72)
      self.assertEqual(row.floor_us, 1e6 * row.bytes / RATE)
      self.assertIn(f"nvfp4_{phase}", "".join(row.operand_dtypes))

  @parameterized.parameters(0, 64)
  def test_a_step(self, window):
    work = w.Workload(phase="append", batch=3, q_len=1, kv_len=1, geometry="small")
    row = self.row(storage_cases.prepare_step, work, recent_window=window)
    wide, stored = 2 * 2 * 128 * 2, 2 * 2 * 72  # K and V of a token's two heads
    least = 3 * 2 * wide if window else 3 * (wide + stored)
    # With a window a page of each sequence may leave it, at most a token a call on average.
    self.assertBetween(row.bytes, least, least + (3 * (wide + stored) if window else 0))
    self.assertEqual(row.floor_us, 1e6 * row.bytes / RATE)
    self.assertEqual(row.us_median, 2.0)


if __name__ == "__main__":
  absltest.main()
