"""The kernel cases that `python -m benchmarks aot` compiles, as data: a call and its bounds.

A new kernel adds a function to aot_calls.py and one line of CASES.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp

from benchmarks.aot_calls import (
  HEAD_DIM,
  HEADS,
  RECENT,
  a4q_on_sm_100,
  abstract_cache,
  append,
  append_definition,
  append_recent,
  append_to_layers,
  decode,
  engine_step,
  in_steps,
  layer,
  masked_tail,
  masked_whole,
  new_rows,
  on_mesh,
  on_sm_100,
  pack,
  prefill,
  split_kv,
  tail,
  unpack,
  whole,
)


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
