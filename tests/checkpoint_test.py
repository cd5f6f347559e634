"""Caches in files and pages on the host."""

import dataclasses
import json
import os
import pathlib
import stat
import struct
import tempfile
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import nvfp4_pallas as nv
from nvfp4_pallas import checkpoint
from tests.base import TestCase

FORMATS = (("nvfp4", "nvfp4"), ("fp8", "nvfp4"), ("bf16", "bf16"))


LEVERS = {
  "k_rotation": "hadamard",
  "scale_search": "four_over_six",
  "k_mean": np.arange(128, dtype=np.float32).reshape(2, 64) / 64,
}


@jax.jit
def append_to_slots(cache, k, v, slots):
  return nv.append(cache, k, v, slot_mapping=slots)


def filled_cache(k_format="nvfp4", v_format="nvfp4", num_pages=5, **levers) -> nv.PagedKVCache:
  scale = {} if k_format == "bf16" else {"k_global_scale": jnp.asarray([0.5, 3.0])}
  cache = nv.PagedKVCache.create(
    num_pages=num_pages,
    page_size=16,
    num_kv_heads=2,
    head_dim=64,
    k_format=k_format,
    v_format=v_format,
    **scale,
    **levers,
  )
  k, v = jax.random.normal(jax.random.key(0), (2, 16 * num_pages, 2, 64), jnp.bfloat16)
  return append_to_slots(cache, k, v, jnp.arange(16 * num_pages))


class EqualityTest(TestCase):
  """A cache is another one, to the bit."""

  def check_equal(self, got, want):
    self.assertEqual(jax.tree.structure(got), jax.tree.structure(want))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      self.assertEqual((a.dtype, a.shape), (b.dtype, b.shape))
      np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


