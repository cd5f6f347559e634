"""Calls that `python -m benchmarks aot` compiles: functions and their abstract arguments.

Each function here returns the two. Shapes are those of a served model: 8 KV heads, head_dim 128,
pages of 64 tokens.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nvfp4_pallas.dispatch import Target, use_target

HEADS, HEAD_DIM, PAGE_SIZE, NUM_PAGES = 8, 128, 64, 512
RECENT: dict[str, Any] = {"recent_window": 64, "num_rings": 64}
S: Any = jax.ShapeDtypeStruct


def pack(leading, n, scale_shape, dtype=jnp.bfloat16):
  from nvfp4_pallas.kernels import pack_mosaic_sm90 as kernel

  return kernel.pack, (S((*leading, n), dtype), S(scale_shape, jnp.float32))


def unpack(leading, n, scale_shape, dtype=jnp.bfloat16):
  from nvfp4_pallas.kernels import pack_mosaic_sm90 as kernel

  codes, scales = S((*leading, n // 2), jnp.uint8), S((*leading, n // 16), jnp.float8_e4m3fn)
  return partial(kernel.unpack, dtype=dtype), (codes, scales, S(scale_shape, jnp.float32))


def abstract_cache(
  k_format="nvfp4",
  v_format="nvfp4",
  *,
  head_dim=HEAD_DIM,
  v_head_dim=None,
  heads=HEADS,
  num_pages=NUM_PAGES,
  page_size=PAGE_SIZE,
  **options,
):
  from nvfp4_pallas import PagedKVCache

  create = partial(
    PagedKVCache.create,
    **options,
    num_pages=num_pages,
    page_size=page_size,
    num_kv_heads=heads,
    head_dim=head_dim,
    v_head_dim=v_head_dim,
    k_format=k_format,
    v_format=v_format,
  )
  return jax.eval_shape(create)


def append(k_format, v_format, *, tokens=64, dtype=jnp.bfloat16, **options):
  from nvfp4_pallas.kernels import append_mosaic_sm90 as kernel

  cache = abstract_cache(k_format, v_format, **options)
  k, v = (S((tokens, cache.num_kv_heads, pool.head_dim), dtype) for pool in (cache.k, cache.v))
  return kernel.append, (cache, k, v, S((tokens,), jnp.int32))


def attention(cache, read_path, *, tokens, seqs, group=4, **options):
  from nvfp4_pallas import RaggedBatch
  from nvfp4_pallas.kernels import attention_mosaic_sm90 as kernel
  from nvfp4_pallas.read_paths import AttentionSpec

  numerics = ("causal", "window", "soft_cap", "q_levels")
  numerics = {name: options.pop(name) for name in numerics if name in options}
  spec = AttentionSpec(read_path, **{"causal": True, "sm_scale": 0.1} | numerics)
  q = S((tokens, cache.num_kv_heads * group, cache.k.head_dim), jnp.bfloat16)
  lengths = S((seqs,), jnp.int32), S((seqs + 1,), jnp.int32)
  batch = RaggedBatch(S((seqs, 128), jnp.int32), *lengths)
  return partial(kernel.attention, spec=spec, **options), (q, cache, batch)


def queries(cache, seqs, q_len, group, max_pages):
  """(q, cache, batch) of sequences of equal lengths."""
  from nvfp4_pallas import RaggedBatch

  q = S((seqs * q_len, cache.num_kv_heads * group, cache.k.head_dim), jnp.bfloat16)
  table, *lengths = (S(n, jnp.int32) for n in ((seqs, max_pages), (seqs,), (seqs + 1,)))
  return q, cache, RaggedBatch(table, *lengths)


def decode(cache, read_path, *, group=4, seqs=64, batch_invariant=False, **numerics):
  from nvfp4_pallas.kernels import decode_mosaic_sm90 as kernel
  from nvfp4_pallas.read_paths import AttentionSpec

  spec = AttentionSpec(read_path, causal=True, sm_scale=0.1, **numerics)
  arguments = queries(cache, seqs, 1, group, max_pages=128)
  return partial(kernel.decode, spec=spec, batch_invariant=batch_invariant), arguments


def tail(cache, read_path, *, q_len=16, seqs=16, group=4, config=None, **numerics):
  from nvfp4_pallas.kernels import tail_mosaic_sm90 as kernel
  from nvfp4_pallas.read_paths import AttentionSpec

  spec = AttentionSpec(read_path, **{"causal": True, "sm_scale": 0.1} | numerics)
  arguments = queries(cache, seqs, q_len, group, max_pages=256)
  return partial(kernel.attention, spec=spec, config=config), arguments


def whole(cache, read_path, *, ahead=None, q_len=8192, seqs=1, group=4, **numerics):
  from nvfp4_pallas.kernels import prefill_mosaic_sm90 as kernel
  from nvfp4_pallas.read_paths import AttentionSpec

  spec = AttentionSpec(read_path, **{"causal": True, "sm_scale": 0.1} | numerics)
  arguments = queries(cache, seqs, q_len, group, max_pages=q_len // cache.page_size)
  if ahead is None:
    ahead = read_path not in kernel.FUSED_PATHS
  return partial(kernel.attention, spec=spec, ahead=ahead), arguments


def new_rows(*, q_len=2048, seqs=4, group=4, head_dim=HEAD_DIM):
  """Attention to this step's keys."""
  from nvfp4_pallas.kernels import prefill_mosaic_sm90 as kernel
  from nvfp4_pallas.read_paths import AttentionSpec

  cache = abstract_cache(head_dim=head_dim)
  q, _, batch = queries(cache, seqs, q_len, group, max_pages=q_len // cache.page_size)
  k = S((len(q), HEADS, head_dim), jnp.bfloat16)
  attend = partial(kernel.attention_to_rows, spec=AttentionSpec("nvfp4_repack", True, 0.1))
  return attend, (q, (k, k), batch)


def masked_tail(**options):
  return tail(abstract_cache(), "nvfp4_dequant", window=999, soft_cap=30.0, **options)


def masked_whole(read_path, head_dim=HEAD_DIM, **options):
  options |= {"window": 999, "soft_cap": 30.0, "causal": False}
  return whole(abstract_cache(head_dim=head_dim), read_path, seqs=3, group=7, **options)


def split_kv(cache, read_path, **options):
  return attention(cache, read_path, tokens=64, seqs=64, num_splits=8, max_q_len=1, **options)


def prefill(cache, read_path, **options):
  return attention(cache, read_path, tokens=4096, seqs=4, **options)


def on_sm_100(name):
  """A call of triton_cases there: the whole operation, as a user has it who names no kernel."""
  from benchmarks import triton_cases

  function, arguments = triton_cases.named(name).build()

  def there(*arguments):
    with use_target(Target("sm_100")):
      return function(*arguments)

  return there, arguments


def a4q_on_sm_100(q_len, seqs=1, *, kv_len=8192, numerics=None, **cache):
  """The same of a cache that triton_cases has none of."""
  import nvfp4_pallas as nv

  cache = abstract_cache(**cache)
  operation = nv.decode if q_len == 1 else nv.prefill

  def function(q, cache, batch):
    with use_target(Target("sm_100")):
      return operation(q, cache, batch, read_path="nvfp4_a4q", **numerics or {})

  return function, queries(cache, seqs, q_len, 4, kv_len // cache.page_size)


def append_definition(k_format):
  import nvfp4_pallas as nv

  cache = jax.eval_shape(
    lambda: nv.PagedKVCache.create(
      num_pages=NUM_PAGES,
      page_size=PAGE_SIZE,
      num_kv_heads=HEADS,
      head_dim=HEAD_DIM,
      k_format=k_format,
    )
  )
  x = S((64, HEADS, HEAD_DIM), jnp.bfloat16)

  def function(cache, k, v, slots):
    return nv.append(cache, k, v, slot_mapping=slots, implementation="xla")

  return function, (cache, x, x, S((64,), jnp.int32))


def append_recent(**options):
  """The whole operation: pages from the rings, and new rows to them."""
  import nvfp4_pallas as nv

  cache = abstract_cache(**RECENT, **options)
  x = S((64, HEADS, HEAD_DIM), jnp.bfloat16)

  def function(cache, k, v, batch):
    with use_target(Target("sm_90")):
      return nv.append(cache, k, v, batch, implementation="mosaic_sm90")

  return function, (cache, x, x, queries(cache, 64, 1, 4, max_pages=128)[2])


def layer(rows, chunks, places, **options):
  """A step of the attention layer, of chunks and decodes; its cache is donated."""
  import nvfp4_pallas as nv

  cache = abstract_cache(**options)
  q, _, chunks_batch = queries(cache, chunks, rows // chunks, 4, max_pages=128)
  decodes = queries(cache, places, 1, 4, max_pages=128)[2]
  if cache.recent is not None:
    chunks_batch, decodes = (
      dataclasses.replace(batch, ring_ids=S(batch.kv_lens.shape, jnp.int32))
      for batch in (chunks_batch, decodes)
    )
  x = lambda heads: S((rows + places, heads, HEAD_DIM), jnp.bfloat16)

  def function(cache, q, k, v, chunks, decodes):
    with use_target(Target("sm_90")):
      return nv.attend(cache, q, k, v, chunks=chunks, decodes=decodes)

  return function, (cache, x(q.shape[1]), x(HEADS), x(HEADS), chunks_batch, decodes)


def on_mesh(devices, axis, batch=64):
  """A decoding step over two devices, by heads or by pages; its cache is donated."""
  import nvfp4_pallas as nv

  mesh = jax.sharding.Mesh(np.asarray(devices), ("devices",))
  ops = nv.MeshOps(mesh, **{axis: "devices"})
  cache = abstract_cache(num_pages=2 * NUM_PAGES)
  q, _, decodes = queries(cache, batch, 1, 4, max_pages=128)
  rows, batches = jax.sharding.PartitionSpec(None, ops.heads), ops.batch_specs(decodes)
  x = S((batch, HEADS, HEAD_DIM), jnp.bfloat16)

  def function(cache, q, k, v, batch):
    with use_target(Target("sm_90")):
      cache = ops.append(cache, k, v, batch)
      return cache, ops.decode(q, cache, batch, read_path="nvfp4_dequant")

  place = lambda a, spec: S(a.shape, a.dtype, sharding=jax.sharding.NamedSharding(mesh, spec))
  specs = ops.cache_specs(cache), rows, rows, rows, batches
  return function, jax.tree.map(place, (cache, q, x, x, decodes), specs)


def append_to_layers(layers=4, carried=False, **options):
  """The operation inside a scan over layers, which slices caches or carries them."""
  import nvfp4_pallas as nv

  cache = abstract_cache(**options)
  stacked = jax.tree.map(lambda a: S((layers, *a.shape), a.dtype), cache)
  x = S((layers, 64, HEADS, HEAD_DIM), jnp.bfloat16)

  def function(caches, k, v, batch):
    def layer(_, inputs):
      cache, k, v = inputs
      with use_target(Target("sm_90")):
        return None, nv.append(cache, k, v, batch, implementation="mosaic_sm90")

    def layer_of_carry(caches, inputs):
      i, k, v = inputs
      cache = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, i, keepdims=False), caches)
      _, cache = layer(None, (cache, k, v))
      put = lambda a, b: jax.lax.dynamic_update_index_in_dim(a, b, i, 0)
      return jax.tree.map(put, caches, cache), None

    if carried:
      return jax.lax.scan(layer_of_carry, caches, (jnp.arange(layers), k, v))[0]
    return jax.lax.scan(layer, None, (caches, k, v))[1]

  return function, (stacked, x, x, queries(cache, 64, 1, 4, max_pages=128)[2])


def in_steps(run, arguments, steps=4):
  """An attention inside a scan whose inputs are slices and whose results are stacked."""
  q, cache, batch = arguments
  q, lens = S((steps, *q.shape), q.dtype), S((steps, *batch.kv_lens.shape), jnp.int32)

  def function(cache, batch, q, lens):
    def step(_, inputs):
      q, kv_lens = inputs
      return None, run(q, cache, dataclasses.replace(batch, kv_lens=kv_lens))

    return jax.lax.scan(step, None, (q, lens))[1]

  return function, (cache, batch, q, lens)


def engine_step(rows, chunks, format="nvfp4", layers=3, places=64):
  """A step of the live engine; its caches are donated."""
  from benchmarks import serve_decoder
  from benchmarks.serve_formats import FORMATS
  from benchmarks.serve_model import Model

  model = Model(layers, 1024, 32, HEADS, HEAD_DIM, 2048, 4096)
  how = serve_decoder.reading(FORMATS[format])
  weights = jax.eval_shape(partial(serve_decoder.random_weights, model, jnp.bfloat16))
  caches = jax.eval_shape(
    partial(serve_decoder.make_caches, FORMATS[format], model, NUM_PAGES, PAGE_SIZE)
  )
  rope = (S((8192, HEAD_DIM // 2), jnp.float32),) * 2
  int32 = lambda *shape: S(shape, jnp.int32)
  arrays = serve_decoder.StepRows(
    tokens=int32(rows + places),
    positions=int32(rows + places),
    chunk_pages=int32(chunks, 128),
    chunk_lens=int32(chunks),
    chunk_starts=int32(chunks + 1),
    decode_pages=int32(places, 128),
    decode_lens=int32(places),
    written=int32(chunks + places),
  )

  def function(*arguments):
    with use_target(Target("sm_90")):
      return serve_decoder.step(*arguments, config=serve_decoder.config_of(model), how=how)

  return function, (weights, caches, rope, arrays)
