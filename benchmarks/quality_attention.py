"""Level `attention`: one layer through a cache and the operations, against float64 and wide inputs.

For each config and case: the keys are appended, the operation runs, and its output and lse are
compared with exact attention over what went in. What the config does to Q, to K and to V is also
shown alone, from the numbers the cache holds, with the other two exact.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import nvfp4_pallas as nv
from benchmarks import quality_configs as configs
from benchmarks import quality_data, quality_stored
from benchmarks.progress import Progress
from benchmarks.quality_configs import (
  QualityConfig,
  bits_per_value,
  calibrated,
  calibrated_on,
  make_cache,
)
from benchmarks.quality_data import Inputs
from benchmarks.quality_metrics import Number, State, attend, kl, mean, of_output, of_probabilities
from benchmarks.quality_rows import QualityRow
from nvfp4_pallas.ops import decode as decode_op
from nvfp4_pallas.ops import prefill as prefill_op
from nvfp4_pallas.ops.request import attention_request, attention_spec

HEADS_PER_SEQUENCE = 16  # of decode: queries that share one sequence of a pattern
PARTS = {
  "q only": (True, False, False),
  "k only": (False, True, False),
  "v only": (False, False, True),
}


@dataclasses.dataclass(frozen=True)
class Case:
  """Inputs by name, so that they are made when their turn comes, and the configs to try on them.

  `data` is a pattern, or `captured`.
  """

  data: str
  context: int
  configs: tuple[QualityConfig, ...]
  head_dim: int = 128
  causal: bool = False

  def inputs(self) -> list[Inputs]:
    if self.data == "captured":
      return quality_data.captured()
    return [quality_data.pattern(self.data, self.context, self.head_dim, causal=self.causal)]


_BY_NAME = configs.BY_NAME
_named = lambda *names: tuple(_BY_NAME[name] for name in names)
_FEW = _named("fp8", "nvfp4", "nvfp4, Q x2", "nvfp4, Q x1", "nvfp4 hadK 4/6")
_MANY = _named(
  *("bf16", "fp8", "fp8/nvfp4", "nvfp4", "nvfp4 4/6", "nvfp4 mean", "nvfp4 hadK 4/6"),
  *("nvfp4 mean hadK 4/6", "nvfp4, Q x2", "nvfp4, Q x1", "fp8 w64", "nvfp4 w64"),
  "nvfp4 hadK 4/6 w64",
)
_LONG = _named("fp8", "nvfp4", "nvfp4 hadK 4/6")
_LONGEST = 131072

FULL = (
  *(Case(p, 1024, configs.CONFIGS) for p in quality_data.PATTERNS),
  *(Case(p, 8192, configs.CONFIGS if p == "peaky" else _MANY) for p in quality_data.PATTERNS),
  *(Case(p, 32768, _MANY) for p in quality_data.PATTERNS),
  *(Case(p, _LONGEST, _LONG) for p in ("gauss", "peaky")),
  *(Case("gauss", 8192, _FEW, head_dim=d) for d in (64, 256)),
  Case("gauss", 1024, _FEW, causal=True),
  Case("captured", 256, configs.CONFIGS),
  Case(quality_data.TINY, 1024, (configs.CALIBRATED,)),
)
# What gates ask for that are not left to full runs: each format and lever where it shows.
_GATED = _named(
  *("fp8", "fp8/nvfp4", "nvfp4", "nvfp4, Q x2", "nvfp4 cal", "nvfp4 hadK 4/6", "nvfp4 hadKV 4/6"),
  "nvfp4 hadK 4/6 w64",
)
_GATED_ON_GAUSS = _named(
  *("bf16", "nvfp4 4/6", "nvfp4 mean", "nvfp4, Q x1", "nvfp4, Q fp8", "nvfp4 hadK 4/6, Q x1"),
  "nvfp4 w64",
)
SMOKE = (
  Case("gauss", 1024, (*_GATED, *_GATED_ON_GAUSS)),
  Case("gauss", 1024, _named("nvfp4"), causal=True),
  Case("peaky", 1024, _named("nvfp4", "nvfp4 mean", "nvfp4 hadK 4/6", "nvfp4 hadKV 4/6")),
  Case("captured", 256, _GATED),
  Case(quality_data.TINY, 1024, (configs.CALIBRATED,)),
)


def measure(
  cases: tuple[Case, ...], implementation: str | None = None, progress: Progress | None = None
) -> list[QualityRow]:
  """Rows of all configs of all cases."""
  rows = []
  for case in cases:
    all_inputs = case.inputs()
    for inputs in all_inputs:
      exact = _exact(inputs)
      for config in case.configs:
        if progress is not None:
          progress.step(f"{inputs.name}, {case.context} keys of {case.head_dim}, {config.name}")
        rows += of_config(config, inputs, exact, implementation)
  return rows


def steps(cases: tuple[Case, ...]) -> int:
  """Of measure's progress."""
  layers = len(quality_data.captured())
  return sum(len(c.configs) * (layers if c.data == "captured" else 1) for c in cases)