class CheckpointTest(EqualityTest):
  def setUp(self):
    super().setUp()
    folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    self.path = folder / "cache.safetensors"

  @parameterized.parameters(*FORMATS)
  def test_round_trip(self, k_format, v_format):
    cache = filled_cache(k_format, v_format)
    checkpoint.save(cache, self.path)
    self.check_equal(checkpoint.restore(self.path), cache)
    self.assertEqual([p.name for p in self.path.parent.iterdir()], [self.path.name])

  def test_rings(self):
    cache = nv.PagedKVCache.create(
      num_pages=5, page_size=16, num_kv_heads=2, head_dim=64, recent_window=20, num_rings=2
    )
    k, v = jax.random.normal(jax.random.key(0), (2, 60, 2, 64), jnp.bfloat16)
    table = jnp.arange(5, dtype=jnp.int32)[None]
    lens = jnp.asarray([60], jnp.int32), jnp.asarray([0, 60], jnp.int32)
    batch = nv.RaggedBatch(table, *lens, ring_ids=jnp.asarray([1], jnp.int32))
    cache = jax.jit(nv.append)(cache, k, v, batch)
    checkpoint.save(cache, self.path)
    self.check_equal(checkpoint.restore(self.path), cache)
    raw = self.path.read_bytes().replace(b'"recent_window": "20"', b'"recent_window": "90"')
    self.path.write_bytes(raw)
    with self.assertRaisesRegex(checkpoint.CheckpointError, "cache.recent.k must be bf16"):
      checkpoint.restore(self.path)
    self.path.write_bytes(self.changed(cache, recent_window="9" * 5000))
    with self.assertRaisesRegex(checkpoint.CheckpointError, "recent_window must be a number of"):
      checkpoint.restore(self.path)

  def test_round_trip_with_levers(self):
    cache = filled_cache(**LEVERS)
    checkpoint.save(cache, self.path)
    self.check_equal(checkpoint.restore(self.path), cache)
    self.assertEqual(
      self.about() - self.about(filled_cache()),
      {
        ("k_rotation", "hadamard"),
        ("k_scale_search", "four_over_six"),
        ("v_scale_search", "four_over_six"),
      },
    )

  def about(self, cache=None) -> set:
    if cache is not None:
      checkpoint.save(cache, self.path)
    raw = self.path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return set(json.loads(raw[8 : 8 + length])["__metadata__"].items())

  def test_is_a_safetensors_file(self):
    """Read by the format's description alone."""
    cache = filled_cache()
    checkpoint.save(cache, self.path)
    raw = self.path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    self.assertEqual(length % 8, 0)
    about = {"library": "nvfp4_pallas", "layout": "head_major", "version": "1"}
    self.assertEqual(header["__metadata__"], about | {"k_format": "nvfp4", "v_format": "nvfp4"})
    entry = header["v.block_scale"]
    self.assertEqual((entry["dtype"], entry["shape"]), ("F8_E4M3", [5, 2, 16, 4]))
    begin, end = (8 + length + offset for offset in entry["data_offsets"])
    scales = np.asarray(cache.v.block_scale).view(np.uint8)
    self.assertEqual(raw[begin:end], scales.tobytes())

  def changed(self, cache=None, **about) -> bytes:
    checkpoint.save(filled_cache() if cache is None else cache, self.path)
    raw = self.path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    header["__metadata__"] |= about
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + raw[8 + length :]

  @parameterized.parameters(
    ({"version": "2"}, "version must be '1', the file has '2'"),
    ({"layout": "token_major"}, "layout must be 'head_major', the file has 'token_major'"),
    ({"library": "another"}, "library must be 'nvfp4_pallas'"),
    ({"k_format": "int4"}, "k_format must be one of .*'int4'"),
    ({"k_format": "fp8"}, "k in fp8 must not have block_scale"),
    ({"v_rotation": "random"}, "v_rotation must be one of .*'hadamard'.*, the file has 'random'"),
    ({"k_scale_search": "mse"}, "k_scale_search must be one of .*, the file has 'mse'"),
  )
  def test_other_files_are_refused(self, about, message):
    self.path.write_bytes(self.changed(**about))
    with self.assertRaisesRegex(checkpoint.CheckpointError, message):
      checkpoint.restore(self.path)

  @parameterized.parameters(0, 5, 100, -1)
  def test_truncated_files_are_refused(self, length):
    raw = self.changed()
    self.path.write_bytes(raw[:length])
    with self.assertRaisesRegex(checkpoint.CheckpointError, "truncated"):
      checkpoint.restore(self.path)

  def test_every_truncation_is_refused(self):
    raw = self.changed()
    (length,) = struct.unpack("<Q", raw[:8])
    for kept in (*range(0, 8 + length, 37), *range(8 + length, len(raw), 4099), len(raw) - 1):
      self.path.write_bytes(raw[:kept])
      with self.assertRaises(checkpoint.CheckpointError):
        checkpoint.restore(self.path)

  def test_bytes_that_belong_to_no_array_are_refused(self):
    self.path.write_bytes(self.changed() + b"more")
    with self.assertRaisesRegex(checkpoint.CheckpointError, r"must have \d+ bytes of arrays"):
      checkpoint.restore(self.path)

  @parameterized.parameters(
    (["v.data", "dtype"], "F16", "v.data has the dtype 'F16'"),
    (["v.data", "dtype"], ["U8"], "v.data must have dtype, shape and data_offsets"),
    (["v.data", "shape"], [5, 2, -16, -32], "v.data must have dtype, shape"),
    (["v.data", "shape"], [5, 2, 16, 16], "v.data has 5120 bytes for the shape"),
    (["v.data", "data_offsets"], [-5120, 0], "v.data must have dtype, shape"),
    (["v.data"], None, "v.data must have dtype, shape and data_offsets"),
    (["w.data"], {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}, "no cache has.*w.data"),
    (["__metadata__"], [], "__metadata__ must be a table of texts"),
    (["__metadata__", "recent_window"], 20, "__metadata__ must be a table of texts"),
    (["__metadata__", "recent_window"], "20", "lacks .'k', 'v', 'starts'"),
    (["v.data"], {"dtype": "U8", "shape": [0, 2**63], "data_offsets": [0, 0]}, "v.data must have"),
    (
      ["k.global_scale", "data_offsets"],
      [0, 8],
      "must begin where the last array ends, at 8, got 0",
    ),
  )
  def test_damaged_headers_are_refused(self, keys, value, message):
    checkpoint.save(filled_cache(), self.path)
    raw = self.path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    at = header
    for key in keys[:-1]:
      at = at[key]
    at[keys[-1]] = value
    text = json.dumps(header).encode()
    self.path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    with self.assertRaisesRegex(checkpoint.CheckpointError, message):
      checkpoint.restore(self.path)

  @parameterized.parameters(
    ('{"__metadata__"', '{"v.data": 0, "__metadata__"', "v.data"),
    ('{"__metadata__"', '{"__metadata__": {}, "__metadata__"', "__metadata__"),
    ('"library"', '"version": "2", "library"', "version"),
    ('"v.data": {', '"v.data": {"dtype": "F32", ', "dtype"),
  )
  def test_entries_that_stand_twice_are_refused(self, old, new, name):
    """What is added stands before the entry that Python would take."""
    raw = self.changed()
    (length,) = struct.unpack("<Q", raw[:8])
    text = raw[8 : 8 + length]
    self.assertEqual(text.count(old.encode()), 1)
    text = text.replace(old.encode(), new.encode())
    self.path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    with self.assertRaisesRegex(checkpoint.CheckpointError, f"an entry twice, got '{name}'"):
      checkpoint.restore(self.path)

  def test_a_file_that_is_none(self):
    self.path.write_bytes(struct.pack("<Q", 4) + b"abcd")
    with self.assertRaisesRegex(checkpoint.CheckpointError, "not JSON"):
      checkpoint.restore(self.path)

  @parameterized.parameters(
    ("[" * 100_000,),
    ('{"v.data": ' + "9" * 5000 + "}",),
    ("\xff",),
  )
  def test_headers_that_python_does_not_read(self, text):
    raw = text.encode("latin-1")
    self.path.write_bytes(struct.pack("<Q", len(raw)) + raw)
    with self.assertRaisesRegex(checkpoint.CheckpointError, "header is not JSON"):
      checkpoint.restore(self.path)

  def test_a_failed_save_leaves_the_last_one(self):
    cache = filled_cache()
    checkpoint.save(cache, self.path)
    broken = dataclasses.replace(cache.v, data=cache.v.data.astype(jnp.int16))
    with self.assertRaisesRegex(ValueError, "cache.v.data of format nvfp4 must be uint8, got int"):
      checkpoint.save(dataclasses.replace(cache, v=broken), self.path)
    full = mock.patch.object(checkpoint.os, "fsync", side_effect=OSError("no space left"))
    with full, self.assertRaisesRegex(OSError, "no space left"):
      checkpoint.save(filled_cache(num_pages=2), self.path)
    self.check_equal(checkpoint.restore(self.path), cache)
    self.assertEqual([p.name for p in self.path.parent.iterdir()], [self.path.name])

  def test_saves_to_one_path_at_a_time(self):
    """While one is about to finish another comes and goes; the first then replaces its file."""
    early, late = filled_cache(num_pages=2), filled_cache(num_pages=3)
    fsync, seen = os.fsync, []

    def another(descriptor):
      fsync(descriptor)
      if not seen:
        seen.append("late waits")
        checkpoint.save(early, self.path)
        self.check_equal(checkpoint.restore(self.path), early)
      else:
        seen.append("early")

    with mock.patch.object(checkpoint.os, "fsync", side_effect=another):
      checkpoint.save(late, self.path)
    self.assertEqual(seen, ["late waits", "early"])
    self.check_equal(checkpoint.restore(self.path), late)
    self.assertEqual([p.name for p in self.path.parent.iterdir()], [self.path.name])

  @parameterized.parameters("a" * 255, "é" * 127, "a" * 219)
  def test_names_as_long_as_names_can_be(self, name):
    cache = filled_cache(num_pages=1)
    path = self.path.with_name(name)
    checkpoint.save(cache, path)
    self.check_equal(checkpoint.restore(path), cache)
    self.assertEqual([p.name for p in path.parent.iterdir()], [name])

  @parameterized.parameters(0o600, 0o640, 0o444)
  def test_a_replaced_file_hands_its_permissions_on(self, mode):
    """From the first byte on: another user never sees more than before."""
    early, late = filled_cache(num_pages=2), filled_cache(num_pages=3)
    checkpoint.save(early, self.path)
    self.path.chmod(mode)
    fsync, seen = os.fsync, []

    def look(descriptor):
      seen.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
      fsync(descriptor)

    with mock.patch.object(checkpoint.os, "fsync", side_effect=look):
      checkpoint.save(late, self.path)
    self.check_equal(checkpoint.restore(self.path), late)
    self.assertEqual([*seen, stat.S_IMODE(self.path.stat().st_mode)], [mode, mode])

  def test_a_new_file_has_the_permissions_of_new_files(self):
    checkpoint.save(filled_cache(num_pages=1), self.path)
    other = self.path.with_name("other")
    other.touch()
    self.assertEqual(self.path.stat().st_mode, other.stat().st_mode)

  def test_a_link_stays_and_its_file_is_replaced(self):
    """In another folder; a link that leads to no file yet makes it."""
    early, late = filled_cache(num_pages=2), filled_cache(num_pages=3)
    folder = self.path.parent / "elsewhere"
    folder.mkdir()
    self.path.symlink_to(folder / "file")
    for cache in (early, late):
      checkpoint.save(cache, self.path)
      self.assertTrue(self.path.is_symlink())
      self.check_equal(checkpoint.restore(folder / "file"), cache)
    self.assertEqual([p.name for p in folder.iterdir()], ["file"])


