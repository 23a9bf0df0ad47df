"""Reads tokens from Megatron's ``.bin``/``.idx`` pairs.

``x.bin`` contains only token ids; ``x.idx`` has their dtype, the length of each sequence and which sequences make up a
document. The pairs of a folder are concatenated in the order of their names. Invariants: a pair is used only if its
index is sound in every entry and agrees with the size of its ``.bin`` (checked once, when the index is saved); all have
the same dtype. The format has no checksums: a flipped bit in ``.bin`` goes unnoticed, as another token.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from closeranks.core.errors import DataError
from closeranks.data.dataset_protocol import Ints, RecordLocation
from closeranks.data.files.protocol import FileInfo, Files
from closeranks.data.formats.arrays.token_windows import TokenWindowReader
from closeranks.data.formats.file_rows import FileRows
from closeranks.data.formats.mapped_files import MappedFiles
from closeranks.data.formats.record_index.saved_index import Arrays, IndexLocation, Progress, saved_index

NAME = "megatron"

_HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, dtype code, number of sequences, number of document boundaries."""
_MAGIC = b"MMIDIDX\x00\x00"
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_CHUNK = 1 << 20
"""Number of sequences checked at a time, which bounds the memory that checking takes."""


@dataclass(frozen=True, slots=True)
class _Pair:
    data: FileInfo
    index: FileInfo


@dataclass(frozen=True, slots=True)
class _Checked:
    """The contents of one ``.idx``, found sound."""

    code: int
    num_tokens: int
    ends: npt.NDArray[np.int64]
    crc: int


def is_format(infos: Sequence[FileInfo], files: Files) -> bool:
    names = {info.name for info in infos}
    return any(name.endswith(".idx") and f"{name[:-4]}.bin" in names for name in names)


def open_tokens(files: Files, index: IndexLocation) -> MegatronTokens:
    return MegatronTokens(files, index)


class MegatronTokens:
    """Token ids of all pairs as one stream."""

    vocab_size = 0

    def __init__(self, files: Files, location: IndexLocation) -> None:
        self._files, self._location = files, location
        pairs = _pairs(files)
        infos = [info for pair in pairs for info in (pair.data, pair.index)]
        found = saved_index(location, files, infos, NAME, partial(_build, files, pairs), {"version": 1})
        self.indexes, self.identity = (found,), found.identity
        self.dtype: np.dtype[Any] = np.dtype(_TYPES[int(found["code"][0])])
        self._rows = FileRows([pair.data.name for pair in pairs], found["firsts"])
        self._ends = found["ends"]
        self._windows = TokenWindowReader(self._rows, self.dtype, self._stream)
        self._maps = MappedFiles(files)
        self.block = self._rows.block

    def __reduce__(self) -> tuple[Any, ...]:
        return MegatronTokens, (self._files, self._location)

    @property
    def num_tokens(self) -> int:
        return self._rows.num_rows

    @property
    def ends(self) -> npt.NDArray[Any]:
        return self._ends

    def read(self, starts: Ints, length: int) -> npt.NDArray[Any]:
        return self._windows.read(starts, length)

    def where(self, start: int) -> RecordLocation:
        file = int(self._rows.files_at(self._rows.check_bounds(np.asarray([start])))[0])
        offset = (start - int(self._rows.firsts[file])) * self.dtype.itemsize
        return RecordLocation(self._files.full_name(self._rows.names[file]), offset)

    def files_of(self, starts: Ints, length: int) -> Sequence[str]:
        return self._windows.files_of(starts, length)

    def close(self) -> None:
        self._maps.close()

    def _stream(self, number: int) -> npt.NDArray[Any]:
        name = self._rows.names[number]
        view = self._maps.view(name)
        wanted = int(self._rows.firsts[number + 1] - self._rows.firsts[number]) * self.dtype.itemsize
        if len(view) != wanted:
            full = self._files.full_name(name)
            raise DataError(f"'{full}' has {len(view)} bytes, and had {wanted} when it was indexed")
        return view.view(self.dtype)


def _pairs(files: Files) -> list[_Pair]:
    infos = {info.name: info for info in files.list()}
    pairs = []
    for name, info in infos.items():
        if not name.endswith((".bin", ".idx")):
            continue
        other = f"{name[:-4]}{'.idx' if name.endswith('.bin') else '.bin'}"
        if other not in infos:
            raise DataError(
                f"'{files.full_name(name)}' is incomplete: there is no '{other}'",
                "Megatron's files come in pairs: name the folder that holds both.",
            )
        if name.endswith(".bin"):
            pairs.append(_Pair(info, infos[other]))
    if not pairs:
        raise DataError(f"'{files.url}' holds no pair of .bin and .idx", "Name the folder that Megatron wrote into.")
    return pairs


