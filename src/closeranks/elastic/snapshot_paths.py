"""Paths of the snapshot memory of this host, which the agent owns and which outlives the workers. Imports nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SnapshotPaths:
    """The snapshot memory of this host: four paths for each worker, and the index of this rank's own. Empty: no
    snapshots are kept."""

    paths: tuple[tuple[str, ...], ...] = ()
    own_index: int = 0
    run: int = 0
    """The number of the session in its process: snapshots of another session are not used."""

    def __bool__(self) -> bool:
        return bool(self.paths)