def of_config(
  config: QualityConfig, inputs: Inputs, exact: list[State], implementation: str | None = None
) -> list[QualityRow]:
  """All metrics of one config on one piece of data; with a kernel, also its share of the error."""
  run = _operation(config, inputs)
  out, lse, who, stored = run(config, inputs, implementation)
  by_operation = _judged(inputs, out), _judged(inputs, lse)
  numbers = dict(of_output(_together(exact), *by_operation))
  if stored is not None:
    numbers |= _of_scores(config, inputs, exact, stored, *by_operation)
    if config.recent_window:
      numbers["wide_tokens"] = _wide_tokens(config, inputs, stored)
  if who != "xla":
    numbers["rel_l2_over_xla"] = _over_definition(config, inputs, exact, numbers["rel_l2"])
  tokens, _, head_dim = inputs.k.shape
  return [
    QualityRow(
      level="attention",
      config=config,
      operation="prefill" if run is by_prefill else "decode",
      data=inputs.name,
      context=tokens,
      head_dim=head_dim,
      metric=metric,
      bits_per_value=bits_per_value(config, tokens),
      calibrated_on=calibrated_on(config, inputs.sample_name, len(inputs.sample[0])),
      implementation=who,
      **dataclasses.asdict(number),
    )
    for metric, number in numbers.items()
  ]


def _over_definition(config, inputs, exact, by_kernel: Number) -> Number:
  """A kernel's error against wide inputs over the definition's."""
  out, _, _, _ = _operation(config, inputs)(config, inputs, "xla")
  out = _judged(inputs, out)
  by_definition = of_output(_together(exact), out, np.zeros(len(out)))["rel_l2"]
  return Number(by_kernel.value / by_definition.value)


def _operation(config: QualityConfig, inputs: Inputs):
  if not inputs.causal:
    return by_decode
  # What is wide for one row of a text is not for a later one: it must be fed as it is generated.
  return by_decode_of_a_text if config.recent_window else by_prefill


# Each of these: (config, inputs, implementation) -> (out [rows, num_q_heads, head_dim],
# lse [rows, num_q_heads], who ran it, what the cache holds or None where that changes by row).


def by_decode(config, inputs: Inputs, implementation):
  """Rows as query heads of sequences that share all their pages."""
  rows, _, head_dim = inputs.q.shape
  sequences = rows // HEADS_PER_SEQUENCE
  cache, pages = _filled(config, inputs, sequences)
  if config.recent_window:
    first = jnp.zeros((sequences - 1,), jnp.int32)
    cache = nv.copy_rings(cache, first, jnp.arange(1, sequences, dtype=jnp.int32))
  q = jnp.asarray(inputs.q.reshape(sequences, HEADS_PER_SEQUENCE, head_dim))
  batch = nv.RaggedBatch.for_decode(
    jnp.broadcast_to(pages, (sequences, pages.shape[1])),
    jnp.full((sequences,), len(inputs.k), jnp.int32),
  )
  out, lse = _decode(config.read_path, config.q_levels, implementation)(q, cache, batch)
  who = _who(decode_op.resolve_decode, q, cache, config, batch, implementation, causal=True)
  stored = quality_stored.read(cache, np.asarray(pages)[0], len(inputs.k), config)
  return np.asarray(out).reshape(rows, 1, head_dim), np.asarray(lse).reshape(rows, 1), who, stored


