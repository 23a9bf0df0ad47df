"""Storage in a folder on a disk.

Data files are written under their final names and become part of a checkpoint through the manifest; documents appear
whole by a link or a rename. Invariant: a kill or a power cut at any moment leaves every document either as it was
before or as it is after.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import socket
import stat
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from closeranks.core.system.failpoints import declare_failpoint, failpoint
from closeranks.core.system.regular_file import open_descriptor
from closeranks.storage.disk import (
    WINDOW_BYTES,
    DiskSink,
    fsync_folder,
    make_folder,
    read_from_medium,
    read_range,
    write_all,
)
from closeranks.storage.errors import disk_error
from closeranks.storage.lease import LeaseTimes, own_lease
from closeranks.storage.listing import list_disk
from closeranks.storage.names import LOCK, check_name, is_visible
from closeranks.storage.ownership import hold_folder
from closeranks.storage.protocol import (
    Bytes,
    ChangedError,
    DeniedError,
    ExistsError,
    FileEntry,
    MissingError,
    Ownership,
    StoppedError,
    StorageError,
    StorageSink,
)

WRITTEN_ASIDE = declare_failpoint("document written aside", "a document is complete and fsynced under a temporary name")
IN_PLACE = declare_failpoint("document in place", "a document is renamed into place; its folder is not fsynced yet")
REMOVED = declare_failpoint("file removed", "a file is removed; its folder is not fsynced yet")

_TEMPORARY_SUFFIX = ".aside"
_STALE_S = 3600.0
_POLL_S = 0.1
_NO_LINKS = frozenset((errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK))


class LocalStorage:
    """A folder; created when something is first written to it."""

    is_local = True

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    @property
    def url(self) -> str:
        return str(self._root)

    def _path(self, name: str) -> Path:
        return self._root / check_name(name)

    def names(self, folder: str = "") -> list[str]:
        path = self._path(folder) if folder else self._root
        try:
            with os.scandir(path) as found:
                return sorted(_listed(entry) for entry in found if is_visible(entry.name))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise disk_error(error, "listing", path) from error

    def size(self, name: str) -> int:
        path = self._path(name)
        with _opened(path) as fd:
            found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise MissingError(f"{path} is not a file")
        return found.st_size

    def read(self, name: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        path = self._path(name)
        with _opened(path) as fd:
            wanted = max(0, os.fstat(fd).st_size - start) if num_bytes is None else num_bytes
            data = read_range(fd, start, wanted)
        if len(data) < wanted:
            raise StorageError(f"{path} is truncated: {len(data)} of {wanted} bytes are there from byte {start} on")
        return data

    def read_fresh(self, name: str, chunk_bytes: int) -> Iterator[bytes]:
        with _opened(self._path(name)) as fd:
            yield from read_from_medium(fd, chunk_bytes)

    def entry(self, name: str) -> FileEntry:
        path = self._path(name)
        try:
            found = path.stat()
        except OSError as error:
            raise disk_error(error, "looking for", path) from error
        if not stat.S_ISREG(found.st_mode):
            raise MissingError(f"{path} is not a file")
        return FileEntry(name, found.st_size, str(found.st_mtime_ns))

    def entries(self) -> list[FileEntry]:
        return list_disk(self._root)

    def fetch(self, entry: FileEntry, stop: threading.Event | None = None) -> Generator[bytes, None, None]:
        with _opened(self._path(entry.name)) as fd:
            for start in range(0, entry.num_bytes, WINDOW_BYTES):
                if stop is not None and stop.is_set():
                    raise StoppedError(f"reading {self._path(entry.name)} was given up")
                yield read_range(fd, start, min(WINDOW_BYTES, entry.num_bytes - start))
        if self.entry(entry.name) != entry:
            raise ChangedError(f"{self._path(entry.name)} is not the file that was listed; it was replaced or cut")

    def create(self, name: str, num_bytes: int) -> StorageSink:
        return DiskSink(self._path(name), num_bytes)

    def publish(self, name: str, data: Bytes, *, replace: bool = False) -> None:
        """Without ``replace`` the document gets its name by a link, which only one of several writers can create. On a
        file system without hard links it checks that the name is free and then renames: the document is still whole,
        but of two concurrent writers the later one wins."""
        path = self._path(name)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}{_TEMPORARY_SUFFIX}")
        try:
            make_folder(path.parent)
            try:
                _write_temporary(temporary, data)
                failpoint(WRITTEN_ASIDE)
                if replace:
                    os.replace(temporary, path)
                else:
                    _give_name(temporary, path)
                failpoint(IN_PLACE)
            finally:
                temporary.unlink(missing_ok=True)
            fsync_folder(path.parent)
        except OSError as error:
            raise disk_error(error, "writing", path) from error

    def remove(self, name: str) -> None:
        path = self._path(name)
        try:
            path.unlink()
            failpoint(REMOVED)
            fsync_folder(path.parent)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise disk_error(error, "removing", path) from error

    def remove_folder(self, folder: str) -> None:
        path = self._path(folder)
        try:
            shutil.rmtree(path)
            fsync_folder(path.parent)
        except FileNotFoundError as error:
            if path.exists():  # another process removes it at the same time: remove what is left
                raise disk_error(error, "removing", path) from error
        except OSError as error:
            raise disk_error(error, "removing", path) from error

    def remove_stale(self, older_than_s: float = _STALE_S) -> None:
        """Remove temporary files that killed writers left beside documents of the root; those in folders are removed
        with the folder."""
        before = time.time() - older_than_s
        for path in self._root.glob(f".*{_TEMPORARY_SUFFIX}"):
            with suppress(FileNotFoundError):  # its writer finished after all
                if path.stat().st_mtime < before:
                    path.unlink()

    @contextmanager
    def lock(self, owner: str, *, wait_s: float = 0.0) -> Iterator[None]:
        """The kernel's lock on ``.lock``, released with the process that holds it. The file names it and is kept."""
        path = self._root / LOCK
        try:
            make_folder(self._root)
            fd = open_descriptor(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise disk_error(error, "locking", path) from error
        try:
            _take(fd, path, time.monotonic() + wait_s)
            with suppress(OSError):  # a full disk: the lock is held all the same, but its holder is not recorded
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{owner}, process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            yield
        finally:
            os.close(fd)

    def own(self, owner: str, *, wait_s: float = 0.0) -> AbstractContextManager[Ownership]:
        return hold_folder(self._root, own_lease(owner), wait_s, LeaseTimes())


def _listed(entry: os.DirEntry[str]) -> str:
    try:
        return f"{entry.name}/" if entry.is_dir() else entry.name
    except OSError:  # a loop of links: opening it reports the error
        return entry.name


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        fd = open_descriptor(path)
        try:
            yield fd
        finally:
            os.close(fd)
    except OSError as error:
        raise disk_error(error, "reading", path) from error


def _write_temporary(path: Path, data: Bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)


def _give_name(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        # Over NFS a link whose response was lost is retried and finds itself.
        if temporary.stat().st_nlink != 2:
            raise ExistsError(f"{path} already exists") from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if path.exists():
            raise ExistsError(f"{path} already exists") from None
        os.rename(temporary, path)


def _take(fd: int, path: Path, until: float) -> None:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                holder = read_range(fd, 0, 4096).decode(errors="replace") or "another process"
                raise DeniedError(f"{path.parent} is in use by {holder}; wait for it, or stop it") from None
            time.sleep(_POLL_S)
        except OSError as error:
            raise disk_error(error, "locking", path) from error
        else:
            return
