"""Who may touch a file of the cache right now?

The kernel's ``flock``, on the file itself: shared by whoever reads it, exclusive for whoever fills or removes it.
Invariants: a lock ends with the process that took it, however that ends, and a forked child has none of it; whoever has
a lock has it on the file that the path names, not on one that was removed or renamed meanwhile.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from closeranks.data.files.fork_reset import register_fork_reset


class _OpenLocks:
    """A child that kept these open would keep files of a killed parent locked for as long as it lives."""

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
        """Not so in a child that was forked meanwhile, nor after ``release``."""
        return self.fd >= 0 and self._pid == os.getpid()

    def downgrade(self) -> None:
        """Let others read, too. The kernel lets go for a moment: only where nobody can come between."""
        fcntl.flock(self.fd, fcntl.LOCK_SH)

    def release(self) -> None:
        """Unlocked by word, not by closing alone: a child that is just being forked still has it open."""
        if not self.is_held:
            return
        fd, self.fd = self.fd, -1
        _OPEN.fds.discard(fd)
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)

    def remove(self) -> None:
        """The file with its lock."""
        with suppress(FileNotFoundError):
            self.path.unlink()
        self.release()


def try_shared(path: Path) -> Flock | None:
    """None where it is locked exclusively, or just went away; ``FileNotFoundError`` where there is none."""
    return _try(path, os.O_RDONLY, fcntl.LOCK_SH)


def try_exclusive(path: Path, *, create: bool = False) -> Flock | None:
    """Opened for writing where that is allowed: a network file system wants that of an exclusive lock. A file of
    another user may be open to reading alone, which is enough on a disk."""
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
        pass  # somebody else has it, which is the answer
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
