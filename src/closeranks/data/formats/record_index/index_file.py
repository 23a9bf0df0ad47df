"""The file format of a saved index, and the checks when one is opened.

One file: 8 bytes of magic, the header's length (u64, little-endian), the header (a sealed document that says what was
indexed, and for each array its dtype, shape, position and the CRC32C of every MiB), then the arrays at multiples of 64.
Invariants: a file that opens is complete (its length is in the sealed header) and of the kind, settings and files that
were requested. Arrays of up to 8 MiB together are checked in full on every opening; of larger ones the first and last
block of each and a few others drawn anew each time, so that opening costs the same for any number of samples. The whole
file is checked once by its writer, and by every call of ``MappedIndex.check``.
"""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from crc32c import crc32c

from closeranks.core.errors import DataError
from closeranks.core.system.regular_file import open_binary
from closeranks.data.files.protocol import FileInfo
from closeranks.storage.disk import write_all
from closeranks.storage.documents import UnsoundDocument, seal, unseal

VERSION = 1
BLOCK_BYTES = 1 << 20
FULL_CHECK_BYTES = 8 << 20
"""Up to this size every opening checks every byte (about 2 ms)."""
NUM_DRAWN = 6

_MAGIC = b"CLRINDEX"
_ALIGN = 64
Array: TypeAlias = npt.NDArray[Any]
Arrays: TypeAlias = Mapping[str, Array]


class UnsoundIndex(Exception):
    """An index that cannot be used: torn, damaged, or of other files. It must be built again."""


@dataclass(frozen=True, slots=True)
class IndexKey:
    """What an index was built from."""

    kind: str
    settings: Mapping[str, str | int]
    files: Sequence[FileInfo]

    @property
    def as_dict(self) -> dict[str, Any]:
        """As in the header; it includes the version of each file, so that a changed file makes the index stale."""
        digest = blake3()
        for info in self.files:
            digest.update(f"{info.name}\0{info.num_bytes}\0{info.version}\n".encode(errors="surrogateescape"))
        return {
            "kind": self.kind,
            "settings": dict(sorted(self.settings.items())),
            "num_files": len(self.files),
            "num_bytes": sum(info.num_bytes for info in self.files),
            "files": digest.hexdigest(),
        }


