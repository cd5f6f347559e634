"""Which kernels a lowered call launches, on what they operate, and what they multiply.

Read from the module that JAX hands to XLA, where a kernel is a custom call with typed operands and,
of PTX, the instructions in plain text (this package's own) or compressed (Triton's). A name in a
trace says which kernel ran, this says in which numbers: a flag that asked for a path proves
neither.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from typing import Any

_CALL = re.compile(r'stablehlo\.custom_call @"?([\w$.]+)"?\((.*)$', re.MULTILINE)
_TYPES = re.compile(r": \(([^()]*)\) -> ")
_TENSOR = re.compile(r"tensor<(?:[\d?]+x)*(\w+)>")
# The kernel's symbol among the strings of its bytecode, which the text has between escaped zeros.
_MOSAIC = re.compile(r"\\00(?!stable_)(\w+)_mosaic_gpu\\00")
# jax-triton's, with a program in the attribute.
_TRITON = "triton_kernel_call"
_OPAQUE = re.compile(r'opaque = "((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(rb"\\([0-9A-F]{2}|\\)")
_ENTRY = re.compile(r"\.entry (\w+)\(")
_DOT = re.compile(r"stablehlo\.dot_general .*: \(tensor<[^>]*?(\w+)>, tensor<[^>]*?(\w+)>\) ->")
_MULTIPLY = re.compile(
  r"(wgmma\.mma_async|mma)\.sync\.aligned\.(m\d+n\d+k\d+)[\w.:]*?\.f32\.(\w+)\.(\w+)"
)
_SHORT = {"f8E4M3FN": "e4m3", "ui8": "u8", "i32": "s32", "ui32": "u32"}
XLA_ALONE = "dot_general"  # in the place of a kernel's name, where there is none
# Custom calls that launch nothing of their own.
_NOT_KERNELS = ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape")


def compiled(function: Any, *arguments: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
  """A jitted function for arguments such as these, and a row's words for what it launches."""
  lowered = function.lower(*arguments)
  text = lowered.as_text()
  facts = {"operand_dtypes": operands(text), "products": products(text) or None}
  return lowered.compile(), facts


def operands(text: str) -> dict[str, list[str]]:
  """Of each kernel the dtypes of its operands, in order; of what has none, those of its products.

  Args:
    text: a lowered module, `jax.jit(f).lower(...).as_text()`.
  """
  found = {}
  for target, rest in _calls(text):
    if target not in _NOT_KERNELS:
      types = _TYPES.findall(rest)
      found[_name(target, rest)] = _dtypes(types[-1]) if types else []
  if not found:
    kinds = sorted({f"{_short(a)} x {_short(b)}" for a, b in _DOT.findall(text)})
    found = {XLA_ALONE: kinds} if kinds else {}
  return found


def products(text: str) -> dict[str, list[str]]:
  """Of each kernel the tensor core instructions of its PTX: shape and operand types of each kind.

  Kernels that Pallas or a library compiles show theirs to nobody at this point, and are left out.
  """
  found = {}
  for target, rest in _calls(text):
    kinds = {
      f"{engine.partition('.')[0]} {shape} {a} x {b}"
      for engine, shape, a, b in _MULTIPLY.findall(rest)
    }
    if kinds:
      found[_name(target, rest)] = sorted(kinds)
  return found


def _calls(text: str) -> list[tuple[str, str]]:
  """Of each custom call its target and the rest, Triton's program before the operands' types."""
  found = []
  for target, rest in _CALL.findall(text):
    opaque = _OPAQUE.search(rest) if target.startswith(_TRITON) else None
    if opaque is not None:
      rest = _decompressed(opaque[1]) + rest[opaque.end() :]
    found.append((target, rest))
  return found


def _decompressed(opaque: str) -> str:
  """Text among a call's compressed bytes, which MLIR has written with escapes."""
  plain = lambda escape: bytes([int(escape[1], 16)]) if len(escape[1]) == 2 else escape[1]
  return zlib.decompress(_ESCAPED.sub(plain, opaque.encode("latin-1"))).decode("latin-1")


def _name(target: str, rest: str) -> str:
  entry = _ENTRY.search(rest) if target.startswith(_TRITON) else None
  if entry is not None:
    return entry[1]
  mosaic = _MOSAIC.search(rest) if target.startswith("mosaic_gpu") else None
  return mosaic[1] if mosaic else target


def _dtypes(types: str) -> list[str]:
  return [_short(dtype) for dtype in _TENSOR.findall(types)]


def _short(dtype: str) -> str:
  return _SHORT.get(dtype.rpartition("x")[2], dtype.rpartition("x")[2])
