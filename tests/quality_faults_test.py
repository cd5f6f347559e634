"""One fault at a time in a format or a lever, and the gates of the quality benchmark that go red.

Faults are put into the package. Of the smoke run only what shows a fault is measured, and compiled
anew only what it changes. Without a fault the same gates are green.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax import lax

import nvfp4_pallas as nv
from benchmarks import quality_attention, quality_data, quality_format
from benchmarks.quality_attention import Case
from benchmarks.quality_configs import BY_NAME
from benchmarks.quality_gates import GATES
from benchmarks.quality_judge import judge
from nvfp4_pallas import attention, calibration, recent
from nvfp4_pallas import format as nvfp4
from nvfp4_pallas.ops import append as append_op
from nvfp4_pallas.ops import decode_xla, transforms
from tests.base import TestCase

TINY = quality_data.TINY
FORMAT = "the format itself"
Measured = tuple[str, str]  # data, or FORMAT, and a config


def measure(measured: Measured):
  data, name = measured
  if data == FORMAT:
    quantisers = tuple(q for q in quality_format.QUANTISERS if q.name == name)
    return quality_format.measure(quantisers, rows=4096)
  return quality_attention.measure((Case(data, 1024, (BY_NAME[name],)),))


sound = functools.cache(measure)


def verdicts(rows):
  """Gate's name -> whether it passes, of those that something was measured for."""
  found = judge(rows, ("format", "attention"), gates=GATES, smoke=True)
  return {v.gate.name: v.passed for v in found if v.value is not None}


# What a fault makes compile anew: `append`, `decode` or `pack`.


@contextlib.contextmanager
def recompiled(*operations: str):
  fresh = {
    "append": (quality_attention, "append", jax.jit(lambda *a: nv.append(*a), donate_argnums=0)),
    "decode": (quality_attention, "_decode", quality_attention._decode.__wrapped__),
    "pack": (
      quality_format,
      "_PACK",
      jax.jit(
        lambda *a, **k: nv.pack(*a, **k),
        static_argnames=("levels", "scale_search", "implementation"),
      ),
    ),
  }
  with contextlib.ExitStack() as stack:
    for operation in operations:
      stack.enter_context(mock.patch.object(*fresh[operation]))
    yield


# ---- the faults


def rotated_back_never(out, rotation):
  return out


def keys_rotated_alone(x, rotation, *mean, _real=transforms.transform_rows):
  return _real(x, rotation, *mean) if mean else x


def no_product_with_the_mean(q, mean):
  return jnp.zeros(q.shape[:2])


def mean_stays_in_keys(cache, k, v, _real=transforms.stored_rows):
  return _real(dataclasses.replace(cache, k=dataclasses.replace(cache.k, mean=None)), k, v)


def six_is_never_worse(blocks, codes, scale, global_scale):
  return jnp.zeros(scale.shape)


def a_page_too_early(window, batch, page_size, _real=recent.start_after):
  return _real(dataclasses.replace(window, tokens=window.tokens - page_size), batch, page_size)


def pages_alone(pages, ring):
  return pages


def scale_cut_off(q):
  """The next E4M3 number towards zero."""
  nearest = jnp.minimum(q, nvfp4.E4M3_MAX).astype(jnp.float8_e4m3fn)
  too_large = nearest.astype(jnp.float32) > q
  bits = lax.bitcast_convert_type(nearest, jnp.uint8) - too_large.astype(jnp.uint8)
  return lax.bitcast_convert_type(bits, jnp.float8_e4m3fn)


def odd_element_low(codes):
  return codes[..., 1::2] | (codes[..., 0::2] << jnp.uint8(4))


def one_level_of_q(q, spec, _real=decode_xla.round_q):
  return _real(q, dataclasses.replace(spec, q_levels=1))


def scales_a_token_late(cache, k, v, batch, _real=quality_attention.append):
  cache = _real(cache, k, v, batch)
  pool = dataclasses.replace(cache.v, block_scale=np.roll(cache.v.block_scale, 1, axis=2))
  return dataclasses.replace(cache, v=pool)


def half_of_the_scale_is_lost(cache, k, v, batch, _real=quality_attention.append):
  cache = _real(cache, k, v, batch)
  pool = dataclasses.replace(cache.v, global_scale=2 * cache.v.global_scale)
  return dataclasses.replace(cache, v=pool)


def scale_of_larger_values(amax, headroom, format):
  return jnp.full_like(amax, 2.0**-5)


