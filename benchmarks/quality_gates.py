"""The one table of what the quality benchmark must show, and the judge.

A gate selects rows, takes one number of them, and compares it with a threshold that stands here
with its reason. Thresholds come from an independent numpy implementation of the same formats
("reference" below: fake quantisation, other random draws) or follow from what is compared, and
"measured" says how far it is. Those that say "regression limit" are what was measured here and a
margin: the reference had one window of 1,024 tokens only and asks for four before a limit is fixed.
A gate whose rows are missing fails: what was not measured is not known to be good.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.quality_configs import RECOMMENDED
from benchmarks.quality_rows import QualityRow

RULES = ("<=", ">=", ">", "<", "within")
OVER = ("worst", "median", "mean")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gate:
  """One line of the table.

  Attributes:
    name: unique.
    level: of the rows.
    where: field of a row -> its value, or a tuple of values; `config` is a config's name, `text`
      what stands last in `data`.
    metric: of the rows.
    rule, threshold: what must hold for the number; `within` is a distance to `expected`.
    why: what the threshold comes from.
    over: how rows become one number: the worst of them by the rule, the median or the mean.
    texts: that must all have been read, of a gate over several.
    relative_to: a config; the number is then the ratio to that config's row on the same data.
    expected: data -> number, for `within`; each must have been measured.
    field: of the row that holds the number.
    full_only: rows exist in full runs only.
    two_implementations: the number compares a kernel with the definition.
  """

  name: str
  level: str
  where: Mapping[str, object]
  metric: str
  rule: str
  threshold: float
  why: str
  over: str = "worst"
  texts: tuple[str, ...] = ()
  relative_to: str | None = None
  expected: Mapping[str, float] | None = None
  field: str = "value"
  full_only: bool = False
  two_implementations: bool = False


@dataclasses.dataclass(frozen=True)
class Verdict:
  """What came of a gate; `passed` is None where it was not asked for. `note`: the deciding row."""

  gate: Gate
  passed: bool | None
  value: float | None
  note: str

  @property
  def word(self) -> str:
    return {True: "pass", False: "FAIL", None: "-"}[self.passed]


def judge(
  rows: Sequence[QualityRow],
  levels: Iterable[str],
  *,
  smoke: bool = False,
  implementations: Iterable[str] = ("xla",),
  gates: Sequence[Gate] | None = None,
  contexts: Iterable[int] | None = None,
) -> list[Verdict]:
  """The verdict of every gate of these levels.

  Args:
    rows: of one state of the sources.
    levels: that were measured.
    smoke: whether sizes were small; gates that need full ones are then left open.
    implementations: that ran; with one of them kernels and definition cannot be compared.
    contexts: tokens of the texts that level `model` was asked to read; None: all that gates name.
  """
  levels, both = set(levels), len(set(implementations)) > 1
  chosen = [g for g in (GATES if gates is None else gates) if g.level in levels]
  verdicts = []
  for gate in chosen:
    if gate.two_implementations and not both:
      verdicts.append(Verdict(gate, None, None, "one implementation"))
    elif gate.full_only and smoke:
      verdicts.append(Verdict(gate, None, None, "a smoke run"))
    elif gate.level == "model" and contexts is not None and not _asked(gate, contexts):
      verdicts.append(Verdict(gate, None, None, "not asked for"))
    else:
      verdicts.append(_judge(gate, rows))
  return verdicts


def _asked(gate: Gate, contexts: Iterable[int]) -> bool:
  wanted = gate.where.get("context")
  return wanted is None or wanted in set(contexts)


def _judge(gate: Gate, rows: Sequence[QualityRow]) -> Verdict:
  selected = [row for row in rows if row.metric == gate.metric and _selects(gate, row)]
  numbers = [(_number(gate, row, rows), row) for row in selected]
  measured = [(number, row) for number, row in numbers if number is not None]
  absent = set(gate.expected or ()) - {row.data for _, row in measured}
  absent |= set(gate.texts) - {_field(row, "text") for _, row in measured}
  if not measured or absent:
    return Verdict(gate, False, None, "no measurement" + "".join(f", {d}" for d in sorted(absent)))
  if any(math.isnan(number) for number, _ in measured):
    return Verdict(gate, False, math.nan, "not a number")
  if gate.over == "worst":
    pick = min if gate.rule in (">=", ">") else max
    value, row = pick(measured, key=lambda pair: pair[0])
    note = _place(row)
  else:
    value = getattr(statistics, gate.over)([number for number, _ in measured])
    note = f"{gate.over} of {len(measured)}"
  return Verdict(gate, _holds(value, gate), value, note)


def _selects(gate: Gate, row: QualityRow) -> bool:
  if row.level != gate.level or (gate.expected is not None and row.data not in gate.expected):
    return False
  for field, wanted in gate.where.items():
    if _field(row, field) not in (wanted if isinstance(wanted, tuple) else (wanted,)):
      return False
  return True


def _field(row: QualityRow, name: str):
  if name == "config":
    return row.config.name
  return row.data.split(", ")[-1] if name == "text" else getattr(row, name)


def _number(gate: Gate, row: QualityRow, rows: Sequence[QualityRow]) -> float | None:
  value = getattr(row, gate.field)
  if value is not None and gate.expected is not None:
    return abs(value - gate.expected[row.data])
  if value is None or gate.relative_to is None:
    return value
  same = lambda r: (r.level, r.metric, r.data, r.context, r.head_dim)
  peers = [r for r in rows if r.config.name == gate.relative_to and same(r) == same(row)]
  if not peers:
    return None
  # Where there are more: by the same operation, and by the same implementation.
  alike = lambda r: (r.operation == row.operation, r.implementation == row.implementation)
  base = getattr(max(peers, key=alike), gate.field)
  return value / base if base else math.nan


def _holds(value: float, gate: Gate) -> bool:
  return {
    "<=": value <= gate.threshold,
    "within": value <= gate.threshold,
    "<": value < gate.threshold,
    ">=": value >= gate.threshold,
    ">": value > gate.threshold,
  }[gate.rule]


def _place(row: QualityRow) -> str:
  return row.data if row.level == "format" else f"{row.data}, {row.context}"


# ---- the table

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


def _of_config(
  level: str, name: str, config: str | None, metric: str, rule: str, threshold: float, why, **more
) -> Gate:
  """A gate on rows of one config, or of any."""
  where = ({} if config is None else {"config": config}) | more.pop("where", {})
  return Gate(
    name=name,
    level=level,
    where=where,
    metric=metric,
    rule=rule,
    threshold=threshold,
    why=why,
    **more,
  )


_attention = functools.partial(_of_config, "attention")
_GAUSS = {"data": ("gauss", "gauss, causal"), "head_dim": 128}
_LAYERS = {"data": ("SmolLM2 layer 6", "SmolLM2 layer 16", "SmolLM2 layer 26")}
_GAUSS_AND_LAYERS = {"data": (*_GAUSS["data"], *_LAYERS["data"])}
_NVFP4_OF_LAYERS = "reference over 30 layers 13.9 and 10.9 dB, .984; ours are three of them"

_ATTENTION = (
  _attention(
    "bf16, gauss: output error",
    "bf16",
    "rel_l2_max",
    "<=",
    1e-2,
    "reference .0029 mean, .0044 max: rounding of the inputs alone; more is a fault",
    where=_GAUSS,
  ),
  _attention(
    "fp8, gauss: output error",
    "fp8",
    "rel_l2",
    "<=",
    0.042,
    "reference .037 to .040, and 5 %; measured .041",
    where=_GAUSS,
  ),
  _attention(
    "fp8, gauss: cosine",
    "fp8",
    "cos",
    ">=",
    0.9990,
    "reference .9992; measured .9992",
    where=_GAUSS,
  ),
  _attention(
    "nvfp4, gauss: output error",
    "nvfp4",
    "rel_l2",
    "<=",
    0.15,
    "reference .134 to .142, and 5 %; measured .143",
    where=_GAUSS,
  ),
  _attention(
    "nvfp4, gauss: cosine",
    "nvfp4",
    "cos",
    ">=",
    0.988,
    "reference .9899 to .9912; measured .990",
    where=_GAUSS,
  ),
  _attention(
    "nvfp4, gauss: norm",
    "nvfp4",
    "norm_ratio",
    "within",
    0.02,
    "an error of 14 % at right angles adds 1 % to a norm; a wrong scale adds what it likes",
    expected={"gauss": 1.0},
    where={"head_dim": 128},
  ),
  _attention(
    "nvfp4 4/6, gauss: output error",
    "nvfp4 4/6",
    "rel_l2",
    "<=",
    0.134,
    "reference .122 to .128, and 5 %",
    where=_GAUSS,
    full_only=True,
  ),
  _attention(
    "fp8/nvfp4, gauss: output error",
    "fp8/nvfp4",
    "rel_l2",
    "<=",
    0.11,
    "reference .094 to .100 of V alone beside .028 of K in fp8 is .104, and 5 %",
    where=_GAUSS,
    full_only=True,
  ),
  _attention(
    "Q x1, gauss: output error",
    "nvfp4, Q x1",
    "rel_l2",
    "<=",
    0.182,
    "reference .161 to .173, and 5 %",
    where=_GAUSS,
  ),
  _attention(
    "Q x2 over Q bf16: output error",
    "nvfp4, Q x2",
    "rel_l2",
    "<=",
    1.02,
    "reference 1.003: .009 beside .142 adds .2 %",
    relative_to="nvfp4",
  ),
  _attention(
    "Q x2 over Q bf16: KL",
    "nvfp4, Q x2",
    "kl",
    "<=",
    1.05,
    "reference 1.01: 4e-5 beside 4.6e-3",
    relative_to="nvfp4",
  ),
  _attention(
    "Q x1 fails 1.02 and says so",
    "nvfp4, Q x1",
    "rel_l2",
    ">",
    1.02,
    "reference 1.20 to 1.39; if this passed 1.02 the measurement would be blind to Q",
    relative_to="nvfp4",
    where=_GAUSS_AND_LAYERS,
  ),
  _attention(
    "rotated Q x1 fails 1.02 and says so",
    "nvfp4 hadK 4/6, Q x1",
    "rel_l2",
    ">",
    1.02,
    "reference 1.35 on layers: a rotation cannot help Gaussian values, nor enough elsewhere",
    relative_to="nvfp4 hadK 4/6",
    where=_GAUSS_AND_LAYERS,
  ),
  _attention(
    "nvfp4, layers: median SNR, dB",
    "nvfp4",
    "snr_db",
    ">=",
    13.5,
    f"{_NVFP4_OF_LAYERS}; measured 13.7",
    over="median",
    where=_LAYERS,
  ),
  _attention(
    "nvfp4, layers: worst SNR, dB",
    "nvfp4",
    "snr_db",
    ">=",
    10.5,
    f"{_NVFP4_OF_LAYERS}; measured 13.5, the worst layer is not among them",
    where=_LAYERS,
  ),
  _attention(
    "nvfp4, layers: cosine",
    "nvfp4",
    "cos",
    ">=",
    0.983,
    f"{_NVFP4_OF_LAYERS}; measured .985",
    over="mean",
    where=_LAYERS,
  ),
  _attention(
    "Q x2, layers: median SNR, dB",
    "nvfp4, Q x2",
    "snr_db",
    ">=",
    13.5,
    f"{_NVFP4_OF_LAYERS}, the same with two levels of Q; measured 13.7",
    over="median",
    where=_LAYERS,
  ),
  _attention(
    "fp8, layers: median SNR, dB",
    "fp8",
    "snr_db",
    ">=",
    23.0,
    "reference over 30 layers 23.8; measured 23.9",
    over="median",
    where=_LAYERS,
  ),
  _attention(
    "hadK 4/6, layers: median SNR, dB",
    "nvfp4 hadK 4/6",
    "snr_db",
    ">=",
    14.2,
    "Hadamard with 16 draws of random signs, numpy, these layers: 14.9 with a deviation of .37, "
    "and two of them; measured 14.5 without signs. Over 30 layers the reference has 16.1",
    over="median",
    where=_LAYERS,
  ),
  _attention(
    "layers: hadK 4/6 beats nvfp4",
    "nvfp4 hadK 4/6",
    "rel_l2",
    "<",
    1.0,
    "reference .141 against .179: outlier channels of K are spread over their rows",
    relative_to="nvfp4",
    where=_LAYERS,
  ),
  _attention(
    "layers: fp8 beats fp8/nvfp4",
    "fp8",
    "rel_l2",
    "<",
    1.0,
    "reference .058 against .088",
    relative_to="fp8/nvfp4",
    where=_LAYERS,
    full_only=True,
  ),
  _attention(
    "layers: fp8/nvfp4 beats nvfp4",
    "fp8/nvfp4",
    "rel_l2",
    "<",
    1.0,
    "reference .088 against .179: most of the error is K's",
    relative_to="nvfp4",
    where=_LAYERS,
    full_only=True,
  ),
  _attention(
    "Q fp8 over Q bf16: output error",
    "nvfp4, Q fp8",
    "rel_l2",
    "<=",
    1.10,
    "what is allowed to a Q that is not free; E4M3 of Q and K has 3 bits, .037 beside .142: 1.03",
    relative_to="nvfp4",
    where=_GAUSS_AND_LAYERS,
    full_only=True,
  ),
  _attention(
    "peaky from 8K on: hadK 4/6 beats nvfp4",
    "nvfp4 hadK 4/6",
    "rel_l2",
    "<",
    1.0,
    "reference .254 against .328 at 8K, .254 against .484 at 32K",
    relative_to="nvfp4",
    where={"data": "peaky", "context": (8192, 32768, 131072)},
    full_only=True,
  ),
  *(
    _attention(
      f"layers: {config} w64 beats {config}",
      f"{config} w64",
      "rel_l2",
      "<",
      1.0,
      "the newest keys, which rows attend to most, have no error",
      relative_to=config,
      where=_LAYERS,
      full_only=True,
    )
    for config in ("fp8", "nvfp4", "nvfp4 hadK 4/6")
  ),
  _attention(
    "kernels over the definition: output error",
    None,
    "rel_l2_over_xla",
    "<=",
    1.02,
    "both round the same inputs to the same codes; float32 sums are five orders finer",
    two_implementations=True,
  ),
)


_model = functools.partial(_of_config, "model")
_ONE_WINDOW = "reference {}, one window of 1,024 tokens of documentation, and 15 %"
_FOUR_WINDOWS = "regression limit: measured {} on four windows of 8,192 tokens of docs, and 15 %"
_DOCS = {"text": "docs", "context": 1024}
_DOCS_8K = {"text": "docs", "context": 8192, "operation": "prefill 8 stored"}
_MODEL = (
  _model(
    "model, recommended: KL at 8K",
    RECOMMENDED,
    "kl",
    "<=",
    0.010,
    "the goal, over all texts, everything read from the cache; missed on code alone: .0105",
    where={"context": 8192, "operation": "prefill 8 stored"},
    over="mean",
    texts=("docs", "code", "reasoning"),
    full_only=True,
  ),
  _model(
    "model, recommended: bits a value at 8K",
    RECOMMENDED,
    "kl",
    "<=",
    4.7,
    "the goal; 4.5, and a ring of 64 tokens and two pages",
    where={"context": 8192},
    field="bits_per_value",
    full_only=True,
  ),
  _model(
    "model, recommended: pass keys found at 8K",
    RECOMMENDED,
    "answer_top1",
    ">=",
    1.0,
    "the goal: every key, at every depth",
    where={"context": 8192, "text": "passkey"},
    full_only=True,
  ),
  _model(
    "model, recommended: KL of each text at 8K",
    RECOMMENDED,
    "kl",
    "<=",
    0.0121,
    "regression limit: measured .0105 on code, and 15 %",
    where={"context": 8192},
    full_only=True,
  ),
  _model(
    "model, recommended: NLL of pass keys over BF16's",
    RECOMMENDED,
    "answer_nll",
    "<=",
    1.52,
    "regression limit: measured 1.32 at 8K, and 15 %; plain nvfp4 has 1.36",
    relative_to="bf16",
    where={"context": 8192, "text": "passkey"},
    full_only=True,
  ),
  _model(
    "model, recommended: values found over BF16's",
    RECOMMENDED,
    "answer_top1",
    ">=",
    1.0,
    "what a small model does not find with BF16 says nothing of a cache; what it finds must stay",
    relative_to="bf16",
    where={"context": 8192, "text": "key-value"},
    full_only=True,
  ),
  _model(
    "model, nvfp4 w64: KL",
    "nvfp4 w64",
    "kl",
    "<=",
    0.016,
    _ONE_WINDOW.format(".0135"),
    where=_DOCS,
    full_only=True,
  ),
  _model(
    "model, nvfp4 w64: KL at 8K",
    "nvfp4 w64",
    "kl",
    "<=",
    0.0231,
    _FOUR_WINDOWS.format(".0201"),
    where=_DOCS_8K,
    full_only=True,
  ),
  _model(
    "model, nvfp4 w64: top-1 at 8K",
    "nvfp4 w64",
    "top1",
    ">=",
    0.9195,
    _FOUR_WINDOWS.format(".9300") + " of what disagrees; the reference's .955 was one of 1K",
    where=_DOCS_8K,
    full_only=True,
  ),
  _model(
    "model, nvfp4 hadK 4/6 w64: KL at 8K",
    "nvfp4 hadK 4/6 w64",
    "kl",
    "<=",
    0.0093,
    _FOUR_WINDOWS.format(".0081"),
    where=_DOCS_8K,
    full_only=True,
  ),
  _model(
    "model, nvfp4 hadK 4/6 w64: KL",
    "nvfp4 hadK 4/6 w64",
    "kl",
    "<=",
    0.0075,
    _ONE_WINDOW.format(".0060") + ", rounded up",
    where=_DOCS,
    full_only=True,
  ),
  _model(
    "model, fp8 w64: KL",
    "fp8 w64",
    "kl",
    "<=",
    0.002,
    _ONE_WINDOW.format(".0015") + ", rounded up",
    where=_DOCS,
    full_only=True,
  ),
  _model(
    "model, Q x2 over Q bf16: KL",
    "nvfp4, Q x2",
    "kl",
    "<=",
    1.05,
    "reference .0952 against .0959",
    relative_to="nvfp4",
    where={"text": ("docs", "code", "reasoning"), "context": 1024},
    full_only=True,
  ),
  _model(
    "model, nvfp4 w64 beats nvfp4: KL",
    "nvfp4 w64",
    "kl",
    "<",
    1.0,
    "the newest keys, which rows attend to most, have no error",
    relative_to="nvfp4",
    where={"text": "docs"},
  ),
)

GATES = (*_FORMAT, *_ATTENTION, *_MODEL)
