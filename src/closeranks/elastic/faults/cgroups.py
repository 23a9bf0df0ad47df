"""Puts a worker into a control group (version 1 or 2) that throttles it, freezes it or limits its memory.

A group is created for one injected fault, below the group of this process or as near to it as the kernel and our
permissions allow. Invariants: only the named processes are moved; before a group is removed, they are thawed and moved
back to where they came from; groups that a killed process of ours left behind are removed by the next one that looks.
"""

from __future__ import annotations

import errno
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from closeranks.core.system.cgroup_hierarchy import groups_of, hierarchies

_PREFIX = "closeranks-"
_REMOVE_S = 2.0


@dataclass(frozen=True, slots=True)
class CgroupControl:
    """A control, identified by the file that sets it under each version."""

    what: str
    controller: str
    """Of version 1; empty if only version 2 has it."""
    file_v1: str
    file_v2: str


FREEZER = CgroupControl("freezer", "", "", "cgroup.freeze")
"""Version 2 only: a process frozen by version 1 cannot be killed until it is thawed, so that fencing would fail."""
CPU = CgroupControl("cpu", "cpu", "cpu.cfs_quota_us", "cpu.max")
MEMORY = CgroupControl("memory", "memory", "memory.limit_in_bytes", "memory.max")


@dataclass(frozen=True, slots=True)
class CgroupParent:
    """A group below which ours can be created."""

    path: Path
    version: int
    origin: str
    """The line of /proc/PID/cgroup for this hierarchy begins with this."""
    mount: Path


class CgroupUnavailable(OSError):
    """The control is not available here; the message says why."""


def find_cgroup_parent(need: CgroupControl) -> CgroupParent:
    """Where groups with this control can be created; raises ``CgroupUnavailable``."""
    reason = f"no control groups with the {need.what} controller are mounted here"
    for hierarchy in hierarchies(need.controller):
        file = need.file_v2 if hierarchy.version == 2 else need.file_v1
        for path in hierarchy.upwards():
            try:
                trial = _make(path)
            except OSError as error:
                reason = f"no control group can be created in {path} ({os.strerror(error.errno or 0)})"
                continue
            has_file = (trial / file).exists()
            trial.rmdir()
            if has_file:
                return CgroupParent(path, hierarchy.version, hierarchy.origin, hierarchy.mount)
    raise CgroupUnavailable(reason)


def _make(parent: Path) -> Path:
    remove_stale_groups(parent)
    for number in range(1000):
        path = parent / f"{_PREFIX}{os.getpid()}-{number}"
        with suppress(FileExistsError):
            path.mkdir()
            return path
    raise OSError(errno.ENOSPC, "too many groups")


def remove_stale_groups(parent: Path) -> None:
    """Remove groups left behind by processes of ours that were killed during an injection."""
    for path in parent.glob(f"{_PREFIX}*"):
        found = re.fullmatch(rf"{_PREFIX}(\d+)-\d+", path.name)
        if found and not Path(f"/proc/{found[1]}").exists():
            with suppress(OSError):
                path.rmdir()


class ControlGroup:
    """One group of ours. ``remove`` may be called more than once, and during any cleanup."""

    def __init__(self, parent: CgroupParent) -> None:
        self._parent = parent
        self.path = _make(parent.path)
        self._original_groups: dict[int, Path] = {}

    def add(self, pid: int) -> None:
        """Move a process here, with all its threads."""
        group = groups_of(pid).get(self._parent.origin, "/")
        self._original_groups[pid] = self._parent.mount / group.lstrip("/")
        self.write("cgroup.procs", str(pid))

    def write(self, file: str, value: str) -> None:
        _write(self.path / file, value)

    def limit_cpu(self, share: float) -> None:
        """A share of one CPU, in the shortest periods that the kernel accepts: a step shorter than a period might not
        be slowed at all."""
        period_us = int(max(10_000, 1000 / share))
        quota_us = max(1000, int(share * period_us))
        if self._parent.version == 2:
            self.write("cpu.max", f"{quota_us} {period_us}")
        else:
            self.write("cpu.cfs_period_us", str(period_us))
            self.write("cpu.cfs_quota_us", str(quota_us))

    def limit_memory(self, num_bytes: int) -> None:
        """The limit on additional memory: what the processes hold already was charged to their old group and stays
        there."""
        if self._parent.version == 2:
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
        """How many processes the OOM killer has killed in this group, as the kernel counts them."""
        text = (self.path / ("memory.events" if self._parent.version == 2 else "memory.oom_control")).read_text()
        found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
        return int(found[1]) if found else 0

    def remove(self, timeout_s: float = _REMOVE_S) -> None:
        """Move the remaining processes back, then remove. A dying process still holds its group for a moment."""
        deadline = time.monotonic() + timeout_s
        while self.path.is_dir():
            self._move_back()
            try:
                self.path.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.005)

    def _move_back(self) -> None:
        if (self.path / "cgroup.freeze").exists():
            self.freeze(False)
        for pid in (self.path / "cgroup.procs").read_text().split():
            with suppress(OSError):  # it has died meanwhile, or its old group is gone
                _write(self._original_groups.get(int(pid), self._parent.path) / "cgroup.procs", pid)


def _write(path: Path, value: str) -> None:
    """Unlike ``Path.write_text`` this never creates a file: a control that the kernel lacks is an error."""
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)
