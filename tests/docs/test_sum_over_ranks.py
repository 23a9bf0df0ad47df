"""The example of docs/testing.md: distributed code is tested by a function that every rank calls."""

import pytest
import torch
import torch.distributed as dist

from closeranks.testing import run_world


def add() -> float:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return total.item()


@pytest.mark.world
def test_all_ranks_see_the_sum() -> None:
    assert run_world(add, 4) == [6.0] * 4
