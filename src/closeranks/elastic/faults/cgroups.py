"""How is a worker put where the kernel slows, freezes or starves it? Control groups, version 1 or 2.

A group is made for one strike, below the group this process is in or as near to it as the kernel and our rights allow.
Invariants: only processes that were named are moved; a group that is removed first gives them back to where they came
from, thawed; what a killed process of ours left behind is removed by the next one that looks.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "closeranks-"
_REMOVE_S = 2.0


@dataclass(frozen=True, slots=True)
class Need:
    """A control, by the file that sets it under either version."""

    what: str
    controller: str
    """Of version 1; empty: version 2 alone has it."""
    file_v1: str
    file_v2: str


FREEZER = Need("freezer", "", "", "cgroup.freeze")
"""Of version 2 alone: what version 1 has frozen cannot be killed before it is thawed, so that no fence would hold."""
CPU = Need("cpu", "cpu", "cpu.cfs_quota_us", "cpu.max")
MEMORY = Need("memory", "memory", "memory.limit_in_bytes", "memory.max")


@dataclass(frozen=True, slots=True)
class Home:
    """A group below which ours can be made."""

    path: Path
    version: int
    origin: str
    """The line of /proc/PID/cgroup that tells of this hierarchy begins so."""
    mount: Path


@dataclass(frozen=True, slots=True)
class Hierarchy:
    mount: Path
    version: int
    origin: str
    own: str
    """This process's group in it."""


class Lacking(OSError):
    """Why there is no such control here, in words."""


def find_home(need: Need) -> Home:
    """Where groups with this control can be made; raises ``Lacking``."""
    reason = f"no control groups with the {need.what} control are mounted here"
    for hierarchy in hierarchies(need):
        file = need.file_v2 if hierarchy.version == 2 else need.file_v1
        for path in _upwards(hierarchy):
            try:
                trial = _make(path)
            except OSError as error:
                reason = f"no control group can be made in {path} ({os.strerror(error.errno or 0)})"
                continue
            has_file = (trial / file).exists()
            trial.rmdir()
            if has_file:
                return Home(path, hierarchy.version, hierarchy.origin, hierarchy.mount)
    raise Lacking(reason)


def hierarchies(need: Need) -> Iterator[Hierarchy]:
    """Those that may have the control, version 2 first."""
    own = _groups_of("self")
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    for _, mount, kind, *_ in mounts:
        if kind == "cgroup2" and "0::" in own:
            yield Hierarchy(Path(mount), 2, "0::", own["0::"])
    for _, mount, kind, options, *_ in mounts:
        if kind == "cgroup" and need.controller and need.controller in options.split(","):
            for origin, path in own.items():
                if need.controller in origin.split(":")[1].split(","):
                    yield Hierarchy(Path(mount), 1, origin, path)


def _groups_of(pid: int | str) -> dict[str, str]:
    """``4:memory:`` -> ``/some/group`` for every hierarchy."""
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    return {line[: -len(path)]: path for line in lines if (path := line.split(":", 2)[2])}


def _upwards(hierarchy: Hierarchy) -> Iterator[Path]:
    """This process's own group first, then those above it."""
    here = hierarchy.mount / hierarchy.own.lstrip("/")
    while True:
        if here.is_dir():
            yield here
        if here == hierarchy.mount or hierarchy.mount not in here.parents:
            return
        here = here.parent


def _make(parent: Path) -> Path:
    sweep(parent)
    for number in range(1000):
        path = parent / f"{_PREFIX}{os.getpid()}-{number}"
        with suppress(FileExistsError):
            path.mkdir()
            return path
    raise OSError(errno.ENOSPC, "too many groups")


def sweep(parent: Path) -> None:
    """Remove what processes of ours left there that were killed in the middle of a strike."""
    for path in parent.glob(f"{_PREFIX}*"):
        found = re.fullmatch(rf"{_PREFIX}(\d+)-\d+", path.name)
        if found and not Path(f"/proc/{found[1]}").exists():
            with suppress(OSError):
                path.rmdir()


class Group:
    """One group of ours. ``remove`` may be called again, and from the end of anything."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self.path = _make(home.path)
        self._came_from: dict[int, Path] = {}

    def take(self, pid: int) -> None:
        """Move a process here, all its threads with it."""
        group = _groups_of(pid).get(self._home.origin, "/")
        self._came_from[pid] = self._home.mount / group.lstrip("/")
        self.write("cgroup.procs", str(pid))

    def write(self, file: str, value: str) -> None:
        _write(self.path / file, value)

    def limit_cpu(self, share: float) -> None:
        """A share of one processor, in the shortest periods that the kernel takes: a step that is shorter than a period
        might never feel it."""
        period_us = int(max(10_000, 1000 / share))
        quota_us = max(1000, int(share * period_us))
        if self._home.version == 2:
            self.write("cpu.max", f"{quota_us} {period_us}")
        else:
            self.write("cpu.cfs_period_us", str(period_us))
            self.write("cpu.cfs_quota_us", str(quota_us))

    def limit_memory(self, num_bytes: int) -> None:
        """What its processes hold already was charged elsewhere and stays there: this is what they may add."""
        if self._home.version == 2:
            with suppress(OSError):  # a kernel without swap accounting has no such file
                self.write("memory.swap.max", "0")
            self.write("memory.max", str(num_bytes))
        else:
            self.write("memory.swappiness", "0")
            self.write("memory.limit_in_bytes", str(num_bytes))

    def freeze(self, is_frozen: bool) -> None:
        self.write("cgroup.freeze", str(int(is_frozen)))

    @property
    def num_oom_kills(self) -> int:
        """How many the kernel has killed here for want of memory, in its own words."""
        text = (self.path / ("memory.events" if self._home.version == 2 else "memory.oom_control")).read_text()
        found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
        return int(found[1]) if found else 0

    @property
    def is_empty(self) -> bool:
        return not (self.path / "cgroup.procs").read_text().split()

    def remove(self, timeout_s: float = _REMOVE_S) -> None:
        """Give back who is left, then remove. A process that is just dying still holds its group for a moment."""
        deadline = time.monotonic() + timeout_s
        while self.path.is_dir():
            self._give_back()
            try:
                self.path.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.005)

    def _give_back(self) -> None:
        if (self.path / "cgroup.freeze").exists():
            self.freeze(False)
        for pid in (self.path / "cgroup.procs").read_text().split():
            with suppress(OSError):  # it has died meanwhile, or its old group is gone
                _write(self._came_from.get(int(pid), self._home.path) / "cgroup.procs", pid)


def _write(path: Path, value: str) -> None:
    """Unlike ``Path.write_text`` no file is ever made: what the kernel does not offer is an error."""
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)
