"""Who runs an operation, and why: generic, knows no operation.

Two axes that never mix: `read_path` is numerics, `implementation` is who runs it. An operation
holds a literal table {implementation: Entry}; `resolve` picks from it and says why. A named
implementation that cannot run raises; nothing falls back unasked.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

IMPLEMENTATIONS = ("mosaic_sm90", "mosaic_sm100", "triton_sm120", "xla")
_ARCHITECTURE = {"mosaic_sm90": "sm_90", "mosaic_sm100": "sm_100", "triton_sm120": "sm_120"}


@dataclasses.dataclass(frozen=True)
class Target:
  """The device that operations are resolved for.

  Attributes:
    architecture: `cpu`, `sm_90`, `sm_100`, ... .
    interpret: Mosaic GPU interpret parameters to run kernels on a CPU with, or None.
  """

  architecture: str
  interpret: Any = None


_target: contextvars.ContextVar[Target | None] = contextvars.ContextVar("target", default=None)


@contextlib.contextmanager
def use_target(target: Target) -> Iterator[None]:
  """Resolves as if `target` were the device: for ahead-of-time compilation and interpretation.

  It acts while a function is traced and is no part of jit's cache key: trace a fresh function.
  """
  token = _target.set(target)
  try:
    yield
  finally:
    _target.reset(token)


def current_target() -> Target:
  return _target.get() or Target(_default_architecture())


def _default_architecture() -> str:
  if jax.default_backend() != "gpu":
    return jax.default_backend()
  capability = getattr(jax.devices()[0], "compute_capability", "")
  return "sm_" + str(capability).replace(".", "")


@dataclasses.dataclass(frozen=True)
class Entry:
  """One implementation of an operation.

  Attributes:
    function: the operation; it imports its kernel when it is called, not before.
    unsupported: takes the request, returns why it cannot run, or None when it can.
    choose: where there are several kernels; takes a request that one of them can run, returns its
      function and why, which the reason then says too.
  """

  function: Callable[..., Any]
  unsupported: Callable[[Any], str | None] = lambda request: None
  choose: Callable[[Any], tuple[Callable[..., Any], str]] | None = None


@dataclasses.dataclass(frozen=True)
class Resolved:
  """The choice. `reason` is one sentence; the same string stands in benchmark rows."""

  implementation: str
  function: Callable[..., Any]
  reason: str


def resolve(table: Mapping[str, Entry], request: Any, implementation: str | None) -> Resolved:
  """Picks the implementation.

  Args:
    table: the operation's implementations.
    request: what the entries' `unsupported` look at (shapes, formats, options).
    implementation: a name, or None for the first that can run: the device's own kernels, then
      the xla definition.

  Raises:
    ValueError: no such implementation.
    NotImplementedError: the named one cannot run (message: the reason).
  """
  target = current_target()
  if implementation is not None:
    if implementation not in IMPLEMENTATIONS:
      raise ValueError(f"implementation must be one of {IMPLEMENTATIONS}, got {implementation!r}")
    why_not = _why_not(table, request, implementation, target)
    if why_not:
      raise NotImplementedError(f"implementation {implementation!r} cannot run: {why_not}")
    return _resolved(table, request, implementation, "asked for by name")
  refused = []
  for name in IMPLEMENTATIONS:
    why_not = _why_not(table, request, name, target)
    if why_not is None:
      because = "; ".join(refused) or f"the device is {target.architecture}"
      return _resolved(table, request, name, because)
    refused.append(f"not {name}: {why_not}")
  raise NotImplementedError("no implementation can run: " + "; ".join(refused))


def _resolved(table, request, name, because) -> Resolved:
  entry = table[name]
  if entry.choose is None:
    return Resolved(name, entry.function, because)
  function, why = entry.choose(request)
  return Resolved(name, function, f"{because}; {why}")


def _why_not(table, request, name, target) -> str | None:
  if name not in table:
    return "this operation has no such kernel"
  needed = _ARCHITECTURE.get(name)
  if needed and needed != target.architecture:
    return f"it needs {needed}, the device is {target.architecture}"
  return table[name].unsupported(request)
