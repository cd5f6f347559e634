"""Regression limits: what was measured of each config, and 15 %.

For what no reference has a number of, so that nothing that is measured may become worse unseen.
"Measured" is the worst of the rows that a gate selects. quality_gates.py has the other gates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from benchmarks.quality_configs import BF16, RECOMMENDED
from benchmarks.quality_judge import Gate, gates_on

MARGIN = 1.15
_TEXTS = ("docs", "code", "reasoning")
_STORED_8K = {"context": 8192, "operation": "prefill 8 stored", "text": _TEXTS}
# KL of the worst text, everything read from the cache.
_KL_8K = {
  "fp8": 0.0196,
  "fp8/nvfp4": 0.0246,
  "nvfp4": 0.117,
  "nvfp4 cal": 0.1185,
  "nvfp4 4/6": 0.0915,
  "nvfp4 hadK": 0.0738,
  "nvfp4 hadK 4/6": 0.0609,
  "fp8 w64": 0.0029,
  "fp8/nvfp4 w64": 0.0043,
  "nvfp4 w64": 0.0292,
  "nvfp4 4/6 w64": 0.0221,
  "nvfp4 hadK w64": 0.013,
  "nvfp4 hadK 4/6 w64": 0.0105,
  "nvfp4 hadKV 4/6 w64": 0.0105,
}
# Of the recommended one, by how a text is read.
_KL_OF_CHUNKS = {"prefill 2048 wide": 0.0036, "prefill 64 wide": 0.0085, "prefill 16 wide": 0.0091}
_KL_SAMPLED = {"fp8": 0.0118, "nvfp4": 0.0962, RECOMMENDED: 0.0049}
# Error of the output on patterns: needle, sink, peaky (the worst length).
_PATTERNS = {
  "fp8": (0.147, 0.046, 0.2365),
  "fp8/nvfp4": (0.1749, 0.1054, 0.2334),
  "nvfp4": (0.2909, 0.1749, 0.4972),
  "nvfp4 4/6": (0.2675, 0.1281, 0.458),
  "nvfp4 hadK 4/6": (0.1834, 0.138, 0.28),
  RECOMMENDED: (0.0732, 0.1332, 0.2598),
}
# The part of the 8 likeliest keys that stay among them: gauss, peaky.
_TOP8 = {
  "fp8": (0.9277, 0.7832),
  "nvfp4": (0.8047, 0.6133),
  "nvfp4 hadK 4/6": (0.8086, 0.7559),
  RECOMMENDED: (0.916, 0.8418),
}
# Error of the output of gauss at head dims of 64 and 256.
_HEAD_DIMS = {"fp8": 0.0387, "nvfp4": 0.1353, "nvfp4 hadK 4/6": 0.1245}
_LAYERS = ("SmolLM2 layer 6", "SmolLM2 layer 16", "SmolLM2 layer 26")


def _limits() -> Iterator[Gate]:
  for config, kl in _KL_8K.items():
    yield _most("model", f"{config}: KL of the worst text at 8K", config, _STORED_8K, "kl", kl)
  for operation, kl in _KL_OF_CHUNKS.items():
    where = {"context": 8192, "operation": operation, "text": _TEXTS}
    yield _most("model", f"{RECOMMENDED}: KL, {operation}", RECOMMENDED, where, "kl", kl)
  for config, kl in _KL_SAMPLED.items():
    where = {"operation": "decode sampled"}
    yield _most("model", f"{config}: KL at temperature 1", config, where, "kl", kl)
  for config, errors in _PATTERNS.items():
    for data, error in zip(("needle", "sink", "peaky"), errors, strict=True):
      where = {"data": data, "head_dim": 128}
      yield _most("attention", f"{config}: output of {data}", config, where, "rel_l2", error)
  for config, parts in _TOP8.items():
    for data, part in zip(("gauss", "peaky"), parts, strict=True):
      where = {"data": data, "head_dim": 128}
      yield _least("attention", f"{config}: top 8 of {data}", config, where, "top8", part)
  for config, error in _HEAD_DIMS.items():
    where = {"data": "gauss", "head_dim": (64, 256)}
    yield _most("attention", f"{config}: gauss of D 64, 256", config, where, "rel_l2", error)


def _most(level, name, config, where: Mapping[str, object], metric, measured: float) -> Gate:
  return _gate(level, name, config, where, metric, "<=", MARGIN * measured, measured)


def _least(level, name, config, where: Mapping[str, object], metric, measured: float) -> Gate:
  """Of a part of 1: 15 % more of what is missing."""
  return _gate(level, name, config, where, metric, ">=", 1 - MARGIN * (1 - measured), measured)


def _gate(level, name, config, where, metric, rule, threshold, measured) -> Gate:
  return Gate(
    name=name,
    level=level,
    where={"config": config} | dict(where),
    metric=metric,
    rule=rule,
    threshold=round(threshold, 5),
    why=f"regression limit: measured {measured}, and 15 %",
    full_only=True,
  )


LIMITS = (
  *_limits(),
  *gates_on(
    "attention",
    {"data": ("gauss", "needle", "sink")},
    (
      "gauss, needle and sink: norms",
      None,
      "norm_ratio <= 1.0237",
      "regression limit: measured 1.0206, and 15 % of what it is above 1",
    ),
    (
      "gauss, needle and sink: least norms",
      None,
      "norm_ratio >= 0.928",
      "regression limit: measured .9376, of one level of Q, and 15 % of what it lacks",
    ),
    full_only=True,
  ),
  *gates_on(
    "attention",
    {"data": _LAYERS},
    (
      "recommended, layers: output error",
      RECOMMENDED,
      "rel_l2 <= 0.0643",
      "regression limit: measured .0559 of 256 tokens, 96 and more of them wide, and 15 %",
    ),
    (
      "recommended, layers: cosine",
      RECOMMENDED,
      "cos >= 0.9978",
      "regression limit: measured .9981, and 15 % of what it lacks",
    ),
    (
      "recommended, layers: lse",
      RECOMMENDED,
      "lse_error <= 0.34",
      "regression limit: measured .294, and 15 %",
    ),
    full_only=True,
  ),
  *gates_on(
    "model",
    _STORED_8K,
    (
      "model, Q x2 over Q bf16: KL of each text at 8K",
      "nvfp4, Q x2",
      "kl <= 1.05",
      "what is allowed to a Q that is free; measured 1.028",
    ),
    (
      "model, Q x1 fails 1.05 and says so",
      "nvfp4, Q x1",
      "kl > 1.05",
      "measured 1.56 and more; if this passed 1.05 the measurement would be blind to Q",
    ),
    relative_to="nvfp4",
    texts=_TEXTS,
    full_only=True,
  ),
  *gates_on(
    "model",
    _STORED_8K,
    (
      "model, recommended: perplexity over BF16's",
      RECOMMENDED,
      "perplexity <= 1.0125",
      "regression limit: measured 1.0108 on code, and 15 % of what it is above 1",
    ),
    relative_to=BF16.name,
    texts=_TEXTS,
    full_only=True,
  ),
  *gates_on(
    "model",
    {"operation": "decode greedy"},
    (
      "model, recommended: tokens until greedy text parts",
      RECOMMENDED,
      "divergence >= 20",
      "measured a mean of 44 over 8 texts, with an interval of that size; plain nvfp4 has 11",
    ),
    full_only=True,
  ),
)
