"""Requests over time: traces as they are published, and generated ones in the same schema.

    .jsonl   Mooncake: timestamp (ms), input_length, output_length, hash_ids. An id stands for 512
             prompt tokens and all before them; the last one may stand for fewer.
    .csv     Azure 2023: TIMESTAMP, ContextTokens, GeneratedTokens. Nothing is known to be shared.

Either may be gzipped (.gz). A file that breaks off, or a line that breaks a rule, ends the workload
there: what came before is kept, and `error` names the line.

Sources: Mooncake, Qin et al., FAST'25; Azure, Patel et al. (Splitwise), ISCA'24.
"""

from __future__ import annotations

import dataclasses
import datetime
import gzip
import json
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator

import numpy as np

HASHED_TOKENS = 512  # tokens of a hash id


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
  """A request as a client sends it.

  Attributes:
    arrival: seconds from the start.
    prompt, output: tokens; the output is as long as this, whatever it says.
    hash_ids: one for every 512 prompt tokens begun; empty: nothing of it is shared.
  """

  arrival: float
  prompt: int
  output: int
  hash_ids: tuple[int, ...] = ()

  def __post_init__(self):
    for name in ("prompt", "output"):
      value = getattr(self, name)
      if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be at least 1 token, got {value!r}")
    if not 0 <= self.arrival < float("inf"):
      raise ValueError(f"arrival must be a time from 0 on, got {self.arrival!r}")
    ids = -(-self.prompt // HASHED_TOKENS)
    if self.hash_ids and len(self.hash_ids) != ids:
      raise ValueError(
        f"hash_ids must be {ids} for {self.prompt} prompt tokens, one for every {HASHED_TOKENS}, "
        f"got {len(self.hash_ids)}"
      )


@dataclasses.dataclass(frozen=True)
class Workload:
  """Items in the order of their arrival; `error` says why there are no more, or is None."""

  name: str
  items: tuple[Item, ...]
  error: str | None = None


def read(path: str | pathlib.Path, *, limit: int | None = None) -> Workload:
  """A trace, or its first `limit` requests. OSError where the file cannot be opened."""
  if limit is not None and limit < 1:
    raise ValueError(f"limit must be at least 1, got {limit}")
  path = pathlib.Path(path)
  suffixes = [s for s in path.suffixes if s in _READERS or s == ".gz"]
  kind = next((s for s in suffixes if s in _READERS), None)
  if kind is None:
    raise ValueError(f"path must end in {' or '.join(_READERS)}, got {path.name!r}")
  items: list[Item] = []
  open_ = gzip.open if suffixes[-1] == ".gz" else open
  with open_(path, "rt", encoding="utf-8") as file:
    error = _take(_READERS[kind], file, items, limit)
  return Workload(path.name, tuple(items), None if error is None else f"{path.name}, {error}")


def _take(
  reader: Callable, lines: Iterable[str], items: list[Item], limit: int | None
) -> str | None:
  """Appends items until the file, the limit or the patience ends; returns what ended the last."""
  number = 0
  try:
    for number, item in reader(_numbered(lines)):
      if items and item.arrival < items[-1].arrival:
        raise _BadLine(
          number, f"times must not go back, got {item.arrival} s after {items[-1].arrival} s"
        )
      items.append(item)
      if len(items) == limit:
        return None
  except _BadLine as bad:
    return f"line {bad.number}: {bad}"
  except (EOFError, OSError, UnicodeDecodeError) as error:  # a gzip file that was cut, or is none
    return f"after line {number}: {error}"
  return None


class _BadLine(ValueError):
  def __init__(self, number: int, message: str):
    super().__init__(message)
    self.number = number


Lines = Iterator[tuple[int, str]]


def _numbered(lines: Iterable[str]) -> Lines:
  return ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def _mooncake(lines: Lines) -> Iterator[tuple[int, Item]]:
  for number, line in lines:
    try:
      row = json.loads(line)
      if not isinstance(row, dict):
        raise ValueError(f"a request must be a JSON object, got {line.strip()[:60]!r}")
      lacking = {"timestamp", "input_length", "output_length", "hash_ids"} - row.keys()
      if lacking:
        raise ValueError(f"a request must have {', '.join(sorted(lacking))}")
      ids = tuple(row["hash_ids"])
      if not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError(f"hash_ids must be whole numbers from 0 on, got {ids}")
      item = Item(row["timestamp"] / 1e3, row["input_length"], row["output_length"], ids)
    except (ValueError, TypeError) as error:
      raise _BadLine(number, str(error)) from error
    yield number, item


AZURE_COLUMNS = "TIMESTAMP,ContextTokens,GeneratedTokens"


def _azure(lines: Lines) -> Iterator[tuple[int, Item]]:
  number, head = next(lines, (1, ""))
  if head.strip() != AZURE_COLUMNS:
    raise _BadLine(number, f"columns must be {AZURE_COLUMNS}, got {head.strip()[:60]!r}")
  start = None
  for number, line in lines:
    try:
      fields = line.strip().split(",")
      if len(fields) != 3:
        raise ValueError(f"a request must have 3 fields, got {line.strip()[:60]!r}")
      # A seventh digit of the second is lost; without a zone no clock is put back.
      time = datetime.datetime.fromisoformat(fields[0]).replace(tzinfo=datetime.UTC).timestamp()
      start = time if start is None else start
      item = Item(time - start, int(fields[1]), int(fields[2]))
    except ValueError as error:
      raise _BadLine(number, str(error)) from error
    yield number, item


_READERS = {".jsonl": _mooncake, ".csv": _azure}


def write(items: Iterable[Item], path: str | pathlib.Path) -> None:
  """As Mooncake's schema has it, a request a line."""
  lines = []
  for item in items:
    row = {
      "timestamp": round(1e3 * item.arrival),
      "input_length": item.prompt,
      "output_length": item.output,
      "hash_ids": item.hash_ids,
    }
    lines.append(json.dumps(row) + "\n")
  pathlib.Path(path).write_text("".join(lines), encoding="utf-8")


def generate(
  requests: int,
  *,
  prompt: int,
  output: int,
  spread: float = 0.0,
  reuse: float = 0.0,
  documents: int = 1,
  interval: float = 0.0,
  poisson: bool = False,
  seed: int = 0,
) -> Workload:
  """A workload with given lengths and sharing.

  Args:
    requests: how many.
    prompt, output: mean tokens.
    spread: lengths are uniform over mean * (1 -+ spread), prompt and output apart, and at least 1.
    reuse: the share of a prompt that is the beginning of a document, in whole blocks of 512.
    documents: how many documents there are; a request draws one.
    interval: mean seconds between arrivals; 0: all arrive at once.
    poisson: arrivals are random, not evenly spaced.
    seed: of the random numbers.
  """
  if requests < 1:
    raise ValueError(f"requests must be at least 1, got {requests}")
  for name, value in (("spread", spread), ("reuse", reuse)):
    if not 0 <= value < 1:
      raise ValueError(f"{name} must be from 0 up to less than 1, got {value}")
  if documents < 1:
    raise ValueError(f"documents must be at least 1, got {documents}")
  if not 0 <= interval < math.inf:
    raise ValueError(f"interval must be seconds from 0 on, got {interval}")
  if seed < 0:
    raise ValueError(f"seed must be at least 0, got {seed}")
  r = np.random.default_rng(seed)
  longest = -(-round(prompt * (1 + spread)) // HASHED_TOKENS)
  fresh = documents * longest  # ids below are those of documents
  time, items = 0.0, []
  for _ in range(requests):
    tokens, written = (
      max(round(mean * r.uniform(1 - spread, 1 + spread)), min(mean, 1))
      for mean in (prompt, output)
    )
    ids = -(-tokens // HASHED_TOKENS)
    shared = round(reuse * tokens / HASHED_TOKENS)
    begin = int(r.integers(documents)) * longest
    own = range(fresh, fresh + ids - shared)
    fresh += len(own)
    items.append(Item(time, tokens, written, (*range(begin, begin + shared), *own)))
    time += interval * (float(r.exponential()) if poisson else 1.0)
  name = f"{requests} requests, prompts of {prompt}, outputs of {output}"
  if reuse:
    name += f", {100 * reuse:.0f} % of {documents} documents"
  return Workload(name, tuple(items))


def ideal_hit_share(items: Iterable[Item]) -> float:
  """Prompt tokens found again by a cache without end, in whole blocks of 512 of a prompt, and
  never its last token; over all prompt tokens."""
  seen: set[int] = set()
  hits = tokens = 0
  for item in items:
    blocks = 0
    for key in item.hash_ids:
      if key not in seen:
        break
      blocks += 1
    seen.update(item.hash_ids)
    hits += min(blocks * HASHED_TOKENS, item.prompt - 1)
    tokens += item.prompt
  return hits / tokens