def by_prefill(config, inputs: Inputs, implementation):
  """Rows as one step of one sequence, whose keys are all in the cache, its own too."""
  cache, pages = _filled(config, inputs, 1)
  q = jnp.asarray(inputs.q)
  batch = _one_sequence(pages, len(inputs.k), len(q))
  out, lse = _prefill(config.read_path, config.q_levels, implementation)(q, cache, batch)
  who = _who(prefill_op.resolve_prefill, q, cache, config, batch, implementation, causal=True)
  stored = quality_stored.read(cache, np.asarray(pages)[0], len(inputs.k), config)
  return np.asarray(out), np.asarray(lse), who, stored


def by_decode_of_a_text(config, inputs: Inputs, implementation):
  """Token by token: each is appended and then attends to all so far."""
  cache, pages = _empty(config, inputs, 1)
  q = jnp.asarray(inputs.q)
  run = _text(config.read_path, config.q_levels, implementation)
  out, lse = run(cache, pages, q, *_rows(inputs))
  batch = nv.RaggedBatch.for_decode(pages, jnp.ones((1,), jnp.int32))
  who = _who(decode_op.resolve_decode, q[:1], cache, config, batch, implementation, causal=True)
  return np.asarray(out), np.asarray(lse), who, None


@functools.cache
def _decode(read_path: str, q_levels: int, implementation: str | None):
  return jax.jit(
    functools.partial(
      nv.decode, read_path=read_path, q_levels=q_levels, implementation=implementation
    )
  )


@functools.cache
def _prefill(read_path: str, q_levels: int, implementation: str | None):
  return jax.jit(
    functools.partial(
      nv.prefill, read_path=read_path, q_levels=q_levels, implementation=implementation
    )
  )


@functools.cache
def _text(read_path: str, q_levels: int, implementation: str | None):
  decode = functools.partial(
    nv.decode, read_path=read_path, q_levels=q_levels, implementation=implementation
  )

  def run(cache, pages, q, k, v):
    def step(cache, token):
      position, q, k, v = token
      batch = nv.RaggedBatch.for_decode(pages, position[None] + 1)
      cache = nv.append(cache, k[None], v[None], batch)
      out, lse = decode(q[None], cache, batch)
      return cache, (out[0], lse[0])

    return lax.scan(step, cache, (jnp.arange(len(q), dtype=jnp.int32), q, k, v))[1]

  return jax.jit(run)


append = jax.jit(nv.append, donate_argnums=0)


