"""Computes the statistics of a data set: size, lengths, duplicates and vocabulary.

One pass over everything, from front to back. Invariant: memory is bounded, whatever the size of the data set; figures
that are estimated are marked as such (``DuplicateCounts.is_sample``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from closeranks.data.building.readers.bad_records import read_with_errors
from closeranks.data.dataset_protocol import Record, Records, Tokens
from closeranks.data.packing import pack
from closeranks.data.stats.duplicates import DuplicateCounts, DuplicateFinder
from closeranks.data.stats.length_histogram import LengthHistogram

_TOKENS_AT_ONCE = 1 << 22
_DOCUMENTS_AT_ONCE = 1 << 20
_RECORDS_AT_ONCE = 256
_KEYS = ("__key__", "__url__")
"""Fields that identify a record; they differ even between records of equal content."""

OnProgress = Callable[[int, int], None]
"""Called with the number of tokens or records done, and their total."""


@dataclass(frozen=True, slots=True)
class PackingStats:
    """How many samples of ``seq_len`` the documents would make."""

    seq_len: int
    num_windows: int
    """Samples as windows over the stream."""
    num_rows: int
    """Samples of packed whole documents."""
    efficiency: float
    """Share of those rows that is not padding."""


@dataclass(frozen=True, slots=True)
class DatasetStats:
    kind: str
    """``tokens`` or ``records``."""
    num_tokens: int
    vocab_size: int
    num_used: int
    """Distinct token ids."""
    num_bad: int
    """Records that could not be read; no other figure includes them."""
    lengths: LengthHistogram
    """Tokens of each document, or bytes of each record."""
    repeats: DuplicateCounts | None
    packed: PackingStats | None


def token_stats(
    store: Tokens, *, limit: int, seq_len: int, on_progress: OnProgress, reads_all: bool = True
) -> DatasetStats:
    """``reads_all``: if false, only the index is read: no duplicates, no vocabulary."""
    lengths, duplicates = LengthHistogram(), DuplicateFinder(limit)
    used = np.zeros(max(store.vocab_size, 1), dtype=np.int64)
    for bounds in _bounds(store.ends):
        lengths.add(np.diff(bounds))
        if reads_all:
            for tokens, cuts in _spans(store, bounds):
                used = _counted(used, tokens)
                data = memoryview(tokens.view(np.uint8).data)
                size = tokens.dtype.itemsize
                duplicates.add(data[first * size : last * size] for first, last in pairwise(cuts))
                on_progress(int(bounds[0]) + cuts[-1], store.num_tokens)
    return DatasetStats(
        kind="tokens",
        num_tokens=store.num_tokens,
        vocab_size=store.vocab_size,
        num_used=int(np.count_nonzero(used)) if reads_all else 0,
        num_bad=0,
        lengths=lengths,
        repeats=duplicates.counts() if reads_all else None,
        packed=packing_stats(store, seq_len) if seq_len else None,
    )


def _bounds(ends: npt.NDArray[Any]) -> Iterator[npt.NDArray[np.int64]]:
    """Where documents begin and end, a bounded number at a time."""
    previous = 0
    for first in range(0, len(ends), _DOCUMENTS_AT_ONCE):
        part = np.asarray(ends[first : first + _DOCUMENTS_AT_ONCE], dtype=np.int64)
        yield np.concatenate((np.array([previous], dtype=np.int64), part))
        previous = int(part[-1])


def _spans(store: Tokens, bounds: npt.NDArray[np.int64]) -> Iterator[tuple[npt.NDArray[Any], list[int]]]:
    """The tokens of some whole documents, concatenated, and the offsets at which each begins and ends."""
    number = 0
    while number < len(bounds) - 1:
        last = int(np.searchsorted(bounds, bounds[number] + _TOKENS_AT_ONCE, side="right")) - 1
        last = max(last, number + 1)
        start, stop = int(bounds[number]), int(bounds[last])
        cuts = (bounds[number : last + 1] - start).tolist()
        tokens = store.read(np.array([start]), stop - start)[0] if stop > start else np.zeros(0, dtype=store.dtype)
        yield np.ascontiguousarray(tokens), cuts
        number = last


def _counted(used: npt.NDArray[np.int64], tokens: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    counts = np.bincount(tokens, minlength=len(used)) if len(tokens) else used
    if counts is used:
        return used
    counts[: len(used)] += used
    return counts


def packing_stats(store: Tokens, seq_len: int) -> PackingStats:
    packing = pack(store.ends, seq_len + 1)
    return PackingStats(seq_len, max(0, store.num_tokens - 1) // seq_len, packing.num_rows, packing.efficiency)


def record_stats(store: Records, *, limit: int, on_progress: OnProgress) -> DatasetStats:
    lengths, duplicates, num_bad = LengthHistogram(), DuplicateFinder(limit), 0
    for first in range(0, len(store), _RECORDS_AT_ONCE):
        last = min(first + _RECORDS_AT_ONCE, len(store))
        records = [record for record, _ in read_with_errors(store, first, last) if record is not None]
        num_bad += last - first - len(records)
        contents = [content_of(record) for record in records]
        lengths.add(np.fromiter(map(len, contents), dtype=np.int64, count=len(contents)))
        duplicates.add(contents)
        on_progress(last, len(store))
    return DatasetStats(
        kind="records",
        num_tokens=0,
        vocab_size=0,
        num_used=0,
        num_bad=num_bad,
        lengths=lengths,
        repeats=duplicates.counts(),
        packed=None,
    )


def content_of(record: Record) -> bytes:
    """The content of a record without the fields that identify it; equal records have equal contents. Each field is
    preceded by its name and size, so that different records never yield the same bytes."""
    parts = []
    for name in sorted(set(record) - set(_KEYS)):
        value = value_bytes(record[name])
        parts += [f"{name}\0{len(value)}\0".encode(), value]
    return b"".join(parts)


def value_bytes(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode(errors="surrogatepass")
    if isinstance(value, np.ndarray):
        return f"{value.dtype.str}{value.shape}".encode() + value.tobytes()
    return json.dumps(value, sort_keys=True, default=repr).encode()
