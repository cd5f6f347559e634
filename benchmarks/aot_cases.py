"""The kernel cases that `python -m benchmarks aot` compiles, as data.

A new kernel adds a function that returns (function, abstract arguments) and one line of CASES.
Shapes are those of a served model: 8 KV heads, head_dim 128, pages of 64 tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nvfp4_pallas.dispatch import Target, use_target


@dataclasses.dataclass(frozen=True)
class Case:
  """One function to compile ahead of time.

  Attributes:
    name: `kernel/variant`; the name on the command line.
    build: returns the function and its arguments as jax.ShapeDtypeStruct pytrees.
    max_registers: the compilation counts as failed above this many registers a thread; 0 for
      what XLA compiles alone, of which only the HLO is looked at.
    donate: positions of donated arguments.
    max_instructions: a bound for the machine instructions of all kernels; 0 for none.
    loop_values: values of the cache that a thread takes in one round of the first kernel's inner
      loop; 0 where it is not counted.
    max_loop: bounds for the loop's instructions and those of the integer pipe, a value.
    arch: of the GPU.
    devices: of several, `build` is given these, and its arguments have their shardings.
  """

  name: str
  build: Callable[..., tuple[Callable[..., Any], tuple[Any, ...]]]
  max_registers: int
  donate: tuple[int, ...] = ()
  max_instructions: int = 0
  loop_values: int = 0
  max_loop: tuple[float, float] = (math.inf, math.inf)
  arch: str = "sm_90"
  devices: int = 1


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


# Calls of triton_cases that the kernel for sm_100 runs, too.
ON_SM_100 = (
  "prefill/a4q",
  "prefill/a4q_1_level",
  "prefill/a4q_64_window",
  "prefill/a4q_window",
  "prefill/a4q_window_soft_cap",
  "prefill/a4q_group_5_page_64",
  "prefill/a4q_group_7",
  "chunk/a4q",
  "tail/a4q",
  "tail/a4q_64",
  "tail/a4q_group_7",
  "decode/a4q",
)
CASES = (
  Case("definition/append_nvfp4", lambda: append_definition("nvfp4"), 0, donate=(0,)),
  Case("definition/append_fp8", lambda: append_definition("fp8"), 0, donate=(0,)),
  # A thread packs 2 times 16 values, with 9.5 instructions each, and unpacks 2 times 8, with 6.6.
  Case("pack/scalar", lambda: pack((4096, HEADS), HEAD_DIM, ()), 56, max_instructions=317),
  Case("pack/per_head", lambda: pack((4096, HEADS), HEAD_DIM, (HEADS,)), 56, max_instructions=322),
  Case("pack/float16", lambda: pack((4096, HEADS), HEAD_DIM, (), jnp.float16), 80),
  Case("pack/float32", lambda: pack((4096, HEADS), HEAD_DIM, (), jnp.float32), 80),
  Case("pack/odd_rows_dim_80", lambda: pack((4095, 5), 80, (5,)), 64, max_instructions=373),
  Case("unpack/scalar", lambda: unpack((4096, HEADS), HEAD_DIM, ()), 24, max_instructions=110),
  Case(
    "unpack/per_head",
    lambda: unpack((4096, HEADS), HEAD_DIM, (HEADS,)),
    24,
    max_instructions=116,
  ),
  Case("unpack/float32", lambda: unpack((4096, HEADS), HEAD_DIM, (), jnp.float32), 48),
  Case("unpack/odd_rows_dim_80", lambda: unpack((4095, 5), 80, (5,)), 32, max_instructions=162),
  # A thread of K and one of V: 16 values with 11 instructions each, 16 with 9, and 8 with 5.
  Case("append/nvfp4", lambda: append("nvfp4", "nvfp4"), 48, (0,), max_instructions=378),
  Case("append/fp8", lambda: append("fp8", "fp8"), 32, (0,), max_instructions=313),
  Case("append/bf16", lambda: append("bf16", "bf16"), 24, (0,), max_instructions=76),
  # 32 values each, of two heads or four, with 10 instructions, 8, and 1.3.
  Case(
    "append/nvfp4_8192",
    lambda: append("nvfp4", "nvfp4", tokens=8192),
    56,
    (0,),
    max_instructions=672,
  ),
  Case(
    "append/fp8_8192", lambda: append("fp8", "fp8", tokens=8192), 48, (0,), max_instructions=548
  ),
  Case(
    "append/bf16_8192", lambda: append("bf16", "bf16", tokens=8192), 32, (0,), max_instructions=90
  ),
  # Two candidates and their errors: 45 instructions a value, not 11.
  Case(
    "append/four_over_six",
    lambda: append("nvfp4", "nvfp4", scale_search="four_over_six"),
    80,
    (0,),
    max_instructions=1500,
  ),
  Case(
    "append/four_over_six_8192",
    lambda: append("nvfp4", "nvfp4", tokens=8192, scale_search="four_over_six"),
    96,
    (0,),
    max_instructions=2900,
  ),
  Case("append/float16", lambda: append("nvfp4", "fp8", dtype=jnp.float16), 144, donate=(0,)),
  Case(
    "append/nvfp4_bf16_dims_80_256",
    lambda: append("nvfp4", "bf16", head_dim=80, v_head_dim=256),
    48,
    donate=(0,),
  ),
  # 2^33 bytes of codes in one array.
  Case(
    "append/large",
    lambda: append("nvfp4", "nvfp4", num_pages=2**17, page_size=128),
    48,
    donate=(0,),
  ),
  Case("append/recent", append_recent, 56, donate=(0,)),
  Case("append/layers", append_to_layers, 48, donate=(0,)),
  Case("append/carried_layers", lambda: append_to_layers(carried=True), 48, donate=(0,)),
  Case("layer/mixed", lambda: layer(512, 4, 60), 168, donate=(0,)),
  Case("layer/recent_mixed", lambda: layer(512, 4, 60, **RECENT), 168, donate=(0,)),
  Case("mesh/heads", lambda devices: on_mesh(devices, "heads"), 168, donate=(0,), devices=2),
  Case("mesh/pages", lambda devices: on_mesh(devices, "pages"), 168, donate=(0,), devices=2),
  Case("append/recent_layers", lambda: append_to_layers(**RECENT), 56, donate=(0,)),
  Case(
    "append/recent_four_over_six", lambda: append_recent(scale_search="four_over_six"), 96, (0,)
  ),
  # 168 registers a thread let three blocks of 128 threads onto a multiprocessor, 255 let two.
  Case(
    "decode/nvfp4",
    lambda: decode(abstract_cache(), "nvfp4_dequant"),
    168,
    loop_values=64 * 2 * HEAD_DIM // 32,
    max_loop=(2.9, 1.5),
  ),
  Case(
    "decode/fp8",
    lambda: decode(abstract_cache("fp8", "fp8"), "fp8"),
    168,
    loop_values=32 * 2 * HEAD_DIM // 32,
    max_loop=(2.0, 1.6),
  ),
  Case(
    "decode/bf16",
    lambda: decode(abstract_cache("bf16", "bf16"), "bf16"),
    168,
    loop_values=16 * 2 * HEAD_DIM // 32,
    max_loop=(2.8, 1.0),
  ),
  Case("decode/dim_64", lambda: decode(abstract_cache(head_dim=64), "nvfp4_dequant"), 168),
  Case("decode/group_16", lambda: decode(abstract_cache(), "nvfp4_dequant", group=16), 255),
  Case(
    "decode/dim_256_group_16",
    lambda: decode(abstract_cache(head_dim=256), "nvfp4_dequant", group=16),
    255,
  ),
  Case(
    "decode/bf16_dim_256",
    lambda: decode(abstract_cache("bf16", "bf16", head_dim=256), "bf16"),
    255,
  ),
  Case(
    "decode/window_soft_cap",
    lambda: decode(abstract_cache(), "nvfp4_dequant", window=999, soft_cap=30.0),
    168,
  ),
  Case("decode/a4q", lambda: decode(abstract_cache(), "nvfp4_a4q", q_levels=2), 255),
  Case(
    "decode/batch_invariant",
    lambda: decode(abstract_cache(), "nvfp4_dequant", batch_invariant=True),
    168,
  ),
  Case("decode/steps", lambda: in_steps(*decode(abstract_cache(), "nvfp4_dequant")), 168),
  Case("decode/recent", lambda: decode(abstract_cache(**RECENT), "nvfp4_dequant"), 168),
  Case(
    "decode/recent_dim_64_group_3",
    lambda: decode(abstract_cache(head_dim=64, **RECENT), "nvfp4_dequant", group=3),
    168,
  ),
  Case(
    "decode/recent_dim_256",
    lambda: decode(abstract_cache(head_dim=256, **RECENT), "nvfp4_dequant"),
    255,
  ),
  Case("decode/page_16", lambda: decode(abstract_cache(page_size=16), "nvfp4_dequant"), 168),
  Case(
    "decode/fp8_nvfp4_dims_256_64",
    lambda: decode(abstract_cache("fp8", head_dim=256, v_head_dim=64), "nvfp4_dequant", group=7),
    168,
  ),
  Case("engine/decode_layers", lambda: engine_step(0, 0), 168, donate=(1,)),
  Case("engine/read_layers", lambda: engine_step(2048, 4), 168, donate=(1,)),
  Case("engine/read_fp8_layers", lambda: engine_step(2048, 1, "fp8"), 168, donate=(1,)),
  Case(
    "short/4",
    lambda: tail(abstract_cache(), "nvfp4_dequant", q_len=4),
    168,
    max_instructions=3600,
  ),
  Case(
    "short/1",
    lambda: tail(abstract_cache(), "nvfp4_dequant", q_len=1),
    168,
    max_instructions=2450,
  ),
  Case("short/2_group_7", lambda: tail(abstract_cache(), "nvfp4_dequant", q_len=2, group=7), 255),
  Case("short/masks", lambda: masked_tail(q_len=4), 255),
  Case("short/a4q", lambda: tail(abstract_cache(), "nvfp4_a4q", q_len=4, q_levels=2), 255),
  Case("short/page_16", lambda: tail(abstract_cache(page_size=16), "nvfp4_dequant", q_len=4), 255),
  Case(
    "tail/8",
    lambda: tail(abstract_cache(), "nvfp4_dequant", q_len=8),
    255,
    max_instructions=2800,
  ),
  Case("tail/3_group_15", lambda: tail(abstract_cache(), "nvfp4_dequant", q_len=3, group=15), 255),
  Case("tail/masks", lambda: masked_tail(q_len=8), 255),
  Case("tail/not_causal", lambda: masked_tail(q_len=11, causal=False), 255),
  Case("tail/a4q", lambda: tail(abstract_cache(), "nvfp4_a4q", q_len=8, q_levels=2), 255),
  Case("tail/page_16", lambda: tail(abstract_cache(page_size=16), "nvfp4_dequant", q_len=8), 255),
  # 512 threads have 128 registers each, which the two roles share out.
  Case("wide/16", lambda: tail(abstract_cache(), "nvfp4_dequant"), 128, max_instructions=3100),
  Case("wide/masks", lambda: masked_tail(), 128),
  Case("wide/not_causal", lambda: masked_tail(causal=False), 128),
  Case("wide/a4q", lambda: tail(abstract_cache(), "nvfp4_a4q", q_levels=2), 128),
  Case("wide/page_16", lambda: tail(abstract_cache(page_size=16), "nvfp4_dequant"), 128),
  Case("wide/page_256", lambda: tail(abstract_cache(page_size=256), "nvfp4_dequant"), 128),
  # 384 threads have 168 registers each, of which the roles make their own.
  Case("dense/8k", lambda: whole(abstract_cache(), "nvfp4_repack"), 168, max_instructions=4300),
  Case("dense/masks", lambda: masked_whole("nvfp4_repack"), 168),
  Case("dense/not_causal", lambda: whole(abstract_cache(), "nvfp4_repack", causal=False), 168),
  Case("dense/page_16", lambda: whole(abstract_cache(page_size=16), "nvfp4_repack"), 168),
  Case("dense/a8q", lambda: whole(abstract_cache(), "nvfp4_a8q"), 168),
  Case("dense/a8q_masks", lambda: masked_whole("nvfp4_a8q"), 168),
  Case("dense/fp8", lambda: whole(abstract_cache("fp8", "fp8"), "fp8"), 168),
  Case("dense/bf16", lambda: whole(abstract_cache("bf16", "bf16"), "bf16"), 168),
  Case(
    "dense/nvfp4_fp8_dims_64_256",
    lambda: whole(
      abstract_cache("nvfp4", "fp8", head_dim=64, v_head_dim=256), "nvfp4_repack", group=7
    ),
    168,
  ),
  Case("dense/dim_64", lambda: whole(abstract_cache(head_dim=64), "nvfp4_repack"), 168),
  Case("dense/dim_64_a8q", lambda: whole(abstract_cache(head_dim=64), "nvfp4_a8q"), 168),
  Case("dense/dim_256", lambda: whole(abstract_cache(head_dim=256), "nvfp4_repack"), 168),
  Case("dense/dim_256_a8q", lambda: whole(abstract_cache(head_dim=256), "nvfp4_a8q"), 168),
  Case("dense/new_rows", lambda: new_rows(), 168),
  Case("dense/new_rows_dim_256", lambda: new_rows(head_dim=256), 168),
  Case("fused/8k", lambda: whole(abstract_cache(), "nvfp4_dequant"), 168, max_instructions=3650),
  Case(
    "fused/steps",
    lambda: in_steps(*whole(abstract_cache(), "nvfp4_dequant", q_len=512, seqs=2)),
    168,
  ),
  Case("fused/masks", lambda: masked_whole("nvfp4_dequant"), 168),
  Case("fused/not_causal", lambda: whole(abstract_cache(), "nvfp4_dequant", causal=False), 168),
  Case("fused/group_7", lambda: whole(abstract_cache(), "nvfp4_dequant", group=7, seqs=9), 168),
  Case("fused/a4q", lambda: whole(abstract_cache(), "nvfp4_a4q", q_levels=2), 168),
  Case("fused/a4q_1", lambda: whole(abstract_cache(), "nvfp4_a4q", q_levels=1), 168),
  Case("fused/page_16", lambda: whole(abstract_cache(page_size=16), "nvfp4_dequant"), 168),
  Case("fused/dim_64", lambda: whole(abstract_cache(head_dim=64), "nvfp4_dequant"), 168),
  Case("fused/dim_256", lambda: whole(abstract_cache(head_dim=256), "nvfp4_dequant"), 168),
  Case(
    "fused/dim_256_masks",
    lambda: masked_whole("nvfp4_dequant", head_dim=256),
    168,
  ),
  Case(
    "fused/dim_256_masks_a4q",
    lambda: masked_whole("nvfp4_a4q", head_dim=256, q_levels=2),
    168,
  ),
  Case(
    "fused/dim_256_a4q",
    lambda: whole(abstract_cache(head_dim=256), "nvfp4_a4q", q_levels=2),
    168,
  ),
  Case(
    "fused/dims_64_256",
    lambda: whole(abstract_cache(head_dim=64, v_head_dim=256), "nvfp4_dequant"),
    168,
  ),
  Case("attention/decode", lambda: split_kv(abstract_cache(), "nvfp4_dequant"), 255),
  Case("attention/prefill", lambda: prefill(abstract_cache(), "nvfp4_dequant"), 255),
  Case("attention/prefill_a4q", lambda: prefill(abstract_cache(), "nvfp4_a4q", q_levels=2), 255),
  Case(
    "attention/prefill_dim_64",
    lambda: prefill(abstract_cache(head_dim=64, page_size=16), "nvfp4_dequant", group=7),
    255,
  ),
  Case(
    "attention/prefill_dim_256", lambda: prefill(abstract_cache(head_dim=256), "nvfp4_dequant"), 255
  ),
  Case(
    "attention/prefill_dim_256_a4q",
    lambda: prefill(abstract_cache(head_dim=256), "nvfp4_a4q", q_levels=2),
    255,
  ),
  Case(
    "attention/prefill_dims_96_160",
    lambda: prefill(abstract_cache(head_dim=96, v_head_dim=160), "nvfp4_dequant"),
    255,
  ),
  Case(
    "attention/prefill_window_soft_cap",
    lambda: prefill(
      abstract_cache(page_size=256), "nvfp4_dequant", causal=False, window=999, soft_cap=30.0
    ),
    255,
  ),
  Case("attention/prefill_fp8_bf16", lambda: prefill(abstract_cache("fp8", "bf16"), "fp8"), 255),
  Case("attention/decode_bf16", lambda: split_kv(abstract_cache("bf16", "bf16"), "bf16"), 255),
  *(
    Case(f"sm100/{name.replace('/', '_')}", partial(on_sm_100, name), 255, arch="sm_100")
    for name in ON_SM_100
  ),
  # The most shared memory that there can be.
  Case(
    "sm100/prefill_a4q_v_bf16", lambda: a4q_on_sm_100(8192, v_format="bf16"), 255, arch="sm_100"
  ),
  Case(
    "sm100/decode_a4q_page_128",
    lambda: a4q_on_sm_100(1, 16, page_size=128, numerics={"soft_cap": 30.0}),
    255,
    arch="sm_100",
  ),
  Case(
    "sm100/prefill_a4q_dims_64_128",
    lambda: a4q_on_sm_100(
      8192,
      head_dim=64,
      v_head_dim=128,
      page_size=32,
      v_format="fp8",
      numerics={"window": 300, "q_levels": 1},
    ),
    255,
    arch="sm_100",
  ),
)
