"""Pages of a serving run: sharing, finding again, and what is forgotten first."""

import random

from absl.testing import absltest

from benchmarks.serve_pages import PagePool
from tests.base import TestCase


class PagePoolTest(TestCase):
  def filled(self, keys, num_pages=4):
    """A pool of pages that waited with these keys, the first one longest."""
    pool = PagePool(num_pages)
    for key in keys:
      (page,) = pool.take(1)
      pool.name(page, key)
      pool.give_back([page])
    return pool

  def test_found_up_to_the_first_gap(self):
    pool = self.filled([10, 11, 13])
    self.assertEqual(pool.find([10, 11, 12, 13]), [0, 1])
    self.assertEqual(pool.find([12, 10]), [])

  def test_unused_pages_go_before_those_with_keys(self):
    pool = self.filled([10, 11])
    self.assertEqual((pool.take(2), pool.evictions), ([2, 3], 0))
    self.assertEqual((pool.take(1), pool.evictions), ([0], 1))
    self.assertEqual(pool.find([10]), [])
    self.assertEqual(pool.find([11]), [1])

  def test_who_was_held_last_is_forgotten_last(self):
    pool = self.filled([10, 11, 12, 13])
    pool.hold([0])
    pool.give_back([0])
    self.assertEqual(pool.take(3), [1, 2, 3])
    self.assertEqual(pool.find([10]), [0])

  def test_the_end_of_a_prompt_is_forgotten_before_its_beginning(self):
    pool = PagePool(3)
    pages = pool.take(3)
    for page, key in zip(pages, (10, 11, 12), strict=True):
      pool.name(page, key)
    pool.give_back(pages)
    pool.take(1)
    self.assertEqual(pool.find([10, 11, 12]), pages[:2])

  def test_a_shared_page_is_free_when_all_have_given_it_back(self):
    pool = self.filled([10])
    pool.hold([0])
    pool.hold([0])
    self.assertEqual((pool.free, pool.waiting([0]), pool.held_once([0])), (3, 0, 0))
    pool.give_back([0])
    self.assertEqual((pool.free, pool.held_once([0])), (3, 1))
    pool.give_back([0])
    self.assertEqual((pool.free, pool.waiting([0]), pool.usage), (4, 1, 0.0))

  def test_the_first_page_of_a_key_stays_its_page(self):
    pool = PagePool(4)
    pages = pool.take(2)
    for page in pages:
      pool.name(page, 10)
    self.assertEqual(pool.find([10]), pages[:1])
    pool.give_back(pages)
    pool.take(3)  # the two that were never used, and page 1, which waited first
    self.assertEqual((pool.find([10]), pool.evictions), ([0], 0))

  def test_without_a_prefix_cache(self):
    pool = PagePool(2, prefix_cache=False)
    (page,) = pool.take(1)
    pool.name(page, 10)
    self.assertEqual(pool.find([10]), [])
    pool.give_back([page])
    pool.take(2)
    self.assertEqual(pool.evictions, 0)

  def test_what_is_not_there(self):
    with self.assertRaisesRegex(ValueError, "num_pages must be at least 1, got 0"):
      PagePool(0)
    with self.assertRaisesRegex(ValueError, "count must be at most the 2 free pages, got 3"):
      PagePool(2).take(3)

  def test_check_sees_what_is_wrong(self):
    pool = PagePool(4)
    pages = pool.take(2)
    pool.check([pages])
    for wrong in ([], [pages[:1]], [pages, pages[:1]], [pages, [3]]):
      with self.assertRaises(AssertionError):
        pool.check(wrong)
    pool._waiting[pages[0]] = None
    with self.assertRaisesRegex(AssertionError, "must not wait"):
      pool.check([pages])

  def test_at_random_nothing_is_lost(self):
    r = random.Random(0)
    pool, held, keys = PagePool(20), [], range(30)
    for _ in range(3000):
      if held and r.random() < 0.5:
        pool.give_back(held.pop(r.randrange(len(held))))
      else:
        start = r.randrange(25)
        found = pool.find(keys[start : start + 3])
        new = r.randrange(3)
        if pool.waiting(found) + new > pool.free:
          continue
        pool.hold(found)
        pages = pool.take(new)
        for page in pages:
          pool.name(page, r.choice(keys))
        held.append(found + pages)
      pool.check(held)
    self.assertGreater(pool.evictions, 100)


if __name__ == "__main__":
  absltest.main()
