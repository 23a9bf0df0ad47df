"""What a run leaves behind on this machine: processes that carry its mark, sockets that they listened on, files in
/dev/shm, control groups and mounts, compared before and after. Imports no torch."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.cli.commands import mark, marked_processes

_SETTLE_S = 20.0


@dataclass
class Machine:
    """What there is on this machine that a run might leave behind, from before it until after it."""

    mark: str = field(default_factory=mark)
    pid: int = 0
    """Of the run's agent."""
    ports: set[str] = field(default_factory=set)
    mounts: frozenset[str] = field(default_factory=lambda: _mounts())
    """As they were before the run."""

    def watched(self) -> _Watch:
        return _Watch(self)

    def look(self) -> None:
        """Which sockets do its processes listen on now?"""
        self.ports |= _listening() & _sockets_of(self.mark)

    def left(self, folder: Path) -> tuple[str, ...]:
        """What is still there, after a while in which the kernel may finish."""
        deadline = time.monotonic() + _SETTLE_S
        while (found := self.found(folder)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def found(self, folder: Path) -> tuple[str, ...]:
        processes = [f"process: {line}" for line in marked_processes(self.mark)]
        ports = [f"listening socket {inode}" for inode in self.ports & _listening()]
        shm = [f"/dev/shm/{path.name}" for path in (folder / "shm").iterdir() if not _holds_state(path)]
        groups = [f"control group {path}" for path in Path("/sys/fs/cgroup").glob(f"**/closeranks-{self.pid}-*")]
        mounts = [line for line in _mounts() - self.mounts if str(folder) in line]
        return (*processes, *ports, *shm, *groups, *mounts)


class _Watch:
    """Looks at a run's sockets now and then, in a thread."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._go_on)

    def _go_on(self) -> None:
        while not self._is_over.wait(0.5):
            self._machine.look()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


def _mounts() -> frozenset[str]:
    return frozenset(Path("/proc/self/mountinfo").read_text().splitlines())


def _listening() -> set[str]:
    """Inodes of all sockets that listen here."""
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                found.add(words[9])
    return found


def _sockets_of(name: str) -> set[str]:
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdecimal() or name.encode() not in (entry / "environ").read_bytes():
                continue
            links = [os.readlink(path) for path in (entry / "fd").iterdir()]
        except OSError:
            continue
        found |= {link[8:-1] for link in links if link.startswith("socket:[")}
    return found


def _holds_state(path: Path) -> bool:
    """What a run put there because its own folder could not be written is meant to stay, and was told of."""
    return path.name.startswith("closeranks-") and any(path.glob("step-*/manifest.json")) | any(path.glob("rescued/*"))
