"""Runs the package's Triton kernels on a CPU, by Triton's own interpreter. Import it first.

    with emulated():
      out, lse = attention_triton_sm120.attention(...)

The interpreter executes a kernel's source with numpy, program by program. It knows neither bfloat16
nor E4M3 well, nor this product, nor assembly, so this replaces some of its operations:

- conversions: to nearest even, E4M3 saturating, NaN stays NaN (PTX's cvt.rn.satfinite);
- products of bfloat16: exact, added in float32;
- `tl.dot_scaled`: the model of benchmarks/block_scaled.py;
- inline assembly: the few instructions that the kernels use, on 32-bit registers;
- loads and stores: an address outside of the arrays is an error, and arrays that a kernel is to
  fill hold poison before.

Not seen here: the compiler, layouts, races between threads of a program, the rounding of the
hardware's products and of its exponents and logarithms.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, as it rewrites functions then

import contextlib
import importlib
import re
from unittest import mock

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle, interpreter_builder

from benchmarks import block_scaled
from nvfp4_pallas.kernels import triton_launch

_NUMPY = {
  tl.bfloat16: ml_dtypes.bfloat16,
  tl.float8e4nv: ml_dtypes.float8_e4m3fn,
  tl.float32: np.float32,
  tl.float16: np.float16,
}
POISON = 0xFF  # NaN in every float format that there is


class Tensor:
  """A numpy array as the interpreter wants it, which expects one of PyTorch's."""

  def __init__(self, array: np.ndarray):
    self.array = array
    self.dtype = array.dtype.name

  def data_ptr(self):
    return self.array.ctypes.data

  def untyped_storage(self):
    return self

  def cpu(self):
    return self

  def copy_(self, other):
    assert other is self, "kernels work on the array itself"

  def new_empty(self, *_, **__):
    return self

  def set_(self, storage, *_):
    assert storage is self, "kernels work on the array itself"

  def storage_offset(self):
    return 0

  def size(self):
    return self.array.shape

  def stride(self):
    return tuple(s // self.array.itemsize for s in self.array.strides)


@contextlib.contextmanager
def emulated():
  """Calls of Triton kernels run here; nothing needs to be installed but Triton."""
  with mock.patch.object(triton_launch, "call", call):
    yield


def call(kernel, arrays, out_type, *, name, grid, num_warps, num_stages, **parameters):
  """As triton_launch.call."""
  del name, num_warps, num_stages
  module = importlib.import_module(f"nvfp4_pallas.kernels.{kernel}")
  run = getattr(module, kernel)
  inputs = [Tensor(np.array(a)) for a in arrays]
  outputs = [
    Tensor(np.full(a.shape, POISON, np.uint8).repeat(jnp.dtype(a.dtype).itemsize, -1).view(a.dtype))
    for a in out_type
  ]
  names = [n for n in run.arg_names[len(inputs) :] if n not in parameters]
  with _mended([*inputs, *outputs]):
    run[grid](*inputs, **dict(zip(names, outputs, strict=True)), **parameters)
  return tuple(jnp.asarray(t.array) for t in outputs)


def run(kernel, grid, *arrays, **parameters):
  """A kernel on numpy arrays, which it may change."""
  tensors = [Tensor(a) for a in arrays]
  with _mended(tensors):
    kernel[grid](*tensors, **parameters)


@contextlib.contextmanager
def _mended(tensors):
  memory = [(t.data_ptr(), t.data_ptr() + t.array.nbytes) for t in tensors]
  plain_load, plain_store = interpreter._interpreter.load, interpreter._interpreter.store

  def load(pointers, mask, other, dtype):
    _check(memory, pointers, mask, np.dtype(dtype).itemsize)
    return plain_load(pointers, mask, other, dtype)

  def store(pointers, value, mask):
    _check(memory, pointers, mask, value.itemsize)
    return plain_store(pointers, value, mask)

  native = mock.Mock(wraps=interpreter._interpreter, load=load, store=store)
  changes = {
    "create_fp_to_fp": lambda source, to, rounding: _convert(source, to),
    "create_fp_ext": _convert,
    "create_fp_trunc": _convert,
    "create_dot": _dot,
    "create_dot_scaled": _dot_scaled,
    "create_inline_asm": _assembly,
  }
  with (
    mock.patch.object(interpreter, "_interpreter", native),
    mock.patch.multiple(interpreter_builder, create=True, **changes),
    np.errstate(all="ignore"),
  ):
    yield


def _check(memory, pointers, mask, size):
  used = np.broadcast_to(pointers, np.broadcast_shapes(pointers.shape, mask.shape))[
    np.broadcast_to(mask, np.broadcast_shapes(pointers.shape, mask.shape))
  ]
  inside = np.zeros(used.shape, bool)
  for begin, end in memory:
    inside |= (used >= begin) & (used + np.uint64(size) <= end)
  assert inside.all(), f"{(~inside).sum()} addresses are outside of the kernel's arrays"


def _values(handle) -> np.ndarray:
  """The numbers of a handle as float32."""
  return handle.data.view(_NUMPY[handle.dtype.scalar]).astype(np.float32)


def _convert(source, to):
  value, kind = _values(source), to.scalar
  if kind is tl.float8e4nv:
    value = np.clip(value, -448, 448)
  value = value.astype(_NUMPY[kind])
  return TensorHandle(value.view(interpreter._get_np_dtype(kind)), kind)


def _dot(a, b, c, *_):
  # In float64 sums of products of 8- and 16-bit values are all but exact: in which order a host's
  # BLAS takes them, which may follow from where an array lies, does not show.
  wide = _values(a).astype(np.float64) @ _values(b).astype(np.float64)
  return TensorHandle(wide.astype(np.float32) + c.data, tl.float32)


def _dot_scaled(a, a_scale, a_format, b, b_scale, b_format, fast_math, a_pack, b_pack, c):
  e2m1 = interpreter._ir.ScaleDotElemTypeTY.E2M1
  assert (a_format, b_format, a_pack, b_pack) == (e2m1, e2m1, True, True)
  assert a_scale.dtype.scalar is b_scale.dtype.scalar is tl.float8e4nv
  total = np.broadcast_to(c.data, (a.data.shape[0], b.data.shape[1]))
  result = block_scaled.multiply(a.data, a_scale.data, b.data.T, b_scale.data, total)
  return TensorHandle(result, tl.float32)


def _bf16x2(a, b):
  """mul.rn.bf16x2 of uint32 arrays."""
  halves = [np.ascontiguousarray(x).view(ml_dtypes.bfloat16).astype(np.float32) for x in (a, b)]
  return (halves[0] * halves[1]).astype(ml_dtypes.bfloat16).view(np.uint32)


def _prmt(a, b, selector):
  """Each nibble of the selector names a byte of b:a."""
  word = a.astype(np.uint64) | (np.uint64(b) << np.uint64(32))
  byte = lambda i: (word >> np.uint64(8 * (selector >> (4 * i) & 7))) & np.uint64(0xFF)
  return sum(byte(i) << np.uint64(8 * i) for i in range(4)).astype(np.uint32)


_INSTRUCTIONS = {
  "mov.b32": lambda a: a,
  "and.b32": lambda a, b: a & np.uint32(b),
  "mul.lo.u32": lambda a, b: a * np.uint32(b),
  "prmt.b32": _prmt,
  "mul.rn.bf16x2": _bf16x2,
}


def _assembly(text, constraints, arguments, types, is_pure, pack):
  """Elementwise: `pack` consecutive elements of each argument fill its registers."""
  registers, outputs = {}, 0
  for t in types:
    outputs += pack * np.dtype(interpreter._get_np_dtype(t.scalar)).itemsize // 4
  number, shape = outputs, arguments[0].data.shape
  for argument in arguments:
    words = np.ascontiguousarray(argument.data).reshape(-1, pack).view(np.uint32)
    for word in words.T:
      registers[f"${number}"] = word
      number += 1
  assert len(constraints.split(",")) == number
  for line in filter(None, (part.strip(" \n{}") for part in text.split(";"))):
    if line.startswith(".reg"):
      continue
    op, *operands = re.split(r"[ ,]+", line)
    values = [registers[o] if o in registers else int(o, 0) for o in operands[1:]]
    registers[operands[0]] = _INSTRUCTIONS[op](*values)
  results, number = [], 0
  for t in types:
    dtype = np.dtype(interpreter._get_np_dtype(t.scalar))
    count = pack * dtype.itemsize // 4
    words = np.stack([registers[f"${number + i}"] for i in range(count)], axis=-1)
    results.append(TensorHandle(np.ascontiguousarray(words).view(dtype).reshape(shape), t.scalar))
    number += count
  return mock.Mock(get_result=results.__getitem__)
