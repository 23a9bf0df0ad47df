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
from closeranks.facts.layout import Layout
from closeranks.plan.step_time.comm_time import DataTraffic, LayoutGroups, data_traffic
from closeranks.plan.step_time.constants import Constants, frozen_constants
from closeranks.plan.step_time.micro_cost import MicroCosts
from closeranks.plan.step_time.model_figures import model_figures
from closeranks.plan.step_time.operation_times import OperationTimes
from closeranks.plan.step_time.rank_times import RankTimes, both
from closeranks.plan.step_time.stage_loads import RankLoad, load_counts
from closeranks.plan.step_time.step_parts import StepPart as StepPart
from closeranks.plan.step_time.step_parts import StepParts
from closeranks.plan.step_time.workload import PlanChoice, Workload, choice_problems

_ROUNDED = 1 - 1e-9
"""A sum in another order may be smaller by its last digits."""


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
    """Estimates many choices for one workload on one cluster.

    ``shares``: an estimator of the same model, for another batch or another number of such devices, whose costs of
    micro-batches count here too.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        calibration: Calibration | None = None,
        constants: Constants | None = None,
        shares: StepEstimator | None = None,
    ) -> None:
        self._workload = workload
        self._cluster = cluster if calibration is None else replace(cluster, calibration=calibration)
        self._times = OperationTimes(self._cluster, constants or frozen_constants())
        self._groups: dict[Layout, LayoutGroups] = {}
        self._traffic: dict[Hashable, DataTraffic] = {}
        self._figures = model_figures(workload)
        self._micro = MicroCosts(workload, self._times)
        self._ranks: dict[Hashable, RankTimes] = {}
        if shares is not None and shares._is_alike(self):
            self._micro, self._ranks = shares._micro, shares._ranks

    def _is_alike(self, other: StepEstimator) -> bool:
        """Whether a micro-batch takes as long on both clusters, whatever their number of hosts."""
        mine, theirs = self._cluster, other._cluster
        return (
            self._workload.shape is other._workload.shape
            and self._workload.seq_len == other._workload.seq_len
            and self._times.constants == other._times.constants
            and mine.domain_size == theirs.domain_size
            and mine.devices_on_host == theirs.devices_on_host
            and replace(mine, num_devices=theirs.num_devices) == theirs
        )

    def estimate(self, choice: PlanChoice) -> StepEstimate:
        """Raises ``ConfigError`` with every reason why the choice cannot run."""
        workload, cluster = self._workload, self._cluster
        if problems := choice_problems(workload, choice, cluster.num_devices):
            raise ConfigError(problems)
        groups = self._groups_of(choice.layout)
        num_micro = choice.num_micro(workload.global_batch)
        ranks = self._ranks_of(choice, groups)
        traffic = self._traffic_of(choice, ranks, groups)
        parts = StepParts(self._figures, choice, num_micro, ranks, groups, traffic, self._times).collect()
        seconds = sum([part.seconds for part in parts])
        per_flop = workload.global_batch / seconds / (cluster.device.peak(choice.precision) * cluster.num_devices)
        hardware = self._figures.flops + self._recomputed_flops(choice)
        return StepEstimate(
            seconds, parts, self._figures.flops * per_flop, hardware * per_flop, workload.tokens_per_step / seconds
        )

    def least_seconds(self, choice: PlanChoice) -> float:
        """A bound of a legal choice, which costs much less than its estimate: what the fullest rank computes."""
        if self._times.measured:
            return 0.0  # how much of a part shows in a step was measured
        busy_s = both(self._ranks_of(choice, self._groups_of(choice.layout)).seconds)
        return _ROUNDED * choice.num_micro(self._workload.global_batch) * busy_s

    def _groups_of(self, layout: Layout) -> LayoutGroups:
        if layout not in self._groups:
            self._groups[layout] = LayoutGroups(layout, self._cluster)
        return self._groups[layout]

    def _ranks_of(self, choice: PlanChoice, groups: LayoutGroups) -> RankTimes:
        layout = choice.layout
        key = (
            layout.tensor, layout.pipeline, layout.context, layout.expert, layout.schedule, choice.micro_batch,
            choice.recompute, choice.precision, choice.compiled, choice.virtual_stages, choice.fused_attention,
            choice.sequence_parallel, choice.overlap, choice.software,
        )  # fmt: skip
        if key not in self._ranks:
            micro, loads = self._micro.of(choice, groups), self._load_counts(choice)
            self._ranks[key] = RankTimes(self._figures, choice, micro, loads, self._times)
        return self._ranks[key]

    def _traffic_of(self, choice: PlanChoice, ranks: RankTimes, groups: LayoutGroups) -> DataTraffic:
        key = (choice.layout, choice.precision, choice.software, ranks.num_params, ranks.block_params)
        if key not in self._traffic:
            software = self._times.constants.of(choice.software)
            self._traffic[key] = data_traffic(ranks.num_params, ranks.block_params, choice, groups, software)
        return self._traffic[key]

    def _load_counts(self, choice: PlanChoice) -> tuple[tuple[RankLoad, int], ...]:
        is_balanced = self._times.constants.of(choice.software).balances_stages
        layout = choice.layout
        return load_counts(
            self._figures, layout.pipeline, choice.stages_per_rank, layout.schedule, is_balanced=is_balanced
        )

    def _recomputed_flops(self, choice: PlanChoice) -> float:
        """Per sample, added to those of the model."""
        if choice.recompute == "full":
            return self._figures.num_blocks * self._figures.block_flops / 3
        if choice.recompute == "selective" and not choice.fused_attention:
            return self._figures.attention_flops / 3
        return 0.0
