"""How kernels run in tests, on a CPU, and values that find wrong roundings."""

import jax
import ml_dtypes
import numpy as np

# Whether a race was found is not public: 0.11.2 only prints it, later versions raise.
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
GLOBAL_SCALES = (1.0, 0.0123, 2.0**-64, 3.7e7, 2.0**64)


def interpret(kernel, *arguments):
  """`kernel(*arguments, interpret=...)` under GPU interpret mode; a data race is an error."""
  try:
    result = kernel(*arguments, interpret=plgpu.InterpretGPUParams(detect_races=True))
    jax.block_until_ready(result)
    races = gpu_callbacks._races  # None where there was nothing to launch
    if races is not None and races.races_found:
      raise AssertionError("the kernel has a data race; it is printed above")
    return result
  finally:
    gpu_callbacks.reset_gpu_interpret_mode_state()


def raw(array) -> np.ndarray:
  """The bytes of an array, along its last axis."""
  return np.asarray(array).view(np.uint8)


def hard_blocks(r: np.random.Generator, count: int, global_scale: float, dtype) -> np.ndarray:
  """[count, 16] of `dtype`: what is easily rounded wrongly, in equal shares and mixed.

  Normal values; blocks of all magnitudes, so that scales underflow, are subnormal and saturate;
  ties between codes, and their neighbours; ties between scales; all finite bit patterns; all bit
  patterns, NaN and infinities among them; and blocks of zeros, -0 and subnormals, some with an
  infinity.
  """
  bits = np.dtype(f"uint{8 * dtype.itemsize}")
  g = np.float32(global_scale)
  n = -(-count // 8)

  def rounded(x):
    with np.errstate(over="ignore"):
      return np.asarray(x, np.float32).astype(dtype).view(bits)

  minus_zero, infinity = (np.asarray(x, dtype).view(bits) for x in (-0.0, np.inf))
  below_normal = np.asarray(ml_dtypes.finfo(dtype).smallest_normal, dtype).view(bits) - bits.type(1)

  scales = np.arange(1, 0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
  ties = r.choice((*E2M1_VALUES[1:], *E2M1_MIDPOINTS), (n, 16)) * r.choice((-1, 1), (n, 16))
  ties[np.arange(n), r.integers(0, 16, n)] = 6  # so that the block gets the scale that is meant
  ties = rounded(ties * (r.choice(scales, (n, 1)) * g))
  half_steps = r.integers(16, 32, (n, 1)) * 2.0 ** r.integers(-16, 6, (n, 1))
  scale_ties = r.uniform(-1, 1, (n, 16)) * 6 * half_steps * g
  scale_ties[:, 3:4] = 6 * half_steps * g
  anything = r.integers(0, 2 ** (8 * dtype.itemsize), (3, n, 16), dtype=bits)
  small = anything[2] & (below_normal | minus_zero)
  small[::2] &= minus_zero
  small[1::4, 7] = infinity
  blocks = (
    rounded(r.standard_normal((n, 16)) * g),
    rounded(r.standard_normal((n, 16)) * 2.0 ** r.integers(-16, 16, (n, 1)) * g),
    ties,
    ties + r.integers(0, 3, (n, 16)).astype(bits) - bits.type(1),
    rounded(scale_ties),
    np.where(anything[0] & infinity == infinity, minus_zero, anything[0]),
    anything[1],
    small,
  )
  return r.permutation(np.concatenate(blocks))[:count].view(dtype)
