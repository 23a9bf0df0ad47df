"""What does a process leave on a host? Looked up in /proc, for tests that assert that nothing is left."""

from __future__ import annotations

import os
import select
from pathlib import Path


def processes_marked(marker: str) -> list[int]:
    """Live processes whose environment carries the marker."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if marker.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it ended while we looked
            continue
    return found


def exists(pid: int) -> bool:
    """Whether the process is there, be it as a zombie."""
    return Path(f"/proc/{pid}").exists()


def await_end(pids: list[int], timeout_s: float) -> None:
    """Returns when all have died; fails when one has not in time."""
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        has_ended = bool(poller.poll(int(timeout_s * 1000)))
        os.close(fd)
        assert has_ended, f"process {pid} lives on"


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def is_listening(port: int) -> bool:
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return any(row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port for row in rows)
