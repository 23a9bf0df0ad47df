"""Builds an index for formats that have none, once for all processes of a host.

``saved_index`` opens the index of some files, or builds and saves it. It is stored in ``IndexLocation.folder``, else in
``.closeranks-index/`` beside local data if that is writable, else under the cache; the folder may be removed at any
time. Invariants: of the processes of a host that need the same index one builds it while the others wait, for as long
as it makes progress; an index appears under its name complete or not at all, so that a killed builder leaves nothing
that counts; one that is stale (a file changed), torn or damaged is built again.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import TypeAlias

from blake3 import blake3

from closeranks.core.errors import DataError
from closeranks.data.files.protocol import FileInfo, Files
from closeranks.data.formats.record_index.index_file import VERSION, Array, Arrays, IndexKey, MappedIndex, UnsoundIndex
from closeranks.data.formats.record_index.index_file import read_index as _read
from closeranks.data.formats.record_index.index_file import write_index as _write
from closeranks.storage.disk import fsync_folder, make_folder

__all__ = ["Array", "Arrays", "IndexLocation", "MappedIndex", "Progress", "saved_index"]

Progress: TypeAlias = Callable[[int, int], None]
"""Called by a builder from time to time, cheap: bytes done, total bytes."""

FOLDER = ".closeranks-index"
DEFAULT_CACHE = "~/.cache/closeranks/data"
_NOTE_BYTES = 512
"""Overwritten in one write: if it were truncated first, a reader could always see the file in between."""
_NO_SETTINGS: Mapping[str, str | int] = MappingProxyType({})
_QUIET_S = 3.0
_NOTE_EVERY_S = 1.0
_LOG_EVERY_S = 15.0
_POLL_S = 0.05
_NO_LOCKS = frozenset((errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL))
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class IndexLocation:
    """Where indexes are stored."""

    folder: str = ""
    """Empty: beside the data, else under ``cache``."""
    cache: str = ""
    """Empty: ``~/.cache/closeranks/data``."""
    timeout_s: float = 600.0
    """How long to wait for a builder in another process that makes no progress."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    folder: Path
    path: Path


def saved_index(
    location: IndexLocation,
    files: Files,
    infos: Sequence[FileInfo],
    kind: str,
    build: Callable[[Progress], Arrays],
    settings: Mapping[str, str | int] = _NO_SETTINGS,
) -> MappedIndex:
    """The arrays that ``build`` returned for these files, now or earlier, mapped read-only. ``kind`` consists of
    letters, digits and dashes; a builder that changes its result must change ``settings`` (a version number, say)."""
    key = IndexKey(kind, settings, infos)
    candidates = _candidates(location, files, key)
    for candidate in candidates:
        if (index := _opened(candidate, key)) is not None:
            return index
    refusals = []
    for number, candidate in enumerate(candidates):
        try:
            make_folder(candidate.folder)
            with _alone(candidate, files.url, location.timeout_s) as note:
                index = _opened(candidate, key)
                return _built(candidates[number:], key, build, _Report(files, infos, note)) if index is None else index
        except OSError as error:
            refusals.append(_Refusal(candidate.folder, error))
    raise _unsaved(files.url, refusals)


@dataclass(frozen=True, slots=True)
class _Refusal:
    folder: Path
    error: OSError

    def __str__(self) -> str:
        return f"'{self.folder}' ({self.error.strerror or self.error})"


def _unsaved(url: str, refusals: Sequence[_Refusal]) -> DataError:
    return DataError(
        f"the index of '{url}' cannot be saved in {' nor in '.join(map(str, refusals))}",
        "Make one of them a writable folder with free space, or set data.index to another folder.",
    )


def _candidates(location: IndexLocation, files: Files, key: IndexKey) -> list[_Candidate]:
    if location.folder:
        return [_candidate(Path(location.folder).expanduser(), key, files.url)]
    cache = Path(location.cache or DEFAULT_CACHE).expanduser() / "index"
    found = [_candidate(cache, key, files.url)]
    if files.is_local and key.files:
        # Beside the data, the name does not depend on the folder's path, so that a folder can be moved with its index.
        found.insert(0, _candidate(_root(files, key.files[0].name) / FOLDER, key, ""))
    return found


def _candidate(folder: Path, key: IndexKey, url: str) -> _Candidate:
    """The file's name depends on the names, not on sizes and versions: the index of changed files replaces the old
    one."""
    digest = blake3(f"{key.kind}\0{url}\0{sorted(key.settings.items())}\n".encode(errors="surrogateescape"))
    for info in key.files:
        digest.update(f"{info.name}\n".encode(errors="surrogateescape"))
    return _Candidate(folder, folder / f"{key.kind}-{digest.hexdigest(8)}.v{VERSION}")


