"""What must a folder of data files offer, wherever it lies?

Formats see local paths alone: what lies far away is brought into a bounded cache on this host first, a whole file at a
time, once for all processes. Invariant: a path that ``hold`` gave stays valid and unchanged until it is let go.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file as it was when it was listed."""

    name: str
    """Relative to the folder, with ``/``."""
    num_bytes: int
    version: str
    """Changes when the content may have: modification time in ns on a disk, ETag or the like in a store."""


class Files(Protocol):
    """A folder of files, or one file. Can be pickled; safe to use from several threads."""

    @property
    def url(self) -> str:
        """As a person would write it."""
        ...

    @property
    def is_local(self) -> bool: ...

    def list(self) -> Sequence[FileInfo]:
        """All files below, recursively, sorted by name; hidden ones (a dot in front) left out. Listed once."""
        ...

    def local_path(self, name: str) -> AbstractContextManager[Path]:
        """A local path to the file while it is held; brought here first where it lies far away. ``DataError`` with one
        clear sentence where it is missing, not readable, changed since it was listed, or the cache has no room."""
        ...

    def read(self, name: str) -> bytes:
        """A small file whole (a manifest)."""
        ...

    def prefetch(self, names: Sequence[str]) -> None:
        """These will be held soon, in this order: fetch them in the background. Replaces what was wanted before;
        returns at once and never raises (``hold`` does)."""
        ...

    def discard(self, name: str) -> None:
        """Forget this host's copy of a file that lies far away, since it is damaged: ``hold`` brings it again. Nothing
        happens to a file that lies here."""
        ...

    def full_name(self, name: str) -> str:
        """The path or URL of a file, for messages."""
        ...

    def close(self) -> None: ...
