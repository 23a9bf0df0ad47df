"""Which process are workers forked from, as the agent holds it? One that it started, or an heir that another left.

Invariant: once ``end`` returns, the process is gone, and its number was never signalled after it might have been given
to somebody else.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

from closeranks.agent.exits import status_of

_END_S = 5.0


class Ancestor:
    """A zygote from outside: its number, its end, and the line to it."""

    def __init__(self, pid: int, pidfd: int, control: socket.socket, child: subprocess.Popen[bytes] | None = None):
        self.pid = pid
        self.pidfd = pidfd
        self.control = control
        self._child = child

    def status(self) -> int | None:
        """How it ended, which it has; None: it is no child of ours, and somebody else was told."""
        if self._child is not None:
            return self._child.wait()
        try:
            result = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
        except ChildProcessError:
            return None
        assert result is not None
        return status_of(result)

    def kill(self) -> None:
        """Its end is noticed through ``pidfd``."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def end(self) -> None:
        """Kill it and what else is in its group, and let go of it."""
        if self._child is None:
            self.kill()
            ended = select.poll()
            ended.register(self.pidfd, select.POLLIN)
            ended.poll(_END_S * 1000)
            self.status()
        elif self._child.returncode is None:  # not reaped yet, so its number is certainly its own
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._child.wait()
        os.close(self.pidfd)
        self.control.close()


def start(output: int, environment: Mapping[str, str]) -> Ancestor:
    """A zygote that has imported nothing yet. It leads a session of its own.

    ``-P``: a file in the working folder that is named like a module of Python's does not come before it here.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        control = theirs.fileno()
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "closeranks.agent.zygote", str(control), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(control,),
            env=dict(environment),
            start_new_session=True,
        )
    return Ancestor(child.pid, os.pidfd_open(child.pid), ours, child)
