"""Terminals that die: closed pipes, full devices, ptys whose other end is gone, SIGHUP. Training goes on."""

from __future__ import annotations

import os
import pty
import signal
import threading
from collections.abc import Generator
from contextlib import suppress

from tests.hostile.cases import kind, one_of, step
from tests.hostile.lab import Run, kill

HUNG_UP = {128 + signal.SIGHUP}
"""After a hangup a run saves and stops, and can be continued."""


@kind("terminals", which=one_of("stdout", "stderr", "both"), step=one_of(0, 1, 7, 15))
def reader_that_leaves(run: Run, which: str, step: int) -> Generator[None]:
    """``closeranks train ... | head -3``."""
    reading, writing = os.pipe()
    run.stdout = writing if which in ("stdout", "both") else None
    run.stderr = writing if which in ("stderr", "both") else None
    if step:
        run.hold(step)
    else:
        os.close(reading)
    yield
    os.close(writing)
    if step:
        with run.held(step):
            os.close(reading)


@kind("terminals", which=one_of("stdout", "stderr", "both"), how=one_of("/dev/full", "read only", "closed socket"))
def output_that_cannot_be_written(run: Run, which: str, how: str) -> Generator[None]:
    target = _unwritable(how)
    run.stdout = target if which in ("stdout", "both") else None
    run.stderr = target if which in ("stderr", "both") else None
    yield
    os.close(target)


def _unwritable(how: str) -> int:
    if how == "closed socket":
        import socket

        ours, theirs = socket.socketpair()
        theirs.close()
        return ours.detach()
    return os.open("/dev/full", os.O_WRONLY) if how == "/dev/full" else os.open("/dev/null", os.O_RDONLY)


@kind("terminals", step=step(1), reads=one_of(True, False))
def terminal_that_closes(run: Run, step: int, reads: bool) -> Generator[None]:
    """An ssh connection that breaks: the master of the pty is closed, the session gets SIGHUP, writing fails."""
    master, slave = pty.openpty()
    run.terminal = run.stdout = run.stderr = slave
    run.allowed |= HUNG_UP
    run.hold(step)
    yield
    os.close(slave)
    if reads:
        threading.Thread(target=_drain, args=(os.dup(master),), daemon=True).start()
    with run.held(step):
        os.close(master)


def _drain(master: int) -> None:
    with suppress(OSError):
        while os.read(master, 1 << 16):
            pass


@kind("terminals", which=one_of(">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"))
def output_that_is_closed_from_the_start(run: Run, which: str) -> Generator[None]:
    run.prefix = ("sh", "-c", f'exec "$@" {which}', "sh")
    yield


@kind("terminals", step=step(1), to=one_of("agent", "group"), nohup=one_of(True, False))
def hangup(run: Run, step: int, to: str, nohup: bool) -> Generator[None]:
    """Saved and stopped; under nohup the run goes on."""
    run.prefix = ("nohup",) if nohup else run.prefix
    run.allowed |= set() if nohup else HUNG_UP
    run.hold(step)
    yield
    with run.held(step):
        if to == "agent":
            kill(run.process.pid, signal.SIGHUP)
        else:
            os.killpg(run.process.pid, signal.SIGHUP)
