"""Signals a worker and shuts down its connections from outside, without any risk to other processes.

Invariants: a process is reached through a pidfd that was opened while it was a descendant of this one, so that a reused
pid never hits an unrelated process; a worker needs no code for any of this and cannot detect it.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

_LIBC = ctypes.CDLL(None, use_errno=True)
_SYS_PIDFD_GETFD = 438
"""The same number on every architecture, as for all system calls since Linux 5.1."""
_DEEPEST = 8


class TargetProcess:
    """A process that this one has started, itself or through its children; raises ``ProcessLookupError`` if not."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        if not _is_ours(pid):
            os.close(self._pidfd)
            raise ProcessLookupError(f"process {pid} does not belong to this run")

    def signal(self, number: signal.Signals) -> None:
        signal.pidfd_send_signal(self._pidfd, number)

    @property
    def is_dead(self) -> bool:
        """Whether it has ended, reaped or not."""
        poll = select.poll()  # unlike select, it accepts descriptors above 1023
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def cut_connections(self) -> int:
        """Shut down every TCP connection it holds, as a failing network would; returns how many.

        A duplicated descriptor shares the socket: shutting it down here also ends it in the worker, and a thread that
        waits on it wakes with an error. Listening sockets are left alone; the link to the agent is not TCP.
        """
        return sum(_shut_down(self._take(int(name))) for name in os.listdir(f"/proc/{self.pid}/fd"))

    def _take(self, fd: int) -> int | None:
        """A duplicate of its descriptor in this process; None if it is already closed or not a socket."""
        try:
            if not os.readlink(f"/proc/{self.pid}/fd/{fd}").startswith("socket:"):
                return None
        except OSError:
            return None
        taken: int = _LIBC.syscall(_SYS_PIDFD_GETFD, self._pidfd, fd, 0)
        return taken if taken >= 0 else None

    def close(self) -> None:
        """May be called more than once."""
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)

    def __enter__(self) -> TargetProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _shut_down(fd: int | None) -> int:
    if fd is None:
        return 0
    with socket.socket(fileno=fd) as connection:
        is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
        if not is_tcp or connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return 0
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # not connected, or not any more
            return 0
    return 1


def pidfd_getfd_problem() -> str:
    """Why no descriptor of a child can be duplicated here; empty if it can."""
    with TargetProcess(os.getpid()) as own:
        taken: int = _LIBC.syscall(_SYS_PIDFD_GETFD, own._pidfd, own._pidfd, 0)
    if taken < 0:
        return f"the kernel refuses pidfd_getfd ({os.strerror(ctypes.get_errno())})"
    os.close(taken)
    return ""


@contextmanager
def highest_priority() -> Iterator[None]:
    """Run this process at the highest scheduling priority, if permitted."""
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    except PermissionError:
        yield
        return
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, usual)


def await_state(pid: int, wanted: str, timeout_s: float = 0.2) -> None:
    """Wait until the process is in one of these states of ``/proc/PID/stat``, or gone, or the timeout has passed."""
    deadline = time.monotonic() + timeout_s
    while _stat(pid)[0] not in ("", "Z", "X", *wanted) and time.monotonic() < deadline:
        time.sleep(0.0002)


def _is_ours(pid: int) -> bool:
    own = os.getpid()
    for _ in range(_DEEPEST):
        if pid == own:
            return True
        pid = _stat(pid)[1]
        if pid <= 1:
            return False
    return False


def _stat(pid: int) -> tuple[str, int]:
    """Its state and its parent's pid; an empty string and 0 if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "", 0
    state, parent = text.rpartition(")")[2].split()[:2]
    return state, int(parent)
