"""What programs do with scores on their way to weights. PTX.

Exponents of a row are taken against a reference r, P = exp2(c S + r), that the first tile of a
segment sets such that its largest P is 2^FIRST_P, and that stays until P would leave float16, or
the row sees its first key. Then a new one leaves the tile's largest at 2^LATER_P at most, so that
this is rarely needed twice.
"""

from __future__ import annotations

from nvfp4_pallas.kernels.mma_fragments import Fragments
from nvfp4_pallas.kernels.ptx import Mem, Ptx, Reg
from nvfp4_pallas.kernels.results import LOG2_E
from nvfp4_pallas.kernels.wide_tiles import Tiles

FIRST_P = 10.0
LATER_P = 4.0
MOST_P = 15.0  # float16 ends at 2^16
NO_REFERENCE = 1e30  # of a row that has not seen a key


def factor_of_scores(
  p: Ptx, keys: Tiles | Fragments, head: Reg, sm_scale: float, units: Reg
) -> Reg:
  """c: from scores as products give them to log2 units.

  Args:
    keys: say whether K has a global scale.
    units: of q times that of K's operands.
  """
  factor = p.f32(abs(sm_scale) * LOG2_E)
  if keys.has_global_scale:
    at = p.address(p.pointer("k_global"), head, 4)
    factor = p.load("global.nc", Mem(at), kind="f")[0] * factor
  factor = factor * units
  # Where it underflows, so do scores; but 0 times the -inf of a key that is not seen is NaN.
  return p.select(factor.eq(0.0), 2.0**-126, factor)


def cap(p: Ptx, score: Reg, factor: Reg, soft_cap: float) -> Reg:
  """cap tanh(s / cap) = cap - 2 cap / (1 + exp(2 s / cap)), in log2 units."""
  power = p.exp2(score * factor * (2.0 / soft_cap))
  return p.fma(p.reciprocal(power + 1.0), -2.0 * soft_cap * LOG2_E, soft_cap * LOG2_E)
