"""The interface of a folder of data files, local or remote.

Formats see local paths only: a remote file is first fetched into a bounded cache on this host, as a whole and once for
all processes. Invariant: a path from ``local_path`` stays valid and unchanged until it is released.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file as it was when listed."""

    name: str
    """Relative to the folder, with ``/``."""
    num_bytes: int
    version: str
    """Changes whenever the content may have changed: modification time in ns on a disk, ETag or the like in a store."""


class Files(Protocol):
    """A folder of files, or one file. Can be pickled; safe to use from several threads."""

    @property
    def url(self) -> str:
        """As a user would write it."""
        ...

    @property
    def is_local(self) -> bool: ...

    def list(self) -> Sequence[FileInfo]:
        """All files below, recursively, sorted by name, without hidden ones (leading dot). Listed once."""
        ...

    def local_path(self, name: str) -> AbstractContextManager[Path]:
        """A local path to the file, valid inside the context; a remote file is fetched first. ``DataError`` with one
        clear sentence if it is missing, unreadable, changed since it was listed, or the cache has no space."""
        ...

    def read(self, name: str) -> bytes:
        """The whole content of a small file (a manifest)."""
        ...

    def prefetch(self, names: Sequence[str]) -> None:
        """These files will be used soon, in this order: fetch them in the background. Replaces the previous request;
        returns at once and never raises (``local_path`` does)."""
        ...

    def discard(self, name: str) -> None:
        """Drop this host's copy of a remote file, because it is damaged: ``local_path`` fetches it again. Does nothing
        for a local file."""
        ...

    def full_name(self, name: str) -> str:
        """The path or URL of a file, for messages."""
        ...

    def close(self) -> None: ...
