"""A server to be simulated: its memory, scheduler, model and costs, with every format in turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from benchmarks.serve_costs import LayerCosts, StepCosts, layer_costs
from benchmarks.serve_formats import Format, num_pages
from benchmarks.serve_model import MODELS, Model, ModelCosts, Roofline
from benchmarks.serve_pages import PagePool
from benchmarks.serve_policies import Policy, Vllm
from benchmarks.serve_run import Run, SimulatedExecutor, serve
from benchmarks.serve_scheduler import Scheduler
from benchmarks.serve_workloads import Workload
from nvfp4_pallas.policy import CostTable

GIB = 2**30
MEASURED_PAGE_SIZE = 64  # tokens, of the rows that costs are from


@dataclasses.dataclass(frozen=True)
class Setup:
  """All that runs of different formats have in common.

  Attributes:
    model: geometry.
    pool_bytes: of the caches of all layers.
    page_size: tokens; attention was measured with MEASURED_PAGE_SIZE.
    recent_window: tokens in bf16 beside the pages, of formats with nvfp4 in them.
    budget, most_running, most_chunks: of the scheduler.
    policy: makes one; a run may change it.
    prefix_cache: whether pages are found again.
    concurrency, time_scale: as for `serve`.
    costs: a name of serve_costs.COSTS.
    model_costs: None: a roofline of an H200.
    table: measured costs; None: the shipped ones.
    appends: measured appends; None: the committed ones.
  """

  model: Model = MODELS["llama-8b"]
  pool_bytes: int = 20 * GIB
  page_size: int = MEASURED_PAGE_SIZE
  recent_window: int = 0
  budget: int = 8192
  most_running: int = 256
  most_chunks: int | None = None
  policy: Callable[[], Policy] = Vllm
  prefix_cache: bool = True
  concurrency: int | None = None
  time_scale: float = 1.0
  costs: str = "alike"
  model_costs: ModelCosts | None = None
  table: CostTable | None = None
  appends: Mapping[str, Mapping[int, float]] | None = None

  def __post_init__(self):
    if self.recent_window < 0:
      raise ValueError(f"recent_window must be at least 0 tokens, got {self.recent_window}")

  def pages(self, format: Format) -> int:
    return num_pages(
      self.pool_bytes,
      self.model.heads,
      format,
      self.page_size,
      recent_window=self.recent_window,
      num_rings=self.most_running,
    )

  def scheduler(self, format: Format) -> Scheduler:
    """A new one, with nothing in it."""
    return Scheduler(
      PagePool(self.pages(format), prefix_cache=self.prefix_cache),
      self.page_size,
      budget=self.budget,
      most_running=self.most_running,
      most_chunks=self.most_chunks,
      policy=self.policy(),
    )

  def layer_costs(self, format: Format) -> LayerCosts:
    return layer_costs(self.costs, format, self.model.heads, self.table, self.appends)

  def step_costs(self, format: Format) -> StepCosts:
    model = Roofline(self.model) if self.model_costs is None else self.model_costs
    return StepCosts(self.layer_costs(format), self.model.layers, model)

  def simulate(self, workload: Workload, format: Format, **options) -> Run:
    """A run; further options are those of `serve`."""
    return serve(
      workload,
      self.scheduler(format),
      SimulatedExecutor(self.step_costs(format)),
      concurrency=self.concurrency,
      time_scale=self.time_scale,
      **options,
    )
