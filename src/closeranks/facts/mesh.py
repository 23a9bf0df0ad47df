"""The mesh of a layout: each rank's coordinate, and the groups of ranks along each axis.

Ranks are numbered with the tensor axis fastest (its collectives are the most frequent, so they stay within a host),
then the shard axis, then the replica axis, then the pipeline axis slowest. Invariant: ``coordinate`` and ``rank_of``
are inverse, and the groups of each axis partition all ranks.

With local SGD (``sync.local``) the replica axis is divided into ``num_replica_groups`` intervals of equal length. A
replica group consists of all ranks of one interval, with every coordinate on the other axes: it holds the whole model
and its state, once or more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from closeranks.facts.layout import Layout, divisors

AXES = ("pipeline", "replica", "shard", "tensor")
"""Slowest first. The ``data`` axis is replica and shard together."""


@dataclass(frozen=True, slots=True)
class MeshCoordinate:
    """A rank's coordinate on every axis."""

    pipeline: int
    replica: int
    shard: int
    tensor: int


@dataclass(frozen=True, slots=True)
class Mesh:
    """The ranks of a layout as a grid."""

    layout: Layout
    num_replica_groups: int = 1
    """Number of replica groups (local SGD); must divide the replica axis."""

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """In the order of ``AXES``; without ZeRO all data ranks are replicas."""
        layout = self.layout
        shard = (layout.shard or layout.data) if layout.zero else 1
        return layout.pipeline, layout.data // shard, shard, layout.tensor

    def coordinate(self, rank: int) -> MeshCoordinate:
        _, replicas, shards, tensors = self.sizes
        rest, tensor = divmod(rank, tensors)
        rest, shard = divmod(rest, shards)
        pipeline, replica = divmod(rest, replicas)
        return MeshCoordinate(pipeline, replica, shard, tensor)

    def rank_of(self, coordinate: MeshCoordinate) -> int:
        _, replicas, shards, tensors = self.sizes
        return (
            (coordinate.pipeline * replicas + coordinate.replica) * shards + coordinate.shard
        ) * tensors + coordinate.tensor

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """All groups of ranks that differ on ``axes`` alone, in order of their first rank."""
        return self.partition(lambda coordinate: tuple(getattr(coordinate, axis) for axis in AXES if axis not in axes))

    def partition(self, key: Callable[[MeshCoordinate], Hashable]) -> tuple[tuple[int, ...], ...]:
        """All ranks, grouped by key, in order of their first rank."""
        found: dict[Hashable, list[int]] = {}
        for rank in range(self.layout.num_ranks):
            found.setdefault(key(self.coordinate(rank)), []).append(rank)
        return tuple(tuple(ranks) for ranks in found.values())

    @property
    def replicas_per_group(self) -> int:
        """Replicas in one replica group, which sum gradients in every step."""
        return self.sizes[1] // self.num_replica_groups

    def replica_group(self, coordinate: MeshCoordinate) -> int:
        """The index of the replica group that a rank belongs to."""
        return coordinate.replica // self.replicas_per_group

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that ``rank`` shares ``axes`` with, itself included."""
        return next(group for group in self.groups(*axes) if rank in group)


def tensor_axis_warning(layout: Layout, hosts: Sequence[int]) -> str:
    """A warning where a tensor group spans several hosts, else empty. ``hosts``: each rank's host."""
    groups = (hosts[first : first + layout.tensor] for first in range(0, len(hosts), layout.tensor))
    if all(len(set(group)) == 1 for group in groups):
        return ""
    counts = Counter(hosts).values()
    inside = max(size for size in divisors(layout.tensor) if all(count % size == 0 for count in counts))
    return (
        f"the tensor axis crosses hosts: {layout.tensor} ranks exchange activations in every layer, and are not all on "
        f"one host. Use layout.tensor = {inside} on hosts of {min(counts)} worker{'s' * (min(counts) != 1)}, and "
        "pipeline or zero for the rest."
    )
