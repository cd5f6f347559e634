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
    max_registers: the compilation counts as failed above this many registers a thread.
    donate: positions of donated arguments.
  """

  name: str
  build: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
  max_registers: int
  donate: tuple[int, ...] = ()


HEADS, HEAD_DIM, PAGE_SIZE, NUM_PAGES = 8, 128, 64, 512
S = jax.ShapeDtypeStruct


def pack(leading, n, scale_shape, dtype=jnp.bfloat16):
  from nvfp4_pallas.kernels import pack_mosaic_sm90 as kernel

  return kernel.pack, (S((*leading, n), dtype), S(scale_shape, jnp.float32))


def unpack(leading, n, scale_shape, dtype=jnp.bfloat16):
  from nvfp4_pallas.kernels import pack_mosaic_sm90 as kernel

  codes, scales = S((*leading, n // 2), jnp.uint8), S((*leading, n // 16), jnp.float8_e4m3fn)
  return partial(kernel.unpack, dtype=dtype), (codes, scales, S(scale_shape, jnp.float32))


def append(
  k_format,
  v_format,
  *,
  tokens=64,
  heads=HEADS,
  head_dim=HEAD_DIM,
  v_head_dim=HEAD_DIM,
  num_pages=NUM_PAGES,
  page_size=PAGE_SIZE,
):
  from nvfp4_pallas import PagedKVCache
  from nvfp4_pallas.kernels import append_mosaic_sm90 as kernel

  cache = jax.eval_shape(
    lambda: PagedKVCache.create(
      num_pages=num_pages,
      page_size=page_size,
      num_kv_heads=heads,
      head_dim=head_dim,
      v_head_dim=v_head_dim,
      k_format=k_format,
      v_format=v_format,
    )
  )
  k, v = (S((tokens, heads, dim), jnp.bfloat16) for dim in (head_dim, v_head_dim))
  return kernel.append, (cache, k, v, S((tokens,), jnp.int32))


CASES = (
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
)
