"""Batch norm when the batch is split over workers: which samples its statistics cover, and how they stay equal.

[Note: batch norm] With ``micro`` statistics each micro-batch is normalised by its own mean and variance. A micro-batch
is fixed by the job, so the result does not depend on the number of workers. The running estimates that evaluation uses
are updated once per step from the mean over *all* micro-batches of the step, so every rank keeps the same ones.
With ``sync`` the statistics span the data ranks' concurrent micro-batches: better for tiny micro-batches, but then the
result depends on how many workers there are, and a step's micro-batches must divide evenly among them. The running
estimates are kept in the same way, so that a step which is not taken leaves them alone.

Invariant: after every step, running statistics are the same bits on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from closeranks.core.phases import phase
from closeranks.core.protocols import ReduceGroup
from closeranks.core.traffic import count_collective

SMALL_MICRO_BATCH = 16  # below it, a mean over the micro-batch is a noisy estimate


@dataclass(slots=True)
class _Layer:
    module: _BatchNorm
    momentum: float | None
    """As the user set it; None: the mean over all steps."""
    running: tuple[Tensor, ...] = ()
    """Mean, variance and step count at the start of the step."""


class BatchStatistics:
    """Running statistics of every batch norm of a module, updated once per step alike on all ranks.

    Call sequence, by the step: ``begin``, then ``next`` before each micro-batch's forward, then ``finish`` with the
    verdict. A momentum of 1/k at the k-th micro-batch makes torch itself keep the mean over this rank's micro-batches.
    """

    def __init__(self, module: nn.Module, group: ReduceGroup) -> None:
        norms = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
        self._group = group
        self._layers = [_Layer(m, m.momentum) for m in norms]
        self._count = 0

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._layers)

    def begin(self) -> None:
        self._count = 0
        for layer in self._layers:
            layer.running = tuple(tensor.clone() for tensor in _running(layer.module))

    def next(self, *, counts: bool = True) -> None:
        """``counts`` False: the next micro-batch is padding and does not change the statistics."""
        self._count += counts
        for layer in self._layers:
            layer.module.momentum = 1.0 / self._count if counts else 0.0

    def finish(self, taken: Tensor) -> None:
        """Blend the step's mean into the running statistics; ``taken`` 0 restores the earlier ones. No host sync."""
        if not self._layers:
            return
        with torch.no_grad():
            stats = [t.double() for layer in self._layers for t in _running(layer.module)[:2]]
            count = torch.full((1,), float(self._count), dtype=torch.float64, device=stats[0].device)
            # A rank without a micro-batch still holds the old statistics: its zero must not become 0 * NaN.
            local = torch.cat(stats).nan_to_num_(0.0, 0.0, 0.0) if self._count == 0 else torch.cat(stats)
            total = self._group.sum(torch.cat([local * count, count]))
            means = (total[:-1] / total[-1].clamp(min=1)).split([t.numel() for t in stats])
            for index, layer in enumerate(self._layers):
                _blend(layer, means[2 * index : 2 * index + 2], taken)

    def average(self, group: ReduceGroup) -> None:
        """With local SGD each replica has its own statistics: at a synchronization all take the mean of ``group``."""
        if not self._layers or group.size == 1:
            return
        with torch.no_grad():
            stats = [t for layer in self._layers for t in _running(layer.module)[:2]]
            total = group.sum(torch.cat([t.double().reshape(-1) for t in stats])) / group.size
            for target, mean in zip(stats, total.split([t.numel() for t in stats]), strict=True):
                target.copy_(mean.view_as(target))


def _running(module: _BatchNorm) -> tuple[Tensor, Tensor, Tensor]:
    assert module.running_mean is not None
    assert module.running_var is not None
    assert module.num_batches_tracked is not None
    return module.running_mean, module.running_var, module.num_batches_tracked