def room_for_a_sixteenth(amax, headroom, format, _real=calibration._global_scale):
  return _real(amax, headroom / 32, format)


OUTPUT, LSE = "operations over what is stored: output", "operations over what is stored: lse"


@dataclasses.dataclass(frozen=True)
class Fault:
  """`target.name` becomes `instead`; `recompiled` sees it. `red`: gates that must fail.

  measured: what the fault changes, then what gates compare it with.
  """

  target: object
  name: str
  instead: Callable
  recompiled: str | None
  measured: tuple[Measured, ...]
  red: tuple[str, ...]


FAULTS = (
  Fault(
    transforms, "rotate", rotated_back_never, "decode", (("gauss", "nvfp4 hadKV 4/6"),), (OUTPUT,)
  ),
  Fault(
    transforms,
    "transform_rows",
    keys_rotated_alone,
    "decode",
    (("gauss", "nvfp4 hadKV 4/6"),),
    (OUTPUT, LSE),
  ),
  Fault(
    transforms,
    "_dot_mean",
    no_product_with_the_mean,
    "decode",
    (("peaky", "nvfp4 mean"), ("peaky", "nvfp4")),
    (LSE, "K without its mean, peaky 1K: lse"),
  ),
  Fault(
    append_op,
    "stored_rows",
    mean_stays_in_keys,
    "append",
    (("peaky", "nvfp4 mean"), ("peaky", "nvfp4")),
    ("K without its mean, peaky 1K: lse", "K without its mean beats nvfp4, peaky 1K"),
  ),
  Fault(
    nvfp4,
    "_squared_error",
    six_is_never_worse,
    "append",
    (("gauss", "nvfp4 4/6"), ("gauss", "nvfp4")),
    ("4/6 beats amax, gauss: V alone",),
  ),
  Fault(
    recent,
    "start_after",
    a_page_too_early,
    "append",
    (("gauss", "nvfp4 w64"),),
    ("windows of 64: tokens that are wide",),
  ),
  Fault(attention, "merge_two", pages_alone, "decode", (("gauss", "nvfp4 w64"),), (OUTPUT, LSE)),
  Fault(
    nvfp4, "round_to_e4m3", scale_cut_off, "pack", ((FORMAT, "nvfp4"),), ("SQNR of nvfp4, dB",)
  ),
  Fault(
    nvfp4, "pack_nibbles", odd_element_low, "pack", ((FORMAT, "nvfp4"),), ("SQNR of nvfp4, dB",)
  ),
  Fault(
    decode_xla,
    "round_q",
    one_level_of_q,
    "decode",
    (("gauss", "nvfp4, Q x2"), ("gauss", "nvfp4")),
    (OUTPUT, "Q x2 over Q bf16: output error"),
  ),
  Fault(
    quality_attention,
    "append",
    scales_a_token_late,
    None,
    (("gauss", "nvfp4"),),
    ("nvfp4, gauss: output error", "nvfp4, gauss: error of V alone"),
  ),
  Fault(
    quality_attention,
    "append",
    half_of_the_scale_is_lost,
    None,
    (("gauss", "nvfp4 cal"), ("gauss", "nvfp4")),
    ("calibrated over scale 1, gauss", "calibrated over scale 1, gauss: V alone"),
  ),
  Fault(
    calibration,
    "_global_scale",
    scale_of_larger_values,
    None,
    ((TINY, "nvfp4 cal"),),
    ("calibrated, values x 2^-12: output error",),
  ),
  Fault(
    calibration,
    "_global_scale",
    room_for_a_sixteenth,
    None,
    (("gauss", "nvfp4 cal"), ("gauss", "nvfp4")),
    ("calibrated over scale 1, gauss", "calibrated over scale 1, gauss: V alone"),
  ),
)


class FaultsTest(TestCase):
  @parameterized.named_parameters((fault.instead.__name__, fault) for fault in FAULTS)
  def test_turns_red(self, fault):
    changed, *others = fault.measured
    beside = [row for measured in others for row in sound(measured)]
    green = verdicts([*sound(changed), *beside])
    self.assertNotIn(False, green.values(), green)
    self.assertContainsSubset(fault.red, green)
    with mock.patch.object(fault.target, fault.name, fault.instead), contextlib.ExitStack() as new:
      if fault.recompiled:
        new.enter_context(recompiled(fault.recompiled))
      faulty = measure(changed)
    found = verdicts([*faulty, *beside])
    self.assertContainsSubset(fault.red, {name for name, passes in found.items() if not passes})


if __name__ == "__main__":
  absltest.main()
