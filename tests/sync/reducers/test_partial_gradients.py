"""Sums over further groups, on ranks that hold what they share in different order."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from closeranks.sync.reducers.partial_gradients import PartialGradient, sum_partial_gradients
from closeranks.testing import run_world


def summed(is_mirrored: bool) -> list[float]:
    """Three gradients in three groups of the same two ranks."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]) for _ in range(3)]
    gradients = [torch.full((number + 1,), 10.0**number * (rank + 1)) for number in range(3)]
    parts = [PartialGradient(gradient, (group,)) for gradient, group in zip(gradients, groups, strict=True)]
    sum_partial_gradients(parts[::-1] if is_mirrored and rank else parts)
    return [gradient.mean().item() for gradient in gradients]


@pytest.mark.world
@pytest.mark.parametrize("is_mirrored", [False, True])
def test_ranks_may_hold_what_they_share_in_any_order(is_mirrored: bool) -> None:
    assert run_world(summed, 2, is_mirrored) == [[3.0, 30.0, 300.0]] * 2


def of_two_formats() -> tuple[float, float]:
    rank = dist.get_rank()
    wide, narrow = torch.full((2,), 1.0 + rank, dtype=torch.float64), torch.full((3,), 5.0 + rank)
    parts = [PartialGradient(wide, (None,)), PartialGradient(narrow, (None,))]
    sum_partial_gradients(parts[::-1] if rank else parts)
    return wide.mean().item(), narrow.mean().item()


@pytest.mark.world
def test_formats_travel_apart_in_an_order_of_their_own() -> None:
    assert run_world(of_two_formats, 2) == [(3.0, 11.0)] * 2
