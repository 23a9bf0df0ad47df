"""Is there room in the cache for one more file, and who leaves to make it?

What counts is what lies in the folder, counted under one lock each time: no number that could drift is kept anywhere. A
file that is being fetched has its final size from the start, so room that was promised counts as taken. Invariants: the
sizes of all files together never exceed the limit; no file goes that somebody holds; files go only if that is enough.

[Note: claims] Counting takes time in the number of files, too much to do it for each of a hundred thousand small ones.
A process therefore takes room in larger pieces: an empty file of the claim's size, locked while the process lives and
counted like any other, which shrinks by what is taken out of it.
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
"""How the names of whole files, of those being fetched, and of claims begin; nothing else in the folder is ours."""
_LOCK = ".lock"
_SMALL = 16
"""A file is small where so many fit into a claim."""


@dataclass(frozen=True, slots=True)
class CacheTimeouts:
    """How long the cache waits for others."""

    space_s: float = 60.0
    """For files to be let go where all are held."""
    lock_s: float = 60.0
    """For the folder's lock, which nobody keeps for longer than a count takes."""
    stall_s: float = 600.0
    """For another process that fetches a file and makes no progress; its own retries take up to five minutes."""
    poll_s: float = 0.02


@dataclass(frozen=True, slots=True)
class SpaceRequest:
    """Room that somebody asks for."""

    num_bytes: int
    wanted: Callable[[], Collection[str]]
    """Names of files that the same process will need."""
    is_prefetch: bool
    """Not needed now: it must not drive out what is needed sooner."""


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

    def reserve(self, fd: int, need: SpaceRequest) -> bool:
        """Give the file its final size, if there is room for it."""
        with self.locked():
            if not self._taken_from_claim(need) and not self._freed(need):
                return False
            os.ftruncate(fd, need.num_bytes)
            return True

    def evict(self, need: SpaceRequest) -> bool:
        """On a disk that is full before the limit is reached: whether anything could go."""
        with self.locked():
            files, _ = self._counted()
            return self._removed(files, need, at_least=1) > 0

    def close(self) -> None:
        if self._claim is not None:
            self._claim.remove()
            self._claim = None

    def _leave_nothing(self) -> None:
        """A claim goes with whoever made it, closed or not, unless that is killed."""
        if self._claim is not None:
            weakref.finalize(self, _given_up, self._claim)

    def _freed(self, need: SpaceRequest) -> bool:
        files, num_bytes = self._counted()
        excess = num_bytes + need.num_bytes - self.max_bytes
        return excess <= 0 or self._removed(files, need, at_least=excess) >= excess

    def _taken_from_claim(self, need: SpaceRequest) -> bool:
        """See [Note: claims]. False where the file is too large for one, or there is no room for a whole claim."""
        claim_bytes = self.max_bytes >> 10
        if need.num_bytes * _SMALL > claim_bytes:
            return False
        if self._claim is None:
            self._claim = try_exclusive(self.folder / f"{CLAIM}{os.getpid()}-{secrets.token_hex(4)}", create=True)
            self._leave_nothing()
        if self._claim is None:  # swept between its making and its lock, by a process that counted
            return False
        left = os.fstat(self._claim.fd).st_size
        if left < need.num_bytes:
            if not self._freed(SpaceRequest(claim_bytes - left, need.wanted, need.is_prefetch)):
                return False
            left = claim_bytes
        os.ftruncate(self._claim.fd, left - need.num_bytes)
        return True

    def _counted(self) -> tuple[list[CachedFile], int]:
        """Whole files, and the bytes of all; what a killed process left behind is removed on the way."""
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
                except FileNotFoundError:  # its process gave it up, or finished it under the name counted next
                    continue
        return files, num_bytes

    def _removed(self, files: list[CachedFile], need: SpaceRequest, at_least: int) -> int:
        """Bytes that went: as many as asked for or a file more, or none. Locks first: a file that is held stays."""
        victims: list[Flock] = []
        freed = 0
        try:
            for file in eviction_order(files, need.wanted(), time.time(), is_ahead=need.is_prefetch):
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
