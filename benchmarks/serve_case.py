"""The two articles' thirty requests, with their kernels and with ours, side by side.

They are told in results alone: NVFP4 ran 30 requests at 68.6 % of its pool with no preemption in
102.3 s; FP8 24 at a time at 97.6 % with six preemptions in 65.4 s. What is assumed here follows
from these numbers and from the kernels' times, by arithmetic:

    geometry   48 attention calls a step and MoE kernels: Qwen3-30B-A3B's 48 layers
    lengths    equal: then 30 requests at 68.6 % of 16/9 of FP8's pool are 24.6 of them in FP8's,
               and 24 whole ones take 97.6 %
    prompts    36.9 s are 30 prompts' attention in 48 layers at 21.0 instead of 11.1 ms for 16K,
               which grows with the square of the length: 26,400 tokens
    the rest   65.4 s less that attention and decode in FP8 (41.5 s, and 10 s at 1 TB/s) is
               17.5 microseconds a prompt token; so FP8's wall time is no result

The outputs (256 tokens) and that all arrive at once are guesses. Six preemptions follow from none
of it: where a prompt must fit before it starts, as in vLLM today, there are none or one, and where
its first chunk is enough there are dozens, of a number that hangs on the last detail.
"""

from __future__ import annotations

import dataclasses

from benchmarks.serve_formats import BASELINE, FORMATS
from benchmarks.serve_metrics import Metrics, measure
from benchmarks.serve_model import MODELS, Linear
from benchmarks.serve_policies import Vllm
from benchmarks.serve_setup import Setup
from benchmarks.serve_workloads import generate

REQUESTS, PROMPT, OUTPUT = 30, 26_400, 256
NVFP4_USAGE = 0.686
REST = Linear(per_token=17.5e-6, overhead=0.0)
MODEL = MODELS["moe-30b-a3b"]
TOKENS = REQUESTS * (PROMPT + OUTPUT)
POOL_BYTES = int(TOKENS * MODEL.heads.token_bytes(FORMATS["nvfp4"]) / NVFP4_USAGE)
# (what is told, costs, the format beside FP8)
COLUMNS = (
  ("their kernels", "seeds", "nvfp4_dequant"),
  ("their kernels, A4Q", "seeds", "nvfp4_a4q"),
  ("equal kernels", "equal", "nvfp4"),
  ("their FP8, our ratios", "ratios", "nvfp4"),
  ("our kernels, H200", "alike", "nvfp4"),
)


@dataclasses.dataclass(frozen=True)
class Pair:
  """FP8 and NVFP4 under the same costs."""

  name: str
  fp8: Metrics
  nvfp4: Metrics


def setup(costs: str, *, reserve_prompt: bool = True) -> Setup:
  return Setup(
    model=MODEL,
    pool_bytes=POOL_BYTES,
    policy=lambda: Vllm(reserve_prompt=reserve_prompt),
    prefix_cache=False,
    costs=costs,
    model_costs=REST,
  )


def run(*, spread: float = 0.0, seed: int = 0, reserve_prompt: bool = True) -> list[Pair]:
  """All COLUMNS. spread, seed: of lengths, as for serve_workloads.generate."""
  workload = generate(REQUESTS, prompt=PROMPT, output=OUTPUT, spread=spread, seed=seed)
  pairs = []
  for name, costs, nvfp4 in COLUMNS:
    server = setup(costs, reserve_prompt=reserve_prompt)
    fp8, four = (
      measure(server.simulate(workload, format)) for format in (BASELINE, FORMATS[nvfp4])
    )
    pairs.append(Pair(name, fp8, four))
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
