"""Writes one shard, so that an unfinished one is never taken for complete.

It is written front to back as ``NAME.part``, with checksums computed along the way; then the footer, fsync, and the
rename to ``NAME``. Invariants: a file without ``.part`` is complete and durable; its bytes depend only on what was
appended; one process writes a shard at a time (flock). A torn ``.part`` is overwritten from the beginning.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from array import array
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from blake3 import blake3
from crc32c import crc32c

from closeranks.core.errors import DataError
from closeranks.core.system.failpoints import declare_failpoint, failpoint
from closeranks.data.shards.manifest import ShardEntry
from closeranks.data.shards.shard_format import (
    DATA_OFFSET,
    ShardFooter,
    ShardHeader,
    ShardRegions,
    encode_footer,
    encode_header,
    footer_digest,
)
from closeranks.storage.disk import fsync_folder, make_folder, write_all

BEGUN = declare_failpoint("shard begun", "a shard's .part is made and empty")
DATA_WRITTEN = declare_failpoint("shard data written", "a shard's .part holds some of its data")
TABLE_WRITTEN = declare_failpoint("shard table written", "a shard's .part lacks only its footer")
FOOTER_WRITTEN = declare_failpoint("shard footer written", "a shard's .part is complete but not fsynced")
DURABLE = declare_failpoint("shard durable", "a shard's .part is complete and fsynced")
NAMED = declare_failpoint("shard named", "a shard is renamed into place; its folder is not fsynced yet")

PART = ".part"
_FLUSH_BYTES = 1 << 20
T = TypeVar("T")
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


class ShardFile:
    """A shard being written. ``abort`` or ``finish`` ends it."""

    def __init__(self, path: Path, head: ShardHeader) -> None:
        self._path, self._head = path, head
        self._part = path.with_name(path.name + PART)
        self._buffer = bytearray(encode_header(head).ljust(DATA_OFFSET, b"\0"))
        self._offsets = array("Q", [0])
        self._checksums = array("I")
        self._fd = -1
        self._guarded(self._begin)

    @property
    def num_items(self) -> int:
        return len(self._offsets) - 1

    @property
    def num_bytes(self) -> int:
        """Bytes of data and index, so far."""
        return self._offsets[-1] * self._head.unit_bytes + 8 * len(self._offsets)

    def append(self, data: bytes | memoryview) -> None:
        """One document or record: whole tokens, or the bytes of a record."""
        self._buffer += data
        self._offsets.append(self._offsets[-1] + len(data) // self._head.unit_bytes)
        if len(self._buffer) >= _FLUSH_BYTES:
            self._guarded(self._flush)

    def finish(self, notes: dict[str, Any], largest: int) -> ShardEntry:
        """The shard is complete and durable under its name when this returns. ``largest`` is the largest token id."""
        return self._guarded(lambda: self._finish(notes, largest))

    def abort(self) -> None:
        """Remove the unfinished file; never raises."""
        if self._fd >= 0:
            with suppress(OSError):  # a torn .part is overwritten by the next writer
                self._part.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1

    def _begin(self) -> None:
        make_folder(self._path.parent)
        self._fd = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if self._path.exists() or not _is_at(self._fd, self._part):
            raise BlockingIOError  # its writer renamed or removed it just before this process took the lock
        os.ftruncate(self._fd, 0)
        failpoint(BEGUN)

    def _flush(self, *, is_last: bool = False) -> None:
        """Write all whole blocks (with ``is_last`` also the last, partial one) and record their checksums."""
        size = self._head.block_bytes
        count = len(self._buffer) if is_last else len(self._buffer) // size * size
        with memoryview(self._buffer) as view:
            for start in range(0, count, size):
                self._checksums.append(crc32c(view[start : min(start + size, count)]))
            write_all(self._fd, view[:count])
        del self._buffer[:count]
        failpoint(DATA_WRITTEN)

    def _finish(self, notes: dict[str, Any], largest: int) -> ShardEntry:
        text = json.dumps(notes, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()
        data_bytes = self._offsets[-1] * self._head.unit_bytes
        shape = ShardRegions(self.num_items, data_bytes, len(text), self._head.block_bytes)
        self._buffer += bytes(shape.index_offset - DATA_OFFSET - data_bytes)
        self._buffer += _little(self._offsets, "<u8")
        self._buffer += text.ljust(shape.table_offset - shape.notes_offset, b"\0")
        self._flush(is_last=True)
        table = _little(self._checksums, "<u4").ljust(shape.footer_offset - shape.table_offset, b"\0")
        write_all(self._fd, table)
        failpoint(TABLE_WRITTEN)
        footer = ShardFooter(self._head, shape, largest, blake3(table).digest())
        encoded = encode_footer(footer)
        write_all(self._fd, encoded)
        self._seal()
        return ShardEntry.of(self._path.name, footer, footer_digest(encoded))

    def _seal(self) -> None:
        failpoint(FOOTER_WRITTEN)
        os.fsync(self._fd)
        failpoint(DURABLE)
        os.rename(self._part, self._path)
        failpoint(NAMED)
        fsync_folder(self._path.parent)
        os.close(self._fd)
        self._fd = -1

    def _guarded(self, act: Callable[[], T]) -> T:
        try:
            return act()
        except BlockingIOError as error:
            os.close(self._fd)
            self._fd = -1
            what = f"another process is writing '{self._part}'"
            raise DataError(what, "Let it finish, or end it, and build again.") from error
        except OSError as error:
            self.abort()
            raise _told(error, self._path) from error


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _told(error: OSError, path: Path) -> DataError:
    again = "run the same build again: it continues from the finished shards"
    if error.errno in _FULL:
        return DataError(f"no space is left to write '{path}' ({error.strerror})", f"Free some space, then {again}.")
    fix = f"Check the owner and mode of the folder, then {again}."
    return DataError(f"'{path}' cannot be written: {error.strerror or error}", fix)


def _little(numbers: array[int], dtype: str) -> bytes:
    return np.asarray(numbers).astype(dtype).tobytes()
