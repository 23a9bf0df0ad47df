"""Writes what DCP's planner assigned to one rank.

Tensors are split into chunks, and a file is written and read back, as in every other save. Invariants: the checksum of
a chunk is computed from the tensor's own memory in a first pass, and the bytes written in a second pass are compared
with it; only one of the planner's tensors is held at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from closeranks.capture.chunk_ranges import HeldPiece, own_chunk_ranges
from closeranks.checkpoint.format.data_file import SaveError, read_back, write_data_file
from closeranks.checkpoint.format.digests import crc32c, item_bytes
from closeranks.checkpoint.format.manifest import Chunk, ChunkLocation, DataFile, RankPart, data_name
from closeranks.core.errors import CheckpointError
from closeranks.core.pieces import Piece
from closeranks.storage.protocol import Storage, StorageError

_FIX = "Earlier checkpoints are still valid: save again later."


@dataclass(frozen=True, slots=True)
class SaveRank:
    """This rank and the number of ranks: the same for every save, since DCP may cache plans."""

    rank: int
    num_ranks: int


@dataclass(frozen=True, slots=True)
class TensorWrite:
    """A box of a tensor that this rank writes; the piece's name is the key."""

    section: str
    piece: Piece
    dtype: str

    @property
    def item_bytes(self) -> int:
        try:
            return item_bytes(self.dtype)
        except ValueError as error:
            raise CheckpointError(f"{self.section}/{self.piece.name} cannot be saved: {error}") from error


LoadTensor = Callable[[int], Tensor]
"""Returns the n-th tensor to write, on the CPU."""


@dataclass(frozen=True, slots=True)
class _Range:
    """Elements ``first`` to ``last`` of a box's memory, to be written as one chunk."""

    write_index: int
    first: int
    last: int
    piece: Piece


def write_part(
    storage: Storage,
    folder: str,
    save_rank: SaveRank,
    writes: Sequence[TensorWrite],
    load: LoadTensor,
    *,
    is_checked: bool,
) -> RankPart:
    """Write a rank's data file; when this returns it is durable and, if ``is_checked``, was read back from the
    medium."""
    cache = _TensorCache(writes, load)
    ranges = _ranges(writes)
    name = data_name(save_rank.rank, save_rank.num_ranks)
    try:
        chunks = [cache.chunk(one) for one in ranges]
        file, entries = _write(storage, f"{folder}/{name}", chunks, lambda number: cache.of(ranges[number]))
        if is_checked:
            read_back(storage, f"{folder}/{name}", file, chunks, _never_cancelled)
    except (SaveError, StorageError) as error:
        with suppress(StorageError):  # what is left does not count, and the next retention run removes it
            storage.remove(f"{folder}/{name}")
        raise CheckpointError(f"{folder} was not saved: {error}", _FIX, rank=save_rank.rank) from error
    # DCP itself gathers the parts of one save, so no attempt id is needed to tell saves apart.
    return RankPart(save_rank.rank, save_rank.num_ranks, "dcp", (file,), entries)


def _write(
    storage: Storage, path: str, chunks: Sequence[Chunk], source: Callable[[int], memoryview]
) -> tuple[DataFile, tuple[ChunkLocation, ...]]:
    file, plan, digests = write_data_file(storage, path, dict(enumerate(chunks)), source, {}, _never_cancelled)
    return file, tuple(
        ChunkLocation(chunk, file.name, offset, digests[number].blake3, digests[number].digest_term)
        for number, (chunk, offset) in enumerate(zip(chunks, plan.offsets, strict=True))
    )


def _never_cancelled() -> None:
    """DCP has no way to cancel a save."""


def _ranges(writes: Sequence[TensorWrite]) -> list[_Range]:
    """In file order: larger elements first, so that all are aligned."""
    order = sorted(range(len(writes)), key=lambda number: -writes[number].item_bytes)
    return [
        _Range(number, chunk_range.first, chunk_range.last, chunk_range.piece)
        for number in order
        for chunk_range in own_chunk_ranges(
            HeldPiece(writes[number].section, writes[number].piece, writes[number].item_bytes)
        )
    ]


class _TensorCache:
    """Ranges of boxes as bytes, requested in order."""

    def __init__(self, writes: Sequence[TensorWrite], load: LoadTensor) -> None:
        self._writes = writes
        self._load = load
        self._held: tuple[int, Tensor] | None = None

    def chunk(self, part: _Range) -> Chunk:
        write, data = self._writes[part.write_index], self.of(part)
        return Chunk(write.section, write.piece.name, write.dtype, part.piece, data.nbytes, crc32c(data))

    def of(self, part: _Range) -> memoryview:
        if part.first == part.last:
            return memoryview(b"")
        octets = self._tensor(part.write_index).view(-1)[part.first : part.last].view(torch.uint8)
        view: memoryview = octets.numpy().data
        return view

    def _tensor(self, number: int) -> Tensor:
        if self._held is None or self._held[0] != number:
            self._held = None
            write, tensor = self._writes[number], self._load(number).contiguous()
            if tuple(tensor.shape) != write.piece.size or str(tensor.dtype) != f"torch.{write.dtype}":
                what = f"{write.section}/{write.piece.name} is {tuple(tensor.shape)} of {tensor.dtype}, unlike its plan"
                raise CheckpointError(what, "Do not change the state while it is saved.")
            self._held = (number, tensor)
        return self._held[1]
