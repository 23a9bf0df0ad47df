"""Batch norm over the ranks equals torch's own over the concatenated batch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from closeranks.parallel.batch_norm import SyncBatchNorm, convert_sync_batch_norm
from closeranks.testing import run_world
from tests.run.trajectories import Trajectory, alone, largest_difference, relative, trajectory

SIZES = (5, 2, 4)
LOOKS: dict[str, tuple[int, ...]] = {"rows": (), "images": (4, 2)}
WIDTH = 3
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without weights": {"affine": False},
    "without statistics": {"track_running_stats": False},
    "mean over all": {"momentum": None},
    "still": {"momentum": 0.0},
}


@dataclass(frozen=True)
class Seen:
    """All that one rank's pass shows: output and input gradient of its rows, and its part of everything else."""

    output: Tensor
    input_gradient: Tensor
    weight_gradients: list[Tensor]
    statistics: list[Tensor]


def inputs(shape: tuple[int, ...], offset: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of all ranks, and weights that make each row's loss its own."""
    generator = torch.Generator().manual_seed(0)
    rows = (sum(SIZES), WIDTH, *shape)
    x, weights = (torch.randn(rows, generator=generator, dtype=torch.float64) for _ in range(2))
    return (x + offset).to(dtype), weights.to(dtype)


def norm(shape: tuple[int, ...], dtype: torch.dtype, options: dict[str, Any]) -> nn.Sequential:
    kind = nn.BatchNorm2d if shape else nn.BatchNorm1d
    module = kind(WIDTH, **options).to(dtype)
    for number, parameter in enumerate(module.parameters(), start=1):
        nn.init.constant_(parameter, 0.7 * number)
    return nn.Sequential(module)


def passed(module: nn.Sequential, x: Tensor, weights: Tensor, num_passes: int) -> Seen:
    x = x.clone().requires_grad_()
    for _ in range(num_passes):
        output = module(x)
    (output * weights).sum().backward()
    assert x.grad is not None
    return Seen(
        output.detach(),
        x.grad,
        [parameter.grad for parameter in module.parameters() if parameter.grad is not None],
        list(module.buffers()),
    )


def on_ranks(shape: tuple[int, ...], options: dict[str, Any], offset: float, dtype: torch.dtype) -> Seen:
    rank = dist.get_rank()
    module = norm(shape, dtype, options)
    convert_sync_batch_norm(module, None)
    assert isinstance(module[0], SyncBatchNorm)
    x, weights = (tensor.split(SIZES)[rank] for tensor in inputs(shape, offset, dtype))
    return passed(module, x, weights, 2)


def compare(ranks: list[Seen], expected: Seen, tolerance: float) -> None:
    def close(ours: Tensor, theirs: Tensor) -> None:
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)

    close(torch.cat([rank.output for rank in ranks]), expected.output)
    close(torch.cat([rank.input_gradient for rank in ranks]), expected.input_gradient)
    for number, gradient in enumerate(expected.weight_gradients):
        close(sum(rank.weight_gradients[number] for rank in ranks), gradient)  # type: ignore[arg-type]
    for rank in ranks:
        assert len(rank.statistics) == len(expected.statistics)
        for ours, theirs in zip(rank.statistics, expected.statistics, strict=True):
            close(ours, theirs)


@dataclass(frozen=True)
class Everything:
    by_kind: dict[tuple[str, str], Seen]
    far_from_zero: Seen
    halves: dict[torch.dtype, tuple[torch.dtype, bool]]


def everything() -> Everything:
    """All that needs other ranks, in one world."""
    return Everything(
        {
            (look, kind): on_ranks(shape, options, 0.0, torch.float64)
            for look, shape in LOOKS.items()
            for kind, options in KINDS.items()
        },
        on_ranks((), {}, 3000.0, torch.float32),
        {dtype: in_half(dtype) for dtype in (torch.float16, torch.bfloat16)},
    )


@pytest.fixture(scope="module")
def ranks() -> list[Everything]:
    return run_world(everything, 3)


