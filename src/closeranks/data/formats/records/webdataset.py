"""Reads samples in tar files (WebDataset) by number.

WebDataset's rule: consecutive members whose names agree up to the first dot of the last path component are one sample;
the part after the dot, in lower case, names the field. The index holds the position of each member's bytes, and each
sample's key. Invariants: samples are those that WebDataset itself would give, in its order; members are returned as raw
bytes (a tar file has no checksum of them) and are not decoded here.
"""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np

from closeranks.core.errors import BadRecordError, DataError
from closeranks.data.dataset_protocol import Ints, Record, RecordLocation, Records
from closeranks.data.files.protocol import FileInfo, Files
from closeranks.data.formats.file_rows import FileRows
from closeranks.data.formats.mapped_files import MappedFiles
from closeranks.data.formats.record_index.saved_index import Arrays, IndexLocation, Progress, saved_index
from closeranks.data.formats.records.tar_members import TarMember, split_name, tar_members

NAME = "webdataset"
SUFFIXES = (".tar",)
COMPRESSED = (".tgz", ".tbz2", ".txz", *(f".tar{packed}" for packed in (".gz", ".zst", ".zstd", ".bz2", ".xz", ".lz4")))

_TELL_EVERY = 4096
_log = logging.getLogger(__name__)


def is_format(infos: Sequence[FileInfo], files: Files) -> bool:
    return any(info.name.lower().endswith(SUFFIXES + COMPRESSED) for info in infos)


def open_records(files: Files, index: IndexLocation) -> Records:
    return TarRecords(files, index)


class TarRecords:
    """Samples as ``{"__key__": ..., "jpg": b"...", ...}``."""

    def __init__(self, files: Files, location: IndexLocation) -> None:
        self._files, self._location = files, location
        infos = _tars_of(files)
        index = saved_index(
            location, files, infos, NAME, lambda progress: _Builder(files).build(infos, progress), {"version": 1}
        )
        self._rows = FileRows([info.name for info in infos], index["firsts"])
        self._members, self._key_ends, self._keys = index["members"], index["key_ends"], index["keys"]
        self._starts, self._sizes, self._fields = index["starts"], index["sizes"], index["fields"]
        self._field_names: list[str] = json.loads(index["field_names"].tobytes())
        self._maps = MappedFiles(files)
        self.indexes, self.identity = (index,), index.identity
        self.block = self._rows.block

    def __reduce__(self) -> tuple[Any, ...]:
        return TarRecords, (self._files, self._location)

    def __len__(self) -> int:
        return self._rows.num_rows

    def read(self, indices: Ints) -> list[Record]:
        rows = self._rows.check_bounds(indices)
        begins, counts = self._members[rows], self._members[rows + 1] - self._members[rows]
        # The members of all rows, one row after the other.
        ends = np.cumsum(counts)
        members = np.repeat(begins - ends + counts, counts) + np.arange(int(ends[-1]) if len(ends) else 0)
        found = zip(
            self._fields[members].tolist(), self._starts[members].tolist(), self._sizes[members].tolist(), strict=True
        )
        heads = zip(
            self._rows.files_at(rows).tolist(),
            self._key_ends[rows].tolist(),
            self._key_ends[rows + 1].tolist(),
            strict=True,
        )
        return [self._record(head, islice(found, count)) for head, count in zip(heads, counts.tolist(), strict=True)]

    def _record(self, head: tuple[int, int, int], members: Iterable[tuple[int, int, int]]) -> Record:
        """``head``: number of the file, where the key begins and ends. A member: number of the field, start, size."""
        file, key, key_end = head
        view = self._maps.view(self._rows.names[file])
        record: dict[str, Any] = {"__key__": self._keys[key:key_end].tobytes().decode("utf-8", "surrogateescape")}
        for field, start, size in members:
            name = self._field_names[field]
            if name in record:
                where = RecordLocation(self._files.full_name(self._rows.names[file]), start)
                raise BadRecordError(f"bad record at {where}: sample '{record['__key__']}' has two members '{name}'")
            record[name] = view[start : start + size].tobytes()
            if len(record[name]) != size:
                full = self._files.full_name(self._rows.names[file])
                raise DataError(f"'{full}' ends before byte {start + size}, inside a member", "Fetch it again.")
        return record

    def where(self, index: int) -> RecordLocation:
        row = self._rows.check_bounds(np.array([index]))
        name = self._rows.names[int(self._rows.files_at(row)[0])]
        return RecordLocation(self._files.full_name(name), int(self._starts[int(self._members[index])]))

    def files_of(self, indices: Ints) -> Sequence[str]:
        return self._rows.names_of(indices)

    def close(self) -> None:
        self._maps.close()


def _tars_of(files: Files) -> list[FileInfo]:
    infos = [info for info in files.list() if info.name.lower().endswith(SUFFIXES + COMPRESSED)]
    for info in infos:
        if info.name.lower().endswith(COMPRESSED):
            raise DataError(
                f"'{files.full_name(info.name)}' is compressed, and samples inside cannot be accessed by index",
                "Convert it with 'closeranks data build', or unpack it to a plain .tar.",
            )
    if not infos:
        raise DataError(f"'{files.url}' holds no .tar file")
    return infos


class _Builder:
    """Columns of plain integers (``array``), 8 bytes each: Python lists would take 40."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._firsts, self._members, self._key_ends = array("q", [0]), array("q", [0]), array("q", [0])
        self._starts, self._sizes, self._fields = array("q"), array("q"), array("I")
        self._keys = bytearray()
        self._field_numbers: dict[str, int] = {}
        self._num_skipped = 0

    def build(self, infos: Sequence[FileInfo], progress: Progress) -> Arrays:
        total, done = sum(info.num_bytes for info in infos), 0
        maps = MappedFiles(self._files, 1)
        for info in infos:
            key: str | None = None
            for number, member in enumerate(tar_members(maps.view(info.name), self._files.full_name(info.name))):
                key = self._take(member, key)
                if number % _TELL_EVERY == 0:
                    progress(done + member.start, total)
            self._close_sample()
            self._firsts.append(len(self._key_ends) - 1)
            done += info.num_bytes
            progress(done, total)
        maps.close()
        if self._num_skipped:
            _log.warning(
                "%s: %d members skipped: they have no key or are not regular files", self._files.url, self._num_skipped
            )
        return self._arrays()

    def _take(self, member: TarMember, key: str | None) -> str | None:
        """``key``: that of the current sample; returns the key of the sample that is current afterwards."""
        names = split_name(member.name)
        if names is None or not member.is_regular:
            self._num_skipped += 1
            return key
        name, field = names
        if name != key:
            self._close_sample()
            self._keys += name.encode("utf-8", "surrogateescape")
        self._starts.append(member.start)
        self._sizes.append(member.num_bytes)
        self._fields.append(self._field_numbers.setdefault(field, len(self._field_numbers)))
        return name

    def _close_sample(self) -> None:
        if len(self._starts) > self._members[-1]:
            self._members.append(len(self._starts))
            self._key_ends.append(len(self._keys))

    def _arrays(self) -> Arrays:
        return {
            "firsts": np.frombuffer(self._firsts, np.int64),
            "members": np.frombuffer(self._members, np.int64),
            "key_ends": np.frombuffer(self._key_ends, np.int64),
            "keys": np.frombuffer(self._keys, np.uint8),
            "starts": np.frombuffer(self._starts, np.int64),
            "sizes": np.frombuffer(self._sizes, np.int64),
            "fields": np.frombuffer(self._fields, np.uint32),
            "field_names": np.frombuffer(json.dumps([*self._field_numbers]).encode(), np.uint8),
        }
