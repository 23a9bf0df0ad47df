"""Reads the headers of ``.npy`` files: dtype, shape and where the values begin.

The headers are saved once, so that opening many files, or remote files, need not read them again. Invariant: an
accepted header belongs to numbers or text that are completely there: arrays of objects are refused (they would be
unpickled), and so is a file that is shorter than its shape says.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from closeranks.core.errors import DataError
from closeranks.data.files.protocol import FileInfo, Files
from closeranks.data.formats.mapped_files import MappedFiles
from closeranks.data.formats.record_index.saved_index import Arrays, IndexLocation, Progress, saved_index

_HEAD_BYTES = 1 << 16
_SAMPLED_BYTES = 4096


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """One file's header."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_fortran: bool
    start: int
    """The byte at which the values begin."""

    @property
    def num_rows(self) -> int:
        return self.shape[0]

    def array(self, view: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
        """The whole array, as a view of the file's bytes."""
        return np.ndarray(self.shape, self.dtype, view.data, self.start, order="F" if self.is_fortran else "C")


@dataclass(frozen=True, slots=True)
class NpyHeaders:
    files: Sequence[NpyHeader]
    identity: str
    """From names, dtypes, shapes and a few bytes from both ends of each file, which different arrays rarely
    share."""


def saved_headers(files: Files, infos: Sequence[FileInfo], location: IndexLocation) -> NpyHeaders:
    """In the order of ``infos``."""
    index = saved_index(location, files, infos, "npy", lambda progress: _build(files, infos, progress), {"version": 1})
    rows = json.loads(index["headers"].tobytes())
    found = [
        NpyHeader(info.name, np.dtype(dtype), tuple(shape), is_fortran, start)
        for info, (dtype, shape, is_fortran, start) in zip(infos, rows, strict=True)
    ]
    return NpyHeaders(found, index.identity)


def _build(files: Files, infos: Sequence[FileInfo], progress: Progress) -> Arrays:
    maps, rows, crcs = MappedFiles(files, 1), [], []
    for number, info in enumerate(infos):
        view = maps.view(info.name)
        header = read_header(files, info.name, view)
        rows.append([header.dtype.str, header.shape, header.is_fortran, header.start])
        ends = view[header.start :][:_SAMPLED_BYTES].tobytes() + view[-_SAMPLED_BYTES:].tobytes()
        crcs.append(int(crc32c(ends)))
        progress(number + 1, len(infos))
    maps.close()
    return {"headers": np.frombuffer(json.dumps(rows).encode(), np.uint8), "crcs": np.array(crcs, np.uint32)}


def read_header(files: Files, name: str, view: npt.NDArray[np.uint8]) -> NpyHeader:
    """``view``: the file's bytes. ``DataError`` in one sentence for files that cannot be read in place."""
    full_name = files.full_name(name)
    head = io.BytesIO(view[:_HEAD_BYTES].tobytes())
    try:
        version = np.lib.format.read_magic(head)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read(head)
    except (ValueError, SyntaxError, TypeError, EOFError) as error:
        _refuse(full_name, 0, f"it is not a NumPy array ({error})")
    if dtype.hasobject:
        raise DataError(
            f"'{full_name}' holds Python objects (byte 0), which would have to be unpickled: that can run any code",
            "Save numbers or text instead: np.save(..., allow_pickle=False).",
        )
    if dtype.kind not in "biufcSU":
        _refuse(full_name, 0, f"its type is {dtype}, which is neither a number nor text")
    if not shape:
        _refuse(full_name, 0, "it is a single number, without rows")
    wanted = head.tell() + math.prod(shape) * dtype.itemsize
    if wanted > len(view):
        _refuse(full_name, len(view), f"it is truncated: {wanted} bytes should be there")
    return NpyHeader(name, dtype, shape, is_fortran, head.tell())


def _refuse(full_name: str, offset: int, reason: str) -> NoReturn:
    raise DataError(f"'{full_name}' cannot be read (byte {offset}): {reason}", "Write or fetch the file again.")
