"""The snapshot memory of a host without an agent: files in shared memory, four for each worker."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SnapshotFiles = tuple[tuple[str, ...], ...]


def make_snapshot_files(folder: Path, num_workers: int) -> SnapshotFiles:
    """Creates empty files; existing ones are left as they are."""
    files = []
    for worker in range(num_workers):
        paths = [folder / f"box-{worker}-{name}" for name in ("own0", "own1", "peer0", "peer1")]
        for path in paths:
            path.touch()
        files.append(tuple(map(str, paths)))
    return tuple(files)


@contextmanager
def shared_memory() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="closeranks-test-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
