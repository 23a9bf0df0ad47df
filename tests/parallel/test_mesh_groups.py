"""Groups of every axis: who is in them, how long they wait, and that they go."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from closeranks.facts.layout import Layout
from closeranks.facts.mesh import AXES
from closeranks.parallel.mesh_groups import MeshGroups, open_mesh_groups
from closeranks.parallel.process_group import RankGroup
from closeranks.testing import run_world

CPU = torch.device("cpu")
TIMEOUT_S = 17.0


def opened(text: str) -> MeshGroups:
    return open_mesh_groups(RankGroup(dist.get_rank(), dist.get_world_size()), Layout.parse(text), CPU, TIMEOUT_S)


def num_standing() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    timeout: timedelta = group._get_backend(CPU).options._timeout
    return timeout


def timeouts(text: str) -> dict[str, timedelta]:
    groups = opened(text)
    found = {axis: getattr(groups, axis).process_group for axis in (*AXES, "data")}
    found["mesh"] = groups.sharding_mesh().get_group("shard")
    found["ties"] = groups.across_stages(range(groups.pipeline.size))
    return {axis: timeout_of(group) for axis, group in found.items()}


@pytest.mark.world
@pytest.mark.parametrize("text", ["data=2 zero=1 pipeline=2", "data=4 zero=3 shard=2", "tensor=2 pipeline=2"])
def test_every_group_waits_as_long_as_the_job_says(text: str) -> None:
    for found in run_world(timeouts, 4, text):
        assert set(found.values()) == {timedelta(seconds=TIMEOUT_S)}, found


def members(text: str) -> dict[str, list[int]]:
    groups = opened(text)
    sizes = {axis: groups.device_mesh[axis].mesh.tolist() for axis in AXES} if groups.device_mesh else {}
    for axis in AXES:
        group = getattr(groups, axis)
        assert dist.get_process_group_ranks(group.process_group) == sizes[axis]
        assert group.size == len(sizes[axis])
        assert group.sum(torch.tensor(dist.get_rank())).item() == sum(sizes[axis]), axis
    return {"data": dist.get_process_group_ranks(groups.data.process_group), **sizes}


@pytest.mark.world
def test_torchs_grid_has_the_groups_that_the_axes_have() -> None:
    zero, *_, last = run_world(members, 4, "data=4 zero=3 shard=2")
    assert zero == {"data": [0, 1, 2, 3], "pipeline": [0], "replica": [0, 2], "shard": [0, 1], "tensor": [0]}
    assert last == {"data": [0, 1, 2, 3], "pipeline": [3], "replica": [1, 3], "shard": [2, 3], "tensor": [3]}


def standing(text: str) -> tuple[int, int, int]:
    before = num_standing()
    groups = opened(text)
    groups.across_stages([0, 1])
    during = num_standing()
    dist.barrier()  # else a rank may close while its peer still connects
    groups.close()
    groups.close()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2, "the world's group stays"
    return before, during, num_standing()


@pytest.mark.world
def test_closing_gives_back_every_group_but_the_worlds() -> None:
    for before, during, after in run_world(standing, 2, "pipeline=2"):
        assert during > before == after == 1


def homes(text: str, num_replica_groups: int) -> dict[str, list[int]]:
    group = RankGroup(dist.get_rank(), dist.get_world_size())
    groups = open_mesh_groups(group, Layout.parse(text), CPU, TIMEOUT_S, num_replica_groups)
    replica_group = groups.replica_group
    found = {
        name: dist.get_process_group_ranks(one.process_group) if one.size > 1 else [group.rank]
        for name in ("world", "data", "replica", "across_groups")
        if (one := getattr(replica_group, name))
    }
    if groups.device_mesh is not None:
        found["mesh"] = groups.sharding_mesh().mesh.flatten().tolist()
    return {**found, "number": [replica_group.number]}


@pytest.mark.world
@pytest.mark.parametrize(
    ("text", "num_replica_groups", "of_last"),
    [
        ("data=4", 4, {"world": [3], "data": [3], "replica": [3], "across_groups": [0, 1, 2, 3], "number": [3]}),
        pytest.param(
            "data=4",
            2,
            {"world": [2, 3], "data": [2, 3], "replica": [2, 3], "across_groups": [1, 3], "number": [1]},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "data=4 zero=3 shard=2",
            2,
            {"world": [2, 3], "data": [2, 3], "replica": [3], "across_groups": [1, 3], "number": [1], "mesh": [2, 3]},
            marks=pytest.mark.slow,
        ),
        (
            "data=2 pipeline=2",  # the pipeline axis is slowest: stage 0 of both replicas, then stage 1
            2,
            {"world": [1, 3], "data": [3], "replica": [3], "across_groups": [2, 3], "number": [1], "mesh": [3]},
        ),
    ],
)
def test_replicas_that_train_apart_have_groups_of_their_own(
    text: str, num_replica_groups: int, of_last: dict[str, list[int]]
) -> None:
    assert run_world(homes, 4, text, num_replica_groups)[3] == of_last
