"""The one table of what the quality benchmark must show.

Each threshold stands here with its reason. Thresholds come from an independent numpy implementation
of the same formats ("reference" below: fake quantisation, other random draws) or follow from what
is compared, and "measured" says how far it is. Those that say "regression limit" are what was
measured here and a margin: the reference had one window of 1,024 tokens only and asks for four
before a limit is fixed. quality_judge.py says what a gate does with rows.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.quality_configs import RECOMMENDED
from benchmarks.quality_judge import Gate

_DISTRIBUTIONS = ("gauss", "uniform", "laplace", "student-t4", "outliers x10", "biased +10")
_EXPECTED_DB = {
  "fp8": (31.54, 31.86, 31.53, 31.57, 31.53, 30.91),
  "fp8, scale 1": (31.52, 32.53, 31.53, 31.55, 31.55, 31.05),
  "nvfp4": (20.44, 19.86, 20.65, 20.74, 20.65, 20.76),
  "nvfp4 4/6": (21.22, 19.99, 21.19, 21.22, 20.78, 20.86),
  "nvfp4 had": (20.42, 20.44, 20.43, 20.40, 20.03, 20.12),
  "nvfp4 had 4/6": (21.21, 21.21, 21.21, 21.20, 21.09, 21.12),
  "nvfp4 x2": (41.25, 40.35, 41.49, 41.48, 40.70, 40.75),
}
_FORMAT = (
  *(
    Gate(
      name=f"SQNR of {config}, dB",
      level="format",
      where={"config": config},
      metric="sqnr_db",
      rule="within",
      threshold=0.05,
      expected=dict(zip(_DISTRIBUTIONS, db, strict=True)),
      why="reference, 2 Mi values of each distribution; a draw moves it by some .01 dB",
    )
    for config, db in _EXPECTED_DB.items()
  ),
  *(
    Gate(
      name=f"SQNR of {config}, 2^-20 and 2^20, dB",
      level="format",
      where={"config": config},
      metric="sqnr_db",
      rule="within",
      threshold=0.05,
      expected=dict.fromkeys(("tiny 2^-20", "huge 2^20"), _EXPECTED_DB[config][0]),
      why="a power of two in the values and the global scale changes no bit of the codes",
    )
    for config in ("fp8", "nvfp4", "nvfp4 4/6", "nvfp4 x2")
  ),
  Gate(
    name="4/6 on gauss, dB",
    level="format",
    where={"config": "nvfp4 4/6", "data": "gauss"},
    metric="sqnr_db",
    rule=">=",
    threshold=21.15,
    why="reference 21.22; the smaller error of two choices can only gain on 20.44",
  ),
  Gate(
    name="two levels on gauss, dB",
    level="format",
    where={"config": "nvfp4 x2", "data": "gauss"},
    metric="sqnr_db",
    rule=">=",
    threshold=41.0,
    why="reference 41.25: the residual is a uniform error, packed as well as the first level",
  ),
)


def _gates(
  level: str, where: Mapping[str, object], *lines: tuple[str, str | None, str, str], **shared
) -> list[Gate]:
  """Gates on the same rows of several configs.

  Args:
    where, shared: as in Gate.
    lines: (name, config or None for any, "metric rule threshold", why).
  """
  gates = []
  for name, config, rule, why in lines:
    metric, rule, threshold = rule.rsplit(" ", 2)
    of = dict(where) if config is None else {"config": config} | dict(where)
    numbers = {"metric": metric, "rule": rule, "threshold": float(threshold)}
    gates.append(Gate(name=name, level=level, where=of, why=why, **numbers, **shared))
  return gates


_GAUSS = {"data": ("gauss", "gauss, causal"), "head_dim": 128}
_LAYERS = {"data": ("SmolLM2 layer 6", "SmolLM2 layer 16", "SmolLM2 layer 26")}
_GAUSS_AND_LAYERS = {"data": (*_GAUSS["data"], *_LAYERS["data"])}
_ATTENTION = (
  *_gates(
    "attention",
    _GAUSS,
    (
      "bf16, gauss: output error",
      "bf16",
      "rel_l2_max <= 0.01",
      "reference .0029 mean, .0044 max: rounding of the inputs alone; more is a fault",
    ),
    (
      "fp8, gauss: output error",
      "fp8",
      "rel_l2 <= 0.042",
      "reference .037 to .040, and 5 %; measured .041",
    ),
    ("fp8, gauss: cosine", "fp8", "cos >= 0.999", "reference .9992; measured .9992"),
    (
      "nvfp4, gauss: output error",
      "nvfp4",
      "rel_l2 <= 0.15",
      "reference .134 to .142, and 5 %; measured .143",
    ),
    ("nvfp4, gauss: cosine", "nvfp4", "cos >= 0.988", "reference .9899 to .9912; measured .990"),
  ),
  *_gates(
    "attention",
    {"head_dim": 128},
    (
      "nvfp4, gauss: norm",
      "nvfp4",
      "norm_ratio within 0.02",
      "an error of 14 % at right angles adds 1 % to a norm; a wrong scale adds what it likes",
    ),
    expected={"gauss": 1.0},
  ),
  *_gates(
    "attention",
    _GAUSS,
    (
      "nvfp4 4/6, gauss: output error",
      "nvfp4 4/6",
      "rel_l2 <= 0.134",
      "reference .122 to .128, and 5 %",
    ),
    (
      "fp8/nvfp4, gauss: output error",
      "fp8/nvfp4",
      "rel_l2 <= 0.11",
      "reference .094 to .100 of V alone beside .028 of K in fp8 is .104, and 5 %",
    ),
    full_only=True,
  ),
  *_gates(
    "attention",
    _GAUSS,
    (
      "Q x1, gauss: output error",
      "nvfp4, Q x1",
      "rel_l2 <= 0.182",
      "reference .161 to .173, and 5 %",
    ),
  ),
  *_gates(
    "attention",
    {},
    (
      "Q x2 over Q bf16: output error",
      "nvfp4, Q x2",
      "rel_l2 <= 1.02",
      "reference 1.003: .009 beside .142 adds .2 %",
    ),
    ("Q x2 over Q bf16: KL", "nvfp4, Q x2", "kl <= 1.05", "reference 1.01: 4e-5 beside 4.6e-3"),
    relative_to="nvfp4",
  ),
  *_gates(
    "attention",
    _GAUSS_AND_LAYERS,
    (
      "Q x1 fails 1.02 and says so",
      "nvfp4, Q x1",
      "rel_l2 > 1.02",
      "reference 1.20 to 1.39; if this passed 1.02 the measurement would be blind to Q",
    ),
    relative_to="nvfp4",
  ),
  *_gates(
    "attention",
    _GAUSS_AND_LAYERS,
    (
      "rotated Q x1 fails 1.02 and says so",
      "nvfp4 hadK 4/6, Q x1",
      "rel_l2 > 1.02",
      "reference 1.35 on layers: a rotation cannot help Gaussian values, nor enough elsewhere",
    ),
    relative_to="nvfp4 hadK 4/6",
  ),
  *_gates(
    "attention",
    _LAYERS,
    (
      "nvfp4, layers: median SNR, dB",
      "nvfp4",
      "snr_db >= 13.5",
      "reference over 30 layers 13.9 and 10.9 dB, .984; ours are three of them; measured 13.7",
    ),
    over="median",
  ),
  *_gates(
    "attention",
    _LAYERS,
    (
      "nvfp4, layers: worst SNR, dB",
      "nvfp4",
      "snr_db >= 10.5",
      "reference over 30 layers 13.9 and 10.9 dB, .984; ours are three of them; measured "
      "13.5, the worst layer is not among them",
    ),
  ),
  *_gates(
    "attention",
    _LAYERS,
    (
      "nvfp4, layers: cosine",
      "nvfp4",
      "cos >= 0.983",
      "reference over 30 layers 13.9 and 10.9 dB, .984; ours are three of them; measured .985",
    ),
    over="mean",
  ),
  *_gates(
    "attention",
    _LAYERS,
    (
      "Q x2, layers: median SNR, dB",
      "nvfp4, Q x2",
      "snr_db >= 13.5",
      "reference over 30 layers 13.9 and 10.9 dB, .984; ours are three of them, the same "
      "with two levels of Q; measured 13.7",
    ),
    (
      "fp8, layers: median SNR, dB",
      "fp8",
      "snr_db >= 23.0",
      "reference over 30 layers 23.8; measured 23.9",
    ),
    (
      "hadK 4/6, layers: median SNR, dB",
      "nvfp4 hadK 4/6",
      "snr_db >= 14.2",
      "Hadamard with 16 draws of random signs, numpy, these layers: 14.9 with a deviation "
      "of .37, and two of them; measured 14.5 without signs. Over 30 layers the reference "
      "has 16.1",
    ),
    over="median",
  ),
  *_gates(
    "attention",
    _LAYERS,
    (
      "layers: hadK 4/6 beats nvfp4",
      "nvfp4 hadK 4/6",
      "rel_l2 < 1.0",
      "reference .141 against .179: outlier channels of K are spread over their rows",
    ),
    relative_to="nvfp4",
  ),
  *_gates(
    "attention",
    _LAYERS,
    ("layers: fp8 beats fp8/nvfp4", "fp8", "rel_l2 < 1.0", "reference .058 against .088"),
    relative_to="fp8/nvfp4",
    full_only=True,
  ),
  *_gates(
    "attention",
    _LAYERS,
    (
      "layers: fp8/nvfp4 beats nvfp4",
      "fp8/nvfp4",
      "rel_l2 < 1.0",
      "reference .088 against .179: most of the error is K's",
    ),
    relative_to="nvfp4",
    full_only=True,
  ),
  *_gates(
    "attention",
    _GAUSS_AND_LAYERS,
    (
      "Q fp8 over Q bf16: output error",
      "nvfp4, Q fp8",
      "rel_l2 <= 1.1",
      "what is allowed to a Q that is not free; E4M3 of Q and K has 3 bits, .037 beside .142: 1.03",
    ),
    relative_to="nvfp4",
    full_only=True,
  ),
  *_gates(
    "attention",
    {"data": "peaky", "context": (8192, 32768, 131072)},
    (
      "peaky from 8K on: hadK 4/6 beats nvfp4",
      "nvfp4 hadK 4/6",
      "rel_l2 < 1.0",
      "reference .254 against .328 at 8K, .254 against .484 at 32K",
    ),
    relative_to="nvfp4",
    full_only=True,
  ),
  *_gates(
    "attention",
    _LAYERS,
    (
      "layers: fp8 w64 beats fp8",
      "fp8 w64",
      "rel_l2 < 1.0",
      "the newest keys, which rows attend to most, have no error",
    ),
    relative_to="fp8",
    full_only=True,
  ),
  *_gates(
    "attention",
    _LAYERS,
    (
      "layers: nvfp4 w64 beats nvfp4",
      "nvfp4 w64",
      "rel_l2 < 1.0",
      "the newest keys, which rows attend to most, have no error",
    ),
    relative_to="nvfp4",
    full_only=True,
  ),
  *_gates(
    "attention",
    _LAYERS,
    (
      "layers: nvfp4 hadK 4/6 w64 beats nvfp4 hadK 4/6",
      "nvfp4 hadK 4/6 w64",
      "rel_l2 < 1.0",
      "the newest keys, which rows attend to most, have no error",
    ),
    relative_to="nvfp4 hadK 4/6",
    full_only=True,
  ),
  *_gates(
    "attention",
    {},
    (
      "kernels over the definition: output error",
      None,
      "rel_l2_over_xla <= 1.02",
      "both round the same inputs to the same codes; float32 sums are five orders finer",
    ),
    two_implementations=True,
  ),
)

_DOCS = {"text": "docs", "context": 1024}
_DOCS_8K = {"text": "docs", "context": 8192, "operation": "prefill 8 stored"}
_MODEL = (
  *_gates(
    "model",
    {"context": 8192, "operation": "prefill 8 stored"},
    (
      "model, recommended: KL at 8K",
      RECOMMENDED,
      "kl <= 0.01",
      "the goal, over all texts, everything read from the cache; missed on code alone: .0105",
    ),
    over="mean",
    texts=("docs", "code", "reasoning"),
    full_only=True,
  ),
  *_gates(
    "model",
    {"context": 8192},
    (
      "model, recommended: bits a value at 8K",
      RECOMMENDED,
      "kl <= 4.7",
      "the goal; 4.5, and a ring of 64 tokens and two pages",
    ),
    field="bits_per_value",
    full_only=True,
  ),
  *_gates(
    "model",
    {"context": 8192, "text": "passkey"},
    (
      "model, recommended: pass keys found at 8K",
      RECOMMENDED,
      "answer_top1 >= 1.0",
      "the goal: every key, at every depth",
    ),
    full_only=True,
  ),
  *_gates(
    "model",
    {"context": 8192},
    (
      "model, recommended: KL of each text at 8K",
      RECOMMENDED,
      "kl <= 0.0121",
      "regression limit: measured .0105 on code, and 15 %",
    ),
    full_only=True,
  ),
  *_gates(
    "model",
    {"context": 8192, "text": "passkey"},
    (
      "model, recommended: NLL of pass keys over BF16's",
      RECOMMENDED,
      "answer_nll <= 1.52",
      "regression limit: measured 1.32 at 8K, and 15 %; plain nvfp4 has 1.36",
    ),
    relative_to="bf16",
    full_only=True,
  ),
  *_gates(
    "model",
    {"context": 8192, "text": "key-value"},
    (
      "model, recommended: values found over BF16's",
      RECOMMENDED,
      "answer_top1 >= 1.0",
      "what a small model does not find with BF16 says nothing of a cache; what it finds must stay",
    ),
    relative_to="bf16",
    full_only=True,
  ),
  *_gates(
    "model",
    _DOCS,
    (
      "model, nvfp4 w64: KL",
      "nvfp4 w64",
      "kl <= 0.016",
      "reference .0135, one window of 1,024 tokens of documentation, and 15 %",
    ),
    full_only=True,
  ),
  *_gates(
    "model",
    _DOCS_8K,
    (
      "model, nvfp4 w64: KL at 8K",
      "nvfp4 w64",
      "kl <= 0.0231",
      "regression limit: measured .0201 on four windows of 8,192 tokens of docs, and 15 %",
    ),
    (
      "model, nvfp4 w64: top-1 at 8K",
      "nvfp4 w64",
      "top1 >= 0.9195",
      "regression limit: measured .9300 on four windows of 8,192 tokens of docs, and 15 % "
      "of what disagrees; the reference's .955 was one of 1K",
    ),
    (
      "model, nvfp4 hadK 4/6 w64: KL at 8K",
      "nvfp4 hadK 4/6 w64",
      "kl <= 0.0093",
      "regression limit: measured .0081 on four windows of 8,192 tokens of docs, and 15 %",
    ),
    full_only=True,
  ),
  *_gates(
    "model",
    _DOCS,
    (
      "model, nvfp4 hadK 4/6 w64: KL",
      "nvfp4 hadK 4/6 w64",
      "kl <= 0.0075",
      "reference .0060, one window of 1,024 tokens of documentation, and 15 %, rounded up",
    ),
    (
      "model, fp8 w64: KL",
      "fp8 w64",
      "kl <= 0.002",
      "reference .0015, one window of 1,024 tokens of documentation, and 15 %, rounded up",
    ),
    full_only=True,
  ),
  *_gates(
    "model",
    {"text": ("docs", "code", "reasoning"), "context": 1024},
    ("model, Q x2 over Q bf16: KL", "nvfp4, Q x2", "kl <= 1.05", "reference .0952 against .0959"),
    relative_to="nvfp4",
    full_only=True,
  ),
  *_gates(
    "model",
    {"text": "docs"},
    (
      "model, nvfp4 w64 beats nvfp4: KL",
      "nvfp4 w64",
      "kl < 1.0",
      "the newest keys, which rows attend to most, have no error",
    ),
    relative_to="nvfp4",
  ),
)

GATES = (*_FORMAT, *_ATTENTION, *_MODEL)
