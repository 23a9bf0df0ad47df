"""Uploads a large file to an S3 store in parts, with little memory and nothing left behind.

    create_multipart_upload -> upload_part (several at once, each retried on its own) -> complete_multipart_upload
                                        \\-> abort_multipart_upload

Invariants: at most ``NUM_STREAMS`` parts in flight and one being filled are in memory; the object exists, whole, after
``close`` and not at all before; ``abort`` removes the parts. A killed process cannot: its parts stay, invisible and
billed, until ``remove_stale`` or a lifecycle rule of the bucket removes them.
"""

from __future__ import annotations

import base64
import hashlib
import logging
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from closeranks.core.system.failpoints import declare_failpoint, failpoint
from closeranks.storage.errors import UnknownUploadError
from closeranks.storage.object_store.retry import RetryCount, RetryPolicy, retry
from closeranks.storage.protocol import Bytes, MissingError, StorageError

PART_BYTES = 16 << 20
NUM_STREAMS = 4
"""Concurrent parts: one connection to an object store is far slower than the store."""
_MOST_PARTS = 10_000
_MIB = 1 << 20
PART_SENT = declare_failpoint("part sent", "an upload has begun and holds some of its parts")
PARTS_SENT = declare_failpoint("parts sent", "all parts of an upload are stored, but the upload is not completed")
UPLOADED = declare_failpoint("upload complete", "a data file in an object store is complete")

_LOG = logging.getLogger(__name__)


def part_size(num_bytes: int, wanted_bytes: int = PART_BYTES) -> int:
    """As wanted, or larger if a file would need more parts than a store accepts; then a whole number of MiB."""
    if num_bytes <= wanted_bytes * _MOST_PARTS:
        return wanted_bytes
    return -(-num_bytes // (_MOST_PARTS * _MIB)) * _MIB


def content_md5(body: bytes) -> str:
    """Every S3 store compares it with what arrived and refuses a part that was damaged in transit, which is then sent
    again; only some stores support other checksums. About 1.6 s per GB, outside the GIL."""
    return base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()


@dataclass(frozen=True, slots=True)
class UploadTarget:
    """The destination of an upload."""

    fs: Any
    bucket: str
    key: str
    url: str
    """For messages."""
    patience: RetryPolicy

    def call(self, method: str, doing: str, tries: RetryCount | None = None, **arguments: Any) -> Any:
        def act() -> Any:
            return self.fs.call_s3(method, Bucket=self.bucket, Key=self.key, **arguments)

        return retry(act, doing, self.url, self.patience, tries)


class MultipartSink:
    """One object; a file smaller than a part is uploaded with a single put instead."""

    def __init__(self, target: UploadTarget, num_bytes: int, part_bytes: int = PART_BYTES) -> None:
        self._target = target
        self._num_bytes = num_bytes
        self._part_bytes = part_size(num_bytes, part_bytes)
        self._filling = bytearray()
        self._written = 0
        self._upload = ""
        self._num_sent = 0
        self._sending: deque[Future[dict[str, Any]]] = deque()
        self._sent: list[dict[str, Any]] = []
        self._pool: ThreadPoolExecutor | None = None

    def write(self, data: Bytes) -> None:
        rest = memoryview(data).cast("B")
        self._written += len(rest)
        while rest:
            room = self._part_bytes - len(self._filling)
            self._filling += rest[:room]
            rest = rest[room:]
            # The last part is kept until ``close``: if it holds the whole file, it is uploaded with a single put.
            if len(self._filling) == self._part_bytes and (rest or self._written < self._num_bytes):
                self._send()

    def close(self) -> None:
        if self._written != self._num_bytes:
            raise StorageError(f"{self._target.url} got {self._written} bytes instead of {self._num_bytes}")
        if self._upload:
            self._send()
            while self._sending:
                self._collect()
            failpoint(PARTS_SENT)
            self._complete()
        else:
            body = bytes(self._filling)
            self._target.call("put_object", "uploading", Body=body, ContentMD5=content_md5(body))
        self._release()
        failpoint(UPLOADED)

    def abort(self) -> None:
        for future in self._sending:
            future.cancel()
        wait(self._sending)  # a part that arrives after the abort would stay
        self._release()
        # What just failed is likely to fail still: a few tries, not minutes.
        target = replace(self._target, patience=replace(self._target.patience, num_tries=3))
        try:
            if self._upload:
                self._abort_upload(target)
            target.call("delete_object", "removing")  # it is complete if only the response to ``close`` was lost
        except StorageError as error:
            _LOG.warning("%s; some of its parts may remain", error)

    def _send(self) -> None:
        if not self._upload:
            answer = self._target.call("create_multipart_upload", "uploading")
            self._upload = str(answer["UploadId"])
            self._pool = ThreadPoolExecutor(NUM_STREAMS, thread_name_prefix="upload")
        while len(self._sending) >= NUM_STREAMS:
            self._collect()
        body, self._filling = self._filling, bytearray()
        self._num_sent += 1
        assert self._pool is not None
        self._sending.append(self._pool.submit(self._send_part, self._num_sent, bytes(body)))

    def _send_part(self, number: int, body: bytes) -> dict[str, Any]:
        which: dict[str, Any] = {"UploadId": self._upload, "PartNumber": number}
        answer = self._target.call("upload_part", "uploading", **which, Body=body, ContentMD5=content_md5(body))
        failpoint(PART_SENT)
        checksums = {name: value for name, value in answer.items() if name.startswith("Checksum")}
        checksums.pop("ChecksumType", None)
        return {"PartNumber": number, "ETag": answer["ETag"], **checksums}

    def _collect(self) -> None:
        self._sent.append(self._sending.popleft().result())

    def _complete(self) -> None:
        """The store may have joined the parts although its response was lost: a retry then finds no such upload, and an
        object of the right size is ours."""
        tries = RetryCount()
        parts = {"Parts": self._sent}
        try:
            self._target.call(
                "complete_multipart_upload", "uploading", tries, UploadId=self._upload, MultipartUpload=parts
            )
        except StorageError:
            if tries.count == 1 or self._size_there() != self._num_bytes:
                raise
        self._upload = ""

    def _size_there(self) -> int:
        try:
            return int(self._target.call("head_object", "looking for")["ContentLength"])
        except MissingError:
            return -1

    def _abort_upload(self, target: UploadTarget) -> None:
        with suppress(UnknownUploadError):
            target.call("abort_multipart_upload", "aborting the upload of", UploadId=self._upload)

    def _release(self) -> None:
        self._sending.clear()
        self._filling = bytearray()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
