"""Reads token ids from shards.

A batch is one gather over all mapped shards (file_map.py, [Note: one window over all maps]). Invariants: tokens are
returned only from blocks that matched their checksum in this process; a window may span several shards, which are read
as one stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from closeranks.core.errors import DataError
from closeranks.data.dataset_protocol import Ints, RecordLocation, typical_block
from closeranks.data.files.protocol import Files
from closeranks.data.shards.item_index import DocumentEnds, ItemIndex
from closeranks.data.shards.manifest import DatasetManifest, read_manifest
from closeranks.data.shards.mapped_shards import MappedShards
from closeranks.data.shards.shard_format import DATA_OFFSET

_FEW_DOCUMENTS = 1 << 20
"""Up to this many, the ends are kept as an array (8 MiB); more are read from the maps as needed."""


class ShardTokens:
    """Token ids of a folder of shards. At most ``most_mapped`` are mapped at a time; 0: all of a local folder, else
    64."""

    def __init__(self, files: Files, most_mapped: int = 0) -> None:
        manifest = manifest_of(files, "tokens")
        self._files, self._most_mapped = files, most_mapped
        self._shards = MappedShards(files, manifest, most_mapped)
        self._names = [shard.name for shard in manifest.shards]
        self.identity = manifest.identity
        self.dtype: np.dtype[Any] = np.dtype(manifest.head.dtype).newbyteorder("<")
        self.vocab_size = manifest.about.vocab_size
        data_bytes = manifest.regions.data_bytes
        self._first: Ints = np.append(np.int64(0), np.cumsum(data_bytes // self.dtype.itemsize))
        self._last = self._first[1:].astype(np.uint64)
        begin = self._shards.place[:-1] + DATA_OFFSET
        # One more entry than shards: a start beyond all of them finds an end that no window fits.
        self._bias: Ints = np.append(begin - self._first[:-1] * self.dtype.itemsize, 0)
        self._stop: Ints = np.append(begin + data_bytes, np.iinfo(np.int64).min)
        self.block = typical_block(np.diff(self._first))
        self._ends: npt.NDArray[Any] | None = None

    def __reduce__(self) -> tuple[Callable[..., ShardTokens], tuple[Files, int, str]]:
        return _reopened_tokens, (self._files, self._most_mapped, self.identity)

    @property
    def num_tokens(self) -> int:
        return int(self._first[-1])

    @property
    def ends(self) -> npt.NDArray[Any]:
        if self._ends is None:
            ends = DocumentEnds(ItemIndex(self._shards), self._first)
            self._ends = np.asarray(ends) if len(ends) <= _FEW_DOCUMENTS else cast("npt.NDArray[Any]", ends)
        return self._ends

    def read(self, starts: Ints, length: int) -> npt.NDArray[Any]:
        """About 10 µs for any number of windows, then 30 to 60 ns for each of 129 tokens from the hot cache."""
        starts = np.ascontiguousarray(starts, dtype=np.int64)
        num_bytes = length * self.dtype.itemsize
        if not len(starts) or length < 1:
            return np.empty((len(starts), length), dtype=self.dtype)
        # A negative start is treated as a very large one, which is also beyond all shards.
        shard = self._last.searchsorted(starts.view(np.uint64), side="right")
        at = starts * self.dtype.itemsize + self._bias[shard]
        end = at + num_bytes
        if np.count_nonzero(end > self._stop[shard]):
            return self._read_across(starts, length, shard)
        first, last = at >> self._shards.shift, (end - 1) >> self._shards.shift
        if not self._shards.is_sound(shard, first, last) and not self._shards.prepare(shard, first, last):
            half = len(starts) // 2
            return np.concatenate([self.read(starts[:half], length), self.read(starts[half:], length)])
        return self._shards.window.gather(at + self._shards.address[shard], num_bytes, self.dtype)

    def _read_across(self, starts: Ints, length: int, shard: Ints) -> npt.NDArray[Any]:
        """Some of these windows do not end in the shard in which they begin."""
        if int(starts.min()) < 0 or int(starts.max()) + length > self.num_tokens:
            raise IndexError(f"the data set has {self.num_tokens} tokens, and the request is out of range")
        found = np.empty((len(starts), length), dtype=self.dtype)
        is_inside = starts + length <= self._first[shard + 1]
        found[is_inside] = self.read(starts[is_inside], length)
        for row in np.flatnonzero(~is_inside).tolist():
            at, done = int(starts[row]), 0
            while done < length:
                until = int(self._first[self._first.searchsorted(at, side="right")])
                count = min(until - at, length - done)
                found[row, done : done + count] = self.read(np.array([at]), count)[0]
                at, done = at + count, done + count
        return found

    def where(self, start: int) -> RecordLocation:
        shard = int(self._last.searchsorted(np.uint64(start), side="right"))
        offset = DATA_OFFSET + (start - int(self._first[shard])) * self.dtype.itemsize
        return RecordLocation(self._files.full_name(self._names[shard]), offset)

    def files_of(self, starts: Ints, length: int) -> Sequence[str]:
        wanted = np.asarray(starts, dtype=np.int64)
        first = self._first[1:].searchsorted(wanted, side="right")
        last = self._first[1:].searchsorted(wanted + max(0, length - 1), side="right")
        spans = (range(a, b + 1) for a, b in zip(first.tolist(), last.tolist(), strict=True))
        return [self._names[shard] for shard in dict.fromkeys(shard for span in spans for shard in span)]

    def close(self) -> None:
        """Release all shards; reading maps them again."""
        self._shards.close()


def manifest_of(files: Files, kind: str) -> DatasetManifest:
    manifest = read_manifest(files)
    if manifest.head.kind != kind:
        fix = f'Say name = "{manifest.head.kind}" in [data], or name another folder.'
        raise DataError(f"'{files.url}' holds {manifest.head.kind}, not {kind}", fix)
    return manifest


def check_same(files: Files, found: str, expected: str) -> None:
    if found != expected:
        what = f"'{files.url}' has changed while it was in use ({found}, and before {expected})"
        raise DataError(what, "Start again.")


def _reopened_tokens(files: Files, most_mapped: int, identity: str) -> ShardTokens:
    tokens = ShardTokens(files, most_mapped)
    check_same(files, tokens.identity, identity)
    return tokens
