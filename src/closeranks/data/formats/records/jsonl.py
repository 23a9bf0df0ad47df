"""Reads JSON lines (one JSON object per line) by number.

The index holds the start and length of each line; blank lines are skipped, the last line may lack its newline, lines
may end in CRLF. Invariants: a record is a JSON object in UTF-8, or a ``BadRecordError`` with file, byte and reason; the
index must agree with the newlines of the file, otherwise it is reported as wrong.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from closeranks.core.errors import BadRecordError, DataError
from closeranks.data.dataset_protocol import Ints, Record, RecordLocation, Records
from closeranks.data.files.protocol import FileInfo, Files
from closeranks.data.formats.json_error import json_error
from closeranks.data.formats.mapped_files import MappedFiles
from closeranks.data.formats.record_index.indexed_records import IndexedRecords
from closeranks.data.formats.record_index.saved_index import Arrays, IndexLocation, Progress

NAME = "jsonl"
SUFFIXES = (".jsonl", ".ndjson")
COMPRESSED = tuple(suffix + packed for suffix in SUFFIXES for packed in (".gz", ".zst", ".zstd", ".bz2", ".xz"))

_CHUNK_BYTES = 16 << 20
_NEWLINE = 10
_BOM = b"\xef\xbb\xbf"
_SPACES = (9, 13, 32)


def is_format(infos: Sequence[FileInfo], files: Files) -> bool:
    return any(info.name.lower().endswith(SUFFIXES + COMPRESSED) for info in infos)


def open_records(files: Files, index: IndexLocation) -> Records:
    return JsonlRecords(files, index)


class JsonlRecords(IndexedRecords):
    """Lines as records."""

    def __init__(self, files: Files, location: IndexLocation) -> None:
        super().__init__(files, location, NAME, _lines_of(files), _build)

    def _record(self, name: str, view: npt.NDArray[np.uint8], start: int, size: int) -> Record:
        end = start + size
        is_line = end <= len(view) and (start in (0, 3) or view[start - 1] == _NEWLINE)
        if not is_line or (end < len(view) and view[end] != _NEWLINE):
            location = self._location_of(name, start)
            raise DataError(f"there is no line at {location}: the index is damaged", "Remove '.closeranks-index'.")
        try:
            record = json.loads(str(view[start:end].data, "utf-8"))
        except UnicodeDecodeError as error:
            raise _refusal(self._location_of(name, start), f"byte {error.start} of the line is not UTF-8") from None
        except (ValueError, RecursionError) as error:
            raise _refusal(self._location_of(name, start), f"not JSON: {json_error(error)}") from None
        if not isinstance(record, dict):
            raise _refusal(self._location_of(name, start), f"a JSON {type(record).__name__} where an object is needed")
        return record


def _refusal(location: RecordLocation, reason: str) -> BadRecordError:
    return BadRecordError(f"bad record at {location}: {reason}")


def _lines_of(files: Files) -> list[FileInfo]:
    infos = [info for info in files.list() if info.name.lower().endswith(SUFFIXES + COMPRESSED)]
    for info in infos:
        if info.name.lower().endswith(COMPRESSED):
            raise DataError(
                f"'{files.full_name(info.name)}' is compressed, and lines inside cannot be accessed by index",
                "Convert it with 'closeranks data build', or unpack it.",
            )
    if not infos:
        raise DataError(f"'{files.url}' holds no {' or '.join(SUFFIXES)} file")
    return infos


def _build(files: Files, infos: Sequence[FileInfo], progress: Progress) -> Arrays:
    total = sum(info.num_bytes for info in infos)
    maps = MappedFiles(files, 1)
    starts, sizes, counts = [], [], [0]
    done = 0
    for info in infos:
        num_lines = 0
        for begin, length in _scan(maps.view(info.name), files.full_name(info.name), done, total, progress):
            starts.append(begin)
            sizes.append(length)
            num_lines += len(begin)
        counts.append(num_lines)
        done += info.num_bytes
    maps.close()
    return {
        "firsts": np.cumsum(counts, dtype=np.int64),
        "starts": np.concatenate([np.empty(0, np.int64), *starts]),
        "sizes": np.concatenate([np.empty(0, np.uint32), *sizes]),
    }


def _scan(
    view: npt.NDArray[np.uint8], full_name: str, done: int, total: int, progress: Progress
) -> list[tuple[Ints, npt.NDArray[np.uint32]]]:
    """Start and length of each line that is not blank, one chunk of the file at a time."""
    found = []
    begin = len(_BOM) if view[: len(_BOM)].tobytes() == _BOM else 0
    for at in range(0, len(view), _CHUNK_BYTES):
        chunk = view[at : at + _CHUNK_BYTES]
        ends = np.flatnonzero(chunk == _NEWLINE) + at
        if at + len(chunk) == len(view) and view[-1] != _NEWLINE:
            ends = np.append(ends, len(view))
        starts = np.concatenate([[begin], ends[:-1] + 1]).astype(np.int64)[: len(ends)]
        begin = int(ends[-1]) + 1 if len(ends) else begin
        sizes = ends - starts
        if len(sizes) and int(sizes.max()) >= 2**32:
            long = RecordLocation(full_name, int(starts[int(sizes.argmax())]))
            raise DataError(f"the line at {long} has {int(sizes.max())} bytes, and the limit is 4 GiB")
        filled = _is_filled(view, starts, sizes)
        found.append((starts[filled], sizes[filled].astype(np.uint32)))
        progress(done + at + len(chunk), total)
    return found


def _is_filled(view: npt.NDArray[np.uint8], starts: Ints, sizes: Ints) -> npt.NDArray[np.bool_]:
    """Which lines contain more than white space; only those that begin with white space are checked one by one."""
    filled: npt.NDArray[np.bool_] = sizes > 0
    some = np.flatnonzero(filled)
    for number in some[np.isin(view[starts[some]], _SPACES)].tolist():
        start = int(starts[number])
        filled[number] = bool(view[start : start + int(sizes[number])].tobytes().strip())
    return filled
