"""`python3 -m benchmarks`: see cli.py for what it can do."""

import sys

from benchmarks import bootstrap

if __name__ == "__main__":
  bootstrap.ensure()
  from benchmarks import cli

  sys.exit(cli.main(sys.argv[1:]))
