"""Which Triton the tests have, and skipping without it."""

import importlib.metadata
import importlib.util
import re
import unittest

# Triton's interpreter knows `tl.dot_scaled` from then on.
INTERPRETS = (3, 8)


def has_triton(least: tuple[int, ...] = ()) -> bool:
  if importlib.util.find_spec("triton") is None:
    return False
  version = importlib.metadata.version("triton")
  return tuple(map(int, re.findall(r"\d+", version)[: len(least)])) >= least


def need_triton(test: unittest.TestCase, least: tuple[int, ...] = ()) -> None:
  """For setUp: skips the test where there is none, or an older one."""
  if not has_triton(least):
    test.skipTest(f"Triton {'.'.join(map(str, least))} or later is not installed")
