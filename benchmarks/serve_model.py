"""What of a step costs the same for every cache format: weights, their products, and the host.

A roofline: the bytes of the weights that a step reads, or its FLOPs, whichever take longer, and a
fixed time. It is an assumption where it was not measured: a live run can time the model without its
attention, and write what replaces the assumption.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import math
import pathlib
from typing import Protocol

from benchmarks.serve_formats import Heads


@dataclasses.dataclass(frozen=True)
class Model:
  """A decoder's geometry.

  Attributes:
    layers, hidden, num_q_heads, num_kv_heads, head_dim, vocab: as usual.
    ffn: inner width of the feed-forward layers that a token passes through.
    experts: how many times as many weights all of them have; 1: a dense model.
    tied: whether the output is the embedding.
  """

  layers: int
  hidden: int
  num_q_heads: int
  num_kv_heads: int
  head_dim: int
  ffn: int
  vocab: int
  experts: float = 1.0
  tied: bool = False

  @property
  def heads(self) -> Heads:
    return Heads(self.layers, self.num_q_heads, self.num_kv_heads, self.head_dim)

  @property
  def _attention_weights(self) -> int:
    return 2 * self.hidden * self.head_dim * (self.num_q_heads + self.num_kv_heads)

  @property
  def token_weights(self) -> int:
    """Weights that every token is multiplied with, the output's not counted."""
    return self.layers * (self._attention_weights + 3 * self.hidden * self.ffn)

  @property
  def weights(self) -> int:
    """All weights of the layers and the output."""
    ffn = round(3 * self.hidden * self.ffn * self.experts)
    return self.layers * (self._attention_weights + ffn) + self.output_weights

  @property
  def output_weights(self) -> int:
    return self.hidden * self.vocab


MODELS = {
  "llama-8b": Model(32, 4096, 32, 8, 128, 14336, 128256),
  # Qwen3-30B-A3B's geometry: 8 of 128 experts of 768.
  "moe-30b-a3b": Model(48, 2048, 32, 4, 128, 8 * 768, 151936, experts=16.0),
  "smollm2-135m": Model(30, 576, 9, 3, 64, 1536, 49152, tied=True),
}


class ModelCosts(Protocol):
  def seconds(self, read: int, decodes: int, written: int) -> float:
    """Of a step of so many prompt tokens and sequences that decode; so many of all get a token."""
    ...


@dataclasses.dataclass(frozen=True)
class Roofline:
  """On a device.

  Attributes:
    model: in bf16.
    bytes_per_second, flops: of the device; an H200's copy bandwidth and bf16 rate as they were
      measured for benchmarks/results.
    overhead: seconds of every step, on the host and in launches: a guess.
  """

  model: Model
  bytes_per_second: float = 4.29e12
  flops: float = 800e12
  overhead: float = 5e-4

  def seconds(self, read: int, decodes: int, written: int) -> float:
    model = self.model
    products = 2 * (model.token_weights * (read + decodes) + model.output_weights * written)
    products /= self.flops
    return max(2 * model.weights / self.bytes_per_second, products) + self.overhead


@dataclasses.dataclass(frozen=True)
class Linear:
  """So much a token and a step: what is known of a server from outside."""

  per_token: float
  overhead: float

  def seconds(self, read: int, decodes: int, written: int) -> float:
    return self.per_token * (read + decodes) + self.overhead


@dataclasses.dataclass(frozen=True)
class Measured:
  """Steps that were timed without attention.

  Attributes:
    read: prompt tokens that a step has room for, ascending; 0 is a step that only decodes. Steps
      are padded to these numbers: between two of them the larger one's time holds.
    times: seconds of each, with all decoding sequences that it has room for.
  """

  read: tuple[int, ...]
  times: tuple[float, ...]

  def __post_init__(self):
    ascending = list(self.read) == sorted(set(self.read))
    if not self.read or len(self.read) != len(self.times) or not ascending:
      raise ValueError(f"read must ascend, with a time each, got {self.read}, {self.times}")
    if not all(0 < time < math.inf for time in self.times):
      raise ValueError(f"times must be positive and finite, got {self.times}")

  def seconds(self, read: int, decodes: int, written: int) -> float:
    place = bisect.bisect_left(self.read, read)
    if place == len(self.read):
      return self.times[-1] * read / max(self.read[-1], 1)
    return self.times[place]

  def save(self, path: str | pathlib.Path) -> None:
    pathlib.Path(path).write_text(json.dumps(dataclasses.asdict(self)) + "\n", encoding="utf-8")

  @classmethod
  def load(cls, path: str | pathlib.Path) -> Measured:
    """Of a file that `save` wrote; ValueError, which names the file, where it is none."""
    text = pathlib.Path(path).read_text(encoding="utf-8")
    try:
      fields = json.loads(text)
      return cls(tuple(fields["read"]), tuple(fields["times"]))
    except KeyError as error:
      raise ValueError(f"{path} must be costs of a model, it has no {error}") from None
    except (TypeError, ValueError) as error:
      raise ValueError(f"{path} must be costs of a model: {error}") from None
