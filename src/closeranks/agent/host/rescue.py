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
    memory: SnapshotMemory, run: Path, host: str, timeout_s: float = math.inf, *, is_part: bool = False
) -> str:
    """Returns where the snapshots were written, in a sentence; empty if there was nothing to rescue. ``timeout_s``:
    the time limit. ``is_part``: other hosts held some of the state, too."""
    deadline = time.monotonic() + timeout_s
    try:
        num_bytes = _save(memory, run / FOLDER / host, deadline)
    except OSError as error:
        return _rescue_elsewhere(memory, run, host, deadline, error.strerror or str(error), is_part)
    return (
        f"The state in memory was written to {_location(run / FOLDER / host, num_bytes)}. {resume_advice(run)}"
        if num_bytes
        else ""
    )


def _rescue_elsewhere(memory: SnapshotMemory, run: Path, host: str, deadline: float, why: str, is_part: bool) -> str:
    for fallback in fallback_folders(run, memory.num_bytes):
        try:
            num_bytes = _save(memory, fallback / FOLDER / host, deadline)
        except OSError:
            shutil.rmtree(fallback, ignore_errors=True)
            continue
        others = f" The state that other hosts held belongs beside it, in {fallback / FOLDER}." if is_part else ""
        where = _location(fallback / FOLDER / host, num_bytes)
        written = f"{run} cannot be written ({why}): the state in memory was written to {where}."
        return f"{written} {resume_advice(fallback)}{others}"
    return f"The state in memory is lost: it could not be written to {run / FOLDER / host} ({why}), nor anywhere else."


def _location(folder: Path, num_bytes: int) -> str:
    return f"{folder} ({num_bytes / 2**20:.0f} MiB)"


def _save(memory: SnapshotMemory, target: Path, deadline: float) -> int:
    """Write the snapshots to ``target``; returns the bytes written, 0 if there was nothing to write."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        num_bytes = _write(memory, temporary, deadline)
        if num_bytes:
            _rename_into_place(temporary, target)
        return num_bytes
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _rename_into_place(temporary: Path, target: Path) -> None:
    """Rename into place; what existed before is removed only afterwards."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.replace(target, old)
    os.replace(temporary, target)
    _sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _write(memory: SnapshotMemory, folder: Path, deadline: float) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    num_bytes = 0
    for number, paths in enumerate(memory.paths):
        for slot, path in enumerate(paths):
            size = os.stat(path).st_size
            if not size:
                continue
            with open(path, "rb") as source, (folder / f"box-{number:05d}-{slot}").open("wb") as target:
                _copy(source, target, deadline)
                target.flush()
                os.fsync(target.fileno())
            num_bytes += size
    _sync(folder)
    return num_bytes


def _copy(source: BinaryIO, target: BinaryIO, deadline: float) -> None:
    while data := source.read(_CHUNK_BYTES):
        if time.monotonic() > deadline:
            raise TimeoutError(errno.ETIMEDOUT, "it would take too long")
        target.write(data)


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
