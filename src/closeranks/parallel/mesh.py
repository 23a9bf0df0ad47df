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
from closeranks.parallel.group import Group

_ALONE = Group(0, 1)


@dataclass(frozen=True, slots=True)
class Maker:
    """Creates process groups, and keeps track of those that this rank is in."""

    rank: int
    timeout: timedelta
    made: list[dist.ProcessGroup] = field(default_factory=list)

    def make(self, parted: Iterable[Sequence[int]]) -> dist.ProcessGroup | None:
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
class Home:
    """The ranks that sum gradients with this one in every step: all ranks, except with local SGD (``facts.mesh``)."""

    number: int
    count: int
    """Number of replica groups."""
    world: Group
    """All ranks of this replica group."""
    data: Group
    replica: Group
    across: Group
    """This rank and those of the other replica groups that hold the same part of the model; they synchronize every so
    many steps."""


@dataclass(frozen=True, slots=True)
class Groups:
    """This rank's group on every axis; an axis of size 1 is a group of one rank, without communication."""

    mesh: Mesh
    rank: int
    world: Group
    data: Group
    """All ranks that split the batch: the replica and shard axes together."""
    shard: Group
    replica: Group
    tensor: Group
    pipeline: Group
    device_mesh: DeviceMesh | None
    """The same grid as torch's DeviceMesh, with the axes' names; None for a layout of replicas alone."""
    maker: Maker
    home: Home

    def sharding_mesh(self, *, with_replicas: bool = True) -> DeviceMesh:
        """The mesh that FSDP2 shards over: the shard axis, preceded by the replica axis if there is one (HSDP)."""
        assert self.device_mesh is not None
        is_hybrid = with_replicas and self.home.replica.size > 1
        return self.device_mesh["replica", "shard"] if is_hybrid else self.device_mesh["shard"]

    def across_hosts(self, hosts: Sequence[int]) -> tuple[Group, Group] | None:
        """This rank's data group in two levels: the ranks on its own host, and one rank of each host. None where the
        hosts have different numbers of its ranks, or there is one host. ``hosts``: each rank's host. A collective."""
        parted = self.mesh.groups("replica", "shard")
        levels = [_levels(ranks, hosts) for ranks in parted]
        if any(one is None for one in levels):
            return None
        inside = self.maker.make([ranks for one in levels if one for ranks in one])
        across = self.maker.make([ranks for one in levels if one for ranks in zip(*one, strict=True)])
        assert inside is not None, "every rank is on a host"
        assert across is not None, "and has a place there"
        return _as_group(inside), _as_group(across)

    def across_stages(self, coordinates: Sequence[int]) -> dist.ProcessGroup | None:
        """The group of the given pipeline coordinates that this rank is in; None where it is in none. One such group is
        created for every combination of the other axes' coordinates.

        A collective: every rank calls it, in the same order.
        """
        parted = ([ranks[coordinate] for coordinate in coordinates] for ranks in self.mesh.groups("pipeline"))
        return self.maker.make(parted)

    def close(self) -> None:
        """Destroy every group except the world's."""
        self.maker.close()


def open_groups(world: Group, layout: Layout, device: torch.device, timeout_s: float, num_homes: int = 1) -> Groups:
    """``num_homes``: number of replica groups (local SGD)."""
    mesh, maker = Mesh(layout, num_homes), Maker(world.rank, timedelta(seconds=timeout_s))
    if layout.num_ranks == layout.data and layout.zero == 0:
        home = _home_of_replicas(maker, mesh, world)
        return Groups(mesh, world.rank, world, world, _ALONE, world, _ALONE, _ALONE, None, maker, home)
    own = {axis: _made(maker, mesh, axis) for axis in AXES}
    data = _data_group(maker, mesh, own["replica"], own["shard"])
    home = _home(maker, mesh, world, data, own)
    return Groups(
        mesh=mesh,
        rank=world.rank,
        world=world,
        data=data,
        shard=own["shard"],
        replica=own["replica"],
        tensor=own["tensor"],
        pipeline=own["pipeline"],
        device_mesh=_grid(mesh, own, home, device),
        maker=maker,
        home=home,
    )


