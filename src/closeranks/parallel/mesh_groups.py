"""Creates the process groups for every axis of a layout, with ranks ordered as in ``facts.mesh``.

Invariants: all ranks create the same groups in the same order (creating one is a collective) and with the job's own
timeout (torch's default is half an hour, whatever the world's group has); a layout of replicas alone creates none
besides the world's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from closeranks.facts.layout import Layout
from closeranks.facts.mesh import AXES, Mesh
from closeranks.parallel.process_group import RankGroup

_ALONE = RankGroup(0, 1)


@dataclass(frozen=True, slots=True)
class ProcessGroupFactory:
    """Creates process groups, and keeps track of those that this rank is in."""

    rank: int
    timeout: timedelta
    made: list[dist.ProcessGroup] = field(default_factory=list)

    def new_groups(self, parted: Iterable[Sequence[int]]) -> dist.ProcessGroup | None:
        """Create all the given groups and return this rank's. A collective: every rank calls it, in the same order."""
        mine: dist.ProcessGroup | None = None
        for ranks in parted:
            group = dist.new_group(list(ranks), timeout=self.timeout)
            if self.rank in ranks:
                self.made.append(group)
                mine = group
        return mine

    def close(self) -> None:
        while self.made:
            dist.destroy_process_group(self.made.pop())


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """The ranks that sum gradients with this one in every step: all ranks, except with local SGD (``facts.mesh``)."""

    number: int
    count: int
    """Number of replica groups."""
    world: RankGroup
    """All ranks of this replica group."""
    data: RankGroup
    replica: RankGroup
    across_groups: RankGroup
    """This rank and those of the other replica groups that hold the same part of the model; they synchronize every so
    many steps."""


@dataclass(frozen=True, slots=True)
class MeshGroups:
    """This rank's group on every axis; an axis of size 1 is a group of one rank, without communication."""

    mesh: Mesh
    rank: int
    world: RankGroup
    data: RankGroup
    """All ranks that split the batch: the replica and shard axes together."""
    shard: RankGroup
    replica: RankGroup
    tensor: RankGroup
    pipeline: RankGroup
    device_mesh: DeviceMesh | None
    """The same grid as torch's DeviceMesh, with the axes' names; None for a layout of replicas alone."""
    factory: ProcessGroupFactory
    replica_group: ReplicaGroup

    def sharding_mesh(self, *, with_replicas: bool = True) -> DeviceMesh:
        """The mesh that FSDP2 shards over: the shard axis, preceded by the replica axis if there is one (HSDP)."""
        assert self.device_mesh is not None
        is_hybrid = with_replicas and self.replica_group.replica.size > 1
        return self.device_mesh["replica", "shard"] if is_hybrid else self.device_mesh["shard"]

    def across_hosts(self, hosts: Sequence[int]) -> tuple[RankGroup, RankGroup] | None:
        """This rank's data group in two levels: the ranks on its own host, and one rank of each host. None where the
        hosts have different numbers of its ranks, or there is one host. ``hosts``: each rank's host. A collective."""
        parted = self.mesh.groups("replica", "shard")
        levels = [_levels(ranks, hosts) for ranks in parted]
        if any(one is None for one in levels):
            return None
        inside = self.factory.new_groups([ranks for one in levels if one for ranks in one])
        across = self.factory.new_groups([ranks for one in levels if one for ranks in zip(*one, strict=True)])
        assert inside is not None, "every rank is on a host"
        assert across is not None, "and has a place there"
        return _as_group(inside), _as_group(across)

    def across_stages(self, coordinates: Sequence[int]) -> dist.ProcessGroup | None:
        """The group of the given pipeline coordinates that this rank is in; None where it is in none. One such group is
        created for every combination of the other axes' coordinates.

        A collective: every rank calls it, in the same order.
        """
        parted = ([ranks[coordinate] for coordinate in coordinates] for ranks in self.mesh.groups("pipeline"))
        return self.factory.new_groups(parted)

    def open_group(self, parted: Iterable[Sequence[int]]) -> RankGroup:
        """This rank's one of further groups, which partition the ranks. A collective."""
        return _among(self.factory, parted)

    def close(self) -> None:
        """Destroy every group except the world's."""
        self.factory.close()


