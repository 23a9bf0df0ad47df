"""Reads TFRecord files of ``tf.train.Example`` by number.

    8 bytes    the length of the data, little-endian        \\
    4 bytes    the masked CRC32C of those eight               } one record after the other
    n bytes    the data: a serialized tf.train.Example       /
    4 bytes    the masked CRC32C of the data

The index holds the start and length of each record's data. Invariants: both checksums of a record are verified
whenever it is read, so that no flipped bit passes; a file that is truncated or has implausible lengths is refused
when it is indexed, because the records after that point cannot be found.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from closeranks.core.errors import BadRecordError, DataError
from closeranks.data.dataset_protocol import Record, Records
from closeranks.data.files.protocol import FileInfo, Files
from closeranks.data.formats.mapped_files import MappedFiles
from closeranks.data.formats.record_index.indexed_records import IndexedRecords
from closeranks.data.formats.record_index.saved_index import Arrays, IndexLocation, Progress
from closeranks.data.formats.records.tf_example import InvalidExample, parse_example

NAME = "tfrecord"
SUFFIXES = (".tfrecord", ".tfrecords", ".tfrec")
COMPRESSED = tuple(suffix + packed for suffix in SUFFIXES for packed in (".gz", ".zst", ".zstd", ".bz2", ".xz"))

_HEADER, _FOOTER = 12, 4
_MOST_BYTES = 2**31
"""A serialized protobuf is never larger."""
_MASK = 0xA282EAD8
_TOLD_EVERY = 4096
_MAGICS = {b"\x1f\x8b": "gzip", b"\x78\x01": "zlib", b"\x78\x5e": "zlib", b"\x78\x9c": "zlib", b"\x78\xda": "zlib"}
_PART = re.compile(r"-\d+-of-\d+$")


def plain_name(name: str) -> str:
    """``train.tfrecord-00000-of-00008`` counts as ``train.tfrecord``."""
    return _PART.sub("", name.lower())


def is_format(infos: Sequence[FileInfo], files: Files) -> bool:
    return any(plain_name(info.name).endswith(SUFFIXES + COMPRESSED) for info in infos)


def open_records(files: Files, index: IndexLocation) -> Records:
    return TfRecords(files, index)


def masked_crc32c(data: bytes) -> int:
    """As TensorFlow stores it: rotated and offset, so that checksums of data that contains checksums are not
    weakened."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


class TfRecords(IndexedRecords):
    """Examples as records."""

    lead = _HEADER

    def __init__(self, files: Files, location: IndexLocation) -> None:
        super().__init__(files, location, NAME, _files_of(files), _build)

    def _record(self, name: str, view: npt.NDArray[np.uint8], start: int, size: int) -> Record:
        try:
            return parse_example(_checked(view, start, size))
        except InvalidExample as error:
            raise BadRecordError(
                f"bad record at {self._location_of(name, start)}: not a tf.train.Example: {error}"
            ) from None
        except _Damaged as error:
            raise BadRecordError(f"bad record at {self._location_of(name, start)}: {error}") from None


class _Damaged(Exception):
    """Why a record is damaged."""


def _checked(view: npt.NDArray[np.uint8], start: int, size: int) -> bytes:
    """The data of one record, both checksums verified."""
    if start + size + _FOOTER > len(view) or _length(view, start - _HEADER) != size:
        raise _Damaged("its length is not the one that was indexed")
    data = view[start : start + size].tobytes()
    stored = int.from_bytes(view[start + size : start + size + _FOOTER].tobytes(), "little")
    if masked_crc32c(data) != stored:
        raise _Damaged("its data does not match its checksum")
    return data


def _length(view: npt.NDArray[np.uint8], at: int) -> int:
    """The length in the header at this byte; ``_Damaged`` if it does not match its checksum."""
    header = view[at : at + _HEADER].tobytes()
    if len(header) < _HEADER:
        raise _Damaged("the file ends within a record's header")
    if masked_crc32c(header[:8]) != int.from_bytes(header[8:], "little"):
        raise _Damaged("a record's length does not match its checksum")
    return int.from_bytes(header[:8], "little")


def _files_of(files: Files) -> list[FileInfo]:
    infos = [info for info in files.list() if plain_name(info.name).endswith(SUFFIXES + COMPRESSED)]
    for info in infos:
        if plain_name(info.name).endswith(COMPRESSED):
            raise _packed(files.full_name(info.name), "compressed")
    if not infos:
        raise DataError(f"'{files.url}' holds no {' or '.join(SUFFIXES)} file")
    return infos


def _packed(full_name: str, how: str) -> DataError:
    what = f"'{full_name}' is {how}, and records inside cannot be accessed by index"
    return DataError(what, "Unpack it (gunzip), or write it again without TFRecordOptions(compression_type=...).")


def _build(files: Files, infos: Sequence[FileInfo], progress: Progress) -> Arrays:
    total = sum(info.num_bytes for info in infos)
    maps = MappedFiles(files, 1)
    starts: list[int] = []
    sizes: list[int] = []
    counts = [0]
    done = 0
    for info in infos:
        before = len(starts)
        for start, size in _scan(maps.view(info.name), files.full_name(info.name)):
            starts.append(start)
            sizes.append(size)
            if len(starts) % _TOLD_EVERY == 0:
                progress(done + start, total)
        counts.append(len(starts) - before)
        done += info.num_bytes
        progress(done, total)
    maps.close()
    return {
        "firsts": np.cumsum(counts, dtype=np.int64),
        "starts": np.array(starts, np.int64),
        "sizes": np.array(sizes, np.uint32),
    }


def _scan(view: npt.NDArray[np.uint8], full_name: str) -> Iterator[tuple[int, int]]:
    """Start and length of each record's data."""
    at = 0
    while at < len(view):
        try:
            size = _length(view, at)
            end = at + _HEADER + size + _FOOTER
            if size >= _MOST_BYTES or end > len(view):
                raise _Damaged(f"the file ends within a record of {size:,} bytes")
        except _Damaged as error:
            how = _MAGICS.get(view[:2].tobytes()) if at == 0 else None
            if how is not None:
                raise _packed(full_name, f"compressed with {how}") from None
            what = f"'{full_name}' is damaged at byte {at}: {error}, and the records after it cannot be found"
            raise DataError(what, "Fetch the file again, or leave it out.") from None
        yield at + _HEADER, size
        at = end
