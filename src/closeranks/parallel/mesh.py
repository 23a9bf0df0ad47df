"""With whom does this worker meet, axis by axis?

Process groups for every axis of a layout, in the order that ``facts.mesh`` counts ranks. Invariants: all ranks make the
same groups in the same order (making one is a collective) and with the job's own timeout (torch would give them half an
hour whatever the world's is); a layout of replicas alone makes none besides the world's.
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
    """Makes process groups, and remembers those that this rank is in."""

    rank: int
    timeout: timedelta
    made: list[dist.ProcessGroup] = field(default_factory=list)

    def make(self, parted: Iterable[Sequence[int]]) -> dist.ProcessGroup | None:
        """All the given groups, and this rank's among them. A collective: every rank calls it, in the same order."""
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
class Groups:
    """This rank's group on every axis; an axis of one rank is a group of one that communicates with nobody."""

    mesh: Mesh
    rank: int
    world: Group
    data: Group
    """All that share the batch: replicas and shards."""
    shard: Group
    replica: Group
    tensor: Group
    pipeline: Group
    device_mesh: DeviceMesh | None
    """The same grid for torch's own parts, with the axes' names; None for a layout of replicas alone."""
    maker: Maker

    def sharding_mesh(self) -> DeviceMesh:
        """What FSDP2 shards over: the shard axis, with the replica axis in front where there are replicas (HSDP)."""
        assert self.device_mesh is not None
        return self.device_mesh["replica", "shard"] if self.replica.size > 1 else self.device_mesh["shard"]

    def across_stages(self, coordinates: Sequence[int]) -> dist.ProcessGroup | None:
        """A group of the given pipeline coordinates for every other coordinate; None where this rank has no part.

        A collective: every rank calls it, in the same order.
        """
        parted = ([ranks[coordinate] for coordinate in coordinates] for ranks in self.mesh.groups("pipeline"))
        return self.maker.make(parted)

    def close(self) -> None:
        """Give back every group but the world's."""
        self.maker.close()


def open_groups(world: Group, layout: Layout, device: torch.device, timeout_s: float) -> Groups:
    mesh, maker = Mesh(layout), Maker(world.rank, timedelta(seconds=timeout_s))
    if layout.num_ranks == layout.data and layout.zero == 0:
        return Groups(mesh, world.rank, world, world, _ALONE, world, _ALONE, _ALONE, None, maker)
    own = {axis: _made(maker, mesh, axis) for axis in AXES}
    return Groups(
        mesh=mesh,
        rank=world.rank,
        world=world,
        data=_data_group(maker, mesh, own["replica"], own["shard"]),
        shard=own["shard"],
        replica=own["replica"],
        tensor=own["tensor"],
        pipeline=own["pipeline"],
        device_mesh=_grid(mesh, own, device),
        maker=maker,
    )


def _made(maker: Maker, mesh: Mesh, *axes: str) -> Group:
    process_group = maker.make(mesh.groups(*axes))
    assert process_group is not None, "the groups of an axis part all ranks"
    return Group(dist.get_rank(process_group), dist.get_world_size(process_group), process_group)


def _grid(mesh: Mesh, own: Mapping[str, Group], device: torch.device) -> DeviceMesh:
    """Of the groups that stand: those that torch makes itself take no timeout in every version."""
    groups = [group for axis in AXES if (group := own[axis].process_group) is not None]
    ranks = torch.arange(mesh.layout.num_ranks, dtype=torch.int).view(mesh.sizes)
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=AXES)


def _data_group(maker: Maker, mesh: Mesh, replica: Group, shard: Group) -> Group:
    """Replicas and shards together; one of them where the other is trivial."""
    if shard.size == 1 or replica.size == 1:
        return shard if replica.size == 1 else replica
    return _made(maker, mesh, "replica", "shard")
