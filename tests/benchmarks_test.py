"""The benchmark module's own arithmetic: capacity, rows, table."""

import dataclasses
import json
import pathlib
import tempfile
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized

from benchmarks import capacity, metrics, records, small, table
from nvfp4_pallas.ops import decode as decode_op
from nvfp4_pallas.ops import prefill as prefill_op
from tests.base import TestCase


def example_row(**changes):
  fields = {
    "phase": "prefill",
    "data": "gaussian",
    "batch": 1,
    "q_len": 8,
    "kv_len": 64,
    "page_size": 64,
    "num_q_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 128,
    "k_format": "nvfp4",
    "v_format": "nvfp4",
    "read_path": "nvfp4_dequant",
    "implementation": "xla",
    "bytes_per_token": 288.0,
    "kernel_error": 2e-7,
    "format_error": 0.13,
    "snr_db": {"k": 20.4, "v": 20.4, "q": 50.0},
  }
  return records.Row(**(fields | changes))


class CapacityTest(TestCase):
  """The seeds' arithmetic, from real arrays: 128 and 72 KiB a token, 16 and 9 GiB a sequence."""

  @parameterized.parameters(("bf16", 256, 32), ("fp8", 128, 16), ("nvfp4", 72, 9))
  def test_seed_model(self, format, kib, gib):
    c = capacity.of_format(format)
    self.assertEqual(c.bytes_per_token, kib * 2**10)
    self.assertEqual(c.sequence_bytes, gib * 2**30)

  def test_one_token_more_costs_a_page_in_each_layer(self):
    more = capacity.of_format("nvfp4", capacity.TOKENS + 1).sequence_bytes
    self.assertEqual(more - 9 * 2**30, 64 * 64 * 8 * 2 * (64 + 8))

  def test_ratio_of_nvfp4_to_fp8(self):
    ratio = capacity.of_format("fp8").sequence_bytes / capacity.of_format("nvfp4").sequence_bytes
    self.assertEqual(ratio, 16 / 9)


class RecordsTest(TestCase):
  def test_round_trip(self):
    rows = [example_row(), example_row(phase="decode", us_median=3.5)]
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / "a" / "rows.jsonl"
      records.write(rows, path)
      again = records.read(path)
    self.assertEqual(again, [json.loads(json.dumps(dataclasses.asdict(r))) for r in rows])
    self.assertNotEmpty(again[0]["git_revision"])
    self.assertEqual(again[0]["kernel_hash"], "")  # nothing of ours was traced

  def test_q_quantisation_is_named(self):
    self.assertEqual(records.q_quantisation("nvfp4_a4q", 2)["q_residual_scale"], "e4m3 per group")
    self.assertIsNone(records.q_quantisation("nvfp4_a4q", 1)["q_residual_scale"])
    self.assertNotIn("q_levels", records.q_quantisation("bf16", 2))


class TableTest(TestCase):
  def test_fits_a_terminal(self):
    rows = [
      example_row(data="smollm2 layer 26", read_path="nvfp4_a4q", q_levels=2, k_format="fp8"),
      example_row(bytes_per_token=None, kernel_error=None, format_error=None, snr_db=None),
      example_row(snr_db={"k": float("inf")}),
    ]
    for line in table.of_rows(rows) + capacity.lines():
      self.assertLessEqual(len(line), table.WIDTH)


class MetricsTest(TestCase):
  def test_dense_attention_against_a_loop(self):
    r = np.random.default_rng(0)
    q, k, v = (r.standard_normal((n, h, 4)) for n, h in ((3, 4), (7, 2), (7, 2)))
    out = metrics.dense_attention(q, k, v, 0.5)
    for i in range(3):
      for h in range(4):
        seen = slice(0, 5 + i)
        weight = np.exp(0.5 * k[seen, h // 2] @ q[i, h])
        expected = weight @ v[seen, h // 2] / weight.sum()
        np.testing.assert_allclose(out[i, h], expected, rtol=1e-12)

  def test_errors(self):
    self.assertAlmostEqual(metrics.snr_db(np.ones(4), np.full(4, 0.9)), 20.0, places=6)
    self.assertEqual(metrics.snr_db(np.ones(4), np.ones(4)), float("inf"))
    self.assertAlmostEqual(
      metrics.row_error(np.array([[3, 4.0], [0, 0]]), np.array([[3, 3], [9, 9]])), 0.2
    )


class SmallTest(TestCase):
  def test_filled_cache_holds_the_inputs(self):
    inputs = small.gaussian("tail", 2, 3, 100)
    cache, batch = small.filled_cache(inputs, small.Variant("bf16", "bf16", "bf16"))
    pages = np.asarray(cache.k.data)[np.asarray(batch.page_table)]
    stored = np.swapaxes(pages, 2, 3).reshape(2, -1, 2, 128)[:, :100]
    np.testing.assert_array_equal(stored, inputs.k)

  @parameterized.parameters((1, decode_op, "resolve_decode"), (3, prefill_op, "resolve_prefill"))
  def test_the_reason_is_the_call_s(self, q_len, module, name):
    """The row asks about what was run: the same request."""
    asked, resolve = [], getattr(module, name)

    def ask(request, implementation):
      asked.append(request)
      return resolve(request, implementation)

    inputs = small.gaussian("case", 2, q_len, 37)
    small.operation.cache_clear()
    with mock.patch.object(module, name, ask):
      small.attention_row(inputs, small.Variant("bf16", "bf16", "bf16"))
    self.assertLen(set(asked), 1)
    self.assertGreater(len(asked), 1)

  def test_q_error_ratio_compares_equal_cases(self):
    rows = [
      example_row(format_error=0.1),
      example_row(format_error=0.2, k_format="fp8"),
      example_row(format_error=0.15, read_path="nvfp4_a4q"),
    ]
    self.assertAlmostEqual(small.with_q_error_ratio(rows)[2].q_error_ratio, 1.5)


if __name__ == "__main__":
  absltest.main()
