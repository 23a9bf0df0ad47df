"""What becomes of the memory of a host whose job is over before its state was saved?

It is written beside the run's checkpoints, slot by slot as it is, where a run that resumes finds it. Invariant: what is
found under its name is whole: it is written aside, made durable, and renamed.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from closeranks.agent.boxes import Boxes

FOLDER = "rescued"


def rescue(boxes: Boxes, run: Path, host: str) -> str:
    """Where it lies, in a sentence; empty where there was nothing to rescue."""
    target = run / FOLDER / host
    aside = target.with_name(f".{host}.{os.getpid()}")
    try:
        num_bytes = _write(boxes, aside)
        if not num_bytes:
            shutil.rmtree(aside, ignore_errors=True)
            return ""
        _put(aside, target)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        return f"What this host held in memory could not be written to {target} ({error.strerror})."
    return f"What this host held in memory lies in {target} ({num_bytes / 2**20:.0f} MiB): resume from the run folder."


def _put(aside: Path, target: Path) -> None:
    """What lay there before is gone only when the new one stands."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.replace(target, old)
    os.replace(aside, target)
    _sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _write(boxes: Boxes, folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    num_bytes = 0
    for number, box in enumerate(boxes.paths):
        for slot, path in enumerate(box):
            size = os.stat(path).st_size
            if not size:
                continue
            with open(path, "rb") as source, (folder / f"box-{number:05d}-{slot}").open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 22)
                target.flush()
                os.fsync(target.fileno())
            num_bytes += size
    _sync(folder)
    return num_bytes


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
