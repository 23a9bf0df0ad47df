"""Reads any piece of a saved tensor, whatever layout saved it (resharding on load).

Every saved chunk that overlaps the piece is fetched, checked and copied to its place; a chunk that is contiguous in the
piece is read directly into the piece's memory. Invariants: what a reader returns is complete and was checked against
the digest of its source, or a ``CheckpointError`` names checkpoint, tensor and file; no more than the piece and a few
chunks are in memory at a time.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from closeranks.checkpoint.format.manifest import CheckpointManifest, ChunkLocation
from closeranks.checkpoint.format.manifest_validation import FIX, coverage_gap, read_manifest
from closeranks.checkpoint.load.catalogue import find_checkpoints
from closeranks.checkpoint.load.chunk_reader import ChunkReader
from closeranks.core.errors import CheckpointError
from closeranks.core.pieces import Piece
from closeranks.core.reshard import ContiguousBox, Overlap, TensorBox, plan_copies
from closeranks.storage.protocol import Storage

_KEPT_BYTES = 64 << 20
"""Cache of chunks that were used in part: neighbouring pieces, read one after another, share them."""
_REMOTE_THREADS = 8
"""An object store has high latency and serves many requests at once; a disk keeps at most one thread per core busy."""
_WORTH_THREADS_BYTES = 1 << 20
_LARGE_BYTES = 4 << 20
"""From this size on numpy requests huge pages."""

_log = logging.getLogger(__name__)


class CheckpointReader:
    """One checkpoint, open for reading; tensors are read one at a time, on request."""

    def __init__(self, storage: Storage, folder: str) -> None:
        self.path = f"{storage.url}/{folder}"
        self.manifest: CheckpointManifest = read_manifest(storage, folder)
        self._tensors = self.manifest.tensors()
        self._chunks = ChunkReader(storage, folder, self.manifest)
        self._covered: set[tuple[str, str]] = set()
        self._cache = _ChunkCache(_KEPT_BYTES)
        self._num_threads = min(4, os.cpu_count() or 1) if storage.is_local else _REMOTE_THREADS

    @property
    def tree(self) -> Mapping[str, Any]:
        """Everything but the tensors."""
        return self.manifest.tree

    def shapes(self, section: str) -> dict[str, tuple[int, ...]]:
        """Global shapes of the tensors of a section, by key."""
        return {key: entries[0].chunk.piece.shape for (of, key), entries in self._tensors.items() if of == section}

    def dtype(self, section: str, key: str) -> torch.dtype:
        """The dtype it was saved in."""
        found: torch.dtype = getattr(torch, self._entries(section, key)[0].chunk.dtype)
        return found

    def check_files(self) -> None:
        """Check that all files exist and that the checkpoint's own files have the saved size and header. Reads headers
        only, no tensor data."""
        for file in [file.name for file in self.manifest.files]:
            self._chunks.check_file(file)
        for entry in self.manifest.entries:
            self._chunks.check_extent(entry)

    def read(self, section: str, key: str, piece: Piece, dtype: torch.dtype | None = None) -> Tensor:
        """Any piece of what was saved under a key, in ``dtype`` or as it was saved."""
        entries = self._sound(section, key, piece.shape)
        made = _fresh(piece.numel, dtype or self.dtype(section, key))
        self._fill(entries, piece, made)
        return made.view(piece.local_shape)

    def read_into(self, section: str, key: str, piece: Piece, out: Tensor) -> None:
        """The same into an existing tensor: saves a copy and an allocation if it is contiguous, on the CPU and of the
        saved dtype. If this raises, the tensor may be partly filled."""
        is_straight = out.device.type == "cpu" and out.is_contiguous() and out.dtype == self.dtype(section, key)
        with torch.no_grad():
            if is_straight:
                self._fill(self._sound(section, key, piece.shape), piece, out.detach().view(-1))
            else:
                out.copy_(self.read(section, key, piece))

    def _entries(self, section: str, key: str) -> tuple[ChunkLocation, ...]:
        entries = self._tensors.get((section, key))
        if entries is None:
            raise CheckpointError(
                f"checkpoint {self.path} has no '{section}/{key}'", "Use the model the state was saved from."
            )
        return entries

    def _sound(self, section: str, key: str, shape: tuple[int, ...]) -> tuple[ChunkLocation, ...]:
        """The chunks of a tensor, after checking that they cover it and exist: before memory is allocated for it."""
        entries = self._entries(section, key)
        saved = [entry.chunk.piece for entry in entries]
        if shape != saved[0].shape:
            what = f"'{section}/{key}' has shape {shape} here and {saved[0].shape} in checkpoint {self.path}"
            raise CheckpointError(what, "Resume with the model the state was saved from.")
        if (section, key) not in self._covered:
            if wrong := coverage_gap(saved):
                raise CheckpointError(f"checkpoint {self.path} is damaged: of '{section}/{key}', {wrong}", FIX)
            for entry in entries:
                self._chunks.check_extent(entry)
            self._covered.add((section, key))
        return entries

    def _fill(self, entries: Sequence[ChunkLocation], piece: Piece, made: Tensor) -> None:
        by_chunk: dict[int, list[Overlap]] = {}
        for overlap in plan_copies(piece, [entry.chunk.piece for entry in entries]).overlaps:
            by_chunk.setdefault(overlap.saved, []).append(overlap)
        work = [(entries[number], overlaps, made) for number, overlaps in by_chunk.items()]
        if len(work) < 2 or sum(entry.chunk.num_bytes for entry, _, _ in work) < _WORTH_THREADS_BYTES:
            for one in work:
                self._copy(*one)
            return
        with ThreadPoolExecutor(min(self._num_threads, len(work)), "checkpoint-read") as pool:
            for done in [pool.submit(self._copy, *one) for one in work]:
                done.result()

    def _copy(self, entry: ChunkLocation, overlaps: Sequence[Overlap], made: Tensor) -> None:
        """Copy the part of a chunk that lies in a piece; ``made`` is the piece's memory."""
        dtype = getattr(torch, entry.chunk.dtype)
        numel = entry.chunk.piece.numel
        place = contiguous_offset(overlaps, numel) if made.dtype == dtype else None
        if place is not None:
            self._chunks.read_into(entry, _octets(made[place : place + numel]))
            return
        is_whole = sum(overlap.box.numel for overlap in overlaps) == numel
        memory = self._cache.get(entry)
        if memory is None:
            memory = _fresh(entry.chunk.num_bytes, torch.uint8)
            self._chunks.read_into(entry, _octets(memory))
            if not is_whole:
                self._cache.put(entry, memory)
        values = memory.view(dtype)
        with torch.no_grad():
            for overlap in overlaps:
                _part(made, overlap.target, overlap.box).copy_(_part(values, overlap.source, overlap.box))


