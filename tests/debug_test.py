"""debug_checks: every rule fails by its name, inside jit and outside; free when off."""

import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax import lax

import nvfp4_pallas as nv
from tests.base import TestCase

PAGES, PAGE, HEADS, DIM = 6, 16, 1, 64


@dataclasses.dataclass(frozen=True)
class Call:
  """Arguments of a good call: two sequences of 20 and 3 tokens, of which 4 and 1 are new."""

  page_table: Any = ((4, 2, 99), (0, -1, 2**30))
  kv_lens: Any = (20, 3)
  cu_q_lens: Any = (0, 4, 5)
  slot_mapping: Any = None
  k_scale: float = 1.0
  v_scale: float = 1.0
  format: str = "nvfp4"

  def arrays(self):
    cache = nv.PagedKVCache.create(
      num_pages=PAGES, page_size=PAGE, num_kv_heads=HEADS, head_dim=DIM, k_format=self.format
    )
    if self.format != "bf16":
      for name, value in (("k", self.k_scale), ("v", self.v_scale)):
        pool = getattr(cache, name)
        scale = jnp.full((HEADS,), value, jnp.float32)
        cache = dataclasses.replace(cache, **{name: dataclasses.replace(pool, global_scale=scale)})
    lens = self.page_table, self.kv_lens, self.cu_q_lens
    batch = nv.RaggedBatch(*(jnp.asarray(a, jnp.int32) for a in lens))
    slots = self.slot_mapping
    return cache, batch, None if slots is None else jnp.asarray(slots, jnp.int32)


def append(cache, batch, slots):
  k = jnp.ones((5 if slots is None else len(slots), HEADS, DIM), jnp.bfloat16)
  batch = batch if slots is None else None
  return nv.append(cache, k, k, batch, slot_mapping=slots, implementation="xla")


def attend(operation, tokens, cache, batch, slots, **options):
  del slots
  q = jnp.ones((tokens, 2 * HEADS, DIM), jnp.bfloat16)
  path = {"read_path": "nvfp4_dequant"} | options
  return operation(q, cache, batch, implementation="xla", **path)


def prefill(*arrays, **options):
  return attend(nv.prefill, 5, *arrays, **options)


def prefill_new_kv(*arrays):
  k = jnp.ones((5, HEADS, DIM), jnp.bfloat16)
  return prefill(*arrays, new_kv=(k, k))


def decode(*arrays, **options):
  return attend(nv.decode, 2, *arrays, **options)


ONE_EACH = {"cu_q_lens": (0, 1, 2)}
ATTENTION = ((prefill, {}), (prefill_new_kv, {}), (decode, ONE_EACH))
ALL = ((append, {}), *ATTENTION)
COUNTED = ((append, {}), (prefill_new_kv, {}))
RAGGED = ALL[:3]
JITTED = {operation: jax.jit(operation) for operation, _ in ALL}

RULES = (
  (
    (ALL[0], ALL[1], ALL[3]),
    {"page_table": ((4, 6, 99), (0, 0, 0))},
    r"page_table\[0, 1\] must be below 6, got 6",
  ),
  (
    ALL,
    {"page_table": ((4, 2, 99), (-1, 0, 0))},
    r"page_table\[1, 0\] must not be negative, got -1",
  ),
  (ATTENTION, {"page_table": ((9, 2, 0), (0, 0, 0))}, r"page_table\[0, 0\] must be below 6, got 9"),
  (ALL, {"kv_lens": (20, -2)}, "kv_lens must not be negative, got -2 at 1"),
  (ALL, {"kv_lens": (49, 3)}, r"3 pages of 16 hold 48 tokens, kv_lens\[0\] is 49"),
  (COUNTED, {"kv_lens": (3, 3)}, r"kv_lens must count .* kv_lens\[0\] is 3 for 4 new rows"),
  (COUNTED[1:], {"kv_lens": (20, 0)}, r"kv_lens\[1\] must count this step's rows, which new_kv"),
  (RAGGED, {"cu_q_lens": (1, 4, 5)}, "cu_q_lens must start at 0, got 1"),
  (RAGGED, {"cu_q_lens": (0, 4, 2)}, "cu_q_lens must ascend, got 4 then 2 at 1 and 2"),
  (RAGGED, {"cu_q_lens": (0, 4, 7), "kv_lens": (20, 9)}, "must end at most at 5 tokens, got 7"),
  (ATTENTION[2:], {"cu_q_lens": (0, 2, 2)}, "cu_q_lens must be 0..2 for decode, got 2 at 1"),
  (ALL[:1], {"slot_mapping": (3, 96, -1, 4, 5)}, r"slot_mapping\[1\] must be below 96, got 96"),
  (
    ALL[:1],
    {"slot_mapping": (-1, 7, -1, 8, 7)},
    r"\bslot_mapping\[4\] must not repeat a slot, got 7",
  ),
  (
    ALL[:1],
    {"page_table": ((0, 5, 0), (5, 0, 0)), "kv_lens": (20, 1)},
    r"batch's slot_mapping\[4\] must not repeat a slot, got 80",
  ),
  (ALL, {"k_scale": np.nan}, r"cache.k.global_scale must be positive and .*, got nan at 0"),
  (ALL, {"v_scale": np.inf}, r"cache.v.global_scale must be positive and .*, got inf at 0"),
  (ALL, {"v_scale": 0.0}, r"cache.v.global_scale must be positive and .*, got 0.0 at 0"),
)
EACH_RULE = tuple(
  (operation, base | changes, message)
  for operations, changes, message in RULES
  for operation, base in operations
)


