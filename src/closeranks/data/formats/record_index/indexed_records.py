"""Reads records by number from files in which each has a byte offset and a length, both kept in an index.

A format defines which files belong to it, how they are scanned, and how the bytes of a record are decoded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from closeranks.data.dataset_protocol import Ints, Record, RecordLocation
from closeranks.data.files.protocol import FileInfo, Files
from closeranks.data.formats.file_rows import FileRows
from closeranks.data.formats.mapped_files import MappedFiles
from closeranks.data.formats.record_index.saved_index import Arrays, IndexLocation, Progress, saved_index

Scan = Callable[[Files, Sequence[FileInfo], Progress], Arrays]
"""Makes the arrays of an index: ``firsts``, ``starts`` and ``sizes``."""


class IndexedRecords(ABC):
    """A subclass is constructed from ``files`` and ``location`` alone, so that a loader worker can recreate it."""

    lead = 0
    """Number of bytes of a record before its data, which is what the index points at."""

    def __init__(self, files: Files, location: IndexLocation, name: str, infos: Sequence[FileInfo], scan: Scan) -> None:
        self._files, self._location = files, location
        index = saved_index(location, files, infos, name, lambda progress: scan(files, infos, progress), {"version": 1})
        self._rows = FileRows([info.name for info in infos], index["firsts"])
        self._starts, self._sizes = index["starts"], index["sizes"]
        self._maps = MappedFiles(files)
        self.indexes, self.identity = (index,), index.identity
        self.block = self._rows.block

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._files, self._location)

    def __len__(self) -> int:
        return self._rows.num_rows

    def read(self, indices: Ints) -> list[Record]:
        rows = self._rows.check_bounds(indices)
        numbers = self._rows.files_at(rows).tolist()
        starts, sizes = self._starts[rows].tolist(), self._sizes[rows].tolist()
        return [self._read_one(*at) for at in zip(numbers, starts, sizes, strict=True)]

    def _read_one(self, number: int, start: int, size: int) -> Record:
        name = self._rows.names[number]
        return self._record(name, self._maps.view(name), start, size)

    @abstractmethod
    def _record(self, name: str, view: npt.NDArray[np.uint8], start: int, size: int) -> Record:
        """Decodes bytes of the file of that name; ``BadRecordError`` with the location if they are not a record."""

    def _location_of(self, name: str, start: int) -> RecordLocation:
        return RecordLocation(self._files.full_name(name), start - self.lead)

    def where(self, index: int) -> RecordLocation:
        row = self._rows.check_bounds(np.array([index]))
        return self._location_of(self._rows.names[int(self._rows.files_at(row)[0])], int(self._starts[index]))

    def files_of(self, indices: Ints) -> Sequence[str]:
        return self._rows.names_of(indices)

    def close(self) -> None:
        self._maps.close()
