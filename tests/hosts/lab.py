"""Several hosts on one machine: network namespaces on a bridge, each with its own name, processes and shared memory.

    with Lab(3) as lab:
        lab.hosts[1].run(["ping", "-c1", lab.hosts[0].address])
        lab.hosts[2].cut()              # silence: nothing is refused, nothing arrives
        lab.hosts[1].power_off()        # SIGKILL to its init, and so to everything on it

Nothing is put into the namespace of the machine itself: bridge and ports stand in one of their own. Names are unique
for a run, so that several run beside one another. Invariant: what a lab made is gone when it is closed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO

import pytest

from closeranks.core.system.linux import die_with_parent

_SUBNET = "10.77.0"
_LISTENS = "0A"
_NEEDED = ("ip", "unshare", "nsenter", "mount", "hostname", "sleep")
_INIT = (
    'hostname "$1" && mount --bind "$2" /etc/hosts && mount -t tmpfs -o size=1g tmpfs /dev/shm '
    "&& mount -t proc proc /proc && echo up && exec sleep infinity"
)


def why_not() -> str:
    """Why there can be no lab here; empty where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in _NEEDED if shutil.which(name) is None]
    if missing:
        return f"a lab of hosts needs {', '.join(missing)}"
    tried = subprocess.run(["unshare", "--net", "--pid", "--fork", "true"], capture_output=True, text=True)
    return f"namespaces cannot be made here: {tried.stderr.strip()}" if tried.returncode else ""


def require_lab() -> None:
    """Skip the test where there can be no lab, and say why."""
    reason = why_not()
    if reason:
        pytest.skip(reason)


