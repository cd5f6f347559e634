"""Which source files a traced kernel is made of and chosen by. Rows with another hash are stale."""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import pathlib
import re
import tokenize
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).resolve().parent.parent
KERNELS = ROOT / "nvfp4_pallas" / "kernels"
PACKAGE = "nvfp4_pallas.kernels"
OPS = ROOT / "nvfp4_pallas" / "ops"
_FOR_ONE = tuple(sorted(path.stem for path in OPS.glob("*_sm[0-9]*.py")))  # architecture
# What a kernel's name in a trace begins with, and the module that launches it.
LAUNCHERS = {
  "kernel_mosaic": "attention_mosaic_sm90",  # Pallas' own name
  "decode_": "decode_mosaic_sm90",
  "short_": "tail_mosaic_sm90",
  "tail_": "tail_mosaic_sm90",
  "wide_": "tail_mosaic_sm90",
  "dense_": "prefill_mosaic_sm90",
  "fused_": "prefill_mosaic_sm90",
  "k_scan": "prefill_mosaic_sm90",
  "kv_append": "append_mosaic_sm90",
  "nvfp4_pack": "pack_mosaic_sm90",
  "nvfp4_unpack": "pack_mosaic_sm90",
  "sm100_": "attention_mosaic_sm100",
  "triton_": "attention_triton_sm120",
}


def launcher(kernel_name: str) -> str | None:
  """The module of this package that launches the kernel; None for those of XLA and libraries."""
  found = (module for prefix, module in LAUNCHERS.items() if kernel_name.startswith(prefix))
  return next(found, None)


def kernel_hash(kernel_names: Iterable[str]) -> str:
  """Of the kernels of this package among them, and of what chooses between kernels; empty where
  there is none."""
  launchers = {launcher(name) for name in kernel_names} - {None}
  return _hash(frozenset(launchers)) if launchers else ""


# What the operations import that changes who runs or what is checked, never a number.
_NO_NUMBERS = ("auto", "debug", "dispatch", "implementations", "policy")


@functools.cache
def definition_hash(implementation: str) -> str:
  """Of the code that a number of an operation comes from: the definition, and with another
  implementation than `xla` its own kernels."""
  package, with_kernels = KERNELS.parent, implementation != "xla"
  paths = [p for p in package.glob("*.py") if p.stem in definition_modules()]
  paths += [p for p in (package / "ops").glob("*.py") if _concerns(p.stem, implementation)]
  if with_kernels:
    launchers = [p.stem for p in KERNELS.glob(f"*_{implementation}.py")]
    paths += [KERNELS / f"{name}.py" for name in {"__init__", *closure(launchers)}]
  digest = hashlib.sha256()
  for path in sorted(paths):
    digest.update(path.relative_to(package).as_posix().encode() + b"\0" + code_of(path.read_text()))
  return digest.hexdigest()[:12]


def code_of(source: str) -> bytes:
  """What runs of a module: its tokens without comments, docstrings and line breaks inside of
  statements, which change no number."""
  said = {
    (node.lineno, node.col_offset)
    for node in ast.walk(ast.parse(source))
    if isinstance(node, ast.Expr)
    and isinstance(node.value, ast.Constant)
    and isinstance(node.value.value, str)
  }
  kept, line_left = [], False
  for token in tokenize.generate_tokens(io.StringIO(source).readline):
    if token.type in (tokenize.COMMENT, tokenize.NL):
      continue
    if token.start in said or (line_left and token.type == tokenize.NEWLINE):
      line_left = token.type != tokenize.NEWLINE
      continue
    kept.append(f"{tokenize.tok_name[token.type]} {token.string.strip()}")
  return "\n".join(kept).encode()


def _concerns(name: str, implementation: str) -> bool:
  """Whether numbers of an implementation may depend on this module of the operations: one that is
  named after an architecture belongs to the implementation for it."""
  architecture = re.search(r"_sm\d+$", name)
  of_another = architecture and not implementation.endswith(architecture[0])
  return name not in _NO_NUMBERS and not of_another


@functools.cache
def definition_modules() -> frozenset[str]:
  """Top-level modules that the operations import, directly or through each other."""
  package = KERNELS.parent
  found, left = set(), list((package / "ops").glob("*.py"))
  while left:
    for node in ast.walk(ast.parse(left.pop().read_text())):
      if not isinstance(node, ast.ImportFrom) or not node.module:
        continue
      if node.module == package.name:
        names = [alias.name for alias in node.names]
      elif node.module.startswith(package.name + "."):
        names = [node.module.split(".")[1]]
      else:
        continue
      new = {n for n in names if (package / f"{n}.py").exists()} - found - set(_NO_NUMBERS)
      found |= new
      left += [package / f"{n}.py" for n in new]
  return frozenset(found)


@functools.cache
def _hash(modules: frozenset[str]) -> str:
  digest = hashlib.sha256()
  for name in sorted(closure(modules)):
    digest.update(name.encode() + b"\0" + (KERNELS / f"{name}.py").read_bytes())
  for name in sorted(choosers(modules)):
    digest.update(name.encode() + b"\0" + source_of(name).encode())
  return digest.hexdigest()[:12]


def choosers(launchers: Iterable[str]) -> set[str]:
  """Modules of the operations for an architecture that launch one of these or decide who does."""
  wanted = set(launchers)
  found, left = set(), [name for name in _FOR_ONE if wanted & _launched(name)]
  while left:
    name = left.pop()
    if name not in found:
      found.add(name)
      left += [
        other for other in _FOR_ONE if re.search(rf"\bimport\b.*\b{other}\b", source_of(name))
      ]
  return found


def _launched(name: str) -> set[str]:
  """Modules of kernels that a module of the operations imports as a whole."""
  nodes = ast.walk(ast.parse(source_of(name)))
  imports = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.module == PACKAGE]
  return {alias.name for node in imports for alias in node.names}


def source_of(name: str) -> str:
  """Of a module of the operations."""
  return (OPS / f"{name}.py").read_text()


def closure(modules: Iterable[str]) -> set[str]:
  """The modules and all that they import of the kernels' package."""
  found, left = set(), list(modules)
  while left:
    name = left.pop()
    if name not in found:
      found.add(name)
      left += _imports(name)
  return found


@functools.cache
def _imports(name: str) -> tuple[str, ...]:
  imported = []
  for node in ast.walk(ast.parse((KERNELS / f"{name}.py").read_text())):
    if isinstance(node, ast.ImportFrom) and node.module == PACKAGE:
      imported += [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE + "."):
      imported.append(node.module.removeprefix(PACKAGE + "."))
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "triton_launch.call":
      imported.append(ast.literal_eval(node.args[0]))  # which it imports by name
  return tuple(imported)
