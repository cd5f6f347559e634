"""Rows of arrays that lie over a mesh, whatever the type of its axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec, auto_axes


def as_on_auto_axes(
  function: Callable[..., jax.Array],
  array: jax.Array,
  *others,
  new_axes: int | None = None,
) -> jax.Array:
  """function(array, *others), which indexes the first axis of `array`.

  On Explicit axes, jax.make_mesh's default, JAX asks for the sharding of what it finds by index, as
  soon as an axis is divided. XLA knows it, and on Auto axes is asked.

  Args:
    new_axes: None: the result lies as `array` does. Else it has so many axes in place of the first
      one, not divided, and lies as `array` does along the others.
  """
  sharding = jax.typeof(array).sharding
  if AxisType.Explicit not in sharding.mesh.axis_types:
    return function(array, *others)
  if new_axes is not None:
    spec = PartitionSpec(*(None,) * new_axes, *sharding.spec[1:])
    sharding = sharding.update(spec=spec)
  on_auto_axes: Any = auto_axes(function, out_sharding=sharding)
  return on_auto_axes(array, *others)
