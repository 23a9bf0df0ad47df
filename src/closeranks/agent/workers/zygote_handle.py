"""The agent's handle of a zygote process: one that it started, or a standby that an earlier zygote forked.

Invariant: once ``close`` returns, the process is gone, and its process id was never signalled after the kernel might
have reused it.
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

from closeranks.agent.detection.exit_status import status_from_waitid

_END_S = 5.0


class ZygoteProcess:
    """A zygote as seen from the agent: its process id, its pidfd and the control socket to it."""

    def __init__(self, pid: int, pidfd: int, control: socket.socket, child: subprocess.Popen[bytes] | None = None):
        self.pid = pid
        self.pidfd = pidfd
        self.control = control
        self._child = child

    def status(self) -> int | None:
        """Exit status of the process, which must have ended; None if it is not our child, so that another process
        reaped it."""
        if self._child is not None:
            return self._child.wait()
        try:
            result = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
        except ChildProcessError:
            return None
        assert result is not None
        return status_from_waitid(result)

    def kill(self) -> None:
        """Send SIGKILL; its death is noticed through ``pidfd``."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Kill the process and the rest of its process group, reap it, and close the descriptors."""
        if self._child is None:
            self.kill()
            ended = select.poll()
            ended.register(self.pidfd, select.POLLIN)
            ended.poll(_END_S * 1000)
            self.status()
        elif self._child.returncode is None:  # not reaped yet, so its process id cannot have been reused
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._child.wait()
        os.close(self.pidfd)
        self.control.close()


def start_zygote(output: int, environment: Mapping[str, str]) -> ZygoteProcess:
    """Start a zygote that has imported nothing yet. It is the leader of its own session.

    ``-P``: a file in the working folder cannot shadow a module of the standard library here.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        control = theirs.fileno()
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "closeranks.agent.workers.zygote", str(control), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(control,),
            env=dict(environment),
            start_new_session=True,
        )
    return ZygoteProcess(child.pid, os.pidfd_open(child.pid), ours, child)