@pytest.mark.world
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("kind", KINDS)
def test_three_ranks_equal_the_concatenated_batch(ranks: list[Everything], look: str, kind: str) -> None:
    expected = passed(norm(LOOKS[look], torch.float64, KINDS[kind]), *inputs(LOOKS[look], 0.0, torch.float64), 2)
    compare([rank.by_kind[look, kind] for rank in ranks], expected, 1e-10)


@pytest.mark.world
def test_a_large_mean_does_not_cancel_the_variance(ranks: list[Everything]) -> None:
    """In float32 the difference of two squares of 3000 has no digit of a variance of 1 left to trust."""
    expected = passed(norm((), torch.float64, {}), *inputs((), 3000.0, torch.float64), 2)
    output = torch.cat([rank.far_from_zero.output for rank in ranks]).double()
    assert bool(output.isfinite().all())
    torch.testing.assert_close(output, expected.output, rtol=0, atol=5e-3)


def in_half(dtype: torch.dtype) -> tuple[torch.dtype, bool]:
    module = norm((), torch.float32, {})
    convert_sync_batch_norm(module, None)
    output = module(torch.randn(4, WIDTH, dtype=dtype) * 50 + 200)
    return output.dtype, bool(output.isfinite().all())


@pytest.mark.world
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_full(ranks: list[Everything], dtype: torch.dtype) -> None:
    """Squares of 300 overflow fp16."""
    assert [rank.halves[dtype] for rank in ranks] == [(dtype, True)] * 3


def model() -> nn.Module:
    first = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    return nn.Sequential(first, nn.ModuleDict({"norm": nn.BatchNorm1d(4, affine=False), "out": nn.Linear(4, 2)}))


def test_names_parameters_and_buffers_are_the_same_after_as_before() -> None:
    module = model()
    before = dict([*module.named_parameters(), *module.named_buffers()])
    keys = list(module.state_dict())
    module[0][1].eval()
    convert_sync_batch_norm(module, None)
    after = dict([*module.named_parameters(), *module.named_buffers()])
    assert list(module.state_dict()) == keys
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before), "the very tensors: an optimizer may hold them"
    assert sum(isinstance(part, SyncBatchNorm) for part in module.modules()) == 2
    assert [module[0][1].training, module[1]["norm"].training] == [False, True]


def test_evaluation_asks_no_other_rank() -> None:
    """No group stands here: a collective would raise."""
    module = model()
    image = torch.randn(2, 1, 3, 3)
    expected = module.eval()[0](image)
    convert_sync_batch_norm(module, None)
    assert torch.equal(module.eval()[0](image), expected)


def test_a_batch_without_a_channel_dim_is_refused() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3))
    convert_sync_batch_norm(module, None)
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        module(torch.ones(3))


JOB: dict[str, Any] = {
    "model": {"name": "digits"},
    "data": {"name": "digits"},
    "train": {"precision": "float64", "global_batch": 16, "steps": 4},
}


def with_micro(size: int, mode: str = "sync") -> dict[str, Any]:
    return {**JOB, "train": {**JOB["train"], "micro_batch": size}, "layout": {"batch_norm": mode}}


def two_jobs(folder: Path) -> tuple[Trajectory, Trajectory]:
    """The same job with batch norm over the ranks, and with each micro-batch by itself."""
    return trajectory(folder / "sync", with_micro(8)), trajectory(folder / "micro", with_micro(8, "micro"))


@pytest.mark.world
def test_a_job_on_two_ranks_equals_one_process_with_their_micro_batches_together(tmp_path: Path) -> None:
    whole = alone(tmp_path / "whole", {**with_micro(16), "telemetry": {"report": False}})
    for result, apart in run_world(two_jobs, 2, tmp_path):
        assert relative(result.losses, whole.losses) < 1e-9
        assert largest_difference(result.gradients, whole.gradients) < 1e-9
        assert largest_difference(result.weights, whole.weights) < 1e-8
        assert result.eval_loss == pytest.approx(whole.eval_loss, rel=1e-8)
        assert relative(apart.losses, whole.losses) > 1e-4, "the comparison can fail"
    assert any("running_mean" in name for name in whole.weights)
