"""Network namespaces as hosts for the runs of a comparison: their bytes are counted, their links have a set bandwidth.

A host is a set of unnamed namespaces held by a process (its init) that the kernel kills when this process ends;
everything on that host ends with it, including its interfaces and links. The machine's own network is not changed.
Invariant: everything created here is gone when ``close`` returns, and also if ``close`` was never called.

    switch namespace                   p0 -- eth0 of host 0       tbf on both ends: the bandwidth of the link
      a bridge, or delay_switch.py     p1 -- eth0 of host 1
      if there is a delay
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO

from closeranks.core.errors import SetupError
from closeranks.core.system.linux import die_with_parent
from closeranks.lab.compare import delay_switch
from closeranks.lab.compare.config import NetworkConfig

_SUBNET = "10.78.0"
_NEEDED = ("unshare", "nsenter", "ip", "mount", "hostname")
_UNSHARE = ("unshare", "--net", "--uts", "--pid", "--ipc", "--mount", "--propagation=private", "--fork")
_INIT = (
    'hostname "$1" && mount --bind "$2" /etc/hosts && mount -t tmpfs tmpfs /dev/shm && mount -t proc proc /proc '
    "&& ip link set lo up && echo up && exec sleep infinity"
)
_FIX = "Remove [network], or set isolate = false."
_TIMEOUT_S = 30.0
_QUEUE_MS = 50
_BURST_S, _MIN_BURST_BYTES = 0.002, 1 << 16
"""Small enough that the traffic of a step does not fit into a burst; at least the kernel's largest segment."""


