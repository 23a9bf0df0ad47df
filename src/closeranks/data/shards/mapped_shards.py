"""Keeps shards memory-mapped, and tracks which of their blocks have been checked.

Shards are mapped when first needed. Positions are counted in one space for all: shard after shard, each beginning at a
block (``place``), so that block numbers and addresses are a shift and an addition for a whole batch at once.
Invariants: a block that is marked as checked is in a mapped shard and matched its checksum in this process; marks are
removed when their shard is unmapped; a damaged block is never marked. Nothing in a shard is trusted before its size,
footer, header and table of checksums agree with ``dataset.json``.
"""

from __future__ import annotations

import mmap
import os
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from closeranks.core.errors import BadRecordError, DataError
from closeranks.core.system.regular_file import open_descriptor
from closeranks.data.dataset_protocol import Ints
from closeranks.data.files.protocol import Files
from closeranks.data.shards.encoding import RecordDecoder
from closeranks.data.shards.file_map import FileMap, GatherWindow
from closeranks.data.shards.manifest import DatasetManifest, ShardEntry
from closeranks.data.shards.shard_footer import read_footer
from closeranks.data.shards.shard_format import UnsoundShard

_MOST_REMOTE = 64
"""A mapped shard cannot be evicted from the cache of a host."""
AGAIN = "Copy this file again from an intact copy, or build again; `closeranks data verify` lists all damage."


@dataclass(slots=True)
class MappedShard:
    """A memory-mapped shard."""

    map: FileMap
    view: memoryview
    """All of its bytes."""
    checksums: npt.NDArray[np.uint32]
    hold: ExitStack
    decoders: list[RecordDecoder] = field(default_factory=list)
    """By schema number; empty until the first record is read."""


