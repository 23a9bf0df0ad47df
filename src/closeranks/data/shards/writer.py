"""Writes documents and records as shards, with several processes and across restarts.

A plan cuts the inputs into parts, in a way that does not depend on the number of processes. One process at a time
writes a part:

    with TokenShardWriter(folder, "uint16", part=3, vocab_size=50257, build=digest_of_plan) as writer:
        for tokens, cursor in documents_from(writer.cursor):  # None: from the beginning
            writer.append(tokens, cursor=cursor)              # where the input continues after this document
        names = writer.finish()                               # the part's shards, in order

and when all parts are done one process calls ``commit.commit(folder, names_of_all_parts, DatasetInfo(...))``. A single
writer needs no part number, and ``finish_and_commit(about)`` does both. ``RecordShardWriter`` is the same for records.

Invariants: a writer that was killed anywhere is constructed again and continues after its last finished shard (the torn
one is dropped: at most ``shard_bytes`` are done twice); the result is byte for byte that of an uninterrupted build;
shards of another build (``build``) are never continued. ``BadRecordError`` leaves the writer unchanged: the caller may
continue.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from closeranks.core.errors import BadRecordError, DataError
from closeranks.data.shards.commit import commit, open_shard
from closeranks.data.shards.encoding import PREFIX, RecordSchema, Value, encode, encode_schemas
from closeranks.data.shards.manifest import DatasetInfo, DatasetManifest, ShardEntry
from closeranks.data.shards.shard_file import ShardFile
from closeranks.data.shards.shard_format import BLOCK_BYTES, SUFFIX, TOKEN_DTYPES, ShardHeader

SHARD_BYTES = 256 << 20
Self = TypeVar("Self", bound="_Writer")
_DECIMALS = 5


class _Writer:
    """What both kinds share: writing shards one after the other, and continuing after those that are finished."""

    def __init__(
        self, folder: str | Path, head: ShardHeader, part: int | None, first: int, build: str, shard_bytes: int
    ) -> None:
        self.folder = Path(folder)
        self._head, self._build, self._shard_bytes = head, build, shard_bytes
        self._prefix = "shard-" if part is None else f"shard-{part:0{_DECIMALS}d}-"
        self._next = first
        self._file: ShardFile | None = None
        self.shards: list[ShardEntry] = []
        """The finished shards, including those of earlier attempts."""
        self.cursor: Any = None
        """The cursor of the last append in a finished shard: where the input continues. None: at its beginning."""
        self._last_cursor: Any = None
        self.num_bytes = 0
        """Bytes of data appended by this process."""
        self._resume()

    @property
    def num_done(self) -> int:
        """Documents or records in finished shards."""
        return sum(shard.num_items for shard in self.shards)

    def _name(self, number: int) -> str:
        return f"{self._prefix}{number:0{_DECIMALS}d}{SUFFIX}"

    def _resume(self) -> None:
        while (path := self.folder / self._name(self._next)).exists():
            found = open_shard(path)
            if found.head != self._head or found.notes.get("build") != self._build:
                what = f"'{path}' is a shard of another build"
                raise DataError(what, "Name another folder, or remove this one.")
            self.shards.append(found.entry)
            self.cursor = self._last_cursor = found.notes.get("cursor")
            self._next += 1

    def _shard_for(self, num_bytes: int) -> ShardFile:
        """The shard for an item of this size: a new one if the item would make the current one too large."""
        if self._file is not None and self._file.num_bytes + num_bytes + 8 > self._shard_bytes:
            self._finish_shard()
        if self._file is None:
            self._file = ShardFile(self.folder / self._name(self._next), self._head)
        return self._file

    def _note(self, num_bytes: int, cursor: Any) -> None:
        self._last_cursor = cursor
        self.num_bytes += num_bytes

    def _notes(self) -> tuple[dict[str, Any], int]:
        """The entries of a shard's notes that depend on the kind of writer, and its largest token; resets both."""
        raise NotImplementedError

    def _finish_shard(self) -> None:
        if self._file is None:
            return
        own, largest = self._notes()
        notes = {"build": self._build, "cursor": self._last_cursor, **own}
        self.shards.append(self._file.finish(notes, largest))
        self._file = None
        self.cursor = self._last_cursor
        self._next += 1

    def finish(self) -> tuple[str, ...]:
        """Finish the last shard; returns the names of all, in order. Without items there are none."""
        self._finish_shard()
        return tuple(shard.name for shard in self.shards)

    def finish_and_commit(self, about: DatasetInfo, *, extend: bool = False) -> DatasetManifest:
        """For a single writer: finish, and write ``dataset.json``."""
        return commit(self.folder, self.finish(), about, head=self._head, extend=extend)

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """What is unfinished is abandoned; finished shards stay."""
        if self._file is not None:
            self._file.abort()
            self._file = None


class TokenShardWriter(_Writer):
    """Documents of token ids. ``first`` is the number of the first shard: to continue after those of a data set."""

    def __init__(
        self,
        folder: str | Path,
        dtype: str,
        *,
        vocab_size: int = 0,
        part: int | None = None,
        first: int = 0,
        build: str = "",
        shard_bytes: int = SHARD_BYTES,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        if dtype not in TOKEN_DTYPES:
            raise DataError(f"tokens cannot be stored as '{dtype}'", f"Choose one of {', '.join(TOKEN_DTYPES)}.")
        self._dtype = np.dtype(dtype).newbyteorder("<")
        limit = int(np.iinfo(dtype).max) + 1
        self._limit = min(vocab_size or limit, limit)
        self._largest = 0
        super().__init__(folder, ShardHeader("tokens", dtype, block_bytes), part, first, build, shard_bytes)

    def append(self, tokens: npt.ArrayLike, *, cursor: Any = None) -> None:
        """One document, which may be empty."""
        ids = np.asarray(tokens)
        largest = 0
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise BadRecordError(f"a document is an array of {ids.ndim} dims of {ids.dtype}, not a row of integers")
        if ids.size:
            smallest, largest = int(ids.min()), int(ids.max())
            if smallest < 0 or largest >= self._limit:
                wrong = smallest if smallest < 0 else largest
                raise BadRecordError(f"a document holds the token {wrong}, and tokens are from 0 to {self._limit - 1}")
        data = ids.astype(self._dtype, copy=False).tobytes()
        self._shard_for(len(data)).append(data)
        self._largest = max(self._largest, largest)
        self._note(len(data), cursor)

    def _notes(self) -> tuple[dict[str, Any], int]:
        largest, self._largest = self._largest, 0
        return {}, largest


class RecordShardWriter(_Writer):
    """Records of named values. ``first`` is the number of the first shard: to continue after those of a data set."""

    def __init__(
        self,
        folder: str | Path,
        *,
        part: int | None = None,
        first: int = 0,
        build: str = "",
        shard_bytes: int = SHARD_BYTES,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self._schemas: dict[RecordSchema, int] = {}
        super().__init__(folder, ShardHeader("records", "", block_bytes), part, first, build, shard_bytes)

    def append(self, record: Mapping[str, Value], *, cursor: Any = None) -> None:
        schema, body = encode(record)
        file = self._shard_for(len(body) + PREFIX.size)
        file.append(PREFIX.pack(self._schemas.setdefault(schema, len(self._schemas))) + body)
        self._note(len(body) + PREFIX.size, cursor)

    def _notes(self) -> tuple[dict[str, Any], int]:
        schemas, self._schemas = list(self._schemas), {}
        return {"forms": encode_schemas(schemas)}, 0