def unavailable_reason(*, shaped: bool) -> str:
    """Why hosts cannot be created here; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in (*_NEEDED, *(("tc",) if shaped else ())) if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} cannot be found (packages iproute2 and util-linux)"
    probe = subprocess.run(
        [*_UNSHARE, "mount", "-t", "proc", "proc", "/proc"], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    return f"namespaces cannot be made here: {probe.stderr.strip()}" if probe.returncode else ""


class NamespaceHost:
    """One host: its init process and its interface."""

    def __init__(self, number: int, hosts_file: Path, interface: str) -> None:
        self.name = f"host{number}"
        self.address = address_of(number)
        self._interface = interface
        script = ["sh", "-c", _INIT, "init", self.name, str(hosts_file)]
        self._unshare = _start_background([*_UNSHARE, "--kill-child=KILL", *script])
        self.init_pid = _init_of(self._unshare)
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, command: Sequence[str], output: IO[str]) -> subprocess.Popen[str]:
        """Start a process on this host, in a session of its own."""
        inside = ["nsenter", "--target", str(self.init_pid), "--all", f"--wd={os.getcwd()}", "--", *command]
        process = subprocess.Popen(
            inside, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self._processes.append(process)
        return process

    def sent_bytes(self) -> int:
        """Bytes sent through its interface since it was created."""
        try:
            table = Path(f"/proc/{self.init_pid}/net/dev").read_text()
        except OSError as error:
            what = f"{self.name} of the comparison ended before its run did: {error.strerror}"
            raise SetupError(what, "Check the memory of this machine; the same command continues.") from error
        return sent_bytes(table, self._interface)

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.init_pid, signal.SIGKILL)
        for process in self._processes:
            process.wait(timeout=_TIMEOUT_S)
        with suppress(subprocess.TimeoutExpired):
            self._unshare.wait(timeout=_TIMEOUT_S)  # it exits when its init does
        _end(self._unshare)


class NamespaceHosts:
    """The hosts of one run: a single one with its loopback, or several on a switch."""

    def __init__(self, network: NetworkConfig | None) -> None:
        self._network = network
        self._switch_processes: list[subprocess.Popen[str]] = []
        self.hosts: list[NamespaceHost] = []
        self._folder = tempfile.TemporaryDirectory(prefix="closeranks-compare-")

    def __enter__(self) -> NamespaceHosts:
        num_hosts = self._network.hosts if self._network else 1
        names = [f"{address_of(n) if self._network else '127.0.0.1'} host{n}\n" for n in range(num_hosts)]
        path = Path(self._folder.name, "hosts")
        path.write_text("127.0.0.1 localhost\n" + "".join(names))
        try:
            for number in range(num_hosts):
                self.hosts.append(NamespaceHost(number, path, "eth0" if self._network else "lo"))
            if self._network is not None:
                self._connect_hosts(self._network)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def sent_bytes(self) -> int:
        """Bytes sent by all hosts together: each byte that crosses a link counts once."""
        return sum(host.sent_bytes() for host in self.hosts)

    def close(self) -> None:
        for host in self.hosts:
            host.close()
        for process in reversed(self._switch_processes):
            _end(process)
        self._folder.cleanup()

    def _connect_hosts(self, network: NetworkConfig) -> None:
        switch = _start_background(["unshare", "--net", "sh", "-c", "echo up && exec sleep infinity"])
        self._switch_processes.append(switch)
        ports = [f"p{number}" for number in range(len(self.hosts))]
        if not network.delay_ms:
            _run_inside(switch.pid, "ip", "link", "add", "br0", "type", "bridge")
            _run_inside(switch.pid, "ip", "link", "set", "br0", "up")
        for host, port in zip(self.hosts, ports, strict=True):
            _connect(host, port, switch.pid, network)
        if network.delay_ms:
            program = [sys.executable, delay_switch.__file__, "--delay-ms", f"{network.delay_ms:g}", *ports]
            self._switch_processes.append(
                _start_background(["nsenter", f"--net=/proc/{switch.pid}/ns/net", "--", *program])
            )


def _connect(host: NamespaceHost, port: str, switch: int, network: NetworkConfig) -> None:
    pid = str(host.init_pid)
    _run_inside(switch, "ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", pid)
    if not network.delay_ms:
        _run_inside(switch, "ip", "link", "set", port, "master", "br0")
    _run_inside(switch, "ip", "link", "set", port, "up")
    _run_inside(host.init_pid, "ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
    _run_inside(host.init_pid, "ip", "link", "set", "eth0", "up")
    if network.mbit:
        burst = max(_MIN_BURST_BYTES, int(network.mbit * 1e6 / 8 * _BURST_S))
        tbf_options = ("rate", f"{network.mbit * 1000:.0f}kbit", "burst", str(burst), "latency", f"{_QUEUE_MS}ms")
        for pid_there, device in ((host.init_pid, "eth0"), (switch, port)):
            _run_inside(pid_there, "tc", "qdisc", "add", "dev", device, "root", "tbf", *tbf_options)


def address_of(number: int) -> str:
    return f"{_SUBNET}.{number + 1}"


def sent_bytes(table: str, interface: str) -> int:
    """Bytes that an interface sent, from the text of /proc/net/dev: the ninth number of its line."""
    for line in table.splitlines():
        name, colon, numbers = line.partition(":")
        if colon and name.strip() == interface:
            return int(numbers.split()[8])
    return 0


def children_of(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _init_of(unshare: subprocess.Popen[str]) -> int:
    """The process that holds the namespaces; without it, nothing can be started or ended in them."""
    if children := children_of(unshare.pid):
        return children[0]
    _end(unshare)
    raise SetupError("a host for the comparison ended at once, or this kernel does not list child processes", _FIX)


def _start_background(command: Sequence[str]) -> subprocess.Popen[str]:
    """Start a process that reports when it is ready, and runs until it is ended or this process ends."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=partial(die_with_parent, os.getpid()),
    )
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if line != "up":
        _end(process)
        raise SetupError(f"a host for the comparison has not started: {line}", _FIX)
    return process


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(timeout=_TIMEOUT_S)
    if process.stdout is not None:
        process.stdout.close()


def _run_inside(pid: int, *command: str) -> None:
    finished = subprocess.run(
        ["nsenter", f"--net=/proc/{pid}/ns/net", "--", *command],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if finished.returncode:
        raise SetupError(f"`{' '.join(command)}` failed: {finished.stderr.strip()}", _FIX)
