"""Optimizer state in slices: what the slices are, and what parameters keep of themselves."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from closeranks.core.errors import ModelError
from closeranks.parallel.process_group import RankGroup
from closeranks.sync.reducers.local_parameters import local_parameters
from closeranks.sync.reducers.sharded import ALIGN_BYTES, ShardedReducer
from closeranks.testing import run_world
from tests.sync.strategies import Pieces, assembled, pieces

CAPS = {"bucket_bytes": 4096, "first_bucket_bytes": 512}


def odd_orders() -> nn.Module:
    """Parameters whose memory is not in the order of their rows, among one whose is."""
    torch.manual_seed(1)
    module = nn.Module()
    module.plain = nn.Parameter(torch.randn(5, 3))
    module.turned = nn.Parameter(torch.randn(3, 5).t())
    module.conv = nn.Parameter(torch.randn(7, 3, 4, 4).contiguous(memory_format=torch.channels_last))
    module.few = nn.Parameter(torch.randn(1, 3, 2, 2).contiguous(memory_format=torch.channels_last))
    return module


def shares(zero: int, hold: str) -> tuple[Pieces, Pieces, list[bool]]:
    group = RankGroup(dist.get_rank(), dist.get_world_size())
    module, before = odd_orders(), odd_orders()
    reducer = ShardedReducer(local_parameters(module), group, RankGroup(0, 1), zero=zero, hold=hold, **CAPS)
    kept = [
        torch.equal(p, q) and p.stride() == q.stride() and p.data_ptr() % ALIGN_BYTES == q.data_ptr() % ALIGN_BYTES
        for p, q in zip(module.parameters(), before.parameters(), strict=True)
    ]
    reducer.begin_backward(is_last=True)
    sum((p * q.detach()).sum() for p, q in zip(module.parameters(), before.parameters(), strict=True)).backward()
    reducer.end_backward()
    reducer.finish()
    weights, gradients = pieces(reducer, "weights"), pieces(reducer, "gradients")
    for leaf in reducer.parameter_shards():
        assert leaf.tensor.grad is not None
        assert leaf.tensor.grad.stride() == leaf.tensor.stride(), "fused kernels walk both in memory order"
        leaf.tensor.mul_(2.0)
    reducer.gather_parameters()
    kept += [torch.equal(p, 2 * q) for p, q in zip(module.parameters(), before.parameters(), strict=True)]
    return weights, gradients, kept


@pytest.mark.world
@pytest.mark.parametrize(("zero", "hold"), [(1, "step"), (2, "shards")])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_memory_order_is_kept_and_pieces_say_where_elements_belong(size: int, zero: int, hold: str) -> None:
    ranks = run_world(shares, size, zero, hold)
    expected = dict(odd_orders().named_parameters())
    weights = assembled([part for rank in ranks for part in rank[0]], 1)
    gradients = assembled([part for rank in ranks for part in rank[1]], 1)
    for name, parameter in expected.items():
        assert torch.equal(weights[name], parameter)
        assert torch.equal(gradients[name], size * parameter)
    for _, _, kept in ranks:
        assert all(kept), kept


def test_a_group_of_one_communicates_with_nobody() -> None:
    """No process group exists here: any collective would raise."""
    module = nn.Linear(3, 2)
    alone = RankGroup(0, 1)
    reducer = ShardedReducer(local_parameters(module), alone, alone, zero=2, hold="shards", **CAPS)
    for number in range(2):
        reducer.begin_backward(is_last=number == 1)
        module(torch.ones(1, 3)).sum().backward()
        reducer.end_backward()
    reducer.finish()
    assert all((leaf.tensor.grad == 2.0).all() for leaf in reducer.parameter_shards())
    reducer.gather_parameters()
    reducer.release()
    reducer.finish()  # a step without a micro-batch
    assert all((leaf.tensor.grad == 0.0).all() for leaf in reducer.parameter_shards())


@pytest.mark.parametrize("hold", ["step", "shards"])
def test_a_second_gradient_in_one_backward_is_refused(hold: str) -> None:
    layer, alone = nn.Linear(4, 4), RankGroup(0, 1)
    reducer = ShardedReducer(local_parameters(layer), alone, alone, zero=2, hold=hold, **CAPS)
    reducer.begin_backward(is_last=True)
    layer(torch.ones(1, 4)).sum().backward()
    with pytest.raises(ModelError, match="use_reentrant=False"):
        layer(torch.ones(1, 4)).sum().backward()


def test_frozen_parameters_stay_where_they_are() -> None:
    module, alone = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), RankGroup(0, 1)
    module[0].requires_grad_(False)
    before = [p.data_ptr() for p in module.parameters()]
    reducer = ShardedReducer(local_parameters(module), alone, alone, zero=1, hold="step", **CAPS)
    after = [p.data_ptr() for p in module.parameters()]
    assert [a == b for a, b in zip(after, before, strict=True)] == [True, True, False, False]
    assert {leaf.piece.name for leaf in reducer.parameter_shards()} == {"1.weight", "1.bias"}
