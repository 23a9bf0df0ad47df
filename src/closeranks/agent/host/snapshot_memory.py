"""Memory for snapshots that outlives the workers: the agent owns it, its workers write into it.

Each local rank has four anonymous files (memfd): two for the worker's own snapshots, two for those of a peer.
Workers open them by the agent's own descriptors under /proc, so that they need no name in /dev/shm, no resource tracker
can unlink them, and the kernel frees them with the agent, however the agent ends. Invariant: the agent never writes
into this memory and does not interpret it.
"""

from __future__ import annotations

import os
from types import TracebackType

FILES_PER_WORKER = 4


class SnapshotMemory:
    """The snapshot memory of one host, by local rank."""

    def __init__(self) -> None:
        self._fds: list[list[int]] = []

    def grow(self, num_workers: int) -> None:
        """Make sure that each worker of the next generation has its files; those of earlier generations are kept."""
        while len(self._fds) < num_workers:
            self._fds.append([os.memfd_create("closeranks-slot") for _ in range(FILES_PER_WORKER)])

    def shrink(self, num_workers: int) -> None:
        """Free the files of local ranks from ``num_workers`` on: their contents are not needed any more."""
        while len(self._fds) > num_workers:
            for fd in self._fds.pop():
                os.close(fd)

    @property
    def paths(self) -> list[list[str]]:
        """For each local rank, its own two files and its peer's two."""
        return [[f"/proc/{os.getpid()}/fd/{fd}" for fd in fds] for fds in self._fds]

    @property
    def num_bytes(self) -> int:
        """Memory that the snapshots take now."""
        return sum(os.fstat(fd).st_blocks * 512 for fds in self._fds for fd in fds)

    def close(self) -> None:
        self.shrink(0)

    def __enter__(self) -> SnapshotMemory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