def open_newest(place: str) -> CheckpointReader:
    """The checkpoint to resume from at a run's folder, a folder of checkpoints, one of them, or a URL of those: the
    first whose manifest, files and headers are valid. Others are skipped with a warning in the log."""
    passed: list[str] = []
    catalogue = find_checkpoints(place)
    for found in catalogue.candidates():
        try:
            reader = CheckpointReader(found.storage, found.name)
            reader.check_files()
        except CheckpointError as error:
            _log.warning("%s was skipped: %s", found.name, error.what)
            passed.append(error.what)
        else:
            return reader
    reasons = "".join(f"; {text}" for text in (*passed, *catalogue.problems)) if catalogue.found else ""
    which = "valid checkpoint" if catalogue.found else "checkpoint"
    raise CheckpointError(
        f"there is no {which} at {place}{reasons}", "Name a run folder or a checkpoint of an earlier run."
    )


def contiguous_offset(overlaps: Sequence[Overlap], numel: int) -> int | None:
    """The offset of a chunk of ``numel`` elements in a piece's memory, if it is complete and contiguous there."""
    if sum(overlap.box.numel for overlap in overlaps) != numel:
        return None
    places = set()
    for overlap in overlaps:
        source, target = _flat_offset(overlap.source, overlap.box), _flat_offset(overlap.target, overlap.box)
        places.add(None if source is None or target is None else target - source)
    return places.pop() if len(places) == 1 else None


def _flat_offset(contiguous: ContiguousBox, box: TensorBox) -> int | None:
    """Index of the first element of a box in contiguous memory, if the rest of it follows without gaps."""
    first, stride, is_open = contiguous.first, 1, True
    for dim in reversed(range(len(box.size))):
        extent = contiguous.box.size[dim]
        if box.size[dim] != 1 and not is_open:
            return None
        is_open = is_open and box.size[dim] == extent
        first += (box.start[dim] - contiguous.box.start[dim]) * stride
        stride *= extent
    return first


def _part(memory: Tensor, contiguous: ContiguousBox, box: TensorBox) -> Tensor:
    """A box as a view of a piece's memory."""
    view = memory[contiguous.first : contiguous.first + contiguous.box.numel].view(contiguous.box.size)
    for dim, (start, size) in enumerate(zip(box.start, box.size, strict=True)):
        view = view.narrow(dim, start - contiguous.box.start[dim], size)
    return view


def _fresh(numel: int, dtype: torch.dtype) -> Tensor:
    """Large buffers come from numpy, which requests huge pages: page faults of 4 KiB each would cost more than
    reading."""
    if numel * dtype.itemsize < _LARGE_BYTES:
        return torch.empty(numel, dtype=dtype)
    return torch.from_numpy(np.empty(numel * dtype.itemsize, np.uint8)).view(dtype)


def _octets(memory: Tensor) -> memoryview:
    view: memoryview = memory.view(torch.uint8).numpy().data
    return view


class _ChunkCache:
    """An LRU cache of chunks, limited by size."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes, self._num_bytes = limit_bytes, 0
        self._chunks: OrderedDict[tuple[str, int], Tensor] = OrderedDict()
        self._lock = Lock()

    def get(self, entry: ChunkLocation) -> Tensor | None:
        with self._lock:
            found = self._chunks.get((entry.file, entry.offset))
            if found is not None:
                self._chunks.move_to_end((entry.file, entry.offset))
            return found

    def put(self, entry: ChunkLocation, memory: Tensor) -> None:
        with self._lock:
            if (entry.file, entry.offset) in self._chunks or memory.nbytes > self._limit_bytes:
                return
            self._chunks[entry.file, entry.offset] = memory
            self._num_bytes += memory.nbytes
            while self._num_bytes > self._limit_bytes:
                self._num_bytes -= self._chunks.popitem(last=False)[1].nbytes
