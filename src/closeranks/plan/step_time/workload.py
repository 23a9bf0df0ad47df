"""What is to be planned: a model with its batch (``Workload``), and one way to train it (``PlanChoice``).

Invariant: both are plain values that can be keys; a choice that cannot run is refused by ``choice_problems`` with its
reasons, never timed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from closeranks.core.errors import ConfigError, Problem
from closeranks.facts.layout import SCHEDULES, Layout
from closeranks.facts.pipeline.occupancy import BackwardSplitting
from closeranks.facts.shapes.model_structure import ModelStructure
from closeranks.facts.shapes.module_trace import ModuleTrace
from closeranks.facts.shapes.transformer import TransformerShape, flops_per_token, shape_problems

Recompute = Literal["none", "selective", "full"]
Precision = Literal["fp32", "bf16", "fp16", "fp8"]


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """A model and its batch."""

    shape: TransformerShape | ModuleTrace
    """A module that was traced is known unit by unit, and not how it would split over tensor, context and expert
    ranks."""
    seq_len: int
    global_batch: int
    """Samples of a step."""
    structure: ModelStructure | None = None
    """Units and weights of the model, where they are known by name; its stages are then those of the run."""

    def __post_init__(self) -> None:
        is_transformer = isinstance(self.shape, TransformerShape)
        problems = [Problem("model", what) for what in shape_problems(self.transformer)] if is_transformer else []
        if self.seq_len < 1:
            problems.append(Problem("data.seq_len", f"it is {self.seq_len}", "A sample has at least 1 position."))
        if self.global_batch < 1:
            problems.append(Problem("train.global_batch", f"it is {self.global_batch}", "Name at least 1 sample."))
        if problems:
            raise ConfigError(problems)

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.seq_len

    @property
    def transformer(self) -> TransformerShape:
        """The shape of a model that is known by its shape; ``TypeError`` for a traced one."""
        if not isinstance(self.shape, TransformerShape):
            raise TypeError("a traced module has no shape of a transformer")
        return self.shape

    @property
    def num_experts(self) -> int:
        return self.shape.num_experts if isinstance(self.shape, TransformerShape) else 0

    @property
    def num_blocks(self) -> int:
        """Repeated blocks, between which a pipeline can be cut; 0 for a traced module without any."""
        if isinstance(self.shape, TransformerShape):
            return self.shape.num_layers
        return sum(1 for _ in self.shape.blocks)

    @property
    def flops_per_sample(self) -> float:
        """Model FLOPs of forward and backward, attention in full."""
        if isinstance(self.shape, TransformerShape):
            return flops_per_token(self.shape, self.seq_len) * self.seq_len
        return self.shape.flops_per_sample


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


def backward_splitting(choice: PlanChoice, *, is_traced: bool) -> BackwardSplitting:
    """What becomes of a backward that a schedule splits ([Note: how a backward is split])."""
    if choice.compiled or choice.recompute != "none":
        return "whole"
    return "split" if is_traced or choice.precision == "fp32" else "late"


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
    if layout.pipeline > 1 and layout.pipeline * choice.stages_per_rank > workload.num_blocks + 2:
        what = f"{workload.num_blocks} layers do not fill {layout.pipeline * choice.stages_per_rank} stages"
        problems.append(Problem("layout.pipeline", what, "Use fewer pipeline ranks."))
    if isinstance(workload.shape, ModuleTrace):
        for axis in ("tensor", "context"):
            if getattr(layout, axis) > 1:
                what = "how a traced module splits over these ranks is not known"
                problems.append(Problem(f"layout.{axis}", what, f"Use {axis}=1."))
    if layout.expert > 1 and not workload.num_experts:
        problems.append(Problem("layout.expert", "a dense model has no experts to distribute", "Use expert=1."))
    return tuple(problems)
