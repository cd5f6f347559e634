"""What programs do with scores on their way to weights. PTX.

Exponents of a row are taken against a reference r, P = exp2(c S + r), that the first tile of a
segment sets such that its largest P is 2^FIRST_P, and that stays until P would leave float16, or
the row sees its first key. Then a new one leaves the tile's largest at 2^LATER_P at most, so that
this is rarely needed twice.
"""

from __future__ import annotations

from nvfp4_pallas.kernels.ptx import Ptx, Reg
from nvfp4_pallas.kernels.results import LOG2_E

FIRST_P = 10.0
LATER_P = 4.0
MOST_P = 15.0  # float16 ends at 2^16
NO_REFERENCE = 1e30  # of a row that has not seen a key


def factor_of_scores(p: Ptx, k_global: Reg, sm_scale: float, units: Reg) -> Reg:
  """c: from scores as products give them to log2 units.

  Args:
    k_global: K's global scale.
    units: of q times that of K's operands.
  """
  factor = k_global * (abs(sm_scale) * LOG2_E) * units
  # Where it underflows, so do scores; but 0 times the -inf of a key that is not seen is NaN.
  return p.select(factor.eq(0.0), 2.0**-126, factor)


def cap(p: Ptx, score: Reg, factor: Reg, soft_cap: float) -> Reg:
  """cap tanh(s / cap) = cap - 2 cap / (1 + exp(2 s / cap)), in log2 units."""
  power = p.exp2(score * factor * (2.0 / soft_cap))
  return p.fma(p.reciprocal(power + 1.0), -2.0 * soft_cap * LOG2_E, soft_cap * LOG2_E)
