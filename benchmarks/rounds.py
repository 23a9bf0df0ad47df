"""How are contenders timed so that a noisy machine cannot favour one? All live in the same processes and take turns.

In each round every contender takes a few steps, beginning with another one each time; what is compared is always within
a round. Invariant: every rank goes through the same turns in the same order, and every contender takes equally many
steps.
"""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

import torch
import torch.distributed as dist
from contenders import Closeranks, Contender, hand_written
from peers import PEERS
from workload import Workload, logged_losses

from closeranks.agent.detection.progress import SharedProgress, create_progress_fd
from closeranks.agent.workers.worker_link import WorkerLink
from closeranks.run.worker.agent_client import configure_worker


@dataclass(frozen=True, slots=True)
class Plan:
    """What the ranks shall do."""

    workload: Workload
    target_ms: float
    """How long a step should be at least: the batch is chosen for it, unless ``workload.batch`` says otherwise."""
    num_rounds: int
    num_steps: int
    """Steps of a turn."""
    peers: tuple[str, ...]
    agent: str
    """Path of the socket at which the stand-in for the agent listens."""


@dataclass(frozen=True, slots=True)
class Timings:
    """What one rank measured of each contender's turns, round by round, and the losses rank 0 logged."""

    batch: int
    seconds: dict[str, list[float]]
    cpu_seconds: dict[str, list[float]]
    """Processor time of the whole process: what other programs do on the machine does not add to it."""
    losses: dict[str, list[float]]


def order(names: Sequence[str], round_number: int) -> tuple[str, ...]:
    """Every contender comes first, second, ... equally often."""
    shift = round_number % len(names)
    return (*names[shift:], *names[:shift])


def run_rank(plan: Plan) -> Timings:
    # DDP renamed the option in torch 2.13; both names stand in the range we support.
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
    _tell_peers_where_they_are()
    _connect_to_agent(plan.agent)
    workload = plan.workload
    if workload.batch == 0:
        workload = replace(workload, batch=_calibrate(workload, plan.target_ms))
    contenders = {**hand_written(workload), "closeranks": Closeranks(workload)}
    contenders |= {name: PEERS[name][1](workload) for name in plan.peers}
    for contender in contenders.values():
        contender.take_steps(plan.num_steps)
    seconds, cpu_seconds = _take_rounds(contenders, plan)
    for contender in contenders.values():
        contender.close()
    paths = {name: contender.log_path for name, contender in contenders.items()}
    losses = {name: logged_losses(path) for name, path in paths.items()} if dist.get_rank() == 0 else {}
    return Timings(workload.batch, seconds, cpu_seconds, losses)


def _take_rounds(contenders: dict[str, Contender], plan: Plan) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Wall and processor seconds of every turn."""
    wall: dict[str, list[float]] = {name: [] for name in contenders}
    cpu: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(plan.num_rounds):
        for name in order(list(contenders), number):
            dist.barrier()
            began_at, cpu_before = time.perf_counter(), time.process_time()
            contenders[name].take_steps(plan.num_steps)
            wall[name].append(time.perf_counter() - began_at)
            cpu[name].append(time.process_time() - cpu_before)
    return wall, cpu


def _calibrate(workload: Workload, target_ms: float) -> int:
    """The batch whose step takes the target by a plain loop, with a margin: a quiet machine must not fall below."""
    small, large = 1, 4
    base_s, more_s = (_step_seconds(replace(workload, batch=batch)) for batch in (small, large))
    per_sample_s = max((more_s - base_s) / (large - small), 1e-5)
    wanted_s = 1.2 * target_ms / 1000
    return max(1, small + ceil((wanted_s - base_s) / per_sample_s))


def _step_seconds(workload: Workload) -> float:
    """The fastest of a few steps of the slower rank; ranks compute at once, as they will."""
    model = workload.model()
    optimizer = workload.optimizer(model)
    best_s = float("inf")
    for indices in workload.indices(dist.get_rank())[:5]:
        began_at = time.perf_counter()
        tokens = workload.source.read(indices)["tokens"].long()
        (model(tokens[:, :-1], tokens[:, 1:]) / workload.num_targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        best_s = min(best_s, time.perf_counter() - began_at)
    slowest = torch.tensor(best_s)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def _tell_peers_where_they_are() -> None:
    """As torchrun would. The group exists already; the address is never used, but asked for."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, GROUP_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", TORCHELASTIC_RUN_ID="overhead")


def _connect_to_agent(path: str) -> None:
    """closeranks talks to an agent in every step: events over a socket, progress in shared memory. So it does here."""
    endpoint = socket.socket(socket.AF_UNIX)
    endpoint.connect(path)
    configure_worker(link=WorkerLink(endpoint, SharedProgress(create_progress_fd())))
