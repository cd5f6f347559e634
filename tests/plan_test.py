"""What fits on a device, against what create allocates."""

import contextlib
import dataclasses
import io
import re

import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized

import nvfp4_pallas as nv
from benchmarks import plan
from benchmarks.plan import Model
from nvfp4_pallas.cache import KV_FORMATS
from tests.base import TestCase

SMALL = Model(layers=3, kv_heads=4, head_dim=64, v_head_dim=128, page_size=16, tensor=2)


LEVERS = {"scale_search": "four_over_six", "k_rotation": "hadamard", "v_rotation": "hadamard"}
append = jax.jit(nv.append)


def created(
  model: Model, pages: int, k_format: str, v_format: str, rings: int = 0, **levers
) -> nv.PagedKVCache:
  """A layer's cache on a device."""
  heads = model.kv_heads // model.tensor
  if rings:
    levers |= {"recent_window": model.recent_window, "num_rings": rings}
  if model.k_mean:
    levers["k_mean"] = jnp.ones((heads, model.head_dim))
  return nv.PagedKVCache.create(
    num_pages=pages,
    page_size=model.page_size,
    num_kv_heads=heads,
    head_dim=model.head_dim,
    v_head_dim=model.v_head_dim,
    k_format=k_format,
    v_format=v_format,
    **levers,
  )


def allocated(model: Model, *args, **levers) -> int:
  return model.layers * sum(a.nbytes for a in jax.tree.leaves(created(model, *args, **levers)))


