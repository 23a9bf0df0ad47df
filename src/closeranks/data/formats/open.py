"""Detects the format of a folder of files, and opens it.

File names decide first, then the format's own check of them; a folder of our own shards is recognised whatever else it
contains. Invariant: a folder is read by exactly one format: if several match, or none, the error says what was looked
for and what was found. A format's module is imported only if there are files of its kind.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import PurePosixPath
from typing import Any

from closeranks.core.errors import DataError
from closeranks.core.registry import did_you_mean
from closeranks.data.dataset_protocol import Records, Tokens
from closeranks.data.files.protocol import FileInfo, Files
from closeranks.data.formats.record_index.saved_index import IndexLocation

SHARDS = "shards"


@dataclass(frozen=True, slots=True)
class DataFormat:
    """A format that can be detected from file names."""

    name: str
    module: str
    """Has ``is_format`` and ``open_records`` or ``open_tokens`` or both."""
    suffixes: tuple[str, ...]
    """Suffixes of the files for which the module is asked, including compressed ones. The module knows them as well,
    but need not be imported for this."""
    shown: str
    """What is looked for, in words."""


_PACKED = ("", ".gz", ".zst", ".zstd", ".bz2", ".xz")
FORMATS = (
    DataFormat(
        "webdataset", "records.webdataset", (*(f".tar{p}" for p in (*_PACKED, ".lz4")), ".tgz", ".tbz2", ".txz"), ".tar"
    ),
    DataFormat("parquet", "columnar.parquet_files", (".parquet", ".pq", ".parq"), ".parquet"),
    DataFormat(
        "arrow", "columnar.arrow_files", (".arrow", ".arrows", ".feather", ".ipc", "dataset_dict.json"), ".arrow"
    ),
    DataFormat(
        "jsonl", "records.jsonl", tuple(s + p for s in (".jsonl", ".ndjson") for p in _PACKED), ".jsonl .ndjson"
    ),
    DataFormat("megatron", "arrays.megatron", (".idx",), ".bin with .idx"),
    DataFormat("mds", "records.mds", ("index.json",), "index.json of MDS"),
    DataFormat(
        "images",
        "records.images",
        (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".gif", ".tif", ".tiff"),
        ".jpg .png and the like",
    ),
    DataFormat("numpy", "arrays.numpy_records", (".npy", ".npz"), ".npy"),
    DataFormat(
        "tfrecord",
        "records.tfrecord",
        tuple(s + p for s in (".tfrecord", ".tfrecords", ".tfrec") for p in _PACKED),
        ".tfrecord",
    ),
)
_BY_NAME = {format.name: format for format in FORMATS}
_PART = re.compile(r"-\d+-of-\d+$")
_CONVERT = "Name another folder, or make shards of it with 'closeranks data build'."


def open_records(files: Files, format: str, index: IndexLocation) -> Records:
    """``format``: empty to detect it, else one of ``FORMATS`` or ``shards``."""
    name = _resolve_format(files, format)
    if name == SHARDS:
        from closeranks.data.shards.records import ShardRecords

        return ShardRecords(files)
    module = _module(name)
    if not hasattr(module, "open_records"):
        raise DataError(f"'{files.url}' ({name}) holds tokens, not records", 'Say name = "tokens" in [data].')
    records: Records = module.open_records(files, index)
    return records


def open_tokens(files: Files, format: str, index: IndexLocation, field: str) -> Tokens:
    """``field``: the field with the tokens in formats of records; empty: determined from the first record."""
    name = _resolve_format(files, format)
    if name == SHARDS:
        return _shard_tokens(files, index, field)
    module = _module(name)
    tokens: Tokens
    if name == "numpy":
        tokens = module.open_tokens(files, index, field)
        return tokens
    if hasattr(module, "open_tokens"):
        tokens = module.open_tokens(files, index)
        return tokens
    return _tokens_of(module.open_records(files, index), files, field, index)


def detect(files: Files) -> str:
    """The name of the format; ``DataError`` if none or more than one matches."""
    if _is_shards(files):
        return SHARDS
    infos = files.list()
    found = [format for format in FORMATS if _has_any(infos, format) and _module(format.name).is_format(infos, files)]
    if len(found) == 1:
        return found[0].name
    if found:
        kinds = ", ".join(f"{format.name} ({_count(infos, format)} files)" for format in found)
        raise DataError(f"'{files.url}' mixes formats: {kinds}", "Say which one is meant (data.format).")
    looked = ", ".join(f"{format.name} ({format.shown})" for format in FORMATS)
    raise DataError(
        f"'{files.url}' holds no data of a known format: found {_seen(infos)}; "
        f"looked for: shards (dataset.json), {looked}",
        _CONVERT,
    )


def _resolve_format(files: Files, format: str) -> str:
    if not format:
        return detect(files)
    names = (*_BY_NAME, SHARDS)
    if format not in names:
        raise DataError(f"there is no format '{format}'", did_you_mean(format, names))
    return format


def _module(name: str) -> Any:
    return import_module(f"closeranks.data.formats.{_BY_NAME[name].module}")


def _has_any(infos: Sequence[FileInfo], format: DataFormat) -> bool:
    return any(_plain_name(info).endswith(format.suffixes) for info in infos)


def _count(infos: Sequence[FileInfo], format: DataFormat) -> int:
    return sum(_plain_name(info).endswith(format.suffixes) for info in infos)


def _plain_name(info: FileInfo) -> str:
    """``train.tfrecord-00000-of-00008`` counts as ``train.tfrecord``."""
    return _PART.sub("", info.name.lower())


def _seen(infos: Sequence[FileInfo]) -> str:
    """``3 .csv, 1 .md``: the suffixes found, most frequent first."""
    endings = Counter(PurePosixPath(info.name).suffix or PurePosixPath(info.name).name for info in infos)
    shown = ", ".join(f"{count} {ending}" for ending, count in endings.most_common(6))
    return f"{shown}{', ...' if len(endings) > 6 else ''}" if infos else "no files"


def _is_shards(files: Files) -> bool:
    from closeranks.data.shards.detect import is_shards

    return is_shards(files)


def _shard_tokens(files: Files, index: IndexLocation, field: str) -> Tokens:
    from closeranks.data.shards.manifest import read_manifest
    from closeranks.data.shards.records import ShardRecords
    from closeranks.data.shards.tokens import ShardTokens

    if read_manifest(files).head.kind == "tokens":
        return ShardTokens(files)
    return _tokens_of(ShardRecords(files), files, field, index)


def _tokens_of(records: Records, files: Files, field: str, index: IndexLocation) -> Tokens:
    from closeranks.data.formats.record_tokens import RecordTokens

    return RecordTokens(records, files, field, index)
