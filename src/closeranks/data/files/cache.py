"""Caches remote files on this host: each is fetched once and kept for as long as it is needed.

One folder for all processes of a host, all data sets and all jobs:

    part-<key>   being fetched: locked exclusively by the process that fetches it
    file-<key>   complete: locked shared by its readers, exclusively by the process that removes it

    find (shared lock) ── not there ──> begin (exclusive lock on the part) ──> reserve space ──> write ──> rename
                                          └─ another has it: wait, look again

Invariants: a file under its final name is complete, of the version its key names, and never changes; of several
processes that need it, one fetches it; a killed process leaves a part without a lock, which is ignored and removed at
the next count; a path that was handed out stays valid until it is released.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path

from closeranks.core.system.failpoints import declare_failpoint, failpoint
from closeranks.data.files.cache_errors import cache_error, lock_timeout_error, no_space_error, too_large_error
from closeranks.data.files.cache_space import FILE, PART, CacheSpace, CacheTimeouts, SpaceRequest
from closeranks.data.files.cache_write import RemoteFileVersion, StallDetector, is_sound, write_cached_file
from closeranks.data.files.eviction import mark_prefetched, mark_used
from closeranks.data.files.flocks import Flock, try_exclusive, try_shared
from closeranks.data.timing import stage

_LOG = logging.getLogger(__name__)
FILE_WHOLE = declare_failpoint("file whole aside", "a remote file is complete in the cache, under a temporary name")
_LONGEST_POLL_S = 0.5

Fetch = Callable[[], Generator[bytes, None, None]]
"""Begins to fetch a file, piece by piece."""
Wanted = Callable[[], Collection[str]]
"""Cache names of the files that this process needs next; these are evicted last."""


class PrefetchOutcome(Enum):
    """The outcome of a prefetch."""

    HERE = "here"
    ELSEWHERE = "somebody else fetches it"
    FAILED = "left to who needs it"
    NO_SPACE = "no room without driving out what is needed sooner"


class HeldFile:
    """A complete file that stays in the cache until it is released."""

    __slots__ = ("_lock", "path")

    def __init__(self, lock: Flock) -> None:
        self._lock = lock
        self.path = lock.path

    def release(self) -> None:
        if self._lock.is_held:
            mark_used(self._lock.fd)
        self._lock.release()


class FileCache:
    def __init__(self, folder: Path, max_bytes: int, timeouts: CacheTimeouts | None = None) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self._timeouts = timeouts or CacheTimeouts()
        self._space = CacheSpace(folder, max_bytes, self._timeouts)
        self._verified: set[str] = set()

    def __reduce__(self) -> tuple[type[FileCache], tuple[Path, int, CacheTimeouts]]:
        """A copy in another process shares the folder and nothing else."""
        return FileCache, (self.folder, self.max_bytes, self._timeouts)

    def path_of(self, file: RemoteFileVersion) -> Path:
        return self.folder / f"{FILE}{file.key}"

    def acquire(self, file: RemoteFileVersion, fetch: Fetch, wanted: Wanted = frozenset) -> HeldFile:
        with self._translate_errors():
            lock = self._found(file)
            if lock is None:
                with stage("fetch"):
                    lock = self._fetched(file, fetch, wanted)
            mark_used(lock.fd)
            return HeldFile(lock)

    def prefetch(self, file: RemoteFileVersion, fetch: Fetch, wanted: Wanted) -> PrefetchOutcome:
        """Never waits for another process, and evicts nothing that is needed sooner."""
        with self._translate_errors():
            if (lock := self._found(file)) is None:
                part = self._begin(file)
                if part is None:
                    return PrefetchOutcome.ELSEWHERE
                lock = self._filled(part, file, fetch, SpaceRequest(file.num_bytes, wanted, is_prefetch=True))
                if lock is None:
                    return PrefetchOutcome.NO_SPACE
            mark_prefetched(lock.fd)
            lock.release()
            return PrefetchOutcome.HERE

    def discard(self, file: RemoteFileVersion) -> None:
        """Processes that have it open keep it; the next ``acquire`` fetches it again."""
        with self._translate_errors():
            self.path_of(file).unlink(missing_ok=True)
            _LOG.warning("the copy of %s in the cache was damaged; it is fetched again", file.url)

    def close(self) -> None:
        with self._translate_errors():
            self._space.close()

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise cache_error(error, self.folder) from error

    def _part_of(self, file: RemoteFileVersion) -> Path:
        return self.folder / f"{PART}{file.key}"

    def _found(self, file: RemoteFileVersion) -> Flock | None:
        """With a shared lock, or None. A damaged file is removed, to be fetched again."""
        path = self.path_of(file)
        try:
            # An evicting process may lock it briefly, under the folder's lock: afterwards it is either gone or free.
            until = time.monotonic() + self._timeouts.lock_s
            while (lock := try_shared(path)) is None:
                if time.monotonic() > until:
                    raise lock_timeout_error(path, self._timeouts.lock_s)
                time.sleep(self._timeouts.poll_s)
        except FileNotFoundError:
            return None
        # Computing a digest reads the whole file: done once per process.
        known = replace(file, digest="") if file.key in self._verified else file
        if is_sound(lock.fd, known):
            self._verified.add(file.key)
            return lock
        _LOG.warning("%s in the cache is damaged; %s is fetched again", path, file.url)
        lock.remove()
        return None

    def _fetched(self, file: RemoteFileVersion, fetch: Fetch, wanted: Wanted) -> Flock:
        """Fetched by this process or another; if the other gave up, fetched by this one."""
        if file.num_bytes > self.max_bytes:
            raise too_large_error(file.url, file.num_bytes, self.max_bytes)
        progress = StallDetector(self._part_of(file), file.url, self._timeouts.stall_s)
        waited_s, pause_s = 0.0, self._timeouts.poll_s
        while True:
            part = self._begin(file)
            if part is None:
                progress.check()
                lock = self._found(file)
            else:
                lock = self._filled(part, file, fetch, SpaceRequest(file.num_bytes, wanted, is_prefetch=False))
                waited_s += pause_s
                if lock is None and waited_s > self._timeouts.space_s:
                    raise no_space_error(file.url, file.num_bytes, self.folder, self.max_bytes, self._timeouts.space_s)
                pause_s = min(_LONGEST_POLL_S, 2 * pause_s)
            if lock is not None:
                return lock
            time.sleep(pause_s)

    def _begin(self, file: RemoteFileVersion) -> Flock | None:
        """The exclusive lock on the part, or None if another process has it."""
        try:
            return try_exclusive(self._part_of(file), create=True)
        except FileNotFoundError:
            self.folder.mkdir(parents=True, exist_ok=True)
            return try_exclusive(self._part_of(file), create=True)

    def _filled(self, part: Flock, file: RemoteFileVersion, fetch: Fetch, request: SpaceRequest) -> Flock | None:
        """A shared lock on the complete file; None if there is no space. On any error the unfinished part is
        removed."""
        is_whole = False
        try:
            if (found := self._found(file)) is not None:  # finished by another between our lookup and our lock
                return found
            os.ftruncate(part.fd, 0)  # what a killed process left behind
            if not self._space.reserve(part.fd, request):
                return None
            write_cached_file(
                part.fd, file, fetch(), lambda num_bytes: self._space.evict(replace(request, num_bytes=num_bytes))
            )
            failpoint(FILE_WHOLE)
            self._name(part, file)
            is_whole = True
            return part
        finally:
            if not is_whole:
                part.remove()

    def _name(self, part: Flock, file: RemoteFileVersion) -> None:
        """Rename under the folder's lock, so that no process counts the file twice, or removes it while its lock
        changes."""
        with self._space.locked():
            path = self.path_of(file)
            os.rename(part.path, path)
            part.path = path
            part.downgrade()
        self._verified.add(file.key)
