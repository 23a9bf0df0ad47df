"""Offers files on a local disk as data files.

They are used in place: nothing is fetched, prefetched or evicted. Invariant: a listed file has, when it is used, the
size and the modification time that it had when listed, or ``local_path`` raises; a process that maps a truncated file
would die of SIGBUS instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from closeranks.core.errors import DataError
from closeranks.core.system.regular_file import read_bytes, regular_stat
from closeranks.data.files.cache_errors import empty_error, storage_error
from closeranks.data.files.protocol import FileInfo
from closeranks.storage.errors import disk_error
from closeranks.storage.local import LocalStorage
from closeranks.storage.names import check_name
from closeranks.storage.protocol import ChangedError, FileEntry, StorageError


class LocalFiles:
    """A folder, or one file."""

    is_local = True

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._listing: dict[str, FileInfo] | None = None

    @property
    def url(self) -> str:
        return str(self._path)

    def list(self) -> Sequence[FileInfo]:
        if self._listing is None:
            try:
                found = self._entries()
            except StorageError as error:
                raise storage_error(error) from error
            except OSError as error:
                raise storage_error(disk_error(error, "looking for", self._path)) from error
            if not found:
                raise empty_error(self.url)
            self._listing = {entry.name: FileInfo(entry.name, entry.num_bytes, entry.version) for entry in found}
        return tuple(self._listing.values())

    @contextmanager
    def local_path(self, name: str) -> Iterator[Path]:
        path = self._path_of(name)
        try:
            found = regular_stat(path)
        except OSError as error:
            raise storage_error(disk_error(error, "looking for", path)) from error
        listed = (self._listing or {}).get(name)
        if listed is not None and (found.st_size, str(found.st_mtime_ns)) != (listed.num_bytes, listed.version):
            how = f"it had {listed.num_bytes} bytes then and has {found.st_size} now"
            raise storage_error(ChangedError(f"{path} is not the file that was listed: {how}, or was written since"))
        yield path

    def read(self, name: str) -> bytes:
        path = self._path_of(name)
        try:
            return read_bytes(path)
        except OSError as error:
            raise storage_error(disk_error(error, "reading", path)) from error

    def prefetch(self, names: Sequence[str]) -> None:
        return

    def discard(self, name: str) -> None:
        """Does nothing: there is no copy."""

    def full_name(self, name: str) -> str:
        return str(self._path_of(name))

    def close(self) -> None:
        return

    def _entries(self) -> Sequence[FileEntry]:
        if self._path.is_file():
            return [LocalStorage(self._path.parent).entry(self._path.name)]
        if not self._path.exists():
            raise DataError(f"there is no file or folder {self._path}", "Check the path.")
        return LocalStorage(self._path).entries()

    def _path_of(self, name: str) -> Path:
        try:
            check_name(name)
        except StorageError as error:
            raise storage_error(error) from error
        # Decided by file type, so that ``f/f`` is found, too; one without permission fails when it is opened.
        is_itself = name == self._path.name and os.path.isfile(self._path)
        return self._path if is_itself else self._path / name
