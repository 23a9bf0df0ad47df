"""Offers files behind a URL as data files.

Listed once; fetched whole into the cache of this host when they are used, or shortly before when they are prefetched.
Invariants: every byte is of the version that was listed; a pickled copy has the same listing; a forked child opens its
own connections; no request is made before something is asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from closeranks.data.files.cache import FileCache, PrefetchOutcome
from closeranks.data.files.cache_errors import empty_error, not_listed_error, storage_error
from closeranks.data.files.cache_write import RemoteFileVersion
from closeranks.data.files.fork_reset import register_fork_reset
from closeranks.data.files.prefetch import FilePrefetcher
from closeranks.data.files.protocol import FileInfo
from closeranks.storage.open import open_storage
from closeranks.storage.protocol import FileEntry, MissingError, Storage, StorageError


class RemoteFiles:
    """A folder, or one file. A URL that ends in ``/`` is taken as a folder without checking for a file first."""

    is_local = False

    def __init__(self, url: str, cache: FileCache, digests: Mapping[str, str] | None = None) -> None:
        self._given = url
        self._base = url.rstrip("/")
        self._cache = cache
        self._digests = dict(digests or {})
        self._listing: dict[str, FileInfo] | None = None
        self.reset_after_fork()
        register_fork_reset(self)

    def reset_after_fork(self) -> None:
        self._lock = threading.Lock()
        self._storage: Storage | None = None
        self._prefetcher = FilePrefetcher(self._prefetch_file)

    def __getstate__(self) -> dict[str, Any]:
        live = ("_lock", "_storage", "_prefetcher")
        return {name: value for name, value in self.__dict__.items() if name not in live}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.reset_after_fork()
        register_fork_reset(self)

    @property
    def url(self) -> str:
        return self._given.rstrip("/")

    def list(self) -> Sequence[FileInfo]:
        return tuple(self._listed().values())

    @contextmanager
    def local_path(self, name: str) -> Iterator[Path]:
        entry = self._entry(name)
        with _translate_errors():
            held = self._cache.acquire(self._file_version(entry), lambda: self._fetch(entry), self._wanted)
        try:
            yield held.path
        finally:
            held.release()
            self._prefetcher.space_changed()

    def read(self, name: str) -> bytes:
        """Reads the listed version if the file was listed; hidden files and files added later are not listed."""
        with _translate_errors():
            if name in self._listed():
                return b"".join(self._fetch(self._entry(name)))
            return self._opened().read(name)

    def prefetch(self, names: Sequence[str]) -> None:
        self._prefetcher.prefetch(names)

    def discard(self, name: str) -> None:
        self._cache.discard(self._file_version(self._entry(name)))

    def full_name(self, name: str) -> str:
        return f"{self._base}/{name}"

    def close(self) -> None:
        self._prefetcher.close()
        self._cache.close()

    def _opened(self) -> Storage:
        with self._lock:
            if self._storage is None:
                self._storage = open_storage(self._base)
            return self._storage

    def _listed(self) -> dict[str, FileInfo]:
        with self._lock:
            if self._listing is None:
                with _translate_errors():
                    found = self._as_file() or open_storage(self._base).entries()
                if not found:
                    raise empty_error(self.url)
                self._listing = {entry.name: FileInfo(entry.name, entry.num_bytes, entry.version) for entry in found}
            return self._listing

    def _as_file(self) -> Sequence[FileEntry]:
        """The file that the URL itself names, if there is one; its parent folder becomes the root."""
        folder, _, name = self._given.rpartition("/")
        if not name or folder.endswith(":/") or "::" in folder:
            return []
        try:
            entry = open_storage(folder).entry(name)
        except MissingError:
            return []
        self._base = folder
        return [entry]

    def _entry(self, name: str) -> FileEntry:
        info = self._listed().get(name)
        if info is None:
            raise not_listed_error(name, self.url)
        return FileEntry(info.name, info.num_bytes, info.version)

    def _file_version(self, entry: FileEntry) -> RemoteFileVersion:
        return RemoteFileVersion(
            self.full_name(entry.name), entry.num_bytes, entry.version, self._digests.get(entry.name, "")
        )

    def _wanted(self) -> Collection[str]:
        listed = self._listed()
        known = (self._entry(name) for name in self._prefetcher.pending if name in listed)
        return {self._cache.path_of(self._file_version(entry)).name for entry in known}

    def _fetch(self, entry: FileEntry, stop: threading.Event | None = None) -> Generator[bytes, None, None]:
        return self._opened().fetch(entry, stop)

    def _prefetch_file(self, name: str, stop: threading.Event) -> PrefetchOutcome:
        entry = self._entry(name)
        return self._cache.prefetch(self._file_version(entry), lambda: self._fetch(entry, stop), self._wanted)


@contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        raise storage_error(error) from error
