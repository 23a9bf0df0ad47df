"""The interface of a storage: what a place must offer to hold checkpoints, or data to read.

Names are relative to the storage's root, with ``/`` between folders. Call sequence of a save: ``create`` for each data
file, then ``publish`` of small documents, the manifest that completes the save last. Invariants: once
``StorageSink.close`` or ``publish`` has returned, the data survives a crash; a document appears under its name whole or
not at all; an aborted sink leaves nothing that a reader would use. Imports no torch: the writer is a process without
it.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

Bytes = bytes | bytearray | memoryview


class StorageError(Exception):
    """A storage operation failed; ``str`` is one sentence for the user."""

    is_final = False
    """Whether a retry soon is pointless (refused credentials, read-only)."""


class MissingError(StorageError):
    """There is nothing under this name."""

    is_final = True


class ExistsError(StorageError):
    """The name is already in use and was not to be replaced."""

    is_final = True


class FullError(StorageError):
    """No room is left."""


class DeniedError(StorageError):
    """Not allowed: permissions, a read-only file system, credentials."""

    is_final = True


class ChangedError(StorageError):
    """The file is no longer the one that was listed."""

    is_final = True


class StoppedError(StorageError):
    """The caller asked to stop."""

    is_final = True


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file as it was when it was listed."""

    name: str
    num_bytes: int
    version: str
    """Changes when the content may have: modification time in ns on a disk, ETag or the like in a store."""


class StorageSink(Protocol):
    """A data file being written, front to back, from one thread."""

    def write(self, data: Bytes) -> None: ...

    def close(self) -> None:
        """Durable when this returns: fsync on a disk, the completed upload on an object store."""
        ...

    def abort(self) -> None:
        """Discard it, also after an error of ``write`` or ``close``; never raises."""
        ...


class Ownership(Protocol):
    """A place that this process owns."""

    @property
    def is_gone(self) -> bool:
        """Whether another process took it over as abandoned: this process was stopped or cut off for too long."""
        ...


class Storage(Protocol):
    """A folder on a disk, or a prefix in an object store."""

    @property
    def url(self) -> str:
        """How a user would write it: a path, or a URL."""
        ...

    @property
    def is_local(self) -> bool: ...

    def names(self, folder: str = "") -> list[str]:
        """Direct children of a folder, sorted; a folder's name ends in ``/``. Empty where there is no such folder."""
        ...

    def size(self, name: str) -> int: ...

    def read(self, name: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        """Exactly that range (fewer bytes raise), or all from ``start`` on."""
        ...

    def read_fresh(self, name: str, chunk_bytes: int) -> Iterator[bytes]:
        """A whole file in chunks, from the medium where possible and not from a cache of the writer: verification must
        read what is actually stored."""
        ...

    def entry(self, name: str) -> FileEntry:
        """The current entry of one file."""
        ...

    def entries(self) -> list[FileEntry]:
        """All files below, at any depth, sorted by name; hidden files and those in hidden folders are left out. For a
        missing folder: empty, or ``MissingError`` if the storage can tell."""
        ...

    def fetch(self, entry: FileEntry, stop: threading.Event | None = None) -> Generator[bytes, None, None]:
        """A whole file in chunks, exactly as it was listed; ``ChangedError`` if it has changed since. Any chunk may be
        followed by that error: no data is valid before the end. ``StoppedError`` soon after ``stop`` is set."""
        ...

    def create(self, name: str, num_bytes: int) -> StorageSink:
        """Begin a data file of a known size; replaces an unfinished one."""
        ...

    def publish(self, name: str, data: Bytes, *, replace: bool = False) -> None:
        """Write a small document whole and durably; ``ExistsError`` if it exists and is not to be replaced. On a disk:
        temporary file, fsync, rename or link, fsync of the folder; on an object store a conditional put."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file; nothing happens where there is none."""
        ...

    def remove_folder(self, folder: str) -> None:
        """Remove a folder and what is in it; nothing happens where there is none."""
        ...

    def remove_stale(self) -> None:
        """Remove what writers that were killed long ago left unfinished: temporary files, parts of uploads."""
        ...

    def lock(self, owner: str, *, wait_s: float = 0.0) -> AbstractContextManager[None]:
        """Hold the storage exclusively, against saves and prunes of other processes; ``DeniedError`` names the holder.
        Released with its holder on a disk; on an object store it is a lease that is renewed while held."""
        ...

    def own(self, owner: str, *, wait_s: float = 0.0) -> AbstractContextManager[Ownership]:
        """Be the only run that writes here until the context ends, alongside short holders of ``lock``;
        ``lease.InUseError`` names the owner. Released with its holder on a disk; on an object store it is a lease that
        is renewed while held."""
        ...
