"""Where does a build keep what it needs only while it runs?

In a folder among the system's temporary ones, locked by the kernel for as long as its process lives. Invariants: the
folder goes with the block that asked for it; one that a killed process left behind goes when the next is made, and one
that is in use never does.
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
    """A folder of this process's own, empty."""
    _sweep()
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(OSError):  # a file system without locks: then nobody can sweep either
            fcntl.flock(fd, fcntl.LOCK_EX)
        if folder.is_dir():  # not swept by another between its making and its lock
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
        except OSError:  # gone by now, or another user's
            continue
        try:
            if os.fstat(fd).st_uid == os.geteuid() and _locked(fd):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(fd)


def _locked(fd: int) -> bool:
    """Whether nobody had it, and this process has it now."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
