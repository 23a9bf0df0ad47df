"""Reads rows of Parquet files by number.

The footers give the number of rows of each row group; this is saved once, as an index over all files. A row group is
the smallest unit that can be decoded, so the requested rows are grouped by row group, and the most recently decoded
groups are kept, within ``KEPT_BYTES``. Invariants: all files have the same columns; pages are checked against their
checksums if the writer stored any; a row group that cannot be decoded is a ``BadRecordError`` for each of its rows, a
file without a sound footer a ``DataError``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from crc32c import crc32c

from closeranks.core.errors import DataError
from closeranks.data.dataset_protocol import Ints, Record, RecordLocation, typical_block
from closeranks.data.files.protocol import FileInfo, Files
from closeranks.data.formats.columnar.arrow_values import (
    check_columns,
    contiguous_runs,
    is_compatible_type,
    is_damage,
    lengths_of,
    raise_as_bad_record,
    records_of,
    validate_rows,
)
from closeranks.data.formats.file_rows import FileRows
from closeranks.data.formats.mapped_files import MappedFiles
from closeranks.data.formats.record_index.saved_index import Arrays, IndexLocation, Progress, saved_index
from closeranks.data.formats.spans import spans
from closeranks.data.timing import stage

KEPT_BYTES = 256 << 20
"""Limit of the decoded row groups kept; the one in use may be larger."""
_NUM_OPEN = 16
"""Number of files whose parsed footers are kept."""
_NUM_TAIL = 8
"""Bytes after the footer: its length and the magic."""


@dataclass(frozen=True, slots=True)
class _Footer:
    full: str
    schema: Any
    rows: Sequence[int]
    """Number of rows of each row group."""
    crc: int
    """Of the footer, which has the position of each page and, usually, minima and maxima: it identifies the content."""


@dataclass(frozen=True, slots=True)
class _Group:
    """A row group by its number within its file."""

    file: int
    number: int


class ParquetRecords:
    """Rows by number, across all files in the order of their names."""

    def __init__(
        self, files: Files, location: IndexLocation, infos: Sequence[FileInfo], names: Sequence[str] = ()
    ) -> None:
        self._files, self._location, self._infos, self._selected = files, location, tuple(infos), tuple(names)
        index = saved_index(location, files, infos, "parquet", partial(_build, files, infos), {"version": 1})
        self._firsts, self._file_groups = index["firsts"], index["file_groups"]
        self._rows = FileRows([info.name for info in infos], np.asarray(self._firsts[self._file_groups]))
        schema = pa.ipc.read_schema(pa.py_buffer(index["schema"]))
        self._fields = [schema.field(name) for name in check_columns(names, schema.names, files.url)]
        self.identity = index.identity
        self.indexes = (index,)
        self.block = typical_block(np.diff(self._firsts))
        self._maps = MappedFiles(files)
        self._open: OrderedDict[int, Any] = OrderedDict()
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._kept_bytes = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return ParquetRecords, (self._files, self._location, self._infos, self._selected)

    def __len__(self) -> int:
        return self._rows.num_rows

    @property
    def column_names(self) -> Sequence[str]:
        return [field.name for field in self._fields]

    def select(self, names: Sequence[str]) -> ParquetRecords:
        """The same rows with only these columns: the others are not decoded."""
        return ParquetRecords(self._files, self._location, self._infos, names)

    def read(self, indices: Ints) -> list[Record]:
        records: list[Record] = [{}] * len(indices)
        for span in spans(self._firsts, self._rows.check_bounds(indices)):
            table = self._decoded(span.container)
            with stage("decode"), self._blamed(span.container):
                runs = contiguous_runs(span.inside)
                arrays = [validate_rows(table.column(field.name), runs) for field in self._fields]
                for position, record in zip(span.positions.tolist(), records_of(self._fields, arrays), strict=True):
                    records[position] = record
        return records

    def lengths(self, field: str) -> npt.NDArray[np.int64] | None:
        """For every row, the number of elements of its list or bytes of its string. None if the column has no lengths.
        Reads the whole column once."""
        (name,) = check_columns([field], [one.name for one in self._fields], self._files.url)
        parts = []
        for number in range(self._num_groups):
            with self._blamed(number):
                found = [lengths_of(chunk) for chunk in self._table(number, [name]).column(name).chunks]
            if any(part is None for part in found):
                return None
            parts += found
        return np.concatenate([np.empty(0, np.int64), *parts])

    def where(self, index: int) -> RecordLocation:
        (span,) = spans(self._firsts, self._rows.check_bounds(np.asarray([index])))
        group = self._group(span.container)
        name = self._files.full_name(self._rows.names[group.file])
        return RecordLocation(name, int(span.inside[0]), f"row group {group.number}, row")

    def files_of(self, indices: Ints) -> Sequence[str]:
        return self._rows.names_of(indices)

    def close(self) -> None:
        self._open.clear()
        self._kept.clear()
        self._kept_bytes = 0
        self._maps.close()

    def _decoded(self, number: int) -> Any:
        """A row group as a table, from the cache if it is there."""
        found = self._kept.get(number)
        if found is not None:
            self._kept.move_to_end(number)
            return found
        with stage("decode"), self._blamed(number):
            table = self._table(number, [field.name for field in self._fields] if self._selected else None)
        self._kept_bytes += table.nbytes
        self._kept[number] = table
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
            self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes
        return table

    def _table(self, number: int, names: Sequence[str] | None) -> Any:
        wanted, group = int(self._firsts[number + 1] - self._firsts[number]), self._group(number)
        table = self._file(group.file).read_row_group(group.number, columns=names, use_threads=False)
        if len(table) != wanted:
            raise pa.ArrowInvalid(f"it holds {len(table)} rows, and {wanted} according to the footer")
        return table

    def _file(self, number: int) -> Any:
        found = self._open.get(number)
        if found is not None:
            self._open.move_to_end(number)
            return found
        name = self._infos[number].name
        file = _opened(self._maps.view(name), self._files.full_name(name))
        while len(self._open) >= _NUM_OPEN:
            self._open.popitem(last=False)
        self._open[number] = file
        return file

    @property
    def _num_groups(self) -> int:
        return len(self._firsts) - 1

    def _group(self, number: int) -> _Group:
        file = int(np.searchsorted(self._file_groups, number, side="right")) - 1
        return _Group(file, number - int(self._file_groups[file]))

    def _blamed(self, number: int) -> AbstractContextManager[None]:
        def where() -> str:
            group = self._group(number)
            return f"'{self._files.full_name(self._rows.names[group.file])}', row group {group.number}"

        return raise_as_bad_record(where)


def _opened(view: npt.NDArray[np.uint8], full: str) -> Any:
    """A file whose footer is sound."""
    try:
        file = pq.ParquetFile(pa.BufferReader(pa.py_buffer(view)), page_checksum_verification=True)
        names = file.schema_arrow.names
    except Exception as error:
        if not is_damage(error):
            raise
        why = str(error).splitlines()[0]
        raise DataError(f"'{full}' is damaged or not Parquet: {why}", "Copy or write it again.") from error
    if len(set(names)) != len(names):
        raise DataError(f"'{full}' has two columns of one name", "Rename one of them.")
    return file


def _build(files: Files, infos: Sequence[FileInfo], progress: Progress) -> Arrays:
    """Reads every footer, and no data."""
    maps, footers, done = MappedFiles(files, limit=1), [], 0
    for info in infos:
        footers.append(_footer(maps.view(info.name), files.full_name(info.name)))
        done += info.num_bytes
        progress(done, sum(info.num_bytes for info in infos))
    maps.close()
    first = footers[0]
    for footer in footers[1:]:
        _check_schema(footer, first)
    firsts = np.cumsum([0, *(rows for footer in footers for rows in footer.rows)], dtype=np.int64)
    if firsts[-1] == 0:
        raise DataError(f"'{files.url}' holds no rows")
    return {
        "firsts": firsts,
        "file_groups": np.cumsum([0, *(len(footer.rows) for footer in footers)], dtype=np.int64),
        "footer_crcs": np.asarray([footer.crc for footer in footers], np.uint32),
        "schema": np.frombuffer(first.schema.remove_metadata().serialize(), np.uint8),
    }


def _footer(view: npt.NDArray[np.uint8], full: str) -> _Footer:
    file = _opened(view, full)
    metadata, schema = file.metadata, file.schema_arrow
    rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    if any(count < 0 for count in rows) or sum(rows) != metadata.num_rows:
        raise DataError(f"'{full}' is damaged: its row groups have {sum(rows)} rows, not {metadata.num_rows}")
    num_bytes = int.from_bytes(view[-_NUM_TAIL:-4].tobytes(), "little")
    return _Footer(full, schema, rows, int(crc32c(view[-_NUM_TAIL - num_bytes :].data)))


def _check_schema(footer: _Footer, first: _Footer) -> None:
    fix = "Keep files of different columns in different folders."
    for name in sorted({*footer.schema.names} ^ {*first.schema.names}):
        has, lacks = (footer, first) if name in footer.schema.names else (first, footer)
        raise DataError(f"'{has.full}' has a column '{name}', '{lacks.full}' has not", fix)
    for name in footer.schema.names:
        mine, theirs = footer.schema.field(name).type, first.schema.field(name).type
        if not is_compatible_type(mine, theirs):
            raise DataError(f"the column '{name}' is {mine} in '{footer.full}' and {theirs} in '{first.full}'", fix)
