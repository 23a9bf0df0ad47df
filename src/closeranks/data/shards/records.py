"""Reads records from shards.

One gather finds the locations of the whole batch; then each record is decoded by the ``struct`` of its schema, with
arrays as read-only views of the map, or all of them together if they have equal layout (``columns``). Invariant: a
record is returned only from blocks that matched their checksum in this process.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from closeranks.core.errors import BadRecordError, DataError
from closeranks.data.dataset_protocol import Ints, Record, RecordLocation, typical_block
from closeranks.data.files.protocol import Files
from closeranks.data.shards.columns import SchemaColumns
from closeranks.data.shards.encoding import PREFIX, RecordDecoder, RecordSchema, decode_schemas
from closeranks.data.shards.item_index import ItemIndex, ItemLocations
from closeranks.data.shards.mapped_shards import AGAIN, MappedShards
from closeranks.data.shards.shard_format import DATA_OFFSET
from closeranks.data.shards.tokens import check_same, manifest_of

_SCHEMA_NUMBER = np.dtype("<u8")
UNDECODABLE = (ValueError, TypeError, IndexError, struct.error, RecursionError)
"""What decoding raises on bytes that none of our writers wrote."""


class ShardRecords:
    """Records of a folder of shards. At most ``most_mapped`` are mapped at a time; 0: all of a local folder, else
    64."""

    def __init__(self, files: Files, most_mapped: int = 0) -> None:
        manifest = manifest_of(files, "records")
        self._files, self._most_mapped = files, most_mapped
        self._shards = MappedShards(files, manifest, most_mapped)
        self._index = ItemIndex(self._shards)
        self._names = [shard.name for shard in manifest.shards]
        self._data_bytes: Ints = manifest.regions.data_bytes
        self.identity = manifest.identity
        self._columns: dict[int, list[SchemaColumns]] = {}
        """By shard and schema number; equal schemas of different shards share one object."""
        self._same: dict[RecordSchema, SchemaColumns] = {}
        self.fields = dict(manifest.fields)
        """Every field's name, and the kinds of its values."""
        self.block = typical_block(manifest.regions.num_items)

    def __reduce__(self) -> tuple[Callable[..., ShardRecords], tuple[Files, int, str]]:
        return _reopened_records, (self._files, self._most_mapped, self.identity)

    def __len__(self) -> int:
        return len(self._index)

    def read(self, indices: Ints) -> list[Record]:
        """About 15 µs for any number of records, then 1 to 2 µs for each and the time to copy bytes and text; arrays
        are not copied and are read-only."""
        indices = np.asarray(indices, dtype=np.int64)
        if not len(indices):
            return []
        found = self._located(indices)
        if found is None:
            half = len(indices) // 2
            return self.read(indices[:half]) + self.read(indices[half:])
        starts, stops = found.begin + DATA_OFFSET, found.end + DATA_OFFSET
        schemas = self._schemas(self._addresses(found))
        rows = zip(found.shard.tolist(), schemas.tolist(), starts.tolist(), stops.tolist(), strict=True)
        return [self._record(*row) for row in rows]

    def columns(self, indices: Ints, names: Collection[str]) -> dict[str, npt.NDArray[Any]] | None:
        """These fields, one array for all records; None if the records have different layouts, or values that are not
        numbers. About 40 µs for any number of records, and the time to copy their bytes."""
        indices = np.asarray(indices, dtype=np.int64)
        found = self._located(indices) if len(indices) else None
        if found is None or np.count_nonzero(found.end - found.begin != found.end[0] - found.begin[0]):
            return None
        at = self._addresses(found)
        schemas = self._schemas(at)
        shard, schema = int(found.shard[0]), int(schemas[0])
        self._record(shard, schema, int(found.begin[0]) + DATA_OFFSET, int(found.end[0]) + DATA_OFFSET)
        alike = self._columns[shard][schema]
        if not all(
            self._schema_columns(*pair) is alike
            for pair in set(zip(found.shard.tolist(), schemas.tolist(), strict=True))
        ):
            return None
        return alike.read(self._shards.window.gather, at, names)

    def _addresses(self, found: ItemLocations) -> Ints:
        return self._shards.place[found.shard] + self._shards.address[found.shard] + found.begin + DATA_OFFSET

    def _schemas(self, at: Ints) -> npt.NDArray[np.uint64]:
        schemas: npt.NDArray[np.uint64] = self._shards.window.gather(at, PREFIX.size, _SCHEMA_NUMBER)[:, 0]
        return schemas

    def _schema_columns(self, shard: int, number: int) -> SchemaColumns | None:
        if not self._shards[shard].decoders:
            self._decoders(shard)
        columns = self._columns[shard]
        return columns[number] if number < len(columns) else None

    def _record(self, shard: int, schema: int, start: int, stop: int) -> Record:
        mapped = self._shards[shard]
        try:
            decoders = mapped.decoders or self._decoders(shard)
            return decoders[schema](mapped.view, start, stop)
        except UNDECODABLE as error:
            place = RecordLocation(self._files.full_name(self._names[shard]), start)
            raise BadRecordError(f"{place}: the record cannot be decoded ({error})", AGAIN) from error

    def _located(self, indices: Ints) -> ItemLocations | None:
        """The locations of the records, with all their blocks checked; None if they are in too many shards at a
        time."""
        found = self._index.locate(indices)
        if found is None:
            return None
        is_outside = (found.begin < 0) | (found.begin + PREFIX.size > found.end)
        if np.count_nonzero(is_outside | (found.end > self._data_bytes[found.shard])):
            raise DataError(f"'{self._files.url}': an index says that a record lies outside of its shard", AGAIN)
        at = self._shards.place[found.shard] + DATA_OFFSET
        first, last = (at + found.begin) >> self._shards.shift, (at + found.end - 1) >> self._shards.shift
        if not self._shards.is_sound(found.shard, first, last):
            self._shards.prepare(found.shard, first, last)
        return found

    def _decoders(self, shard: int) -> list[RecordDecoder]:
        mapped = self._shards[shard]
        try:
            schemas = decode_schemas(json.loads(self._shards.notes(shard))["forms"])
        except (*UNDECODABLE, KeyError) as error:
            full = self._files.full_name(self._names[shard])
            raise DataError(f"'{full}' cannot be used: its record schema is invalid ({error})", AGAIN) from error
        self._columns[shard] = [self._same.setdefault(schema, SchemaColumns(schema)) for schema in schemas]
        mapped.decoders.extend(RecordDecoder(schema) for schema in schemas)
        return mapped.decoders

    def where(self, index: int) -> RecordLocation:
        """In bytes; if the index itself is damaged, by the record's number in its file."""
        indices = np.array([index], dtype=np.int64)
        shard = int(self._index.shard_of(indices)[0])
        full = self._files.full_name(self._names[shard])
        try:
            found = self._index.locate(indices)
        except DataError:
            found = None
        if found is None:
            return RecordLocation(full, index - int(self._index.first[shard]), "record")
        return RecordLocation(full, DATA_OFFSET + int(found.begin[0]))

    def files_of(self, indices: Ints) -> Sequence[str]:
        shards = self._index.shard_of(np.asarray(indices, dtype=np.int64)).tolist()
        return [self._names[shard] for shard in dict.fromkeys(shards)]

    def close(self) -> None:
        """Release all shards; reading maps them again."""
        self._shards.close()


def _reopened_records(files: Files, most_mapped: int, identity: str) -> ShardRecords:
    records = ShardRecords(files, most_mapped)
    check_same(files, records.identity, identity)
    return records
