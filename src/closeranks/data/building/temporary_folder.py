"""Provides a folder for files that a build needs only while it runs.

It is among the system's temporary folders, locked by the kernel for as long as its process lives. Invariants: the
folder is removed at the end of its ``with`` block; one that a killed process left behind is removed when the next is
created, and one that is in use is never removed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "closeranks-build-"


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """An empty folder of this process."""
    _sweep()
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(OSError):  # a file system without locks: then no other process removes it either
            fcntl.flock(fd, fcntl.LOCK_EX)
        if folder.is_dir():  # not removed by another process between its creation and its lock
            break
        os.close(fd)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(fd)


def _sweep() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # removed by now, or another user's
            continue
        try:
            if os.fstat(fd).st_uid == os.geteuid() and _locked(fd):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(fd)


def _locked(fd: int) -> bool:
    """Whether the lock was free, and this process holds it now."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
