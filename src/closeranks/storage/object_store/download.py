"""Downloads a file from a store in ranges.

    begin (a few ranges at once) -> take (in order; one that broke off is requested again on its own) -> yield

Invariants: at most ``NUM_STREAMS`` ranges are in memory besides the one handed out; all bytes are of the version that
was listed (S3 reports the version with every response, elsewhere the file is checked once more at the end); a caller
that stops waits for no response.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from closeranks.storage.listing import version_of
from closeranks.storage.object_store.connection import FsspecConnection
from closeranks.storage.object_store.retry import RetryPolicy, retry
from closeranks.storage.protocol import ChangedError, FileEntry, StoppedError

RANGE_BYTES = 8 << 20
NUM_STREAMS = 4
"""Concurrent ranges: one connection to an object store is far slower than the store."""
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class DownloadSource:
    """The file system, path and URL of a file to download."""

    at: FsspecConnection
    path: str
    url: str
    """For messages."""
    patience: RetryPolicy

    @property
    def is_async(self) -> bool:
        return bool(self.at.fs.async_impl)


def download(
    source: DownloadSource, entry: FileEntry, current_entry: Callable[[], FileEntry], stop: threading.Event
) -> Generator[bytes, None, None]:
    """``current_entry`` returns the current entry of the file."""
    pending_ranges: deque[_Range] = deque()
    try:
        for start in range(0, entry.num_bytes, RANGE_BYTES):
            pending_ranges.append(_Range(source, entry, start, min(start + RANGE_BYTES, entry.num_bytes), stop))
            if len(pending_ranges) >= (NUM_STREAMS if source.is_async else 1):
                yield pending_ranges[0].arrived()
                pending_ranges.popleft()
        while pending_ranges:
            yield pending_ranges[0].arrived()
            pending_ranges.popleft()
    finally:
        for span in pending_ranges:
            span.drop()
    if not (source.at.is_s3 and entry.num_bytes) and current_entry() != entry:
        raise _changed(source.url)


@dataclass(slots=True)
class _Range:
    """One range; its request starts when it is created."""

    origin: DownloadSource
    entry: FileEntry
    start: int
    end: int
    stop: threading.Event
    pending: Future[bytes] | None = field(init=False)

    def __post_init__(self) -> None:
        self.pending = self._submit()

    def arrived(self) -> bytes:
        url, policy = self.origin.url, self.origin.patience
        data = retry(self._taken, "reading", url, policy, pause=self.stop.wait)
        if len(data) != self.end - self.start:
            raise _changed(url, f"{len(data)} of {self.end - self.start} bytes were received from byte {self.start} on")
        return data

    def drop(self) -> None:
        if self.pending is not None:
            self.pending.cancel()

    def _taken(self) -> bytes:
        self.pending = pending = self.pending or self._submit()
        while not (self.stop.is_set() or wait([pending], _POLL_S).done):
            pass
        if self.stop.is_set():
            raise _stopped(self.origin.url)
        self.pending = None
        return pending.result()

    def _submit(self) -> Future[bytes]:
        if self.stop.is_set():
            raise _stopped(self.origin.url)
        fs, path = self.origin.at.fs, self.origin.path
        if self.origin.at.is_s3:
            return asyncio.run_coroutine_threadsafe(_s3_range(self.origin, self.entry, self.start, self.end), fs.loop)
        if self.origin.is_async:
            return asyncio.run_coroutine_threadsafe(fs._cat_file(path, start=self.start, end=self.end), fs.loop)
        return _done(partial(fs.cat_file, path, start=self.start, end=self.end))


async def _s3_range(source: DownloadSource, entry: FileEntry, start: int, end: int) -> bytes:
    fs = source.at.fs
    bucket, key, _ = fs.split_path(source.path)
    answer = await fs._call_s3("get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{end - 1}", **fs.req_kw)
    body = answer["Body"]
    try:
        found = version_of({"ETag": answer.get("ETag")})
        if found and entry.version and found != entry.version:
            raise _changed(source.url)
        data: bytes = await body.read()
        return data
    finally:
        body.close()


def _done(read: Callable[[], Any]) -> Future[bytes]:
    """For a file system without an event loop: reads at once, in the caller's thread."""
    future: Future[bytes] = Future()
    try:
        future.set_result(read())
    except Exception as error:  # foreign code: classified where the result is taken
        future.set_exception(error)
    return future


def _changed(url: str, how: str = "") -> ChangedError:
    return ChangedError(f"{url} is not the file that was listed; it was replaced or cut" + (f": {how}" if how else ""))


def _stopped(url: str) -> StoppedError:
    return StoppedError(f"reading {url} was given up")
