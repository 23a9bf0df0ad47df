"""A process that has imported torch and forks small gloo worlds on request, to be hung, stopped and slowed.

``open_world_forker`` starts it; each line on its stdin is the JSON of an ``Order``, and a line with the ranks' pids
comes back. The ranks write the shared progress that they find under the given paths and their stacks, when asked, into
files.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist

from closeranks.agent.detection.progress import SharedProgress, WorkerPhase
from closeranks.core.system.linux import ThreadClock, die_with_parent
from closeranks.run.step.step_timer import CpuStopwatch

HUNG_STEP = 12
WORK_S = 0.01


@dataclass(frozen=True)
class Order:
    progress_paths: list[str]
    folder: str
    kind: str = "well"
    """How rank 1 ends up: see ``_hang``; ``quota`` sends it into a control group."""
    is_inside: bool = False
    """Whether a collective is inside the forward, as with sharded weights."""
    group: str = ""
    """The control group's list of processes."""


def main() -> None:
    torch.set_num_threads(1)
    torch.ones(8, 8) @ torch.ones(8, 8)
    print("ready", flush=True)
    for line in sys.stdin:
        order = Order(**json.loads(line))
        pids = [_fork(order, rank) for rank in range(len(order.progress_paths))]
        print(json.dumps(pids), flush=True)


def _fork(order: Order, rank: int) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        die_with_parent(parent)
        _run_rank(order, rank)
    finally:
        os._exit(1)


def _run_rank(order: Order, rank: int) -> None:
    stacks = Path(order.folder, f"stacks-{rank}").open("w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stacks)
    progress = SharedProgress(os.open(order.progress_paths[rank], os.O_RDWR))
    store = dist.FileStore(str(Path(order.folder, "store")), len(order.progress_paths))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(order.progress_paths))
    if order.kind == "quota" and rank == 1:
        Path(order.group).write_text(str(os.getpid()))
    stopwatch = CpuStopwatch(ThreadClock() if order.is_inside else time.perf_counter)
    step = 0
    while True:
        step += 1
        _train(order, rank, step, progress, stopwatch)


def _train(order: Order, rank: int, step: int, progress: SharedProgress, stopwatch: CpuStopwatch) -> None:
    progress.write(step, WorkerPhase.DATA)
    progress.write(step, WorkerPhase.COMPUTE)
    stopwatch.start()
    _compute(WORK_S if order.kind == "quota" else WORK_S / 10)
    if rank == 1 and step == HUNG_STEP:
        _hang(order.kind)
    if order.is_inside:
        dist.all_reduce(torch.ones(1000))
        _compute(WORK_S if order.kind == "quota" else 0.0)
    progress.micro_batch_done()
    stopwatch.stop(1)
    progress.write(step, WorkerPhase.REDUCE)
    dist.all_reduce(torch.ones(1000))
    progress.write(step, WorkerPhase.UPDATE)
    for seconds in stopwatch.pop_times():
        progress.note_compute_time(seconds)
    if order.kind == "well" and step % 50 == 0:
        progress.write(step, WorkerPhase.EVALUATE)
        time.sleep(0.3)


def _compute(seconds: float) -> None:
    """A fixed amount of work, about so long on an idle processor."""
    sheet = torch.ones(64, 64)
    for _ in range(int(seconds * 60_000)):
        sheet = torch.mm(sheet, sheet).clamp_(max=1.0)


def _hang(kind: str) -> None:
    match kind:
        case "sleep":
            time.sleep(1000)
        case "collective":
            dist.recv(torch.ones(1), src=0)
        case "busy":
            re.match(r"(a+)+$", "a" * 60 + "b")
        case "lock held":
            ctypes.PyDLL(None).sleep(1000)
        case "deadlock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()


# --- the test's side


@dataclass
class WorldForker:
    """Forks worlds that hang; one import of torch for all of them."""

    stdin: IO[str]
    stdout: IO[str]

    def fork(self, order: Order) -> list[int]:
        """The processes of a new world, by rank."""
        self.stdin.write(json.dumps(asdict(order)) + "\n")
        self.stdin.flush()
        pids: list[int] = json.loads(self.stdout.readline())
        return pids


@contextmanager
def open_world_forker() -> Iterator[WorldForker]:
    command = [sys.executable, "-c", "from tests.agent.world_forker import main; main()"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    root, pipe = Path(__file__).parents[2], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment, cwd=root) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield WorldForker(process.stdin, process.stdout)
        process.kill()  # the kernel ends its children with it