class PagesTest(EqualityTest):
  @parameterized.parameters(*FORMATS)
  def test_to_the_host_and_to_other_places(self, k_format, v_format):
    cache = filled_cache(k_format, v_format)
    host = checkpoint.fetch_pages(cache, [3, 1])
    moved = checkpoint.restore_pages(cache, [0, 4], host)
    for a, b in zip(jax.tree.leaves(moved), jax.tree.leaves(cache), strict=True):
      a, b = np.asarray(a), np.asarray(b)
      if a.ndim == 1:  # global scales
        np.testing.assert_array_equal(a, b)
        continue
      expected = b.copy()
      expected[0], expected[4] = b[3], b[1]
      np.testing.assert_array_equal(a.view(np.uint8), expected.view(np.uint8))
    self.check_equal(
      checkpoint.restore_pages(moved, [0, 4], checkpoint.fetch_pages(cache, [0, 4])), cache
    )

  def test_levers_stay_with_the_cache(self):
    cache = filled_cache(**LEVERS)
    host = checkpoint.fetch_pages(cache, [3, 1])
    self.assertEqual(set(host), {f"{pool}.{a}" for pool in "kv" for a in ("data", "block_scale")})
    self.check_equal(checkpoint.restore_pages(cache, [3, 1], host), cache)

  def test_bad_pages(self):
    cache = filled_cache()
    host = checkpoint.fetch_pages(cache, [3, 1])
    for call, message in (
      (lambda: checkpoint.fetch_pages(cache, [5]), r"below num_pages = 5, got \[5\]"),
      (lambda: checkpoint.fetch_pages(cache, [-1, 2]), r"got \[-1\]"),
      (lambda: checkpoint.fetch_pages(cache, [2**63]), r"got \[9223372036854775808\]"),
      (lambda: checkpoint.fetch_pages(cache, [1.5]), "pages must be whole numbers, got float64"),
      (lambda: checkpoint.fetch_rings(cache, [0]), "cache must have a recent window"),
      (
        lambda: checkpoint.restore_pages(cache, [2, 2], host),
        r"pages must not name one twice, got \[2, 2\]",
      ),
      (
        lambda: checkpoint.restore_pages(cache, [2], host),
        r"k.data must be uint8 \[1, 2, 16, 32\]",
      ),
      (lambda: checkpoint.restore_pages(cache, [2, 3], {}), r"must have the arrays .*got \[\]"),
    ):
      with self.assertRaisesRegex(ValueError, message):
        call()


