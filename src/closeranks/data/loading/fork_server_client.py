"""Where do a rank's reading processes come from?

From one process that has imported torch and forks on request (``closeranks.data.loading.worker``); this is its rank's
hold on it. Invariants: the rank itself is never forked; nothing that comes from here outlives the rank; ``close`` and
``end`` never take long.
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
"""For a process that is hung up on in the middle of a read, before it is killed."""
_END_S = 5.0


class ForkServerClient:
    def __init__(self) -> None:
        """Returns at once; the first process is there when torch is imported."""
        if getattr(sys.modules["__main__"].__spec__, "name", "") == "closeranks.data.loading.worker":
            fix = "Put the script's main code under `if __name__ == '__main__':`."
            raise UserError("a loader process was about to run the whole script that defines its dataset", fix)
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The kernel ties a child to the thread that started it: from another thread, hanging up must do.
        rank = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "closeranks.data.loading.worker", str(theirs.fileno()), str(rank)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=child_environment(1),
                process_group=0,  # a signal to the rank's group is not for its readers, which may not listen yet
            )
        self._exited: dict[int, int] = {}
        self._num_seats = 0
        self._is_closed = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def start_worker(self, seat: StartLoaderWorker, own: socket.socket, plan_fd: int) -> int:
        """Ask for a process; its key. A nursery that is gone is found out by ``hear``."""
        key, self._num_seats = self._num_seats, self._num_seats + 1
        with suppress(SocketClosed):
            messages.send(self.control, replace(seat, key=key), own.fileno(), plan_fd)
        return key

    def poll_exits(self, wait_s: float = 0.0) -> dict[int, int]:
        """Exit statuses by key, as far as they are known; waits for news at most so long. ``SocketClosed``: it is
        gone."""
        waiting = select.poll()
        waiting.register(self.control, select.POLLIN)
        while waiting.poll(wait_s * 1000):
            said, _ = messages.receive(self.control)
            assert isinstance(said, LoaderWorkerExited)
            self._exited[said.key] = said.status
            wait_s = 0.0
        return self._exited

    def stop_workers(self, keys: Sequence[int]) -> None:
        """These have been hung up on: see them out, and kill those that do not go."""
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
            return  # then they are gone, too
        self.kill()

    def _wait(self, keys: Sequence[int], seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not set(keys) <= self.poll_exits().keys():
            if (left_s := until - time.monotonic()) <= 0:
                return False
            self.poll_exits(left_s)
        return True

    def describe_exit(self) -> str:
        """How it ended, once ``hear`` found it gone."""
        try:
            return describe_exit_status(self._process.wait(_END_S))
        except subprocess.TimeoutExpired:
            return "closed its connection"

    def kill(self) -> None:
        """Its processes die with it."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """With all its processes, which have a moment to leave."""
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
