"""When a waiting request may start, and who gives way when there are no pages.

    vllm        a request starts when the pages of its prompt are free (or of its first tokens
                alone), with a watermark of free pages kept for those that run; the newest gives way
    no_evict    a request starts when the pages of its prompt and all of its output can be promised:
                nobody ever gives way (TensorRT-LLM's GUARANTEED_NO_EVICT)
    retraction  a request starts when its prompt and output fit beside a share of what the others
                may still write; the share falls step by step and is raised when that was too bold;
                who has written least gives way, until some steps fit (SGLang)

Semantics are those of vLLM's v1 scheduler in 2026 (the watermark: its pull request 44594, the whole
prompt: 37307) and of SGLang's retract_decode; the code is this project's own.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
  from benchmarks.serve_scheduler import Request, Scheduler


class Policy(Protocol):
  def starts(self, scheduler: Scheduler, request: Request, first: int, whole: int) -> bool:
    """Whether a waiting request may start.

    Args:
      first, whole: free pages that its tokens of this step take, and all the tokens it has now;
        pages that others hold count in neither.
    """
    ...

  def give_way(self, scheduler: Scheduler, needed: int) -> list[Request]:
    """Who stops, in this order, where `needed` pages are not free; asked again if still not."""
    ...

  def stepped(self) -> None:
    """A step was scheduled."""
    ...


@dataclasses.dataclass(frozen=True)
class Vllm:
  """vLLM's rules.

  Attributes:
    watermark: share of the pool that stays free when a request starts beside others.
    reserve_prompt: whether the pages of the whole prompt must be free, or those of the first step
      alone. They are not taken yet: who runs may be faster.
  """

  watermark: float = 0.0
  reserve_prompt: bool = True

  def __post_init__(self):
    if not 0 <= self.watermark < 1:
      raise ValueError(f"watermark must be from 0 up to less than 1, got {self.watermark}")

  def starts(self, scheduler: Scheduler, request: Request, first: int, whole: int) -> bool:
    kept = int(self.watermark * scheduler.pool.num_pages) if scheduler.running else 0
    return (whole if self.reserve_prompt else first) + kept <= scheduler.pool.free

  def give_way(self, scheduler: Scheduler, needed: int) -> list[Request]:
    return [scheduler.running[-1]]

  def stepped(self) -> None:
    pass


@dataclasses.dataclass(frozen=True)
class NoEvict:
  """A promise of all pages that a request can come to need."""

  def starts(self, scheduler: Scheduler, request: Request, first: int, whole: int) -> bool:
    promised = sum(scheduler.most_pages(r) - len(r.pages) for r in scheduler.running)
    mine = whole + scheduler.most_pages(request) - scheduler.pages(request.tokens)
    return promised + mine <= scheduler.pool.free

  def give_way(self, scheduler: Scheduler, needed: int) -> list[Request]:
    raise AssertionError("more pages were promised than there are")

  def stepped(self) -> None:
    pass


@dataclasses.dataclass
class Retraction:
  """An estimate of the pages to come, corrected when it fails. The constants are SGLang's.

  Attributes:
    share: how much of the output that those who run may still write is expected; at first 0.7.
    least: where the share ends.
    fall: of the share, a step.
    most: output tokens that are expected of one request at most.
    steps: who stays after retraction has room for so many tokens.
  """

  share: float = 0.7
  least: float = 0.7 * 0.14
  fall: float = 0.7 * 0.86 / 600
  most: int = 4096
  steps: int = 20

  def starts(self, scheduler: Scheduler, request: Request, first: int, whole: int) -> bool:
    if not scheduler.running:
      return True
    output = lambda r: min(r.to_write, self.most)
    tokens = self.share * sum(map(output, scheduler.running)) + output(request)
    unread = sum(scheduler.pages(r.tokens) - len(r.pages) for r in scheduler.running)
    return unread + whole + tokens / scheduler.page_size <= scheduler.pool.free

  def give_way(self, scheduler: Scheduler, needed: int) -> list[Request]:
    """The least output first, and of those the longest prompt."""
    stay = sorted(scheduler.running, key=lambda r: (r.generated, -r.prompt), reverse=True)
    free, leave = scheduler.pool.free, []
    while len(stay) > 1 and (
      not leave or free < max(needed, len(stay) * self.steps / scheduler.page_size)
    ):
      leave.append(stay.pop())
      free += scheduler.pool.held_once(leave[-1].pages)
    written = sum(r.generated + self.steps for r in stay)
    self.share = min(1.0, written / sum(r.item.output for r in stay))
    return leave or stay

  def stepped(self) -> None:
    self.share = max(self.share - self.fall, self.least)


POLICIES = {"vllm": Vllm, "no_evict": NoEvict, "retraction": Retraction}
