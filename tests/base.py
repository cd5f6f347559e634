"""The base class of every test case; importing it makes JAX and warnings strict.

So a module has the same settings under `python -m tests.format_test` as in the workers
of `python3 -m tests`.
"""

from absl.testing import parameterized

from tests import strict

strict.install()


class TestCase(parameterized.TestCase):
  """A parameterised test case under the strict settings."""
