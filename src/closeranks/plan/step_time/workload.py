"""What is to be planned: a model with its batch (``Workload``), and one way to train it (``PlanChoice``).

Invariant: both are plain values that can be keys; a choice that cannot run is refused by ``choice_problems`` with its
reasons, never timed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from closeranks.core.errors import ConfigError, Problem
from closeranks.facts.layout import SCHEDULES, Layout
from closeranks.facts.shapes.model_structure import ModelStructure
from closeranks.facts.shapes.transformer import TransformerShape, shape_problems

Recompute = Literal["none", "selective", "full"]
Precision = Literal["fp32", "bf16", "fp16", "fp8"]


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """A model and its batch."""

    shape: TransformerShape
    seq_len: int
    global_batch: int
    """Samples of a step."""
    structure: ModelStructure | None = None
    """Units and weights of the model, where they are known by name; its stages are then those of the run."""

    def __post_init__(self) -> None:
        problems = [Problem("model", what) for what in shape_problems(self.shape)]
        if self.seq_len < 1:
            problems.append(Problem("data.seq_len", f"it is {self.seq_len}", "A sample has at least 1 position."))
        if self.global_batch < 1:
            problems.append(Problem("train.global_batch", f"it is {self.global_batch}", "Name at least 1 sample."))
        if problems:
            raise ConfigError(problems)

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.seq_len


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """One way to train a workload."""

    layout: Layout
    micro_batch: int = 1
    """Samples of one micro-batch on one data rank."""
    recompute: Recompute = "none"
    precision: Precision = "bf16"
    compiled: bool = True
    virtual_stages: int = 0
    """Stages per pipeline rank; 0: those of the schedule."""
    fused_attention: bool = True
    sequence_parallel: bool = True
    """Whether tensor ranks split the positions between blocks."""
    overlap: bool = True
    """Whether communication runs beside computation where the software can do so."""
    offload: bool = False
    """Whether the optimizer's state is in host memory."""
    optimizer: str = "adamw"
    software: str = "closeranks"
    """What runs it: a profile of ``constants.toml``."""

    @property
    def stages_per_rank(self) -> int:
        if self.layout.pipeline == 1:
            return 1
        return self.virtual_stages or SCHEDULES.get(self.layout.schedule, 1)

    def num_micro(self, global_batch: int) -> int:
        """Micro-batches of a step on the data rank that has the most."""
        num_micro = -(-global_batch // self.micro_batch)
        return -(-num_micro // self.layout.data)


def choice_problems(workload: Workload, choice: PlanChoice, num_devices: int) -> tuple[Problem, ...]:
    """Why this choice cannot be timed; empty when it can."""
    layout, problems = choice.layout, []
    if layout.num_ranks != num_devices:
        what = f"it has {layout.num_ranks} ranks, and the cluster {num_devices} devices"
        problems.append(Problem("layout", what, "Make the product of its axes equal to the number of devices."))
    if choice.micro_batch < 1:
        problems.append(Problem("train.micro_batch", f"it is {choice.micro_batch}", "Name at least 1 sample."))
    elif -(-workload.global_batch // choice.micro_batch) < layout.data:
        what = f"{layout.data} data ranks cannot share {workload.global_batch} samples in micro-batches of "
        problems.append(
            Problem("layout.data", f"{what}{choice.micro_batch}", "Use fewer data ranks or a larger global batch.")
        )
    if layout.pipeline * choice.stages_per_rank > workload.shape.num_layers:
        what = f"{workload.shape.num_layers} layers do not fill {layout.pipeline * choice.stages_per_rank} stages"
        problems.append(Problem("layout.pipeline", what, "Use fewer pipeline ranks."))
    if layout.expert > 1 and not workload.shape.num_experts:
        problems.append(Problem("layout.expert", "a dense model has no experts to distribute", "Use expert=1."))
    return tuple(problems)
