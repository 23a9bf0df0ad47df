"""Reserves space in the cache for a file, evicting others if necessary.

The files in the folder are counted anew under one lock each time: no running total is kept that could drift. A file
that is being fetched has its final size from the start, so reserved space counts as used. Invariants: the total size of
all files never exceeds the limit; a file that is in use is never evicted; files are evicted only if that frees enough
space.

[Note: claims] Counting takes time in the number of files, too much to do it for each of a hundred thousand small ones.
A process therefore reserves space in larger pieces: an empty file of the claim's size, locked while the process lives
and counted like any other, which shrinks by what is taken out of it.
"""

from __future__ import annotations

import errno
import os
import random
import secrets
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from closeranks.data.files.cache_errors import lock_timeout_error
from closeranks.data.files.eviction import CachedFile, cached_file, eviction_order
from closeranks.data.files.flocks import Flock, try_exclusive
from closeranks.data.files.fork_reset import register_fork_reset

FILE, PART, CLAIM = "file-", "part-", "claim-"
"""Name prefixes of complete files, of files being fetched, and of claims; nothing else in the folder is ours."""
_LOCK = ".lock"
_SMALL = 16
"""A file is small if at least this many fit into a claim."""


@dataclass(frozen=True, slots=True)
class CacheTimeouts:
    """How long the cache waits for others."""

    space_s: float = 60.0
    """For files to be released if all are in use."""
    lock_s: float = 60.0
    """For the folder's lock, which is held no longer than a count takes."""
    stall_s: float = 600.0
    """For another process that fetches a file without making progress; its own retries take up to five minutes."""
    poll_s: float = 0.02


@dataclass(frozen=True, slots=True)
class SpaceRequest:
    """A request for space in the cache."""

    num_bytes: int
    wanted: Callable[[], Collection[str]]
    """Names of files that the same process will need."""
    is_prefetch: bool
    """Not needed yet: it must not evict files that are needed sooner."""


class CacheSpace:
    def __init__(self, folder: Path, max_bytes: int, terms: CacheTimeouts) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self.terms = terms
        self._claim: Flock | None = None
        register_fork_reset(self)

    def reset_after_fork(self) -> None:
        self._claim = None

    @contextmanager
    def locked(self) -> Iterator[None]:
        path = self.folder / _LOCK
        until = time.monotonic() + self.terms.lock_s
        while (lock := try_exclusive(path, create=True)) is None:
            if time.monotonic() > until:
                raise lock_timeout_error(path, self.terms.lock_s)
            time.sleep(random.uniform(0.001, 0.005))
        try:
            yield
        finally:
            lock.release()

    def reserve(self, fd: int, request: SpaceRequest) -> bool:
        """Give the file its final size, if there is space for it."""
        with self.locked():
            if not self._taken_from_claim(request) and not self._freed(request):
                return False
            os.ftruncate(fd, request.num_bytes)
            return True

    def evict(self, request: SpaceRequest) -> bool:
        """For a disk that is full before the limit is reached: evicts files and returns whether any could go."""
        with self.locked():
            files, _ = self._counted()
            return self._removed(files, request, at_least=1) > 0

    def close(self) -> None:
        if self._claim is not None:
            self._claim.remove()
            self._claim = None

    def _leave_nothing(self) -> None:
        """A claim is removed when its owner exits, closed or not, unless it is killed."""
        if self._claim is not None:
            weakref.finalize(self, _given_up, self._claim)

    def _freed(self, request: SpaceRequest) -> bool:
        files, num_bytes = self._counted()
        excess = num_bytes + request.num_bytes - self.max_bytes
        return excess <= 0 or self._removed(files, request, at_least=excess) >= excess

    def _taken_from_claim(self, request: SpaceRequest) -> bool:
        """See [Note: claims]. False if the file is too large for a claim, or there is no space for a whole claim."""
        claim_bytes = self.max_bytes >> 10
        if request.num_bytes * _SMALL > claim_bytes:
            return False
        if self._claim is None:
            self._claim = try_exclusive(self.folder / f"{CLAIM}{os.getpid()}-{secrets.token_hex(4)}", create=True)
            self._leave_nothing()
        if self._claim is None:  # removed by a counting process between its creation and its lock
            return False
        left = os.fstat(self._claim.fd).st_size
        if left < request.num_bytes:
            if not self._freed(SpaceRequest(claim_bytes - left, request.wanted, request.is_prefetch)):
                return False
            left = claim_bytes
        os.ftruncate(self._claim.fd, left - request.num_bytes)
        return True

    def _counted(self) -> tuple[list[CachedFile], int]:
        """Complete files, and the total bytes of all files; removes what killed processes left behind."""
        files: list[CachedFile] = []
        num_bytes = 0
        with os.scandir(self.folder) as found:
            for entry in found:
                try:
                    if entry.name.startswith(FILE):
                        files.append(cached_file(entry.name, entry.stat()))
                        num_bytes += files[-1].num_bytes
                    elif entry.name.startswith((PART, CLAIM)) and not _swept(Path(entry.path)):
                        num_bytes += entry.stat().st_size
                except FileNotFoundError:  # its process gave it up, or renamed it to the name counted next
                    continue
        return files, num_bytes

    def _removed(self, files: list[CachedFile], request: SpaceRequest, at_least: int) -> int:
        """Bytes evicted: at least as many as requested, by at most one file more, or none. Locks first: a file in use
        stays."""
        victims: list[Flock] = []
        freed = 0
        try:
            for file in eviction_order(files, request.wanted(), time.time(), is_prefetch=request.is_prefetch):
                if freed >= at_least:
                    break
                if (lock := _unheld(self.folder / file.name)) is not None:
                    victims.append(lock)
                    freed += file.num_bytes
            if freed < at_least:
                return 0
            for lock in victims:
                lock.path.unlink(missing_ok=True)
            return freed
        finally:
            for lock in victims:
                lock.release()


def _given_up(claim: Flock) -> None:
    if claim.is_held:
        claim.remove()


def _swept(path: Path) -> bool:
    lock = _unheld(path)
    if lock is None:
        return False
    lock.remove()
    return True


def _unheld(path: Path) -> Flock | None:
    try:
        return try_exclusive(path)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EACCES, errno.EPERM):
            return None
        raise
