"""Two caches that serve at once, each in a thread of its own; threads_test.py runs and compares.

    python -m tests.threads_program CACHE_FOLDER {serial,threads}

prints how often JAX's compilation cache in that folder was hit and missed, and a digest of all
results.
"""

import concurrent.futures
import functools
import hashlib
import json
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np

import nvfp4_pallas as nv

HEADS, GROUP, DIM, PAGE, SEQS, STEPS = 1, 2, 64, 16, 2, 20
FORMATS = ("nvfp4", "fp8")
PATHS = {"nvfp4": "nvfp4_a4q", "fp8": "fp8"}


@functools.partial(jax.jit, donate_argnums=0, static_argnames="read_path")
def step(cache, q, k, v, batch, read_path):
  cache = nv.append(cache, k, v, batch)
  return cache, nv.decode(q, cache, batch, read_path=read_path)


def serve(format: str, meet=lambda: None) -> list[np.ndarray]:
  """All results and the cache of some steps of decode; `meet` is called before each."""
  r = np.random.default_rng(FORMATS.index(format))
  normal = lambda heads: jnp.asarray(r.standard_normal((SEQS, heads, DIM)), jnp.bfloat16)
  cache = nv.PagedKVCache.create(
    num_pages=4, page_size=PAGE, num_kv_heads=HEADS, head_dim=DIM, k_format=format
  )
  table, results = jnp.asarray([[2, 1], [3, 0]], jnp.int32), []
  for length in range(1, STEPS + 1):
    meet()
    lens = jnp.full((SEQS,), length, jnp.int32)
    batch = nv.RaggedBatch.for_decode(table, lens)
    q, k, v = normal(HEADS * GROUP), normal(HEADS), normal(HEADS)
    cache, state = step(cache, q, k, v, batch, PATHS[format])
    results += state
  return [np.asarray(a) for a in [*results, *jax.tree.leaves(cache)]]


def serial() -> list[list[np.ndarray]]:
  return [serve(format) for format in FORMATS]


def threads() -> list[list[np.ndarray]]:
  """The same at once: the threads begin each step together."""
  barrier = threading.Barrier(len(FORMATS), timeout=120)
  with concurrent.futures.ThreadPoolExecutor(len(FORMATS)) as pool:
    return list(pool.map(functools.partial(serve, meet=barrier.wait), FORMATS))


def main(folder: str, how: str) -> None:
  events = {"/jax/compilation_cache/cache_hits": 0, "/jax/compilation_cache/cache_misses": 0}

  def count(event, **_):
    if event in events:
      events[event] += 1

  jax.monitoring.register_event_listener(count)
  jax.config.update("jax_compilation_cache_dir", folder)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
  digest = hashlib.sha256()
  for results in {"serial": serial, "threads": threads}[how]():
    for array in results:
      digest.update(array.tobytes())
  hits, misses = events.values()
  print(json.dumps({"hits": hits, "misses": misses, "digest": digest.hexdigest()}))


if __name__ == "__main__":
  main(*sys.argv[1:])