def _root(files: Files, name: str) -> Path:
    with files.local_path(name) as path:
        return path.absolute().parents[len(PurePosixPath(name).parts) - 1]


def _opened(candidate: _Candidate, key: IndexKey) -> MappedIndex | None:
    try:
        return _read(candidate.path, key)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (UnsoundIndex, OSError) as error:
        _log.info("index %s is built again: %s", candidate.path, error)
        return None


def _built(
    candidates: Sequence[_Candidate], key: IndexKey, build: Callable[[Progress], Arrays], report: _Report
) -> MappedIndex:
    """Builds once: if the first location has no space, the same arrays are saved at the others."""
    arrays = report.follow(build)
    refusals = []
    for candidate in candidates:
        try:
            return _saved(candidate, key, arrays)
        except OSError as error:
            refusals.append(_Refusal(candidate.folder, error))
            _log.warning("the index cannot be saved in %s", refusals[-1])
    raise _unsaved(report.url, refusals)


def _saved(candidate: _Candidate, key: IndexKey, arrays: Arrays) -> MappedIndex:
    make_folder(candidate.folder)
    aside = candidate.path.with_name(f".{candidate.path.name}.{secrets.token_hex(6)}.aside")
    try:
        _write(aside, key, arrays)
        try:
            _read(aside, key, in_full=True)
        except UnsoundIndex as error:
            raise OSError(errno.EIO, f"what was written there cannot be read back: {error}") from error
        os.replace(aside, candidate.path)
    finally:
        aside.unlink(missing_ok=True)
    fsync_folder(candidate.folder)
    return _read(candidate.path, key)


@contextmanager
def _alone(candidate: _Candidate, url: str, timeout_s: float) -> Iterator[Callable[[str], None]]:
    """Hold the kernel's lock for this index (released when its process ends); yields a function that writes a progress
    note to the lock file, for those who wait. On file systems without locks two processes may build, and the last
    rename wins."""
    lock = candidate.path.with_name(f".{candidate.path.name}.lock")
    fd = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if _wait(fd, url, timeout_s):
            for left in candidate.folder.glob(f".{candidate.path.name}.*.aside"):
                left.unlink(missing_ok=True)  # of a killed builder: no other process is here

        def note(text: str) -> None:
            with suppress(OSError):  # a full disk must not stop the build because of a note
                os.pwrite(fd, text.encode()[:_NOTE_BYTES].ljust(_NOTE_BYTES), 0)

        yield note
    finally:
        os.close(fd)


def _wait(fd: int, url: str, timeout_s: float) -> bool:
    """Whether the lock could be taken; False if the file system has no locks."""
    last_note = ""
    last_heard = started = time.monotonic()
    is_logged = False
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            found = os.pread(fd, _NOTE_BYTES, 0).decode(errors="replace").strip()
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return False
            raise
        now = time.monotonic()
        if found != last_note:
            last_note, last_heard = found, now
        if now - last_heard > timeout_s:
            holder = last_note or "another process"
            raise DataError(
                f"the index of '{url}' is being built by {holder}, which made no progress for {timeout_s:.0f} s",
                "Stop that process, or set data.index to another folder.",
            )
        if not is_logged and now - started > _QUIET_S:
            _log.warning("waiting for the index of %s, built by %s", url, last_note or "another process")
            is_logged = True
        time.sleep(_POLL_S)


class _Report:
    """A builder's progress, for the log and for waiting processes."""

    def __init__(self, files: Files, infos: Sequence[FileInfo], note: Callable[[str], None]) -> None:
        self._files, self.url = files, files.url
        self._names = [info.name for info in infos]
        self._note = note
        self._who = f"process {os.getpid()} on {socket.gethostname()}"
        self._started = self._noted = self._logged = time.monotonic()

    def follow(self, build: Callable[[Progress], Arrays]) -> Arrays:
        self._note(self._who)
        self._files.prefetch(self._names)  # the next file is fetched while one is scanned
        try:
            return build(self)
        except OSError as error:  # of the data: errors of the index's own folder are handled by trying another folder
            raise DataError(f"'{self.url}' cannot be indexed: {error}") from error

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        share = f"{100 * done / max(total, 1):.0f}% of {total / 2**20:.0f} MiB"
        if now - self._noted >= _NOTE_EVERY_S:
            self._noted = now
            self._note(f"{self._who} ({share}, {done} bytes)")
        waited = _QUIET_S if self._logged == self._started else _LOG_EVERY_S
        if now - self._logged >= waited:
            self._logged = now
            _log.warning("indexing %s: %s", self.url, share)
