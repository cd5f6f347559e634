"""How hypothesis runs here: the same examples every time, none kept, no limit of time for one."""

import tempfile

from hypothesis import HealthCheck, configuration, settings

# It writes down what it finds in the sources; not into the repository.
configuration.set_hypothesis_home_dir(tempfile.gettempdir())


def few(count: int, **options) -> settings:
  """Settings for `count` examples; compiling is slow, and parameters share one test function."""
  return settings(
    max_examples=count,
    derandomize=True,
    database=None,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.differing_executors),
    **options,
  )
