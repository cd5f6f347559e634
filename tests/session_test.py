"""A serving session of thousands of random steps against a dictionary: every byte of every token.

Hypothesis draws what happens next (session.py does it), and makes a failure short. After each step
all that is cached must be there: of every sequence, in its pages or its ring, and of every full
page that waits to be found again. And attention must not see where its keys lie: it has the same
bits over the same tokens in other pages.
"""

import collections
import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from hypothesis import strategies as st
from hypothesis.stateful import (
  RuleBasedStateMachine,
  invariant,
  precondition,
  rule,
  run_state_machine_as_test,
)

import nvfp4_pallas as nv
from tests import examples
from tests.base import TestCase
from tests.session import LONGEST, NUM_PAGES, PAGE, PLACES, Preempted
from tests.session_model import GROUP, HEADS, K_DIM, WORDS, Kind, by_hand, check_contents

KINDS = (
  Kind("nvfp4", "nvfp4"),
  Kind("fp8", "fp8"),
  Kind("bf16", "bf16"),
  Kind("fp8", "nvfp4", window=20, search="four_over_six"),
  Kind("fp8", "nvfp4", window=20, search="four_over_six", levers=True),
)
SESSIONS, STEPS = 20, 60
NEW = 24  # new tokens of a sequence at most, beside what it shares
QUERIES = 3  # of each sequence, in prefill

jitted = functools.partial(jax.jit, static_argnames=("read_path", "implementation"))
prefill, decode = jitted(nv.prefill), jitted(nv.decode)

words, picks = st.integers(0, WORDS - 1), st.integers(0, PLACES - 1)


def text(first: int, step: int, count: int) -> list[int]:
  return [(first + step * i) % WORDS for i in range(count)]


