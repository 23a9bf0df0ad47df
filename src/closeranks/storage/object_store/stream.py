"""Writes a file to a remote file system through fsspec's generic interface.

Uses fsspec's file object, which sends blocks as they fill and does its own retries. Invariant: an aborted file does not
exist afterwards, and its file object does not upload the rest when it is garbage-collected.
"""

from __future__ import annotations

import logging
from typing import Any

from closeranks.storage.errors import store_error
from closeranks.storage.protocol import Bytes, StorageError

_LOG = logging.getLogger(__name__)


class StreamSink:
    def __init__(self, fs: Any, path: str, url: str, num_bytes: int, block_bytes: int) -> None:
        self._fs = fs
        self._path = path
        self._url = url
        self._num_bytes = num_bytes
        self._written = 0
        try:
            # File systems with real folders need them created; object stores ignore this.
            fs.makedirs(fs._parent(path), exist_ok=True)
            self._file = fs.open(path, "wb", block_size=block_bytes)
        except Exception as error:  # foreign code: any exception is possible
            raise store_error(error, "creating", url) from error

    def write(self, data: Bytes) -> None:
        try:
            self._file.write(data)
        except Exception as error:
            raise store_error(error, "writing", self._url) from error
        self._written += memoryview(data).nbytes

    def close(self) -> None:
        if self._written != self._num_bytes:
            raise StorageError(f"{self._url} got {self._written} bytes instead of {self._num_bytes}")
        try:
            self._file.close()
        except Exception as error:
            raise store_error(error, "writing", self._url) from error

    def abort(self) -> None:
        try:
            self._discard()
            if self._fs.exists(self._path):
                self._fs.rm_file(self._path)
        except Exception as error:
            _LOG.warning("an unfinished file may be left: %s", store_error(error, "removing", self._url))

    def _discard(self) -> None:
        from fsspec.spec import AbstractBufferedFile

        if not isinstance(self._file, AbstractBufferedFile):
            self._file.close()
        elif not self._file.closed:
            self._file.closed = True  # before anything can fail: an open one flushes itself when it is collected
            self._file.discard()