def _build(files: Files, pairs: Sequence[_Pair], progress: Progress) -> Arrays:
    """Reads every ``.idx`` whole, but no ``.bin``."""
    maps, checked, done = MappedFiles(files, limit=1), [], 0
    total = sum(pair.index.num_bytes for pair in pairs)
    for pair in pairs:
        checked.append(_check(maps.view(pair.index.name), pair, files))
        done += pair.index.num_bytes
        progress(done, total)
    maps.close()
    for pair, one in zip(pairs, checked, strict=True):
        if one.code != checked[0].code:
            raise DataError(
                f"'{files.full_name(pair.data.name)}' holds {np.dtype(_TYPES[one.code])}, "
                f"'{files.full_name(pairs[0].data.name)}' {np.dtype(_TYPES[checked[0].code])}",
                "Keep tokens of different types in different folders.",
            )
    firsts = np.cumsum([0, *(one.num_tokens for one in checked)], dtype=np.int64)
    if firsts[-1] == 0:
        raise DataError(f"'{files.url}' holds no tokens")
    return {
        "code": np.asarray([checked[0].code], np.uint8),
        "firsts": firsts,
        "ends": np.concatenate([one.ends + first for one, first in zip(checked, firsts.tolist(), strict=False)]),
        "crcs": np.asarray([one.crc for one in checked], np.uint32),
    }


def _check(raw: npt.NDArray[np.uint8], pair: _Pair, files: Files) -> _Checked:
    name = files.full_name(pair.index.name)
    code, num_sequences, num_bounds = _header(raw, name)
    itemsize = np.dtype(_TYPES[code]).itemsize
    lengths = np.frombuffer(raw, "<i4", num_sequences, _HEADER.size)
    pointers = np.frombuffer(raw, "<i8", num_sequences, _HEADER.size + 4 * num_sequences)
    bounds = np.frombuffer(raw, "<i8", num_bounds, _HEADER.size + 12 * num_sequences)
    num_tokens = _check_sequences(lengths, pointers, itemsize, name)
    if num_tokens * itemsize != pair.data.num_bytes:
        raise DataError(
            f"'{files.full_name(pair.data.name)}' has {pair.data.num_bytes} bytes, and "
            f"{num_tokens * itemsize} according to '{name}'",
            "One of the two was cut off or belongs to another pair: copy or build them again.",
        )
    ends = _document_ends(bounds, pointers, num_tokens, itemsize, name)
    return _Checked(code, num_tokens, ends, int(crc32c(raw.data)))


def _header(raw: npt.NDArray[np.uint8], name: str) -> tuple[int, int, int]:
    """Dtype code, number of sequences, number of document boundaries."""
    if len(raw) < _HEADER.size:
        _unsound(name, f"it has only {len(raw)} bytes")
    magic, version, code, num_sequences, num_bounds = _HEADER.unpack_from(raw.data)
    if magic != _MAGIC:
        raise DataError(f"'{name}' is not a Megatron index: it begins with {magic!r}")
    if version != 1:
        _unsound(name, f"it is of version {version}, only 1 is known")
    if code not in _TYPES:
        _unsound(name, f"its type has the unknown code {code}")
    if _TYPES[code].startswith("<f"):
        raise DataError(f"'{name}' holds floating-point numbers, not tokens")
    wanted = _HEADER.size + 12 * num_sequences + 8 * num_bounds
    if len(raw) == wanted + num_sequences and raw[wanted:].any():
        raise DataError(
            f"'{name}' belongs to a multimodal dataset: some sequences are not text",
            "Keep only the text, in a separate pair.",
        )
    if len(raw) not in (wanted, wanted + num_sequences):
        _unsound(name, f"it has {len(raw)} bytes, and {wanted} according to its header")
    return code, num_sequences, num_bounds


def _check_sequences(lengths: npt.NDArray[np.int32], pointers: npt.NDArray[np.int64], itemsize: int, name: str) -> int:
    """The number of tokens. Sequences must follow each other without gaps."""
    total = 0
    for at in range(0, len(lengths), _CHUNK):
        part = lengths[at : at + _CHUNK].astype(np.int64)
        ends = total + np.cumsum(part)
        bad = np.flatnonzero((part < 0) | (pointers[at : at + _CHUNK] != (ends - part) * itemsize))
        if len(bad):
            number = at + int(bad[0])
            offset = _HEADER.size + 4 * number
            _unsound(
                name,
                f"sequence {number} (byte {offset}) has length {int(lengths[number])} and begins at "
                f"{int(pointers[number])}, not where the one before it ends",
            )
        total = int(ends[-1])
    return total


def _document_ends(
    bounds: npt.NDArray[np.int64], pointers: npt.NDArray[np.int64], num_tokens: int, itemsize: int, name: str
) -> npt.NDArray[np.int64]:
    """In tokens. Sequences after the last boundary form a document of their own."""
    num_sequences = len(pointers)
    if len(bounds) == 0 or bounds[0] != 0 or bounds[-1] > num_sequences or (np.diff(bounds) < 0).any():
        _unsound(name, f"its documents do not ascend from 0 to {num_sequences}")
    if bounds[-1] < num_sequences:
        bounds = np.append(bounds, num_sequences)
    ends = np.full(len(bounds) - 1, num_tokens, np.int64)
    within = bounds[1:] < num_sequences
    ends[within] = pointers[bounds[1:][within]] // itemsize
    return ends


def _unsound(name: str, why: str) -> NoReturn:
    raise DataError(f"'{name}' is damaged: {why}", "Copy it again, or build it again from its source.")
