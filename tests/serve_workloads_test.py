"""Traces and generated requests, and traces that break a rule."""

import gzip
import json
import pathlib
import tempfile

from absl.testing import absltest, parameterized

from benchmarks import serve_workloads
from benchmarks.serve_workloads import Item, generate, ideal_hit_share, read
from tests.base import TestCase

GOOD = '{"timestamp": 1500, "input_length": 600, "output_length": 3, "hash_ids": [4, 5]}\n'
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319601,3180,8
"""


class FilesTestCase(TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))

  def file(self, text, name="a.jsonl"):
    path = self.folder / name
    data = text.encode() if isinstance(text, str) else text
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


class TraceTest(FilesTestCase):
  @parameterized.parameters("a.jsonl", "a.jsonl.gz")
  def test_mooncake(self, name):
    self.assertEqual(read(self.file(GOOD + "\n", name)).items, (Item(1.5, 600, 3, (4, 5)),))

  @parameterized.parameters("a.csv", "a.csv.gz")
  def test_azure(self, name):
    for text in (AZURE, AZURE.replace("\n", "\r\n"), AZURE.rstrip("\n")):
      one, two = read(self.file(text, name)).items
      self.assertEqual(one, Item(0.0, 4808, 10))
      self.assertEqual((two.prompt, two.output, two.hash_ids), (3180, 8, ()))
      self.assertAlmostEqual(two.arrival, 0.052, places=6)

  def test_the_first_requests(self):
    self.assertLen(read(self.file(GOOD * 5), limit=3).items, 3)
    # What comes after them is not looked at.
    self.assertIsNone(read(self.file(GOOD * 3 + "nonsense"), limit=3).error)

  def test_generated_lengths_are_at_least_a_token(self):
    items = generate(50, prompt=2, output=1, spread=0.95).items
    self.assertEqual(min(item.prompt for item in items), 1)
    self.assertEqual({item.output for item in items}, {1, 2})

  def test_what_is_written_is_read(self):
    items = generate(20, prompt=3000, output=9, spread=0.5, reuse=0.4, documents=3, interval=0.25)
    path = self.folder / "b.jsonl"
    serve_workloads.write(items.items, path)
    self.assertEqual(read(path).items, items.items)

  @parameterized.parameters(
    ("{", "Expecting"),
    ("[1]", r"a request must be a JSON object, got '\[1\]'"),
    ('{"timestamp": 1}', "a request must have hash_ids, input_length, output_length"),
    (GOOD.replace("600", "0"), "prompt must be at least 1 token, got 0"),
    (GOOD.replace("600", "600.5"), "prompt must be at least 1 token, got 600.5"),
    (GOOD.replace(": 3", ": 0"), "output must be at least 1 token, got 0"),
    (GOOD.replace(": 3", ": -1"), "output must be at least 1 token, got -1"),
    (GOOD.replace(": 3", ": null"), "output must be at least 1 token, got None"),
    (GOOD.replace("[4, 5]", "[4]"), "hash_ids must be 2 for 600 prompt tokens, one for every 512"),
    (GOOD.replace("[4, 5]", '[4, "5"]'), "hash_ids must be whole numbers from 0 on"),
    (GOOD.replace("[4, 5]", "[4, -5]"), "hash_ids must be whole numbers from 0 on"),
    (GOOD.replace("[4, 5]", "4"), "not iterable"),
    (GOOD.replace("1500", '"now"'), "unsupported operand"),
    (GOOD.replace("1500", "-3"), "arrival must be a time from 0 on, got -0.003"),
    (GOOD.replace("1500", "NaN"), "arrival must be a time from 0 on, got nan"),
    (GOOD.replace("1500", "1499"), "times must not go back, got 1.499 s after 1.5 s"),
  )
  def test_a_bad_line_ends_it_and_is_named(self, line, message):
    found = read(self.file(GOOD * 2 + "\n" + line + "\n" + GOOD))
    self.assertLen(found.items, 2)
    self.assertRegex(found.error, f"^a.jsonl, line 4: .*{message}")

  @parameterized.parameters(
    ("2023-11-16 18:17:05,12", "a request must have 3 fields"),
    ("2023-11-16 18:17:05.0,12,0", "output must be at least 1 token, got 0"),
    ("2023-11-16 18:17:05.0,12,x", "invalid literal for int"),
    ("yesterday,12,3", "Invalid isoformat string"),
    ("2023-11-16 18:17:03.0,12,3", "arrival must be a time from 0 on, got -0.97"),
    ("2023-11-16 18:17:04.0,12,3", "times must not go back"),
  )
  def test_a_bad_line_of_azure(self, line, message):
    found = read(self.file(AZURE + line + "\n", "a.csv"))
    self.assertLen(found.items, 2)
    self.assertRegex(found.error, f"^a.csv, line 4: .*{message}")

  def test_a_file_that_is_none(self):
    found = read(self.file("a,b,c\n1,2,3\n", "a.csv"))
    self.assertIn("line 1: columns must be TIMESTAMP,ContextTokens", found.error)
    self.assertIn("columns must be", read(self.file("", "a.csv")).error)
    with self.assertRaisesRegex(ValueError, "limit must be at least 1, got 0"):
      read(self.file(GOOD), limit=0)
    self.assertIn("after line 0", read(self.file(b"\xff\xfe", "a.jsonl")).error)
    with self.assertRaisesRegex(ValueError, "path must end in .jsonl or .csv, got 'a.txt'"):
      read(self.file("", "a.txt"))
    with self.assertRaises(FileNotFoundError):
      read(self.folder / "none.jsonl")

  def test_a_file_that_was_cut(self):
    lines = [GOOD.replace("1500", str(1500 + i)) for i in range(20000)]
    whole = self.file("".join(lines), "a.jsonl.gz").read_bytes()
    path = self.folder / "b.jsonl.gz"
    path.write_bytes(whole[: len(whole) // 2])
    found = read(path)
    self.assertGreater(len(found.items), 1000)
    self.assertRegex(found.error, "b.jsonl.gz, after line [0-9]+: Compressed file ended")


class GenerateTest(TestCase):
  def test_lengths_and_times(self):
    items = generate(200, prompt=4000, output=100, spread=0.25, interval=0.5).items
    for name, low, high in (("prompt", 3000, 5000), ("output", 75, 125)):
      lengths = [getattr(item, name) for item in items]
      self.assertBetween(min(lengths), low, low + 0.05 * high)
      self.assertBetween(max(lengths), 0.95 * high, high)
    self.assertEqual([item.arrival for item in items[:3]], [0.0, 0.5, 1.0])

  def test_poisson(self):
    items = generate(2000, prompt=9, output=1, interval=0.5, poisson=True).items
    self.assertAlmostEqual(items[-1].arrival / 2000, 0.5, delta=0.03)

  @parameterized.parameters(0.0, 0.3, 0.9)
  def test_reuse(self, reuse):
    """With one document all but the first find the share of the prompt that was asked for."""
    workload = generate(300, prompt=20480, output=1, reuse=reuse)
    self.assertAlmostEqual(ideal_hit_share(workload.items), 299 / 300 * reuse, delta=1e-9)

  def test_nothing_else_is_shared(self):
    items = generate(50, prompt=5000, output=1, reuse=0.5, documents=4, spread=0.5).items
    begins = {}
    for item in items:
      for place, key in enumerate(item.hash_ids):
        before = item.hash_ids[:place]
        self.assertEqual(begins.setdefault(key, before), before)  # an id has one beginning

  def test_same_seed_same_requests(self):
    a, b, c = (generate(20, prompt=900, output=9, spread=0.5, seed=s).items for s in (1, 1, 2))
    self.assertEqual(a, b)
    self.assertNotEqual(a, c)

  @parameterized.parameters(
    ({"requests": 0}, "requests must be at least 1, got 0"),
    ({"spread": 1.0}, "spread must be from 0 up to less than 1, got 1.0"),
    ({"reuse": -0.1}, "reuse must be from 0 up to less than 1, got -0.1"),
    ({"documents": 0}, "documents must be at least 1, got 0"),
    ({"output": 0}, "output must be at least 1 token, got 0"),
  )
  def test_wrong_arguments(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      generate(**({"requests": 3, "prompt": 9, "output": 9} | changes))

  def test_ideal_hits(self):
    items = [
      Item(0.0, 1000, 1, (1, 2)),
      Item(0.0, 1024, 1, (1, 2)),  # all but the last token
      Item(0.0, 1500, 1, (3, 2, 4)),  # 2 is not its beginning
      Item(0.0, 600, 1),
    ]
    self.assertEqual(ideal_hit_share(items), 1023 / (1000 + 1024 + 1500 + 600))


class JsonTest(TestCase):
  def test_times_are_whole_milliseconds(self):
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / "a.jsonl"
      serve_workloads.write([Item(0.0015, 3, 1, (0,))], path)
      expected = {"timestamp": 2, "input_length": 3, "output_length": 1, "hash_ids": [0]}
      self.assertEqual(json.loads(path.read_text()), expected)


if __name__ == "__main__":
  absltest.main()
