"""What the model level reads: three texts and prompts with something to recall, as token ids.

All of it is made here from what every Python installation has, so that nothing is downloaded:
documentation (`pydoc_data.topics`), code (files of the standard library), and worked reasoning
(generated). Numbers of one Python version are not those of another; within a run all configs read
the same tokens. A model without a tokenizer brings them in its exported folder.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sysconfig
from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.llama_export import open_npz
from benchmarks.llama_hf import required

Encode = Callable[[str], list[int]]

TEXTS = ("docs", "code", "reasoning")
CODE_FILES = ("argparse.py", "statistics.py", "tarfile.py", "typing.py")
TOKENS_OF_TEXT = 40_000  # of each text, more than four windows of 8K
CALIBRATION_TOKENS = 512  # which no window reaches
CALIBRATION_TEXT = "the end of docs"
RECALL_LENGTHS = (256, 1024, 4096, 8192)
DEPTHS = (0.1, 0.35, 0.6, 0.85)
KINDS = ("passkey", "key-value")
FILE = "tokens.npz"


@dataclasses.dataclass(frozen=True, eq=False)
class Recall:
  """Prompts of one length; each asks for something that stands at some depth, and answers.

  Attributes:
    kinds, depths: of each prompt.
    tokens: int32 [prompts, length], the answer at the end.
    answer_lens: int32 [prompts].
  """

  kinds: tuple[str, ...]
  depths: tuple[float, ...]
  tokens: np.ndarray
  answer_lens: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Material:
  """texts: name -> int32 [tokens]; recall: length -> prompts."""

  texts: dict[str, np.ndarray]
  recall: dict[int, Recall]

  def windows(self, text: str, count: int, length: int) -> np.ndarray:
    """int32 [count, length], windows that do not overlap. Raises ValueError for too many."""
    if count * length > available(text):
      raise ValueError(
        f"windows of {text!r} must fit into {available(text)} tokens, got {count} of {length}"
      )
    return self.texts[text][: count * length].reshape(count, length)

  @property
  def calibration(self) -> np.ndarray:
    return self.texts["docs"][-CALIBRATION_TOKENS:]


def available(text: str) -> int:
  """Tokens of a text that windows may have."""
  return TOKENS_OF_TEXT - (CALIBRATION_TOKENS if text == "docs" else 0)


def make(encode: Encode, recall_lengths: tuple[int, ...] = RECALL_LENGTHS) -> Material:
  """All of it, by a tokenizer."""
  texts = {name: _text(name, encode) for name in TEXTS}
  return Material(texts, {length: recall_prompts(encode, length) for length in recall_lengths})


def _text(name: str, encode: Encode) -> np.ndarray:
  pieces = {"docs": _docs, "code": _code, "reasoning": _reasoning}[name]()
  ids: list[int] = []
  for piece in pieces:
    ids += encode(piece)
    if len(ids) >= TOKENS_OF_TEXT:
      return np.array(ids[:TOKENS_OF_TEXT], np.int32)
  raise ValueError(f"text {name!r} must have {TOKENS_OF_TEXT} tokens, got {len(ids)}")


def _docs() -> Iterator[str]:
  from pydoc_data.topics import topics

  return (topics[name].strip() + "\n\n" for name in sorted(topics))


def _code() -> Iterator[str]:
  library = pathlib.Path(sysconfig.get_path("stdlib"))
  return ((library / name).read_text(encoding="utf-8") for name in CODE_FILES)


# ---- reasoning

_NAMES = ("Mara", "Jonas", "Priya", "Tom", "Aisha", "Luca", "Ines", "Kofi", "Nora", "Wei")
_GOODS = ("apples", "pencils", "stamps", "marbles", "tickets", "bricks", "shells", "coins")


def _reasoning() -> Iterator[str]:
  """Problems with worked solutions, without end: every line follows from those before it."""
  rng = np.random.default_rng(0)
  makers = (_shopping, _ordering, _remainder)
  while True:
    yield makers[rng.integers(len(makers))](rng)


def _pick(rng: np.random.Generator, words: tuple[str, ...], count: int) -> list[str]:
  return [words[int(i)] for i in rng.permutation(len(words))[:count]]


def _shopping(rng) -> str:
  (a, b), (goods,) = _pick(rng, _NAMES, 2), _pick(rng, _GOODS, 1)
  boxes, each, given, price = (int(rng.integers(*limits)) for limits in _LIMITS)
  total = boxes * each
  left = total - given
  return (
    f"Problem: {a} has {boxes} boxes with {each} {goods} in each. {a} gives {given} {goods} to {b} "
    f"and sells the rest for {price} cents apiece. How much does {a} earn?\n"
    f"Step 1: {boxes} boxes of {each} make {boxes} * {each} = {total} {goods}.\n"
    f"Step 2: After giving away {given}, there are {total} - {given} = {left} {goods} left.\n"
    f"Step 3: {left} {goods} at {price} cents each bring {left} * {price} = {left * price} cents.\n"
    f"Check: {left * price} / {price} = {left}, and {left} + {given} = {total}.\n"
    f"Answer: {left * price} cents.\n\n"
  )


_LIMITS = ((3, 20), (6, 25), (2, 18), (2, 12))


def _ordering(rng) -> str:
  names = _pick(rng, _NAMES, 4)
  ages = sorted(int(x) for x in rng.choice(np.arange(5, 60), 4, replace=False))
  gaps = [y - x for x, y in zip(ages, ages[1:], strict=False)]
  facts = [f"{names[i + 1]} is {gaps[i]} years older than {names[i]}." for i in (2, 0, 1)]
  steps = [
    f"Step {i + 1}: {names[i + 1]} is {ages[i]} + {gaps[i]} = {ages[i + 1]} years old."
    for i in range(3)
  ]
  return (
    f"Problem: {' '.join(facts)} {names[0]} is {ages[0]} years old. Who is oldest, and how old?\n"
    + "\n".join(steps)
    + f"\nSo the order from youngest to oldest is {', '.join(names)}.\n"
    f"Answer: {names[3]}, who is {ages[3]}.\n\n"
  )


def _remainder(rng) -> str:
  n, d = int(rng.integers(200, 2000)), int(rng.integers(3, 30))
  q, r = divmod(n, d)
  parity = "even" if r % 2 == 0 else "odd"
  return (
    f"Problem: Is the remainder of {n} divided by {d} even or odd?\n"
    f"Step 1: {d} goes into {n} exactly {q} whole times, because {d} * {q} = {d * q} and "
    f"{d} * {q + 1} = {d * (q + 1)}, which is more than {n}.\n"
    f"Step 2: The remainder is {n} - {d * q} = {r}.\n"
    f"Step 3: {r} is {parity}, since {r} = 2 * {r // 2}{' + 1' if r % 2 else ''}.\n"
    f"Answer: {parity}.\n\n"
  )


# ---- recall

_FILLER = (
  "The grass is green.",
  "The sky is blue.",
  "The sun is yellow.",
  "Here we go.",
  "There and back again.",
)
_OBJECTS = ("lamp", "violin", "anchor", "teapot", "ladder", "mirror", "compass", "barrel")


def recall_prompts(encode: Encode, length: int) -> Recall:
  """Prompts of `length` tokens, one of each kind at each depth."""
  cases = [(kind, depth) for depth in DEPTHS for kind in KINDS]
  rows, answer_lens = [], []
  for number, (kind, depth) in enumerate(cases):
    ids, answer_len = _prompt(encode, length, kind, depth, np.random.default_rng(number))
    rows.append(ids)
    answer_lens.append(answer_len)
  kinds, depths = zip(*cases, strict=True)
  return Recall(kinds, depths, np.array(rows, np.int32), np.array(answer_lens, np.int32))


def _prompt(encode: Encode, length: int, kind: str, depth: float, rng) -> tuple[list[int], int]:
  number = lambda: str(rng.integers(10_000, 100_000))
  if kind == "passkey":
    key = number()
    facts = {depth: f"The pass key is {key}. Remember it. {key} is the pass key.\n"}
    question = "What is the pass key? The pass key is "
  else:
    # The one that is asked for at its depth, the others spread over the whole prompt.
    asked, *others = _pick(rng, _OBJECTS, len(_OBJECTS))
    key = number()
    facts = {(i + 0.5) / len(others): _fact(word, number()) for i, word in enumerate(others)}
    facts[depth] = _fact(asked, key)
    question = f"What is the number of the {asked}? The number of the {asked} is "
  answer = encode(key)
  end = encode("\n" + question) + answer
  pieces = {at: encode(fact) for at, fact in facts.items()}
  room = length - len(end) - sum(map(len, pieces.values()))
  if room < 0:
    raise ValueError(f"length must leave room for a {kind} prompt, got {length}")
  filler = [encode(sentence + " ") for sentence in _FILLER]
  ids: list[int] = []
  filled, sentence = 0, 0
  for at, piece in sorted(pieces.items()):
    while filled < at * room:
      ids += filler[sentence % len(filler)]
      filled += len(filler[sentence % len(filler)])
      sentence += 1
    ids += piece
  while len(ids) + len(end) < length:
    ids += filler[sentence % len(filler)]
    sentence += 1
  # Whole sentences do not add up to the length: the first one loses its beginning.
  return (ids + end)[-length:], len(answer)


def _fact(word: str, value: str) -> str:
  return f"The number of the {word} is {value}.\n"


# ---- files


def save(material: Material, path: pathlib.Path) -> None:
  arrays = {f"text {name}": ids for name, ids in material.texts.items()}
  for length, recall in material.recall.items():
    arrays[f"recall {length} tokens"] = recall.tokens
    arrays[f"recall {length} answer_lens"] = recall.answer_lens
    arrays[f"recall {length} kinds"] = np.array(recall.kinds)
    arrays[f"recall {length} depths"] = np.array(recall.depths)
  np.savez_compressed(path, allow_pickle=False, **arrays)


def read(path: pathlib.Path) -> Material:
  """What `save` wrote. Raises ValueError where it is something else."""
  if not path.exists():
    raise ValueError(f"an exported folder must hold {path.name}, which is missing")
  with open_npz(path) as file:
    stored = dict(file)
  for name in TEXTS:
    required(stored, f"text {name}", path.name)
  lengths = [int(key.split()[1]) for key in stored if key.endswith(" tokens")]
  recall = {
    n: Recall(
      kinds=tuple(map(str, stored[f"recall {n} kinds"])),
      depths=tuple(map(float, stored[f"recall {n} depths"])),
      tokens=stored[f"recall {n} tokens"],
      answer_lens=stored[f"recall {n} answer_lens"],
    )
    for n in lengths
  }
  return Material({name: stored[f"text {name}"] for name in TEXTS}, recall)
