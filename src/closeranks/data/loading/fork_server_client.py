"""The rank's handle on its fork server, which starts the rank's loader workers.

The fork server is a process that has imported torch and forks on request (``closeranks.data.loading.worker``).
Invariants: the rank itself is never forked; neither the fork server nor a worker outlives the rank; ``close`` and
``stop_workers`` return within a short, bounded time.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from closeranks.core.errors import UserError
from closeranks.core.system.environment import child_environment
from closeranks.data.loading import messages
from closeranks.data.loading.messages import KillLoaderWorker, LoaderWorkerExited, SocketClosed, StartLoaderWorker

_LEAVE_S = 0.5
"""Grace period before a worker is killed whose socket was closed in the middle of a read."""
_END_S = 5.0


class ForkServerClient:
    def __init__(self) -> None:
        """Returns at once; the first worker starts as soon as the fork server has imported torch."""
        if getattr(sys.modules["__main__"].__spec__, "name", "") == "closeranks.data.loading.worker":
            fix = "Put the script's main code under `if __name__ == '__main__':`."
            raise UserError("a loader process was about to run the whole script that defines its dataset", fix)
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The parent-death signal is bound to the thread that starts a child: other threads rely on the closed socket.
        rank = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "closeranks.data.loading.worker", str(theirs.fileno()), str(rank)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=child_environment(1),
                process_group=0,  # a signal to the rank's group is not for its workers, which may not ignore it yet
            )
        self._exited: dict[int, int] = {}
        self._num_started = 0
        self._is_closed = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def start_worker(self, request: StartLoaderWorker, own: socket.socket, plan_fd: int) -> int:
        """Request a worker; returns its key. That the fork server is gone is noticed by ``poll_exits``."""
        key, self._num_started = self._num_started, self._num_started + 1
        with suppress(SocketClosed):
            messages.send(self.control, replace(request, key=key), own.fileno(), plan_fd)
        return key

    def poll_exits(self, wait_s: float = 0.0) -> dict[int, int]:
        """Exit statuses by key, as far as they are known; waits at most ``wait_s`` for new ones. Raises
        ``SocketClosed`` if the fork server is gone."""
        waiting = select.poll()
        waiting.register(self.control, select.POLLIN)
        while waiting.poll(wait_s * 1000):
            message, _ = messages.receive(self.control)
            assert isinstance(message, LoaderWorkerExited)
            self._exited[message.key] = message.status
            wait_s = 0.0
        return self._exited

    def stop_workers(self, keys: Sequence[int]) -> None:
        """Wait for workers whose sockets were closed, and kill those that do not exit."""
        if self._is_closed:
            return
        try:
            if self._wait(keys, _LEAVE_S):
                return
            for key in keys:
                messages.send(self.control, KillLoaderWorker(key))
            if self._wait(keys, _END_S):
                return
        except SocketClosed:
            return  # then the workers are gone, too
        self.kill()

    def _wait(self, keys: Sequence[int], seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not set(keys) <= self.poll_exits().keys():
            if (left_s := until - time.monotonic()) <= 0:
                return False
            self.poll_exits(left_s)
        return True

    def describe_exit(self) -> str:
        """How the fork server ended, once ``poll_exits`` has found it gone."""
        try:
            return describe_exit_status(self._process.wait(_END_S))
        except subprocess.TimeoutExpired:
            return "closed its connection"

    def kill(self) -> None:
        """Kill the fork server; its workers die with it."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Stop the fork server and all its workers, which get a short grace period to exit."""
        self._is_closed = True
        with suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(2 * _LEAVE_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self.control.close()


def describe_exit_status(status: int) -> str:
    """How a process ended, from its exit code or the negative number of the signal."""
    if status >= 0:
        return f"exited with code {status}"
    names = {number.value: number.name for number in signal.Signals}
    why = "; if nobody sent it, the kernel's out-of-memory killer did" if -status == signal.SIGKILL else ""
    return f"was killed by {names.get(-status, f'signal {-status}')}{why}"
