"""Tests distributed code: runs an ordinary function on every rank and returns what each rank returned.

Invariant: ``run_world`` returns the results of all ranks, or raises one error with the root cause first; a rank that
dies or hangs never makes it wait longer than its timeout, and no process outlives it.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, Literal

from closeranks.agent.detection.exit_status import describe_status
from closeranks.agent.detection.failure import is_consequence
from closeranks.core.system.environment import child_environment, set_world
from closeranks.core.system.linux import die_with_parent
from closeranks.core.world import World

GRACE_S = 1.0
"""How long the other ranks have to report after the first failure."""
_STACK_S = 2.0
_KINDS = ("died", "raised", "echoed", "hung")


@dataclass(frozen=True, slots=True)
class Failure:
    """How one rank failed."""

    rank: int
    kind: Literal["died", "raised", "echoed", "hung"]
    """``echoed``: it raised because a peer was gone."""
    detail: str
    """The traceback, the exit status in words, or the Python stacks of a rank that hung."""
    at: float
    """``time.monotonic()``: one clock for all processes of a host."""

    def __str__(self) -> str:
        return f"--- rank {self.rank} {self.kind} ---\n{self.detail}"


class WorldError(AssertionError):
    """One or more ranks raised, died or hung. ``failures`` is in causal order, the root cause first."""

    def __init__(self, failures: list[Failure]) -> None:
        self.failures = sorted(failures, key=lambda failure: (_KINDS.index(failure.kind), failure.at, failure.rank))
        super().__init__("\n".join(str(failure) for failure in self.failures))


def run_world(fn: Callable[..., Any], size: int, *args: Any, timeout_s: float = 240.0) -> list[Any]:
    """Call ``fn(*args)`` on every rank of a process group and return the results in rank order.

    Each rank is a process of its own with the default group formed (gloo, on the loopback interface), one thread, and
    this process's environment and working folder. ``fn`` must be a function of a module, and its arguments and results
    must pickle; tensors do. A size of 1 is an ordinary world. What ranks print is printed here when they are done.

        def add() -> float:
            total = torch.tensor(float(dist.get_rank()))
            dist.all_reduce(total)
            return total.item()

        def test_all_ranks_see_the_sum() -> None:
            assert run_world(add, 4) == [6.0] * 4

    Raises ``WorldError`` when a rank raises, dies or is not done after ``timeout_s``: with the traceback, the exit
    status, or the Python stacks of hung ranks, the root cause first. The first call of a process takes some seconds,
    in which a server imports torch; from then on ranks are forked from it.
    """
    with tempfile.TemporaryDirectory(prefix="closeranks-world-") as folder:
        ranks: list[_Rank] = []
        try:
            for rank in range(size):  # one by one: if a start fails, those started before must be ended
                ranks.append(_Rank(_RankSetup(rank, size, folder, child_environment(1), timeout_s), fn, args))  # noqa: PERF401
            return _gather(ranks, time.monotonic() + timeout_s)
        finally:
            for one in ranks:
                one.end()
            _print_outputs(folder, size)


@dataclass(frozen=True, slots=True)
class _RankSetup:
    """What a rank receives before it starts."""

    rank: int
    size: int
    folder: str
    environment: Mapping[str, str]
    timeout_s: float

    @property
    def output(self) -> Path:
        return Path(self.folder) / f"rank-{self.rank:05d}.log"


class _Rank:
    """One rank, from the caller's side."""

    def __init__(self, setup: _RankSetup, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        context = _server()
        self.rank = setup.rank
        self.reports, report = context.Pipe(duplex=False)
        self.stacks, stack = context.Pipe(duplex=False)
        self._process: ForkServerProcess = context.Process(target=_run_rank, args=(setup, report, stack, fn, args))
        with report, stack:
            self._process.start()

    def result(self) -> Any:
        """What the rank returned, or the ``Failure`` that it sent or that follows from its exit."""
        try:
            return pickle.loads(self.reports.recv_bytes())
        except (EOFError, OSError):
            self._process.join()
            return Failure(self.rank, "died", describe_status(self._process.exitcode), time.monotonic())
        except Exception:
            detail = f"What it returned cannot be unpickled here.\n{traceback.format_exc()}"
            return Failure(self.rank, "raised", detail, time.monotonic())

    def ask_for_stack(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGUSR1)

    def stack(self) -> str:
        """What faulthandler answered; it does so even inside a blocked collective."""
        text, wait_s = b"", _STACK_S
        while wait([self.stacks], wait_s) and (piece := os.read(self.stacks.fileno(), 1 << 16)):
            text, wait_s = text + piece, 0.1
        return text.decode(errors="replace") or "(no Python stack: it had not started)"

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self.reports.close()
        self.stacks.close()


@cache
def _server() -> ForkServerContext:
    """Forks ranks from a process that has imported what most of them need, which would take each a second or more."""
    context = get_context("forkserver")
    runner = ["pytest"] if "pytest" in sys.modules else []
    modules = ("torch._dynamo", "torch.distributed.fsdp", "numpy.random", "numpy.ma", "closeranks.run.worker.entry")
    context.set_forkserver_preload([*runner, *modules, "closeranks.testing.forkserver_preload"])
    return context


def _gather(ranks: list[_Rank], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[Failure] = []
    waiting = list(ranks)
    while waiting:
        ready = wait([rank.reports for rank in waiting], max(0.0, deadline - time.monotonic()))
        if not ready:
            failures += [] if failures else _hung(waiting)
            break
        for rank in [rank for rank in waiting if rank.reports in ready]:
            waiting.remove(rank)
            result = rank.result()
            if isinstance(result, Failure):
                failures.append(result)
                deadline = min(deadline, time.monotonic() + GRACE_S)
            results[rank.rank] = result
    if failures:
        raise WorldError(failures)
    return [results[rank.rank] for rank in ranks]


def _hung(ranks: list[_Rank]) -> list[Failure]:
    for rank in ranks:
        rank.ask_for_stack()
    return [Failure(rank.rank, "hung", rank.stack(), time.monotonic()) for rank in ranks]


def _print_outputs(folder: str, size: int) -> None:
    for rank in range(size):
        path = Path(folder) / f"rank-{rank:05d}.log"
        for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
            print(f"[rank {rank}] {line}")


def _run_rank(
    setup: _RankSetup, report: Connection, stack: Connection, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """Main function of a rank. When done it waits to be killed: leaving early would break its peers' connections."""
    faulthandler.enable(file=2)  # a crash in native code ends the rank's output with its stacks
    faulthandler.register(signal.SIGUSR1, stack.fileno())
    die_with_parent(os.getppid())
    try:
        _form_group(setup)
        payload = pickle.dumps(fn(*args))
    except BaseException as error:
        kind: Literal["raised", "echoed"] = "echoed" if is_consequence(error) else "raised"
        payload = pickle.dumps(Failure(setup.rank, kind, traceback.format_exc(), time.monotonic()))
    sys.stdout.flush()
    sys.stderr.flush()
    report.send_bytes(payload)
    signal.pause()


def _form_group(setup: _RankSetup) -> None:
    output = os.open(setup.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(setup.environment)
    # Gloo takes the interface that the host's name resolves to, which in a container may lead nowhere.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    set_world(World(setup.rank, setup.size, setup.rank, setup.size, launcher="testing"))
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore  # torch.distributed offers it, but not to type checkers

    torch.set_num_threads(1)
    store = FileStore(f"{setup.folder}/store", setup.size)  # a file, not a port: nothing to collide with
    timeout = timedelta(seconds=setup.timeout_s + 60.0)  # longer than ours, so that a hang is ours to report
    dist.init_process_group("gloo", store=store, rank=setup.rank, world_size=setup.size, timeout=timeout)
