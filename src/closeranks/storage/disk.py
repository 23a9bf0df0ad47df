"""Writes bytes to a disk durably.

Everything a file or folder needs to survive a power cut: the data is written and fsynced, and its name is fsynced in
its folder. Invariant: once a function here returns, its effect is durable. Writing and reading release the GIL.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from closeranks.core.system.failpoints import declare_failpoint, failpoint
from closeranks.storage.errors import disk_error
from closeranks.storage.protocol import Bytes, FullError, StorageError

WINDOW_BYTES = 8 << 20
"""One system call writes at most this much, after which the kernel is asked to start writeback."""
CHUNK_WRITTEN = declare_failpoint("data chunk written", "a data file on a disk is partly written")
DATA_DURABLE = declare_failpoint("data file durable", "a data file on a disk is complete and fsynced")

_SYNC_FILE_RANGE_WRITE = 2
_LIBC = ctypes.CDLL(None, use_errno=True)


def fsync_folder(path: Path) -> None:
    """Makes names durable: those of files created, renamed or removed in it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(path: Path) -> None:
    """Creates it with its parents, each made durable in its own parent."""
    if path.is_dir():
        return
    make_folder(path.parent)
    try:
        path.mkdir(exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
    fsync_folder(path.parent)


def write_all(fd: int, data: Bytes) -> None:
    """Loops, since one write may be short: a signal, a quota, more than 2 GiB."""
    rest = memoryview(data).cast("B")
    while rest:
        rest = rest[os.write(fd, rest[:WINDOW_BYTES]) :]


def read_range(fd: int, start: int, num_bytes: int) -> bytes:
    """The bytes of the range that exist: fewer at the end of the file."""
    first = os.pread(fd, num_bytes, start)
    if not first or len(first) == num_bytes:
        return first
    found = [first]
    done = len(first)
    while done < num_bytes and (more := os.pread(fd, num_bytes - done, start + done)):
        found.append(more)
        done += len(more)
    return b"".join(found)


def read_from_medium(fd: int, chunk_bytes: int) -> Iterator[bytes]:
    """Yields a whole file, bypassing the page cache: cached pages are dropped first, and again behind the reader, so
    that this neither trusts the writer's memory nor evicts training's own data. Only clean pages can be dropped, hence
    the fsync. While a chunk is processed the kernel already fetches the next one."""
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    num_bytes = os.fstat(fd).st_size
    for start in range(0, num_bytes, chunk_bytes):
        wanted = min(chunk_bytes, num_bytes - start)
        os.posix_fadvise(fd, start, 2 * chunk_bytes, os.POSIX_FADV_WILLNEED)
        data = read_range(fd, start, wanted)
        os.posix_fadvise(fd, start, wanted, os.POSIX_FADV_DONTNEED)
        if len(data) < wanted:
            raise StorageError(f"a file shrank while it was read: {start + len(data)} of {num_bytes} bytes are there")
        yield data


class DiskSink:
    """A data file under its final name; it is not part of a checkpoint until a manifest lists it.

    The kernel is asked to start writeback of each window as it comes; otherwise all of it waits for the fsync of
    ``close``, which then takes as long as the whole file.
    """

    def __init__(self, path: Path, num_bytes: int) -> None:
        self._path = path
        self._num_bytes = num_bytes
        self._written = 0
        self._fd = -1
        try:
            make_folder(path.parent)
            # A new file: a process may still read the old one, or hold a link to it.
            path.unlink(missing_ok=True)
            self._check_room()
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except OSError as error:
            raise disk_error(error, "creating", path) from error

    def _check_room(self) -> None:
        """Fails before gigabytes are written in vain; a file system that reports no sizes (some of FUSE) may try."""
        room = os.statvfs(self._path.parent)
        free_bytes = room.f_bavail * room.f_frsize
        if room.f_blocks and free_bytes < self._num_bytes:
            need, have = (f"{number / 2**20:.1f} MiB" for number in (self._num_bytes, free_bytes))
            what = f"the disk is full: {self._path} needs {need}, and {have} are free"
            raise FullError(f"{what}; free some space, or save elsewhere (checkpoint.folder)")

    def write(self, data: Bytes) -> None:
        rest = memoryview(data).cast("B")
        try:
            while rest:
                count = os.write(self._fd, rest[:WINDOW_BYTES])
                # Only a hint: if the file system does not support it, the fsync does all the work.
                _LIBC.sync_file_range(
                    self._fd,
                    ctypes.c_int64(self._written),
                    ctypes.c_int64(count),
                    ctypes.c_uint(_SYNC_FILE_RANGE_WRITE),
                )
                self._written += count
                rest = rest[count:]
        except OSError as error:
            raise disk_error(error, "writing", self._path) from error
        failpoint(CHUNK_WRITTEN)

    def close(self) -> None:
        if self._written != self._num_bytes:
            raise StorageError(f"{self._path} got {self._written} bytes instead of {self._num_bytes}")
        try:
            # Never twice: after a failed fsync the kernel marks the lost pages clean, and a second fsync succeeds.
            os.fsync(self._fd)
            fd, self._fd = self._fd, -1
            os.close(fd)
            fsync_folder(self._path.parent)
        except OSError as error:
            raise disk_error(error, "writing", self._path) from error
        failpoint(DATA_DURABLE)

    def abort(self) -> None:
        try:
            if self._fd >= 0:
                fd, self._fd = self._fd, -1
                os.close(fd)
            self._path.unlink(missing_ok=True)
        except OSError:
            return  # the disk that failed the save fails this too; without a manifest the file is ignored
