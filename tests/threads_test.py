"""Threads with a cache each, also where compiled functions come from JAX's compilation cache."""

import json
import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

import nvfp4_pallas as nv
from nvfp4_pallas.dispatch import Target, current_target, use_target
from tests import threads_program
from tests.base import TestCase


class ThreadsTest(TestCase):
  def test_two_threads_give_the_bits_of_one(self):
    at_once = threads_program.threads()  # traced and compiled at once too
    jax.tree.map(np.testing.assert_array_equal, at_once, threads_program.serial())

  def test_settings_stay_in_their_thread(self):
    """A target, and debug_checks, that one thread has chosen, while another one runs."""
    inside, done, seen = threading.Event(), threading.Event(), []

    def other():
      inside.wait(60)
      seen.append(current_target())
      seen.append(self.append_twice_to_a_slot())
      done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with nv.debug_checks():
      with self.assertRaisesRegex(ValueError, "must not repeat a slot"):
        self.append_twice_to_a_slot()
      with use_target(Target("sm_90")):
        inside.set()
        self.assertTrue(done.wait(60))
    thread.join()
    self.assertEqual(seen[0], Target("cpu"))
    self.assertEqual(seen[1].num_pages, 1)

  def append_twice_to_a_slot(self):
    cache = nv.PagedKVCache.create(num_pages=1, page_size=16, num_kv_heads=1, head_dim=64)
    k = jnp.ones((2, 1, 64), jnp.bfloat16)
    return nv.append(cache, k, k, slot_mapping=jnp.zeros((2,), jnp.int32), implementation="xla")

  def test_compiled_functions_are_found_again(self):
    folder = self.create_tempdir().full_path
    first, second = (self.run_program(folder, how) for how in ("serial", "threads"))
    self.assertEqual(first["hits"], 0)
    self.assertGreater(first["misses"], 2)
    self.assertEqual(second["misses"], 0)
    self.assertGreaterEqual(second["hits"], first["misses"])  # two may look for one at once
    self.assertEqual(second["digest"], first["digest"])

  def run_program(self, folder, how):
    ran = subprocess.run(
      [sys.executable, "-m", "tests.threads_program", folder, how],
      env=os.environ | {"JAX_PLATFORMS": "cpu"},
      capture_output=True,
      text=True,
      timeout=300,
    )
    self.assertEqual(ran.returncode, 0, ran.stderr)
    return json.loads(ran.stdout)


if __name__ == "__main__":
  absltest.main()
