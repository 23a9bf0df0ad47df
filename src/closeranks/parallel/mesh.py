"""With whom does this worker meet, axis by axis?

Process groups for every axis of a layout, in the order that ``facts.mesh`` counts ranks. Invariants: all ranks make the
same groups in the same order (making one is a collective); a layout of replicas alone makes none besides the world's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from closeranks.facts.layout import Layout
from closeranks.facts.mesh import AXES, Mesh
from closeranks.parallel.group import Group

_ALONE = Group(0, 1)


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

    def sharding_mesh(self) -> DeviceMesh:
        """What FSDP2 shards over: the shard axis, with the replica axis in front where there are replicas (HSDP)."""
        assert self.device_mesh is not None
        return self.device_mesh["replica", "shard"] if self.replica.size > 1 else self.device_mesh["shard"]

    def across_stages(self, coordinates: Sequence[int]) -> dist.ProcessGroup | None:
        """A group of the given pipeline coordinates for every other coordinate; None where this rank has no part.

        A collective: every rank calls it, in the same order.
        """
        mine: dist.ProcessGroup | None = None
        for ranks in self.mesh.groups("pipeline"):
            members = [ranks[coordinate] for coordinate in coordinates]
            group = dist.new_group(members)
            mine = group if self.rank in members else mine
        return mine


def open_groups(world: Group, layout: Layout, device: torch.device) -> Groups:
    mesh = Mesh(layout)
    if layout.num_ranks == layout.data and layout.zero == 0:
        return Groups(mesh, world.rank, world, world, _ALONE, world, _ALONE, _ALONE, None)
    grid = init_device_mesh(device.type, mesh.sizes, mesh_dim_names=AXES)
    own = {axis: _group(grid.get_group(axis)) for axis in AXES}
    return Groups(
        mesh=mesh,
        rank=world.rank,
        world=world,
        data=_data_group(mesh, world, own["replica"], own["shard"]),
        shard=own["shard"],
        replica=own["replica"],
        tensor=own["tensor"],
        pipeline=own["pipeline"],
        device_mesh=grid,
    )


def _group(process_group: dist.ProcessGroup) -> Group:
    return Group(dist.get_rank(process_group), dist.get_world_size(process_group), process_group)


def _data_group(mesh: Mesh, world: Group, replica: Group, shard: Group) -> Group:
    """Replicas and shards together; one of them where the other is trivial."""
    if shard.size == 1 or replica.size == 1:
        return shard if replica.size == 1 else replica
    mine: dist.ProcessGroup | None = None
    for ranks in mesh.groups("replica", "shard"):
        group = dist.new_group(list(ranks))
        mine = group if world.rank in ranks else mine
    assert mine is not None
    return _group(mine)
