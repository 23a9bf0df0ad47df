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
class _Hand:
    process: subprocess.Popen[bytes]
    connection: Connection
    part: int = -1


def build_parts(
    blueprint: BuildSpec,
    todo: Sequence[int],
    num_processes: int,
    on_bytes: Callable[[int], None],
    on_part: Callable[[PartDone], None],
) -> None:
    """``on_part`` is called in this process, in the order in which parts are finished."""
    waiting = iter(todo)
    with _hands(blueprint, min(num_processes, len(todo))) as hands:
        by_connection = {hand.connection: hand for hand in hands}
        busy = [hand.connection for hand in hands if _send_next(hand, waiting)]
        while busy:
            for ready in wait(busy):
                hand = by_connection[ready]  # type: ignore[index]
                word, value = _hear(hand)
                if word == "bytes":
                    on_bytes(value)
                elif word == "failed":
                    raise _failure(value)
                else:
                    on_part(value)
                    if not _send_next(hand, waiting):
                        busy.remove(hand.connection)


def _send_next(hand: _Hand, waiting: Iterator[int]) -> bool:
    index = next(waiting, None)
    if index is None:
        return False
    hand.part = index
    try:
        hand.connection.send(index)
    except OSError as error:
        raise _death(hand) from error
    return True


def _hear(hand: _Hand) -> tuple[str, Any]:
    try:
        word, value = hand.connection.recv()
    except (EOFError, OSError) as error:
        raise _death(hand) from error
    return word, value


def _failure(fields: dict[str, Any]) -> CloseranksError:
    error = decode(fields)
    error.fix = error.fix or _GO_ON
    return error


def _death(hand: _Hand) -> RunFailed:
    code = hand.process.wait()
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    guess = " (the kernel does that when memory runs out)" if code == -signal.SIGKILL else ""
    return RunFailed(f"the build's process {hand.process.pid} {how}{guess} while it built part {hand.part}. {_GO_ON}")


@contextmanager
def _hands(blueprint: BuildSpec, count: int) -> Iterator[list[_Hand]]:
    hands: list[_Hand] = []
    try:
        with _deaf_to_interrupts():
            while len(hands) < count:
                hands.append(_start())
        for hand in hands:
            try:
                hand.connection.send(blueprint)
            except OSError as error:
                raise _death(hand) from error
        yield hands
    finally:
        for hand in hands:
            hand.connection.close()
            hand.process.kill()
        for hand in hands:
            hand.process.wait()


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Processes started inside ignore Ctrl-C, which a terminal sends to the whole group: this process handles it, and
    an interpreter that is still importing would print tracebacks. In this process, Ctrl-C is deferred to the end of the
    block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start() -> _Hand:
    """One thread each: the processes are the parallelism, and the libraries' own threads would only compete."""
    ours, theirs = socket.socketpair()
    with theirs:
        fd = theirs.fileno()
        command = [sys.executable, "-P", "-m", "closeranks.data.building.worker", str(fd), str(os.getpid())]
        environment = {**child_environment(1), "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
        process = subprocess.Popen(command, pass_fds=[fd], env=environment, stdin=subprocess.DEVNULL)
    return _Hand(process, Connection(ours.detach()))
