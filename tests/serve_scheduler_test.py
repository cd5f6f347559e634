"""Which tokens a step computes, on which pages, and whether those hold what was computed."""

import itertools

from absl.testing import absltest, parameterized

from benchmarks.serve_costs import Times
from benchmarks.serve_pages import PagePool
from benchmarks.serve_policies import POLICIES, NoEvict, Retraction, Vllm
from benchmarks.serve_run import serve
from benchmarks.serve_scheduler import Request, Scheduler, TooLarge
from benchmarks.serve_workloads import HASHED_TOKENS, Item, Workload, generate
from tests.base import TestCase


class OneSecond:
  """An executor of equally long steps."""

  def execute(self, step):
    return Times(other=1.0)


def scheduler(num_pages, page_size=16, policy=None, *, prefix_cache=True, **options):
  pool = PagePool(num_pages, prefix_cache=prefix_cache)
  return Scheduler(pool, page_size, policy=policy, **options)


def added(s, *sizes, hash_ids=()):
  requests = [Request(i, Item(0.0, *size, hash_ids)) for i, size in enumerate(sizes)]
  for request in requests:
    s.add(request)
  return requests


def run_step(s):
  step = s.schedule()
  s.complete(step)
  return step.decision()


def token(request, position):
  """What a token is, as far as anybody can tell: equal ones have equal beginnings."""
  if request.item.hash_ids and position < request.prompt:
    return request.item.hash_ids[position // HASHED_TOKENS], position % HASHED_TOKENS
  return "own", request.index, position


class Shadow:
  """A cache that remembers what was written, and checks some of what is read, all in turns."""

  TURNS = 13

  def __init__(self, test, page_size):
    self.test, self.page_size, self.slots, self.turn = test, page_size, {}, 0

  def execute(self, step):
    rows = [(r, r.computed, 1) for r in step.decodes] + step.chunks
    for request, before, n in rows:  # all is written before anything is read
      for position in range(before, before + n):
        self.slots[self._slot(request, position)] = token(request, position)
    self.turn = (self.turn + 1) % self.TURNS
    for request, before, n in rows:
      for position in range(self.turn, before + n, self.TURNS):
        found = self.slots[self._slot(request, position)]
        if found != token(request, position):
          self.test.fail(f"request {request.index}, position {position}: {found}")
    return Times(other=1.0)

  def _slot(self, request, position):
    return request.pages[position // self.page_size], position % self.page_size


class StepTest(TestCase):
  def test_one_budget_for_decodes_then_chunks_then_who_waits(self):
    s = scheduler(100, budget=40)
    added(s, (20, 3), (50, 2), (30, 1))
    self.assertEqual(run_step(s), ((), ((0, 0, 20), (1, 0, 20)), ()))
    self.assertEqual(run_step(s), ((0,), ((1, 20, 30), (2, 0, 9)), ()))
    self.assertEqual(run_step(s), ((0, 1), ((2, 9, 21),), ()))
    self.assertEqual(s.running, [])
    self.assertEqual(s.pool.free, 100)

  def test_pages_are_taken_for_the_tokens_of_the_step(self):
    s = scheduler(100, budget=40)
    request, _ = added(s, (70, 20), (10, 1))
    for pages in (3, 5, 5):  # of 40 tokens, 70, 71
      step = s.schedule()
      self.assertLen(request.pages, pages)
      s.complete(step)

  def test_most_running(self):
    s = scheduler(100, most_running=2)
    added(s, (4, 2), (4, 2), (4, 2))
    self.assertEqual(run_step(s)[1], ((0, 0, 4), (1, 0, 4)))
    self.assertEqual(run_step(s), ((0, 1), (), ()))
    self.assertEqual(run_step(s)[1], ((2, 0, 4),))

  def test_most_chunks(self):
    """One of the first step goes on, and one more starts beside it."""
    s = scheduler(100, most_chunks=2, budget=40)
    added(s, (4, 2), (70, 2), (4, 2), (4, 2))
    self.assertEqual(run_step(s)[1], ((0, 0, 4), (1, 0, 36)))
    self.assertEqual(run_step(s), ((0,), ((1, 36, 34), (2, 0, 4)), ()))
    self.assertEqual(run_step(s), ((1, 2), ((3, 0, 4),), ()))

  def test_the_newest_gives_way_and_reads_all_again(self):
    """Three pages: both have one, the first takes the third for its 17th token."""
    s = scheduler(3, policy=Vllm(), prefix_cache=False)
    one, two = added(s, (16, 4), (15, 4))
    self.assertEqual(run_step(s)[1], ((0, 0, 16), (1, 0, 15)))
    self.assertEqual(run_step(s), ((0, 1), (), ()))
    # Two needs a second page, and there is none: nobody else runs after it.
    self.assertEqual(run_step(s), ((0,), (), (1,)))
    self.assertEqual((two.pages, two.computed, two.generated), ([], 0, 2))
    self.assertEqual(s.waiting[0], two)
    # 17 tokens of it need two pages.
    self.assertEqual(run_step(s), ((0,), (), ()))
    self.assertEqual(run_step(s), ((), ((1, 0, 17),), ()))
    self.assertEqual((s.preemptions, s.recomputed), (1, 16))
    self.assertEqual((two.generated, one.preemptions, two.preemptions), (3, 0, 1))

  def test_nobody_starts_where_somebody_gave_way(self):
    """The second gives way to nobody but itself, and its first chunk would fit again at once."""
    s = scheduler(6, policy=Vllm(reserve_prompt=False), prefix_cache=False, budget=40)
    added(s, (16, 20), (80, 9))
    self.assertEqual(run_step(s)[1], ((0, 0, 16), (1, 0, 24)))
    self.assertEqual(run_step(s), ((0,), ((1, 24, 39),), ()))
    self.assertEqual(run_step(s), ((0,), (), (1,)))
    self.assertEqual(run_step(s), ((0,), ((1, 0, 39),), ()))

  def test_steps_that_are_short_of_pages(self):
    """In the second step the newest gives way for the third page, in the third it cannot start;
    the most that run, a budget or chunks that are used up are no want of pages."""
    s = scheduler(2, prefix_cache=False)
    added(s, (16, 3), (16, 3))
    counts = []
    while s.running or s.waiting:
      run_step(s)
      counts.append(s.short_steps)
    self.assertEqual(counts, [0, 1, 2, 2, 2])
    for limits in ({"most_running": 1}, {"budget": 16}, {"most_chunks": 1}):
      s = scheduler(99, **limits)
      added(s, (16, 3), (16, 3))
      while s.running or s.waiting:
        run_step(s)
      self.assertEqual(s.short_steps, 0)

  def test_who_gave_way_finds_its_pages_again(self):
    s = scheduler(4)
    _, two = added(s, (16, 3), (40, 4))
    run_step(s)
    self.assertEqual(run_step(s), ((0,), (), (1,)))
    run_step(s)  # the first ends
    # Its last page went to the first one; the two full ones are found.
    self.assertEqual(run_step(s), ((), ((1, 32, 9),), ()))
    self.assertEqual((two.cached, s.recomputed, s.hits), (0, 8, 0))

  def test_the_last_token_is_always_computed(self):
    ids = (7, 8)
    s = scheduler(200)
    added(s, (1024, 1), hash_ids=ids)
    run_step(s)
    added(s, (1024, 1), (1000, 1), hash_ids=ids)
    step = s.schedule()
    self.assertEqual(step.decision()[1], ((0, 1008, 16), (1, 992, 8)))
    self.assertEqual((s.queries, s.hits), (1024 + 1024 + 1000, 1008 + 992))

  def test_a_prompt_is_shared_within_a_step(self):
    s = scheduler(200)
    one, two = added(s, (600, 2), (600, 2), hash_ids=(7, 8))
    self.assertEqual(s.schedule().decision()[1], ((0, 0, 600), (1, 592, 8)))
    self.assertEqual(one.pages[:37], two.pages[:37])
    self.assertEqual(s.pool.free, 200 - 38 - 1)

  def test_a_hit_of_all_but_one_token_decodes(self):
    s = scheduler(200)
    added(s, (513, 1), hash_ids=(7, 8))
    run_step(s)
    added(s, (513, 1), hash_ids=(7, 8))
    step = s.schedule()
    self.assertEqual((len(step.decodes), step.context, step.chunks), (1, 513, []))
    s.complete(step)
    self.assertEqual(step.decodes[0].computed, 513)

  def test_a_request_larger_than_the_pool(self):
    s = scheduler(10)
    added(s, (150, 11))  # 160 tokens are in the cache at its end
    with self.assertRaisesRegex(
      TooLarge, "request 5 needs 11 pages of 16 tokens for 150 prompt and 12 output.*pool has 10"
    ):
      s.add(Request(5, Item(0.0, 150, 12)))
    self.assertLen(s.waiting, 1)

  @parameterized.parameters(
    ({"budget": 0}, "budget must be at least 1, got 0"),
    ({"most_running": 0}, "most_running must be at least 1, got 0"),
    ({"page_size": 48}, "page_size must divide 512, got 48"),
  )
  def test_wrong_options(self, options, message):
    with self.assertRaisesRegex(ValueError, message):
      scheduler(10, **options)


class PolicyTest(TestCase):
  def test_watermark_beside_others_alone(self):
    """Of 10 pages one in ten stays free, once somebody runs."""
    s = scheduler(10, policy=Vllm(watermark=0.1), prefix_cache=False)
    added(s, (160, 1))
    self.assertEqual(run_step(s)[1], ((0, 0, 160),))
    added(s, (80, 2), (70, 2))
    self.assertEqual(run_step(s)[1], ((0, 0, 80),))  # 5 more would leave none
    with self.assertRaisesRegex(ValueError, "watermark must be from 0 up to less than 1, got 1"):
      Vllm(1)

  def test_the_whole_prompt_or_its_first_chunk(self):
    for reserve, chunks in ((True, ((0, 0, 80),)), (False, ((0, 0, 80), (1, 0, 20)))):
      s = scheduler(10, policy=Vllm(reserve_prompt=reserve), budget=100)
      added(s, (80, 3), (90, 3))
      self.assertEqual(run_step(s)[1], chunks)

  def test_no_evict_promises_the_output(self):
    """80 + 33 - 1 tokens are 7 pages at the end: with 4 more 10 do not do."""
    s = scheduler(10, policy=NoEvict())
    added(s, (80, 33), (16, 49), (16, 17))
    self.assertEqual(run_step(s)[1], ((0, 0, 80),))
    s.waiting.popleft()
    self.assertEqual(run_step(s), ((0,), ((2, 0, 16),), ()))

  def test_retraction_expects_a_share_of_the_output(self):
    policy = Retraction(share=0.5, fall=0.0)
    s = scheduler(10, policy=policy)
    added(s, (80, 32), (16, 32), (16, 32))
    # The second: 1 page, 2 of output and half of the first's 2, of 5 that are free.
    self.assertEqual(run_step(s)[1], ((0, 0, 80), (1, 0, 16)))

  def test_who_has_written_least_is_retracted(self):
    policy = Retraction(share=0.0, least=0.0, steps=1)
    s = scheduler(7, policy=policy, prefix_cache=False)
    one, two, three = added(s, (30, 9), (30, 9), (30, 9))
    one.tokens += 4
    three.tokens += 2
    s.policy = Vllm()
    run_step(s)
    s.policy = policy
    # All three need a page in the same step or soon, one is left.
    while not s.preemptions:
      decision = run_step(s)
    self.assertEqual(decision[2], (1,))
    self.assertGreater(policy.share, 0)

  def test_what_is_not_computed_after_all_is_not_found(self):
    """The first would fill its second page in the step in which the second one needs it."""
    s = scheduler(3)
    one, _ = added(s, (31, 9), (16, 9))
    self.assertEqual(run_step(s)[1], ((0, 0, 31), (1, 0, 16)))
    s.policy = Retraction(steps=1)
    self.assertEqual(run_step(s), ((1,), (), (0,)))
    self.assertLen(s.pool.find(s._keys(one, 2)), 1)

  def test_the_share_falls(self):
    policy = Retraction()
    for _ in range(700):
      policy.stepped()
    self.assertAlmostEqual(policy.share, 0.098)


class InvariantsTest(TestCase):
  """Whole runs with a cache that remembers what was written."""

  @parameterized.parameters(*itertools.product(POLICIES, (True, False), (16, 64)))
  def test_pages_hold_what_was_computed(self, name, prefix_cache, page_size):
    workload = generate(
      30, prompt=900, output=120, spread=0.6, reuse=0.6, documents=3, seed=page_size
    )
    longest = max(i.prompt + i.output for i in workload.items)
    policy = Retraction(share=0.0, least=0.0, steps=2) if name == "retraction" else POLICIES[name]()
    s = scheduler(
      -(-3 * longest // page_size), page_size, policy, prefix_cache=prefix_cache, budget=700
    )
    shadow = Shadow(self, page_size)

    def check(s, step):
      s.pool.check([r.pages for r in s.running])
      self.assertLessEqual(step.tokens, 700)
      self.assertFalse(step.preempted and step.started)
      for request in s.running:
        self.assertLen(request.pages, s.pages(request.computed))

    run = serve(workload, s, shadow, after_step=check)
    self.assertLen([t for t in run.timelines if t.finished is not None], 30)
    self.assertEqual(
      [t.request.generated for t in run.timelines], [i.output for i in workload.items]
    )
    self.assertEqual(s.pool.free, s.pool.num_pages)
    self.assertEqual(len(run.gaps), sum(i.output - 1 for i in workload.items))
    computed = run.prefill_tokens + run.decode_tokens
    known = sum(i.prompt + i.output - 1 for i in workload.items)
    self.assertEqual(bool(s.hits), prefix_cache)
    self.assertEqual(bool(s.preemptions), name != "no_evict")
    if not prefix_cache:
      self.assertEqual(computed, known + s.recomputed)
      self.assertEqual(bool(s.recomputed), name != "no_evict")

  def test_first_chunk_alone_preempts_more(self):
    """What the option is for: prompts that start and do not fit."""
    items = tuple(Item(0.0, 1000, 10) for _ in range(8))
    counts = []
    for reserve in (True, False):
      s = scheduler(150, policy=Vllm(reserve_prompt=reserve), budget=300, prefix_cache=False)
      serve(Workload("", items), s, OneSecond())
      counts.append(s.preemptions)
    self.assertEqual(counts[0], 0)
    self.assertGreater(counts[1], 3)


if __name__ == "__main__":
  absltest.main()