class DebugTestCase(TestCase):
  """JAX also logs what a callback raises; not here."""

  def setUp(self):
    super().setUp()
    logger = logging.getLogger("jax")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    self.addCleanup(logger.setLevel, level)
    # JAX keeps the error of the device's last callback and says it again when the process ends.
    self.addCleanup(jax.jit(lambda: jax.debug.callback(lambda: None)))


class RulesTest(DebugTestCase):
  @parameterized.parameters(*EACH_RULE)
  def test_each_rule(self, operation, changes, message):
    arrays = Call(**changes).arrays()
    run = JITTED[operation]
    jax.block_until_ready(run(*arrays))  # off: traced without checks, and nothing is said
    with nv.debug_checks():
      with self.assertRaisesRegex(ValueError, message):
        operation(*arrays)
      with self.assertRaisesRegex(jax.errors.JaxRuntimeError, message):
        jax.block_until_ready(run(*arrays))
    jax.block_until_ready(run(*arrays))

  @parameterized.parameters(*ALL)
  def test_good_values(self, operation, base):
    for slots in (None, (3, -1, 95, -1, -(2**31))) if operation is append else (None,):
      arrays = Call(**base, slot_mapping=slots).arrays()
      want = JITTED[operation](*arrays)
      with nv.debug_checks():
        operation(*arrays)
        jax.tree.map(np.testing.assert_array_equal, JITTED[operation](*arrays), want)
        jax.effects_barrier()

  def test_a_cache_without_global_scales(self):
    arrays = Call(format="bf16").arrays()
    with nv.debug_checks():
      jax.block_until_ready(JITTED[append](*arrays))
      prefill(*arrays, read_path="bf16")

  def test_entries_that_a_call_does_not_use(self):
    """Pages before an append's rows or a window, of sequences without queries, of old keys."""
    old = {"page_table": ((99, 2, 99), (0, -1, 7))}
    with nv.debug_checks():
      append(*Call(**old).arrays())
      prefill(*Call(**old).arrays(), window=1)
      decode(*Call(**old, **ONE_EACH).arrays(), window=4)
      prefill(*Call(page_table=((99, 99, 99), (0, 0, 0)), cu_q_lens=(0, 0, 3)).arrays())
      prefill_new_kv(*Call(page_table=((4, 99, 99), (0, 0, 0))).arrays())
      append(*Call(page_table=((99, 99, 99), (0, 0, 0)), cu_q_lens=(0, 0, 3)).arrays())
      with self.assertRaisesRegex(ValueError, r"page_table\[0, 0\] must be below 6, got 99"):
        decode(*Call(**old, **ONE_EACH).arrays(), window=5)
      with self.assertRaisesRegex(ValueError, r"page_table\[0, 0\] must be below 6, got 99"):
        decode(*Call(**old, **ONE_EACH).arrays(), window=4, read_path="nvfp4_a8q")

  def test_scan_vmap_and_grad(self):
    cache, batch, _ = Call(**ONE_EACH).arrays()
    bad = dataclasses.replace(batch, page_table=batch.page_table.at[1, 0].set(PAGES))
    both = jax.tree.map(lambda *a: jnp.stack(a), batch, bad)
    q = jnp.ones((2, 2 * HEADS, DIM), jnp.float32)

    def scanned(batches):
      return lax.scan(lambda c, b: (c, decode(cache, b, None)), None, batches)[1]

    def of_q(q, batch):
      path = {"read_path": "nvfp4_dequant", "implementation": "xla"}
      return nv.decode(q, cache, batch, **path)

    derivative = lambda batch: jax.jvp(lambda q: of_q(q, batch), (q,), (q,))
    good = jax.tree.map(lambda a: jnp.stack([a, a]), batch)
    with nv.debug_checks():
      for run, passes, fails in (
        (scanned, good, both),
        (jax.vmap(lambda b: decode(cache, b, None)), good, both),
        (derivative, batch, bad),
      ):
        jax.block_until_ready(jax.jit(run)(passes))
        with self.assertRaisesRegex(
          jax.errors.JaxRuntimeError, r"page_table\[1, 0\] must be below 6, got 6"
        ):
          jax.block_until_ready(jax.jit(run)(fails))


