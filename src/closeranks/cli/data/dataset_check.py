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

_CHECKSUM_NOTES = {
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
        damage = tuple(DatasetFinding(one.file, one.offset, one.reason, one.first, one.last, str(one)) for one in found)
        return DatasetCheck(_describe_shards(path), "every block against its checksum", damage)
    stored = open_path(path, format)
    what = f"{stored.num_samples:,} {stored.noun}"
    store = stored.tokens if stored.tokens is not None else stored.records
    if damaged := tuple(_bad_indexes(store)):  # reading through a damaged index says nothing about the data
        return DatasetCheck(what, "its index against its checksums", damaged)
    if stored.tokens is not None:
        return DatasetCheck(what, "every token read", tuple(_bad_tokens(stored.tokens, on_progress)))
    assert stored.records is not None
    check = _RecordCheck(stored.records)
    findings = tuple(check.findings(on_progress))
    how_far = "decoded" if find_spec("PIL") else "looked at, none decoded (Pillow is not installed)"
    images = f", {check.num_images:,} images {how_far}" if check.num_images else ""
    return DatasetCheck(what, f"every record read{images}; {_CHECKSUM_NOTES[stored.format]}", findings)


def _bad_indexes(store: object) -> Iterator[DatasetFinding]:
    """Checks each index in full; opening checks only a part of a large one."""
    for index in store.indexes if isinstance(store, IndexedStore) else ():
        try:
            index.check()
        except DataError as error:
            yield DatasetFinding(str(index.path), 0, error.what, 0, 0, str(error))


def _describe_shards(path: str) -> str:
    try:
        manifest = read_manifest(open_files(path))
    except DataError:
        return "a data set whose description cannot be read"
    noun = "documents" if manifest.head.kind == "tokens" else "records"
    count = len(manifest.shards)
    return f"{count:,} {'shard' if count == 1 else 'shards'}, {manifest.num_items:,} {noun}"


class _RecordCheck:
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
                if error := image_error(value["bytes"] if is_embedded(value) else value, in_full=True):
                    return f"field '{name}' {error}"
        return ""

    def _finding(self, index: int, reason: str) -> DatasetFinding:
        location = self._store.where(index)
        text = reason if location.file in reason else f"{location}: {reason}"
        return DatasetFinding(location.file, location.offset, reason, index, index + 1, f"{text} (record {index})")


def _bad_tokens(store: Tokens, on_progress: OnProgress) -> Iterator[DatasetFinding]:
    for start in range(0, store.num_tokens, _TOKENS_AT_ONCE):
        length = min(_TOKENS_AT_ONCE, store.num_tokens - start)
        try:
            tokens = store.read(np.array([start], dtype=np.int64), length)
        except BadRecordError as error:
            location = store.where(start)
            yield DatasetFinding(location.file, location.offset, error.what, start, start + length, error.what)
        else:
            if store.vocab_size and int(tokens.max()) >= store.vocab_size:
                yield _out_of_vocabulary(store, start, tokens)
        on_progress(start + length, store.num_tokens)


def _out_of_vocabulary(store: Tokens, start: int, tokens: np.ndarray) -> DatasetFinding:
    at = int(np.argmax(tokens[0] >= store.vocab_size))
    location = store.where(start + at)
    reason = f"token {int(tokens[0, at])} lies outside the vocabulary of {store.vocab_size}"
    return DatasetFinding(location.file, location.offset, reason, start + at, start + at + 1, f"{location}: {reason}")