def open_mesh_groups(
    world: RankGroup, layout: Layout, device: torch.device, timeout_s: float, num_replica_groups: int = 1
) -> MeshGroups:
    """``num_replica_groups``: number of replica groups (local SGD)."""
    mesh, factory = Mesh(layout, num_replica_groups), ProcessGroupFactory(world.rank, timedelta(seconds=timeout_s))
    if layout.num_ranks == layout.data and layout.zero == 0:
        replica_group = _whole_model_replica_group(factory, mesh, world)
        return MeshGroups(mesh, world.rank, world, world, _ALONE, world, _ALONE, _ALONE, None, factory, replica_group)
    own = {axis: _made(factory, mesh, axis) for axis in AXES}
    data = _data_group(factory, mesh, own["replica"], own["shard"])
    replica_group = _sharded_replica_group(factory, mesh, world, data, own)
    return MeshGroups(
        mesh=mesh,
        rank=world.rank,
        world=world,
        data=data,
        shard=own["shard"],
        replica=own["replica"],
        tensor=own["tensor"],
        pipeline=own["pipeline"],
        device_mesh=_grid(mesh, own, replica_group, device),
        factory=factory,
        replica_group=replica_group,
    )


def _levels(ranks: Sequence[int], hosts: Sequence[int]) -> list[list[int]] | None:
    """The ranks of each host; None unless there are several hosts, each with the same number of ranks, above one."""
    found: dict[int, list[int]] = {}
    for rank in ranks:
        found.setdefault(hosts[rank], []).append(rank)
    sizes = {len(own) for own in found.values()}
    return list(found.values()) if len(found) > 1 and len(sizes) == 1 and sizes != {1} else None


def _made(factory: ProcessGroupFactory, mesh: Mesh, *axes: str) -> RankGroup:
    return _among(factory, mesh.groups(*axes))


def _among(factory: ProcessGroupFactory, parted: Iterable[Sequence[int]]) -> RankGroup:
    process_group = factory.new_groups(parted)
    assert process_group is not None, "the groups of an axis partition all ranks"
    return _as_group(process_group)


def _as_group(process_group: dist.ProcessGroup) -> RankGroup:
    return RankGroup(dist.get_rank(process_group), dist.get_world_size(process_group), process_group)


def _whole_model_replica_group(factory: ProcessGroupFactory, mesh: Mesh, world: RankGroup) -> ReplicaGroup:
    """The replica group in a layout where every rank holds the whole model; one rank alone does not communicate."""
    if mesh.num_replica_groups == 1:
        return ReplicaGroup(0, 1, world, world, world, _ALONE)
    number = mesh.replica_group(mesh.coordinate(world.rank))
    is_single = mesh.replicas_per_group == 1
    own = _ALONE if is_single else _among(factory, mesh.partition(mesh.replica_group))
    across = world if is_single else _among(factory, mesh.partition(lambda at: at.replica % mesh.replicas_per_group))
    return ReplicaGroup(number, mesh.num_replica_groups, own, own, own, across)


def _sharded_replica_group(
    factory: ProcessGroupFactory, mesh: Mesh, world: RankGroup, data: RankGroup, own: Mapping[str, RankGroup]
) -> ReplicaGroup:
    if mesh.num_replica_groups == 1:
        return ReplicaGroup(0, 1, world, data, own["replica"], _ALONE)
    inner = mesh.replicas_per_group
    return ReplicaGroup(
        number=mesh.replica_group(mesh.coordinate(world.rank)),
        count=mesh.num_replica_groups,
        world=_among(factory, mesh.partition(mesh.replica_group)),
        data=_among(factory, mesh.partition(lambda at: (at.pipeline, at.tensor, mesh.replica_group(at)))),
        replica=_among(factory, mesh.partition(lambda at: (at.pipeline, at.shard, at.tensor, mesh.replica_group(at)))),
        across_groups=_among(
            factory, mesh.partition(lambda at: (at.pipeline, at.shard, at.tensor, at.replica % inner))
        ),
    )


def _grid(mesh: Mesh, own: Mapping[str, RankGroup], replica_group: ReplicaGroup, device: torch.device) -> DeviceMesh:
    """A DeviceMesh of the existing groups: groups that torch creates itself do not accept a timeout in every version.
    Its ``replica`` axis spans one replica group."""
    axes = {**own, "replica": replica_group.replica}
    groups = [group for axis in AXES if (group := axes[axis].process_group) is not None]
    ranks = torch.arange(mesh.layout.num_ranks, dtype=torch.int).view(mesh.sizes)
    if replica_group.count == 1:
        return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=AXES)
    pipeline, _, *rest = mesh.sizes
    assert replica_group.across_groups.process_group is not None
    groups.insert(1, replica_group.across_groups.process_group)
    ranks = ranks.view(pipeline, replica_group.count, mesh.replicas_per_group, *rest)
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=(AXES[0], "replica_group", *AXES[1:]))


def _data_group(factory: ProcessGroupFactory, mesh: Mesh, replica: RankGroup, shard: RankGroup) -> RankGroup:
    """Replica and shard axes together; reuses one of the two groups where the other axis has size 1."""
    if shard.size == 1 or replica.size == 1:
        return shard if replica.size == 1 else replica
    return _made(factory, mesh, "replica", "shard")
