"""The model level of the quality benchmark: what a cache config costs a whole language model.

The model is served through the library's own caches and operations (quality_serving.py), and every
number is against a BF16 cache in the same steps. Prefill runs in several chunk lengths, because
what a chunk attends to in wide form hides the cost that decoding pays: a text read in one chunk
never looks into its cache.

    texts   next-token KL, agreement of the likeliest token, likelihood (docs, code, reasoning)
    recall  whether something told long before is found (quality_recall.py)
    decode  greedy and sampled text (quality_decode.py)
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from benchmarks import llama, llama_files, quality_decode, quality_recall, quality_texts
from benchmarks.progress import Progress
from benchmarks.quality_compare import Compared, compare, mean_of_rows
from benchmarks.quality_configs import BF16, QualityConfig, bits_per_value, calibrated_on
from benchmarks.quality_metrics import Number
from benchmarks.quality_rows import QualityRow
from benchmarks.quality_serving import Server, calibrate

# The first rows of a window see hardly any keys, and all of them are recent.
FIRST_ROW = 64
Chunks = tuple[int, str]  # length and `newest` of quality_serving


@dataclasses.dataclass(frozen=True)
class Plan:
  """How much is measured.

  Attributes:
    context: tokens of a window.
    windows: how many of each text; together they are the batch of every step.
    chunks: how windows are prefilled.
    recall_lengths, recall_chunks: prompts, and how they are prefilled.
    recall_prompts: how many of each length.
    prompt, generated: tokens of a window's beginning that are a prompt, and generated after it;
      0 generates nothing.
    prompt_chunk: how these prompts are prefilled, wide.
  """

  context: int
  windows: tuple[tuple[str, int], ...]
  chunks: tuple[Chunks, ...]
  recall_lengths: tuple[int, ...]
  recall_chunks: tuple[Chunks, ...]
  recall_prompts: int
  prompt: int
  generated: int
  prompt_chunk: int = 64

  @property
  def num_seqs(self) -> int:
    return sum(count for _, count in self.windows)


# Without a window its length changes nothing. With one, the shorter a step, the more exactly each
# of its tokens has the window that decoding gives it; and kernels for a window want all tokens of
# a step, of 8 sequences, to fit into one of 64.
STORED = (8, "stored")

SMOKE = Plan(
  context=256,
  windows=(("docs", 1),),
  chunks=((64, "wide"), (64, "stored")),
  recall_lengths=(256,),
  recall_chunks=((64, "stored"),),
  recall_prompts=1,
  prompt=128,
  generated=8,
)
SMOKE_CONFIGS = ("fp8", "nvfp4", "nvfp4 w64", "nvfp4 hadK 4/6 w64")


# What tells levers apart, on a CPU in a minute each: everything is read from the cache.
LEVERS = Plan(
  context=1024,
  windows=(("docs", 2),),
  chunks=((16, "stored"),),
  recall_lengths=(),
  recall_chunks=(),
  recall_prompts=0,
  prompt=0,
  generated=0,
)


def full_plan(context: int = 8192) -> Plan:
  """The whole measurement, with windows and prompts of at most `context` tokens.

  Raises:
    ValueError: context is too short for prompts, or the texts are for windows.
  """
  windows = (("docs", 4), ("code", 2), ("reasoning", 2))
  longest = min(quality_texts.available(text) // count for text, count in windows) // 64 * 64
  if not 1024 <= context <= longest or context % 64:
    raise ValueError(f"context must be a multiple of 64 from 1024 to {longest}, got {context}")
  return Plan(
    context=context,
    windows=windows,
    chunks=((min(2048, context // 4), "wide"), (64, "wide"), (16, "wide"), STORED),
    recall_lengths=tuple(n for n in (1024, 4096, 8192) if n <= context),
    recall_chunks=((64, "wide"),),  # what is asked for lies in pages, however new tokens are read
    recall_prompts=8,
    prompt=min(1024, context // 2),
    generated=256,
  )


def load(path: pathlib.Path | None = None) -> tuple[llama_files.Source, quality_texts.Material]:
  """The model at `path` (llama_files.load) and what it reads."""
  source = llama_files.load(path)
  if source.folder is None:
    return source, quality_texts.make(source.encode)
  return source, quality_texts.read(source.folder / quality_texts.FILE)


def measure(
  configs: Sequence[QualityConfig],
  plan: Plan,
  loaded: tuple[llama_files.Source, quality_texts.Material],
  *,
  implementation: str | None,
  progress: Callable[[int], Progress],
) -> list[QualityRow]:
  """Rows of each config, and of BF16, which is always measured.

  Args:
    configs: what to measure.
    plan: how much.
    loaded: of `load`.
    implementation: who runs append, prefill and decode; None: the kernels of the device where they
      can. Every row names who ran its attention.
    progress: gets the number of its steps.
  """
  source, material = loaded
  configs = [c for c in configs if c != BF16]
  steps = progress(1 + len(configs))
  steps.step(f"{source.name}, {BF16.name}")
  run = Run(source, material, plan, implementation)
  rows = list(run.reference_rows())
  for config in configs:
    steps.step(f"{source.name}, {config.name}")
    rows += run.rows(config)
  return rows


class Run:
  """One model, one plan; keeps what BF16 did."""

  def __init__(
    self,
    source: llama_files.Source,
    material: quality_texts.Material,
    plan: Plan,
    implementation: str | None,
  ):
    self.source, self.plan, self.implementation = source, plan, implementation
    self.model = source.model
    self.windows = np.concatenate(
      [material.windows(text, count, plan.context) for text, count in plan.windows]
    )
    self.recall = {n: _first(material.recall[n], plan.recall_prompts) for n in plan.recall_lengths}
    self.calibration = material.calibration
    server = self.server(BF16)
    self.hidden = {chunks: self._read(server, chunks) for chunks in plan.chunks}
    if plan.generated:
      prompts = self.windows[:, : plan.prompt]
      self.generated = quality_decode.reference(server, prompts, plan.prompt_chunk, plan.generated)

  def server(self, config: QualityConfig) -> Server:
    return Server(
      self.model,
      config,
      num_seqs=self.plan.num_seqs,
      context=self.plan.context,
      implementation=self.implementation,
      calibration=calibrate(config, *self.seen) if config.needs_calibration else {},
    )

  @functools.cached_property
  def seen(self) -> tuple[jax.Array, jax.Array]:
    """k and v of all layers on the text that nothing else reads."""
    _, k, v = llama.capture_attention_inputs(self.model, self.calibration)
    return k, v

  def _read(self, server: Server, chunks: Chunks) -> jax.Array:
    """The hidden states of all windows that predict what is counted."""
    server.reset()
    return server.prefill(self.windows, *chunks)[:, FIRST_ROW:-1]

  def _compare(self, reference: jax.Array, hidden: jax.Array) -> Compared:
    return compare(self.model, reference, hidden, self.windows[:, FIRST_ROW + 1 :])

  def reference_rows(self) -> Iterator[QualityRow]:
    """BF16's own: likelihoods and recall, and KL of each chunk length to the first: the floor."""
    server, first = self.server(BF16), self.plan.chunks[0]
    for chunks in self.plan.chunks:
      compared = self._compare(self.hidden[first], self.hidden[chunks])
      yield from self._text_rows(server, chunks, compared)
    yield from self._recall_rows(server)

  def rows(self, config: QualityConfig) -> Iterator[QualityRow]:
    server, plan = self.server(config), self.plan
    for chunks in plan.chunks:
      compared = self._compare(self.hidden[chunks], self._read(server, chunks))
      yield from self._text_rows(server, chunks, compared)
    yield from self._recall_rows(server)
    if not plan.generated:
      return
    prompts = self.windows[:, : plan.prompt]
    numbers = quality_decode.measure(server, prompts, plan.prompt_chunk, self.generated)
    for (how, metric), number in numbers.items():
      row = self._row(server, (1, "stored"), "all", plan.prompt + plan.generated, metric, number)
      yield dataclasses.replace(row, operation=f"decode {how}")

  def _text_rows(self, server, chunks: Chunks, compared: Compared) -> Iterator[QualityRow]:
    first = 0
    for text, count in self.plan.windows:
      mine = Compared(*(a[first : first + count] for a in compared))
      first += count
      for metric, number in of_text(mine).items():
        yield self._row(server, chunks, text, self.plan.context, metric, number)

  def _recall_rows(self, server: Server) -> Iterator[QualityRow]:
    for chunks in self.plan.recall_chunks:
      for length, recall in self.recall.items():
        for (kind, metric), number in quality_recall.measure(server, recall, *chunks).items():
          yield self._row(server, chunks, kind, length, metric, number)

  def _row(self, server, chunks: Chunks, data, context, metric, number: Number) -> QualityRow:
    length, newest = chunks
    return QualityRow(
      level="model",
      config=server.config,
      operation=f"prefill {length} {newest}",
      data=f"{self.source.name}, {data}",
      context=context,
      head_dim=self.model.config.head_dim,
      metric=metric,
      **dataclasses.asdict(number),
      bits_per_value=bits_per_value(server.config, context),
      calibrated_on=calibrated_on(
        server.config, quality_texts.CALIBRATION_TEXT, self.calibration.size
      ),
      implementation=server.who(*chunks),
    )


def of_text(compared: Compared) -> dict[str, Number]:
  """metric -> number of [windows, rows]. Differences are paired token by token."""
  nll = mean_of_rows(compared.nll)
  return {
    "kl": mean_of_rows(compared.kl),
    "kl_p99.9": Number(float(np.quantile(compared.kl, 0.999))),
    "top1": mean_of_rows(compared.same_top),
    "delta_nll": mean_of_rows(compared.nll - compared.reference_nll),
    "perplexity": Number(math.exp(nll.value), _exp(nll.ci_low), _exp(nll.ci_high)),
  }


def _exp(x: float | None) -> float | None:
  return None if x is None else math.exp(x)


def _first(recall: quality_texts.Recall, prompts: int) -> quality_texts.Recall:
  return quality_texts.Recall(
    recall.kinds[:prompts],
    recall.depths[:prompts],
    recall.tokens[:prompts],
    recall.answer_lens[:prompts],
  )
