"""Gradients after ``finish`` are the sum over ranks, whatever each rank computed."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from closeranks.core.errors import ModelError
from closeranks.parallel.process_group import RankGroup
from closeranks.sync.reducers.all_reduce import AllReduceReducer
from closeranks.sync.reducers.local_parameters import local_parameters
from closeranks.testing import run_world


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(index: int) -> torch.Tensor:
    return torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(index))


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def reference(batches: list[int]) -> list[torch.Tensor]:
    module = build()
    for index in batches:
        module(batch(index)).square().sum().backward()
    return gradients(module)


def reduced(assignment: list[list[int]], cap_bytes: int) -> list[torch.Tensor]:
    group = RankGroup(dist.get_rank(), dist.get_world_size())
    module = build()
    reducer = AllReduceReducer(local_parameters(module), group, bucket_bytes=cap_bytes, first_bucket_bytes=cap_bytes)
    mine = assignment[group.rank]
    for _ in range(2):  # a second step must not see anything of the first
        for number, index in enumerate(mine):
            reducer.begin_backward(is_last=number == len(mine) - 1)
            module(batch(index)).square().sum().backward()
            reducer.end_backward()
        reducer.finish()
        result = gradients(module)
        flat = torch.cat([g.flatten() for g in reducer.gradients()])
        assert flat.numel() == sum(g.numel() for g in result)
        reducer.release()
        assert all(p.grad is None for p in module.parameters())
    return result


@pytest.mark.world
@pytest.mark.parametrize("cap_bytes", [1, 300, 1 << 20])
@pytest.mark.parametrize("assignment", [[[0, 1], [2, 3]], [[0, 1, 2], [3]], [[0, 1, 2, 3], []], [[0], [1, 2], [3]]])
def test_sums_over_ranks_with_accumulation_and_idle_ranks(assignment: list[list[int]], cap_bytes: int) -> None:
    expected = reference([0, 1, 2, 3])
    for result in run_world(reduced, len(assignment), assignment, cap_bytes):
        for got, want in zip(result, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def unused_branch() -> list[list[float]]:
    """Only rank 1 uses the second layer; a third is used by nobody."""
    group = RankGroup(dist.get_rank(), dist.get_world_size())
    layers = nn.ModuleList([nn.Linear(2, 1, bias=False) for _ in range(3)]).double()
    with torch.no_grad():
        for p in layers.parameters():
            p.fill_(1.0)
    reducer = AllReduceReducer(local_parameters(layers), group, bucket_bytes=1, first_bucket_bytes=1)
    reducer.begin_backward(is_last=True)
    used = layers[0] if group.rank == 0 else layers[1]
    used(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    reducer.finish()
    return [p.grad.flatten().tolist() for p in layers.parameters()]


@pytest.mark.world
def test_parameters_that_some_or_all_ranks_did_not_use() -> None:
    assert run_world(unused_branch, 2) == [[[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]] * 2


def collectives_per_step(num_micro_batches: int) -> tuple[int, int]:
    """Calls and bytes of one step, counted at the collective itself."""
    calls: list[int] = []
    original = dist.all_reduce

    def counting(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
        calls.append(tensor.numel() * tensor.element_size())
        return original(tensor, *args, **kwargs)

    dist.all_reduce = counting
    module = build()
    reducer = AllReduceReducer(
        local_parameters(module), RankGroup(dist.get_rank(), 2), bucket_bytes=300, first_bucket_bytes=300
    )
    for number in range(num_micro_batches):
        reducer.begin_backward(is_last=number == num_micro_batches - 1)
        module(batch(number)).square().sum().backward()
    launched_in_backward = len(calls)
    reducer.finish()
    assert launched_in_backward == len(calls), "every bucket left while backward ran"
    return len(calls), sum(calls)


@pytest.mark.world
def test_accumulation_communicates_once_per_step() -> None:
    model_bytes = sum(p.numel() * p.element_size() for p in build().parameters())
    once = run_world(collectives_per_step, 2, 1)
    assert once == run_world(collectives_per_step, 2, 4)
    assert once[0][1] == model_bytes


def sent_without_overlap() -> tuple[int, int]:
    """Collectives when the last backward is over, and after ``finish``."""
    sent: list[object] = []
    original = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: (sent.append(args[0]), original(*args, **kwargs))[1]
    module, group = build(), RankGroup(dist.get_rank(), 2)
    reducer = AllReduceReducer(local_parameters(module), group, bucket_bytes=300, first_bucket_bytes=300, overlap=False)
    reducer.begin_backward(is_last=True)
    module(batch(0)).square().sum().backward()
    reducer.end_backward()
    before = len(sent)
    reducer.finish()
    return before, len(sent)


@pytest.mark.world
def test_without_overlap_everything_leaves_at_the_end() -> None:
    for before, after in run_world(sent_without_overlap, 2):
        assert before == 0
        assert after > 1


def test_one_rank_leaves_gradients_where_autograd_put_them() -> None:
    module = build()
    reducer = AllReduceReducer(local_parameters(module), RankGroup(0, 1), bucket_bytes=1, first_bucket_bytes=1)
    reducer.begin_backward(is_last=True)
    module(batch(0)).square().sum().backward()
    places = [p.grad.data_ptr() for p in module.parameters() if p.grad is not None]
    reducer.finish()
    assert places == [g.data_ptr() for g in reducer.gradients()] == [g.data_ptr() for g in reducer.primary_gradients()]
    assert not any(p._post_accumulate_grad_hooks for p in module.parameters()), "nothing is called in backward"


def odd_layouts() -> bool:
    """A transposed and a channels-last parameter: the gradient must lie in memory as the parameter does."""
    group = RankGroup(dist.get_rank(), dist.get_world_size())
    module = nn.Module()
    module.a = nn.Parameter(torch.zeros(3, 5).t())
    module.b = nn.Parameter(torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last))
    reducer = AllReduceReducer(local_parameters(module), group, bucket_bytes=1 << 20, first_bucket_bytes=1 << 20)
    reducer.begin_backward(is_last=True)
    weights = torch.arange(15.0).view(5, 3), torch.arange(96.0).view(2, 3, 4, 4)
    sum((p * w).sum() for p, w in zip(module.parameters(), weights, strict=True)).backward()
    reducer.finish()
    return all(
        p.grad.stride() == p.stride() and torch.equal(p.grad, group.size * w)
        for p, w in zip(module.parameters(), weights, strict=True)
    )


@pytest.mark.world
def test_gradients_lie_in_memory_as_their_parameters_do() -> None:
    assert run_world(odd_layouts, 2) == [True, True]


def twice_in_one_backward() -> str:
    from torch.utils.checkpoint import checkpoint

    layer = nn.Linear(4, 4)
    reducer = AllReduceReducer(
        local_parameters(layer), RankGroup(dist.get_rank(), 2), bucket_bytes=1, first_bucket_bytes=1
    )
    reducer.begin_backward(is_last=True)
    x = torch.ones(2, 4, requires_grad=True)
    try:
        checkpoint(layer, checkpoint(layer, x, use_reentrant=True), use_reentrant=True).sum().backward()
    except ModelError as error:
        return str(error)
    return "nothing was said"


@pytest.mark.world
def test_a_second_gradient_in_one_backward_is_refused() -> None:
    for said in run_world(twice_in_one_backward, 2):
        assert "use_reentrant=False" in said
