"""Finds where a document or record begins and ends.

The index of a shard holds one more offset than it has items: item ``i`` spans the i-th offset up to the next, in tokens
or bytes of the shard's data. Invariant: an offset is returned only from a block that matched its checksum.
``DocumentEnds`` presents the ends of all documents as one long array that is never in memory as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from closeranks.core.errors import BadRecordError, DataError
from closeranks.data.dataset_protocol import Ints
from closeranks.data.shards.mapped_shards import MappedShards

_OFFSET = np.dtype("<i8")


@dataclass(frozen=True, slots=True)
class ItemLocations:
    """Items, each by its shard and its range in the shard's data."""

    shard: Ints
    begin: Ints
    end: Ints


class ItemIndex:
    """Items of a whole data set by number."""

    def __init__(self, shards: MappedShards) -> None:
        self._shards = shards
        shapes = shards.manifest.regions
        self.first: Ints = np.append(np.int64(0), np.cumsum(shapes.num_items))
        """The number of items before each shard; the last entry is the total."""
        self.last: npt.NDArray[np.uint64] = self.first[1:].astype(np.uint64)
        self._index_offset = shapes.index_offset
        self._bias: Ints = shards.place[:-1] + self._index_offset - 8 * self.first[:-1]

    def __len__(self) -> int:
        return int(self.first[-1])

    def shard_of(self, indices: Ints) -> Ints:
        """A negative number is treated as a very large one, which is also beyond all shards."""
        shard = self.last.searchsorted(np.ascontiguousarray(indices, dtype=np.int64).view(np.uint64), side="right")
        if int(shard.max(initial=-1)) >= len(self.last):
            raise IndexError(f"the data set has {len(self)} items, and the request is out of range")
        return shard

    def locate(self, indices: Ints) -> ItemLocations | None:
        """None if they are in more shards than may be mapped at a time. About 8 µs for any number of them."""
        shard = self.shard_of(indices)
        at = indices * 8 + self._bias[shard]
        first, last = at >> self._shards.shift, (at + 15) >> self._shards.shift
        if not self._shards.is_sound(shard, first, last) and not self._shards.prepare(shard, first, last):
            return None
        pairs = self._shards.window.gather(at + self._shards.address[shard], 16, _OFFSET)
        return ItemLocations(shard, pairs[:, 0], pairs[:, 1])

    def offsets(self, shard: int, start: int, stop: int) -> Ints:
        """Offsets ``start`` up to ``stop`` of a shard's index, as a view. ``DataError`` if their blocks are damaged."""
        begin = int(self._index_offset[shard]) + 8 * start
        end = begin + 8 * (stop - start)
        blocks = self._shards.first_block[shard] + (np.array([begin, max(begin, end - 1)]) >> self._shards.shift)
        number = np.array([shard], dtype=np.int64)
        if not self._shards.is_sound(number, blocks[:1], blocks[1:]):
            try:
                self._shards.prepare(number, blocks[:1], blocks[1:])
            except BadRecordError as error:
                raise DataError(f"{error.what}, which holds the ends of documents", error.fix) from error
        return np.frombuffer(self._shards[shard].view, _OFFSET, stop - start, begin)


class DocumentEnds:
    """Where each document ends in the stream, like an array of int64: length, items, slices and ``searchsorted`` read
    only what they need; numpy's other functions read all of it."""

    dtype = np.dtype(np.int64)
    ndim = 1

    def __init__(self, index: ItemIndex, first_token: Ints) -> None:
        self._index = index
        self._first_token = first_token
        """The first token of each shard; the last entry is the number of tokens."""

    def __len__(self) -> int:
        return len(self._index)

    @property
    def shape(self) -> tuple[int]:
        return (len(self),)

    @property
    def size(self) -> int:
        return len(self)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step == 1:
                return self._range(start, max(start, stop))
            return self._at(np.arange(start, stop, step, dtype=np.int64))
        indices = np.asarray(key)
        if indices.dtype == np.bool_:
            indices = np.flatnonzero(indices)
        wanted = indices.astype(np.int64)
        found = self._at(np.where(wanted < 0, wanted + len(self), wanted).reshape(-1)).reshape(indices.shape)
        return found if indices.ndim else found[()]

    def _at(self, indices: Ints) -> Ints:
        if not len(indices):
            return np.empty(0, dtype=np.int64)
        found = self._index.locate(indices)
        if found is None:
            half = len(indices) // 2
            return np.concatenate([self._at(indices[:half]), self._at(indices[half:])])
        return found.end + self._first_token[found.shard]

    def _range(self, start: int, stop: int) -> Ints:
        first = self._index.first
        found: Ints = np.empty(stop - start, dtype=np.int64)
        at = start
        while at < stop:
            shard = int(first.searchsorted(at, side="right")) - 1
            until = min(stop, int(first[shard + 1]))
            local = self._index.offsets(shard, at - int(first[shard]) + 1, until - int(first[shard]) + 1)
            np.add(local, self._first_token[shard], out=found[at - start : until - start])
            at = until
        return found

    def searchsorted(self, values: Any, side: Literal["left", "right"] = "left") -> Any:
        """As numpy's: how many ends are below each value (``right``: or equal to it)."""
        wanted = np.asarray(values, dtype=np.int64)
        flat = wanted.reshape(-1)
        shards = self._first_token[1:].searchsorted(flat, side=side)
        counts = self._index.first[np.minimum(shards, len(self._first_token) - 1)].copy()
        for shard in np.unique(shards[shards < len(self._first_token) - 1]).tolist():
            rows = shards == shard
            num_items = int(self._index.first[shard + 1] - self._index.first[shard])
            local = self._index.offsets(shard, 1, num_items + 1)
            counts[rows] += local.searchsorted(flat[rows] - self._first_token[shard], side=side)
        return counts.reshape(wanted.shape) if wanted.ndim else counts[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """The whole array: eight bytes per document."""
        return self._range(0, len(self)).astype(dtype or self.dtype, copy=False)
