"""Reads NumPy arrays in ``.npy`` files as tokens.

A one-dimensional array of integers is a stream; ``x.ends.npy`` beside ``x.npy`` may give the ends of its documents;
without it the file is one document. In a two-dimensional array each row is a document. Several files are concatenated
in the order of their numbers. Invariant: ends are ascending and the last is the number of tokens, checked once when
they are saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from closeranks.core.errors import DataError
from closeranks.core.registry import did_you_mean
from closeranks.data.dataset_protocol import Ints, RecordLocation
from closeranks.data.files.protocol import Files
from closeranks.data.formats.arrays.npy_header import NpyHeader, read_header
from closeranks.data.formats.arrays.numpy_records import ENDS, NumpyColumn, columns_of
from closeranks.data.formats.arrays.token_windows import TokenWindowReader
from closeranks.data.formats.file_rows import FileRows
from closeranks.data.formats.mapped_files import MappedFiles
from closeranks.data.formats.record_index.saved_index import Arrays, IndexLocation, Progress, saved_index


class NumpyTokens:
    """Token ids of all files of a field as one stream."""

    vocab_size = 0

    def __init__(self, files: Files, location: IndexLocation, field: str = "") -> None:
        self._files, self._location, self._field = files, location, field
        self._maps = MappedFiles(files)
        columns, identity = columns_of(files, location)
        column = _chosen(files, columns, field)
        self._pieces = [_checked(files, piece) for piece in column.pieces]
        sizes = [int(np.prod(piece.shape)) for piece in self._pieces]
        self._rows = FileRows.of([piece.name for piece in self._pieces], sizes)
        self.dtype = column.dtype
        self._windows = TokenWindowReader(self._rows, self.dtype, self._stream)
        self.block = self._rows.block
        self._with_ends = {info.name for info in files.list()} & {_ends_name(piece) for piece in self._pieces}
        self._ends, ends_identity = self._saved_ends()
        self.identity = f"{identity}:{column.field}:{ends_identity}"

    def __reduce__(self) -> tuple[Any, ...]:
        return NumpyTokens, (self._files, self._location, self._field)

    @property
    def num_tokens(self) -> int:
        return self._rows.num_rows

    @property
    def ends(self) -> npt.NDArray[Any]:
        return self._ends

    def read(self, starts: Ints, length: int) -> npt.NDArray[Any]:
        return self._windows.read(starts, length)

    def _stream(self, number: int) -> npt.NDArray[Any]:
        piece = self._pieces[number]
        return piece.array(self._maps.view(piece.name)).reshape(-1)

    def where(self, start: int) -> RecordLocation:
        number = int(self._rows.files_at(self._rows.check_bounds(np.array([start])))[0])
        piece = self._pieces[number]
        offset = piece.start + (start - int(self._rows.firsts[number])) * self.dtype.itemsize
        return RecordLocation(self._files.full_name(piece.name), offset)

    def files_of(self, starts: Ints, length: int) -> Sequence[str]:
        return self._windows.files_of(starts, length)

    def close(self) -> None:
        self._maps.close()

    def _saved_ends(self) -> tuple[Ints, str]:
        """The ends of all documents, and a string that identifies them."""
        if not self._with_ends and all(len(piece.shape) == 1 for piece in self._pieces):
            return self._rows.firsts[1:], "files"
        names = {*self._rows.names, *self._with_ends}
        infos = [info for info in self._files.list() if info.name in names]
        index = saved_index(self._location, self._files, infos, "numpy-ends", self._build_ends, {"version": 1})
        return index["ends"], index.identity

    def _build_ends(self, progress: Progress) -> Arrays:
        found = []
        for number, piece in enumerate(self._pieces):
            found.append(self._ends_of(piece) + int(self._rows.firsts[number]))
            progress(number + 1, len(self._pieces))
        return {"ends": np.concatenate(found)}

    def _ends_of(self, piece: NpyHeader) -> Ints:
        """Relative to the start of the piece."""
        num_tokens = int(np.prod(piece.shape))
        name = _ends_name(piece)
        if len(piece.shape) == 2:
            return np.arange(1, piece.shape[0] + 1, dtype=np.int64) * piece.shape[1]
        if name not in self._with_ends:
            return np.array([num_tokens], np.int64)
        view = self._maps.view(name)
        ends = read_header(self._files, name, view).array(view)
        if ends.ndim != 1 or ends.dtype.kind not in "iu":
            self._refuse_ends(name, 0, "they are not a list of integers")
        wide = ends.astype(np.int64)
        falls = np.flatnonzero(np.diff(wide) < 0)
        if len(falls):
            self._refuse_ends(name, int(falls[0]) + 1, "it is below the one before it")
        if len(wide) == 0 or wide[0] < 0 or wide[-1] != num_tokens:
            self._refuse_ends(name, max(len(wide) - 1, 0), f"the last should be {num_tokens}, the number of tokens")
        return wide

    def _refuse_ends(self, name: str, row: int, reason: str) -> None:
        where = RecordLocation(self._files.full_name(name), row, "row")
        raise DataError(f"the ends of documents in {where} are wrong: {reason}", "Write the file again.")


def _ends_name(piece: NpyHeader) -> str:
    return piece.name[: -len(".npy")] + ENDS


def _chosen(files: Files, columns: Sequence[NumpyColumn], field: str) -> NumpyColumn:
    names = [column.field for column in columns]
    wanted = [column for column in columns if column.field == field] if field else list(columns)
    if len(wanted) == 1:
        return wanted[0]
    if not field:
        wanted = [column for column in columns if column.field in ("tokens", "input_ids")]
        if len(wanted) == 1:
            return wanted[0]
        raise DataError(f"'{files.url}' holds several arrays: {', '.join(names)}", "Say which one (data.field).")
    raise DataError(f"'{files.url}' holds no array '{field}'", did_you_mean(field, names))


def _checked(files: Files, piece: NpyHeader) -> NpyHeader:
    full = files.full_name(piece.name)
    if piece.dtype.kind not in "iu":
        raise DataError(f"'{full}' holds {piece.dtype}, and tokens are integers", "Save it with an integer type.")
    if len(piece.shape) > 2:
        raise DataError(
            f"'{full}' has {len(piece.shape)} dims", "Tokens have one (a stream) or two (one document per row)."
        )
    if piece.is_fortran and len(piece.shape) == 2:
        raise DataError(f"'{full}' is stored column by column", "Save it with np.ascontiguousarray.")
    return piece
