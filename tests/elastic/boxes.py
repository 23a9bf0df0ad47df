"""Boxes without an agent: files in shared memory, four for each worker of a host."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

Boxes = tuple[tuple[str, ...], ...]


def make_boxes(folder: Path, num_workers: int) -> Boxes:
    """Empty files, which stay what they are when they are there already."""
    boxes = []
    for box in range(num_workers):
        paths = [folder / f"box-{box}-{name}" for name in ("own0", "own1", "peer0", "peer1")]
        for path in paths:
            path.touch()
        boxes.append(tuple(map(str, paths)))
    return tuple(boxes)


@contextmanager
def shared_memory() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="closeranks-test-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
