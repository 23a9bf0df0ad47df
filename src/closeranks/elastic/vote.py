"""The vote: one all-reduce per step that decides whether all ranks take the step, and sums its loss and metrics.

[Note: the vote] ONE small all-reduce per step carries everything the ranks must agree on: summed loss and weight, the
squared gradient norm, whether every value was finite, the requests made to the run (``core.requests``), how many
samples were left out, and which parameters had a gradient. From the sum, the device computes the one factor that scales
all gradients (1/weight, loss scale and clipping folded together) and the flag that gates the optimizer. The host reads
the result later, so that it never waits for an accelerator within a step.

Invariant: every rank holds the same bits of the verdict, so all take the step or none does, and all stop together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from closeranks.core import requests
from closeranks.core.protocols import ReduceGroup
from closeranks.core.requests import RunRequest

NUM_DERIVED = 4  # taken, factor, norm, loss scale
WEIGHT, NONFINITE = 1, 3  # indices into the sums
_NUM_BAD = 4
_NUM_FIXED = 5 + requests.NUM_SLOTS  # sums that every vote has, before those of the metrics
REQUESTS = slice(_NUM_BAD + 1, _NUM_FIXED)
_TINY = 1e-6  # as in torch's own clipping


@dataclass(slots=True)
class Ballot:
    """What one rank contributes to the vote: sums over its own micro-batches, and what components add."""

    loss: Tensor
    weight: Tensor
    norm_squared: Tensor
    """All tensors are 0-dim float64 on one device. The squared norm of the summed, still unscaled gradients that this
    rank reports: each value of the model is reported by exactly one rank, so the sum over ranks is the model's."""
    metrics: Mapping[str, Tensor]
    requests: frozenset[RunRequest] = frozenset()
    """Requests that reached this rank."""
    num_bad: int = 0
    """Unusable samples of this step that this rank reports."""
    extra: dict[str, Tensor] = field(default_factory=dict)
    """Further numbers that components want summed over the ranks: one-dimensional, float64, the same names in the same
    order and the same lengths on every rank; the vote does not interpret them."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The verdict as the host reads it."""

    loss: float
    weight: float
    """What the loss was divided by; 1 if no sample counted."""
    is_empty: bool
    """Whether no sample counted: all were bad."""
    grad_norm: float
    loss_scale: float
    taken: bool
    requests: frozenset[RunRequest]
    """Requests that reached any rank."""
    num_bad: int
    metrics: dict[str, float]
    extra: dict[str, list[float]] = field(default_factory=dict)
    """The sums of ``Ballot.extra``."""


