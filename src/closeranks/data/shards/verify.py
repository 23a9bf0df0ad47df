"""Verifies every byte of a data set, and reports which samples are affected by damage.

Reads everything anew, whatever readers have checked already: the manifest, header and footer of each shard, every block
against its checksum, then the content (order of the offsets, ids within the vocabulary, records that decode).
Invariant: a flipped bit anywhere in ``dataset.json`` or in a shard it lists gives at least one finding; a sound data
set gives none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from crc32c import crc32c

from closeranks.core.errors import DataError
from closeranks.core.system.regular_file import open_descriptor
from closeranks.data.dataset_protocol import Ints
from closeranks.data.files.protocol import Files
from closeranks.data.shards.encoding import PREFIX, RecordDecoder, decode_schemas
from closeranks.data.shards.manifest import NAME, DatasetManifest, ShardEntry, read_manifest
from closeranks.data.shards.records import UNDECODABLE
from closeranks.data.shards.shard_footer import read_footer
from closeranks.data.shards.shard_format import DATA_OFFSET, ShardFooter, ShardRegions, UnsoundShard
from closeranks.storage.disk import read_range
from closeranks.storage.protocol import ChangedError, DeniedError, MissingError, StorageError

_WINDOW_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class ShardFinding:
    """Something that is not as it was written."""

    file: str
    """As a user would name it."""
    offset: int
    num_bytes: int
    """The damage is in these bytes: a block, or the whole file."""
    reason: str
    unit: str = ""
    """What ``first`` and ``last`` count: tokens, documents or records of the data set. Empty: no samples are
    affected."""
    first: int = 0
    last: int = 0

    def __str__(self) -> str:
        hit = f"; {self.unit} {self.first} to {self.last - 1} are affected" if self.last > self.first else ""
        return f"'{self.file}', byte {self.offset}: {self.reason}{hit}"


@dataclass(frozen=True, slots=True)
class _Shard:
    """A shard, and the numbers of its first item and unit in the data set."""

    entry: ShardEntry
    shape: ShardRegions[int]
    kind: str
    unit_bytes: int
    first_item: int
    first_unit: int


def verify(files: Files, on_progress: Callable[[int, int], None] | None = None) -> list[ShardFinding]:
    """All findings, in the order of the files; none if all is well. ``on_progress`` gets bytes done and total bytes."""
    try:
        manifest = read_manifest(files)
    except DataError as error:
        if _is_out_of_reach(error, files):
            raise
        return [ShardFinding(files.full_name(NAME), 0, 0, error.what)]
    done, total = 0, manifest.num_bytes
    findings: list[ShardFinding] = []
    for shard in _shards(manifest):
        full = files.full_name(shard.entry.name)
        try:
            with files.local_path(shard.entry.name) as path:
                findings += _Check(full, shard, manifest).run(path)
        except DataError as error:
            if _is_out_of_reach(error, files):
                raise
            findings.append(_whole(full, shard, error.what))
        except PermissionError as error:
            raise DataError(f"'{full}' cannot be read: {error.strerror}", "Check its owner and its mode.") from error
        except OSError as error:
            findings.append(_whole(full, shard, f"it cannot be read: {error.strerror or error}"))
        done += shard.shape.num_bytes
        if on_progress is not None:
            on_progress(done, total)
    return findings


def _is_out_of_reach(error: DataError, files: Files) -> bool:
    """A file that may not be read or cannot be reached says nothing about the data."""
    cause = error.__cause__
    is_gone = isinstance(cause, MissingError | ChangedError)
    is_unanswered = isinstance(cause, StorageError) and not files.is_local and not is_gone
    return is_unanswered or isinstance(cause, DeniedError | PermissionError)


def _shards(manifest: DatasetManifest) -> Iterator[_Shard]:
    head = manifest.head
    items, units = 0, 0
    for entry in manifest.shards:
        yield _Shard(entry, entry.regions(head.block_bytes), head.kind, head.unit_bytes, items, units)
        items += entry.num_items
        units += entry.data_bytes // head.unit_bytes


def _whole(full: str, shard: _Shard, reason: str) -> ShardFinding:
    unit, first, last = affected_samples(shard, None, 0, shard.shape.num_bytes)
    return ShardFinding(full, 0, shard.shape.num_bytes, reason, unit, first, last)


def affected_samples(shard: _Shard, offsets: Ints | None, start: int, stop: int) -> tuple[str, int, int]:
    """Which samples need the bytes from ``start`` to ``stop`` of a shard: pure. ``offsets``: its index, if that is
    sound; without it, all records of a shard are affected."""
    shape = shard.shape
    if shard.kind == "tokens":
        first = max(start - DATA_OFFSET, 0) // shard.unit_bytes
        last = -(-min(stop - DATA_OFFSET, shape.data_bytes) // shard.unit_bytes)
        if first < last:
            return "tokens", shard.first_unit + first, shard.first_unit + last
        is_index = start < shape.notes_offset and shape.num_items
        return ("documents", *_items(shard, start, stop)) if is_index else ("", 0, 0)
    if offsets is None or stop > shape.notes_offset:
        return "records", shard.first_item, shard.first_item + shape.num_items
    ranges = []
    if start < DATA_OFFSET + shape.data_bytes:
        first = int(offsets[1:].searchsorted(start - DATA_OFFSET, side="right"))
        last = int(offsets[:-1].searchsorted(stop - DATA_OFFSET, side="left"))
        ranges.append((shard.first_item + first, shard.first_item + last))
    if stop > shape.index_offset:
        ranges.append(_items(shard, start, stop))
    return "records", min((r[0] for r in ranges), default=0), max((r[1] for r in ranges), default=0)


def _items(shard: _Shard, start: int, stop: int) -> tuple[int, int]:
    """The items with an offset in these bytes of the index: each offset is the end of one and the start of the next."""
    first = max(start - shard.shape.index_offset, 0) // 8 - 1
    last = -(-(min(stop, shard.shape.notes_offset) - shard.shape.index_offset) // 8)
    return shard.first_item + max(first, 0), shard.first_item + min(last, shard.shape.num_items)


class _Check:
    """Verifies one shard."""

    def __init__(self, full: str, shard: _Shard, manifest: DatasetManifest) -> None:
        self._full, self._shard, self._manifest = full, shard, manifest
        self._fd = -1

    def run(self, path: Path) -> list[ShardFinding]:
        self._fd = open_descriptor(path)
        try:
            footer, checksums = read_footer(self._fd, self._shard.entry, self._manifest.head)
            bad, largest = self._bad_blocks(checksums.tolist())
            if bad:
                return self._damage(bad)
            reason = self._nonsense(footer, largest)
        except UnsoundShard as error:
            reason = str(error)
        finally:
            os.close(self._fd)
        return [_whole(self._full, self._shard, reason)] if reason else []

    def _bad_blocks(self, checksums: list[int]) -> tuple[list[int], int]:
        """Numbers of the blocks that do not match, and the largest token in all blocks."""
        shape, size = self._shard.shape, self._shard.shape.block_bytes
        stop = DATA_OFFSET + shape.data_bytes
        dtype = np.dtype(self._manifest.head.dtype or "u1").newbyteorder("<")
        window = max(_WINDOW_BYTES, size)
        bad, largest = [], 0
        for begin in range(0, shape.table_offset, window):
            data = memoryview(self._bytes(begin, min(window, shape.table_offset - begin)))
            bad += [
                (begin + at) // size
                for at in range(0, len(data), size)
                if crc32c(data[at : at + size]) != checksums[(begin + at) // size]
            ]
            tokens = data[max(0, DATA_OFFSET - begin) : max(0, stop - begin)]
            largest = max(largest, int(np.frombuffer(tokens, dtype).max(initial=0)))
        return bad, largest

    def _bytes(self, start: int, num_bytes: int) -> bytes:
        data = read_range(self._fd, start, num_bytes)
        if len(data) < num_bytes:
            raise UnsoundShard("it became shorter while it was read")
        return data

    def _damage(self, bad: list[int]) -> list[ShardFinding]:
        shape, size = self._shard.shape, self._shard.shape.block_bytes
        is_index_bad = any((b + 1) * size > shape.index_offset and b * size < shape.notes_offset for b in bad)
        offsets = None if is_index_bad else self._offsets()
        findings = []
        for block in bad:
            start, stop = block * size, min((block + 1) * size, shape.table_offset)
            unit, first, last = affected_samples(self._shard, offsets, start, stop)
            reason = f"block {block} (bytes {start} to {stop}) does not match its checksum"
            findings.append(ShardFinding(self._full, start, stop - start, reason, unit, first, last))
        return findings

    def _offsets(self) -> Ints:
        shape = self._shard.shape
        return np.frombuffer(self._bytes(shape.index_offset, 8 * (shape.num_items + 1)), "<i8").astype(np.int64)

    def _nonsense(self, footer: ShardFooter, largest: int) -> str:
        """What is wrong with bytes that are as they were written, by a faulty writer. Empty: nothing."""
        offsets = self._offsets()
        if offsets[0] != 0 or int(offsets[-1]) != footer.num_units or (np.diff(offsets) < 0).any():
            return "its index is out of order, or does not cover the data"
        if self._shard.kind == "records":
            return self._undecodable(offsets)
        vocab_size = self._manifest.about.vocab_size
        if largest != footer.largest or (vocab_size and footer.num_units and largest >= vocab_size):
            return f"its largest token is {largest}, where {footer.largest} of {vocab_size or 'any'} were declared"
        return ""

    def _undecodable(self, offsets: Ints) -> str:
        shape = self._shard.shape
        view = memoryview(self._bytes(0, DATA_OFFSET + shape.data_bytes))
        try:
            notes = json.loads(self._bytes(shape.notes_offset, shape.notes_bytes))
            decoders = [RecordDecoder(schema) for schema in decode_schemas(notes["forms"])]
        except (*UNDECODABLE, KeyError) as error:
            return f"its record schema is invalid ({error})"
        for number, (start, stop) in enumerate(pairwise((offsets + DATA_OFFSET).tolist())):
            try:
                decoders[PREFIX.unpack_from(view, start)[0]](view, start, stop)
            except UNDECODABLE as error:
                return f"record {self._shard.first_item + number} at byte {start} cannot be decoded ({error})"
        return ""
