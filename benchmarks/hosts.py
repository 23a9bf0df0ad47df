"""How do two hosts with a slow link fit on one machine? As network namespaces joined by a pair of shaped interfaces.

Nothing is put into the machine's own network, and names carry this process's number. Invariant: whatever happens inside
``with Hosts(...)``, its processes are ended and its namespaces removed when it is left.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

NUM_HOSTS = 2
INTERFACE = "eth0"
_BURST_BYTES = 256 * 1024


class HostsError(Exception):
    """Namespaces or shaping cannot be had here; the text says why, in one sentence."""


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


class Hosts:
    """Two hosts whose link carries ``rate_mbit`` in each direction."""

    def __init__(self, rate_mbit: float) -> None:
        self._rate_mbit = rate_mbit
        self.names = [f"closeranks-{os.getpid()}-{host}" for host in range(NUM_HOSTS)]
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Hosts:
        if os.geteuid() != 0:
            raise HostsError("It needs root, to make network namespaces and slow the link between them.")
        missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
        if missing:
            raise HostsError(f"It needs {' and '.join(missing)} (package iproute2), to make hosts and slow their link.")
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._remove()

    def start(self, host: int, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Run Python on a host; what it prints goes to ``log``."""
        line = ["ip", "netns", "exec", self.names[host], sys.executable, *command]
        with log.open("wb") as output:
            self._processes.append(
                subprocess.Popen(line, env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT)
            )

    def wait(self, timeout_s: float) -> list[int]:
        """Exit statuses in order of their start; raises ``subprocess.TimeoutExpired`` for one that does not end."""
        return [process.wait(timeout_s) for process in self._processes]

    def _make(self) -> None:
        for name in self.names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        first, second = self.names
        peer = ["peer", "name", INTERFACE, "netns", second]
        _run("ip", "link", "add", INTERFACE, "netns", first, "type", "veth", *peer)
        for host, name in enumerate(self.names):
            _run("ip", "-n", name, "addr", "add", f"{address(host)}/24", "dev", INTERFACE)
            _run("ip", "-n", name, "link", "set", INTERFACE, "up")
            shape = ["tbf", "rate", f"{self._rate_mbit:g}mbit", "burst", str(_BURST_BYTES), "latency", "50ms"]
            _run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", *shape)

    def _remove(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        for name in self.names:  # their interfaces go with them
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HostsError(f"`{' '.join(command)}` says: {done.stderr.strip() or done.stdout.strip()}")