class SessionMachine(RuleBasedStateMachine):
  """What may happen to a server, in any order; `model` has the tokens of each place."""

  def __init__(self, kind: Kind, seen: collections.Counter, folder: pathlib.Path):
    super().__init__()
    self.kind, self.seen, self.session = kind, seen, kind.session(seen)
    self.model: dict[int, list[int]] = {}
    self.keys: set[tuple[int, ...]] = set()  # of all pages that were full once
    self.preempted: list[tuple[list[int], Preempted]] = []
    self.saved: tuple | None = None
    self.attended: dict[int, list[int]] = {}  # the model when attention was last looked at
    self.file = folder / "cache.safetensors"

  def taken(self, pick: int) -> int:
    return sorted(self.model)[pick % len(self.model)]

  def place(self, pick: int) -> int:
    return self.session.free_places[pick % len(self.session.free_places)]

  any_sequence = precondition(lambda self: self.model)
  any_place = precondition(lambda self: self.session.free_places)

  @any_place
  @rule(
    pick=picks,
    shared=st.integers(0, LONGEST - NEW),
    topic=st.integers(0, 1),
    new=st.integers(1, NEW),
    first=words,
  )
  def admit(self, pick, shared, topic, new, first):
    """A prompt, which may begin as others did."""
    place, tokens = self.place(pick), text(0, 1 + topic, shared) + text(first, 3, new)
    if self.session.admit(place, tokens):
      self.seen["admit"] += 1
      self.model[place] = tokens

  @any_sequence
  @rule(news=st.lists(st.integers(0, LONGEST // PLACES), min_size=PLACES, max_size=PLACES), a=words)
  def step(self, news, a):
    """New tokens of several sequences in one call."""
    self.grow(news, a)

  @any_sequence
  @rule(a=words)
  def decode_step(self, a):
    """One new token of each sequence."""
    self.grow([1] * PLACES, a)

  def grow(self, news, a):
    new = {
      place: text(a + place, place, min(news[place], LONGEST - len(tokens)))
      for place, tokens in self.model.items()
    }
    if self.session.step(new):
      self.seen["step"] += 1
      for place, tokens in new.items():
        self.model[place] += tokens

  @any_sequence
  @any_place
  @rule(source=picks, pick=picks)
  def fork(self, source, pick):
    source, place = self.taken(source), self.place(pick)
    if self.session.fork(source, place):
      self.seen["fork"] += 1
      self.model[place] = list(self.model[source])

  @any_sequence
  @rule(pick=picks, count=st.integers(1, PAGE))
  def roll_back(self, pick, count):
    """Rejected drafts."""
    place = self.taken(pick)
    kept = self.session.roll_back(place, count)
    self.seen["roll back"] += kept < len(self.model[place])
    del self.model[place][kept:]

  @any_sequence
  @rule(pick=picks)
  def free(self, pick):
    place = self.taken(pick)
    self.session.free(place)
    self.seen["free"] += 1
    del self.model[place]

  @any_sequence
  @precondition(lambda self: len(self.preempted) < 2)
  @rule(pick=picks)
  def preempt(self, pick):
    place = self.taken(pick)
    self.preempted.append((self.model.pop(place), self.session.preempt(place)))

  @any_place
  @precondition(lambda self: self.preempted)
  @rule(pick=picks)
  def resume(self, pick):
    place, (tokens, old) = self.place(pick), self.preempted[0]
    if self.session.resume(place, old):
      self.seen["resume"] += 1
      self.model[place] = tokens
      del self.preempted[0]

  @any_sequence
  @precondition(lambda self: not self.saved)
  @rule()
  def save(self):
    self.saved = self.session.save(self.file), {p: list(t) for p, t in self.model.items()}

  @precondition(lambda self: self.saved)
  @rule()
  def restore(self):
    assert self.saved is not None
    known, model = self.saved
    self.session.restore(self.file, known)
    self.saved = None
    self.seen["restore"] += 1
    self.model = {place: list(tokens) for place, tokens in model.items()}

  @any_sequence
  @precondition(lambda self: self.model != self.attended)
  @rule()
  def attend(self):
    """By prefill and decode, over the session's cache and over one that was written by hand."""
    session, q_lens = self.session, np.zeros(PLACES, int)
    for place, tokens in self.model.items():
      q_lens[place] = min(QUERIES, len(tokens))
    batch, (other, moved) = session.batch(q_lens), by_hand(session)
    table = np.asarray(batch.page_table)
    table = np.where(table < NUM_PAGES, moved[table % NUM_PAGES], table)
    there = dataclasses.replace(batch, page_table=jnp.asarray(table, jnp.int32))
    q = np.random.default_rng(1).standard_normal((QUERIES * PLACES, HEADS * GROUP, K_DIM))
    q, results = jnp.asarray(q, jnp.bfloat16), []
    how = {"read_path": self.kind.read_path, "implementation": "xla"}
    for cache, step in ((session.cache, batch), (other, there)):
      last = nv.RaggedBatch.for_decode(step.page_table, step.kv_lens, step.ring_ids)
      results.append((prefill(q, cache, step, **how), decode(q[:PLACES], cache, last, **how)))
    jax.tree.map(np.testing.assert_array_equal, *results)
    assert all(np.isfinite(np.asarray(state[0], np.float32)).all() for state in results[0])
    self.seen["attend"] += 1
    self.attended = {place: list(tokens) for place, tokens in self.model.items()}

  @invariant()
  def all_is_there(self):
    self.seen["checks"] += 1
    for tokens in self.model.values():
      self.keys |= {tuple(tokens[:end]) for end in range(PAGE, len(tokens) + 1, PAGE)}
    check_contents(self.session, self.model, self.keys)
    self.session.pool.check(sequence.pages for sequence in self.session.sequences.values())


class SessionTest(TestCase):
  @parameterized.parameters(*KINDS)
  def test_session(self, kind):
    seen = collections.Counter()
    folder = pathlib.Path(self.create_tempdir().full_path)
    machine = functools.partial(SessionMachine, kind, seen, folder)
    settings = examples.few(SESSIONS, stateful_step_count=STEPS)
    run_state_machine_as_test(machine, settings=settings)
    # That it was a session: everything happened.
    self.assertGreater(seen.pop("checks"), SESSIONS * STEPS // 2)
    for happened in (
      *("admit", "step", "fork", "roll back", "free", "resume", "restore", "attend"),
      *("prefix found", "prefix found in waiting pages", "copy on write", "no room"),
    ):
      self.assertGreater(seen[happened], 0, happened)


if __name__ == "__main__":
  absltest.main()
