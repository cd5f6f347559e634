"""What runner.py prints: a line for each module, failures in full, and the summary."""

import collections
import time


def describe(running):
  return ", ".join(f"{m.name} ({m.left} left)" if m.tests else m.name for m in running)


def count(results):
  statuses = collections.Counter(result["status"] for result in results)
  return ", ".join(f"{statuses[s]} {s}" for s in ("passed", "failed", "skipped"))


def print_module(module, position, running, verbose):
  results = module.results.values()
  seconds = time.monotonic() - module.began
  line = f"{position} {module.name}: {count(results)} in {seconds:.1f} s"
  print(line + (f"; still running: {describe(running)}" if running else ""), flush=True)
  for result in results:
    if verbose:
      print(f"  {result['status']} {result['seconds']:8.2f} s  {result['id']}")
    if result["status"] == "failed":
      print_failure(result, module.name)
  if verbose:
    print("\n".join(filter(None, module.printed)))


def print_failure(result, module):
  name, text = result["id"], result["text"].rstrip()
  again = module if " " in name else name  # fixtures and crashes have a description, not an id
  print(f"\nFAILED {name}\n{text}\n  again: python3 -m tests {again}\n", flush=True)


def print_list(results):
  """Prints the ids of the tests, and why a module has none; returns the exit code."""
  for result in sorted(results, key=lambda r: r["id"]):
    if result["status"] == "listed":
      print(result["id"])
    else:
      print(f"FAILED {result['id']}\n{result['text']}")
  return int(any(result["status"] == "failed" for result in results))


def print_summary(results, seconds):
  """Prints why tests were skipped, the slowest and the failed ones; returns the exit code."""
  failed = [result for result in results if result["status"] == "failed"]
  reasons = collections.defaultdict(list)
  for result in results:
    if result["status"] == "skipped":
      reasons[result["text"]].append(result["id"])
  for reason, names in sorted(reasons.items()):
    print(f"skipped: {reason} ({len(names)}: {names[0]}{', ...' if names[1:] else ''})")
  print("slowest:")
  for result in sorted(results, key=lambda r: r["seconds"], reverse=True)[:10]:
    print(f"  {result['seconds']:8.2f} s  {result['id']}")
  for result in failed:
    print(f"FAILED {result['id']}")
  ran = any(result["status"] == "passed" for result in results)
  if not failed and not ran:
    print("no test ran")
  print(f"{seconds:.1f} s")
  print(count(results), flush=True)
  return 0 if ran and not failed else 1
