"""Writes the fetched pieces of a file into the cache.

Invariant: a part that was written has the right size and, where it is known, the right digest, and is synced to the
disk: it gets its size before its bytes, so after a power failure an unsynced one would look complete and contain zeros.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from closeranks.core.system.failpoints import declare_failpoint, failpoint
from closeranks.data.files.cache_errors import digest_mismatch_error, incomplete_error, is_disk_full, stalled_error

PIECE_CACHED = declare_failpoint("piece cached", "a remote file is partly in the cache")
_READ_BYTES = 1 << 20
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RemoteFileVersion:
    """A remote file, in one version."""

    url: str
    num_bytes: int
    version: str
    digest: str = ""
    """BLAKE3 of the whole file, hexadecimal; empty if unknown."""

    @property
    def key(self) -> str:
        mark = hashlib.sha256(f"{self.url}\0{self.version}\0{self.num_bytes}".encode()).hexdigest()[:32]
        return f"{mark}-{re.sub(r'[^A-Za-z0-9._-]', '_', self.url.rpartition('/')[2])[-80:]}"


def write_cached_file(
    fd: int, file: RemoteFileVersion, pieces: Generator[bytes, None, None], evict: Callable[[int], bool]
) -> None:
    """When the disk is full, ``evict`` is called with the number of bytes needed; it returns whether it freed any."""
    check = _Check(file)
    with closing(pieces):
        for data in pieces:
            if check.num_bytes + len(data) > file.num_bytes:
                raise incomplete_error(file.url, file.num_bytes, check.num_bytes + len(data))
            _write(fd, data, check.num_bytes, evict)
            check.add(data)
            failpoint(PIECE_CACHED)
    check.finish()
    _retry_with_space(partial(os.fdatasync, fd), file.num_bytes, evict)


def is_sound(fd: int, file: RemoteFileVersion) -> bool:
    """Whether a cached file is unchanged. Reads all of it if its digest is known."""
    if os.fstat(fd).st_size != file.num_bytes:
        return False
    if not file.digest:
        return True
    from blake3 import blake3

    found = blake3()
    for start in range(0, file.num_bytes, _READ_BYTES):
        found.update(os.pread(fd, _READ_BYTES, start))
    return found.hexdigest() == file.digest


class _Check:
    """Counts the bytes, and computes the digest if there is one to compare with."""

    def __init__(self, file: RemoteFileVersion) -> None:
        self._file = file
        self.num_bytes = 0
        self._found = None
        if file.digest:
            from blake3 import blake3

            self._found = blake3()

    def add(self, data: bytes) -> None:
        self.num_bytes += len(data)
        if self._found is not None:
            self._found.update(data)

    def finish(self) -> None:
        if self.num_bytes != self._file.num_bytes:
            raise incomplete_error(self._file.url, self._file.num_bytes, self.num_bytes)
        if self._found is not None and self._found.hexdigest() != self._file.digest:
            raise digest_mismatch_error(self._file.url)


def _write(fd: int, data: bytes, start: int, evict: Callable[[int], bool]) -> None:
    rest = memoryview(data)
    while rest:
        done = _retry_with_space(partial(os.pwrite, fd, rest, start), len(rest), evict)
        rest, start = rest[done:], start + done


def _retry_with_space(act: Callable[[], T], num_bytes: int, evict: Callable[[int], bool]) -> T:
    while True:
        try:
            return act()
        except OSError as error:
            if not is_disk_full(error) or not evict(num_bytes):
                raise


class StallDetector:
    """Watches another process that fetches a file. The file's size shows no progress: it is the final one from the
    start."""

    def __init__(self, path: Path, url: str, stall_s: float) -> None:
        self._path = path
        self._url = url
        self._stall_s = stall_s
        self._seen: tuple[int, int, int] | None = None
        self._since = time.monotonic()

    def check(self) -> None:
        """``DataError`` once there has been no progress for too long."""
        now = time.monotonic()
        try:
            stat = self._path.stat()
            seen = (stat.st_ino, stat.st_mtime_ns, stat.st_blocks)
        except FileNotFoundError:
            seen = None
        if seen != self._seen or seen is None:
            self._seen, self._since = seen, now
        elif now - self._since > self._stall_s:
            raise stalled_error(self._url, self._path, now - self._since)