def _blend(layer: _Layer, means: tuple[Tensor, ...], taken: Tensor) -> None:
    *targets, counter = _running(layer.module)
    *befores, steps = layer.running
    momentum = steps.double().add(1).reciprocal() if layer.momentum is None else layer.momentum
    for target, before, mean in zip(targets, befores, means, strict=True):
        blended = torch.lerp(before.double(), mean, momentum)
        target.copy_(torch.where(taken > 0, blended, before.double()))
    counter.copy_(steps + taken)
    layer.module.momentum = layer.momentum


class SyncBatchNorm(_BatchNorm):
    """Batch norm over all data ranks, on any device (torch's own runs on accelerators only)."""

    def __init__(self, norm: _BatchNorm, group: dist.ProcessGroup | None) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        self.weight, self.bias = norm.weight, norm.bias
        self.running_mean, self.running_var = norm.running_mean, norm.running_var
        self.num_batches_tracked = norm.num_batches_tracked
        self.training = norm.training
        self._group = group

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"batch norm needs a batch and a channel dim, got shape {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        dims, width = [0, *range(2, x.ndim)], x.shape[1]
        shape = [1, width] + [1] * (x.ndim - 2)
        count = x.new_full((1,), x.numel() / width)
        sums = self._sum_over_ranks(torch.cat([x.sum(dims), count]))
        mean, total = sums[:-1] / sums[-1], sums[-1].detach()
        # A second sum over the ranks: mean(x^2) - mean^2 in one would cancel where the mean is large.
        centred = x - mean.view(shape)
        variance = self._sum_over_ranks(centred.square().sum(dims)) / total
        self._track(mean.detach(), variance.detach(), total)
        normal = centred * torch.rsqrt(variance.view(shape) + self.eps)
        if self.affine:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        result: Tensor = normal.to(input.dtype)
        return result

    def _sum_over_ranks(self, local: Tensor) -> Tensor:
        total: Tensor = _SumOverRanks.apply(local, self._group)  # type: ignore[no-untyped-call]
        return total

    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        if not self.track_running_stats:
            return
        running_mean, running_var, counter = _running(self)
        counter.add_(1)
        momentum = counter.to(mean.dtype).reciprocal() if self.momentum is None else self.momentum
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(variance * count / (count - 1).clamp(min=1), momentum)


class _SumOverRanks(torch.autograd.Function):
    """All-reduce whose gradient is an all-reduce: each rank's output depends on every rank's input."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        total = tensor.clone()
        _all_reduce(total, group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone()
        _all_reduce(total, ctx.group)
        return total, None


def _all_reduce(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    if torch.compiler.is_compiling():
        dist.all_reduce(tensor, group=group)
        return
    count_collective("data", "all-reduce", dist.get_world_size(group), tensor)
    with phase("data.all_reduce"):
        dist.all_reduce(tensor, group=group)


def convert_sync_batch_norm(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Replace every batch norm by one that spans the data ranks; parameters, buffers and names stay."""
    for name, child in list(module.named_children()):
        if isinstance(child, _BatchNorm):
            setattr(module, name, SyncBatchNorm(child, group))
        else:
            convert_sync_batch_norm(child, group)


def batch_norm_hint(module: nn.Module, mode: str, micro_batch: int, num_ranks: int) -> str:
    """A hint for the user about batch norm in this job; empty when there is none."""
    if not any(isinstance(m, _BatchNorm) for m in module.modules()):
        return ""
    if mode == "sync" or micro_batch >= SMALL_MICRO_BATCH:
        return ""
    over_ranks = f', or set layout.batch_norm = "sync" to take them over all {num_ranks} data ranks'
    return (
        f"batch norm takes its statistics from micro-batches of {micro_batch} samples, so that the result is the same "
        f"for any number of workers; such small ones are noisy. Raise train.micro_batch to {SMALL_MICRO_BATCH} or "
        f"more{over_ranks if num_ranks > 1 else ''}."
    )