@dataclass(frozen=True, slots=True)
class _Extent:
    """Position and type of one array in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int
    crcs: tuple[int, ...]
    """CRC32C of each block of ``BLOCK_BYTES``."""


class MappedIndex(Mapping[str, Array]):
    """The arrays of an index, read-only and memory-mapped: they take memory only where they are accessed."""

    def __init__(self, path: Path, key: IndexKey, extents: Sequence[_Extent], data: mmap.mmap) -> None:
        self.path = path
        self._extents = extents
        self._data = data
        self._arrays = {
            extent.name: np.ndarray(extent.shape, np.dtype(extent.dtype), buffer=data, offset=extent.start)
            for extent in extents
        }
        self.identity = _identity(key, extents)
        """Identifies the content: names and sizes of the files and what was found in them, independent of time and
        location."""

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def check(self) -> None:
        """Checks every byte; ``DataError`` names the first bad block."""
        try:
            _check_blocks(self._data, [(extent, block) for extent in self._extents for block in _blocks(extent)])
        except UnsoundIndex as error:
            raise DataError(f"the index '{self.path}' is damaged: {error}", "Remove it: it is built again.") from None


def write_index(path: Path, key: IndexKey, arrays: Arrays) -> None:
    """Durable when it returns; ``path`` is a temporary name of the writer, which no reader opens."""
    plain = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    header = _header(key, plain)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        write_all(fd, _MAGIC + len(header).to_bytes(8, "little") + header)
        done = 16 + len(header)
        for array in plain.values():
            write_all(fd, bytes(-done % _ALIGN))
            write_all(fd, _bytes_of(array))
            done += -done % _ALIGN + array.nbytes
        os.fsync(fd)
    finally:
        os.close(fd)


def read_index(path: Path, key: IndexKey, *, in_full: bool = False) -> MappedIndex:
    """``FileNotFoundError`` if there is none, ``UnsoundIndex`` if it must be built again."""
    data = _mapped(path)
    if len(data) < 16 or data[:8] != _MAGIC:
        raise UnsoundIndex("it is truncated, or not an index")
    num_bytes = int.from_bytes(data[8:16], "little")
    try:
        body = unseal("index", data[16 : 16 + num_bytes], "its header", VERSION)
    except UnsoundDocument as error:
        raise UnsoundIndex(str(error)) from error
    if body["of"] != key.as_dict:
        raise UnsoundIndex("it belongs to other files, or they have changed")
    # Positions are relative to the end of the header: a header cannot contain numbers that depend on its own length.
    header_end = 16 + num_bytes
    first = header_end + -header_end % _ALIGN
    extents = [
        _Extent(name, dtype, tuple(shape), first + start, size, tuple(crcs))
        for name, dtype, shape, start, size, crcs in body["arrays"]
    ]
    _check_length(len(data), header_end, extents)
    _check_blocks(data, _chosen(extents, in_full))
    return MappedIndex(path, key, extents, data)


def _mapped(path: Path) -> mmap.mmap:
    with open_binary(path) as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise UnsoundIndex("it is empty")
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _header(key: IndexKey, arrays: Arrays) -> bytes:
    rows = []
    start = 0
    for name, array in arrays.items():
        if array.dtype.hasobject:
            raise TypeError(f"the array '{name}' of an index holds objects")
        start += -start % _ALIGN
        data = _bytes_of(array)
        crcs = [int(crc32c(data[at : at + BLOCK_BYTES])) for at in range(0, len(data), BLOCK_BYTES)]
        rows.append([name, array.dtype.str, list(array.shape), start, array.nbytes, crcs])
        start += array.nbytes
    return seal("index", {"of": key.as_dict, "arrays": rows}, VERSION)


def _bytes_of(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")


def _check_length(found: int, header_end: int, extents: Sequence[_Extent]) -> None:
    wanted = extents[-1].start + extents[-1].num_bytes if extents else header_end
    if found != wanted:
        raise UnsoundIndex(f"it has {found} bytes instead of {wanted}")


def _blocks(extent: _Extent) -> range:
    return range(len(extent.crcs))


def _chosen(extents: Sequence[_Extent], in_full: bool) -> list[tuple[_Extent, int]]:
    if in_full or sum(extent.num_bytes for extent in extents) <= FULL_CHECK_BYTES:
        return [(extent, block) for extent in extents for block in _blocks(extent)]
    filled = [extent for extent in extents if extent.crcs]
    ends = {(number, block) for number, extent in enumerate(filled) for block in (0, len(extent.crcs) - 1)}
    draw = random.SystemRandom()
    for _ in range(NUM_DRAWN):
        number = draw.choices(range(len(filled)), [len(extent.crcs) for extent in filled])[0]
        ends.add((number, draw.randrange(len(filled[number].crcs))))
    return [(filled[number], block) for number, block in sorted(ends)]


def _check_blocks(data: mmap.mmap, chosen: Sequence[tuple[_Extent, int]]) -> None:
    with memoryview(data) as view:
        for extent, block in chosen:
            start = extent.start + block * BLOCK_BYTES
            end = min(start + BLOCK_BYTES, extent.start + extent.num_bytes)
            if int(crc32c(view[start:end])) != extent.crcs[block]:
                raise UnsoundIndex(f"bytes {start} to {end} do not match their checksum")


def _identity(key: IndexKey, extents: Sequence[_Extent]) -> str:
    digest = blake3(f"{key.kind}\0{sorted(key.settings.items())}\n".encode())
    for info in key.files:
        digest.update(f"{info.name}\0{info.num_bytes}\n".encode(errors="surrogateescape"))
    for extent in extents:
        digest.update(f"{extent.name}\0{extent.dtype}\0{extent.shape}\0{extent.crcs}\n".encode())
    return f"{key.kind}:{digest.hexdigest(16)}"
