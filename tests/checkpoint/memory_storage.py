"""A storage in memory that can be killed after any number of changes: what a process that died there leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from closeranks.storage.protocol import Bytes, DeniedError, ExistsError, MissingError


class Killed(BaseException):
    """No handler of the code under test sees it, as none sees SIGKILL."""


class MemoryStorage:
    is_local = True

    def remove_stale(self) -> None:
        """Nothing is ever half-made here."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.holder = ""
        self.changes_left = -1
        """Before it dies; -1: it lives."""

    @property
    def url(self) -> str:
        return "memory"

    def change(self) -> None:
        if self.changes_left == 0:
            raise Killed
        self.changes_left -= self.changes_left > 0

    def names(self, folder: str = "") -> list[str]:
        prefix = f"{folder}/" if folder else ""
        rest = [name.removeprefix(prefix) for name in self.files if name.startswith(prefix)]
        return sorted({f"{name.partition('/')[0]}/" if "/" in name else name for name in rest})

    def size(self, name: str) -> int:
        return len(self.read(name))

    def read(self, name: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        if name not in self.files:
            raise MissingError(f"{name} is not there")
        return self.files[name][start : None if num_bytes is None else start + num_bytes]

    def read_fresh(self, name: str, chunk_bytes: int) -> Iterator[bytes]:
        data = self.read(name)
        yield from (data[start : start + chunk_bytes] for start in range(0, len(data), chunk_bytes))

    def create(self, name: str, num_bytes: int) -> MemorySink:
        self.change()
        self.files[name] = b""
        return MemorySink(self, name)

    def publish(self, name: str, data: Bytes, *, replace: bool = False) -> None:
        if name in self.files and not replace:
            raise ExistsError(f"{name} already exists")
        self.change()
        self.files[name] = bytes(data)

    def remove(self, name: str) -> None:
        self.change()
        self.files.pop(name, None)

    def remove_folder(self, folder: str) -> None:
        for name in [name for name in self.files if name.startswith(f"{folder}/")]:
            self.remove(name)

    @contextmanager
    def lock(self, owner: str, *, wait_s: float = 0.0) -> Iterator[None]:
        if self.holder:
            raise DeniedError(f"memory is in use by {self.holder}; wait for it, or stop it")
        self.holder = owner
        try:
            yield
        finally:
            self.holder = ""


class MemorySink:
    def __init__(self, storage: MemoryStorage, name: str) -> None:
        self._storage, self._name = storage, name

    def write(self, data: Bytes) -> None:
        self._storage.change()
        self._storage.files[self._name] += bytes(data)

    def close(self) -> None:
        self._storage.change()

    def abort(self) -> None:
        if self._storage.changes_left:  # the dead take nothing back
            self._storage.files.pop(self._name, None)
