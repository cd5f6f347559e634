"""`python3 -m tests`: see runner.py for the options."""

import sys

from benchmarks import bootstrap

if __name__ == "__main__":
  bootstrap.ensure(("tests",))
  from tests import runner

  sys.exit(runner.main())
