"""What the GPU runs at: clocks, power and temperature by NVML, the library below nvidia-smi.

A card at its power limit lowers its clocks, so a row that was timed then names them. Read directly,
as that takes microseconds; a process of nvidia-smi would see the clocks of an idle card.
"""

from __future__ import annotations

import ctypes
import functools

_SM, _MEMORY = 1, 2  # nvmlClockType_t
_CORE = 0  # nvmlTemperatureSensors_t


def read(index: int = 0) -> dict[str, float] | None:
  """MHz of the multiprocessors and the memory, W, and degrees C; None where there is no NVML.

  Args:
    index: of the card, as nvidia-smi counts.
  """
  nvml = _library()
  device = ctypes.c_void_p()
  if nvml is None or nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
    return None
  asked = {
    "sm_mhz": (nvml.nvmlDeviceGetClockInfo, _SM, 1),
    "memory_mhz": (nvml.nvmlDeviceGetClockInfo, _MEMORY, 1),
    "watts": (nvml.nvmlDeviceGetPowerUsage, None, 1e-3),
    "celsius": (nvml.nvmlDeviceGetTemperature, _CORE, 1),
  }
  found = {}
  for name, (function, kind, unit) in asked.items():
    value = ctypes.c_uint()
    arguments = () if kind is None else (kind,)
    if not function(device, *arguments, ctypes.byref(value)):
      found[name] = value.value * unit
  return found or None


@functools.cache
def _library():
  try:
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
  except OSError:
    return None
  return None if nvml.nvmlInit_v2() else nvml