def _levels(ranks: Sequence[int], hosts: Sequence[int]) -> list[list[int]] | None:
    """The ranks of each host; None unless there are several hosts, each with the same number of ranks, above one."""
    found: dict[int, list[int]] = {}
    for rank in ranks:
        found.setdefault(hosts[rank], []).append(rank)
    sizes = {len(own) for own in found.values()}
    return list(found.values()) if len(found) > 1 and len(sizes) == 1 and sizes != {1} else None


def _made(maker: Maker, mesh: Mesh, *axes: str) -> Group:
    return _among(maker, mesh.groups(*axes))


def _among(maker: Maker, parted: Iterable[Sequence[int]]) -> Group:
    process_group = maker.make(parted)
    assert process_group is not None, "the groups of an axis part all ranks"
    return _as_group(process_group)


def _as_group(process_group: dist.ProcessGroup) -> Group:
    return Group(dist.get_rank(process_group), dist.get_world_size(process_group), process_group)


def _home_of_replicas(maker: Maker, mesh: Mesh, world: Group) -> Home:
    """The replica group in a layout where every rank holds the whole model; one rank alone does not communicate."""
    if mesh.num_replica_groups == 1:
        return Home(0, 1, world, world, world, _ALONE)
    number = mesh.replica_group(mesh.coordinate(world.rank))
    is_single = mesh.replicas_per_group == 1
    own = _ALONE if is_single else _among(maker, mesh.partition(mesh.replica_group))
    across = (
        world if is_single else _among(maker, mesh.partition(lambda place: place.replica % mesh.replicas_per_group))
    )
    return Home(number, mesh.num_replica_groups, own, own, own, across)


def _home(maker: Maker, mesh: Mesh, world: Group, data: Group, own: Mapping[str, Group]) -> Home:
    if mesh.num_replica_groups == 1:
        return Home(0, 1, world, data, own["replica"], _ALONE)
    inner = mesh.replicas_per_group
    return Home(
        number=mesh.replica_group(mesh.coordinate(world.rank)),
        count=mesh.num_replica_groups,
        world=_among(maker, mesh.partition(mesh.replica_group)),
        data=_among(maker, mesh.partition(lambda at: (at.pipeline, at.tensor, mesh.replica_group(at)))),
        replica=_among(maker, mesh.partition(lambda at: (at.pipeline, at.shard, at.tensor, mesh.replica_group(at)))),
        across=_among(maker, mesh.partition(lambda at: (at.pipeline, at.shard, at.tensor, at.replica % inner))),
    )


def _grid(mesh: Mesh, own: Mapping[str, Group], home: Home, device: torch.device) -> DeviceMesh:
    """A DeviceMesh of the existing groups: groups that torch creates itself do not accept a timeout in every version.
    Its ``replica`` axis spans one replica group."""
    axes = {**own, "replica": home.replica}
    groups = [group for axis in AXES if (group := axes[axis].process_group) is not None]
    ranks = torch.arange(mesh.layout.num_ranks, dtype=torch.int).view(mesh.sizes)
    if home.count == 1:
        return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=AXES)
    pipeline, _, *rest = mesh.sizes
    assert home.across.process_group is not None
    groups.insert(1, home.across.process_group)
    ranks = ranks.view(pipeline, home.count, mesh.replicas_per_group, *rest)
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=(AXES[0], "home", *AXES[1:]))


def _data_group(maker: Maker, mesh: Mesh, replica: Group, shard: Group) -> Group:
    """Replica and shard axes together; reuses one of the two groups where the other axis has size 1."""
    if shard.size == 1 or replica.size == 1:
        return shard if replica.size == 1 else replica
    return _made(maker, mesh, "replica", "shard")
