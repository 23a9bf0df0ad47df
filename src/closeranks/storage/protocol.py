"""What must a place offer to hold checkpoints, or data to read?

Names are relative to the storage's root, with ``/`` between folders. Call sequence of a save: ``create`` for each data
file, then ``publish`` of small documents, the one that makes it count last. Invariants: what ``StorageSink.close`` or
``publish`` returned from survives a crash; a document appears under its name whole or not at all; an aborted sink
leaves nothing that counts. Imports no torch: the writer is a process without it.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

Bytes = bytes | bytearray | memoryview


class StorageError(Exception):
    """A storage could not do what it was asked; ``str`` is one sentence for people, without a traceback's noise."""

    is_final = False
    """Whether trying the same again soon is pointless (refused credentials, read-only)."""


class MissingError(StorageError):
    """There is nothing under this name."""

    is_final = True


class ExistsError(StorageError):
    """Something is under this name already, and was not to be replaced."""

    is_final = True


class FullError(StorageError):
    """No room is left."""


class DeniedError(StorageError):
    """Not allowed: permissions, a read-only file system, credentials."""

    is_final = True


class ChangedError(StorageError):
    """What is there now is not what was listed."""

    is_final = True


class StoppedError(StorageError):
    """The caller no longer wants it."""

    is_final = True


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file as it was when it was looked at."""

    name: str
    num_bytes: int
    version: str
    """Changes when the content may have: modification time in ns on a disk, ETag or the like in a store."""


class StorageSink(Protocol):
    """A data file being written, front to back, from one thread."""

    def write(self, data: Bytes) -> None: ...

    def close(self) -> None:
        """Durable when this returns: fsync on a disk, the upload completed on an object store."""
        ...

    def abort(self) -> None:
        """Give it up, after an error of ``write`` or ``close`` too; never raises."""
        ...


class Ownership(Protocol):
    """A place that this process owns."""

    @property
    def is_gone(self) -> bool:
        """Whether somebody else took it for abandoned: this process stood still, or could not reach it, for long."""
        ...


class Storage(Protocol):
    """A folder on a disk, or a prefix in an object store."""

    @property
    def url(self) -> str:
        """What a person would write to name it: a path, or a URL."""
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
        """All of a file piece by piece, from the medium where that can be asked for, not from a cache of the writer's
        own: what certifies a file must have seen what lies there."""
        ...

    def entry(self, name: str) -> FileEntry:
        """One file as it is now."""
        ...

    def entries(self) -> list[FileEntry]:
        """All files below, however deep, sorted by name; hidden ones and those of hidden folders left out. Where there
        is no such folder: empty, or ``MissingError`` where the place can tell."""
        ...

    def fetch(self, entry: FileEntry, stop: threading.Event | None = None) -> Generator[bytes, None, None]:
        """All of a file piece by piece, exactly as it was listed; ``ChangedError`` where it is another by now. Any
        piece may be followed by that error: nothing counts before the end. ``StoppedError`` soon after ``stop``."""
        ...

    def create(self, name: str, num_bytes: int) -> StorageSink:
        """Begin a data file of a known size; replaces an unfinished one."""
        ...

    def publish(self, name: str, data: Bytes, *, replace: bool = False) -> None:
        """Write a small document whole and durably; ``ExistsError`` where it is there and not to be replaced. On a
        disk: temporary file, fsync, rename or link, fsync of the folder; on an object store a conditional put."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file; nothing happens where there is none."""
        ...

    def remove_folder(self, folder: str) -> None:
        """Remove a folder and what is in it; nothing happens where there is none."""
        ...

    def remove_stale(self) -> None:
        """Remove what writers that were killed long ago left half-made: temporary files, parts of uploads."""
        ...

    def lock(self, owner: str, *, wait_s: float = 0.0) -> AbstractContextManager[None]:
        """Hold the place alone, against savers and collectors of other processes; ``DeniedError`` names the holder.
        Dies with its holder on a disk; on an object store it is a lease that is renewed while held."""
        ...

    def own(self, owner: str, *, wait_s: float = 0.0) -> AbstractContextManager[Ownership]:
        """Be the only run that writes here until the end, beside short holders of ``lock``; ``lease.InUseError`` names
        the owner. Dies with its holder on a disk; on an object store it is a lease that is renewed while held."""
        ...
