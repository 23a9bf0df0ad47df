"""Tunes the bucket size to the measured network.

At the start of a run all ranks time a few all-reduces, fit the link's latency and bandwidth to the times, and choose
the bucket size that leaves the shortest wait after backward (``collective_cost.best_bucket_bytes``). Invariants: every
figure that decides anything is the maximum over all ranks of the world, so that all of them make the same choice and
the same number of measurements; measuring leaves no tensor behind and draws no random number. The size affects the
numerics: it is measured once in a run.

It takes a few milliseconds on a fast link. Sizes grow as long as the next one is expected to stay within the budget, so
that a link of 100 Mbit/s is measured in about a second.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from closeranks.core.protocols import LocalParameter
from closeranks.facts.communication.collective_cost import Link, NetworkModel, best_bucket_bytes
from closeranks.sync.reducers.local_parameters import CommGroup

_KIB, _MIB = 1 << 10, 1 << 20
SIZES = (_KIB, 64 * _KIB, _MIB, 8 * _MIB)
"""Bytes of the all-reduces to time. The first two are always timed."""
NUM_REPS = 5
BUDGET_S = 0.8
"""Time limit for all repetitions of one size."""
_LEAST_LATENCY_S = 1e-7
_SHARE_OF_BACKWARD = 2 / 3


class AllReduceSample(NamedTuple):
    """One size, and how long its all-reduce took."""

    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class BucketTuning:
    """The bucket size in use."""

    bucket_mib: float = 0.0
    """0: no buckets, for instance with one data rank."""
    link: Link | None = None
    """The measured link; None where the size was configured, or taken over from earlier in the run."""


@dataclass(frozen=True, slots=True)
class BackwardWork:
    """What one rank has to send, and the backward that can hide it."""

    gradient_bytes: int
    backward_s: float
    """Time of one micro-batch's backward, since gradients are reduced in the last one's; 0 where it is unknown or
    nothing overlaps."""


def gradient_bytes(held: Iterable[LocalParameter]) -> int:
    trained = (one.parameter for one in held if one.parameter.requires_grad)
    return sum(parameter.numel() * parameter.element_size() for parameter in trained)


def backward_s(flops: float, flops_per_s: float) -> float:
    """Two thirds of the FLOPs of forward and backward, at the speed of a large matrix product. This errs on the short
    side, which makes buckets too large rather than too small. 0 where either is unknown: then no overlap is assumed."""
    return _SHARE_OF_BACKWARD * flops / flops_per_s if flops_per_s > 0 else 0.0


def tune_bucket_size(data: CommGroup, world: CommGroup, device: torch.device, work: BackwardWork) -> BucketTuning:
    """A collective of the world, whose data groups all measure at the same time, as in training."""
    link = fit_link(time_all_reduces(data, world, device), data.size)
    total, behind_s = _largest((float(work.gradient_bytes), work.backward_s), world, device)
    size = best_bucket_bytes(total, behind_s, NetworkModel.flat(data.size, link))
    return BucketTuning(size / _MIB, link)


def time_all_reduces(data: CommGroup, world: CommGroup, device: torch.device) -> list[AllReduceSample]:
    """Median times of a few all-reduces; the slowest rank's time counts."""

    def seconds_of(num_bytes: int) -> float:
        payload = torch.zeros(num_bytes // 4, device=device)
        median_s = statistics.median(_timed(payload, data) for _ in range(NUM_REPS))
        (agreed_s,) = _largest((median_s,), world, device)
        return agreed_s

    _timed(torch.zeros(1, device=device), data)  # connections are made by the first
    return sample_sizes(seconds_of)


def sample_sizes(seconds_of: Callable[[int], float]) -> list[AllReduceSample]:
    """Smallest first, as far as the budget allows."""
    samples: list[AllReduceSample] = []
    for size in SIZES:
        if NUM_REPS * expected_s(samples, size) > BUDGET_S:
            break
        samples.append(AllReduceSample(size, seconds_of(size)))
    return samples


def expected_s(samples: Sequence[AllReduceSample], num_bytes: int) -> float:
    """The expected time of the next size, extrapolated linearly from the last two; 0 for the first two sizes."""
    if len(samples) < 2:
        return 0.0
    (small, early_s), (large, late_s) = samples[-2:]
    return late_s + max(late_s - early_s, 0.0) / (large - small) * (num_bytes - large)


def fit_link(samples: Sequence[AllReduceSample], num_ranks: int) -> Link:
    """The link on which a ring all-reduce of ``num_ranks`` ranks takes these times: a + b n by least squares of
    relative errors, where a is 2 (p-1) latencies and b n the time of the 2 (p-1)/p n bytes that a rank sends."""
    points = [(1 / max(seconds, 1e-9) ** 2, size, seconds) for size, seconds in samples]
    total = sum(weight for weight, _, _ in points)
    mean_n = sum(weight * size for weight, size, _ in points) / total
    mean_s = sum(weight * seconds for weight, _, seconds in points) / total
    spread = sum(weight * (size - mean_n) ** 2 for weight, size, _ in points)
    slope = sum(weight * (size - mean_n) * (seconds - mean_s) for weight, size, seconds in points) / spread
    if slope <= 0:  # noise: only the time of the largest size is known
        slope = max(samples[-1].seconds, 1e-9) / samples[-1].num_bytes
    num_rounds = 2 * (num_ranks - 1)
    latency_s = max((mean_s - slope * mean_n) / num_rounds, _LEAST_LATENCY_S)
    return Link(latency_s, num_rounds / num_ranks / slope)


def _timed(payload: Tensor, group: CommGroup) -> float:
    _wait_for(payload.device)
    began_at = time.perf_counter()
    dist.all_reduce(payload, group=group.process_group)
    _wait_for(payload.device)
    return time.perf_counter() - began_at


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _largest(values: Sequence[float], world: CommGroup, device: torch.device) -> tuple[float, ...]:
    """The maximum of each value over all ranks."""
    agreed = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=world.process_group)
    return tuple(agreed.tolist())
