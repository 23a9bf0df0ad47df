"""Which control groups is a process in, and where are their files? For versions 1 and 2, and hosts that mount both.

In a container the path that the kernel names may not exist below its mount: the mount is then the container's own
group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CgroupHierarchy:
    mount: Path
    version: int
    origin: str
    """The line of /proc/PID/cgroup for this hierarchy begins with this."""
    own: str
    """This process's group in it."""

    def upwards(self) -> Iterator[Path]:
        """This process's own group first, then those above it."""
        here = self.mount / self.own.lstrip("/")
        while True:
            if here.is_dir():
                yield here
            if here == self.mount or self.mount not in here.parents:
                return
            here = here.parent


def hierarchies(controller: str) -> Iterator[CgroupHierarchy]:
    """Hierarchies that may have the controller (as version 1 calls it; empty if only version 2 has it), version 2
    first."""
    own = groups_of("self")
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    for _, mount, kind, *_ in mounts:
        if kind == "cgroup2" and "0::" in own:
            yield CgroupHierarchy(Path(mount), 2, "0::", own["0::"])
    for _, mount, kind, options, *_ in mounts:
        if kind == "cgroup" and controller and controller in options.split(","):
            for origin, path in own.items():
                if controller in origin.split(":")[1].split(","):
                    yield CgroupHierarchy(Path(mount), 1, origin, path)


def groups_of(pid: int | str) -> dict[str, str]:
    """``4:memory:`` -> ``/some/group`` for every hierarchy."""
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    return {line[: -len(path)]: path for line in lines if (path := line.split(":", 2)[2])}
