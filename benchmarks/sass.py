"""Machine code as `nvdisasm` prints it: instructions by opcode, and the inner loop of a kernel."""

from __future__ import annotations

import collections
import dataclasses
import re

TENSOR_CORE_OPS = ("HGMMA", "HMMA", "QGMMA", "IGMMA", "UTCHMMA", "UTCOMMA", "OMMA")
# What runs on the pipe for integers and logic, with the issue cycles of a warp in units of two.
ALU_OPS = dict.fromkeys(
  (
    *("LOP3", "PLOP3", "SHF", "PRMT", "LEA", "IADD3", "VIADD"),
    *("SEL", "FSEL", "ISETP", "FSETP", "FMNMX", "IMNMX", "VIMNMX"),
  ),
  1,
) | {"F2FP": 2}
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)(.*)")
_LABEL = re.compile(r"^\s*\.(L_x_\d+):")


@dataclasses.dataclass(frozen=True)
class Code:
  """A kernel's instructions in order.

  Attributes:
    ops: opcodes without modifiers.
    operands: the rest of each line.
    labels: the index of the instruction that follows each label.
  """

  ops: tuple[str, ...]
  operands: tuple[str, ...]
  labels: dict[str, int]

  @classmethod
  def parse(cls, sass: str) -> Code:
    found, labels = [], {}
    for line in sass.splitlines():
      if label := _LABEL.match(line):
        labels[label[1]] = len(found)
      elif instruction := _INSTRUCTION.search(line):
        found.append(instruction.groups())
    ops, operands = zip(*found, strict=True) if found else ((), ())
    return cls(ops, operands, labels)

  def count(self, start: int = 0, stop: int | None = None) -> collections.Counter[str]:
    """By opcode; NOP padding is left out."""
    counts = collections.Counter(self.ops[start:stop])
    del counts["NOP"]
    return counts

  def with_modifiers(self, *ops: str) -> collections.Counter[str]:
    """These opcodes by all that stands before their operands: `HMMA.16816.F32.BF16`."""
    named = zip(self.ops, self.operands, strict=True)
    return collections.Counter(
      op + rest.partition(" ")[0].rstrip(";") for op, rest in named if op in ops
    )

  def loops(self) -> list[tuple[int, int]]:
    """(first instruction, the one after the last) for each branch that goes back."""
    found = []
    for end, (op, operands) in enumerate(zip(self.ops, self.operands, strict=True)):
      target = re.search(r"\.(L_x_\d+)", operands) if op == "BRA" else None
      if target and (start := self.labels[target[1]]) <= end:
        found.append((start, end + 1))
    return found

  def in_tensor_core_loops(self, *ops: str) -> int:
    """How many instructions with these opcodes stand in a loop that has tensor core ones."""
    loops = [span for span in self.loops() if set(TENSOR_CORE_OPS) & set(self.ops[slice(*span)])]
    inside = set().union(*(range(*span) for span in loops))
    return sum(self.ops[i] in ops for i in inside)

  def inner_loop(self) -> collections.Counter[str] | None:
    """Of the shortest loop that has all tensor core instructions in it, rare branches included."""
    mma = [i for i, op in enumerate(self.ops) if op in TENSOR_CORE_OPS]
    loops = [
      (end - start, start, end)
      for start, end in self.loops()
      if mma and start <= mma[0] and mma[-1] < end
    ]
    return self.count(*min(loops)[1:]) if loops else None


def alu(counts: collections.Counter[str]) -> int:
  """Issue slots of the pipe for integers and logic."""
  return sum(weight * counts[op] for op, weight in ALU_OPS.items())