class Verdict:
    """The result of a vote: ``factor`` and ``taken`` stay on the device, ``read`` waits for the copy on the host."""

    is_closed: bool = True
    """Whether it can be read; see [Note: local SGD votes] in ``elastic.local_sgd_vote`` for one that cannot yet."""

    def __init__(self, sums: Tensor, settled: Tensor, names: Sequence[str], extra: Mapping[str, int]) -> None:
        """``extra``: how many numbers each entry of ``Ballot.extra`` has."""
        self._names, self._sizes = names, extra
        self.taken, self.factor = settled[0], settled[1]
        self.extra = dict(zip(extra, sums[_NUM_FIXED + len(names) :].split(list(extra.values())), strict=True))
        """The sums of ``Ballot.extra``, on the device."""
        self._event: torch.cuda.Event | None = None
        self._host = torch.cat([sums, settled])
        if sums.is_cuda:
            on_device, self._host = self._host, torch.empty_like(self._host, device="cpu", pin_memory=True)
            self._host.copy_(on_device, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> StepOutcome:
        """Sync point on CUDA: returns once the device has finished this step's vote."""
        if self._event is not None:
            self._event.synchronize()
        values = self._host.tolist()
        sums, (taken, _, norm, loss_scale) = values[:-NUM_DERIVED], values[-NUM_DERIVED:]
        loss, weight, asked, rest = sums[0], sums[WEIGHT], sums[REQUESTS], sums[_NUM_FIXED:]
        metrics, numbers = rest[: len(self._names)], iter(rest[len(self._names) :])
        is_empty, weight = weight == 0, weight or 1.0
        return StepOutcome(
            loss=loss / weight,
            weight=weight,
            is_empty=is_empty,
            grad_norm=norm,
            loss_scale=loss_scale,
            taken=taken > 0,
            requests=requests.decode(asked),
            num_bad=round(sums[_NUM_BAD]),
            metrics={name: value / weight for name, value in zip(self._names, metrics, strict=True)},
            extra={name: list(islice(numbers, size)) for name, size in self._sizes.items()},
        )


class Vote:
    """Holds one vote per step among the ranks of a group."""

    def __init__(self, group: ReduceGroup, metrics: Sequence[str], *, clip: float) -> None:
        self._group = group
        self._metrics = tuple(metrics)
        self._clip = clip

    def cast(self, ballot: Ballot, loss_scale: Tensor, *, is_sync_step: bool = True) -> Verdict:
        """Every rank calls this once per step; the only collective besides those of the gradients.

        ``is_sync_step`` matters under Local SGD and DiLoCo: whether all replicas synchronize after this step."""
        return Verdict(*self._settled(ballot, loss_scale), self._metrics, sizes_of(ballot))

    def _settled(self, ballot: Ballot, loss_scale: Tensor) -> tuple[Tensor, Tensor]:
        """The sums over the group, and what follows from them."""
        sums = self._group.sum(self._fill(ballot))
        if sums.is_cuda:
            return sums, settle_on_device(sums, loss_scale, self._clip)
        _, weight, norm_squared, nonfinite = sums[:4].tolist()
        settled = settle(weight, norm_squared, nonfinite, loss_scale.item(), self._clip)
        return sums, torch.tensor(settled, dtype=torch.float64)

    def _fill(self, ballot: Ballot) -> Tensor:
        """This rank's ballot as one float64 vector: loss, weight, norm, nonfinite, samples left out, requests,
        metrics, extra."""
        nonfinite = ~(ballot.norm_squared + ballot.loss).isfinite()
        numbers = [ballot.num_bad, *requests.encode(ballot.requests)]
        counts = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        metrics = [ballot.metrics[name] for name in self._metrics]
        votes = torch.stack([ballot.loss, ballot.weight, ballot.norm_squared, nonfinite.double(), *metrics])
        counts = counts.to(votes.device, non_blocking=True)
        return torch.cat([votes[:4], counts, votes[4:], *ballot.extra.values()])


def sizes_of(ballot: Ballot) -> dict[str, int]:
    return {name: len(numbers) for name, numbers in ballot.extra.items()}


def settle(
    weight: float, norm_squared: float, nonfinite: float, loss_scale: float, clip: float
) -> tuple[float, float, float, float]:
    """From the sums of all ranks: taken (1 or 0), the factor of every gradient, the true gradient norm, the loss scale.

    A step is taken if every rank saw finite values and at least one sample counted. The factor of a skipped step is 1,
    so that no NaN enters arithmetic that the flag then discards.
    """
    divisor = weight * loss_scale
    norm = math.sqrt(norm_squared) / divisor if divisor and norm_squared >= 0 else math.nan
    if nonfinite or not math.isfinite(norm):
        return 0.0, 1.0, norm, loss_scale
    shrink = min(1.0, clip / (norm + _TINY)) if clip > 0 else 1.0
    return 1.0, shrink / divisor, norm, loss_scale


def settle_on_device(sums: Tensor, loss_scale: Tensor, clip: float) -> Tensor:
    """``settle`` on the device, without a host synchronization."""
    weight, norm_squared, nonfinite = sums[WEIGHT], sums[2], sums[NONFINITE]
    scale = loss_scale.to(sums.dtype)
    divisor = weight * scale
    norm = norm_squared.sqrt() / divisor
    taken = (nonfinite == 0) & norm.isfinite()
    shrink = (clip / (norm + _TINY)).clamp(max=1.0) if clip > 0 else torch.ones_like(norm)
    factor = torch.where(taken, shrink / divisor, torch.ones_like(norm))
    return torch.stack([taken.to(sums.dtype), factor, norm, scale])
