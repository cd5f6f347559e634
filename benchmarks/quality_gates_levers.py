"""Gates of level attention: levers, and the largest errors of logits and of lse.

quality_gates.py has the others. "half way" is between 1 and what the reference or a measurement
has, in the logarithm: a lever that does nothing has 1.
"""

from __future__ import annotations

from benchmarks import quality_data
from benchmarks.quality_configs import WINDOWED
from benchmarks.quality_gates_attention import GAUSS, LAYERS
from benchmarks.quality_judge import gates_on

_W64 = tuple(config.name for config in WINDOWED if config.recent_window == 64)
_PEAKY = {"data": "peaky", "context": 1024}
LEVERS = (
  # Each beside the same without it.
  *gates_on(
    "attention",
    {"config": _W64},
    (
      "windows of 64: tokens that are wide",
      None,
      "wide_tokens within 0",
      "1,024 - 64 is whole pages, so that exactly the newest 64 are in the ring",
    ),
    expected={"gauss": 64.0},
  ),
  *gates_on(
    "attention",
    {},
    (
      "windows of 96: tokens that are wide",
      "nvfp4 hadK 4/6 w96",
      "wide_tokens within 0",
      "1,024 - 96 is whole pages, so that exactly the newest 96 are in the ring",
    ),
    expected={"gauss": 96.0},
    full_only=True,
  ),
  *gates_on(
    "attention",
    LAYERS,
    (
      "layers: fp8 w64 beats fp8",
      "fp8 w64",
      "rel_l2 < 0.8",
      "half way to 1 from the worst of .35, .57 and .62: what is read most has no error",
    ),
    relative_to="fp8",
    full_only=True,
  ),
  *gates_on(
    "attention",
    LAYERS,
    (
      "layers: nvfp4 w64 beats nvfp4",
      "nvfp4 w64",
      "rel_l2 < 0.67",
      "half way to 1 from the worst of .29, .35 and .45: what is read most has no error",
    ),
    relative_to="nvfp4",
    full_only=True,
  ),
  *gates_on(
    "attention",
    LAYERS,
    (
      "layers: nvfp4 hadK 4/6 w64 beats nvfp4 hadK 4/6",
      "nvfp4 hadK 4/6 w64",
      "rel_l2 < 0.6",
      "half way to 1 from the worst of .23, .36 and .36: what is read most has no error",
    ),
    relative_to="nvfp4 hadK 4/6",
  ),
  *gates_on(
    "attention",
    LAYERS,
    (
      "layers: hadK 4/6 beats nvfp4",
      "nvfp4 hadK 4/6",
      "rel_l2 < 1.0",
      "reference .141 against .179: outlier channels of K are spread over their rows",
    ),
    relative_to="nvfp4",
  ),
  *gates_on(
    "attention",
    {"data": "peaky", "context": (8192, 32768, 131072)},
    (
      "peaky from 8K on: hadK 4/6 beats nvfp4",
      "nvfp4 hadK 4/6",
      "rel_l2 < 0.88",
      "half way from reference .254 beside .328 at 8K, .484 at 32K; measured .55 to .66",
    ),
    relative_to="nvfp4",
    full_only=True,
  ),
  *gates_on(
    "attention",
    GAUSS,
    (
      "4/6 beats amax, gauss: V alone",
      "nvfp4 4/6",
      "rel_l2, v only < 0.956",
      "half way; 21.22 dB beside 20.44 is .914; measured .875 to .925",
    ),
    relative_to="nvfp4",
  ),
  *gates_on(
    "attention",
    {"data": (*GAUSS["data"], *LAYERS["data"], "peaky")},
    (
      "V rotated costs nothing: output",
      "nvfp4 hadKV 4/6",
      "rel_l2 <= 1.05",
      "reference .141 of both; measured .994 to 1.01, a draw of other codes",
    ),
    (
      "V rotated costs nothing: V alone",
      "nvfp4 hadKV 4/6",
      "rel_l2, v only <= 1.05",
      "reference 21.21 dB of both; measured .994 to 1.02, a draw of other codes",
    ),
    relative_to="nvfp4 hadK 4/6",
  ),
  *gates_on(
    "attention",
    _PEAKY,
    (
      "K without its mean beats nvfp4, peaky 1K",
      "nvfp4 mean",
      "rel_l2 < 0.855",
      "half way; reference .163 beside .224, .73; measured .73",
    ),
    (
      "K without its mean beats nvfp4, peaky 1K: KL",
      "nvfp4 mean",
      "kl < 0.661",
      "half way; reference .0131 beside .0300, .437; measured .374",
    ),
    (
      "K without its mean, peaky 1K: worst logit",
      "nvfp4 mean",
      "max_delta_logit < 0.725",
      "half way from the measured .525: biased channels have the largest errors",
    ),
    relative_to="nvfp4",
  ),
  *gates_on(
    "attention",
    GAUSS,
    (
      "calibrated over scale 1, gauss",
      "nvfp4 cal",
      "rel_l2 <= 1.02",
      "reference within .15 dB, 1.7 %: block scales have range enough; measured .996",
    ),
    (
      "calibrated over scale 1, gauss: V alone",
      "nvfp4 cal",
      "rel_l2, v only <= 1.02",
      "reference within .15 dB, 1.7 %: block scales have range enough; measured 1.007",
    ),
    relative_to="nvfp4",
  ),
  *gates_on(
    "attention",
    LAYERS,
    (
      "calibrated over scale 1, layers",
      "nvfp4 cal",
      "rel_l2 <= 1.05",
      "reference within .15 dB of elements; regression limit: measured .99, of one layer 1.04",
    ),
    relative_to="nvfp4",
    over="mean",
  ),
  *gates_on(
    "attention",
    {"data": quality_data.TINY},
    (
      "calibrated, values x 2^-12: output error",
      "nvfp4 cal",
      "rel_l2 <= 0.15",
      "a power of two moves into the global scale, so it is gauss'; with a scale of 1 it is 1",
    ),
  ),
  # Logits and lse.
  *gates_on(
    "attention",
    GAUSS,
    (
      "nvfp4, gauss: worst logit",
      "nvfp4",
      "max_delta_logit <= 0.67",
      "7 deviations of .095, norms of rows apart: of 8 million scores 5.4 are met; measured .59",
    ),
    (
      "fp8, gauss: worst logit",
      "fp8",
      "max_delta_logit <= 0.19",
      "7 deviations of .0266; measured .17",
    ),
    (
      "hadK 4/6, gauss: worst logit",
      "nvfp4 hadK 4/6",
      "max_delta_logit <= 0.61",
      "7 deviations of .087, which is 21.2 dB; measured .53",
    ),
    (
      "nvfp4, gauss: lse",
      "nvfp4",
      "lse_error <= 0.025",
      "half of .095^2 for the mean of exponentials, 3 deviations of .095 / sqrt(1024 / e), and a "
      "fifth for longer rows; measured .012",
    ),
    (
      "K without its mean, gauss: lse",
      "nvfp4 mean",
      "lse_error <= 0.025",
      "as of nvfp4, since the product with the mean is put back; measured .015",
    ),
    (
      "calibrated, gauss: lse",
      "nvfp4 cal",
      "lse_error <= 0.025",
      "as of nvfp4; measured .014",
    ),
    (
      "fp8, gauss: lse",
      "fp8",
      "lse_error <= 0.006",
      "half of .0266^2, 3 deviations of .0266 / sqrt(1024 / e), a fifth; measured .0045",
    ),
  ),
  *gates_on(
    "attention",
    _PEAKY,
    (
      "nvfp4, peaky 1K: lse",
      "nvfp4",
      "lse_error <= 0.61",
      "regression limit: measured .533, and 15 %",
    ),
    (
      "K without its mean, peaky 1K: lse",
      "nvfp4 mean",
      "lse_error <= 0.27",
      "regression limit: measured .234, and 15 %",
    ),
  ),
  *gates_on(
    "attention",
    LAYERS,
    (
      "nvfp4, layers: worst logit",
      "nvfp4",
      "max_delta_logit <= 3.1",
      "regression limit: measured 2.71, and 15 %",
    ),
    (
      "nvfp4, layers: lse",
      "nvfp4",
      "lse_error <= 2.4",
      "regression limit: measured 2.09, and 15 %",
    ),
    (
      "fp8, layers: worst logit",
      "fp8",
      "max_delta_logit <= 1.1",
      "regression limit: measured .956, and 15 %",
    ),
    ("fp8, layers: lse", "fp8", "lse_error <= 0.77", "regression limit: measured .672, and 15 %"),
    (
      "hadK 4/6, layers: worst logit",
      "nvfp4 hadK 4/6",
      "max_delta_logit <= 2.88",
      "regression limit: measured 2.50, and 15 %",
    ),
    (
      "hadK 4/6, layers: lse",
      "nvfp4 hadK 4/6",
      "lse_error <= 2.13",
      "regression limit: measured 1.86, and 15 %",
    ),
    (
      "nvfp4 hadK 4/6 w64, layers: lse",
      "nvfp4 hadK 4/6 w64",
      "lse_error <= 0.34",
      "regression limit: measured .294, and 15 %; 1.86 without the window",
    ),
  ),
  *gates_on(
    "attention",
    LAYERS,
    (
      "nvfp4 w64, layers: lse",
      "nvfp4 w64",
      "lse_error <= 0.53",
      "regression limit: measured .459, and 15 %; 2.09 without the window",
    ),
    full_only=True,
  ),
)
