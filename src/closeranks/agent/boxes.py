"""Which memory outlives a worker? Boxes that the agent owns and its workers fill.

A box is four anonymous files (memfd): two for the worker's own copies, two for those of a peer. Workers open them by
the agent's own descriptors under /proc, so that a box needs no name in /dev/shm, nobody's resource tracker can unlink
it, and the kernel frees it with the agent, however the agent ends. Invariant: the agent never writes into a box; what
lies in it is the workers' business.
"""

from __future__ import annotations

import os
from types import TracebackType

FILES_PER_BOX = 4


class Boxes:
    """The boxes of one host, by local rank."""

    def __init__(self) -> None:
        self._fds: list[list[int]] = []

    def provide(self, num_workers: int) -> None:
        """At least one box for each worker of the coming generation; those of an earlier one stay as they are."""
        while len(self._fds) < num_workers:
            self._fds.append([os.memfd_create("closeranks-slot") for _ in range(FILES_PER_BOX)])

    def retire(self, num_workers: int) -> None:
        """What lay in boxes beyond these is not needed any more."""
        while len(self._fds) > num_workers:
            for fd in self._fds.pop():
                os.close(fd)

    @property
    def paths(self) -> list[list[str]]:
        """Of every box, its own two files and its peer's two."""
        return [[f"/proc/{os.getpid()}/fd/{fd}" for fd in box] for box in self._fds]

    @property
    def num_bytes(self) -> int:
        """Memory that the boxes take now."""
        return sum(os.fstat(fd).st_blocks * 512 for box in self._fds for fd in box)

    def close(self) -> None:
        self.retire(0)

    def __enter__(self) -> Boxes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
