"""Where does the time of a step go? Puts the costs of micro-batches, schedule, data axis and optimizer together.

The fullest pipeline rank sets the pace; the others wait for it in the bubble. Invariant: parts are not negative, and
their sum is the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from closeranks.plan.step_time.comm_time import DataTraffic, LayoutGroups, exposed_seconds, stage_send_seconds
from closeranks.plan.step_time.model_figures import ModelFigures
from closeranks.plan.step_time.operation_times import OperationTimes
from closeranks.plan.step_time.pipeline_bubble import bubble_seconds
from closeranks.plan.step_time.rank_times import RankTimes, both
from closeranks.plan.step_time.workload import PlanChoice, backward_splitting

_OFFLOAD_BYTES_PER_S = 20e9
_OFFLOAD_BYTES = 8.0
"""Per parameter over the link to host memory: its gradient down, its weight up."""


class StepPart(NamedTuple):
    name: str
    seconds: float


class StepParts:
    """The parts of one choice."""

    def __init__(
        self,
        figures: ModelFigures,
        choice: PlanChoice,
        num_micro: int,
        ranks: RankTimes,
        groups: LayoutGroups,
        traffic: DataTraffic,
        times: OperationTimes,
    ) -> None:
        self._figures, self._choice, self._times, self._num_micro = figures, choice, times, num_micro
        self._ranks, self._groups, self._traffic = ranks, groups, traffic
        self._software = times.constants.of(choice.software)
        # Workers of a CPU exchange gradients with the cores that they compute with.
        computes_alone = times.measured is None or times.cluster.device.kind != "cpu"
        can_overlap = choice.overlap and self._software.overlaps_data and computes_alone
        overlap = times.constants.overlap
        self._overlap = overlap if can_overlap else replace(overlap, hidden=0.0)

    def collect(self) -> tuple[StepPart, ...]:
        parts = (*self._computation(), *self._communication(), *self._once_per_step())
        measured = self._times.measured
        if measured is None:
            return tuple(map(StepPart._make, parts))
        return tuple(StepPart(name, seconds * measured.shown(name)) for name, seconds in parts)

    def _computation(self) -> Iterator[tuple[str, float]]:
        load, num_micro, micro, parts = self._ranks.fullest, self._num_micro, self._ranks.micro, self._ranks.parts
        blocks, heads = num_micro * load.num_blocks, num_micro * load.num_heads
        yield "compute: products", blocks * parts.products + heads * both(micro.head.products)
        yield "compute: attention", blocks * parts.attention + heads * both(micro.head.attention)
        yield "compute: memory-bound", blocks * parts.memory + num_micro * load.num_embeddings * micro.embedding_s
        yield "loss", heads * both(micro.head.memory)
        yield "recompute", blocks * parts.recompute

    def _communication(self) -> Iterator[tuple[str, float]]:
        load, parts = self._ranks.fullest, self._ranks.parts
        blocks = self._num_micro * load.num_blocks
        ends_s = self._num_micro * (load.num_embeddings + load.num_heads) * self._ranks.micro.end_comm_s
        yield "tensor communication", blocks * parts.tensor + ends_s
        yield "context communication", blocks * parts.context
        yield "expert communication", blocks * parts.expert
        splits = backward_splitting(self._choice, is_traced=self._figures.is_traced) == "split"
        bubble_s = bubble_seconds(self._ranks.others, self._choice.layout.schedule, self._num_micro, splits=splits)
        yield "pipeline bubble", bubble_s
        yield "pipeline sends", self._sends_s()

    def _sends_s(self) -> float:
        """Each micro-batch is received and sent on, in both directions; a rank cannot compute on what has not come."""
        pipeline = self._choice.layout.pipeline
        if pipeline == 1:
            return 0.0
        each_s = stage_send_seconds(self._figures.hidden_numel, self._choice, self._groups)
        return 2 * each_s * (self._num_micro * self._choice.stages_per_rank + pipeline - 1)

    def _once_per_step(self) -> Iterator[tuple[str, float]]:
        choice = self._choice
        yield "data communication", self._data_s()
        yield "waiting for ranks", self._wait_s()
        own = self._ranks.num_params / self._groups.num_shards
        offloaded_s = own * _OFFLOAD_BYTES / _OFFLOAD_BYTES_PER_S
        yield "optimizer", offloaded_s if choice.offload else self._times.update(own, choice.optimizer)
        yield "data", 0.0
        yield "launches", self._num_micro * self._ranks.host_s
        yield "overhead", self._overhead_s()

    def _data_s(self) -> float:
        ranks, traffic = self._ranks, self._traffic
        exposed = exposed_seconds(traffic.gradients_s, ranks.seconds.backward, self._overlap) + traffic.weights_s
        exposed += self._num_micro * exposed_seconds(traffic.shares_s, ranks.seconds.backward, self._overlap)
        if not traffic.gather_s:
            return exposed
        blocks = ranks.fullest.num_blocks
        if self._choice.layout.pipeline > 1:  # a stage is gathered once for all of a step's micro-batches
            return exposed + blocks * (traffic.gather_s + traffic.scatter_s)
        each = exposed_seconds(traffic.gather_s, ranks.block.forward, self._overlap)
        each += exposed_seconds(traffic.gather_s + traffic.scatter_s, ranks.block.backward, self._overlap)
        return exposed + self._num_micro * blocks * each

    def _wait_s(self) -> float:
        """Data ranks that are ready sooner wait for the last one."""
        if self._choice.layout.data == 1 or self._times.measured is None:
            return 0.0
        return self._times.measured.wait_s(self._num_micro * both(self._ranks.seconds))

    def _overhead_s(self) -> float:
        """Once in a step."""
        if self._times.measured and (found := self._times.measured.step_overhead_s()) is not None:
            return found
        return 0.0 if self._times.cluster.device.kind == "cpu" else self._software.step_s
