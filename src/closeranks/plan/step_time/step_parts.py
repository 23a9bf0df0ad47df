"""Where does the time of a step go? Puts the costs of micro-batches, schedule, data axis and optimizer together.

The fullest pipeline rank sets the pace; the others wait for it in the bubble. Invariant: parts are not negative, and
their sum is the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from closeranks.facts.timing.attention import ForwardBackward
from closeranks.plan.step_time.comm_time import (
    DataTraffic,
    LayoutGroups,
    data_traffic,
    exposed_seconds,
    stage_send_seconds,
)
from closeranks.plan.step_time.micro_cost import BlockCost, MicroCost
from closeranks.plan.step_time.model_figures import ModelFigures
from closeranks.plan.step_time.operation_times import OperationTimes
from closeranks.plan.step_time.pipeline_bubble import PipelineWork, bubble_seconds
from closeranks.plan.step_time.stage_loads import RankLoad
from closeranks.plan.step_time.workload import PlanChoice

_OFFLOAD_BYTES_PER_S = 20e9
_OFFLOAD_BYTES = 8.0
"""Per parameter over the link to host memory: its gradient down, its weight up."""


@dataclass(frozen=True, slots=True)
class StepPart:
    name: str
    seconds: float


class StepParts:
    """The parts of one choice."""

    def __init__(
        self,
        figures: ModelFigures,
        choice: PlanChoice,
        num_micro: int,
        micro: MicroCost,
        loads: Sequence[tuple[RankLoad, int]],
        groups: LayoutGroups,
        times: OperationTimes,
    ) -> None:
        self._figures, self._choice, self._times, self._num_micro = figures, choice, times, num_micro
        self._micro, self._groups, self._loads = micro, groups, loads
        self._software = times.constants.of(choice.software)
        # Workers of a CPU exchange gradients with the cores that they compute with.
        computes_alone = times.measured is None or times.cluster.device.kind != "cpu"
        can_overlap = choice.overlap and self._software.overlaps_data and computes_alone
        overlap = times.constants.overlap
        self._overlap = overlap if can_overlap else replace(overlap, hidden=0.0)
        self._block = ForwardBackward(self._mixed(_forward), self._mixed(_backward))
        self._waits = self._launch_waits()
        seconds = [self._rank_seconds(load) for load, _ in loads]
        totals = [_both(one) for one in seconds]
        fullest = totals.index(max(totals))
        self._fullest, self._seconds = loads[fullest][0], seconds[fullest]
        self._all_ranks = ForwardBackward(
            sum(one.forward * count for one, (_, count) in zip(seconds, loads, strict=True)),
            sum(one.backward * count for one, (_, count) in zip(seconds, loads, strict=True)),
        )

    def collect(self) -> tuple[StepPart, ...]:
        parts = (*self._computation(), *self._communication(), *self._once_per_step())
        measured = self._times.measured
        return tuple(
            StepPart(name, seconds if measured is None else seconds * measured.shown(name)) for name, seconds in parts
        )

    def _rank_seconds(self, load: RankLoad) -> ForwardBackward:
        """On one micro-batch."""
        micro, blocks, block = self._micro, load.num_blocks, self._block
        ends_s = load.num_embeddings * (micro.embedding_s + micro.end_comm_s) + load.num_heads * micro.end_comm_s
        host = self._host(load)
        return ForwardBackward(
            blocks * block.forward + load.num_heads * micro.head.forward + ends_s / 2 + host.forward,
            blocks * block.backward + load.num_heads * micro.head.backward + ends_s / 2 + host.backward,
        )

    def _launch_waits(self) -> ForwardBackward:
        """How long the device waits, in one block and micro-batch, for the host to launch the next operations."""
        if self._times.cluster.device.kind == "cpu":
            return ForwardBackward(0.0, 0.0)
        software = self._software
        host = software.host_block_compiled_s if self._choice.compiled else software.host_block_s
        again = 2 if self._choice.recompute == "full" else 1
        return ForwardBackward(max(0.0, host - self._block.forward), max(0.0, again * host - self._block.backward))

    def _host(self, load: RankLoad) -> ForwardBackward:
        """What the host adds to one micro-batch: waits for launches, and a fixed time."""
        if measured := self._times.measured:
            share = load.num_blocks / self._figures.num_blocks
            once, twice = measured.overhead_s(0, share), measured.overhead_s(1, share)
            if once is not None and twice is not None:
                return ForwardBackward((twice - once) / 3, (twice - once) * 2 / 3)
        fixed_s = 0.0 if self._times.cluster.device.kind == "cpu" else self._software.micro_s
        blocks, waits = load.num_blocks, self._waits
        return ForwardBackward(blocks * waits.forward + fixed_s / 3, blocks * waits.backward + fixed_s * 2 / 3)

    def _mixed(self, of_block: Callable[[BlockCost], float]) -> float:
        """Of an average block, where some have experts."""
        dense, share = of_block(self._micro.dense), self._figures.expert_share
        return dense + share * (of_block(self._micro.expert) - dense) if share else dense

    def _total(self, of_block: Callable[[BlockCost], float]) -> float:
        """Of all blocks of the fullest rank and all micro-batches."""
        return self._num_micro * self._fullest.num_blocks * self._mixed(of_block)

    def _computation(self) -> Iterator[tuple[str, float]]:
        load, num_micro, head = self._fullest, self._num_micro, self._micro.head
        ends = num_micro * load.num_heads
        yield "compute: products", self._total(_products) + ends * _both(head.products)
        yield "compute: attention", self._total(_attention) + ends * _both(head.attention)
        yield "compute: memory-bound", self._total(_memory) + num_micro * load.num_embeddings * self._micro.embedding_s
        yield "loss", ends * _both(head.memory)
        yield "recompute", self._total(_recompute)

    def _communication(self) -> Iterator[tuple[str, float]]:
        load = self._fullest
        ends_s = self._num_micro * (load.num_embeddings + load.num_heads) * self._micro.end_comm_s
        yield "tensor communication", self._total(_tensor) + ends_s
        yield "context communication", self._total(_context)
        yield "expert communication", self._total(_expert)
        yield "pipeline bubble", self._bubble_s()
        yield "pipeline sends", self._sends_s()

    def _bubble_s(self) -> float:
        layout = self._choice.layout
        work = PipelineWork(
            self._all_ranks.forward - self._seconds.forward,
            self._all_ranks.backward - self._seconds.backward,
            layout.pipeline,
            self._choice.stages_per_rank,
        )
        return bubble_seconds(work, layout.schedule, self._num_micro)

    def _sends_s(self) -> float:
        """Each micro-batch is received and sent on, in both directions; a rank cannot compute on what has not come."""
        pipeline = self._choice.layout.pipeline
        if pipeline == 1:
            return 0.0
        each_s = stage_send_seconds(self._figures.hidden_numel, self._choice, self._groups)
        return 2 * each_s * (self._num_micro * self._choice.stages_per_rank + pipeline - 1)

    def _once_per_step(self) -> Iterator[tuple[str, float]]:
        choice, block = self._choice, self._block_params()
        num_params = max(load.num_blocks for load, _ in self._loads) * block + self._end_params()
        traffic = data_traffic(num_params, block, choice, self._groups, self._software)
        yield "data communication", self._data_s(traffic)
        own = num_params / self._groups.num_shards
        offloaded_s = own * _OFFLOAD_BYTES / _OFFLOAD_BYTES_PER_S
        yield "optimizer", offloaded_s if choice.offload else self._times.update(own, choice.optimizer)
        yield "data", 0.0
        yield "overhead", self._overhead_s()

    def _block_params(self) -> float:
        """Weights of an average block on one rank before ZeRO."""
        figures, layout = self._figures, self._choice.layout
        return (figures.block_params + figures.routed_params / layout.expert) / layout.tensor

    def _end_params(self) -> float:
        """Of the rank that has the most of them; a tied head is a second copy where another rank has the embedding."""
        figures = self._figures

        def held(load: RankLoad) -> float:
            tied = 0.0 if load.num_embeddings else figures.tied_params
            return load.num_embeddings * figures.first_params + load.num_heads * (figures.last_params + tied)

        return max(held(load) for load, _ in self._loads) / self._choice.layout.tensor

    def _data_s(self, traffic: DataTraffic) -> float:
        exposed = exposed_seconds(traffic.gradients_s, self._seconds.backward, self._overlap) + traffic.weights_s
        if not traffic.gather_s:
            return exposed
        blocks = self._fullest.num_blocks
        if self._choice.layout.pipeline > 1:  # a stage is gathered once for all of a step's micro-batches
            return exposed + blocks * (traffic.gather_s + traffic.scatter_s)
        each = exposed_seconds(traffic.gather_s, self._block.forward, self._overlap)
        each += exposed_seconds(traffic.gather_s + traffic.scatter_s, self._block.backward, self._overlap)
        return exposed + self._num_micro * blocks * each

    def _overhead_s(self) -> float:
        """Fixed costs, and waits for the host."""
        step_s = 0.0 if self._times.cluster.device.kind == "cpu" else self._software.step_s
        if self._times.measured and (found := self._times.measured.overhead_s(0, 1.0)) is not None:
            step_s = found
        return step_s + self._num_micro * _both(self._host(self._fullest))


def _both(time: ForwardBackward) -> float:
    return time.forward + time.backward


_forward: Callable[[BlockCost], float] = attrgetter("forward")
_backward: Callable[[BlockCost], float] = attrgetter("backward")


def _products(block: BlockCost) -> float:
    return _both(block.time.products)


def _attention(block: BlockCost) -> float:
    return _both(block.time.attention)


def _memory(block: BlockCost) -> float:
    return _both(block.time.memory)


def _tensor(block: BlockCost) -> float:
    return _both(block.tensor)


def _context(block: BlockCost) -> float:
    return _both(block.context)


def _expert(block: BlockCost) -> float:
    return _both(block.expert)


def _recompute(block: BlockCost) -> float:
    return block.recompute_s + block.repeated_comm_s