class RingsTest(EqualityTest):
  """A sequence leaves the device with its pages and its ring, and comes back to others."""

  def create(self, **options):
    rings = {"recent_window": 20, "num_rings": 3} | options
    return nv.PagedKVCache.create(
      num_pages=8, page_size=16, num_kv_heads=2, head_dim=64, k_format="fp8", **rings
    )

  def test_a_sequence_moves(self):
    """40 tokens, of which 24 are in the ring; afterwards it goes on as if it had stayed."""
    k, v = jax.random.normal(jax.random.key(0), (2, 41, 2, 64), jnp.bfloat16)
    q = jax.random.normal(jax.random.key(1), (1, 4, 64), jnp.bfloat16)
    append = jax.jit(nv.append)
    decode = jax.jit(lambda q, cache, batch: nv.decode(q, cache, batch, read_path="fp8"))

    def batch(pages, ring, kv_len, q_len):
      arrays = [pages], [kv_len], [0, q_len], [ring]
      return nv.RaggedBatch(*(jnp.asarray(a, jnp.int32) for a in arrays))

    here = append(self.create(), k[:40], v[:40], batch([4, 0, 2], 2, 40, 40))
    pages, rings = checkpoint.fetch_pages(here, [4, 0, 2]), checkpoint.fetch_rings(here, [2])
    self.assertEqual(rings["recent.starts"].tolist(), [16])
    there = checkpoint.restore_rings(self.create(), [0], rings)
    there = checkpoint.restore_pages(there, [7, 5, 6], pages)
    for a, b in zip(jax.tree.leaves(there.recent), jax.tree.leaves(here.recent), strict=True):
      per_ring = len(a) // 3
      np.testing.assert_array_equal(a[:per_ring], b[2 * per_ring :])
      np.testing.assert_array_equal(np.asarray(a[per_ring:], np.float32), 0)
    outs = []
    for cache, place in ((here, ([4, 0, 2], 2)), (there, ([7, 5, 6], 0))):
      cache = append(cache, k[40:], v[40:], batch(*place, 41, 1))
      outs.append(decode(q, cache, batch(*place, 41, 1)))
    self.check_equal(*outs)
    self.assertTrue(np.asarray(outs[0][0], np.float32).any())

  def test_bad_rings(self):
    cache = self.create()
    host = checkpoint.fetch_rings(cache, [1])
    wider = checkpoint.fetch_rings(self.create(recent_window=40), [1])
    for call, message in (
      (lambda: checkpoint.fetch_rings(cache, [3]), r"ring_ids must be below num_rings = 3, got"),
      (lambda: checkpoint.restore_rings(cache, [1, 1], host), "ring_ids must not name one twice"),
      (lambda: checkpoint.restore_rings(cache, [0, 1], host), r"recent.k must be bfloat16 \[2, 3"),
      (lambda: checkpoint.restore_rings(cache, [1], wider), r"recent.k must be .*\[1, 4, 2, 16"),
      (lambda: checkpoint.restore_rings(cache, [1], {}), "host must have the arrays .*recent.k"),
    ):
      with self.assertRaisesRegex(ValueError, message):
        call()


if __name__ == "__main__":
  absltest.main()
