"""Simulates a full disk for one folder only.

A tmpfs, large enough not to be noticed, is mounted over the folder before the run. The disk becomes full when the size
of the tmpfs is set to what it holds: from then on every new block fails with ENOSPC, while what was saved before can
still be read, as on a real disk. Invariants: the tmpfs is mounted in a mount namespace of this process and its children
alone, so that no other process ever sees it and the kernel removes it with the last of them, however they end; when it
is closed, what was written is moved to the folder below.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from pathlib import Path
from types import TracebackType

from closeranks.storage.names import OWNER

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS = 0x20000
_MS_REMOUNT, _MS_REC, _MS_PRIVATE = 32, 0x4000, 0x40000
_MNT_DETACH = 2
_CAP_SYS_ADMIN = 21
_TRIES = 50


def mount_problem() -> str:
    """Why nothing can be mounted here; empty where it can."""
    status = Path("/proc/self/status").read_text()
    effective = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    if int(effective, 16) >> _CAP_SYS_ADMIN & 1:
        return ""
    return "only root can mount a small file system"


class FillableDisk:
    """A file system over ``folder`` that can be made full and freed again.

    Call sequence: construct it before starting any process that should see it, ``open`` it before anything is written,
    then ``close`` it, which may be called more than once.
    """

    def __init__(self, folder: Path, size: str = "50%") -> None:
        self._folder = folder
        self._size = size
        self._is_mounted = False
        _leave_shared_mounts()

    def open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        if any(path.name != OWNER for path in self._folder.iterdir()):
            raise OSError(errno.ENOTEMPTY, "there are checkpoints already, which would be hidden", str(self._folder))
        _mount("tmpfs", str(self._folder), "tmpfs", 0, f"size={self._size}")
        self._is_mounted = True

    def fill(self) -> None:
        """Leave no free block from now on. Retries while a file is growing."""
        if not self._is_mounted:
            raise OSError(errno.ENODEV, "no file system is mounted over the checkpoints", str(self._folder))
        for _ in range(_TRIES):
            room = os.statvfs(self._folder)
            used_bytes = max(1, room.f_blocks - room.f_bfree) * room.f_frsize  # a size of 0 would mean: no limit
            try:
                self._resize(str(used_bytes))
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                continue
            return
        raise BlockingIOError(errno.EAGAIN, "it is written to too fast to be filled", str(self._folder))

    def free(self) -> None:
        """Restore the original size."""
        if self._is_mounted:
            self._resize(self._size)

    def _resize(self, size: str) -> None:
        _mount("tmpfs", str(self._folder), "tmpfs", _MS_REMOUNT, f"size={size}")

    def close(self) -> None:
        """Unmount, and move what was written to the folder itself."""
        if not self._is_mounted:
            return
        kept = self._folder.with_name(f".{self._folder.name}-{os.getpid()}")
        try:
            shutil.copytree(self._folder, kept, symlinks=True, ignore=shutil.ignore_patterns(OWNER))
        finally:
            self._is_mounted = False
            _check(_LIBC.umount2(os.fsencode(self._folder), _MNT_DETACH), str(self._folder))
        for path in kept.iterdir():
            path.rename(self._folder / path.name)
        kept.rmdir()

    def __enter__(self) -> FillableDisk:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _leave_shared_mounts() -> None:
    """Enter a mount namespace of our own: later mounts are visible only to this process and its children."""
    _check(_LIBC.unshare(_CLONE_NEWNS), "/")
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE, "")


def _mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    words = [os.fsencode(word) for word in (source, target, kind)]
    _check(_LIBC.mount(*words, ctypes.c_ulong(flags), os.fsencode(options)), target)


def _check(result: int, place: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), place)