class PlanTest(TestCase):
  @parameterized.parameters(*plan.FORMATS)
  def test_equals_what_is_allocated_to_the_byte(self, *formats):
    for pages in (1, 7):
      budget = allocated(SMALL, pages, *formats)
      for spare, expected in ((0, pages), (-1, pages - 1)):
        found = plan.plan(SMALL, budget + spare, 100, *formats)
        self.assertEqual(found.pages, expected)
        if expected:
          self.assertEqual(found.cache_bytes, allocated(SMALL, expected, *formats))

  @parameterized.product(k_format=KV_FORMATS, v_format=KV_FORMATS, window=(0, 20))
  def test_levers_to_the_byte(self, k_format, v_format, window):
    """Each pair of formats, with all that a cache may have: at what is allocated, and below it."""
    model = dataclasses.replace(SMALL, k_mean=True, recent_window=window)
    levers = dict(LEVERS)
    if "nvfp4" not in (k_format, v_format):
      del levers["scale_search"]
    rings = 2 if window and (k_format, v_format) != ("bf16", "bf16") else 0
    budget = allocated(model, 10, k_format, v_format, rings, **levers)
    found = plan.plan(model, budget, 100, k_format, v_format)
    self.assertEqual((found.pages, found.cache_bytes), (10, budget))
    less = plan.plan(model, budget - 1, 100, k_format, v_format)
    self.assertLess(less.sequences if rings else less.pages, 2 if rings else 10)
    without = plan.plan(dataclasses.replace(model, k_mean=False), budget, 100, k_format, v_format)
    self.assertEqual(found.cache_bytes - without.cache_bytes, 3 * 2 * 64 * 4)

  def test_tokens_and_sequences(self):
    """100 tokens are 7 pages of 16, and 4 on each of two devices."""
    budget = allocated(SMALL, 23, "nvfp4", "nvfp4")
    for axes, tokens, sequences in (
      ({}, 23 * 16, 3),
      ({"data": 3}, 23 * 16, 3),
      ({"context": 2, "data": 3}, 23 * 16 * 2, 5),
    ):
      spread = dataclasses.replace(SMALL, **axes)
      found = plan.plan(spread, budget, 100, "nvfp4", "nvfp4")
      self.assertEqual(
        (found.pages, found.group_tokens, found.group_sequences), (23, tokens, sequences)
      )
      self.assertEqual(
        (found.tokens, found.sequences), (tokens * spread.data, sequences * spread.data)
      )

  def test_nvfp4_holds_as_many_as_its_bytes_say(self):
    model = Model(layers=32, kv_heads=8, head_dim=128, v_head_dim=128, page_size=64)
    of = {f: plan.plan(model, 2**36, 8192, f, f).tokens for f in ("bf16", "fp8", "nvfp4")}
    self.assertAlmostEqual(of["nvfp4"] / of["bf16"], 32 / 9, delta=1e-3)
    self.assertAlmostEqual(of["nvfp4"] / of["fp8"], 16 / 9, delta=1e-3)

  def test_recent_window(self):
    """107 tokens with a window of 20 are 5 pages of 16 and a ring of 3 in bfloat16: of the 87 that
    are outside the window, 7 are of a page that has not left it."""
    model = dataclasses.replace(SMALL, recent_window=20)
    found = plan.plan(model, 2**20, 107, "nvfp4", "nvfp4")
    ring = 3 * 2 * ((64 + 128) * 2 * 3 * 16) + 3 * 4  # layers, heads, K and V of 3 pages; starts
    self.assertEqual(found.ring_bytes, ring)
    self.assertEqual(
      found.cache_bytes,
      allocated(SMALL, found.pages, "nvfp4", "nvfp4") + found.sequences * ring,
    )
    self.assertLessEqual(found.cache_bytes, 2**20)
    one_more = allocated(SMALL, 5 * (found.sequences + 1), "nvfp4", "nvfp4")
    self.assertGreater(one_more + (found.sequences + 1) * ring, 2**20)
    self.assertEqual(self.pages_of_a_sequence(model, 107), 5)
    self.assertEqual(
      plan.plan(model, 2**20, 100, "bf16", "bf16"),
      plan.plan(SMALL, 2**20, 100, "bf16", "bf16"),
    )
    with self.assertRaisesRegex(ValueError, "context must be 1 with a recent window, got 2"):
      dataclasses.replace(model, context=2)

  def pages_of_a_sequence(self, model, kv_len) -> int:
    """That a cache writes of so many tokens."""
    cache = created(dataclasses.replace(model, layers=1), 7, "nvfp4", "nvfp4", rings=1)
    k, v = (jnp.ones((kv_len, 2, dim), jnp.bfloat16) for dim in (64, 128))
    batch = nv.RaggedBatch(
      *(jnp.asarray(a, jnp.int32) for a in ([[0, 1, 2, 3, 4, 5, 6]], [kv_len], [0, kv_len]))
    )
    return int(jnp.any(append(cache, k, v, batch).v.data, axis=(1, 2, 3)).sum())

  @parameterized.parameters(*plan.FORMATS[1:])
  def test_rings_equal_what_is_allocated_to_the_byte(self, *formats):
    """107 tokens, or 20 that need no page: at what is allocated, and a byte below it."""
    model = dataclasses.replace(SMALL, recent_window=20)
    for kv_len, pages, rings in ((107, 5 * 3, 3), (107, 5 * 3 + 4, 3), (20, 1, 4)):
      budget = allocated(model, pages, *formats, rings)
      found = plan.plan(model, budget, kv_len, *formats)
      self.assertEqual((found.pages, found.sequences, found.cache_bytes), (pages, rings, budget))
      less = plan.plan(model, budget - 1, kv_len, *formats)
      self.assertLess((less.sequences, less.pages), (rings, pages))
      taken = allocated(model, less.pages, *formats, less.sequences)
      self.assertEqual(less.cache_bytes, taken)
      self.assertLess(taken, budget)

  def test_a_window_needs_a_ring_and_a_page(self):
    """Where no sequence of the wanted length fits, what is left is a ring's and pages'."""
    model, formats = dataclasses.replace(SMALL, recent_window=20), ("nvfp4", "nvfp4")
    smallest = allocated(model, 1, *formats, 1)
    found = plan.plan(model, smallest, 100, *formats)
    self.assertEqual((found.pages, found.sequences, found.cache_bytes), (1, 0, smallest))
    for kv_len in (20, 100):
      found = plan.plan(model, smallest - 1, kv_len, *formats)
      self.assertEqual((found.pages, found.sequences, found.cache_bytes), (0, 0, 0))

  @parameterized.parameters(
    ({"tensor": 0}, "tensor must be at least 1, got 0"),
    ({"layers": -1}, "layers must be at least 1, got -1"),
    ({"recent_window": -1}, "recent_window must not be negative, got -1"),
  )
  def test_models_that_are_none(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      dataclasses.replace(SMALL, **changes)

  def test_lengths_that_are_none(self):
    with self.assertRaisesRegex(ValueError, "kv_len must be at least 1, got 0"):
      plan.plan(SMALL, 2**20, 0, "nvfp4", "nvfp4")

  def test_heads_that_do_not_divide(self):
    with self.assertRaisesRegex(ValueError, "tensor must divide kv_heads, got 3 and 4"):
      dataclasses.replace(SMALL, tensor=3)

  @parameterized.parameters((2**30, 131_072), (100 * 2**30, 2**20), (2**50, 1), (0, 8192))
  def test_table_fits_a_terminal(self, budget, kv_len):
    wide = dataclasses.replace(SMALL, kv_heads=128, tensor=128, context=128, data=1024)
    for model in (SMALL, wide):
      printed = plan.lines(model, budget, kv_len)
      for line in printed:
        self.assertLessEqual(len(line), 100)
      rows = [re.split(r"\s+", line) for line in printed if re.match(r"(bf16|fp8|nvfp4), ", line)]
      parts = len(rows) // len(plan.FORMATS)  # two tables, where one would be too wide
      self.assertLen(rows, parts * len(plan.FORMATS))
      self.assertEqual(sum(len(row) - 2 for row in rows), 6 * len(plan.FORMATS))
      self.assertEqual("No page: the smallest" in "\n".join(printed), budget == 0)

  def run_main(self, *options) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
      try:
        return plan.main(list(options)), out.getvalue(), err.getvalue()
      except SystemExit as exit:
        return int(exit.code or 0), out.getvalue(), err.getvalue()

  def test_command(self):
    code, out, err = self.run_main("--kv-len", "1048576", "--layers", "1")
    self.assertEqual((code, err), (0, ""))
    self.assertIn("125.0 GiB a device for caches; sequences of 1,048,576 tokens", out)

  def test_the_table_says_of_what_its_numbers_are(self):
    """Two devices of a tensor axis are a group, of which there are four."""
    _, out, _ = self.run_main("--tensor", "2", "--data", "4", "--recent-window", "96")
    printed = out.splitlines()
    self.assertEndsWith(printed[0], "tensor 2, context 1, data 4: 4 groups of 2 devices")
    self.assertIn("its ring takes 12.00 MiB of each device", " ".join(printed[-2:]))
    head, _, *rows = [re.split(r" +", line) for line in printed[2:-2]]
    self.assertEqual(
      " ".join(head),
      "K, V pages a device GiB tokens a group tokens in all sequences a group sequences in all",
    )
    for row, formats in zip(rows, plan.FORMATS, strict=True):
      model = Model(32, 8, 128, 128, 64, tensor=2, data=4, recent_window=96)
      found = plan.plan(model, 125 * 2**30, 8192, *formats)
      numbers = found.group_tokens, found.tokens, found.group_sequences, found.sequences
      self.assertEqual(row[4:], [f"{number:,}" for number in numbers])
      self.assertEqual(numbers[1::2], tuple(4 * number for number in numbers[::2]))

  @parameterized.parameters(
    ("--k-format nvfp4 --v-format fp8", "nvfp4, fp8"),
    ("--k-format fp8", "fp8, fp8"),
    ("--v-format bf16", "nvfp4, bf16"),
  )
  def test_a_pair_of_formats(self, options, pair):
    """By the defaults of create; the others are not printed."""
    code, out, _ = self.run_main(*options.split(), "--k-mean")
    self.assertEqual(code, 0)
    *_, rule, row = out.splitlines()
    self.assertRegex(rule, "^-+$")
    self.assertTrue(row.startswith(pair), row)

  def test_a_mean_is_counted(self):
    """Where what it takes is a page's place: 32 layers, 8 heads of 128 and of 64 in V."""
    model = Model(layers=32, kv_heads=8, head_dim=128, v_head_dim=128, page_size=64)
    of = lambda **mean: plan.cache_bytes(dataclasses.replace(model, **mean), 416, "nvfp4", "nvfp4")
    budget = str(of() / 2**30)
    rows = []
    for options in ([], ["--k-mean"]):
      _, out, _ = self.run_main(
        "--memory-gib", budget, "--weights-gib", "0", "--k-format", "nvfp4", *options
      )
      rows.append(re.split(" +", out.splitlines()[-1])[2])
    self.assertEqual(rows, ["416", "415"])
    self.assertEqual(of(k_mean=True) - of(), 32 * 8 * 128 * 4)

  @parameterized.parameters(
    ("--k-format bf16 --recent-window 9", "recent_window must be 0 for a bf16 cache, got 9"),
    ("--k-format int4", "invalid choice: 'int4'"),
    ("--memory-gib nan", "memory_gib must be above 0, at most 1048576, got nan"),
    ("--memory-gib inf", "memory_gib must be above 0, at most 1048576, got inf"),
    ("--memory-gib -1", "memory_gib must be above 0, at most 1048576, got -1.0"),
    ("--weights-gib nan", "weights_gib must be from 0 to below memory_gib = 141.0, got nan"),
    ("--weights-gib -1", "weights_gib must be from 0 to below memory_gib = 141.0, got -1.0"),
    ("--weights-gib 141", "weights_gib must be from 0 to below memory_gib = 141.0, got 141.0"),
    ("--v-head-dim 0", "v_head_dim must be a multiple of 16 from 64 to 256, got 0"),
  )
  def test_options_that_are_none(self, options, message):
    code, out, err = self.run_main(*options.split())
    self.assertEqual((code, out), (2, ""))
    self.assertIn(message, err)


if __name__ == "__main__":
  absltest.main()
