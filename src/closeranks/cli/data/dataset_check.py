"""Checks every byte of a data set, as far as its format allows.

Invariant: everything is read; a finding names the file, the offset and the affected samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np

from closeranks.cli.data.stored_data import open_path
from closeranks.core.errors import BadRecordError, DataError
from closeranks.data.building.readers.bad_records import read_with_errors
from closeranks.data.dataset_protocol import IndexedStore, Record, Records, Tokens
from closeranks.data.decode import image_error, is_embedded, is_image
from closeranks.data.files.open import open_files
from closeranks.data.shards.detect import is_shards
from closeranks.data.shards.manifest import read_manifest
from closeranks.data.shards.verify import verify

_RECORDS_AT_ONCE = 256
_TOKENS_AT_ONCE = 1 << 20

_CARRIED = {
    "parquet": "pages compared with their checksums where they have any",
    "arrow": "arrow has no checksums",
    "jsonl": "JSONL has no checksums",
    "mds": "shards compared with their hashes where they have any",
    "webdataset": "tar has no checksums of its content",
    "images": "most image files have no checksums",
    "numpy": "NumPy has no checksums",
    "tfrecord": "every record compared with its checksums",
}
"""What reading can check, by format."""

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class DatasetFinding:
    file: str
    offset: int
    reason: str
    first: int
    last: int
    """Affected samples: ``[first, last)``."""
    text: str
    """The whole finding in one line."""


@dataclass(frozen=True, slots=True)
class DatasetCheck:
    what: str
    """What was checked."""
    how: str
    """What it was compared with."""
    findings: tuple[DatasetFinding, ...]


def check_dataset(path: str, format: str, on_progress: OnProgress) -> DatasetCheck:
    files = open_files(path)
    if format in ("", "shards") and is_shards(files):
        found = verify(files, on_progress)
        told = tuple(DatasetFinding(one.file, one.offset, one.reason, one.first, one.last, str(one)) for one in found)
        return DatasetCheck(_shards_in_words(path), "every block against its checksum", told)
    opened = open_path(path, format)
    what = f"{opened.num_samples:,} {opened.noun}"
    store = opened.tokens if opened.tokens is not None else opened.records
    if damaged := tuple(_bad_indexes(store)):  # reading through a damaged index says nothing about the data
        return DatasetCheck(what, "its index against its checksums", damaged)
    if opened.tokens is not None:
        return DatasetCheck(what, "every token read", tuple(_bad_tokens(opened.tokens, on_progress)))
    assert opened.records is not None
    records = _Looked(opened.records)
    findings = tuple(records.findings(on_progress))
    how_far = "decoded" if find_spec("PIL") else "looked at, none decoded (Pillow is not installed)"
    images = f", {records.num_images:,} images {how_far}" if records.num_images else ""
    return DatasetCheck(what, f"every record read{images}; {_CARRIED[opened.format]}", findings)


def _bad_indexes(store: object) -> Iterator[DatasetFinding]:
    """Checks each index in full; opening checks only a part of a large one."""
    for index in store.indexes if isinstance(store, IndexedStore) else ():
        try:
            index.check()
        except DataError as error:
            yield DatasetFinding(str(index.path), 0, error.what, 0, 0, str(error))


def _shards_in_words(path: str) -> str:
    try:
        manifest = read_manifest(open_files(path))
    except DataError:
        return "a data set whose description cannot be read"
    noun = "documents" if manifest.head.kind == "tokens" else "records"
    count = len(manifest.shards)
    return f"{count:,} {'shard' if count == 1 else 'shards'}, {manifest.num_items:,} {noun}"


class _Looked:
    """Reads records one after the other, and checks the images in them."""

    def __init__(self, store: Records) -> None:
        self._store = store
        self.num_images = 0

    def findings(self, on_progress: OnProgress) -> Iterator[DatasetFinding]:
        size = len(self._store)
        for first in range(0, size, _RECORDS_AT_ONCE):
            last = min(first + _RECORDS_AT_ONCE, size)
            for index, (record, reason) in enumerate(read_with_errors(self._store, first, last), first):
                if reason := reason or self._bad_image(record or {}):
                    yield self._finding(index, reason)
            on_progress(last, size)

    def _bad_image(self, record: Record) -> str:
        for name, value in record.items():
            if is_image(name, value):
                self.num_images += 1
                if fault := image_error(value["bytes"] if is_embedded(value) else value, in_full=True):
                    return f"field '{name}' {fault}"
        return ""

    def _finding(self, index: int, reason: str) -> DatasetFinding:
        place = self._store.where(index)
        text = reason if place.file in reason else f"{place}: {reason}"
        return DatasetFinding(place.file, place.offset, reason, index, index + 1, f"{text} (record {index})")


def _bad_tokens(store: Tokens, on_progress: OnProgress) -> Iterator[DatasetFinding]:
    for start in range(0, store.num_tokens, _TOKENS_AT_ONCE):
        length = min(_TOKENS_AT_ONCE, store.num_tokens - start)
        try:
            tokens = store.read(np.array([start], dtype=np.int64), length)
        except BadRecordError as error:
            place = store.where(start)
            yield DatasetFinding(place.file, place.offset, error.what, start, start + length, error.what)
        else:
            if store.vocab_size and int(tokens.max()) >= store.vocab_size:
                yield _outside(store, start, tokens)
        on_progress(start + length, store.num_tokens)


def _outside(store: Tokens, start: int, tokens: np.ndarray) -> DatasetFinding:
    at = int(np.argmax(tokens[0] >= store.vocab_size))
    place = store.where(start + at)
    reason = f"token {int(tokens[0, at])} lies outside the vocabulary of {store.vocab_size}"
    return DatasetFinding(place.file, place.offset, reason, start + at, start + at + 1, f"{place}: {reason}")
