"""Builds the parts of a plan with several processes.

Each process takes the next unassigned part. Invariants: no process outlives the call; if a process dies, the build ends
with an error that names its pid, its exit status and its part; a part that was not reported as done does not count.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from closeranks.core.errors import CloseranksError, RunFailed, decode
from closeranks.core.system.environment import child_environment
from closeranks.data.building.build_spec import BuildSpec, PartDone

_GO_ON = "Finished shards are kept: run the same command again to continue."


@dataclass(slots=True)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    part: int = -1


def build_parts(
    spec: BuildSpec,
    todo: Sequence[int],
    num_processes: int,
    on_bytes: Callable[[int], None],
    on_part: Callable[[PartDone], None],
) -> None:
    """``on_part`` is called in this process, in the order in which parts are finished."""
    waiting = iter(todo)
    with _start_workers(spec, min(num_processes, len(todo))) as workers:
        by_connection = {worker.connection: worker for worker in workers}
        busy = [worker.connection for worker in workers if _send_next(worker, waiting)]
        while busy:
            for ready in wait(busy):
                worker = by_connection[ready]  # type: ignore[index]
                kind, value = _receive(worker)
                if kind == "bytes":
                    on_bytes(value)
                elif kind == "failed":
                    raise _failure(value)
                else:
                    on_part(value)
                    if not _send_next(worker, waiting):
                        busy.remove(worker.connection)


def _send_next(worker: _Worker, waiting: Iterator[int]) -> bool:
    index = next(waiting, None)
    if index is None:
        return False
    worker.part = index
    try:
        worker.connection.send(index)
    except OSError as error:
        raise _death(worker) from error
    return True


def _receive(worker: _Worker) -> tuple[str, Any]:
    try:
        kind, value = worker.connection.recv()
    except (EOFError, OSError) as error:
        raise _death(worker) from error
    return kind, value


def _failure(fields: dict[str, Any]) -> CloseranksError:
    error = decode(fields)
    error.fix = error.fix or _GO_ON
    return error


def _death(worker: _Worker) -> RunFailed:
    code = worker.process.wait()
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    guess = " (the kernel does that when memory runs out)" if code == -signal.SIGKILL else ""
    what = f"the build's process {worker.process.pid} {how}{guess} while it built part {worker.part}"
    return RunFailed(f"{what}. {_GO_ON}")


@contextmanager
def _start_workers(spec: BuildSpec, count: int) -> Iterator[list[_Worker]]:
    workers: list[_Worker] = []
    try:
        with _ignoring_interrupts():
            while len(workers) < count:
                workers.append(_start_worker())
        for worker in workers:
            try:
                worker.connection.send(spec)
            except OSError as error:
                raise _death(worker) from error
        yield workers
    finally:
        for worker in workers:
            worker.connection.close()
            worker.process.kill()
        for worker in workers:
            worker.process.wait()


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Processes started inside ignore Ctrl-C, which a terminal sends to the whole group: this process handles it, and
    an interpreter that is still importing would print tracebacks. In this process, Ctrl-C is deferred to the end of the
    block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker() -> _Worker:
    """One thread each: the processes are the parallelism, and the libraries' own threads would only compete."""
    ours, theirs = socket.socketpair()
    with theirs:
        fd = theirs.fileno()
        command = [sys.executable, "-P", "-m", "closeranks.data.building.worker", str(fd), str(os.getpid())]
        environment = {**child_environment(1), "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
        process = subprocess.Popen(command, pass_fds=[fd], env=environment, stdin=subprocess.DEVNULL)
    return _Worker(process, Connection(ours.detach()))
