"""Batch norm over micro-batches and ranks: running statistics against arithmetic by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from closeranks.parallel.batch_norm import SMALL_MICRO_BATCH, BatchStatistics, batch_norm_hint
from closeranks.parallel.process_group import RankGroup
from closeranks.testing import run_world

ONE = RankGroup(0, 1)
TAKEN, SKIPPED = torch.tensor(1.0, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)
WIDTH = 3


def drawn(*sizes: int, seed: int = 0) -> list[Tensor]:
    """Micro-batches of these sizes, each with a mean and a spread of its own."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(size, WIDTH, generator=generator, dtype=torch.float64) * (n + 1) + n for n, size in enumerate(sizes)
    ]


def norm(momentum: float | None = 0.1) -> nn.BatchNorm1d:
    module = nn.BatchNorm1d(WIDTH, momentum=momentum).double()
    module.running_mean.copy_(torch.tensor([0.5, -1.0, 2.0]))
    module.running_var.copy_(torch.tensor([1.5, 0.5, 3.0]))
    return module


def step(module: nn.Module, statistics: BatchStatistics, batches: Sequence[Tensor], taken: Tensor = TAKEN) -> None:
    statistics.begin()
    for batch in batches:
        statistics.next()
        module(batch)
    statistics.finish(taken)


def by_hand(batches: Sequence[Tensor], momentum: float, before: nn.BatchNorm1d) -> tuple[Tensor, Tensor]:
    mean = torch.stack([batch.mean(0) for batch in batches]).mean(0)
    var = torch.stack([batch.var(0, unbiased=True) for batch in batches]).mean(0)
    return (
        (1 - momentum) * before.running_mean + momentum * mean,
        (1 - momentum) * before.running_var + momentum * var,
    )


def assert_statistics(module: nn.BatchNorm1d, expected: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(module.running_mean, expected[0], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(module.running_var, expected[1], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("sizes", [(8,), (4, 4), (5, 2, 7, 3)])
def test_a_step_blends_in_the_mean_over_its_micro_batches(sizes: tuple[int, ...]) -> None:
    module, batches = norm(), drawn(*sizes)
    step(module, BatchStatistics(module, ONE), batches)
    assert_statistics(module, by_hand(batches, 0.1, norm()))
    assert int(module.num_batches_tracked) == 1
    assert module.momentum == 0.1


def test_one_micro_batch_a_step_is_what_torch_does() -> None:
    ours, torchs = norm(0.3), norm(0.3)
    statistics = BatchStatistics(ours, ONE)
    for batch in drawn(6, 5, 4):
        step(ours, statistics, [batch])
        torchs(batch)
    assert_statistics(ours, (torchs.running_mean, torchs.running_var))


def test_without_a_momentum_the_mean_over_all_steps_is_kept_as_torch_keeps_it() -> None:
    ours, torchs = norm(None), norm(None)
    statistics = BatchStatistics(ours, ONE)
    for batch in drawn(6, 5, 4):
        step(ours, statistics, [batch])
        torchs(batch)
    assert_statistics(ours, (torchs.running_mean, torchs.running_var))
    assert ours.momentum is None


def test_a_momentum_of_zero_never_moves() -> None:
    module = norm(0.0)
    step(module, BatchStatistics(module, ONE), drawn(6, 5))
    assert_statistics(module, (norm().running_mean, norm().running_var))
    assert module.momentum == 0.0


def test_a_skipped_step_leaves_every_bit() -> None:
    module = norm()
    statistics = BatchStatistics(module, ONE)
    step(module, statistics, drawn(6, 5))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    step(module, statistics, [torch.full((4, WIDTH), torch.nan, dtype=torch.float64)], SKIPPED)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert module.momentum == 0.1


def test_a_skipped_step_is_as_if_it_had_not_been() -> None:
    one, two = norm(), norm()
    statistics = [BatchStatistics(one, ONE), BatchStatistics(two, ONE)]
    first, second = drawn(6, 5), drawn(3, 4, seed=1)
    step(one, statistics[0], first)
    step(one, statistics[0], drawn(9, seed=2), SKIPPED)
    step(one, statistics[0], second)
    step(two, statistics[1], first)
    step(two, statistics[1], second)
    assert_statistics(one, (two.running_mean, two.running_var))


def test_a_layer_at_rest_keeps_its_statistics() -> None:
    module = norm().eval()
    step(module, BatchStatistics(module, ONE), drawn(6, 5))
    assert_statistics(module, (norm().running_mean, norm().running_var))


def test_a_norm_without_running_statistics_is_let_be() -> None:
    module = nn.BatchNorm1d(WIDTH, track_running_stats=False).double()
    step(module, BatchStatistics(module, ONE), drawn(6, 5))
    assert module.running_mean is None


SHARES = {"even": [[4], [4], [4]], "one rank without": [[5, 3], [7], []], "skipped": [[5, 3], [7], []]}
"""The sizes of each rank's micro-batches in a step."""


def flat(shares: list[list[int]]) -> list[Tensor]:
    return drawn(*[size for share in shares for size in share])


def over_ranks() -> dict[str, tuple[list[float], list[float]]]:
    """Each rank puts its own of the step's micro-batches through; some have none."""
    rank, size = dist.get_rank(), dist.get_world_size()
    statistics = {}
    for name, shares in SHARES.items():
        batches = iter(flat(shares))
        mine = [[next(batches) for _ in share] for share in shares][rank]
        module = norm()
        step(module, BatchStatistics(module, RankGroup(rank, size)), mine, SKIPPED if name == "skipped" else TAKEN)
        statistics[name] = (module.running_mean.tolist(), module.running_var.tolist())
    return statistics


@pytest.mark.world
def test_all_ranks_keep_the_mean_over_all_micro_batches_of_the_step() -> None:
    first, *others = run_world(over_ranks, 3)
    assert all(other == first for other in others), "the same bits on every rank"
    for name in ("even", "one rank without"):
        expected = torch.stack(by_hand(flat(SHARES[name]), 0.1, norm()))
        torch.testing.assert_close(torch.tensor(first[name], dtype=torch.float64), expected, rtol=1e-13, atol=0)
    assert first["skipped"] == (norm().running_mean.tolist(), norm().running_var.tolist())


def norms() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


def test_advice_for_small_micro_batches_names_both_ways_out() -> None:
    text = batch_norm_hint(norms(), "micro", 4, 2)
    assert "micro-batches of 4 samples" in text
    assert f"train.micro_batch to {SMALL_MICRO_BATCH}" in text
    assert 'layout.batch_norm = "sync"' in text
    assert "all 2 data ranks" in text


def test_advice_for_one_worker_does_not_send_it_to_others() -> None:
    text = batch_norm_hint(norms(), "micro", 4, 1)
    assert "train.micro_batch" in text
    assert "sync" not in text


def test_no_advice_where_there_is_nothing_to_say() -> None:
    assert batch_norm_hint(norms(), "micro", SMALL_MICRO_BATCH, 2) == ""
    assert batch_norm_hint(norms(), "sync", 4, 2) == ""
    assert batch_norm_hint(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), "micro", 1, 2) == ""
