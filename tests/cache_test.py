"""The cache's layout, byte by byte, and its bookkeeping."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized

import nvfp4_pallas as nv
from nvfp4_pallas import format as nvfp4
from tests.base import TestCase


def small_cache(**changes):
  arguments = {"num_pages": 4, "page_size": 16, "num_kv_heads": 3, "head_dim": 64}
  return nv.PagedKVCache.create(**(arguments | changes))


def raw(array) -> np.ndarray:
  return np.asarray(array).view(np.uint8)


class LayoutTest(TestCase):
  """Bytes at offsets computed here from the contract, not by the package's own indexing."""

  def test_nvfp4_bytes_of_a_structured_probe(self):
    """Block g of token t carries a magnitude that names (t, g); K and V carry different ones."""
    cache = small_cache(v_head_dim=128)
    tokens, heads, page_size = 20, 3, 16
    slots = np.random.default_rng(0).permutation(4 * page_size)[:tokens].astype(np.int32)

    def probe(head_dim, first):
      # e4m3 byte = first + (token + head) % 8 + 8 * block; element 0 of a block holds +6 s, 1 -3 s.
      byte = (
        first
        + (np.arange(tokens)[:, None, None] + np.arange(heads)[None, :, None]) % 8
        + 8 * np.arange(head_dim // 16)[None, None, :]
      ).astype(np.uint8)
      scale = byte.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
      x = np.zeros((*byte.shape, 16), np.float32)
      x[..., 0], x[..., 1] = 6 * scale, -3 * scale
      return byte, jnp.asarray(x.reshape(tokens, heads, head_dim), jnp.float32)

    k_byte, k = probe(64, 0x20)
    v_byte, v = probe(128, 0x11)
    cache = nv.append(cache, k, v, slot_mapping=jnp.asarray(slots))
    for pool, byte, head_dim in ((cache.k, k_byte, 64), (cache.v, v_byte, 128)):
      codes, scales = raw(pool.data).reshape(-1), raw(pool.block_scale).reshape(-1)
      for t, slot in enumerate(slots):
        page, offset = slot // page_size, slot % page_size
        for h in range(heads):
          row = (page * heads + h) * page_size + offset
          for g in range(head_dim // 16):
            self.assertEqual(scales[row * (head_dim // 16) + g], byte[t, h, g])
            block = codes[row * (head_dim // 2) + 8 * g :][:8]
            # 6 is code 7 in the low nibble, -3 is code 13 in the high one.
            self.assertSequenceEqual(block.tolist(), [0xD7] + [0] * 7)
      self.assertEqual(np.count_nonzero(scales), tokens * heads * head_dim // 16)

  @parameterized.parameters(("bf16", 2), ("fp8", 1))
  def test_wide_bytes(self, format, width):
    cache = small_cache(k_format=format)
    r = np.random.default_rng(1)
    k, v = (r.standard_normal((1, 3, 64)).astype(ml_dtypes.bfloat16) for _ in range(2))
    cache = nv.append(
      cache, jnp.asarray(k), jnp.asarray(v), slot_mapping=jnp.asarray([37], jnp.int32)
    )
    dtype = {"bf16": ml_dtypes.bfloat16, "fp8": ml_dtypes.float8_e4m3fn}[format]
    for pool, x in ((cache.k, k), (cache.v, v)):
      flat = raw(pool.data).reshape(-1)
      for h in range(3):
        start = (((37 // 16) * 3 + h) * 16 + 37 % 16) * 64 * width
        expected = x[0, h].astype(np.float32).astype(dtype).view(np.uint8)
        np.testing.assert_array_equal(flat[start : start + 64 * width], expected)

  def test_fp8_saturates_and_marks_non_finite(self):
    cache = small_cache(k_format="fp8", k_global_scale=0.5)
    k = np.zeros((1, 3, 64), np.float32)
    k[0, 0, :5] = 1e6, -1e6, np.inf, np.nan, 3.0
    cache = nv.append(
      cache, jnp.asarray(k), jnp.asarray(k), slot_mapping=jnp.zeros((1,), jnp.int32)
    )
    stored = np.asarray(cache.k.data[0, 0, 0]).astype(np.float32)
    np.testing.assert_array_equal(stored[:5], [448, -448, np.nan, np.nan, 6])

  def test_fp8_divides_exactly(self):
    """By a global scale that is no power of two, compiled, against numpy's own division."""
    cache = small_cache(k_format="fp8", k_global_scale=0.37, num_pages=64)
    k = np.random.default_rng(4).standard_normal((1024, 3, 64)).astype(ml_dtypes.bfloat16)
    slots = jnp.arange(1024, dtype=jnp.int32)
    append = jax.jit(lambda c, k, s: nv.append(c, k, k, slot_mapping=s))
    stored = np.asarray(append(cache, jnp.asarray(k), slots).k.data)
    expected = (k.astype(np.float32) / np.float32(0.37)).astype(ml_dtypes.float8_e4m3fn)
    got = np.swapaxes(stored, 1, 2).reshape(1024, 3, 64)
    np.testing.assert_array_equal(raw(got), raw(expected))


class CreateTest(TestCase):
  def test_what_the_caller_gave_survives_donation(self):
    scale = jnp.asarray([0.5, 1.0, 2.0], jnp.float32)
    mean = jnp.ones((3, 64))
    cache = small_cache(k_global_scale=scale, v_global_scale=scale, k_mean=mean)
    x = jnp.ones((1, 3, 64), jnp.bfloat16)
    append = jax.jit(lambda c, x, s: nv.append(c, x, x, slot_mapping=s), donate_argnums=0)
    append(cache, x, jnp.zeros((1,), jnp.int32))
    np.testing.assert_array_equal(scale, [0.5, 1.0, 2.0])
    np.testing.assert_array_equal(mean, 1)

  @parameterized.parameters(
    ("bf16", None, 4.0), ("fp8", None, 2.0), ("nvfp4", None, 9 / 8), ("fp8", "nvfp4", 25 / 16)
  )
  def test_bytes_per_token(self, k_format, v_format, per_element):
    cache = small_cache(k_format=k_format, v_format=v_format, head_dim=128)
    self.assertEqual(cache.bytes_per_token, 3 * 128 * per_element)
    leaves = [a for p in (cache.k, cache.v) for a in (p.data, p.block_scale) if a is not None]
    self.assertEqual(cache.nbytes, sum(a.nbytes for a in leaves))

  def test_is_a_pytree_with_static_metadata(self):
    cache = small_cache(k_format="nvfp4", v_format="fp8")
    leaves, structure = jax.tree.flatten(cache)
    self.assertLen(leaves, 5)
    self.assertEqual(jax.tree.unflatten(structure, leaves).formats, ("nvfp4", "fp8"))
    self.assertNotEqual(structure, jax.tree.structure(small_cache(k_format="fp8")))
    self.assertEqual(hash(structure), hash(jax.tree.structure(cache)))

  def test_levers_are_metadata_but_for_the_mean(self):
    mean = jnp.ones((3, 64))
    options = {"k_rotation": "hadamard", "scale_search": "four_over_six"}
    cache = small_cache(k_mean=mean, **options)
    leaves, structure = jax.tree.flatten(cache)
    self.assertLen(leaves, 7)
    self.assertNotEqual(structure, jax.tree.structure(small_cache(k_mean=mean)))
    self.assertEqual((cache.k.rotation, cache.v.rotation), ("hadamard", None))
    self.assertEqual(cache.v.scale_search, "four_over_six")
    self.assertEqual(cache.bytes_per_token, small_cache().bytes_per_token)

  @parameterized.named_parameters(
    ("format", {"k_format": "int4"}, "k_format must be one of .* got 'int4'"),
    ("v_format", {"v_format": "e4m3"}, "v_format must be one of .* got 'e4m3'"),
    ("page_size", {"page_size": 48}, "page_size must be one of .* got 48"),
    ("head_dim", {"head_dim": 72}, "head_dim must be a multiple of 16 from 64 to 256, got 72"),
    ("small_dim", {"head_dim": 48}, "head_dim must be a multiple of 16 from 64 to 256, got 48"),
    ("large_dim", {"v_head_dim": 272}, "v_head_dim must be a multiple .* got 272"),
    ("pages", {"num_pages": 0}, "num_pages must be at least 1, got 0"),
    ("heads", {"num_kv_heads": 0}, "num_kv_heads must be at least 1, got 0"),
    ("half_pages", {"num_pages": 2.0}, "num_pages must be a whole number, got 2.0"),
    ("true_heads", {"num_kv_heads": True}, "num_kv_heads must be a whole number, got True"),
    ("text_page", {"page_size": "16"}, "page_size must be a whole number, got '16'"),
    ("float_page", {"page_size": 16.0}, "page_size must be a whole number, got 16.0"),
    ("text_dim", {"head_dim": "64"}, "head_dim must be a whole number, got '64'"),
    ("float_dim", {"v_head_dim": 64.0}, "v_head_dim must be a whole number, got 64.0"),
    ("text_scale", {"k_global_scale": "1"}, "k_global_scale must be a number or .* got '1'"),
    ("no_scale", {"v_global_scale": None}, "v_global_scale must be a number or .* got None"),
    ("scale", {"k_global_scale": 0.0}, "k_global_scale must be positive .* got 0.0"),
    ("v_scale", {"v_global_scale": float("nan")}, "v_global_scale must be positive .* got nan"),
    ("scale_shape", {"k_global_scale": jnp.ones((2,))}, r"k_global_scale must broadcast to \(3,\)"),
    ("bf16", {"k_format": "bf16", "k_global_scale": 2.0}, "must be 1 for a bf16 cache, got 2.0"),
  )
  def test_error_names_argument_rule_and_value(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      small_cache(**changes)


class CopyPagesTest(TestCase):
  @parameterized.parameters("bf16", "fp8", "nvfp4")
  def test_copies_bytes_and_nothing_else(self, format):
    r = np.random.default_rng(2)
    cache = jax.tree.map(
      lambda a: jnp.asarray(r.integers(0, 256, raw(a).shape, dtype=np.uint8).view(a.dtype)),
      small_cache(k_format=format, num_pages=6),
    )
    source, target = np.array([1, 4, 2, 9, 3, -1, 0]), np.array([3, 0, 1, 2, 17, 5, -1])
    copied = jax.jit(nv.copy_pages)(
      cache, jnp.asarray(source, jnp.int32), jnp.asarray(target, jnp.int32)
    )
    # (9 -> 2), (3 -> 17), (-1 -> 5) and (0 -> -1) leave the pool on one side: skipped.
    expected_pages = [4, 2, 2, 1, 4, 5]
    for pool in ("k", "v"):
      for name in ("data", "block_scale"):
        before, after = getattr(getattr(cache, pool), name), getattr(getattr(copied, pool), name)
        if before is not None:
          np.testing.assert_array_equal(raw(after), raw(before)[expected_pages])
    for pool in ("k", "v"):
      scales = getattr(cache, pool).global_scale, getattr(copied, pool).global_scale
      if scales[0] is not None:
        np.testing.assert_array_equal(*(raw(s) for s in scales))

  @parameterized.parameters(
    (jnp.zeros((2,), jnp.int32), jnp.zeros((3,), jnp.int32), "equally long"),
    (jnp.zeros((2,)), jnp.zeros((2,), jnp.int32), r"source must be int32 \[n\], got float32"),
    (jnp.zeros((2,), jnp.int32), jnp.zeros((2, 1), jnp.int32), r"target must be int32 \[n\]"),
  )
  def test_errors(self, source, target, message):
    with self.assertRaisesRegex(ValueError, message):
      nv.copy_pages(small_cache(), source, target)


class ForeignCacheTest(TestCase):
  """A cache this version does not understand is refused before anything is written."""

  def append(self, cache):
    x = jnp.zeros((1, 3, 64), jnp.bfloat16)
    nv.append(cache, x, x, slot_mapping=jnp.zeros((1,), jnp.int32))

  @parameterized.named_parameters(
    ("version", lambda c: dataclasses.replace(c, version=2), "got 'head_major' version 2"),
    ("layout", lambda c: dataclasses.replace(c, layout="token_major"), "got 'token_major'"),
    (
      "no_scales",
      lambda c: dataclasses.replace(c, k=dataclasses.replace(c.k, block_scale=None)),
      "cache.k.block_scale of format nvfp4 must be float8_e4m3fn .* got None",
    ),
    (
      "scale_dtype",
      lambda c: dataclasses.replace(
        c, v=dataclasses.replace(c.v, block_scale=c.v.block_scale.astype(jnp.float32))
      ),
      "cache.v.block_scale .* must be float8_e4m3fn .* got float32",
    ),
    (
      "data_dtype",
      lambda c: dataclasses.replace(c, k=dataclasses.replace(c.k, format="fp8")),
      "cache.k.data of format fp8 must be float8_e4m3fn, got uint8",
    ),
    (
      "no_global_scale",
      lambda c: dataclasses.replace(c, k=dataclasses.replace(c.k, global_scale=None)),
      r"cache.k.global_scale .* must be float32 \(3,\), got None",
    ),
    (
      "negative_global_scale",
      lambda c: dataclasses.replace(
        c, k=dataclasses.replace(c.k, global_scale=jnp.asarray([1.0, -2.0, 1.0]))
      ),
      "cache.k.global_scale must be positive .* got -2.0",
    ),
    (
      "uneven",
      lambda c: dataclasses.replace(c, v=small_cache(num_pages=5).v),
      "K and V must have the same num_pages, got 4 and 5",
    ),
    (
      "scalar_global_scale",
      lambda c: dataclasses.replace(c, k=dataclasses.replace(c.k, global_scale=jnp.float32(1))),
      r"cache.k.global_scale .* must be float32 \(3,\), got float32 \(\)",
    ),
    (
      "uneven_heads",
      lambda c: dataclasses.replace(c, v=small_cache(num_kv_heads=2).v),
      "K and V must have the same num_kv_heads, got 3 and 2",
    ),
    (
      "uneven_page_size",
      lambda c: dataclasses.replace(c, v=small_cache(page_size=32).v),
      "K and V must have the same page_size, got 16 and 32",
    ),
    ("stacked", lambda c: jax.tree.map(lambda a: a[None], c), "use vmap or scan over a layer axis"),
  )
  def test_refused(self, change, message):
    with self.assertRaisesRegex(ValueError, message):
      self.append(change(small_cache()))
    ids = jnp.zeros((1,), jnp.int32)
    with self.assertRaisesRegex(ValueError, message):
      nv.copy_pages(change(small_cache()), ids, ids)


class EncodeRowsTest(TestCase):
  def test_append_is_bit_identical_to_pack(self):
    r = np.random.default_rng(3)
    cache = small_cache(k_global_scale=jnp.asarray([0.2, 1.0, 3.3]), v_global_scale=0.7)
    k, v = (jnp.asarray(r.standard_normal((7, 3, 64)), jnp.bfloat16) for _ in range(2))
    slots = jnp.asarray([60, 3, 16, 17, 0, 45, 31], jnp.int32)
    cache = nv.append(cache, k, v, slot_mapping=slots)
    for pool, x in ((cache.k, k), (cache.v, v)):
      packed = nvfp4.encode(x, pool.global_scale)
      page, offset = np.asarray(slots) // 16, np.asarray(slots) % 16
      np.testing.assert_array_equal(raw(pool.data)[page, :, offset], packed.codes)
      np.testing.assert_array_equal(raw(pool.block_scale)[page, :, offset], raw(packed.block_scale))


if __name__ == "__main__":
  absltest.main()
