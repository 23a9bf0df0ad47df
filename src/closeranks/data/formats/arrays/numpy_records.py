"""Reads NumPy arrays in ``.npy`` files as records.

The name of a file without its number is a field: ``x.npy`` and ``y.npy`` are the fields ``x`` and ``y`` of as many
records as they have rows; ``x-00000.npy``, ``x-00001.npy`` ... are one field in pieces. Invariants: all fields have the
same number of rows, and the pieces of a field the same dtype and row shape; only the requested rows are copied. The
format has no checksums. ``numpy_tokens`` reads the same files as tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from closeranks.core.errors import DataError
from closeranks.data.dataset_protocol import Ints, Record, RecordLocation, Records, Tokens
from closeranks.data.files.protocol import FileInfo, Files
from closeranks.data.formats.arrays.npy_header import NpyHeader, saved_headers
from closeranks.data.formats.file_rows import FileRows
from closeranks.data.formats.mapped_files import MappedFiles
from closeranks.data.formats.record_index.saved_index import IndexLocation
from closeranks.data.formats.spans import spans

NAME = "numpy"
SUFFIXES = (".npy",)
PACKED = (".npz",)
ENDS = ".ends.npy"

_NUMBERED = re.compile(r"(?:(.*)[-_.])?(\d+)", re.DOTALL)


def is_format(infos: Sequence[FileInfo], files: Files) -> bool:
    return any(info.name.lower().endswith(SUFFIXES + PACKED) for info in infos)


def open_records(files: Files, index: IndexLocation) -> Records:
    return NumpyRecords(files, index)


def open_tokens(files: Files, index: IndexLocation, field: str = "") -> Tokens:
    from closeranks.data.formats.arrays.numpy_tokens import NumpyTokens

    return NumpyTokens(files, index, field)


class NumpyColumn:
    """One field: its files as one array, concatenated by rows."""

    def __init__(self, files: Files, field: str, pieces: Sequence[NpyHeader]) -> None:
        self.field = field
        self.pieces = pieces
        self.rows = FileRows.of([piece.name for piece in pieces], [piece.num_rows for piece in pieces])
        self.dtype, self.row_shape = pieces[0].dtype, pieces[0].shape[1:]
        for piece in pieces:
            if (piece.dtype, piece.shape[1:]) != (self.dtype, self.row_shape):
                raise DataError(
                    f"'{files.full_name(piece.name)}' has rows of {piece.dtype}{[*piece.shape[1:]]}, "
                    f"'{files.full_name(pieces[0].name)}' of {self.dtype}{[*self.row_shape]}",
                    "Pieces of one array must agree; give other arrays other names.",
                )

    def read(self, maps: MappedFiles, indices: Ints) -> npt.NDArray[Any]:
        found = np.empty((len(indices), *self.row_shape), self.dtype)
        for span in spans(self.rows.firsts, indices):
            piece = self.pieces[span.container]
            found[span.positions] = piece.array(maps.view(piece.name))[span.inside]
        return found

    def where(self, files: Files, index: int) -> RecordLocation:
        number = int(self.rows.files_at(np.array([index]))[0])
        inside = index - int(self.rows.firsts[number])
        return RecordLocation(files.full_name(self.pieces[number].name), inside, "row")


class NumpyRecords:
    """Row i of every field is record i; a row of a one-dimensional array is a zero-dimensional array, or text."""

    def __init__(self, files: Files, location: IndexLocation) -> None:
        self._files, self._location = files, location
        self._maps = MappedFiles(files)
        self._columns, self.identity = columns_of(files, location)
        first = self._columns[0]
        for column in self._columns:
            if column.rows.num_rows != first.rows.num_rows:
                raise DataError(
                    f"'{files.url}': field '{column.field}' has {column.rows.num_rows} rows, "
                    f"'{first.field}' {first.rows.num_rows}",
                    "Arrays that belong together need the same number of rows.",
                )
        self.block = first.rows.block

    def __reduce__(self) -> tuple[Any, ...]:
        return NumpyRecords, (self._files, self._location)

    def __len__(self) -> int:
        return self._columns[0].rows.num_rows

    def read(self, indices: Ints) -> list[Record]:
        rows = self._columns[0].rows.check_bounds(indices)
        found = {column.field: _values(column.read(self._maps, rows)) for column in self._columns}
        return [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]

    def where(self, index: int) -> RecordLocation:
        self._columns[0].rows.check_bounds(np.array([index]))
        return self._columns[0].where(self._files, index)

    def files_of(self, indices: Ints) -> Sequence[str]:
        return [name for column in self._columns for name in column.rows.names_of(indices)]

    def close(self) -> None:
        self._maps.close()


class NumpyColumns(NamedTuple):
    columns: list[NumpyColumn]
    """Sorted by field."""
    identity: str


def columns_of(files: Files, location: IndexLocation) -> NumpyColumns:
    """Files with the ends of documents, which only tokens have, are not fields."""
    for info in files.list():
        if info.name.lower().endswith(PACKED):
            raise DataError(
                f"'{files.full_name(info.name)}' is an archive of arrays, which cannot be mapped",
                f"Unpack it: unzip {PurePosixPath(info.name).name} leaves .npy files.",
            )
    infos = [info for info in files.list() if info.name.endswith(SUFFIXES) and not info.name.endswith(ENDS)]
    if not infos:
        raise DataError(f"'{files.url}' holds no .npy file")
    headers = saved_headers(files, infos, location)
    fields: dict[str, list[tuple[int, str, NpyHeader]]] = {}
    for header in headers.files:
        field, number = _field_of(header.name)
        fields.setdefault(field, []).append((number, header.name, header))
    columns = [
        NumpyColumn(files, field, [header for _, _, header in sorted(pieces, key=lambda piece: piece[:2])])
        for field, pieces in sorted(fields.items())
    ]
    return NumpyColumns(columns, headers.identity)


def _field_of(name: str) -> tuple[str, int]:
    """The field and the number of the piece; pieces are in numerical order, also without leading zeros."""
    stem = PurePosixPath(name).name[: -len(SUFFIXES[0])]
    match = _NUMBERED.fullmatch(stem)
    return (match[1] or "data", int(match[2])) if match else (stem, 0)


def _values(rows: npt.NDArray[Any]) -> list[Any]:
    """Text becomes ``str`` or ``bytes``; a number stays a zero-dimensional array, and so keeps its dtype."""
    if rows.ndim > 1:
        return [*rows]
    return rows.tolist() if rows.dtype.kind in "SU" else [rows[number, ...] for number in range(len(rows))]
