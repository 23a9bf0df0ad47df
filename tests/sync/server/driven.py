"""Reducers with parameter servers, driven step by step in processes of their own, one of which is held up."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from closeranks.core.traffic import take_sent
from closeranks.optim.optimizer import Optimizer, freeze
from closeranks.parallel.process_group import RankGroup
from closeranks.sync.compress.compressed_reduction import CompressionSchedule
from closeranks.sync.config import CompressConfig
from closeranks.sync.local_sgd.sync_schedule import SyncSchedule
from closeranks.sync.reducers.local_parameters import local_parameters
from closeranks.sync.server.asynchronous import AsynchronousReducer, PushHeader
from closeranks.sync.server.compressed_push import PushCompression
from closeranks.sync.server.push import PHASE
from closeranks.sync.server.reducer import ServerReducer
from closeranks.sync.server.roles import Roles
from closeranks.sync.server.stale import StaleReducer
from tests.sync.strategies import CONFIG, ONE, Odd, build, loss

RATIO = 0.2
CAPS: dict[str, Any] = {"bucket_bytes": 600, "first_bucket_bytes": 200}


@dataclass
class Seen:
    """What one rank saw of a run."""

    began: list[float] = field(default_factory=list)
    """By step: when its forward began, on the clock that all processes of a machine share."""
    pushing: list[float] = field(default_factory=list)
    """By step: when its backward began, before anything of the step was sent."""
    versions: list[int] = field(default_factory=list)
    """By step: how many steps of updates its weights lacked."""
    applied: list[tuple[int, float]] = field(default_factory=list)
    """On a server of an asynchronous run: step and staleness of each push, as they came."""
    pushes: list[Tensor] = field(default_factory=list)
    """On a worker: its gradients of the last step as servers receive them, by bucket."""
    sums: list[Tensor] = field(default_factory=list)
    """On a server: those of the last step, by bucket."""
    residuals: list[Tensor] = field(default_factory=list)
    """On a worker: what its pushes have not sent, by parameter."""
    pushed_bytes: list[int] = field(default_factory=list)
    """By step."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    synchronized: list[dict[str, Tensor]] = field(default_factory=list)
    """The weights at each synchronization."""
    counters: set[float] = field(default_factory=set)
    """How many updates the optimizer counts."""


def make(
    kind: str, module: nn.Module, roles: Roles, bound: int, schedule: SyncSchedule, compress: str = "none"
) -> ServerReducer:
    """``compress``: how pushes are compressed from the second step on."""
    compression = PushCompression(CompressConfig(name=compress, ratio=RATIO), CompressionSchedule(num_warmup=1))  # type: ignore[arg-type]
    options: dict[str, Any] = {**CAPS, "compression": compression if compress != "none" else None}
    group, held = RankGroup(dist.get_rank(), dist.get_world_size()), local_parameters(module)
    if kind == "sync":
        return ServerReducer(held, group, roles, **options)
    chosen = StaleReducer if kind == "stale" else AsynchronousReducer
    return chosen(held, group, roles, **options, bound=bound, last_step=lambda step: schedule.next_sync(step) - 1)


def drive(
    kind: str, num_servers: int, num_steps: int, bound: int, every: int, ahead: int = 0, compress: str = "none"
) -> Seen:
    """Each worker computes micro-batch ``100 * step + rank`` in each step. Rank 0 is held up in the second step of each
    interval until rank 1 begins the step that is ``ahead`` further."""
    rank, roles = dist.get_rank(), Roles(dist.get_world_size() - num_servers, num_servers)
    schedule, module = SyncSchedule(every, 1, num_steps), build()
    chosen = freeze(module, CONFIG)
    reducer = make(kind, module, roles, bound, schedule, compress)
    optimizer = Optimizer(reducer.parameter_shards(), chosen, CONFIG, num_steps=100)
    factor, seen, store = torch.tensor(0.1, dtype=torch.float64), Seen(), dist.distributed_c10d._get_default_store()
    is_worker = roles.server_rank(rank) is None

    def apply(header: PushHeader, staleness: float) -> None:
        seen.applied.append((header.step, staleness))
        optimizer.step(header.step, reducer.gradients(), factor * header.weight, ONE)

    if isinstance(reducer, AsynchronousReducer):
        reducer.apply = apply
    for step in range(num_steps):
        reducer.begin_step(step)
        seen.began.append(time.monotonic())
        seen.versions.append(reducer.staleness if isinstance(reducer, StaleReducer) else 0)
        if is_worker:
            if rank == 1:
                store.set(f"began/{step}", "")
            elif rank == 0 and ahead and step % every == 1:
                store.wait([f"began/{step + ahead}"])
            seen.pushing.append(time.monotonic())
            _backward(reducer, module, 100 * step + rank)
        reducer.finish()
        if isinstance(reducer, AsynchronousReducer) and is_worker:
            reducer.send_header(1.0, 1.0)
        seen.sums = [gradient.clone() for gradient in reducer.gradients()]
        if kind != "async":
            optimizer.step(step, reducer.gradients(), factor, ONE)
        reducer.commit(ONE)
        seen.pushes = [push.pushed.clone() for push in reducer._pushes if push.pushed is not None]
        seen.pushed_bytes.append(take_sent().num_bytes.get(PHASE, 0))
        reducer.gather_parameters()
        reducer.release()
        if schedule.is_sync_step(step + 1):
            seen.synchronized.append({name: p.detach().clone() for name, p in module.named_parameters()})
    seen.residuals = [one.tensor.clone() for one in reducer.error_feedback()]
    seen.weights = seen.synchronized[-1]
    seen.counters = {tensor.item() for _, key, tensor in optimizer.state_tensors() if key == "step"}
    dist.barrier()
    return seen


def _backward(reducer: ServerReducer, module: Odd, number: int) -> None:
    total = loss(module, number)
    reducer.begin_backward(is_last=True)
    total.backward()
    reducer.end_backward()
