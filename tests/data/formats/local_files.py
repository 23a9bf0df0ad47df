"""A folder of files that counts its holds, and can pretend to lie far away."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from closeranks.core.errors import DataError
from closeranks.data.files.protocol import FileInfo


class FolderFiles:
    def __init__(self, root: Path, *, is_local: bool = True) -> None:
        self.root = root
        self.is_local = is_local
        self.num_held = 0
        self.wanted: list[str] = []

    @property
    def url(self) -> str:
        return str(self.root)

    def list(self) -> Sequence[FileInfo]:
        found = []
        for folder, folders, names in os.walk(self.root):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in names:
                path = Path(folder, name)
                if not name.startswith("."):
                    stat = path.stat()
                    relative = path.relative_to(self.root).as_posix()
                    found.append(FileInfo(relative, stat.st_size, str(stat.st_mtime_ns)))
        return sorted(found, key=lambda info: info.name)

    @contextmanager
    def local_path(self, name: str) -> Iterator[Path]:
        path = self.root / name
        if not path.is_file():
            raise DataError(f"'{path}' is missing")
        self.num_held += 1
        try:
            yield path
        finally:
            self.num_held -= 1

    def read(self, name: str) -> bytes:
        with self.local_path(name) as path:
            return path.read_bytes()

    def prefetch(self, names: Sequence[str]) -> None:
        self.wanted = [*names]

    def discard(self, name: str) -> None:
        return None

    def full_name(self, name: str) -> str:
        return str(self.root / name)

    def close(self) -> None:
        return None
