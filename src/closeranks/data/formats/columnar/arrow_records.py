"""Reads rows of Arrow files by number.

The index holds the position and number of rows of each record batch; a batch is read from the mapped file when one of
its rows is requested, which takes microseconds and copies nothing unless it is compressed. Invariants: all files have
the same columns; every offset is checked before it is followed, since the format has no checksums; memory does not grow
with the number of batches (except for files with dictionaries, whose batches are read together).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from closeranks.core.errors import BadRecordError, DataError
from closeranks.data.dataset_protocol import Ints, Record, RecordLocation, typical_block
from closeranks.data.files.protocol import FileInfo, Files
from closeranks.data.formats.columnar.arrow_files import ArrowFiles
from closeranks.data.formats.columnar.arrow_ipc import ArrowScan, NotArrow, read_all, read_batch, scan
from closeranks.data.formats.columnar.arrow_values import (
    DAMAGE,
    check_columns,
    contiguous_runs,
    is_damage,
    lengths_of,
    raise_as_bad_record,
    records_of,
)
from closeranks.data.formats.file_rows import FileRows
from closeranks.data.formats.mapped_files import MappedFiles
from closeranks.data.formats.record_index.saved_index import Arrays, IndexLocation, Progress, saved_index
from closeranks.data.formats.spans import ContainerSpan, spans
from closeranks.data.timing import stage

KEPT_BYTES = 256 << 20
"""Limit of the decompressed batches kept in memory."""
_NUM_KEPT = 64
_NUM_WHOLE = 4
"""Number of files with dictionaries whose batches are kept."""


class ArrowRecords:
    """Rows by number, in the order of the files or of the row mapping beside them."""

    def __init__(
        self, files: Files, location: IndexLocation, arrow_files: ArrowFiles, names: Sequence[str] = ()
    ) -> None:
        self._files, self._location, self._arrow_files, self._selected = files, location, arrow_files, tuple(names)
        infos = [*arrow_files.data, *arrow_files.mapping]
        self._index = saved_index(
            location, files, infos, "arrow", partial(_build, files, arrow_files), _settings(arrow_files)
        )
        self.indexes, self.identity = (self._index,), self._index.identity
        self._firsts, self._file_batches = self._index["firsts"], self._index["file_batches"]
        self._rows = FileRows([info.name for info in arrow_files.data], np.asarray(self._firsts[self._file_batches]))
        self._mapping = self._index["mapping"] if arrow_files.mapping else None
        self._schema = pa.ipc.read_schema(pa.py_buffer(self._index["schema"]))
        chosen = check_columns(names or arrow_files.columns, self._schema.names, files.url)
        self._fields = [self._schema.field(name) for name in chosen]
        self._chosen = [*chosen]
        self._is_compressed = bool(self._index["is_compressed"][0])
        self.block = self._typical_block()
        self._maps = MappedFiles(files)
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._kept_bytes = 0
        self._whole: OrderedDict[int, list[Any]] = OrderedDict()

    def __reduce__(self) -> tuple[Any, ...]:
        return ArrowRecords, (self._files, self._location, self._arrow_files, self._selected)

    def __len__(self) -> int:
        return self._rows.num_rows if self._mapping is None else len(self._mapping)

    @property
    def column_names(self) -> Sequence[str]:
        return self._chosen

    def select(self, names: Sequence[str]) -> ArrowRecords:
        """The same rows with only these columns."""
        return ArrowRecords(self._files, self._location, self._arrow_files, names)

    def read(self, indices: Ints) -> list[Record]:
        asked = [*spans(self._firsts, self._stored(indices))]
        # Together is faster, but the decompressed batches in memory at a time must stay within the limit.
        together = [[span] for span in asked] if self._is_compressed else [asked]
        records: list[Record] = [{}] * len(indices)
        for some in together:
            parts = [self._parts(span) for span in some]
            with stage("decode"):
                for span, found in zip(some, self._decoded(some, parts), strict=True):
                    for position, record in zip(span.positions.tolist(), found, strict=True):
                        records[position] = record
        return records

    def _parts(self, span: ContainerSpan) -> list[Any]:
        """The requested rows of one batch, one slice per run of neighbours, with every offset checked."""
        with self._blamed(span.container):
            batch = self._batch(span.container)
            parts = [batch.slice(run.start, run.stop - run.start) for run in contiguous_runs(span.inside)]
            for part in parts:
                part.validate(full=True)
        return parts

    def _decoded(self, asked: Sequence[ContainerSpan], parts: Sequence[list[Any]]) -> Iterator[list[Record]]:
        """All at once, since every column of every call costs; if that fails, batch by batch, to find the bad one."""
        try:
            records = self._records_of([part for own in parts for part in own])
        except (BadRecordError, *DAMAGE):
            for span, own in zip(asked, parts, strict=True):
                with self._blamed(span.container):
                    yield self._records_of(own)
            return
        done = 0
        for span in asked:
            yield records[done : done + len(span.inside)]
            done += len(span.inside)

    def _records_of(self, parts: list[Any]) -> list[Record]:
        if not parts:
            return []
        if len(parts) == 1:
            return records_of(self._fields, parts[0].columns)
        columns = pa.Table.from_batches(parts).columns
        return records_of(self._fields, [pa.concat_arrays(column.chunks) for column in columns])

    def lengths(self, field: str) -> npt.NDArray[np.int64] | None:
        """For every row, the number of elements of its list or bytes of its string, from the offsets alone. None if the
        column has no lengths."""
        (name,) = check_columns([field], [one.name for one in self._fields], self._files.url)
        parts = []
        for number in range(self._num_batches):
            with self._blamed(number):
                array = self._batch(number).column(name)
                array.validate()
                found = lengths_of(array)
                if found is None:
                    return None
                if len(found) and int(found.min()) < 0:
                    raise pa.ArrowInvalid(f"the column '{name}' has a negative length")
            parts.append(found)
        lengths = np.concatenate(parts)
        return lengths if self._mapping is None else lengths[self._mapping]

    def where(self, index: int) -> RecordLocation:
        row = self._stored(np.asarray([index]))
        file = int(self._rows.files_at(row)[0])
        return RecordLocation(
            self._files.full_name(self._rows.names[file]), int(row[0] - self._rows.firsts[file]), "row"
        )

    def files_of(self, indices: Ints) -> Sequence[str]:
        return self._rows.names_of(self._stored(indices))

    def close(self) -> None:
        self._kept.clear()
        self._kept_bytes = 0
        self._whole.clear()
        self._maps.close()

    def _stored(self, indices: Ints) -> Ints:
        """The numbers of these rows in stored order."""
        if self._mapping is None:
            return self._rows.check_bounds(indices)
        asked = FileRows([""], np.asarray([0, len(self._mapping)])).check_bounds(indices)
        return np.asarray(self._mapping[asked], np.int64)

    def _typical_block(self) -> int:
        if self._mapping is not None:
            return 0
        if self._is_compressed:
            return typical_block(np.diff(self._firsts))
        return self._rows.block

    @property
    def _num_batches(self) -> int:
        return len(self._firsts) - 1

    def _file_of(self, batch: int) -> int:
        return int(np.searchsorted(self._file_batches, batch, side="right")) - 1

    def _batch(self, number: int) -> Any:
        found = self._kept.get(number)
        if found is not None:
            self._kept.move_to_end(number)
            return found
        file = self._file_of(number)
        if self._index["has_dictionaries"][file]:
            return self._of_whole(file)[number - int(self._file_batches[file])].select(self._chosen)
        view = self._maps.view(self._rows.names[file])
        batch = read_batch(view, int(self._index["offsets"][number]), int(self._index["sizes"][number]), self._schema)
        wanted = int(self._firsts[number + 1] - self._firsts[number])
        if batch.num_rows != wanted:
            raise pa.ArrowInvalid(f"it holds {batch.num_rows} rows, and had {wanted} when it was indexed")
        chosen = batch.select(self._chosen)
        self._keep(number, chosen)
        return chosen

    def _keep(self, number: int, batch: Any) -> None:
        self._kept[number] = batch
        self._kept_bytes += self._cost(batch)
        while len(self._kept) > _NUM_KEPT or (self._kept_bytes > KEPT_BYTES and len(self._kept) > 1):
            self._kept_bytes -= self._cost(self._kept.popitem(last=False)[1])

    def _cost(self, batch: Any) -> int:
        """Memory of this process: 0 if the batch is a view of its file."""
        return int(batch.nbytes) if self._is_compressed else 0

    def _of_whole(self, file: int) -> list[Any]:
        if file not in self._whole:
            while len(self._whole) >= _NUM_WHOLE:
                self._whole.popitem(last=False)
            self._whole[file] = list(read_all(self._maps.view(self._arrow_files.data[file].name)))
        self._whole.move_to_end(file)
        return self._whole[file]

    def _blamed(self, number: int) -> AbstractContextManager[None]:
        def where() -> str:
            name = self._files.full_name(self._rows.names[self._file_of(number)])
            return f"'{name}', batch at byte {int(self._index['offsets'][number])}"

        return raise_as_bad_record(where)


def _settings(arrow_files: ArrowFiles) -> dict[str, str | int]:
    """File names alone do not tell which of the files are the row mapping."""
    return {"version": 1, "num_mapping": len(arrow_files.mapping)}


def _build(files: Files, arrow_files: ArrowFiles, progress: Progress) -> Arrays:
    """Reads the metadata of every batch, and a few bytes of data at both ends of each."""
    maps, scans, done = MappedFiles(files, limit=1), [], 0
    for info in arrow_files.data:
        scans.append(_scanned(maps, info, files))
        _check_schema(
            scans[-1].schema, scans[0].schema, files.full_name(info.name), files.full_name(arrow_files.data[0].name)
        )
        done += info.num_bytes
        progress(done, sum(info.num_bytes for info in arrow_files.data))
    batches = [batch for one in scans for batch in one.batches]
    firsts = np.cumsum([0, *(batch.num_rows for batch in batches)], dtype=np.int64)
    if firsts[-1] == 0:
        raise DataError(f"'{files.url}' holds no rows")
    mapping = _read_mapping(maps, arrow_files, files, int(firsts[-1]))
    maps.close()
    return {
        "firsts": firsts,
        "file_batches": np.cumsum([0, *(len(one.batches) for one in scans)], dtype=np.int64),
        "offsets": np.asarray([batch.offset for batch in batches], np.int64),
        "sizes": np.asarray([batch.num_bytes for batch in batches], np.int64),
        "crcs": np.asarray([batch.crc for batch in batches], np.uint32),
        "is_compressed": np.asarray([any(batch.is_compressed for batch in batches)]),
        "has_dictionaries": np.asarray([one.has_dictionaries for one in scans]),
        "schema": np.frombuffer(scans[0].schema.remove_metadata().serialize(), np.uint8),
        "mapping": mapping,
    }


def _scanned(maps: MappedFiles, info: FileInfo, files: Files) -> ArrowScan:
    try:
        return scan(maps.view(info.name))
    except Exception as error:
        if not (is_damage(error) or isinstance(error, NotArrow)):
            raise
        why = str(error).splitlines()[0]
        full = files.full_name(info.name)
        raise DataError(f"'{full}' is damaged or not Arrow: {why}", "Copy or write it again.") from error


def _check_schema(schema: Any, first: Any, full: str, first_full: str) -> None:
    if [(field.name, field.type) for field in schema] != [(field.name, field.type) for field in first]:
        ours, theirs = (", ".join(f"{field.name}: {field.type}" for field in one) for one in (schema, first))
        raise DataError(
            f"'{full}' has the columns {ours}; '{first_full}' has {theirs}",
            "Keep files of different columns in different folders.",
        )


def _read_mapping(maps: MappedFiles, arrow_files: ArrowFiles, files: Files, num_rows: int) -> npt.NDArray[np.int64]:
    parts = [np.empty(0, np.int64)]
    for info in arrow_files.mapping:
        _scanned(maps, info, files)
        for batch in read_all(maps.view(info.name)):
            batch.validate(full=True)
            parts.append(batch.column(0).to_numpy(zero_copy_only=False).astype(np.int64))
    mapping = np.concatenate(parts)
    if len(mapping) and (int(mapping.min()) < 0 or int(mapping.max()) >= num_rows):
        full = files.full_name(arrow_files.mapping[0].name)
        raise DataError(f"'{full}' names row {int(mapping.max())} of {num_rows}", "Copy the folder again.")
    return mapping
