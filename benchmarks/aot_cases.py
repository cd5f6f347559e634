"""The kernel cases that `python -m benchmarks aot` compiles, as data.

A new kernel adds a function that returns (function, abstract arguments) and one line of CASES.
Shapes are those of a served model: 8 KV heads, head_dim 128, pages of 64 tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Case:
  """One function to compile ahead of time.

  Attributes:
    name: `kernel/variant`; the name on the command line.
    build: returns the function and its arguments as jax.ShapeDtypeStruct pytrees.
    max_registers: the compilation counts as failed above this many registers a thread; 0 for
      what XLA compiles alone, of which only the HLO is looked at.
    donate: positions of donated arguments.
  """

  name: str
  build: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
  max_registers: int
  donate: tuple[int, ...] = ()


HEADS, HEAD_DIM, PAGE_SIZE, NUM_PAGES = 8, 128, 64, 512
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
):
  from nvfp4_pallas import PagedKVCache

  create = partial(
    PagedKVCache.create,
    num_pages=num_pages,
    page_size=page_size,
    num_kv_heads=heads,
    head_dim=head_dim,
    v_head_dim=v_head_dim,
    k_format=k_format,
    v_format=v_format,
  )
  return jax.eval_shape(create)


def append(k_format, v_format, *, tokens=64, **options):
  from nvfp4_pallas.kernels import append_mosaic_sm90 as kernel

  cache = abstract_cache(k_format, v_format, **options)
  k, v = (
    S((tokens, cache.num_kv_heads, pool.head_dim), jnp.bfloat16) for pool in (cache.k, cache.v)
  )
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


def decode(cache, read_path, **options):
  return attention(cache, read_path, tokens=64, seqs=64, num_splits=8, max_q_len=1, **options)


def prefill(cache, read_path, **options):
  return attention(cache, read_path, tokens=4096, seqs=4, **options)


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


CASES = (
  Case("definition/append_nvfp4", lambda: append_definition("nvfp4"), 0, donate=(0,)),
  Case("definition/append_fp8", lambda: append_definition("fp8"), 0, donate=(0,)),
  Case("pack/scalar", lambda: pack((4096, HEADS), HEAD_DIM, ()), 80),
  Case("pack/per_head", lambda: pack((4096, HEADS), HEAD_DIM, (HEADS,)), 80),
  Case("pack/float16", lambda: pack((4096, HEADS), HEAD_DIM, (), jnp.float16), 80),
  Case("pack/float32", lambda: pack((4096, HEADS), HEAD_DIM, (), jnp.float32), 80),
  Case("pack/odd_rows_dim_80", lambda: pack((4095, 5), 80, (5,)), 80),
  Case("unpack/scalar", lambda: unpack((4096, HEADS), HEAD_DIM, ()), 48),
  Case("unpack/per_head", lambda: unpack((4096, HEADS), HEAD_DIM, (HEADS,)), 48),
  Case("unpack/float32", lambda: unpack((4096, HEADS), HEAD_DIM, (), jnp.float32), 48),
  Case("unpack/odd_rows_dim_80", lambda: unpack((4095, 5), 80, (5,)), 48),
  Case("append/nvfp4", lambda: append("nvfp4", "nvfp4"), 80, donate=(0,)),
  Case("append/fp8", lambda: append("fp8", "fp8"), 144, donate=(0,)),
  Case("append/bf16", lambda: append("bf16", "bf16"), 32, donate=(0,)),
  Case(
    "append/nvfp4_bf16_dims_80_256",
    lambda: append("nvfp4", "bf16", head_dim=80, v_head_dim=256),
    80,
    donate=(0,),
  ),
  # 2^33 bytes of codes in one array.
  Case(
    "append/large",
    lambda: append("nvfp4", "nvfp4", num_pages=2**17, page_size=128),
    80,
    donate=(0,),
  ),
  Case("attention/decode", lambda: decode(abstract_cache(), "nvfp4_dequant"), 255),
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
  Case("attention/decode_bf16", lambda: decode(abstract_cache("bf16", "bf16"), "bf16"), 255),
)
