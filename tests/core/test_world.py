from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from closeranks.core.world import World


def test_alone_is_an_ordinary_world() -> None:
    world = World()
    assert (world.rank, world.size, world.local_rank, world.local_size) == (0, 1, 0, 1)
    assert world.is_lead


def test_only_rank_0_leads() -> None:
    assert [World(rank=rank, size=4).is_lead for rank in range(4)] == [True, False, False, False]


def test_a_world_is_a_value() -> None:
    assert World(rank=1, size=2) == World(rank=1, size=2)
    with pytest.raises(FrozenInstanceError):
        World().rank = 1  # type: ignore[misc]
