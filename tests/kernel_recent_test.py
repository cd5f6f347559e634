"""Appends to a cache with a recent window by one PTX program, emulated, and prefill by parts."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import nvfp4_pallas as nv
from benchmarks import oracle
from nvfp4_pallas import recent
from nvfp4_pallas.cache import pool_arrays
from nvfp4_pallas.kernels import append_mosaic_sm90 as kernel
from nvfp4_pallas.kernels import append_recent_ptx, prefill_mosaic_sm90
from nvfp4_pallas.ops import prefill_recent, prefill_xla
from nvfp4_pallas.read_paths import AttentionSpec
from tests import cases, ptx_emulator
from tests.base import TestCase
from tests.kernel_ops_test import on_sm90

SEQS, PAGES = 5, 9
append = jax.jit(functools.partial(nv.append, implementation="xla"))


def raw(a) -> np.ndarray:
  return np.asarray(a).view(np.uint8)


def leaves(cache) -> dict[str, np.ndarray]:
  """The arrays that an append writes, as the program names them."""
  named = {}
  for name in "kv":
    arrays = pool_arrays(getattr(cache, name))
    pairs = zip(("data", "block_scale"), arrays, strict=False)
    named |= {f"{name}_{array}": raw(a) for array, a in pairs}
    named[f"{name}_ring"] = raw(getattr(cache.recent, name).data)
  return named


class StepTest(TestCase):
  def check(self, formats=("nvfp4", "nvfp4"), heads=2, dims=(64, 64), page_size=16, tokens=20, **o):
    by_number = o.pop("by_number", False)
    r = np.random.default_rng(0)
    cache = nv.PagedKVCache.create(
      num_pages=SEQS * PAGES,
      page_size=page_size,
      num_kv_heads=heads,
      head_dim=dims[0],
      v_head_dim=dims[1],
      k_format=formats[0],
      v_format=formats[1],
      recent_window=tokens,
      num_rings=SEQS + 1,
      **o,
    )
    table = jnp.asarray(r.permutation(SEQS * PAGES).reshape(SEQS, PAGES), jnp.int32)
    ids = None if by_number else jnp.asarray([3, 0, -1, 5, 1], jnp.int32)
    lens = np.zeros(SEQS, np.int64)
    # The first is long; then a page leaves here and there.
    for step, q_lens in enumerate(((70, 0, 19, 31, 3), (1,) * 5, (0, 1, 2, 17, 0), (1,) * 5)):
      q_lens = q_lens if step == 0 else tuple(min(n, tokens) for n in q_lens)
      lens += q_lens
      batch = nv.RaggedBatch(
        table,
        jnp.asarray(lens, jnp.int32),
        jnp.asarray(np.cumsum([0, *q_lens]), jnp.int32),
        ids,
      )
      k, v = (jnp.asarray(r.standard_normal((125, heads, d)), jnp.bfloat16) for d in dims)
      want = append(cache, k, v, batch)
      if step:
        self.check_step(cache, k[: sum(q_lens)], v[: sum(q_lens)], batch, want)
      cache = want

  def check_step(self, cache, k, v, batch, want):
    window = cache.recent
    step = append_recent_ptx.Step(
      window.tokens,
      window.num_rings,
      window.ring_pages,
      batch.num_seqs,
      batch.max_pages,
      by_number=batch.ring_ids is None,
    )
    rows = kernel.page_rows(cache.k), kernel.page_rows(cache.v)
    program, programs = append_recent_ptx.append_program(*rows, step)
    inputs = {
      "kv_lens": batch.kv_lens,
      "cu_q_lens": batch.cu_q_lens,
      "starts": window.starts,
      "table": batch.page_table,
      "k_rows": k,
      "v_rows": v,
    }
    if batch.ring_ids is not None:
      inputs["ring_ids"] = batch.ring_ids
    for name, pool in (("k", cache.k), ("v", cache.v)):
      if pool.global_scale is not None:
        inputs[f"{name}_global_scale"] = pool.global_scale
    start = jax.ShapeDtypeStruct((batch.num_seqs,), jnp.int32)
    memory = ptx_emulator.Memory(inputs, {"start": start}, in_place=leaves(cache))
    ptx_emulator.run(program, memory, programs=range(programs), threads=append_recent_ptx.THREADS)
    for name, expected in leaves(want).items():
      np.testing.assert_array_equal(memory.array(name), expected, err_msg=name)
    starts = recent.with_starts(window, batch, jnp.asarray(memory.array("start")))
    np.testing.assert_array_equal(starts, want.recent.starts)

  @parameterized.parameters((1, 16), (16, 16), (20, 32), (64, 16))
  def test_windows(self, tokens, page_size):
    self.check(tokens=tokens, page_size=page_size)

  @parameterized.parameters(
    (("nvfp4", "fp8"), 1, (128, 64)),
    (("fp8", "nvfp4"), 3, (64, 80)),
    (("bf16", "nvfp4"), 2, (64, 64)),
  )
  def test_formats(self, formats, heads, dims):
    self.check(formats, heads, dims)

  def test_rings_by_number(self):
    self.check(by_number=True)

  def test_scales(self):
    self.check(k_global_scale=jnp.asarray([0.3, 2.7], jnp.float32), scale_search="four_over_six")


class PrefillTest(TestCase):
  def check(self, got, built, sinks=None, new_kv=None):
    exact = oracle.attention(
      built.q,
      built.cache,
      built.batch.page_table,
      built.batch.kv_lens,
      built.batch.cu_q_lens,
      read_path="nvfp4_dequant",
      sinks=sinks,
      new_kv=new_kv,
      ring_ids=built.batch.ring_ids,
    )
    out, lse = (np.asarray(a).astype(np.float64) for a in got)
    bound = exact.out_bound(bf16_weights=True, bf16_out=True)
    self.assertTrue((np.abs(out - exact.out) <= bound).all())
    empty = np.isneginf(exact.lse)
    np.testing.assert_array_equal(np.isneginf(lse), empty)
    error = np.abs(lse[~empty] - exact.lse[~empty])
    self.assertTrue((error <= exact.lse_bound()[~empty]).all())

  def test_after_append(self):
    """By the plain kernel, interpreted: pages, rings, and the pages of who has no ring."""
    case = cases.Case("", q_lens=(5, 1, 6), kv_lens=(70, 33, 20), num_kv_heads=1, group=2)
    built = cases.with_window(cases.build(case), 16)
    sinks = jnp.linspace(-1, 2, 2, dtype=jnp.float32)
    run = functools.partial(nv.prefill, read_path="nvfp4_dequant", sinks=sinks)
    run = functools.partial(run, implementation="mosaic_sm90")
    self.check(on_sm90(run, built.q, built.cache, built.batch), built, sinks)

  def test_decode(self):
    case = cases.decode_case(cases.Case("", kv_lens=(70, 0, 33, 20), num_kv_heads=1, group=2))
    built = cases.with_window(cases.build(case, padding_rows=0), 16)
    run = functools.partial(
      nv.decode, read_path="nvfp4_dequant", implementation="mosaic_sm90", num_splits=1
    )
    self.check(on_sm90(run, built.q, built.cache, built.batch), built)

  @parameterized.parameters(
    (64, (72, 16), (32, 16)),  # behind shared pages, of which the step reads some again
    (80, (90, 65), (32, 5)),  # some of the newest were given up
    (0, (40, 20), (32, 20)),
  )
  def test_rows_older_than_the_pages_end(self, start, kv_lens, q_lens):
    """They do not see what is newer than themselves; each part by the definition."""
    case = cases.Case("", q_lens=q_lens, kv_lens=kv_lens, num_kv_heads=1)
    built = cases.build(case)
    cache = cases.with_window(built, 32).cache
    other = max(kv_lens[1] - 32, 0) // 16 * 16
    starts = jnp.asarray([min(start, 64), other, 0], jnp.int32)
    window = dataclasses.replace(cache.recent, starts=starts)
    fill = lambda pool: dataclasses.replace(pool, data=jnp.nan_to_num(pool.data, nan=0.3))
    window = dataclasses.replace(window, k=fill(window.k), v=fill(window.v))
    built = dataclasses.replace(built, cache=dataclasses.replace(built.cache, recent=window))
    spec = AttentionSpec("nvfp4_dequant", True, case.head_dim**-0.5)

    def attend(q, cache, batch):
      runs = [prefill_xla.prefill] * 3
      return prefill_recent.attend(q, cache, batch, spec, None, None, runs=runs)

    for ids in (None, jnp.asarray([0, -1], jnp.int32)):
      batch = dataclasses.replace(built.batch, ring_ids=ids)
      some = dataclasses.replace(built, batch=batch)
      self.check(jax.jit(attend)(some.q, some.cache, some.batch), some)

  @parameterized.parameters(False, True)
  def test_with_new_kv(self, past_only):
    """The parts and how they are merged, each part by the definition."""
    case = cases.Case("", q_lens=(5, 1, 24, 0, 3), kv_lens=(90, 1, 24, 70, 41), num_kv_heads=1)
    built = cases.build(case)
    r = np.random.default_rng(1)
    shape = (built.q.shape[0], 1, case.head_dim)
    new_kv = tuple(jnp.asarray(r.standard_normal(shape), jnp.bfloat16) for _ in range(2))
    built = cases.with_window(built, 20, past_only=past_only)
    spec = AttentionSpec("nvfp4_dequant", True, case.head_dim**-0.5)

    def rows(q, new_kv, batch, spec, *, out_dtype):
      wide = dataclasses.replace(spec, read_path="bf16")
      parts = [(q.astype(jnp.float32), wide, prefill_xla.wide_source(new_kv, batch))]
      return prefill_xla.tiles_of_rows(parts, batch, None)

    with mock.patch.object(prefill_mosaic_sm90, "attention_to_rows", rows):
      got = jax.jit(
        lambda q, cache, batch: prefill_recent.attend(
          q, cache, batch, spec, new_kv, None, runs=[prefill_xla.prefill] * 2
        )
      )(built.q, built.cache, built.batch)
    self.check(got, built, new_kv=new_kv)


if __name__ == "__main__":
  absltest.main()