class MappedShards:
    """The shards of a data set, by number."""

    def __init__(self, files: Files, manifest: DatasetManifest, most: int = 0) -> None:
        self.files = files
        self.manifest = manifest
        num_shards = len(manifest.shards)
        self.most = most or (num_shards if files.is_local else _MOST_REMOTE)
        self.shift = manifest.head.block_bytes.bit_length() - 1
        self.first_block: Ints = np.append(np.int64(0), np.cumsum(manifest.regions.num_blocks))
        self.place: Ints = self.first_block << self.shift
        """Where each shard begins in the common space of positions; the last entry is its end."""
        self.window = GatherWindow()
        self.address: Ints = np.zeros(num_shards + 1, dtype=np.int64)
        """Added to a position in a mapped shard, it gives the index into ``window``."""
        # One zero byte per block: pages are allocated when touched, and a forked process has marks of its own.
        num_marks = int(self.first_block[-1]) + 1
        self._marks = mmap.mmap(-1, num_marks, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._is_checked = np.frombuffer(self._marks, dtype=np.bool_)
        self._mapped: dict[int, MappedShard] = {}
        self._is_bounded = self.most < num_shards
        self._used: Ints = np.zeros(num_shards + 1, dtype=np.int64)
        self._clock = 0
        self._fetched_again: set[int] = set()

    def __getitem__(self, shard: int) -> MappedShard:
        """The shard must be mapped."""
        return self._mapped[shard]

    def is_sound(self, shard: Ints, first: Ints, last: Ints) -> bool:
        """Whether the blocks from ``first`` to ``last`` (inclusive) are checked, pair by pair: about 2 µs if no pair
        spans more than two. ``shard`` is the shard of each pair, and is marked as used now."""
        if self._is_bounded:
            self._clock += 1
            self._used[shard] = self._clock
        # count_nonzero takes a tenth of the time of all() on a few dozen elements.
        if np.count_nonzero(self._is_checked[first] & self._is_checked[last]) < len(first):
            return False
        if not np.count_nonzero(last > first + 1):
            return True
        return all(self._marks.find(b"\0", a, b + 1) < 0 for a, b in zip(first.tolist(), last.tolist(), strict=True))

    def prepare(self, shard: Ints, first: Ints, last: Ints) -> bool:
        """Map these shards and check these blocks, in this order; ``BadRecordError`` for the first damaged one. False
        if they are in more shards than may be mapped at a time: the caller must ask for fewer."""
        wanted = set(shard.tolist())
        if len(wanted) > self.most:
            return False
        is_settled = False
        while not is_settled:  # a shard that is fetched again loses its marks
            self._require(wanted)
            is_settled = all(self._checked(*pair) for pair in zip(first.tolist(), last.tolist(), strict=True))
        return True

    def _checked(self, begin: int, end: int) -> bool:
        """False if a damaged copy was discarded, and everything must be checked again."""
        while (begin := self._marks.find(b"\0", begin, end + 1)) >= 0:
            if not self._check_block(begin):
                return False
        return True

    def _require(self, wanted: set[int]) -> None:
        """Unmaps the least recently used shards to stay within the limit."""
        missing = sorted(shard for shard in wanted if shard not in self._mapped)
        if not missing:
            return
        others = sorted((shard for shard in self._mapped if shard not in wanted), key=self._used.__getitem__)
        for shard in others[: max(0, len(self._mapped) + len(missing) - self.most)]:
            self._unmap(shard)
        try:
            for shard in missing:
                self._mapped[shard] = self._map(self.manifest.shards[shard])
        finally:
            self._place_window()

    def _unmap(self, shard: int) -> None:
        """Unmap a shard; arrays that are views of it keep the map alive. The file may be evicted now."""
        self._is_checked[self.first_block[shard] : self.first_block[shard + 1]] = False
        self._mapped.pop(shard).hold.close()

    def _place_window(self) -> None:
        first = self.window.reach(mapped.map for mapped in self._mapped.values())
        for shard, mapped in self._mapped.items():
            self.address[shard] = mapped.map.address - first - self.place[shard]

    def _map(self, entry: ShardEntry) -> MappedShard:
        with ExitStack() as hold:
            path = hold.enter_context(self.files.local_path(entry.name))
            full = self.files.full_name(entry.name)
            try:
                fd = open_descriptor(path)
                try:
                    footer, checksums = read_footer(fd, entry, self.manifest.head)
                    file_map = FileMap(fd, footer.shape.num_bytes)
                finally:
                    os.close(fd)
            except UnsoundShard as error:
                raise DataError(f"'{full}' cannot be used: {error}", AGAIN) from error
            except OSError as error:
                raise DataError(f"'{full}' cannot be read: {error.strerror or error}") from error
            view = file_map.bytes().data
            return MappedShard(file_map, view, checksums, hold.pop_all())

    def _check_block(self, block: int) -> bool:
        """Mark a sound block. The cached copy of a remote shard may be damaged while the shard itself is not: the copy
        is discarded once, and False is returned."""
        shard = int(np.searchsorted(self.first_block, block, side="right")) - 1
        mapped, entry = self._mapped[shard], self.manifest.shards[shard]
        number = block - int(self.first_block[shard])
        start = number << self.shift
        stop = min(start + (1 << self.shift), entry.regions(1 << self.shift).table_offset)
        try:
            mapped.map.touch(start, stop - start)
        except OSError as error:
            full = self.files.full_name(entry.name)
            what = f"'{full}' cannot be read at byte {start}: {error.strerror or error}"
            raise DataError(what, "The device is failing, or the file was truncated while in use.") from error
        if crc32c(mapped.view[start:stop]) != mapped.checksums[number]:
            if not self.files.is_local and shard not in self._fetched_again:
                self._fetched_again.add(shard)
                self._unmap(shard)
                self._place_window()
                self.files.discard(entry.name)
                return False
            full = self.files.full_name(entry.name)
            what = f"'{full}' is damaged: block {number}, bytes {start} to {stop}, does not match its checksum"
            raise BadRecordError(what, AGAIN)
        self._is_checked[block] = True
        return True

    def notes(self, shard: int) -> bytes:
        """The notes of a shard, all blocks of which are checked."""
        shape = self.manifest.shards[shard].regions(1 << self.shift)
        start, stop = shape.notes_offset, shape.notes_offset + shape.notes_bytes
        blocks = self.first_block[shard] + (np.array([start, max(start, stop - 1)]) >> self.shift)
        try:
            self.prepare(np.array([shard]), blocks[:1], blocks[1:])
        except BadRecordError as error:
            raise DataError(error.what, error.fix) from error
        return bytes(self[shard].view[start:stop])

    def close(self) -> None:
        for shard in list(self._mapped):
            self._unmap(shard)
        self._place_window()
