"""What does one micro-batch cost on one rank: per block, for the head, and for the embedding?

Choices that differ only in their data, ZeRO and pipeline axes share these costs. Invariant: each is computed once.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from closeranks.facts.shapes.transformer import TransformerShape
from closeranks.facts.timing.attention import ForwardBackward
from closeranks.plan.step_time import comm_time
from closeranks.plan.step_time.block_time import BlockTime, BlockTimer, TransformerTimer
from closeranks.plan.step_time.comm_time import LayoutGroups, exposed_seconds
from closeranks.plan.step_time.operation_times import OperationTimes
from closeranks.plan.step_time.traced_time import TracedTimer
from closeranks.plan.step_time.workload import PlanChoice, Workload

_NONE = ForwardBackward(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class BlockCost:
    """One block and micro-batch on one rank, with what it communicates inside itself."""

    time: BlockTime
    tensor: ForwardBackward = _NONE
    context: ForwardBackward = _NONE
    expert: ForwardBackward = _NONE
    recompute_s: float = 0.0
    repeated_comm_s: float = 0.0
    """Communication of what is computed again."""

    @property
    def forward(self) -> float:
        return self.time.forward + self.tensor.forward + self.context.forward + self.expert.forward

    @property
    def backward(self) -> float:
        comm = self.tensor.backward + self.context.backward + self.expert.backward
        return self.time.backward + self.recompute_s + self.repeated_comm_s + comm


@dataclass(frozen=True, slots=True)
class MicroCost:
    """One micro-batch on one rank."""

    dense: BlockCost
    expert: BlockCost
    """The same as ``dense`` for a model without experts."""
    head: BlockTime
    embedding_s: float
    end_comm_s: float
    """Communication of the embedding, and of the head, on the tensor axis."""


class MicroCosts:
    """Computes the costs of one workload on one cluster."""

    def __init__(self, workload: Workload, times: OperationTimes) -> None:
        self._times = times
        self._shape = workload.shape if isinstance(workload.shape, TransformerShape) else None
        self._timer = _timer(workload, times)
        self._known: dict[Hashable, MicroCost] = {}

    def of(self, choice: PlanChoice, groups: LayoutGroups) -> MicroCost:
        layout = choice.layout
        shared = (choice.micro_batch, choice.recompute, choice.precision, choice.compiled, choice.software)
        how = (choice.fused_attention, choice.sequence_parallel, choice.overlap)
        key = (layout.tensor, layout.context, layout.expert, shared, how)
        if key not in self._known:
            self._known[key] = self._compute(choice, groups)
        return self._known[key]

    def _compute(self, choice: PlanChoice, groups: LayoutGroups) -> MicroCost:
        dense = self._block(choice, groups, is_expert=False)
        has_experts = self._shape is not None and self._shape.num_experts
        expert = self._block(choice, groups, is_expert=True) if has_experts else dense
        end_s = 0.0
        if self._shape is not None:  # two of the four transfers of a block's forward, and the same again in backward
            end_s = comm_time.tensor_seconds(self._shape, self._timer.tokens(choice), choice, groups).forward
        return MicroCost(dense, expert, self._timer.head(choice), self._timer.embedding_s(choice), end_s)

    def _block(self, choice: PlanChoice, groups: LayoutGroups, *, is_expert: bool) -> BlockCost:
        time = self._timer.block(choice, is_expert=is_expert)
        recompute_s = time.recompute_s(choice.recompute, fused_attention=choice.fused_attention)
        if self._shape is None:
            return BlockCost(time, recompute_s=recompute_s)
        tokens = self._timer.tokens(choice)
        whole = comm_time.tensor_seconds(self._shape, tokens, choice, groups)
        shown = 1 - self._times.constants.of(choice.software).overlaps_tensor if choice.overlap else 1.0
        tensor = ForwardBackward(shown * whole.forward, shown * whole.backward)
        context = self._context(choice, groups, time)
        expert = comm_time.expert_seconds(self._shape, tokens, choice, groups) if is_expert else _NONE
        # A second forward stops before the last sum, which nothing in backward reads.
        again_s = tensor.forward * 0.75 + context.forward + expert.forward if choice.recompute == "full" else 0.0
        return BlockCost(time, tensor, context, expert, recompute_s, again_s)

    def _context(self, choice: PlanChoice, groups: LayoutGroups, time: BlockTime) -> ForwardBackward:
        """The ring passes keys and values on while attention works on those it has."""
        if choice.layout.context == 1 or self._shape is None:
            return _NONE
        ring = comm_time.context_seconds(self._shape, self._timer.tokens(choice), choice, groups)
        overlap = self._times.constants.overlap
        overlap = overlap if choice.overlap else replace(overlap, hidden=0.0)
        return ForwardBackward(
            exposed_seconds(ring.forward, time.attention.forward, overlap),
            exposed_seconds(ring.backward, time.attention.backward, overlap),
        )


def _timer(workload: Workload, times: OperationTimes) -> BlockTimer:
    if isinstance(workload.shape, TransformerShape):
        return TransformerTimer(workload.shape, workload.seq_len, times)
    return TracedTimer(workload.shape, workload.seq_len, times)
