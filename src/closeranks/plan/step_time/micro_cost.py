"""What does one micro-batch cost on one rank: per block, for the head, and for the embedding?

Choices that differ only in their data, ZeRO and pipeline axes share these costs. Invariant: each is computed once.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from closeranks.facts.cluster import Cluster
from closeranks.facts.layout import Layout
from closeranks.facts.shapes.transformer import TransformerShape
from closeranks.facts.timing.attention import ForwardBackward
from closeranks.plan.step_time import comm_time
from closeranks.plan.step_time.block_time import BlockTime, BlockTimer
from closeranks.plan.step_time.comm_time import LayoutGroups, exposed_seconds
from closeranks.plan.step_time.constants import Constants
from closeranks.plan.step_time.measured_times import measured_times
from closeranks.plan.step_time.workload import PlanChoice

_NONE = ForwardBackward(0.0, 0.0)
_ANY_LAYOUT = Layout()


@dataclass(frozen=True, slots=True)
class BlockCost:
    """One block and micro-batch on one rank, with what it communicates inside itself."""

    time: BlockTime
    tensor: ForwardBackward
    context: ForwardBackward
    expert: ForwardBackward
    recompute_s: float
    repeated_comm_s: float
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
    """Computes the costs of one shape on one cluster."""

    def __init__(self, shape: TransformerShape, seq_len: int, cluster: Cluster, constants: Constants) -> None:
        self._shape, self._cluster, self._constants = shape, cluster, constants
        self._timer = BlockTimer(shape, seq_len, cluster.device, constants, measured_times(cluster))
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
        tokens = self._timer.tokens(choice).num_tokens
        dense = self._block(choice, groups, is_expert=False)
        expert = self._block(choice, groups, is_expert=True) if self._shape.num_experts else dense
        # Two of the four transfers of a block's forward, and the same again in backward.
        end_s = comm_time.tensor_seconds(self._shape, tokens, choice, groups).forward
        return MicroCost(dense, expert, self._timer.head(choice), self._timer.embedding_s(choice), end_s)

    def _exposed_tensor(self, choice: PlanChoice, groups: LayoutGroups, tokens: int) -> ForwardBackward:
        whole = comm_time.tensor_seconds(self._shape, tokens, choice, groups)
        exposed = 1 - self._constants.of(choice.software).overlaps_tensor if choice.overlap else 1.0
        return ForwardBackward(exposed * whole.forward, exposed * whole.backward)

    def _block(self, choice: PlanChoice, groups: LayoutGroups, *, is_expert: bool) -> BlockCost:
        time, tokens = self._timer.block(choice, is_expert=is_expert), self._timer.tokens(choice).num_tokens
        tensor = self._exposed_tensor(choice, groups, tokens)
        ring = comm_time.context_seconds(self._shape, tokens, choice, self._cluster)
        overlap = self._constants.overlap if choice.overlap else replace(self._constants.overlap, hidden=0.0)
        context = ForwardBackward(
            exposed_seconds(ring.forward, time.attention.forward, overlap),
            exposed_seconds(ring.backward, time.attention.backward, overlap),
        )
        expert = comm_time.expert_seconds(self._shape, tokens, choice, groups) if is_expert else _NONE
        # A second forward stops before the last sum, which nothing in backward reads.
        again_s = tensor.forward * 0.75 + context.forward + expert.forward if choice.recompute == "full" else 0.0
        recompute_s = time.recompute_s(choice.recompute, fused_attention=choice.fused_attention)
        return BlockCost(time, tensor, context, expert, recompute_s, again_s)
