"""Where does the time of a step go? Puts the costs of micro-batches, schedule, data axis and optimizer together.

The fullest pipeline rank sets the pace; the others wait for it in the bubble. Invariant: parts are not negative, and
their sum is the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from closeranks.facts.cluster import Cluster
from closeranks.facts.shapes.transformer import TransformerShape, block_params
from closeranks.facts.timing.attention import ForwardBackward
from closeranks.plan.step_time.comm_time import (
    DataTraffic,
    LayoutGroups,
    data_traffic,
    exposed_seconds,
    stage_send_seconds,
)
from closeranks.plan.step_time.constants import Constants
from closeranks.plan.step_time.measured_times import measured_times
from closeranks.plan.step_time.micro_cost import BlockCost, MicroCost
from closeranks.plan.step_time.stage_loads import RankLoad
from closeranks.plan.step_time.workload import PlanChoice, Workload

_OPTIMIZER_BYTES = {"adamw": 34.0, "lamb": 46.0, "sgd": 20.0, "lars": 32.0}
"""Moved per parameter: weight, gradient and moments read, weight and moments written, the norm of all gradients, a copy
in 16 bits."""
_OFFLOAD_BYTES_PER_S = 20e9
_OFFLOAD_BYTES = 8.0
"""Per parameter over the link to host memory: its gradient down, its weight up."""
_ZERO_BUBBLE = frozenset({"interleaved-zero-bubble", "zbv", "dualpipev"})


@dataclass(frozen=True, slots=True)
class StepPart:
    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class _PaceSeconds:
    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


class StepParts:
    """The parts of one choice."""

    def __init__(
        self,
        workload: Workload,
        choice: PlanChoice,
        cluster: Cluster,
        micro: MicroCost,
        loads: Sequence[RankLoad],
        groups: LayoutGroups,
        constants: Constants,
    ) -> None:
        self._workload, self._choice, self._cluster = workload, choice, cluster
        self._micro, self._groups, self._loads = micro, groups, loads
        self._software = constants.of(choice.software)
        can_overlap = choice.overlap and self._software.overlaps_data
        self._measured = measured_times(cluster)
        # Workers of a CPU exchange gradients with the cores that they compute with.
        can_overlap = can_overlap and (self._measured is None or cluster.device.kind != "cpu")
        self._overlap = constants.overlap if can_overlap else replace(constants.overlap, hidden=0.0)
        self._memory_bytes_per_s = cluster.device.memory_bytes_per_s * constants.memory.reachable
        self._num_micro = choice.num_micro(workload.global_batch)
        shape = workload.shape
        self._expert_share = shape.num_expert_layers / shape.num_layers
        seconds = {load: self._rank_seconds(load) for load in set(loads)}
        self._fullest = max(seconds, key=lambda load: seconds[load].total)
        self._seconds = seconds[self._fullest]
        self._all_ranks_s = sum(seconds[load].total for load in loads)

    def collect(self) -> tuple[StepPart, ...]:
        parts = [*self._computation(), *self._communication(), *self._once_per_step()]
        return tuple(StepPart(name, seconds) for name, seconds in parts)

    def _rank_seconds(self, load: RankLoad) -> _PaceSeconds:
        micro, blocks = self._micro, load.num_blocks
        ends_s = load.num_embeddings * (micro.embedding_s + micro.end_comm_s) + load.num_heads * micro.end_comm_s
        forward = blocks * self._mixed(_forward) + load.num_heads * micro.head.forward + ends_s / 2
        return _PaceSeconds(
            forward, blocks * self._mixed(_backward) + load.num_heads * micro.head.backward + ends_s / 2
        )

    def _mixed(self, of_block: Callable[[BlockCost], float]) -> float:
        """Of an average block, where some have experts."""
        dense = of_block(self._micro.dense)
        return dense + self._expert_share * (of_block(self._micro.expert) - dense) if self._expert_share else dense

    def _blocks(self, share: float) -> tuple[tuple[BlockCost, float], ...]:
        return (self._micro.dense, share * (1 - self._expert_share)), (self._micro.expert, share * self._expert_share)

    def _computation(self) -> Iterator[tuple[str, float]]:
        load, micro, head = self._fullest, self._num_micro, self._micro.head
        blocks = self._blocks(micro * load.num_blocks)
        products = sum(count * _both(block.time.products) for block, count in blocks)
        yield "compute: products", products + micro * load.num_heads * _both(head.products)
        yield "compute: attention", sum(count * _both(block.time.attention) for block, count in blocks)
        moved = sum(count * _both(block.time.memory) for block, count in blocks)
        yield "compute: memory-bound", moved + micro * load.num_embeddings * self._micro.embedding_s
        yield "loss", micro * load.num_heads * _both(head.memory)
        yield "recompute", sum(count * (block.recompute_s + block.repeated_comm_s) for block, count in blocks)

    def _communication(self) -> Iterator[tuple[str, float]]:
        load, micro = self._fullest, self._num_micro
        blocks = self._blocks(micro * load.num_blocks)
        ends_s = micro * (load.num_embeddings + load.num_heads) * self._micro.end_comm_s
        yield "tensor communication", sum(count * _both(block.tensor) for block, count in blocks) + ends_s
        yield "context communication", sum(count * _both(block.context) for block, count in blocks)
        yield "expert communication", sum(count * _both(block.expert) for block, count in blocks)
        yield "pipeline bubble", self._bubble_s()
        yield "pipeline sends", self._sends_s()

    def _bubble_s(self) -> float:
        """The time in which the other ranks work on the first and the last micro-batch, in a closed form for each kind
        of schedule, which the tests compare with the schedules' timelines."""
        layout = self._choice.layout
        if layout.pipeline == 1:
            return 0.0
        others_s = self._all_ranks_s - self._seconds.total
        per_rank = self._choice.stages_per_rank
        if layout.schedule in _ZERO_BUBBLE:
            # Weight gradients fill the waits: what is left is one stage's forward for each rank above.
            return others_s * self._seconds.forward / self._seconds.total / per_rank
        return others_s / per_rank

    def _sends_s(self) -> float:
        """Each micro-batch is received and sent on, in both directions; a rank cannot compute on what has not come."""
        layout = self._choice.layout
        if layout.pipeline == 1:
            return 0.0
        context = -(-self._workload.seq_len // layout.context)
        tokens = self._choice.micro_batch * context
        each_s = stage_send_seconds(self._workload.shape, tokens, self._choice, self._groups)
        return 2 * each_s * (self._num_micro * self._choice.stages_per_rank + layout.pipeline - 1)

    def _once_per_step(self) -> Iterator[tuple[str, float]]:
        shape, layout = self._workload.shape, self._choice.layout
        block = _block_params(shape, self._choice, self._expert_share)
        ends = (
            shape.head_params
            / layout.tensor
            * max(
                load.num_embeddings + load.num_heads * (not shape.tied or load.num_embeddings == 0)
                for load in self._loads
            )
        )
        num_params = max(load.num_blocks for load in self._loads) * block + ends
        traffic = data_traffic(num_params, block, self._groups, self._software)
        yield "data communication", self._data_s(traffic)
        yield "optimizer", self._optimizer_s(num_params / self._groups.num_shards)
        yield "data", 0.0
        yield "overhead", self._overhead_s()

    def _data_s(self, traffic: DataTraffic) -> float:
        last_s = self._seconds.backward
        exposed = exposed_seconds(traffic.gradients_s, last_s, self._overlap) + traffic.weights_s
        if not traffic.gather_s:
            return exposed
        blocks = self._fullest.num_blocks
        if self._choice.layout.pipeline > 1:  # a stage is gathered once for all of a step's micro-batches
            return exposed + blocks * (traffic.gather_s + traffic.scatter_s)
        forward, backward = self._mixed(_forward), self._mixed(_backward)
        each = exposed_seconds(traffic.gather_s, forward, self._overlap)
        each += exposed_seconds(traffic.gather_s + traffic.scatter_s, backward, self._overlap)
        return exposed + self._num_micro * blocks * each

    def _optimizer_s(self, num_params: float) -> float:
        measured = None if self._choice.offload else self._measured
        if measured and (found := measured.optimizer_s(num_params)) is not None:
            return found
        moved_s = num_params * _OPTIMIZER_BYTES.get(self._choice.optimizer, 34.0) / self._memory_bytes_per_s
        return num_params * _OFFLOAD_BYTES / _OFFLOAD_BYTES_PER_S if self._choice.offload else moved_s

    def _overhead_s(self) -> float:
        """Fixed costs, and the time in which the device waits for the host to launch the next operations."""
        software, blocks = self._software, self._fullest.num_blocks
        share = blocks / self._workload.shape.num_layers
        if self._measured and (found := self._measured.overhead_s(self._num_micro, share)) is not None:
            return found
        host = software.host_block_compiled_s if self._choice.compiled else software.host_block_s
        launches = host * (3 if self._choice.recompute == "full" else 2)
        device = self._mixed(_forward) + self._mixed(_backward)
        waits = blocks * max(0.0, launches - device)
        return software.step_s + self._num_micro * (software.micro_s + waits)


_forward: Callable[[BlockCost], float] = attrgetter("forward")
_backward: Callable[[BlockCost], float] = attrgetter("backward")


def _both(time: ForwardBackward) -> float:
    return time.forward + time.backward


def _block_params(shape: TransformerShape, choice: PlanChoice, expert_share: float) -> float:
    """Weights of an average block on one rank before ZeRO."""
    dense, layout = block_params(shape), choice.layout
    if not expert_share:
        return dense / layout.tensor
    routed = shape.num_experts * shape.expert_params
    rest = block_params(shape, is_expert=True) - routed
    return ((1 - expert_share) * dense + expert_share * (rest + routed / layout.expert)) / layout.tensor
