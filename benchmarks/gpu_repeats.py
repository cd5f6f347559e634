"""The same bits every time: the checks of gpu_checks.py run each kernel through `repeated`."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_times = contextvars.ContextVar("times", default=100)


@contextlib.contextmanager
def repeats(times: int) -> Iterator[None]:
  """Other than 100 calls; 0 where a tool watches the kernels and each call takes long."""
  token = _times.set(times)
  try:
    yield
  finally:
    _times.reset(token)


def repeated(run: Callable[..., Any], *arguments: Any) -> Any:
  """run(*arguments), after the same call many times more; results are compared where they are.

  Raises:
    AssertionError: a call gave other bits, NaN's among them.
  """
  first, different = run(*arguments), jnp.zeros((), jnp.int32)
  times = _times.get()
  for _ in range(times):
    different = _count(different, first, run(*arguments))
  if int(different):
    raise AssertionError(f"the same inputs gave other bits in {different} of {times} calls")
  return first


@jax.jit
def _count(before: jax.Array, first: Any, again: Any) -> jax.Array:
  """before, and one more if any bit differs."""
  pairs = zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True)
  differs = [jnp.any(_bits(a) != _bits(b)) for a, b in pairs]
  return before + jnp.any(jnp.stack(differs)).astype(jnp.int32)


def _bits(array: jax.Array) -> jax.Array:
  return lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}")
