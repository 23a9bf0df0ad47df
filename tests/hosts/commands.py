"""``closeranks`` on a host of the lab, as a person would start it there; and what to wait for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tests.hosts.lab import LabHost

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0
"""For anything that is waited for: what takes long on a busy machine is no failure."""


class Command:
    """One command on one host, from its start until it is over or the host is off."""

    def __init__(self, host: LabHost, cwd: Path, *arguments: object) -> None:
        self.host = host
        self._output = cwd / f"{host.name}-{len(host.processes)}.txt"
        command = [sys.executable, "-m", "closeranks", *map(str, arguments)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        environment.pop("GLOO_SOCKET_IFNAME", None)  # a session of an earlier test in this process may have set it
        with self._output.open("w") as output:
            self.process = host.start(command, environment=environment, output=output, cwd=cwd)

    @property
    def pid(self) -> int:
        """Of the command itself: what stands between keeps no signal and passes none on."""
        return wait_for(lambda: next(iter(_children(self.process.pid)), 0), "the command to start", self)

    @property
    def said(self) -> str:
        return self._output.read_text(errors="replace")

    def send(self, signum: int) -> None:
        os.kill(self.pid, signum)
        if signum == signal.SIGCONT:
            self.process.send_signal(signum)  # nsenter stops itself together with its child

    def descendants(self) -> list[int]:
        """All processes that the command has started, parents first."""
        found, unseen = [], [self.pid]
        while unseen:
            children = _children(unseen.pop())
            found += children
            unseen += children
        return found

    def workers(self) -> list[int]:
        """Those of them that train: a zygote and its heir lead sessions of their own."""
        return [pid for pid in self.descendants() if os.getsid(pid) != pid]

    def wait(self) -> int:
        """Its exit status, as a shell tells it."""
        try:
            status = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.host.name} has not ended:\n{self.said}") from None
        return status if status >= 0 else 128 - status

    def has_ended(self) -> bool:
        return self.process.poll() is not None


KILLED = 128 + signal.SIGKILL


def wait_for(found: Callable[[], T], what: str, command: Command | None = None) -> T:
    """What ``found`` gives, as soon as it is anything."""
    deadline = time.monotonic() + PATIENCE_S
    while not (value := found()):
        words = f" It said:\n{command.said}" if command else ""
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:g} s for {what}.{words}"
        time.sleep(0.02)
    return value


def wait_until_clean(*hosts: LabHost) -> None:
    """What is dying may take a moment; what lives on does not go away."""
    for host in hosts:
        wait_for(lambda host=host: not host.left_behind(), f"{host.name} to be clean: {host.left_behind()}")  # type: ignore[misc]


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
