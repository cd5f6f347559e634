"""Meshes whose axes are Explicit, as those of jax.make_mesh are by default.

There JAX wants to be told how each gather and reshape is laid out. The operations know that of
their arguments and results only, and leave what is between to XLA, as on a mesh of Auto axes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec


def in_auto_mode[T](function: Callable[..., T], like: Callable[[], Any], *arguments) -> T:
  """function(*arguments); where one of them lies on a mesh of Explicit axes, with Auto ones inside.

  Args:
    like: () -> a tree of arrays as the results' one; results are laid out as they are.
  """
  mesh = next(filter(None, map(_explicit_mesh, jax.tree.leaves(arguments))), None)
  if mesh is None:
    return function(*arguments)

  def laid_out(a):
    return jax.typeof(a).sharding if _explicit_mesh(a) else NamedSharding(mesh, PartitionSpec())

  shardings = jax.tree.map(laid_out, like())
  run = jax.sharding.auto_axes(function, axes=mesh.axis_names, out_sharding=shardings)
  return cast(Callable[..., T], run)(*arguments)


def _explicit_mesh(a):
  """The mesh of a jax array or tracer that has Explicit axes and no Manual ones; else None."""
  mesh = getattr(getattr(jax.typeof(a), "sharding", None), "mesh", None)
  types = () if mesh is None else mesh.axis_types
  return mesh if AxisType.Explicit in types and AxisType.Manual not in types else None
