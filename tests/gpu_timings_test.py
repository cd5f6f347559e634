"""The timed cases of `python3 -m benchmarks gpu`, traced for a GPU that is not there."""

import functools
from unittest import mock

import jax
from absl.testing import absltest, parameterized

from benchmarks import gpu, gpu_timings
from benchmarks.small import Variant
from benchmarks.trace import KernelTimes
from nvfp4_pallas.dispatch import Target, use_target
from tests.base import TestCase

RATE = 4e12


def trace_first(calls, wait=None, warm_up=2):
  """In place of kernel_times: the first call is traced, and takes two microseconds."""
  del wait, warm_up
  trace_first.count = len(calls)
  jax.eval_shape(calls[0])
  return KernelTimes(names=("a", "b"), calls=(1.5, 2.0, 2.5), by_kernel={"a": 0.5, "b": 1.5})


def called(calls, warm_up):
  """In place of kernel_times: runs all."""
  assert warm_up == 0  # which would be on the same memory
  for call in calls:
    call()
  return KernelTimes(names=("a",), calls=(1.0,) * len(calls), by_kernel={"a": 1.0})


class TimingsTest(TestCase):
  def setUp(self):
    super().setUp()
    small = mock.patch.multiple(
      gpu_timings, kernel_times=trace_first, ROTATED_BYTES=2**20, PACK_ROWS=64
    )
    self.enter_context(small)
    self.enter_context(use_target(Target("sm_90")))

  @parameterized.product(
    formats=(("nvfp4", "nvfp4"), ("fp8", "fp8"), ("bf16", "bf16")), q_len=(1, 3, 200)
  )
  def test_attention(self, formats, q_len):
    path = {"nvfp4": "nvfp4_dequant"}.get(formats[0], formats[0])
    variant, shape = Variant(path, *formats), (2, q_len, 256)
    row = gpu_timings.attention_times("a phase", variant, shape, RATE, page_size=32)
    self.assertEqual(row.us_median, 2.0)
    self.assertEqual(row.floor_us, max(row.bytes / RATE, self.flops(*shape) / 800e12) * 1e6)
    self.assertAlmostEqual(row.tflops, self.flops(*shape) / 2e-6 / 1e12)
    self.assertEqual(row.us_by_kernel, {"a": 0.5, "b": 1.5})
    bytes_per_token = {"nvfp4": 2 * 8 * 72, "fp8": 2 * 8 * 128, "bf16": 2 * 8 * 256}[formats[0]]
    self.assertEqual(row.bytes, 2 * 256 * bytes_per_token + 2 * (2 * q_len * 32 * 128 * 2))
    kernel = {1: "split-KV", 3: "for short queries", 200: "for whole query tiles"}[q_len]
    if formats[0] != "nvfp4" and q_len > 1:
      kernel = "for whole query tiles"
    self.assertIn(kernel, row.reason or "")
    self.assertEqual(row.batch_invariant, False if q_len == 1 else None)

  def test_the_floor_of_a8q(self):
    """Half of its products are of FP8, which takes half the time."""
    shape = (1, 8192, 8192)
    row = gpu_timings.attention_times("a phase", gpu_timings.A8Q, shape, RATE)
    self.assertEqual(row.floor_us, 0.75 * self.flops(*shape) / 800e12 * 1e6)
    self.assertAlmostEqual(row.tflops, self.flops(*shape) / 2e-6 / 1e12)

  def flops(self, batch, q_len, kv_len):
    """Two products of 128 columns over the keys that each query sees."""
    seen = sum(kv_len - q_len + 1 + i for i in range(q_len))
    return batch * 32 * seen * 2 * 2 * 128

  @parameterized.parameters(
    ({}, (1, 2, 64), 12), ({}, (1, 4096, 4096), 6), ({"calls": 5}, (1, 2, 64), 5)
  )
  def test_long_cases_have_fewer_calls(self, options, shape, count):
    gpu_timings.attention_times("a phase", gpu_timings.NVFP4, shape, RATE, **options)
    self.assertEqual(trace_first.count, count)

  def test_what_no_kernel_runs_has_a_reason_and_no_time(self):
    lacking = mock.patch.object(
      gpu_timings, "resolve_prefill", side_effect=NotImplementedError("no such kernel")
    )
    with lacking:
      row = gpu_timings.attention_times("sweep", gpu_timings.A8Q, (2, 3, 64), RATE)
    self.assertEqual(row.reason, "no such kernel")
    self.assertEqual((row.us_median, row.tflops, row.kernel_names), (None, None, ()))
    self.assertEqual((row.read_path, row.batch, row.q_len, row.kv_len), ("nvfp4_a8q", 2, 3, 64))
    self.assertIn("no such kernel", gpu.describe(row))

  @parameterized.product(format=("nvfp4", "fp8", "bf16"), tokens=(1, 64, 128))
  def test_append(self, format, tokens):
    scale = 1.0 if format == "bf16" else 0.5
    row = gpu_timings.append_times(tokens, format, scale, RATE)
    written = {"nvfp4": 72, "fp8": 128, "bf16": 256}[format]
    self.assertEqual(row.bytes, tokens * 8 * 2 * (256 + written))
    self.assertIn(str(scale), row.data)
    self.assertIsNone(row.tflops)

  def test_pack(self):
    row = gpu_timings.pack_times(0.5, RATE)  # unpack_times would have to pack, not only trace
    self.assertEqual(row.bytes, 64 * 128 * 2 + 64 * 72)

  @parameterized.parameters(
    ((2, 1, 256), False, "gaussian, contiguous keys", 256),
    ((2, 256, 256), True, "gaussian, contiguous keys", 128.5),
    ((2, 64, 256), False, "gaussian, contiguous keys, no mask", 256),
  )
  def test_cudnn(self, shape, causal, data, seen):
    """A mask that cuDNN cannot align is left out, said, and its work counted."""
    asked = []

    def attend(q, k, v, **options):
      asked.append(options)
      return q

    with mock.patch.object(jax.nn, "dot_product_attention", attend):
      row = gpu_timings.cudnn_times("a phase", shape, RATE)
    self.assertEqual(asked, [{"is_causal": causal, "implementation": "cudnn"}])
    self.assertEqual((row.phase, row.data), ("a phase", data))
    flops = 2 * 32 * shape[1] * seen * 4 * 128
    self.assertAlmostEqual(row.tflops, flops / 2e-6 / 1e12)
    self.assertEqual(row.floor_us, max(row.bytes / RATE, flops / 800e12) * 1e6)

  def prefills(self, cases):
    """Read path and levels, or cudnn, of cases of a phase and shape."""
    for case in cases:
      if case.func is gpu_timings.cudnn_case:
        yield (*case.args, "cudnn")
      else:
        phase, variant, shape = case.args
        levels = variant.q_levels if variant.read_path == "nvfp4_a4q" else ""
        yield phase, shape, f"{variant.read_path}{levels}"

  def test_prefills(self):
    """Each shape's read paths take turns with cuDNN."""
    turns = {}
    for case in gpu_timings.GROUPS["prefill"]:
      if case.func is gpu_timings.taking_turns:
        cases, index = case.args
        turns.setdefault(tuple(self.prefills(cases)), []).append(index)
    wide = ["nvfp4_dequant", "fp8", "bf16", "cudnn"]
    for phase, shape, paths in (
      ("prefill", gpu_timings.PREFILL, ["nvfp4_repack", "nvfp4_a8q", *wide]),
      ("prefill", gpu_timings.LONG_PREFILL, ["nvfp4_repack", "nvfp4_a8q", *wide]),
      ("prefill", gpu_timings.PREFILLS, ["nvfp4_repack", "nvfp4_a8q", "nvfp4_dequant", "cudnn"]),
      ("chunk", gpu_timings.CHUNK, ["nvfp4_dequant", "nvfp4_a8q", "fp8", "bf16", "cudnn"]),
    ):
      key = tuple((phase, shape, path) for path in paths)
      self.assertEqual(turns[key], list(range(len(paths))))
    alone = [c for c in gpu_timings.GROUPS["prefill"] if c.func is gpu_timings.attention_times]
    self.assertLen(alone, 3)

  def test_turns(self):
    """Each case's own calls and row; a case after the other, several times."""
    order = []
    self.enter_context(mock.patch.object(gpu_timings, "kernel_times", called))

    def timed(name, rate):
      del rate
      if name == "x":
        raise ValueError("no such case")
      calls = [functools.partial(order.append, f"{name}{i}") for i in range(5 * (name != "-"))]
      return gpu_timings.Timed(calls, lambda times: (name, times and len(times.calls)))

    cases = tuple(functools.partial(timed, name) for name in "ax-b")
    rows = [gpu_timings.taking_turns(cases, i, RATE) for i in (0, 2, 3)]
    count = 2 * gpu_timings.TURNS
    self.assertEqual(rows, [("a", count), ("-", None), ("b", count)])
    with self.assertRaisesRegex(ValueError, "no such case"):
      gpu_timings.taking_turns(cases, 1, RATE)
    # First to warm up, then other calls in each turn.
    first = "a3 a4 a0 a1 b3 b4 b0 b1 a2 a3 b2 b3 a4 a0 b4 b0"
    self.assertEqual(" ".join(order).split()[: len(first.split())], first.split())

  def test_groups(self):
    """Every bar has its case."""
    decode = [
      (case.args, case.keywords)
      for case in gpu_timings.GROUPS["decode"]
      if case.func is gpu_timings.attention_times
    ]
    shapes = {args[2] for args, keywords in decode if args[1].k_format == "nvfp4"}
    self.assertEqual(shapes, set(gpu_timings.DECODE))
    self.assertTrue(any(keywords.get("batch_invariant") for _, keywords in decode))


if __name__ == "__main__":
  absltest.main()
