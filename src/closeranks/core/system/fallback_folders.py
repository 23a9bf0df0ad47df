"""Fallback folders for the state of a run that must end while its own folder cannot be written.

Invariants: each folder is new, and readable by this user alone; places without room are skipped. Nothing here raises.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from closeranks.core.system.environment import temporary_folder

_MEMORY = "/dev/shm"


def fallback_roots() -> tuple[str, ...]:
    """Where to look, in this order: memory, and the folder for temporary files (``TMPDIR``)."""
    return tuple(dict.fromkeys((_MEMORY, temporary_folder())))


def fallback_folders(run: Path, num_bytes: int) -> Iterator[Path]:
    """New folders with room for this many bytes, one after the other; the caller removes those it does not use."""
    for base in fallback_roots():
        try:
            room = os.statvfs(base)
            if room.f_bavail * room.f_frsize > num_bytes:
                yield Path(tempfile.mkdtemp(prefix=f"closeranks-{run.name}-", dir=base))
        except OSError:
            continue


def resume_advice(place: Path) -> str:
    """Tells the user how to use a state that was saved there."""
    passing = " It is in memory and lost at a reboot: copy it to a disk." if str(place).startswith(_MEMORY) else ""
    return f"Resume via checkpoint.resume={place}.{passing}"
