"""One of two processes that share a cache by jax.distributed; two_processes_test.py starts them.

Pages of each sequence are divided over the processes, KV heads over the devices of each. Both know
everything, so that each can compare what lies on its devices with one device's result.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import nvfp4_pallas as nv
from tests import strict
from tests.processes import JOINED

HEADS, GROUP, DIM, PAGE, PAGES = 4, 2, 64, 16, 6
LENS, STEP = (70, 33, 0), (9, 1, 20)


def main(port: str, count: str, number: str) -> None:
  strict.install()
  jax.distributed.initialize(
    f"127.0.0.1:{port}",
    num_processes=int(count),
    process_id=int(number),
    initialization_timeout=60,
  )
  print(JOINED, flush=True)
  check()
  jax.distributed.shutdown()
  print("done", flush=True)


def check() -> None:
  processes = jax.process_count()
  assert processes == 2 and len(jax.devices()) == 2 * jax.local_device_count(), jax.devices()
  by_process = np.asarray(sorted(jax.devices(), key=lambda d: (d.process_index, d.id)))
  mesh = Mesh(by_process.reshape(processes, -1), ("context", "tensor"))
  ops = nv.MeshOps(mesh, heads="tensor", pages="context")

  def place(tree, specs):
    def one(array, spec):
      array = np.asarray(array)
      get = lambda index: array[index]
      return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), get)

    return jax.tree.map(one, tree, specs)

  r = np.random.default_rng(0)
  normal = lambda n, heads: jnp.asarray(r.standard_normal((n, heads, DIM)), jnp.bfloat16)
  empty = nv.PagedKVCache.create(
    num_pages=processes * PAGES * len(LENS),
    page_size=PAGE,
    num_kv_heads=HEADS,
    head_dim=DIM,
    k_format="fp8",
  )
  # Page p of sequence s has the number s * PAGES + p // 2 on the device p mod 2.
  page = np.arange(PAGES)
  own = np.arange(len(LENS))[:, None] * PAGES + page // processes
  whole = own + page % processes * (PAGES * len(LENS))

  def batches(lens, steps):
    starts = np.cumsum([0, *steps])
    arrays = [jnp.asarray(a, jnp.int32) for a in (np.add(lens, steps), starts)]
    of = lambda table: nv.RaggedBatch(jnp.asarray(table, jnp.int32), *arrays)
    laid_out = ops.lay_out([of(own)])
    return of(whole), place(laid_out, ops.batch_specs(laid_out))

  rows = P(None, "tensor")
  one, cache = empty, place(empty, ops.cache_specs(empty))
  mesh_append = jax.jit(ops.append, donate_argnums=0)
  for lens, steps in (((0, 0, 0), LENS), (LENS, STEP)):
    on_one, on_mesh = batches(lens, steps)
    q, k, v = (normal(sum(steps), heads) for heads in (HEADS * GROUP, HEADS, HEADS))
    placed = [place(x, rows) for x in (q, k, v)]
    if lens != (0, 0, 0):
      want = jax.jit(functools.partial(nv.prefill, read_path="fp8"))(q, one, on_one, new_kv=(k, v))
      run = jax.jit(functools.partial(ops.prefill, read_path="fp8"))
      same_to_rounding(run(placed[0], cache, on_mesh, new_kv=tuple(placed[1:])), want)
    one = jax.jit(nv.append)(one, k, v, on_one)
    cache = mesh_append(cache, *placed[1:], on_mesh)
  for got, want in zip(jax.tree.leaves(cache), jax.tree.leaves(one), strict=True):
    for shard in got.addressable_shards:
      found, wanted = (np.asarray(a).view(np.uint8) for a in (shard.data, want[shard.index]))
      np.testing.assert_array_equal(found, wanted)

  q = normal(len(LENS), HEADS * GROUP)
  on_one, on_mesh = batches(np.add(LENS, STEP) - 1, (1, 1, 1))
  run = jax.jit(functools.partial(ops.decode, read_path="fp8"))
  want = jax.jit(functools.partial(nv.decode, read_path="fp8"))(q, one, on_one)
  arguments = place(q, rows), cache, on_mesh
  same_to_rounding(run(*arguments), want)
  hlo = run.lower(*arguments).compile().as_text()
  assert "all-reduce" in hlo and "all-gather" not in hlo, hlo


def same_to_rounding(got, want) -> None:
  """out to a step of bfloat16, lse to that of float32 sums; of what lies here."""
  for a, b, tolerance in zip(got, want, (2.0**-7, 1e-6), strict=True):
    assert len(a.addressable_shards) == jax.local_device_count()
    for shard in a.addressable_shards:
      found, wanted = (np.asarray(x).astype(np.float64) for x in (shard.data, b[shard.index]))
      np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=1e-5)


if __name__ == "__main__":
  main(*sys.argv[1:])
