"""The README's example runs and prints what its comment says; its commands are the real ones."""

import contextlib
import io
import pathlib
import re

from absl.testing import absltest

from tests.base import TestCase

README = (pathlib.Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


class ReadmeTest(TestCase):
  def test_example(self):
    example, *others = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    printed, names = io.StringIO(), {}
    with contextlib.redirect_stdout(printed):
      for block in (example, *others):
        exec(compile(block, "README.md", "exec"), names)
    (promised,) = re.findall(r"print\(.*\)  # (.*)", example)
    self.assertEqual(printed.getvalue().strip(), promised)
    code = [line for line in example.splitlines() if line.strip() and not line.startswith("#")]
    self.assertLessEqual(len(code), 22)

  def test_nothing_is_left_to_fill_in(self):
    prose = re.sub(r"```python\n.*?```", "", README, flags=re.DOTALL)
    self.assertNotRegex(prose, r"@\w|TODO|FIXME")

  def test_commands(self):
    for command in ("python3 -m benchmarks", "python3 -m tests"):
      self.assertIn(f"\n    {command} ", README)


if __name__ == "__main__":
  absltest.main()
