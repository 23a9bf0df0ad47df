"""How long does each axis communicate in a step, and how much of that cannot hide behind computation?

Invariant: exposed time is never more than the communication itself plus the slowdown it causes, and a rank without
partners on an axis spends none on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from closeranks.facts.cluster import Cluster
from closeranks.facts.communication.group_time import (
    GroupLinks,
    all_reduce_seconds,
    all_to_all_seconds,
    axis_group,
    gather_seconds,
    group_links,
    over_one_card,
    scatter_seconds,
    send_seconds,
)
from closeranks.facts.layout import Layout
from closeranks.facts.shapes.transformer import TransformerShape
from closeranks.facts.timing.attention import ForwardBackward
from closeranks.plan.step_time.constants import OverlapModel, Software
from closeranks.plan.step_time.workload import PlanChoice

_NONE = ForwardBackward(0.0, 0.0)


@dataclass(frozen=True)
class LayoutGroups:
    """The groups of one layout on a cluster."""

    layout: Layout
    cluster: Cluster

    @cached_property
    def tensor(self) -> GroupLinks:
        return self._links(self.layout.tensor, 1)

    @cached_property
    def expert(self) -> GroupLinks:
        return self._links(self.layout.expert, self.layout.tensor * self.layout.context)

    @property
    def num_shards(self) -> int:
        """Ranks over which ZeRO shards: the context axis holds replicas of the weights too."""
        return (self.layout.shard or self.layout.data) * self.layout.context if self.layout.zero else 1

    @cached_property
    def shard(self) -> GroupLinks:
        return self._links(self.num_shards, self.layout.tensor)

    @cached_property
    def replica(self) -> GroupLinks:
        replicas = self.layout.data * self.layout.context // self.num_shards
        return self._links(replicas, self.layout.tensor * self.num_shards)

    @property
    def next_stage(self) -> int:
        return self.layout.tensor * self.layout.context * self.layout.data

    def _links(self, num_ranks: int, stride: int) -> GroupLinks:
        return group_links(axis_group(num_ranks, stride, self.cluster), self.cluster)


def exposed_seconds(comm_s: float, compute_s: float, overlap: OverlapModel) -> float:
    """What communication beside this much computation adds to its time."""
    hidden = min(comm_s, overlap.hidden * compute_s)
    return comm_s - hidden + overlap.slowdown * hidden


def tensor_seconds(shape: TransformerShape, tokens: int, choice: PlanChoice, groups: LayoutGroups) -> ForwardBackward:
    """Of one block and micro-batch: inputs of attention and feed-forward are gathered and their outputs summed, or,
    without sequence parallelism, all-reduced; in backward the same with the roles exchanged."""
    if choice.layout.tensor == 1:
        return _NONE
    num_bytes = float(tokens) * shape.dim * _width(choice)
    if choice.sequence_parallel:
        each = gather_seconds(num_bytes, groups.tensor) + scatter_seconds(num_bytes, groups.tensor)
    else:
        each = all_reduce_seconds(num_bytes, groups.tensor)
    return ForwardBackward(2 * each, 2 * each)


def context_seconds(shape: TransformerShape, tokens: int, choice: PlanChoice, groups: LayoutGroups) -> ForwardBackward:
    """Of one block and micro-batch: keys and values pass around the ring, in backward with their gradients."""
    layout, domain = choice.layout, groups.cluster.domain_size
    if layout.context == 1:
        return _NONE
    part = 2.0 * tokens * shape.kv_dim / layout.tensor * _width(choice)
    stride = layout.tensor if layout.tensor * layout.context <= domain else domain
    each = (layout.context - 1) * send_seconds(part, stride, groups.cluster)
    return ForwardBackward(each, 2 * each)


def expert_seconds(shape: TransformerShape, tokens: int, choice: PlanChoice, groups: LayoutGroups) -> ForwardBackward:
    """Of one block and micro-batch: tokens go to their experts and back."""
    if choice.layout.expert == 1:
        return _NONE
    sent = 2.0 * shape.experts_per_token * tokens / choice.layout.tensor * shape.dim
    each = 2 * all_to_all_seconds(sent, groups.expert, shape.experts_per_token)
    return ForwardBackward(each, each)


def stage_send_seconds(hidden_numel: float, choice: PlanChoice, groups: LayoutGroups) -> float:
    """Of one boundary and micro-batch, one way; tensor and context ranks send a part each."""
    num_bytes = choice.micro_batch * hidden_numel * _width(choice) / choice.layout.tensor / choice.layout.context
    return send_seconds(num_bytes, groups.next_stage, groups.cluster)


def _width(choice: PlanChoice) -> int:
    return 4 if choice.precision == "fp32" else 2


@dataclass(frozen=True, slots=True)
class DataTraffic:
    """Seconds of the data axis in one step of one rank."""

    gradients_s: float
    """Once per step, after the last backward."""
    weights_s: float = 0.0
    """Once per step, after the optimizer."""
    gather_s: float = 0.0
    """Of one block and micro-batch under ZeRO-3, in each direction."""
    scatter_s: float = 0.0
    shares_s: float = 0.0
    """Of one micro-batch under ZeRO-2, which keeps no gradients but its own from one to the next."""


def data_traffic(
    num_params: float, block_params: float, choice: PlanChoice, groups: LayoutGroups, software: Software
) -> DataTraffic:
    layout, least = groups.layout, 4 if choice.precision == "fp32" else 2
    if layout.data * layout.context == 1:
        return DataTraffic(0.0)
    whole = float(max(software.gradient_bytes, least))
    compressed = software.compressed_bytes or whole
    if layout.zero == 0:
        return DataTraffic(all_reduce_seconds(num_params * compressed, groups.replica))
    replicas = all_reduce_seconds(num_params * compressed / groups.num_shards, groups.replica)
    scattered = whole if layout.shard else compressed
    if layout.zero < 3:
        weights = gather_seconds(num_params * max(software.weight_bytes, least), groups.shard)
        shares = scatter_seconds(num_params * scattered, groups.shard)
        if layout.zero == 2 and layout.pipeline == 1:
            return DataTraffic(replicas, weights, shares_s=shares)
        return DataTraffic(shares + replicas, weights)
    links = over_one_card(groups.shard) if software.gathers_over_one_card else groups.shard
    return DataTraffic(
        replicas,
        0.0,
        gather_seconds(block_params * max(software.gathered_bytes, least), links),
        scatter_seconds(block_params * scattered, links),
    )
