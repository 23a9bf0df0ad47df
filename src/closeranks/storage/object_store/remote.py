"""Storage behind an fsspec URL, for checkpoints or for data to read.

Object stores have no rename: an object appears whole when its upload is complete, and a document that must not replace
another is written with a conditional put. Invariants: nothing is answered from a cached listing, every request that may
succeed a moment later is retried, and memory is bounded by a few parts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

from closeranks.core.system.failpoints import declare_failpoint, failpoint
from closeranks.storage import lease
from closeranks.storage.errors import UnknownUploadError
from closeranks.storage.listing import list_fsspec, list_s3, to_entry
from closeranks.storage.names import check_name, is_visible
from closeranks.storage.object_store.connection import FsspecConnection, connect
from closeranks.storage.object_store.download import DownloadSource, download
from closeranks.storage.object_store.multipart import PART_BYTES, MultipartSink, UploadTarget, content_md5
from closeranks.storage.object_store.retry import RetryPolicy, retry
from closeranks.storage.object_store.stream import StreamSink
from closeranks.storage.protocol import (
    Bytes,
    ExistsError,
    FileEntry,
    MissingError,
    Ownership,
    StorageError,
    StorageSink,
)

_LOG = logging.getLogger(__name__)
PUT = declare_failpoint("document put", "a document is in an object store")
_NUM_AHEAD = 2
_STALE_S = 86400.0


class RemoteStorage:
    """A prefix in an object store, or a folder of any other remote file system."""

    is_local = False

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        *,
        policy: RetryPolicy | None = None,
        part_bytes: int = PART_BYTES,
        times: lease.LeaseTimes | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._connection: FsspecConnection = connect(self._url, options or {})
        # A file system that retries by itself needs few retries of ours.
        self._retry_policy = policy or (RetryPolicy() if self._connection.is_s3 else RetryPolicy(num_tries=3))
        self._part_bytes = part_bytes
        self._times = times or lease.LeaseTimes()

    @property
    def url(self) -> str:
        return self._url

    def names(self, folder: str = "") -> list[str]:
        path = self._path(folder) if folder else self._connection.root
        try:
            found = self._request(lambda: self._list(path), "listing", folder)
        except MissingError:
            return []
        children = ((str(entry["name"]).rstrip("/").rpartition("/")[2], entry["type"]) for entry in found)
        return sorted(f"{name}/" if kind == "directory" else name for name, kind in children if is_visible(name))

    def size(self, name: str) -> int:
        info = self._request(lambda: self._info(name), "looking for", name)
        if info["type"] == "directory":
            raise MissingError(f"{self._named(name)} is not a file")
        return int(info["size"])

    def read(self, name: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        wanted = max(0, self.size(name) - start) if num_bytes is None else num_bytes
        if not wanted:
            return b""
        path = self._path(name)
        data: bytes = self._request(
            lambda: self._connection.fs.cat_file(path, start=start, end=start + wanted), "reading", name
        )
        if len(data) != wanted:
            where = f"{len(data)} of {wanted} bytes are there from byte {start} on"
            raise StorageError(f"{self._named(name)} is truncated: {where}")
        return data

    def read_fresh(self, name: str, chunk_bytes: int) -> Iterator[bytes]:
        """Reads from the store; the next chunks are downloaded while the caller processes one."""
        num_bytes = self.size(name)
        with ThreadPoolExecutor(_NUM_AHEAD, thread_name_prefix="download") as pool:
            pending: deque[Future[bytes]] = deque()
            for start in range(0, num_bytes, chunk_bytes):
                pending.append(pool.submit(self.read, name, start, min(chunk_bytes, num_bytes - start)))
                if len(pending) > _NUM_AHEAD:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()

    def entry(self, name: str) -> FileEntry:
        info = self._request(lambda: self._info(name), "looking for", name)
        if info["type"] == "directory":
            raise MissingError(f"{self._named(name)} is not a file")
        return to_entry(name, info, self._named(name))

    def entries(self) -> list[FileEntry]:
        self._connection.fs.invalidate_cache()
        list_all = list_s3 if self._connection.is_s3 else list_fsspec
        return list_all(self._connection, self._url, self._request)

    def fetch(self, entry: FileEntry, stop: threading.Event | None = None) -> Generator[bytes, None, None]:
        source = DownloadSource(self._connection, self._path(entry.name), self._named(entry.name), self._retry_policy)
        return download(source, entry, lambda: self.entry(entry.name), stop or threading.Event())

    def create(self, name: str, num_bytes: int) -> StorageSink:
        if self._connection.is_s3:
            return MultipartSink(self._target(name), num_bytes, self._part_bytes)
        return StreamSink(self._connection.fs, self._path(name), self._named(name), num_bytes, self._part_bytes)

    def publish(self, name: str, data: Bytes, *, replace: bool = False) -> None:
        """Without ``replace``: checks that the name is free, then uses a conditional put. With stores that ignore the
        condition, and file systems that have none, another writer may come between the two."""
        body = bytes(data)
        path = self._path(name)
        if not replace and self._is_there(name):
            raise ExistsError(f"{self._named(name)} already exists")
        mode = "overwrite" if replace else "create"
        try:
            self._request(lambda: self._put(path, body, mode), "writing", name)
        except ExistsError:
            # There was none a moment ago. An earlier try of ours (or of the HTTP library, which repeats a put by itself
            # when the connection breaks) may have arrived although its response did not.
            if self.read(name) != body:
                raise
        failpoint(PUT)

    def remove(self, name: str) -> None:
        try:
            self._request(lambda: self._connection.fs.rm_file(self._path(name)), "removing", name)
        except MissingError:
            return

    def remove_folder(self, folder: str) -> None:
        path = self._path(folder)
        try:
            found = self._request(lambda: self._find(path), "listing", folder)
            for file in found:
                self._request(partial(self._connection.fs.rm_file, file), "removing", folder)
            if not self._connection.is_s3 and self._connection.fs.exists(path):
                self._request(lambda: self._connection.fs.rm(path, recursive=True), "removing", folder)
        except MissingError:
            return
        if self._connection.is_s3:
            self._abort_uploads(f"{path}/", 0.0)

    def remove_stale(self, older_than_s: float = _STALE_S) -> None:
        """Abort uploads that killed writers left unfinished; otherwise the store keeps their parts."""
        if self._connection.is_s3:
            self._abort_uploads(f"{self._connection.root}/", older_than_s)

    def lock(self, owner: str, *, wait_s: float = 0.0) -> AbstractContextManager[None]:
        return lease.hold_lock(self, owner, wait_s, self._times)

    def own(self, owner: str, *, wait_s: float = 0.0) -> AbstractContextManager[Ownership]:
        return lease.hold_ownership(self, owner, wait_s, self._times)

    def _path(self, name: str) -> str:
        return f"{self._connection.root}/{check_name(name)}"

    def _named(self, name: str) -> str:
        return f"{self._url}/{name}" if name else self._url

    def _target(self, name: str) -> UploadTarget:
        bucket, key, _ = self._connection.fs.split_path(self._path(name))
        return UploadTarget(self._connection.fs, bucket, key, self._named(name), self._retry_policy)

    def _request(self, act: Callable[[], Any], doing: str, name: str) -> Any:
        return retry(act, doing, self._named(name), self._retry_policy)

    def _is_there(self, name: str) -> bool:
        try:
            self.size(name)
        except MissingError:
            return False
        return True

    def _info(self, name: str) -> Any:
        self._connection.fs.invalidate_cache()
        return self._connection.fs.info(self._path(name))

    def _list(self, path: str) -> Any:
        self._connection.fs.invalidate_cache()
        return [entry for entry in self._connection.fs.ls(path, detail=True) if str(entry["name"]).rstrip("/") != path]

    def _find(self, path: str) -> Any:
        self._connection.fs.invalidate_cache()
        return self._connection.fs.find(path)

    def _put(self, path: str, body: bytes, mode: str) -> None:
        if self._connection.is_s3:
            self._connection.fs.pipe_file(path, body, mode=mode, ContentMD5=content_md5(body))
            return
        self._connection.fs.makedirs(self._connection.fs._parent(path), exist_ok=True)
        self._connection.fs.pipe_file(path, body, mode=mode)

    def _abort_uploads(self, prefix: str, older_than_s: float) -> None:
        bucket, start, _ = self._connection.fs.split_path(prefix)
        for upload in self._uploads(bucket, start):
            if time.time() - upload["Initiated"].timestamp() >= older_than_s and upload["Key"].startswith(start):
                target = UploadTarget(self._connection.fs, bucket, upload["Key"], self._url, self._retry_policy)
                with suppress(UnknownUploadError):  # its writer finished meanwhile
                    target.call("abort_multipart_upload", "sweeping", UploadId=upload["UploadId"])

    def _uploads(self, bucket: str, prefix: str) -> list[Any]:
        """Empty if the store cannot list them: some have no such request, and some credentials do not allow it."""
        call = self._connection.fs.call_s3
        try:
            found = self._request(lambda: call("list_multipart_uploads", Bucket=bucket, Prefix=prefix), "sweeping", "")
        except StorageError as error:
            _LOG.info("unfinished uploads cannot be listed: %s", error)
            return []
        return list(found.get("Uploads", []))
