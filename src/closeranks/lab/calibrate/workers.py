"""Measures what workers of one host do to each other: how much slower each computes, and how long collectives take.

Workers are processes in a Gloo group, or in one of NCCL where the host has several GPUs. Invariant: times are of all
ranks at once, as long as the slowest takes, over enough repetitions that ranks which share a core have each had a turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from closeranks.facts.calibration import CollectiveTime, WorkerSlowdown
from closeranks.sync.collectives.torch_compat import all_gather_flat, reduce_scatter_flat
from closeranks.testing.world import run_world

OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter", "send")
_SIZES = tuple(1 << power for power in range(10, 27, 4))
_TURN_S = 0.3
"""How long workers compute beside each other: a scheduler gives them turns of a few milliseconds."""
_COLLECTIVE_S = 0.15
_LEAST_CALLS, _MOST_CALLS = 3, 200
_PRODUCT = (256, 256, 256)
_ELEMENTS = 1 << 20
_TIMEOUT_S = 90.0


@dataclass(frozen=True, slots=True)
class LoopTimes:
    """Mean seconds of one repetition of the two loops that workers run beside each other."""

    product_s: float
    memory_s: float


def measure_alone(num_threads: int) -> LoopTimes:
    """In this process, with nobody beside it."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        return _loops(lambda: None)
    finally:
        torch.set_num_threads(before)


def measure_together(num_workers: int, num_threads: int) -> LoopTimes:
    ranks: list[LoopTimes] = run_world(_loops_of_rank, num_workers, num_threads, timeout_s=_TIMEOUT_S)
    return LoopTimes(max(one.product_s for one in ranks), max(one.memory_s for one in ranks))


def fastest(times: Sequence[LoopTimes]) -> LoopTimes:
    return LoopTimes(min(one.product_s for one in times), min(one.memory_s for one in times))


def slowdown(num_workers: int, base: LoopTimes, found: LoopTimes) -> WorkerSlowdown:
    return WorkerSlowdown(num_workers, found.product_s / base.product_s, found.memory_s / base.memory_s)


def measure_collectives(num_ranks: int, *, on_gpus: bool = False) -> tuple[CollectiveTime, ...]:
    ranks = run_world(_collectives_of_rank, num_ranks, on_gpus, timeout_s=_TIMEOUT_S)
    times: Sequence[Sequence[float]] = list(zip(*ranks, strict=True))
    keys = [(operation, size) for operation in OPERATIONS for size in _SIZES]
    return tuple(
        CollectiveTime(operation, num_ranks, size, max(seconds))
        for (operation, size), seconds in zip(keys, times, strict=True)
    )


def _loops_of_rank(num_threads: int) -> LoopTimes:
    torch.set_num_threads(num_threads)
    return _loops(dist.barrier)


def _loops(meet: Callable[[], object]) -> LoopTimes:
    m, n, k = _PRODUCT
    left, right = torch.randn(m, k), torch.randn(n, k)
    source, target = torch.randn(_ELEMENTS), torch.empty(_ELEMENTS)
    times = []
    actions: tuple[Callable[[], object], ...] = (
        lambda: F.linear(left, right),
        lambda: torch.mul(source, 1.5, out=target),
    )
    for action in actions:
        action()
        meet()
        times.append(_mean_s(action, _TURN_S))
    return LoopTimes(*times)


def _mean_s(action: Callable[[], object], turn_s: float) -> float:
    began_at, count = time.perf_counter(), 0
    while (now := time.perf_counter()) - began_at < turn_s or not count:
        action()
        count += 1
    return (now - began_at) / count


def _collectives_of_rank(on_gpus: bool) -> list[float]:
    rank, size = dist.get_rank(), dist.get_world_size()
    device, group = torch.device("cpu"), dist.group.WORLD
    if on_gpus:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        group = dist.new_group(backend="nccl", timeout=timedelta(seconds=_TIMEOUT_S))
    times = []
    for operation in OPERATIONS:
        for num_bytes in _SIZES:
            count = max(1, num_bytes // 4 // size) * size
            whole, part = torch.ones(count, device=device), torch.ones(count // size, device=device)
            times.append(_collective_s(partial(_call, operation, whole, part, group), device))
    return times


def _call(operation: str, whole: Tensor, part: Tensor, group: dist.ProcessGroup | None) -> None:
    if operation == "all-reduce":
        dist.all_reduce(whole, group=group)
    elif operation == "all-gather":
        all_gather_flat(whole, part, group=group)
    elif operation == "reduce-scatter":
        reduce_scatter_flat(part, whole, group=group)
    elif (rank := dist.get_rank()) == 0:
        dist.send(whole, 1, group=group)
    elif rank == 1:
        dist.recv(whole, 0, group=group)


def _collective_s(call: Callable[[], None], device: torch.device) -> float:
    """All ranks make the same number of calls: that which the slowest one's first call asks for."""
    call()
    dist.barrier()
    first = torch.tensor(_timed(call, 1, device))
    dist.all_reduce(first, op=dist.ReduceOp.MAX)
    count = max(_LEAST_CALLS, min(_MOST_CALLS, int(_COLLECTIVE_S / max(first.item(), 1e-6))))
    dist.barrier()
    return _timed(call, count, device)


def _timed(call: Callable[[], None], count: int, device: torch.device) -> float:
    began_at = time.perf_counter()
    for _ in range(count):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began_at) / count
