"""append: which bytes change, which do not, and that nothing is written after an error."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import nvfp4_pallas as nv
from tests.base import TestCase

HEADS, DIM, PAGE = 2, 64, 16


def random_cache(format="nvfp4", num_pages=6, seed=0):
  """Every byte random, so that a byte wrongly written shows."""
  r = np.random.default_rng(seed)
  cache = nv.PagedKVCache.create(
    num_pages=num_pages, page_size=PAGE, num_kv_heads=HEADS, head_dim=DIM, k_format=format
  )

  def scramble(a):
    if a.dtype == jnp.float32:  # global scales stay
      return a
    shape = np.asarray(a).view(np.uint8).shape
    return jnp.asarray(r.integers(0, 256, shape, dtype=np.uint8).view(a.dtype))

  return jax.tree.map(scramble, cache)


def rows(tokens, seed=1, dtype=jnp.bfloat16):
  r = np.random.default_rng(seed)
  return tuple(jnp.asarray(r.standard_normal((tokens, HEADS, DIM)), dtype) for _ in range(2))


def raw_arrays(cache):
  return [np.asarray(a).view(np.uint8) for a in jax.tree.leaves(cache)]


class SlotMappingTest(TestCase):
  @parameterized.parameters("bf16", "fp8", "nvfp4")
  def test_skipped_slots_and_untouched_bytes(self, format):
    cache = random_cache(format)
    slots = np.array([5, -1, 95, 96, 40, 2**31 - 1, -(2**31), 17], np.int32)
    k, v = rows(len(slots))
    append = jax.jit(lambda c, k, v, s: nv.append(c, k, v, slot_mapping=s))
    after = append(cache, k, v, jnp.asarray(slots))
    inside = (slots >= 0) & (slots < 96)
    only_inside = append(cache, k[inside], v[inside], jnp.asarray(slots[inside]))
    written = np.zeros((6, PAGE), bool)
    written[slots[inside] // PAGE, slots[inside] % PAGE] = True
    for before, got, want in zip(*map(raw_arrays, (cache, after, only_inside)), strict=True):
      np.testing.assert_array_equal(got, want)
      if got.ndim == 4:
        changed = (got != before).any(axis=(1, 3))
        np.testing.assert_array_equal(changed, written)

  def test_all_skipped_and_no_tokens(self):
    cache = random_cache()
    for tokens in (0, 3):
      k, v = rows(tokens)
      after = nv.append(cache, k, v, slot_mapping=jnp.full((tokens,), -1, jnp.int32))
      jax.tree.map(np.testing.assert_array_equal, raw_arrays(after), raw_arrays(cache))

  def test_duplicate_slots_keep_one_of_the_rows_whole(self):
    cache = random_cache()
    k, v = rows(2)
    both = nv.append(cache, k, v, slot_mapping=jnp.asarray([7, 7], jnp.int32))
    single = [
      nv.append(cache, k[i : i + 1], v[i : i + 1], slot_mapping=jnp.asarray([7], jnp.int32))
      for i in range(2)
    ]
    matches = [
      all(np.array_equal(a, b) for a, b in zip(raw_arrays(both), raw_arrays(s), strict=True))
      for s in single
    ]
    self.assertTrue(any(matches))

  @parameterized.parameters("float16", "float32")
  def test_input_dtypes(self, dtype):
    k, v = rows(3, dtype=dtype)
    slots = jnp.asarray([1, 2, 3], jnp.int32)
    after = nv.append(random_cache("bf16"), k, v, slot_mapping=slots)
    stored = np.asarray(after.k.data[0, :, 1:4]).swapaxes(0, 1)
    np.testing.assert_array_equal(stored, np.asarray(k.astype(jnp.bfloat16)))


class BatchTest(TestCase):
  def test_rows_go_to_their_sequences_newest_places(self):
    cache = random_cache()
    table = jnp.asarray([[4, 2, 9], [0, 9, 9], [5, 1, 9]], jnp.int32)
    batch = nv.RaggedBatch(
      table, jnp.asarray([20, 3, 17], jnp.int32), jnp.asarray([0, 3, 3, 5], jnp.int32)
    )
    k, v = rows(7)  # two rows of padding
    slots = [2 * 16 + 1, 2 * 16 + 2, 2 * 16 + 3, 5 * 16 + 15, 1 * 16 + 0]
    np.testing.assert_array_equal(nv.slot_mapping(batch, PAGE, 7), [*slots, -1, -1])
    by_batch = nv.append(cache, k, v, batch)
    by_slot = nv.append(cache, k, v, slot_mapping=jnp.asarray([*slots, -1, -1], jnp.int32))
    jax.tree.map(np.testing.assert_array_equal, raw_arrays(by_batch), raw_arrays(by_slot))

  def test_slots_that_do_not_exist(self):
    """More new rows than tokens, and a table too short, in jit where values are not known."""
    table = jnp.asarray([[3]], jnp.int32)
    slots = jax.jit(lambda b: nv.slot_mapping(b, PAGE, 4))
    long_q = nv.RaggedBatch(table, jnp.asarray([2], jnp.int32), jnp.asarray([0, 4], jnp.int32))
    np.testing.assert_array_equal(slots(long_q), [-1, -1, 48, 49])
    short = nv.RaggedBatch(table, jnp.asarray([18], jnp.int32), jnp.asarray([0, 4], jnp.int32))
    np.testing.assert_array_equal(slots(short), [3 * 16 + 14, 3 * 16 + 15, -1, -1])

  def test_page_numbers_past_int32_slots(self):
    for page in (2**27, 2**28 + 3, 2**31 - 1):
      batch = nv.RaggedBatch(
        jnp.asarray([[page]], jnp.int32),
        jnp.asarray([2], jnp.int32),
        jnp.asarray([0, 2], jnp.int32),
      )
      np.testing.assert_array_equal(nv.slot_mapping(batch, PAGE, 2), [-1, -1])

  def test_no_sequences(self):
    batch = nv.RaggedBatch(
      jnp.zeros((0, 3), jnp.int32), jnp.zeros((0,), jnp.int32), jnp.zeros((1,), jnp.int32)
    )
    np.testing.assert_array_equal(nv.slot_mapping(batch, PAGE, 2), [-1, -1])


class ErrorsTest(TestCase):
  @parameterized.named_parameters(
    ("k_shape", {"k": jnp.zeros((2, HEADS, 32))}, r"k must be \[tokens, 2, 64\], got \(2, 2, 32\)"),
    ("v_rank", {"v": jnp.zeros((2, DIM))}, r"v must be \[tokens, 2, 64\], got \(2, 64\)"),
    ("dtype", {"k": jnp.zeros((2, HEADS, DIM), jnp.int8)}, "k must be bfloat16.* got int8"),
    ("tokens", {"k": jnp.zeros((3, HEADS, DIM))}, "equally many tokens, got 3 and 2"),
    ("both", {"batch": True}, "exactly one of batch and slot_mapping"),
    ("neither", {"slot_mapping": None}, "exactly one of batch and slot_mapping"),
    (
      "slots_shape",
      {"slot_mapping": jnp.zeros((3,), jnp.int32)},
      r"slot_mapping must be int32 \[2\], got int32 \(3,\)",
    ),
    (
      "slots_dtype",
      {"slot_mapping": jnp.zeros((2,), jnp.float32)},
      r"slot_mapping must be int32 \[2\], got float32",
    ),
    ("slots_list", {"slot_mapping": [0, 1]}, "slot_mapping must be an array, got list"),
    ("k_list", {"k": [1.0]}, "k must be an array, got list"),
    ("who", {"implementation": "cuda"}, "implementation must be one of .* got 'cuda'"),
  )
  def test_error_names_argument_rule_and_value(self, changes, message):
    arguments = {
      "cache": random_cache(),
      "k": jnp.zeros((2, HEADS, DIM)),
      "v": jnp.zeros((2, HEADS, DIM)),
      "slot_mapping": jnp.zeros((2,), jnp.int32),
    } | changes
    if arguments.get("batch") is True:
      arguments["batch"] = nv.RaggedBatch.for_decode(
        jnp.zeros((2, 1), jnp.int32), jnp.ones((2,), jnp.int32)
      )
    with self.assertRaisesRegex(ValueError, message):
      nv.append(**arguments)

  def test_batch_that_does_not_count_its_new_tokens(self):
    k, v = rows(4)
    batch = nv.RaggedBatch(
      jnp.zeros((1, 1), jnp.int32), jnp.asarray([2], jnp.int32), jnp.asarray([0, 4], jnp.int32)
    )
    with self.assertRaisesRegex(ValueError, r"kv_lens must count .* kv_lens\[0\] is 2 for 4"):
      nv.append(random_cache(), k, v, batch)

  def test_a_free_place(self):
    """Its row goes nowhere; one that has tokens, or more rows than one, was not counted."""
    k, v = rows(2)
    cache, table = random_cache(), jnp.asarray([[1], [0]], jnp.int32)
    batch = nv.RaggedBatch.for_decode(table, jnp.asarray([3, 0], jnp.int32))
    one = nv.RaggedBatch.for_decode(table[:1], batch.kv_lens[:1])
    for append in (nv.append, jax.jit(nv.append)):
      with nv.debug_checks():
        got, want = append(cache, k, v, batch), append(cache, k[:1], v[:1], one)
      for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))
    two = dataclasses.replace(batch, cu_q_lens=jnp.asarray([0, 0, 2], jnp.int32))
    with self.assertRaisesRegex(ValueError, r"kv_lens\[1\] is 0 for 2 new rows"):
      nv.append(cache, k, v, two)

  def test_named_implementation_that_cannot_run(self):
    k, v = rows(1)
    for name in ("mosaic_sm90", "mosaic_sm100", "triton_sm120"):
      with self.assertRaisesRegex(NotImplementedError, f"'{name}' cannot run: "):
        nv.append(
          random_cache(), k, v, slot_mapping=jnp.zeros((1,), jnp.int32), implementation=name
        )


if __name__ == "__main__":
  absltest.main()
