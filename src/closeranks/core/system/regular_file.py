"""Opens files of unknown origin, regular files only.

A folder from elsewhere may hold a named pipe, a socket, a device or a link to one of them. Opening a pipe blocks until
its other end is opened, reading ``/dev/zero`` never ends, and opening some devices acts on the hardware. Invariant:
nothing here blocks, and a descriptor it returns belongs to a regular file; anything else is an ``OSError`` whose
``strerror`` says what was found.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class NotRegularError(OSError):
    """The path leads to something other than a regular file or a folder (a folder is an ``IsADirectoryError``)."""


def open_descriptor(path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: int = 0o644) -> int:
    """A descriptor of a regular file; ``flags`` and ``mode`` as for ``os.open``. Links are followed, a loop of them is
    ``ELOOP``."""
    try:
        regular_stat(path)  # before opening, which alone triggers some devices
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, mode)
    try:
        _check(os.fstat(fd), path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_binary(path: str | os.PathLike[str], buffering: int = -1) -> BinaryIO:
    """``open(path, "rb")`` for a regular file; with ``buffering=0`` a raw file."""
    return open(path, "rb", buffering=buffering, opener=_opener)


def read_bytes(path: str | os.PathLike[str], most: int | None = None) -> bytes:
    """All of a regular file; refused with ``EFBIG`` if it has more than ``most`` bytes."""
    with open_binary(path) as file:
        if most is not None and os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", os.fspath(path))
        return file.read()


def read_text(path: str | os.PathLike[str], most: int | None = None) -> str:
    """The same, as UTF-8."""
    return read_bytes(path, most).decode()


def regular_stat(path: str | os.PathLike[str]) -> os.stat_result:
    """``os.stat`` of a regular file."""
    found = os.stat(path)
    _check(found, path)
    return found


def _opener(path: str, flags: int) -> int:
    return open_descriptor(path, flags)


def _check(found: os.stat_result, path: str | os.PathLike[str]) -> None:
    if stat.S_ISREG(found.st_mode):
        return
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    kind = _KINDS.get(stat.S_IFMT(found.st_mode), "not a file")
    raise NotRegularError(errno.EINVAL, f"it is {kind}, not a regular file", os.fspath(path))