class SwitchTest(DebugTestCase):
  @parameterized.parameters(*ALL)
  def test_free_when_off(self, operation, base):
    arrays = Call(**base).arrays()
    with nv.debug_checks():
      self.assertIn("debug_callback", str(jax.make_jaxpr(operation)(*arrays)))
    off = str(jax.make_jaxpr(operation)(*arrays))
    self.assertNotIn("callback", off)
    self.assertEmpty(jax.make_jaxpr(operation)(*arrays).effects)

  def test_as_a_decorator_and_one_trace_each(self):
    traces = []

    @jax.jit
    def run(cache, batch):
      traces.append(None)
      return prefill(cache, batch, None)

    checked = nv.debug_checks()(run)
    cache, batch, _ = Call().arrays()
    for _ in range(2):
      run(cache, batch)
      checked(cache, batch)
    self.assertLen(traces, 2)
    bad = dataclasses.replace(batch, page_table=batch.page_table + PAGES)
    run(cache, bad)
    with self.assertRaisesRegex(jax.errors.JaxRuntimeError, "must be below 6, got 10"):
      jax.block_until_ready(checked(cache, bad))
    self.assertLen(traces, 2)

  def test_off_again_after_an_error(self):
    cache, batch, _ = Call(page_table=((9, 9, 9), (9, 9, 9))).arrays()
    with self.assertRaisesRegex(ValueError, r"page_table\[0, 0\] must be below 6, got 9"):
      with nv.debug_checks():
        prefill(cache, batch, None)
    JITTED[prefill](cache, batch, None)


class RingsTest(DebugTestCase):
  def test_pages_that_are_not_needed_yet(self):
    """Tokens in a ring need no page; those that have left it do."""
    cache = nv.PagedKVCache.create(
      num_pages=6, page_size=16, num_kv_heads=HEADS, head_dim=DIM, recent_window=16, num_rings=1
    )
    x = jnp.zeros((60, HEADS, DIM), jnp.bfloat16)
    lens = jnp.asarray([60], jnp.int32), jnp.asarray([0, 60], jnp.int32)
    with nv.debug_checks():
      batch = nv.RaggedBatch(jnp.asarray([[4, 2, -1, -1]], jnp.int32), *lens)
      nv.append(cache, x, x, batch)
      wrong = dataclasses.replace(batch, page_table=jnp.asarray([[4, -1, -1, -1]], jnp.int32))
      with self.assertRaisesRegex(ValueError, r"page_table\[0, 1\] must not be negative"):
        nv.append(cache, x, x, wrong)
      # In a decoding step: the page that leaves now.
      cache = nv.append(cache, x, x, batch)
      step = nv.RaggedBatch.for_decode(batch.page_table, jnp.asarray([64], jnp.int32))
      with self.assertRaisesRegex(ValueError, r"page_table\[0, 2\] must not be negative"):
        nv.append(cache, x[:1], x[:1], step)
      without = dataclasses.replace(step, ring_ids=jnp.asarray([-1], jnp.int32))
      with self.assertRaisesRegex(ValueError, r"page_table\[0, 3\] must not be negative"):
        nv.append(cache, x[:1], x[:1], without)
      short = dataclasses.replace(step, kv_lens=jnp.asarray([20], jnp.int32))
      with self.assertRaisesRegex(ValueError, r"kv_lens\[0\] must not fall more than"):
        nv.append(cache, x[:1], x[:1], short)

  def test_two_sequences_with_one_ring(self):
    cache = nv.PagedKVCache.create(
      num_pages=6, page_size=16, num_kv_heads=HEADS, head_dim=DIM, recent_window=16, num_rings=2
    )
    x = jnp.zeros((2, HEADS, DIM), jnp.bfloat16)
    batch = nv.RaggedBatch.for_decode(
      jnp.asarray([[0], [1]], jnp.int32), jnp.asarray([1, 1], jnp.int32)
    )
    batch = dataclasses.replace(batch, ring_ids=jnp.asarray([1, 1], jnp.int32))
    append = jax.jit(lambda *arrays: nv.append(*arrays))
    with nv.debug_checks(), self.assertRaisesRegex(Exception, r"ring_ids\[1\] must not repeat a"):
      jax.block_until_ready(append(cache, x, x, batch))
    decode = jax.jit(lambda *arrays: nv.decode(*arrays, read_path="nvfp4_dequant"))
    with nv.debug_checks(), self.assertRaisesRegex(Exception, r"ring_ids\[1\] must not repeat a"):
      jax.block_until_ready(decode(x, cache, batch))

  @parameterized.parameters(
    (nv.open_rings, (1, 1), (0, 16), r"ring_ids\[1\] must not repeat a ring, got 1"),
    (nv.open_rings, (0, 1), (16, 20), r"kv_lens\[1\] must be a multiple of page_size 16 .* got 20"),
    (nv.copy_rings, (0, 0), (1, 1), r"target\[1\] must not repeat a ring, got 1"),
  )
  def test_rings_that_are_opened_or_copied(self, operation, first, second, message):
    cache = nv.PagedKVCache.create(
      num_pages=6, page_size=16, num_kv_heads=HEADS, head_dim=DIM, recent_window=16, num_rings=2
    )
    arrays = [jnp.asarray(a, jnp.int32) for a in (first, second)]
    run = jax.jit(lambda *arrays: operation(*arrays))
    jax.block_until_ready(run(cache, *arrays))  # unseen without checks
    with nv.debug_checks(), self.assertRaisesRegex(Exception, message):
      jax.block_until_ready(run(cache, *arrays))


if __name__ == "__main__":
  absltest.main()
