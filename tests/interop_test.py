"""Pages of other engines: built here element by element from their descriptions."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized

import nvfp4_pallas as nv
from nvfp4_pallas import interop
from tests.base import TestCase

PAGES, HEADS, PAGE = 3, 2, 16
SIZES: dict[str, Any] = {"page_size": PAGE, "num_kv_heads": HEADS, "head_dim": 64}


def random_cache(head_dim=64, k_scale=0.5, v_scale=3.0, page_size=PAGE) -> nv.PagedKVCache:
  r = np.random.default_rng(head_dim)

  def pool(scale):
    shape = PAGES, HEADS, page_size
    codes = r.integers(0, 256, (*shape, head_dim // 2), dtype=np.uint8)
    scales = r.integers(0, 0x7F, (*shape, head_dim // 16), dtype=np.uint8)
    scales = scales.view(ml_dtypes.float8_e4m3fn)
    globals_ = jnp.full((HEADS,), scale, jnp.float32)
    return nv.PagePool(jnp.asarray(codes), jnp.asarray(scales), globals_, "nvfp4")

  return nv.PagedKVCache(k=pool(k_scale), v=pool(v_scale))


def as_bytes(array) -> np.ndarray:
  return np.asarray(array).view(np.uint8)


def v_scale_place(order: str, t: int, s: int, blocks: int) -> int:
  """Where a page's head has the scale of token t and block s, as the engines' sources have it."""
  if order == "trtllm":
    return (t // 4) * 4 * blocks + s * 4 + t % 4
  if order == "vllm":
    row, column = (t // 4) * 4 + s // (blocks // 4), (s % (blocks // 4)) * 4 + t % 4
    return row * blocks + column
  return t * blocks + s


class InteropTest(TestCase):
  def check_equal(self, got: nv.PagedKVCache, want: nv.PagedKVCache):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      self.assertEqual((a.dtype, a.shape), (b.dtype, b.shape))
      np.testing.assert_array_equal(as_bytes(a), as_bytes(b))

  @parameterized.product(layout=interop.LAYOUTS, v_scales=interop.V_SCALES, head_dim=(64, 128))
  def test_flashinfer(self, layout, v_scales, head_dim):
    cache = random_cache(head_dim)
    pages = interop.to_flashinfer(cache, layout=layout, v_scales=v_scales)
    blocks = head_dim // 16
    for name in ("k", "v"):
      pool, codes = getattr(cache, name), as_bytes(getattr(pages, name))
      scales = as_bytes(getattr(pages, f"{name}_scale"))
      order = v_scales if name == "v" else "linear"
      if layout == "NHD":
        self.assertEqual(codes.shape, (PAGES, PAGE, HEADS, head_dim // 2))
        codes, scales = codes.transpose(0, 2, 1, 3), scales.transpose(0, 2, 1, 3)
      np.testing.assert_array_equal(codes, as_bytes(pool.data))
      flat = scales.reshape(PAGES, HEADS, -1)
      for t in range(PAGE):
        for s in range(blocks):
          at = v_scale_place(order, t, s, blocks)
          np.testing.assert_array_equal(flat[:, :, at], as_bytes(pool.block_scale)[:, :, t, s])
    self.assertEqual((pages.k_global_scale, pages.v_global_scale), (0.5, 3.0))
    self.check_equal(interop.from_flashinfer(pages, layout=layout, v_scales=v_scales), cache)

  @parameterized.product(layout=interop.LAYOUTS, v_scales=interop.V_SCALES)
  def test_vllm(self, layout, v_scales):
    """Every byte of every page, at the place that its region, head and token lead to."""
    cache = random_cache(128)
    built = np.full((PAGES, HEADS * PAGE * 2 * 72), -1, np.int64)
    rows = HEADS * PAGE
    for begin, pool, order in ((0, cache.k, "linear"), (rows * 72, cache.v, v_scales)):
      codes, scales = as_bytes(pool.data), as_bytes(pool.block_scale)
      scale_begin = begin + rows * 64
      for head in range(HEADS):
        row_of = lambda t, head=head: head * PAGE + t if layout == "HND" else t * HEADS + head
        for t in range(PAGE):
          at = begin + 64 * row_of(t)
          built[:, at : at + 64] = codes[:, head, t]
          for s in range(8):
            row, column = divmod(v_scale_place(order, t, s, 8), 8)
            built[:, scale_begin + 8 * row_of(row) + column] = scales[:, head, t, s]
    pages = interop.to_vllm(cache, layout=layout, v_scales=v_scales)
    self.assertEqual(pages.buffer.dtype, jnp.uint8)
    np.testing.assert_array_equal(pages.buffer, built)
    self.assertEqual((pages.k_global_scale, pages.v_global_scale), (0.5, 3.0))
    sizes = {"page_size": PAGE, "num_kv_heads": HEADS, "head_dim": 128}
    back = interop.from_vllm(pages, **sizes, layout=layout, v_scales=v_scales)
    self.check_equal(back, cache)

  @parameterized.product(layout=interop.LAYOUTS, host=(True, False))
  def test_views_of_a_buffer(self, layout, host):
    """Each byte of a random buffer in each of its shapes; with numpy they are the buffer's own."""
    buffer = np.random.default_rng(0).integers(1, 256, (PAGES, HEADS * PAGE * 72), dtype=np.uint8)
    tokens = (HEADS, PAGE) if layout == "HND" else (PAGE, HEADS)
    shapes = [(HEADS * PAGE * 72,), (2, *tokens, 36)]
    if layout == "HND":
      shapes.append((2 * HEADS, PAGE, 36))
    rows = HEADS * PAGE
    begins = {
      "k": (0, 32),
      "k_scale": (rows * 32, 4),
      "v": (rows * 36, 32),
      "v_scale": (rows * 68, 4),
    }
    for shape in shapes:
      shaped = buffer.copy().reshape(PAGES, *shape)
      pages: Any = interop.PackedPages(shaped if host else jnp.asarray(shaped), 0.5, 3.0)
      views = interop.vllm_views(pages, **SIZES, layout=layout)
      self.assertEqual((views.k_global_scale, views.v_global_scale), (0.5, 3.0))
      for name, (begin, width) in begins.items():
        view = getattr(views, name)
        self.assertEqual(view.dtype, jnp.float8_e4m3fn if "scale" in name else jnp.uint8)
        self.assertEqual(view.shape, (PAGES, *tokens, width))
        for head in range(HEADS):
          for t in range(PAGE):
            at = begin + width * (head * PAGE + t if layout == "HND" else t * HEADS + head)
            row = view[:, head, t] if layout == "HND" else view[:, t, head]
            np.testing.assert_array_equal(as_bytes(row), buffer[:, at : at + width])
        if host:
          view[1] = np.zeros((), view.dtype)  # is in the buffer
      if host:
        self.assertFalse(shaped[1].any())
        np.testing.assert_array_equal(shaped[2].reshape(-1), buffer[2])

  @parameterized.parameters("HND", "NHD")
  def test_vllm_in_its_own_shapes(self, layout):
    cache = random_cache(128)
    pages = interop.to_vllm(cache, layout=layout)
    sizes = {"page_size": PAGE, "num_kv_heads": HEADS, "head_dim": 128, "layout": layout}
    tokens = (HEADS, PAGE) if layout == "HND" else (PAGE, HEADS)
    shapes = [(2, *tokens, 72)] + [(2 * HEADS, PAGE, 72)] * (layout == "HND")
    for shape in shapes:
      shaped = dataclasses.replace(pages, buffer=pages.buffer.reshape(PAGES, *shape))
      self.check_equal(interop.from_vllm(shaped, **sizes), cache)
    rows = np.asarray(pages.buffer).reshape(PAGES, 2, *tokens, 72)
    moved = np.ascontiguousarray(rows.swapaxes(2, 3)).swapaxes(
      2, 3
    )  # heads and tokens change places
    with self.assertRaisesRegex(ValueError, "buffer must lie in memory row by row, .* strides"):
      interop.vllm_views(dataclasses.replace(pages, buffer=moved), **sizes)
    if layout == "NHD":
      packed = dataclasses.replace(pages, buffer=pages.buffer.reshape(PAGES, 2 * HEADS, PAGE, 72))
      with self.assertRaisesRegex(
        ValueError,
        r"buffer must be uint8 \[pages, 4608\] or \[pages, 2, 16, 2, 72\] for 2 heads of 128, "
        r"pages of 16 and NHD, got uint8 \[3, 4, 16, 72\]",
      ):
        interop.from_vllm(packed, **sizes)

  def test_arrays_of_the_host_may_change_afterwards(self):
    """An engine writes on; the cache stays."""
    cache = random_cache()
    pages: Any = interop.to_vllm(cache)
    pages = dataclasses.replace(pages, buffer=np.array(pages.buffer))
    got = interop.from_vllm(pages, **SIZES)
    pages.buffer[:] = 0
    self.check_equal(got, cache)
    pages = interop.to_flashinfer(cache, layout="HND")
    arrays = {name: np.array(getattr(pages, name)) for name in interop.ARRAYS}
    got = interop.from_flashinfer(dataclasses.replace(pages, **arrays), layout="HND")
    for array in arrays.values():
      array[:] = 0
    self.check_equal(got, cache)

  def test_sglang(self):
    cache = random_cache()
    slots = interop.to_sglang(cache)
    for name in ("k", "v"):
      pool = getattr(cache, name)
      for slots_array, pages in (
        (getattr(slots, name), pool.data),
        (getattr(slots, f"{name}_scale"), pool.block_scale),
      ):
        self.assertEqual(slots_array.shape, (PAGES * PAGE, HEADS, pages.shape[-1]))
        for slot in range(PAGES * PAGE):
          found, stored = as_bytes(slots_array)[slot], as_bytes(pages)
          np.testing.assert_array_equal(found, stored[slot // PAGE, :, slot % PAGE])
    self.check_equal(interop.from_sglang(slots, page_size=PAGE), cache)

  def test_values_stay(self):
    """What is attended to afterwards is the same, to the bit."""
    cache = random_cache()
    batch = nv.RaggedBatch.for_decode(jnp.asarray([[2, 0, 1]]), jnp.asarray([40]))
    q = jax.random.normal(jax.random.key(0), (1, 4, 64), jnp.bfloat16)
    moved = interop.from_flashinfer(interop.to_flashinfer(cache))
    for a, b in zip(
      *(nv.decode(q, c, batch, read_path="nvfp4_dequant") for c in (moved, cache)), strict=True
    ):
      np.testing.assert_array_equal(as_bytes(a), as_bytes(b))

  @parameterized.parameters(
    ("decode", 0.25, 0.25),
    ("encode", 4.0, 0.25),
    ("amax_448", 112.0, 0.25),
    ("amax_2688", 672, 0.25),
  )
  def test_global_scales(self, convention, value, decode):
    self.assertEqual(interop.decode_global_scale(value, convention), decode)
    self.assertEqual(interop.foreign_global_scale(decode, convention), value)

  @parameterized.parameters(
    (1.0, "amax", "convention must be one of .*'amax'"),
    (0.0, "encode", "finite and positive, got 0.0"),
    (float("nan"), "decode", "finite and positive, got nan"),
  )
  def test_global_scales_that_are_none(self, value, convention, message):
    with self.assertRaisesRegex(ValueError, message):
      interop.decode_global_scale(value, convention)
    if value != 1:
      with self.assertRaisesRegex(ValueError, "finite and positive"):
        interop.foreign_global_scale(value, convention)

  @parameterized.parameters(
    (5e-324, "encode", "within .*, got 5e-324 in 'encode', which is inf"),
    (5e-324, "amax_2688", "within .*, got 5e-324 in 'amax_2688', which is 0.0"),
    (2.0**65, "decode", "within .*2.*64.*, got 3.6"),
    (None, "decode", "must be a number, known outside jit, got None"),
  )
  def test_global_scales_that_no_cache_takes(self, value, convention, message):
    with self.assertRaisesRegex(ValueError, "a global scale .*" + message):
      interop.decode_global_scale(value, convention)
    with self.assertRaisesRegex(ValueError, "a global scale must mean a multiplier within"):
      interop.foreign_global_scale(1e308, "amax_2688")
    pages = dataclasses.replace(interop.to_vllm(random_cache()), v_global_scale=value)
    if convention == "decode":
      with self.assertRaisesRegex(ValueError, "v_global_scale .*" + message):
        interop.from_vllm(pages, page_size=PAGE, num_kv_heads=HEADS, head_dim=64)

  @parameterized.parameters("k_scale", "v_scale")
  def test_block_scales_with_a_sign(self, name):
    pages = interop.to_flashinfer(random_cache(), layout="HND")
    scale = as_bytes(getattr(pages, name)).copy()
    scale[1, 0, 3, 2] = 0xB8
    signed = dataclasses.replace(pages, **{name: jnp.asarray(scale.view(ml_dtypes.float8_e4m3fn))})
    with self.assertRaisesRegex(
      ValueError, rf"{name} must not have a sign, got -1.0 at \[1, 0, 3, 2\]"
    ):
      interop.from_flashinfer(signed, layout="HND")

  def test_what_a_layout_cannot_hold(self):
    cache = random_cache()
    k = dataclasses.replace(cache.k, global_scale=jnp.asarray([1.0, 2.0]))
    with self.assertRaisesRegex(ValueError, r"one global scale a layer, k's .*\[1.0, 2.0\]"):
      interop.to_flashinfer(dataclasses.replace(cache, k=k))
    with self.assertRaisesRegex(ValueError, "outside jit"):
      jax.jit(lambda c: interop.to_flashinfer(c).k)(cache)
    fp8 = nv.PagedKVCache.create(
      num_pages=1, page_size=16, num_kv_heads=1, head_dim=64, k_format="fp8"
    )
    with self.assertRaisesRegex(NotImplementedError, "holds nvfp4, k is fp8"):
      interop.to_vllm(fp8)
    other_v = dataclasses.replace(cache, v=random_cache(128).v)
    with self.assertRaisesRegex(NotImplementedError, "one head dim, the cache has 64 and 128"):
      interop.to_vllm(other_v)
    self.check_equal(interop.from_flashinfer(interop.to_flashinfer(other_v)), other_v)
    with self.assertRaisesRegex(ValueError, "head_dim of 64, got 16 and 96"):
      interop.to_flashinfer(random_cache(96), v_scales="trtllm")
    with self.assertRaisesRegex(ValueError, "layout must be one of .*'NDH'"):
      interop.to_vllm(cache, layout="NDH")
    with self.assertRaisesRegex(ValueError, "v_scales must be one of .*'swizzled'"):
      interop.to_flashinfer(cache, v_scales="swizzled")

  def test_what_is_no_such_layout(self):
    cache = random_cache()
    pages, packed = interop.to_flashinfer(cache), interop.to_vllm(cache)
    with self.assertRaisesRegex(ValueError, r"v_scale must be float8_e4m3fn, got uint8"):
      interop.from_flashinfer(dataclasses.replace(pages, v_scale=as_bytes(pages.v_scale)))
    with self.assertRaisesRegex(ValueError, "page_size must be one of .*, got 8"):
      interop.from_flashinfer(interop.to_flashinfer(random_cache(page_size=8)))
    with self.assertRaisesRegex(
      ValueError, r"k must be \[pages, page, head, row\] .*\(48, 2, 32\)"
    ):
      interop.from_flashinfer(interop.to_sglang(cache))
    fewer = dataclasses.replace(pages, v=pages.v[:2], v_scale=pages.v_scale[:2])
    with self.assertRaisesRegex(ValueError, "K and V must have the same num_pages, got 3 and 2"):
      interop.from_flashinfer(fewer)
    with self.assertRaisesRegex(ValueError, "k and k_scale must have a byte for 2 and for 16"):
      interop.from_flashinfer(dataclasses.replace(pages, k=pages.k[..., :16]))
    with self.assertRaisesRegex(
      ValueError, r"buffer must be uint8 \[pages, 2304\].*got uint8 \[3, 2303\]"
    ):
      narrow = dataclasses.replace(packed, buffer=packed.buffer[:, 1:])
      interop.from_vllm(narrow, page_size=PAGE, num_kv_heads=HEADS, head_dim=64)
    with self.assertRaisesRegex(ValueError, "pages must be PackedPages, got ArrayImpl"):
      buffer: Any = packed.buffer
      interop.from_vllm(buffer, page_size=PAGE, num_kv_heads=HEADS, head_dim=64)

  def test_slots_that_are_no_pages(self):
    slots = interop.to_sglang(random_cache())
    for page_size, message, changes in (
      (32, "page_size must divide the number of slots, got 32 and 48 of k", {}),
      (0, "page_size must be one of .*, got 0", {}),
      (16, "must divide the number of slots, got 16 and 47 of v", {"v": slots.v[:47]}),
      (16, r"v_scale must be \[slots, head, row\], got \(\)", {"v_scale": jnp.zeros(())}),
    ):
      with self.assertRaisesRegex(ValueError, message):
        interop.from_sglang(dataclasses.replace(slots, **changes), page_size=page_size)


class ArgumentsTest(TestCase):
  """What is no such thing at all is refused by its name, rule and value."""

  def test_kinds(self):
    cache: Any = random_cache()
    foreign: Any = interop.to_flashinfer(cache)
    packed: Any = interop.to_vllm(cache)
    for call, message in (
      (lambda: interop.to_flashinfer(foreign), "cache must be PagedKVCache, got ForeignPages"),
      (lambda: interop.to_sglang(packed), "cache must be PagedKVCache, got PackedPages"),
      (lambda: interop.to_vllm(packed), "cache must be PagedKVCache, got PackedPages"),
      (lambda: interop.from_flashinfer(cache), "pages must be ForeignPages, got PagedKVCache"),
      (lambda: interop.from_sglang(packed, page_size=16), "slots must be ForeignPages, got Packed"),
      (lambda: interop.from_vllm(foreign, **SIZES), "pages must be PackedPages, got ForeignPages"),
      (lambda: interop.vllm_views(cache, **SIZES), "pages must be PackedPages, got PagedKVCache"),
    ):
      with self.assertRaisesRegex(ValueError, message):
        call()

  @parameterized.parameters("from_vllm", "vllm_views")
  def test_sizes(self, name):
    pages = interop.to_vllm(random_cache())
    for changes, message in (
      ({"page_size": -16, "num_kv_heads": -2}, "page_size must be one of .*, got -16"),
      ({"page_size": 16.0}, "page_size must be a whole number, got 16.0"),
      ({"num_kv_heads": -2}, "num_kv_heads must be at least 1, got -2"),
      ({"num_kv_heads": "2"}, "num_kv_heads must be a whole number, got '2'"),
      ({"head_dim": 72}, "head_dim must be a multiple of 16 from 64 to 256, got 72"),
      ({"head_dim": None}, "head_dim must be a whole number, got None"),
      ({"layout": "NDH"}, "layout must be one of .*, got 'NDH'"),
    ):
      with self.assertRaisesRegex(ValueError, message):
        getattr(interop, name)(pages, **SIZES | changes)

  def test_arrays(self):
    cache = random_cache()
    pages, slots = interop.to_flashinfer(cache), interop.to_sglang(cache)
    none: Any = None
    for name in interop.ARRAYS:
      with self.assertRaisesRegex(ValueError, f"^{name} must be an array, got NoneType"):
        interop.from_flashinfer(dataclasses.replace(pages, **{name: none}))
      with self.assertRaisesRegex(ValueError, f"^{name} must be an array, got NoneType"):
        interop.from_sglang(dataclasses.replace(slots, **{name: none}), page_size=PAGE)
    with self.assertRaisesRegex(ValueError, "buffer must be an array, got list"):
      buffer: Any = [[0]]
      interop.from_vllm(interop.PackedPages(buffer, 1.0, 1.0), **SIZES)

  def test_global_scales(self):
    cache = random_cache()
    foreign, packed = interop.to_flashinfer(cache), interop.to_vllm(cache)
    for value in ("1.0x", "3", b"1", True, [1.0], np.ones(1), 10**400, 1j):
      for name in ("k_global_scale", "v_global_scale"):
        message = f"{name} must be a number, known outside jit, got "
        with self.assertRaisesRegex(ValueError, message):
          interop.from_flashinfer(dataclasses.replace(foreign, **{name: value}))
        with self.assertRaisesRegex(ValueError, message):
          interop.from_vllm(dataclasses.replace(packed, **{name: value}), **SIZES)

  def test_numbers_of_all_kinds(self):
    value: Any
    for value in (2, np.float32(2), np.array(2.0), jnp.float32(2)):
      self.assertEqual(interop.decode_global_scale(value, "encode"), 0.5)


class RingsTest(TestCase):
  def test_are_refused(self):
    """Their tokens would be missing from the pages."""
    cache = nv.PagedKVCache.create(
      num_pages=2, page_size=16, num_kv_heads=1, head_dim=64, recent_window=16, num_rings=1
    )
    for export in (interop.to_flashinfer, interop.to_sglang, interop.to_vllm):
      with self.assertRaisesRegex(NotImplementedError, "newest 16 tokens are in rings"):
        export(cache)


if __name__ == "__main__":
  absltest.main()
