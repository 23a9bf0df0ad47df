"""What must a place offer to hold checkpoints?

Names are relative to the storage's root, with ``/`` between folders. Call sequence of a save: ``create`` for each data
file, then ``publish`` of small documents, the one that makes it count last. Invariants: what ``Sink.close`` or
``publish`` returned from survives a crash; a document appears under its name whole or not at all; an aborted sink
leaves nothing that counts. Imports no torch: the writer is a process without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
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


class Sink(Protocol):
    """A data file being written, front to back, from one thread."""

    def write(self, data: Bytes) -> None: ...

    def close(self) -> None:
        """Durable when this returns: fsync on a disk, the upload completed on an object store."""
        ...

    def abort(self) -> None:
        """Give it up, after an error of ``write`` or ``close`` too; never raises."""
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

    def create(self, name: str, num_bytes: int) -> Sink:
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

    def sweep(self) -> None:
        """Remove what writers that were killed long ago left half-made: temporary files, parts of uploads."""
        ...

    def lock(self, owner: str, *, wait_s: float = 0.0) -> AbstractContextManager[None]:
        """Hold the place alone, against savers and collectors of other processes; ``DeniedError`` names the holder.
        Dies with its holder on a disk; on an object store it is a lease that is renewed while held."""
        ...