class LabHost:
    """One host: its address, its processes, its link."""

    def __init__(self, lab: Lab, number: int) -> None:
        self._lab = lab
        self.number = number
        self.name = f"h{number}"
        self.address = f"{_SUBNET}.{number + 1}"
        self._net = f"{lab.tag}-{self.name}"
        self._port = f"p{number}"
        self._init: subprocess.Popen[str] | None = None
        self._init_pid = 0
        self.processes: list[subprocess.Popen[str]] = []

    # --- what runs on it

    def start(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        output: IO[str] | int | None = None,
        cwd: Path | None = None,
    ) -> subprocess.Popen[str]:
        """A process on this host, in its session. Its output is kept together where ``output`` is not given."""
        sink = subprocess.PIPE if output is None else output
        inside = ["nsenter", "--target", str(self._init_pid), "--all", f"--wd={cwd or os.getcwd()}", "--", *command]
        process = subprocess.Popen(
            inside,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            text=True,
            env=None if environment is None else dict(environment),
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def run(self, command: Sequence[str], *, timeout_s: float = 30.0) -> subprocess.CompletedProcess[str]:
        """A process on this host, from its start to its end."""
        process = self.start(command)
        out, _ = process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(list(command), process.returncode, out)

    def reaches(self, other: LabHost, *, timeout_s: float = 1.0) -> bool:
        """Whether a connection to a closed port of the other is refused: then somebody is there to refuse it."""
        probe = (
            "import socket,sys\ntry: socket.create_connection((sys.argv[1], 9), float(sys.argv[2]))\n"
            "except ConnectionRefusedError: sys.exit(0)\nexcept OSError: sys.exit(1)"
        )
        python = shutil.which("python3") or "python3"
        return self.run([python, "-c", probe, other.address, str(timeout_s)]).returncode == 0

    def left_behind(self) -> list[str]:
        """Processes that live on this host, ports that are listened on, names in /dev/shm: none, after a clean end."""
        inside = Path(f"/proc/{self._init_pid}")
        rows = [line.split() for name in ("tcp", "tcp6") for line in (inside / "net" / name).read_text().splitlines()]
        ports = [f"port {int(row[1].rpartition(':')[2], 16)}" for row in rows if row[3] == _LISTENS]
        names = [f"/dev/shm/{name}" for name in os.listdir(inside / "root" / "dev" / "shm")]
        return [*self._living(), *ports, *names]

    def _living(self) -> list[str]:
        """All but init, and those that are dead and not reaped: ours is an init that reaps nobody."""
        own, found = os.readlink(f"/proc/{self._init_pid}/ns/pid"), []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdecimal() and int(entry.name) != self._init_pid:
                    words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if words and os.readlink(entry / "ns" / "pid") == own:
                        found.append(f"process {entry.name}: {words}")
        return found

    # --- what happens to it

    def cut(self) -> None:
        """Its link falls silent."""
        _ip("-n", self._lab.switch, "link", "set", self._port, "down")

    def heal(self) -> None:
        _ip("-n", self._lab.switch, "link", "set", self._port, "up")

    def power_off(self) -> None:
        """Everything on it dies at once, and nothing says goodbye: its link goes first."""
        self.cut()
        self._kill()

    def power_on(self) -> None:
        """The same name and address, nothing of what ran on it."""
        self._boot()
        self.heal()

    @property
    def is_on(self) -> bool:
        return self._init is not None and self._init.poll() is None

    # --- how it comes and goes

    def make(self) -> None:
        switch = self._lab.switch
        _ip("netns", "add", self._net)
        _ip("-n", self._net, "link", "set", "lo", "up")
        _ip("link", "add", "eth0", "netns", self._net, "type", "veth", "peer", "name", self._port, "netns", switch)
        _ip("-n", switch, "link", "set", self._port, "master", "br0", "up")
        _ip("-n", self._net, "addr", "add", f"{self.address}/24", "dev", "eth0")
        _ip("-n", self._net, "link", "set", "eth0", "up")
        self._boot()

    def _boot(self) -> None:
        """Its init: a process whose death the kernel answers with that of all others in its namespace."""
        unshare = [
            "unshare",
            "--uts",
            "--pid",
            "--ipc",
            "--mount",
            "--fork",
            "--kill-child=KILL",
            "--propagation=private",
        ]
        script = ["sh", "-c", _INIT, "init", self.name, str(self._lab.hosts_file)]
        self._init = subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{self._net}", "--", *unshare, *script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),  # a killed test takes its hosts along
        )
        assert self._init.stdout is not None
        told = self._init.stdout.readline().strip()
        if told != "up":
            raise RuntimeError(f"host {self.name} has not started: {told}")
        self._init_pid = int(Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children").read_text().split()[0])

    def _kill(self) -> None:
        if self._init is None:
            return
        if self._init.poll() is None:
            os.kill(self._init_pid, signal.SIGKILL)
        self._init.wait(timeout=60)
        assert self._init.stdout is not None
        self._init.stdout.close()
        for process in self.processes:
            process.kill()  # nsenter itself, which may be stopped
            process.wait(timeout=60)
            if process.stdout is not None:
                process.stdout.close()
        self.processes.clear()

    def unmake(self) -> None:
        self._kill()
        _ip("netns", "del", self._net, is_needed=False)


class Lab:
    """So many hosts ``h0``, ``h1``, ... on one switch."""

    def __init__(self, num_hosts: int) -> None:
        self.tag = f"crlab-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self.switch = f"{self.tag}-sw"
        self.hosts_file = Path(f"/run/{self.tag}.hosts")
        self.hosts = [LabHost(self, number) for number in range(num_hosts)]

    def __enter__(self) -> Lab:
        _sweep()
        names = "".join(f"{host.address} {host.name}\n" for host in self.hosts)
        try:
            self.hosts_file.write_text(f"127.0.0.1 localhost\n{names}")
            _ip("netns", "add", self.switch)
            _ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
            _ip("-n", self.switch, "link", "set", "br0", "up")
            for host in self.hosts:
                host.make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        for host in self.hosts:
            host.unmake()
        _ip("netns", "del", self.switch, is_needed=False)
        self.hosts_file.unlink(missing_ok=True)


def _sweep() -> None:
    """What killed tests could not remove; their processes died with them."""
    for name in [path.name for path in Path("/run/netns").glob("crlab-*")]:
        if not Path("/proc", name.split("-")[1]).exists():
            _ip("netns", "del", name, is_needed=False)
            Path(f"/run/{name.rpartition('-')[0]}.hosts").unlink(missing_ok=True)


def _ip(*arguments: str, is_needed: bool = True) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if is_needed and done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
