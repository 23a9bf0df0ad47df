"""Each crossing alone: what arrives where, that backward is forward's transpose, one collective each way."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode

from closeranks.core.errors import ModelError
from closeranks.parallel.process_group import RankGroup
from closeranks.parallel.tensor import activation_collectives
from closeranks.parallel.tensor.activation_collectives import ACTIVATION_COLLECTIVES, TensorAxisGroup
from closeranks.testing import run_world

SHAPE = (2, 6, 4)  # [batch, positions, features], positions divisible by 2 and 3
Cross = Callable[[Tensor, TensorAxisGroup], Tensor]


def drawn(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def here() -> TensorAxisGroup:
    return TensorAxisGroup.of(RankGroup(dist.get_rank(), dist.get_world_size()))


def arrivals(name: str, dtype: torch.dtype) -> Tensor:
    axis = here()
    crossed = ACTIVATION_COLLECTIVES[name](drawn(SHAPE, 0 if name == "copy" else axis.rank, dtype), axis)
    assert crossed.is_contiguous()
    assert crossed.dtype == dtype
    return crossed


@pytest.mark.world
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ACTIVATION_COLLECTIVES)
def test_what_arrives_is_what_the_name_says(name: str, dtype: torch.dtype) -> None:
    shares = [drawn(SHAPE, rank, dtype) for rank in range(2)]
    total = shares[0] + shares[1]
    expected = {
        "copy": [shares[0]] * 2,
        "sum": [total] * 2,
        "gather": [torch.cat(shares, 1)] * 2,
        "scatter": total.tensor_split(2, 1),
        "whole": [torch.cat(shares, -1)] * 2,
    }[name]
    for found, true in zip(run_world(arrivals, 2, name, dtype), expected, strict=True):
        assert torch.equal(found, true)


SAME_IN, SAME_OUT = ("copy",), ("sum", "whole")
"""What enters, or leaves, is one tensor that every rank has: it counts once."""


def products(name: str) -> tuple[float, float]:
    """<w, A x> and <A' w, x> of this rank's tensors, with A the crossing and A' its backward."""
    axis = here()
    x = drawn(SHAPE, 0 if name in SAME_IN else axis.rank).requires_grad_()
    y = ACTIVATION_COLLECTIVES[name](x, axis)
    w = drawn(tuple(y.shape), 10 if name in SAME_OUT else 10 + axis.rank)
    (gradient,) = torch.autograd.grad(y, x, w)
    return (w * y).sum().item(), (gradient * x).sum().item()


@pytest.mark.world
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ACTIVATION_COLLECTIVES)
def test_backward_is_the_transpose_over_all_ranks(name: str, size: int) -> None:
    found = run_world(products, size, name)
    forward, backward = ([pair[way] for pair in found] for way in (0, 1))
    if name in SAME_OUT:
        assert len(set(forward)) == 1
        forward = forward[:1]
    if name in SAME_IN:
        assert len(set(backward)) == 1, "every rank gets the same sum"
        backward = backward[:1]
    assert sum(forward) == pytest.approx(sum(backward), rel=1e-12)
    assert abs(sum(forward)) > 1e-3


def along(dim: int) -> tuple[Tensor, Tensor]:
    axis = here()
    gathered = activation_collectives.all_gather(drawn(SHAPE, axis.rank), axis, dim)
    return gathered, activation_collectives.reduce_scatter(gathered, axis, dim)


@pytest.mark.world
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_any_dim_can_be_joined_and_parted(dim: int) -> None:
    shares = [drawn(SHAPE, rank) for rank in range(2)]
    for rank, (gathered, scattered) in enumerate(run_world(along, 2, dim)):
        assert torch.equal(gathered, torch.cat(shares, dim))
        assert torch.equal(scattered, 2 * shares[rank])


def counted(name: str) -> tuple[dict[str, int], dict[str, int]]:
    axis = here()
    x = drawn(SHAPE, 0).requires_grad_()
    with CommDebugMode() as forward:
        y = ACTIVATION_COLLECTIVES[name](x, axis)
    with CommDebugMode() as backward:
        y.sum().backward()
    counts: Any = [
        {str(op).rpartition(".")[2]: n for op, n in m.get_comm_counts().items()} for m in (forward, backward)
    ]
    return counts[0], counts[1]


@pytest.mark.world
def test_each_way_is_one_collective_or_none() -> None:
    reduce, gather, scatter = {"all_reduce": 1}, {"all_gather_into_tensor": 1}, {"reduce_scatter_tensor": 1}
    expected = {
        "copy": ({}, reduce),
        "sum": (reduce, {}),
        "gather": (gather, scatter),
        "scatter": (scatter, gather),
        "whole": (gather, {}),
    }
    for name, counts in expected.items():
        assert run_world(counted, 2, name) == [counts] * 2, name


def refused() -> str:
    with pytest.raises(ModelError) as caught:
        activation_collectives.reduce_scatter(torch.zeros(1, 5, 2), here())
    return str(caught.value)


@pytest.mark.world
def test_positions_that_do_not_divide_are_refused_on_every_rank() -> None:
    for text in run_world(refused, 2):
        assert text.startswith("5 positions of a sample do not split over 2 tensor ranks. Set data.seq_len")


def reduced() -> tuple[list[float], list[float]]:
    axis = deepcopy(here())
    mine = torch.tensor([float(axis.rank), -float(axis.rank)])
    return axis.sum(mine).tolist(), axis.max(mine).tolist()


@pytest.mark.world
def test_an_axis_can_be_copied_and_reduces_out_of_place() -> None:
    assert run_world(reduced, 3) == [([3.0, -3.0], [2.0, 0.0])] * 3


def subgroups() -> list[float]:
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    axis = TensorAxisGroup.of(RankGroup(rank // 2, 2, groups[rank % 2]))
    return activation_collectives.all_gather(torch.full((1, 1, 1), float(rank)), axis).flatten().tolist()


@pytest.mark.world
def test_a_crossing_stays_within_its_group() -> None:
    assert run_world(subgroups, 4) == [[0.0, 2.0], [1.0, 3.0], [0.0, 2.0], [1.0, 3.0]]


def profiled(name: str) -> set[str]:
    axis = here()
    ours = drawn(SHAPE, axis.rank).requires_grad_()
    with torch.profiler.profile() as profile:
        ACTIVATION_COLLECTIVES[name](ours, axis).sum().backward()
    return {event.name for event in profile.events() if event.name.startswith("c10d::")}


@pytest.mark.world
@pytest.mark.parametrize("name", ACTIVATION_COLLECTIVES)
def test_no_all_gather_is_coalesced(name: str) -> None:
    """Works of that name let torch's Gloo threads corrupt the heap when two of them end at the same time."""
    for operations in run_world(profiled, 2, name):
        assert operations
        assert not [operation for operation in operations if "allgather_into_tensor_coalesced" in operation]
