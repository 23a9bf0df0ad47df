"""Rescues the snapshots in a host's memory to disk when its job ends before its state was saved.

They are written beside the run's checkpoints, slot by slot and unchanged, where a run that resumes finds them; if that
fails, into memory or among temporary files. Invariant: a folder under its final name is complete: it is written under
another name, made durable, and renamed.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
import time
from pathlib import Path
from typing import BinaryIO

from closeranks.agent.host.snapshot_memory import SnapshotMemory
from closeranks.core.system.fallback_folders import fallback_folders, resume_advice

FOLDER = "rescued"
_CHUNK_BYTES = 1 << 22


def rescue_snapshots(
    boxes: SnapshotMemory, run: Path, host: str, patience_s: float = math.inf, *, is_part: bool = False
) -> str:
    """Returns where the snapshots were written, in a sentence; empty if there was nothing to rescue. ``patience_s``:
    the time limit. ``is_part``: other hosts held some of the state, too."""
    until = time.monotonic() + patience_s
    try:
        num_bytes = _keep(boxes, run / FOLDER / host, until)
    except OSError as error:
        return _rescue_elsewhere(boxes, run, host, until, error.strerror or str(error), is_part)
    return (
        f"The state in memory was written to {_words(run / FOLDER / host, num_bytes)}. {resume_advice(run)}"
        if num_bytes
        else ""
    )


def _rescue_elsewhere(boxes: SnapshotMemory, run: Path, host: str, until: float, why: str, is_part: bool) -> str:
    for place in fallback_folders(run, boxes.num_bytes):
        try:
            num_bytes = _keep(boxes, place / FOLDER / host, until)
        except OSError:
            shutil.rmtree(place, ignore_errors=True)
            continue
        others = f" The state that other hosts held belongs beside it, in {place / FOLDER}." if is_part else ""
        where = _words(place / FOLDER / host, num_bytes)
        written = f"{run} cannot be written ({why}): the state in memory was written to {where}."
        return f"{written} {resume_advice(place)}{others}"
    return f"The state in memory is lost: it could not be written to {run / FOLDER / host} ({why}), nor anywhere else."


def _words(folder: Path, num_bytes: int) -> str:
    return f"{folder} ({num_bytes / 2**20:.0f} MiB)"


def _keep(boxes: SnapshotMemory, target: Path, until: float) -> int:
    """Write the snapshots to ``target``; returns the bytes written, 0 if there was nothing to write."""
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        num_bytes = _write(boxes, aside, until)
        if num_bytes:
            _put(aside, target)
        return num_bytes
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _put(aside: Path, target: Path) -> None:
    """Rename into place; what existed before is removed only afterwards."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.replace(target, old)
    os.replace(aside, target)
    _sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _write(boxes: SnapshotMemory, folder: Path, until: float) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    num_bytes = 0
    for number, box in enumerate(boxes.paths):
        for slot, path in enumerate(box):
            size = os.stat(path).st_size
            if not size:
                continue
            with open(path, "rb") as source, (folder / f"box-{number:05d}-{slot}").open("wb") as target:
                _copy(source, target, until)
                target.flush()
                os.fsync(target.fileno())
            num_bytes += size
    _sync(folder)
    return num_bytes


def _copy(source: BinaryIO, target: BinaryIO, until: float) -> None:
    while data := source.read(_CHUNK_BYTES):
        if time.monotonic() > until:
            raise TimeoutError(errno.ETIMEDOUT, "it would take too long")
        target.write(data)


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
