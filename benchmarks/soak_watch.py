"""What does a run hold, seen from outside: memory, descriptors, snapshot slots, shared memory, processes?

Invariant: nothing but /proc and the file system is asked; the run is not slowed beyond the reading, and does not know.
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elastic_runs import children, command_of, descendants, zygotes

from closeranks.elastic.faults.cgroups import CPU, FREEZER, MEMORY, CgroupUnavailable, find_cgroup_parent

_PR_SET_CHILD_SUBREAPER = 36
_SHM = "/dev/shm/"


@dataclass(frozen=True, slots=True)
class Sample:
    """One look; 0 for a zygote that is not there."""

    at: float
    """``time.time()``"""
    agent_bytes: int
    agent_fds: int
    zygote_bytes: int
    zygote_fds: int
    boxes_bytes: int
    num_processes: int
    """The agent's and below."""
    shm: tuple[str, ...]
    """Files of /dev/shm that any of them has open or mapped."""

    def fields(self) -> dict[str, Any]:
        return asdict(self)


def sample(agent: int) -> Sample | None:
    """None when it has ended."""
    below = descendants(agent)
    zygote = next(iter(zygotes(agent)), 0)
    try:
        links = _links(agent)
        slots = sum(_blocks(agent, fd) for fd, target in links.items() if "closeranks-slot" in target)
        return Sample(
            at=time.time(),
            agent_bytes=_resident(agent),
            agent_fds=len(links),
            zygote_bytes=_resident(zygote) if zygote else 0,
            zygote_fds=len(_links(zygote)) if zygote else 0,
            boxes_bytes=slots,
            num_processes=1 + len(below),
            shm=tuple(sorted({name for pid in (agent, *below) for name in _shared(pid)})),
        )
    except (FileNotFoundError, ProcessLookupError):
        return None


def _links(pid: int) -> dict[str, str]:
    found = {}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            found[fd] = os.readlink(f"/proc/{pid}/fd/{fd}")
    return found


def _blocks(pid: int, fd: str) -> int:
    return os.stat(f"/proc/{pid}/fd/{fd}").st_blocks * 512


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _shared(pid: int) -> set[str]:
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
        opened = set(_links(pid).values())
    except (FileNotFoundError, ProcessLookupError):
        return set()
    return {*re.findall(rf"{_SHM}\S+", maps), *(target for target in opened if target.startswith(_SHM))}


def adopt_orphans() -> None:
    """Whoever below us loses its parent becomes our child, so that nobody gets away unseen."""
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError("prctl(PR_SET_CHILD_SUBREAPER) was refused")


def left_over(agent: int, samples: Sequence[Sample]) -> list[str]:
    """What an ended run has left behind, in words: processes (see ``set_child_subreaper``), shared memory, control
    groups."""
    orphans = [pid for pid in children(os.getpid()) if Path(f"/proc/{pid}/exe").exists() and command_of(pid)]
    files = sorted({name for one in samples for name in one.shm if Path(name).exists()})
    return [
        *(f"process {pid}: {command_of(pid).strip()}" for pid in orphans),
        *files,
        *(str(path) for path in _groups(agent)),
    ]


def _groups(agent: int) -> list[Path]:
    found = []
    for need in (CPU, MEMORY, FREEZER):
        with suppress(CgroupUnavailable):
            found += list(find_cgroup_parent(need).path.glob(f"closeranks-{agent}-*"))
    return found
