"""Locks on files of the cache, shared between processes.

Uses the kernel's ``flock`` on the file itself: shared for readers, exclusive for the process that writes or removes it.
Invariants: a lock ends with the process that took it, however that process ends, and a forked child does not inherit
it; a lock is always on the file that the path names, not on one that was removed or renamed meanwhile.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from closeranks.data.files.fork_reset import register_fork_reset


class _OpenLocks:
    """Closed in a forked child, which would otherwise keep the files of a killed parent locked for as long as it
    lives."""

    def __init__(self) -> None:
        self.fds: set[int] = set()

    def reset_after_fork(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = set()


_OPEN = _OpenLocks()
register_fork_reset(_OPEN)


class Flock:
    """An open file with a lock on it."""

    __slots__ = ("_pid", "fd", "path")

    def __init__(self, fd: int, path: Path) -> None:
        self.fd = fd
        self.path = path
        self._pid = os.getpid()
        _OPEN.fds.add(fd)

    @property
    def is_held(self) -> bool:
        """False in a child that was forked meanwhile, and after ``release``."""
        return self.fd >= 0 and self._pid == os.getpid()

    def downgrade(self) -> None:
        """Change to a shared lock. The kernel releases the lock for a moment: use it only where no other process can
        intervene."""
        fcntl.flock(self.fd, fcntl.LOCK_SH)

    def release(self) -> None:
        """Unlocks explicitly before closing: a child that is just being forked still has the file open."""
        if not self.is_held:
            return
        fd, self.fd = self.fd, -1
        _OPEN.fds.discard(fd)
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)

    def remove(self) -> None:
        """Remove the file, and release the lock."""
        with suppress(FileNotFoundError):
            self.path.unlink()
        self.release()


def try_shared(path: Path) -> Flock | None:
    """None if it is locked exclusively or has just been removed; ``FileNotFoundError`` if there is no file."""
    return _try(path, os.O_RDONLY, fcntl.LOCK_SH)


def try_exclusive(path: Path, *, create: bool = False) -> Flock | None:
    """The file is opened for writing if permitted: a network file system requires that for an exclusive lock. Another
    user's file may be readable only, which is enough on a local disk."""
    try:
        return _try(path, os.O_RDWR | (os.O_CREAT if create else 0), fcntl.LOCK_EX)
    except PermissionError as error:
        try:
            return _try(path, os.O_RDONLY, fcntl.LOCK_EX)
        except FileNotFoundError:
            raise error from None


def _try(path: Path, flags: int, kind: int) -> Flock | None:
    fd = os.open(path, flags, 0o666)
    lock = Flock(fd, path)
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
        if _names(path, fd):
            return lock
    except BlockingIOError:
        pass  # another process has it: the answer is None
    except BaseException:
        lock.release()
        raise
    lock.release()
    return None


def _names(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False
