"""The two articles' thirty requests, with their kernels and with ours, side by side.

They are told in results alone: NVFP4 ran 30 requests at 68.6 % of its pool with no preemption in
102.3 s; FP8 24 at a time at 97.6 % with six preemptions in 65.4 s. What is assumed here follows
from these numbers and from the kernels' times, by arithmetic:

    geometry   48 attention calls a step and MoE kernels: Qwen3-30B-A3B's 48 layers
    lengths    equal: then 30 requests at 68.6 % of 16/9 of FP8's pool are 24.6 of them in FP8's,
               and 24 whole ones take 97.6 %
    start      as vLLM had it before its pull request 37307: a prompt starts when its first chunk
               fits. FP8's 25th does, finds no pages for its next ones, and gives way: once in
               about four steps, from the step in which 24 have been read until the first is done
    outputs    102 tokens. All 30 prompts take 104 steps of 8,192 tokens (an assumption), and run
               together only if the first one still writes then; FP8 has its 24 after 83, and with
               longer outputs would preempt more: 112 tokens make ten
    prompts    what NVFP4's kernels take longer, 21.0 instead of 11.1 ms a layer for 16K, growing
               with the square of the length, less what FP8 computes again, is 36.9 s: 28,300 tokens
    the rest   65.4 s less attention (48 s): 10.1 microseconds a token; so FP8's wall time is no
               result. On an H200 a roofline stands in its place.

All arrive at once. Who starts only when the whole prompt fits, as in vLLM today, preempts nobody.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from benchmarks.serve_formats import BASELINE, FORMATS
from benchmarks.serve_metrics import Metrics, measure
from benchmarks.serve_model import MODELS, Linear
from benchmarks.serve_policies import Vllm
from benchmarks.serve_setup import Setup
from benchmarks.serve_workloads import generate

REQUESTS, PROMPT, OUTPUT = 30, 28_300, 102
NVFP4_USAGE = 0.686
REST = Linear(per_token=10.1e-6, overhead=0.0)
MODEL = MODELS["moe-30b-a3b"]
TOKENS = REQUESTS * (PROMPT + OUTPUT)
POOL_BYTES = int(TOKENS * MODEL.heads.token_bytes(FORMATS["nvfp4"]) / NVFP4_USAGE)


@dataclasses.dataclass(frozen=True)
class Server:
  """A line of the table.

  Attributes:
    name: as it is told.
    costs: of serve_costs.COSTS.
    nvfp4: the format beside FP8.
    reserve_prompt: whether a prompt starts only when all of it fits.
    here: whether the rest of the model is an H200's.
  """

  name: str
  costs: str
  nvfp4: str
  reserve_prompt: bool = False
  here: bool = False

  @property
  def setup(self) -> Setup:
    return Setup(
      model=MODEL,
      pool_bytes=POOL_BYTES,
      policy=lambda: Vllm(reserve_prompt=self.reserve_prompt),
      prefix_cache=False,
      costs=self.costs,
      model_costs=None if self.here else REST,
    )


THEIRS = Server("their kernels", "seeds", "nvfp4_dequant")
SERVERS = (
  THEIRS,
  Server("the same, whole prompts", "seeds", "nvfp4_dequant", reserve_prompt=True),
  Server("their kernels, A4Q", "seeds", "nvfp4_a4q"),
  Server("equal kernels", "equal", "nvfp4"),
  Server("their FP8, our ratios", "ratios", "nvfp4"),
  Server("our kernels, H200", "alike", "nvfp4", here=True),
)


@dataclasses.dataclass(frozen=True)
class Pair:
  """FP8 and NVFP4 under the same costs."""

  name: str
  fp8: Metrics
  nvfp4: Metrics


def run(
  servers: Sequence[Server] = SERVERS,
  *,
  prompt: int = PROMPT,
  output: int = OUTPUT,
  spread: float = 0.0,
  seed: int = 0,
) -> list[Pair]:
  """A pair of each server. spread, seed: of lengths, as for serve_workloads.generate."""
  workload = generate(REQUESTS, prompt=prompt, output=output, spread=spread, seed=seed)
  pairs = []
  for server in servers:
    formats = BASELINE, FORMATS[server.nvfp4]
    fp8, nvfp4 = (measure(server.setup.simulate(workload, format)) for format in formats)
    pairs.append(Pair(server.name, fp8, nvfp4))
  return pairs


def lines(pairs: list[Pair]) -> list[str]:
  """The table, beside what the articles tell."""
  head = f"{'':24}{'running':>9}{'preempted':>11}{'use, %':>14}{'wall, s':>16}{'NVFP4 / FP8':>13}"
  told = f"{'told':24}{'24 30':>9}{'6 0':>11}{'97.6 68.6':>14}{'65.4 102.3':>16}{'1.56':>13}"
  printed = ["Thirty requests, FP8 and NVFP4:", head, "-" * len(head), told]
  for pair in pairs:
    both = pair.fp8, pair.nvfp4
    of = lambda text, both=both: " ".join(map(text, both))
    ratio = pair.nvfp4.wall_seconds / pair.fp8.wall_seconds
    printed.append(
      f"{pair.name:24}{of(lambda m: str(m.num_requests_running)):>9}"
      f"{of(lambda m: str(m.num_preemptions)):>11}"
      f"{of(lambda m: f'{100 * m.kv_cache_usage_perc:.1f}'):>14}"
      f"{of(lambda m: f'{m.wall_seconds:.1f}'):>16}{ratio:>13.2f}"
    )
  return printed
