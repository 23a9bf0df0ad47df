from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from closeranks.core.errors import SetupError
from closeranks.core.world import World
from closeranks.parallel.process_group import RankGroup, open_world_group
from closeranks.testing import run_world

CPU = torch.device("cpu")


def test_a_group_of_one_talks_to_nobody() -> None:
    """No process group stands: a collective would raise."""
    assert not dist.is_initialized()
    group, tensor = RankGroup(0, 1), torch.arange(3.0)
    assert group.sum(tensor) is tensor
    assert group.broadcast(tensor) is tensor
    assert group.broadcast_text("run") == "run"
    assert tensor.tolist() == [0, 1, 2]


def collectives() -> tuple[list[float], list[float], str]:
    rank = dist.get_rank()
    group = RankGroup(rank, dist.get_world_size())
    summed, spread = torch.tensor([1.0, float(rank)]), torch.tensor([float(rank), 7.0])
    assert group.sum(summed) is summed, "in place"
    group.broadcast(spread)
    return summed.tolist(), spread.tolist(), group.broadcast_text(f"from {rank}")


@pytest.mark.world
def test_every_rank_gets_the_sum_and_rank_0s_words() -> None:
    assert run_world(collectives, 3) == [([3.0, 3.0], [0.0, 7.0], "from 0")] * 3


def test_a_world_of_one_takes_the_same_path_and_is_closed_again() -> None:
    opened = open_world_group(World(), CPU, dist.HashStore, timeout_s=10.0)
    assert opened.is_ours
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    assert dist.get_backend() == "gloo"
    opened.close()
    assert not dist.is_initialized()


def test_a_group_that_somebody_formed_is_taken_and_left_alone() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        opened = open_world_group(World(), CPU, _no_store, timeout_s=10.0)
        assert not opened.is_ours
        opened.close()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def _no_store() -> Any:
    raise AssertionError("a group stands already: no store is needed")


def test_each_generation_has_keys_of_its_own() -> None:
    """What an earlier generation left in a store would be read as the new one's addresses."""
    keys = {}
    for generation in (0, 7):
        store = dist.HashStore()
        open_world_group(World(generation=generation), CPU, lambda store=store: store, timeout_s=10.0).close()
        keys[generation] = set(store.list_keys())
    assert keys[0]
    assert keys[7]
    assert keys[0].isdisjoint(keys[7])


def test_workers_that_cannot_meet_are_told_in_a_sentence() -> None:
    """A second worker never comes."""
    with pytest.raises(SetupError, match="could not reach each other") as told:
        open_world_group(World(0, 2, 0, 2), CPU, dist.HashStore, timeout_s=0.2)
    assert told.value.fix
    assert not dist.is_initialized()
