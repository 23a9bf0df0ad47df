"""What does one micro-batch take on each rank of a pipeline, and on the fullest of them part by part?

Everything here is the same for any number of data ranks, ZeRO stage and global batch, so that a search over those
computes it once. Invariant: the seconds of a rank are those of its blocks, its ends of the model and its host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from closeranks.facts.timing.attention import ForwardBackward
from closeranks.plan.step_time.micro_cost import BlockCost, MicroCost
from closeranks.plan.step_time.model_figures import ModelFigures
from closeranks.plan.step_time.operation_times import OperationTimes
from closeranks.plan.step_time.pipeline_bubble import PipelineWork
from closeranks.plan.step_time.stage_loads import RankLoad
from closeranks.plan.step_time.workload import PlanChoice


@dataclass(frozen=True, slots=True)
class BlockParts:
    """Seconds of an average block and micro-batch, forward and backward."""

    products: float
    attention: float
    memory: float
    recompute: float
    tensor: float
    context: float
    expert: float


class RankTimes:
    """Of one choice, its data axis aside."""

    def __init__(
        self,
        figures: ModelFigures,
        choice: PlanChoice,
        micro: MicroCost,
        loads: Sequence[tuple[RankLoad, int]],
        times: OperationTimes,
    ) -> None:
        self._figures, self._choice, self._times = figures, choice, times
        self._software = times.constants.of(choice.software)
        self.micro, self.loads = micro, loads
        self.block, self.parts = self._average_block()
        self._waits = self._launch_waits()
        seconds = [self._rank_seconds(load) for load, _ in loads]
        totals = [both(one) for one in seconds]
        place = totals.index(max(totals))
        self.fullest, self.seconds = loads[place][0], seconds[place]
        """The rank that sets the pace, and its seconds."""
        forward = sum(one.forward * count for one, (_, count) in zip(seconds, loads, strict=True))
        backward = sum(one.backward * count for one, (_, count) in zip(seconds, loads, strict=True))
        self.others = PipelineWork(
            forward - self.seconds.forward,
            backward - self.seconds.backward,
            choice.layout.pipeline,
            choice.stages_per_rank,
        )
        self.host_s = both(self._host(self.fullest))
        self.block_params = (figures.block_params + figures.routed_params / choice.layout.expert) / choice.layout.tensor
        """Weights of an average block on one rank before ZeRO."""
        self.num_params = max(load.num_blocks for load, _ in loads) * self.block_params + self._end_params()

    def _rank_seconds(self, load: RankLoad) -> ForwardBackward:
        micro, blocks, block = self.micro, load.num_blocks, self.block
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
        return ForwardBackward(max(0.0, host - self.block.forward), max(0.0, again * host - self.block.backward))

    def _host(self, load: RankLoad) -> ForwardBackward:
        """What the host adds to one micro-batch: waits for launches, and a fixed time."""
        if measured := self._times.measured:
            found = measured.micro_overhead_s(load.num_blocks / self._figures.num_blocks)
            if found is not None:  # what is computed again is started again
                again = 0 if self._choice.recompute == "none" else 1
                is_selective = self._choice.recompute == "selective" and not self._choice.compiled
                each_s = measured.selective_s(load.num_blocks) if is_selective else 0.0
                return ForwardBackward(found / 3 + each_s, found * (2 + again) / 3 + each_s)
        fixed_s = 0.0 if self._times.cluster.device.kind == "cpu" else self._software.micro_s
        blocks, waits = load.num_blocks, self._waits
        return ForwardBackward(blocks * waits.forward + fixed_s / 3, blocks * waits.backward + fixed_s * 2 / 3)

    def _end_params(self) -> float:
        """Of the rank that has the most of them; a tied head is a second copy where another rank has the embedding."""
        figures = self._figures

        def held(load: RankLoad) -> float:
            tied = 0.0 if load.num_embeddings else figures.tied_params
            return load.num_embeddings * figures.first_params + load.num_heads * (figures.last_params + tied)

        return max(held(load) for load, _ in self.loads) / self._choice.layout.tensor

    def _average_block(self) -> tuple[ForwardBackward, BlockParts]:
        """Where some blocks have experts, the mean of both kinds."""
        dense, share = self.micro.dense, self._figures.expert_share
        forward, backward, parts = dense.forward, dense.backward, _parts(dense)
        if share:
            expert = self.micro.expert
            forward += share * (expert.forward - forward)
            backward += share * (expert.backward - backward)
            parts = tuple(one + share * (other - one) for one, other in zip(parts, _parts(expert), strict=True))
        return ForwardBackward(forward, backward), BlockParts(*parts)


def _parts(block: BlockCost) -> tuple[float, ...]:
    return (
        both(block.time.products),
        both(block.time.attention),
        both(block.time.memory),
        block.recompute_s + block.repeated_comm_s,
        both(block.tensor),
        both(block.context),
        both(block.expert),
    )


def both(time: ForwardBackward) -> float:
    return time.forward + time.backward