def _empty(config: QualityConfig, inputs: Inputs, num_rings: int):
  """A cache for the inputs, and a page table [1, pages] in random order."""
  tokens, heads, head_dim = inputs.k.shape
  pages = -(-tokens // config.page_size)
  cache = make_cache(
    config,
    num_pages=pages,
    num_kv_heads=heads,
    head_dim=head_dim,
    num_rings=num_rings,
    **calibrated(config, *map(jnp.asarray, inputs.sample)),
  )
  order = np.random.default_rng(0).permutation(pages)
  return cache, jnp.asarray(order, jnp.int32)[None]


def _filled(config: QualityConfig, inputs: Inputs, num_rings: int):
  cache, pages = _empty(config, inputs, num_rings)
  tokens = len(inputs.k)
  batch = _one_sequence(pages, tokens, tokens)
  return append(cache, *_rows(inputs), batch), pages


def _rows(inputs: Inputs) -> tuple[jax.Array, jax.Array]:
  """K and V as a model gives them to append; what is judged is against the wide ones."""
  return jnp.asarray(inputs.k, jnp.bfloat16), jnp.asarray(inputs.v, jnp.bfloat16)


def _one_sequence(pages: jax.Array, tokens: int, rows: int) -> nv.RaggedBatch:
  return nv.RaggedBatch(pages, jnp.asarray([tokens], jnp.int32), jnp.asarray([0, rows], jnp.int32))


def _who(resolve, q, cache, config: QualityConfig, batch, implementation, *, causal) -> str:
  """The implementation that runs a request."""
  spec = attention_spec(
    q,
    config.read_path,
    causal=causal,
    sm_scale=None,
    window=None,
    soft_cap=None,
    q_levels=config.q_levels,
  )
  request = attention_request(q, cache, spec, num_seqs=batch.num_seqs, max_pages=batch.max_pages)
  return resolve(request, implementation).implementation


# Exact attention, a State for each query head; the rows that are judged only.


def _exact(inputs: Inputs) -> list[State]:
  return [
    attend(_masked(inputs, scores(quantised_q=False, quantised_k=False)), v)
    for scores, v, _ in heads(configs.BF16, inputs, None)
  ]


def heads(config: QualityConfig, inputs: Inputs, stored):
  """Of each query head its Scores, its exact V and its stored V (the exact one if not stored)."""
  group = inputs.q.shape[1] // inputs.k.shape[1]
  means = calibrated(config, *map(jnp.asarray, inputs.sample)).get("k_mean")
  for head in range(inputs.q.shape[1]):
    kv_head = head // group
    scores = quality_stored.Scores(
      config,
      inputs.q[inputs.first_judged :, head],
      inputs.k[:, kv_head],
      None if means is None else np.asarray(means[kv_head]),
      None if stored is None else stored.k[:, kv_head],
      len(inputs.k) if stored is None else stored.start,
    )
    v = inputs.v[:, kv_head].astype(np.float64)
    yield scores, v, v if stored is None else stored.v[:, kv_head]


def _masked(inputs: Inputs, scores: np.ndarray) -> np.ndarray:
  if not inputs.causal:
    return scores
  rows, tokens = scores.shape
  seen = np.arange(tokens)[None] <= (tokens - rows + np.arange(rows))[:, None]
  return np.where(seen, scores, -np.inf)


def _judged(inputs: Inputs, x: np.ndarray) -> np.ndarray:
  """[rows, heads, ...] -> the judged rows of all heads, heads one after the other."""
  return np.concatenate([x[inputs.first_judged :, h] for h in range(x.shape[1])])


def _together(states: list[State]) -> State:
  join = lambda field: np.concatenate([getattr(state, field) for state in states])
  return State(join("scores"), join("lse"), join("out"))


def _of_scores(config, inputs: Inputs, exact: list[State], stored, out, lse) -> dict[str, Number]:
  """What needs the scores: metrics of the probabilities, and shares of the error.

  `..., q only` and so on: rel_l2 and KL with only one of Q, K and V as stored. `..., operation`:
  what the operation itself adds, its out and lse against float64 over what the cache holds.
  """
  whole, parts = [], {part: [] for part in PARTS}
  for (scores, v, stored_v), state in zip(heads(config, inputs, stored), exact, strict=True):
    both = _masked(inputs, scores(quantised_q=True, quantised_k=True))
    whole.append(attend(both, stored_v))
    for part, (q, k, of_v) in PARTS.items():
      if of_v:
        parts[part].append(dataclasses.replace(state, out=np.exp(state.log_p) @ stored_v))
      else:
        parts[part].append(attend(_masked(inputs, scores(quantised_q=q, quantised_k=k)), v))
  reference, held = _together(exact), _together(whole)
  numbers = of_probabilities(reference, held)
  added = of_output(held, out, lse)
  for metric in ("rel_l2", "lse_error"):
    numbers[f"{metric}, operation"] = added[metric]
  for part, states in parts.items():
    state = _together(states)
    numbers[f"rel_l2, {part}"] = of_output(reference, state.out, state.lse)["rel_l2"]
    if part != "v only":
      numbers[f"kl, {part}"] = mean(kl(reference, state))
  return numbers


def _wide_tokens(config: QualityConfig, inputs: Inputs, stored) -> Number:
  """How many of the newest tokens are kept as well as BF16 keeps them, K and V of all heads."""
  counts = []
  for scores, v, stored_v in heads(config, inputs, stored):
    for wide, kept in ((scores.exact_k, scores.used_k), (v, stored_v)):
      error = np.linalg.norm(kept - wide, axis=-1) / np.linalg.norm(wide, axis=-1)
      # Two roundings to BF16 are 2^-8 at most, E4M3's one is some 2^-5.
      (others,) = np.nonzero(error > 2.0**-7)
      counts.append(len(error) - 1 - others[-1] if others.size else len(error))
  return Number(float(min(counts)))
