"""RaggedBatch: who owns which row, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import nvfp4_pallas as nv
from nvfp4_pallas import batch as batch_lib
from tests.base import TestCase


def i32(*values):
  return jnp.asarray(values, jnp.int32)


GOOD = nv.RaggedBatch(
  page_table=jnp.zeros((3, 2), jnp.int32), kv_lens=i32(5, 0, 32), cu_q_lens=i32(0, 5, 5, 6)
)


class PlacesTest(TestCase):
  def test_against_a_loop(self):
    r = np.random.default_rng(0)
    for _ in range(20):
      q_lens = r.integers(0, 4, 6) * r.integers(0, 2, 6)
      kv_lens = q_lens + r.integers(0, 9, 6)
      cu = np.cumsum([0, *q_lens])
      batch = nv.RaggedBatch(jnp.zeros((6, 9), jnp.int32), i32(*kv_lens), i32(*cu))
      tokens = int(cu[-1]) + 2
      seq, position, real = batch_lib.token_places(batch, tokens)
      np.testing.assert_array_equal(real, np.arange(tokens) < cu[-1])
      np.testing.assert_array_equal(batch.q_lens, q_lens)
      row = 0
      for s in range(6):
        for i in range(q_lens[s]):
          self.assertEqual((int(seq[row]), int(position[row])), (s, kv_lens[s] - q_lens[s] + i))
          row += 1

  def test_for_decode(self):
    batch = nv.RaggedBatch.for_decode(jnp.zeros((3, 2), jnp.int32), i32(1, 2, 3))
    np.testing.assert_array_equal(batch.cu_q_lens, [0, 1, 2, 3])


class ChecksTest(TestCase):
  def check(self, batch, num_tokens=8):
    batch_lib.check_batch(batch, num_tokens=num_tokens, page_size=16)

  def test_good(self):
    self.check(GOOD)

  @parameterized.named_parameters(
    ("table_rank", {"page_table": i32(1, 2)}, r"page_table must be .* got \(2,\)"),
    ("lens_shape", {"kv_lens": i32(1, 2)}, r"kv_lens must have shape \(3,\), got \(2,\)"),
    ("cu_shape", {"cu_q_lens": i32(0, 1, 2)}, r"cu_q_lens must have shape \(4,\), got \(3,\)"),
    ("dtype", {"kv_lens": jnp.ones((3,))}, "kv_lens must be int32, got float32"),
    ("start", {"cu_q_lens": i32(1, 5, 5, 6)}, "cu_q_lens must start at 0, got 1"),
    ("ascend", {"cu_q_lens": i32(0, 5, 4, 6)}, "cu_q_lens must ascend, got 5 then 4 at 1 and 2"),
    ("end", {"cu_q_lens": i32(0, 5, 5, 9)}, "cu_q_lens must end at most at 8 tokens, got 9"),
    ("negative", {"kv_lens": i32(5, -1, 3)}, "kv_lens must not be negative, got -1 at 1"),
    (
      "narrow",
      {"kv_lens": i32(5, 0, 33)},
      r"page_table must be wide enough .* 2 pages of 16 hold 32 tokens, kv_lens\[2\] is 33",
    ),
  )
  def test_error_names_argument_rule_and_value(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      self.check(dataclasses.replace(GOOD, **changes))

  def test_what_is_known_is_checked_beside_what_is_not(self):
    too_long, falling = i32(5, 0, 33), i32(0, 5, 4, 6)

    @jax.jit
    def f(table):
      self.check(dataclasses.replace(GOOD, page_table=table, kv_lens=too_long))

    with self.assertRaisesRegex(ValueError, "page_table must be wide enough"):
      f(GOOD.page_table)

    @jax.jit
    def g(kv_lens):
      self.check(dataclasses.replace(GOOD, kv_lens=kv_lens, cu_q_lens=falling))

    with self.assertRaisesRegex(ValueError, "cu_q_lens must ascend"):
      g(GOOD.kv_lens)

  def test_values_are_not_asked_for_in_jit(self):
    def f(batch):
      self.check(batch)
      return batch.kv_lens

    jax.jit(f)(dataclasses.replace(GOOD, kv_lens=i32(5, 0, 33)))


if __name__ == "__main__":
  absltest.main()
