"""Strict physics for the tests: no implicit promotion of dtypes or ranks, warnings are errors."""

import os
import sys
import warnings


def install() -> None:
  import jax

  if not os.environ.get("JAX_PLATFORMS"):
    os.environ["JAX_PLATFORMS"] = "cpu"  # for processes that a test starts
    jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_numpy_dtype_promotion", "strict")
  jax.config.update("jax_numpy_rank_promotion", "raise")
  warnings.simplefilter("error")
  # unittest replaces these filters by its own, unless the user seems to have asked for some.
  sys.warnoptions.append("error")
