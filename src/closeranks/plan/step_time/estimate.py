"""How long is a step of this workload, trained in this way on this cluster, and where does the time go?

Invariant: the parts of an estimate add up to its seconds; FLOPs count attention in full and never what is recomputed;
what several choices share is computed once.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from closeranks.core.errors import ConfigError
from closeranks.facts.calibration import Calibration
from closeranks.facts.cluster import Cluster
from closeranks.facts.shapes.transformer import flops_per_token
from closeranks.plan.step_time.comm_time import LayoutGroups
from closeranks.plan.step_time.constants import Constants, frozen_constants
from closeranks.plan.step_time.micro_cost import MicroCosts
from closeranks.plan.step_time.stage_loads import RankLoad, rank_loads
from closeranks.plan.step_time.step_parts import StepPart as StepPart
from closeranks.plan.step_time.step_parts import StepParts
from closeranks.plan.step_time.workload import PlanChoice, Workload, choice_problems


@dataclass(frozen=True, slots=True)
class StepEstimate:
    seconds: float
    parts: tuple[StepPart, ...]
    mfu: float
    """Model FLOP/s, attention in full, over the peak of the precision."""
    hfu: float
    """The same with what is recomputed."""
    tokens_per_s: float

    def part(self, name: str) -> float:
        return next((part.seconds for part in self.parts if part.name == name), 0.0)


def estimate_step(
    workload: Workload, choice: PlanChoice, cluster: Cluster, calibration: Calibration | None = None
) -> StepEstimate:
    return StepEstimator(workload, cluster, calibration).estimate(choice)


class StepEstimator:
    """Estimates many choices for one workload on one cluster."""

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        calibration: Calibration | None = None,
        constants: Constants | None = None,
    ) -> None:
        cluster = cluster if calibration is None else replace(cluster, calibration=calibration)
        self._workload, self._cluster = workload, cluster
        self._constants = constants or frozen_constants()
        self._micro = MicroCosts(workload.shape, workload.seq_len, cluster, self._constants)
        self._loads: dict[Hashable, tuple[RankLoad, ...]] = {}
        self._flops = flops_per_token(workload.shape, workload.seq_len)

    def estimate(self, choice: PlanChoice) -> StepEstimate:
        """Raises ``ConfigError`` with every reason why the choice cannot run."""
        workload, cluster = self._workload, self._cluster
        if problems := choice_problems(workload, choice, cluster.num_devices):
            raise ConfigError(problems)
        groups = LayoutGroups(choice.layout, cluster)
        micro, loads = self._micro.of(choice, groups), self._rank_loads(choice)
        parts = StepParts(workload, choice, cluster, micro, loads, groups, self._constants).collect()
        seconds = sum(part.seconds for part in parts)
        tokens_per_s = workload.tokens_per_step / seconds
        per_flop = tokens_per_s / (cluster.device.peak(choice.precision) * cluster.num_devices)
        hardware = self._flops + self._recomputed_flops(choice)
        return StepEstimate(seconds, parts, self._flops * per_flop, hardware * per_flop, tokens_per_s)

    def _rank_loads(self, choice: PlanChoice) -> tuple[RankLoad, ...]:
        layout, per_rank, shape = choice.layout, choice.stages_per_rank, self._workload.shape
        is_balanced = self._constants.of(choice.software).balances_stages
        key = (layout.pipeline, per_rank, layout.schedule, is_balanced)
        if key not in self._loads:
            self._loads[key] = rank_loads(
                shape, self._workload.seq_len, layout.pipeline, per_rank, layout.schedule, is_balanced=is_balanced
            )
        return self._loads[key]

    def _recomputed_flops(self, choice: PlanChoice) -> float:
        """Per token, added to those of the model."""
        shape = self._workload.shape
        if choice.recompute == "full":
            return (self._flops - 6.0 * shape.head_params) / 3
        if choice.recompute == "selective" and not choice.fused_attention:
            return 4.0 * shape.num_layers * shape.attention_dim * self._workload.seq_len
        return 0.0
