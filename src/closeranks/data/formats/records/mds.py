"""Reads samples from MosaicML's MDS shards.

``index.json`` lists the shards with their columns, sizes and hashes. A shard begins with the number of its samples and
the offsets of each; a sample is the sizes of its variable-size columns, then the columns. Invariants: a shard that does
not have the size and number of samples in the index is not read at all; if the index has a hash, the whole shard is
checked before its first sample is returned (once per process); nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from closeranks.core.errors import BadRecordError, DataError
from closeranks.data.dataset_protocol import Ints, Record, RecordLocation
from closeranks.data.files.protocol import FileInfo, Files
from closeranks.data.formats.file_rows import FileRows
from closeranks.data.formats.mapped_files import MappedFiles
from closeranks.data.formats.record_index.saved_index import IndexLocation
from closeranks.data.formats.records.mds_values import Decoder, decoder_of
from closeranks.data.formats.spans import ContainerSpan, spans
from closeranks.data.timing import stage

NAME = "mds"
INDEX = "index.json"
_log = logging.getLogger(__name__)
_Encodings: TypeAlias = tuple[tuple[str, str, int | None], ...]
"""Name, encoding and size of each column, as in the index."""


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    size: int | None
    """In bytes; None if each sample states it."""
    decode: Decoder


@dataclass(frozen=True, slots=True)
class _Shard:
    name: str
    num_samples: int
    num_bytes: int
    hashes: Mapping[str, str]


def is_format(infos: Sequence[FileInfo], files: Files) -> bool:
    return any(info.name.endswith(".mds") or ".mds." in info.name for info in infos) and any(
        info.name.endswith(INDEX) for info in infos
    )


def open_records(files: Files, index: IndexLocation) -> MdsRecords:
    return MdsRecords(files)


class MdsRecords:
    """Samples by number, in the order of ``index.json``."""

    def __init__(self, files: Files) -> None:
        self._files = files
        data = _index_bytes(files)
        self._shards, columns = _parse(data, files)
        self._columns = _columns(columns)
        self._sizes = struct.Struct(f"<{sum(column.size is None for column in self._columns)}I")
        self._rows = FileRows.of([s.name for s in self._shards], [s.num_samples for s in self._shards])
        self.block = self._rows.block
        self.identity = f"{NAME}:{blake3(data).hexdigest(16)}"
        self._maps = MappedFiles(files)
        self._verdicts: dict[int, str] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return MdsRecords, (self._files,)

    def __len__(self) -> int:
        return self._rows.num_rows

    def read(self, indices: Ints) -> list[Record]:
        records: list[Record] = [{}] * len(indices)
        for span in spans(self._rows.firsts, self._rows.check_bounds(indices)):
            samples = self._samples(span)
            with stage("decode"):
                for position, row, sample in zip(span.positions.tolist(), span.inside.tolist(), samples, strict=True):
                    records[position] = self._decoded(sample, span.container, row)
        return records

    def where(self, index: int) -> RecordLocation:
        (span,) = spans(self._rows.firsts, self._rows.check_bounds(np.asarray([index])))
        return RecordLocation(self._name(span.container), int(span.inside[0]), "sample")

    def files_of(self, indices: Ints) -> Sequence[str]:
        return self._rows.names_of(indices)

    def close(self) -> None:
        self._maps.close()

    def _name(self, number: int) -> str:
        return self._files.full_name(self._shards[number].name)

    def _shard(self, number: int) -> npt.NDArray[np.uint8]:
        """A shard of the right size, after its hashes were checked."""
        shard, view = self._shards[number], self._maps.view(self._shards[number].name)
        if len(view) != shard.num_bytes:
            _unsound(self._name(number), f"it has {len(view)} bytes, and {shard.num_bytes} according to '{INDEX}'")
        if number not in self._verdicts:
            verdict = _compare(view, shard.hashes)
            if not verdict:
                _check_count(view, shard, self._name(number))
            self._verdicts[number] = verdict
        return view

    def _samples(self, span: ContainerSpan) -> list[bytes]:
        view = self._shard(span.container)
        if self._verdicts[span.container]:
            self._refuse(span.container, int(span.inside[0]), self._verdicts[span.container])
        num_samples = self._shards[span.container].num_samples
        offsets = np.frombuffer(view, "<u4", num_samples + 1, 4)
        begins, ends = offsets[span.inside].tolist(), offsets[span.inside + 1].tolist()
        first = 4 + 4 * (num_samples + 1)
        for row, begin, end in zip(span.inside.tolist(), begins, ends, strict=True):
            if not first <= begin <= end <= len(view):
                self._refuse(span.container, row, f"the index places it from byte {begin} to {end}")
        return [view[begin:end].tobytes() for begin, end in zip(begins, ends, strict=True)]

    def _decoded(self, sample: bytes, shard: int, row: int) -> Record:
        record, at, column = {}, self._sizes.size, None
        try:
            sizes = iter(self._sizes.unpack_from(sample))
            for column in self._columns:
                end = at + (next(sizes) if column.size is None else column.size)
                if end > len(sample):
                    raise ValueError(f"it would end at byte {end} of the sample's {len(sample)}")
                record[column.name] = column.decode(sample[at:end])
                at = end
        except (ValueError, IndexError, struct.error) as error:
            self._refuse(shard, row, f"column '{column.name}': {error}" if column else str(error))
        if at != len(sample):
            self._refuse(shard, row, f"its columns take {at} of its {len(sample)} bytes")
        return record

    def _refuse(self, shard: int, row: int, reason: str) -> NoReturn:
        raise BadRecordError(f"bad record in '{self._name(shard)}', sample {row}: {reason}") from None


def _index_bytes(files: Files) -> bytes:
    names = [info.name for info in files.list()]
    if INDEX in names:
        return files.read(INDEX)
    splits = sorted(name[: -len(INDEX) - 1] for name in names if name.endswith(f"/{INDEX}"))
    if splits:
        which = "several MDS datasets" if len(splits) > 1 else "an MDS dataset in a subfolder"
        raise DataError(
            f"'{files.url}' holds {which}: {', '.join(splits)}",
            f"Choose one: '{files.full_name(splits[0])}'.",
        )
    raise DataError(f"'{files.url}' holds no '{INDEX}'", "Name the folder that MDSWriter wrote into.")


def _parse(data: bytes, files: Files) -> tuple[list[_Shard], _Encodings]:
    """The shards, and the columns, which all of them share."""
    full = files.full_name(INDEX)
    try:
        entries = json.loads(data)["shards"]
        shards = [_parse_shard(entry, full) for entry in entries]
        columns = [
            tuple(zip(entry["column_names"], entry["column_encodings"], entry["column_sizes"], strict=True))
            for entry in entries
        ]
    except (ValueError, KeyError, TypeError) as error:
        _unsound(full, f"{type(error).__name__}: {error}")
    if not any(shard.num_samples for shard in shards):
        raise DataError(f"'{full}' names no samples")
    for shard, own in zip(shards, columns, strict=True):
        if own != columns[0]:
            raise DataError(f"'{full}': '{shard.name}' has other columns than '{shards[0].name}'")
    return shards, columns[0]


def _parse_shard(entry: Mapping[str, Any], full: str) -> _Shard:
    if entry["format"] != "mds" or entry["version"] != 2:
        _unsound(full, f"it names a shard of format '{entry['format']}', version {entry['version']}")
    if entry["zip_data"]:
        raise DataError(
            f"'{full}' lists shards compressed by {entry['compression']}, whose samples cannot be accessed by index",
            "Convert the dataset with 'closeranks data build'.",
        )
    raw = entry["raw_data"]
    return _Shard(raw["basename"], int(entry["samples"]), int(raw["bytes"]), dict(raw["hashes"]))


def _columns(columns: _Encodings) -> list[_Column]:
    """A fixed size of 0 is indistinguishable from none: MDS reads both as variable."""
    return [_Column(name, size or None, decoder_of(encoding, name)) for name, encoding, size in columns]


def _compare(view: npt.NDArray[np.uint8], hashes: Mapping[str, str]) -> str:
    """What is wrong; empty if nothing is. Reads the whole shard, with the first of its hashes that is available
    here."""
    for name, wanted in hashes.items():
        make = _hash(name)
        if make is not None:
            found = make(view.data).hexdigest()
            return "" if found == wanted else f"the shard's {name} is {found}, and {wanted} according to '{INDEX}'"
    if hashes:
        _warn_unchecked(", ".join(hashes))
    return ""


@lru_cache
def _warn_unchecked(names: str) -> None:
    """Once per process, not for every shard."""
    _log.warning("the hashes of MDS shards (%s) cannot be checked here: no package for them is installed", names)


def _check_count(view: npt.NDArray[np.uint8], shard: _Shard, full: str) -> None:
    found = int.from_bytes(view[:4].tobytes(), "little")
    if found != shard.num_samples:
        _unsound(full, f"it holds {found} samples, and {shard.num_samples} according to '{INDEX}'")
    if 4 + 4 * (found + 1) > len(view):
        _unsound(full, f"its {len(view)} bytes have no room for {found} samples")


def _hash(name: str) -> Callable[[Any], Any] | None:
    if name in hashlib.algorithms_guaranteed and not name.startswith("shake"):
        return lambda data: hashlib.new(name, data, usedforsecurity=False)
    try:
        return getattr(importlib.import_module("xxhash"), name, None) if name.startswith("xxh") else None
    except ModuleNotFoundError:
        return None


def _unsound(name: str, why: str) -> NoReturn:
    raise DataError(f"'{name}' is damaged: {why}", "Copy it again, or write the dataset again.")
