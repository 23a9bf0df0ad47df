"""Splits a tensor of the state into ranges and assigns each range to the holder that writes it to a checkpoint.

A large piece is split into ranges of its own memory, which are distributed over its holders; a small piece is assigned
whole to one holder, chosen by a hash of its name and position. So the result depends on the piece alone: holders agree
whatever else each of them holds, and in whatever order (stages that share a tied weight hold different lists). The
price is that the balance is exact for large pieces and only statistical for small ones. Invariant: the ranges cover a
piece exactly, without overlap, each has one writer, and none is longer than a chunk. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from zlib import crc32

from closeranks.core.pieces import Piece

CHUNK_BYTES = 32 << 20
"""Pieces are split at this size: a reader that needs a few rows reads and checks at most this much around them."""
WHOLE_BYTES = 1 << 20
"""Smaller pieces are not split: more chunks would cost the manifest more than the better balance is worth."""


@dataclass(frozen=True, slots=True)
class HeldPiece:
    """A piece as one of its holders sees it."""

    section: str
    piece: Piece
    item_bytes: int
    holder: int = 0
    """Which of its holders this rank is."""
    num_holders: int = 1

    @property
    def num_bytes(self) -> int:
        return self.piece.numel * self.item_bytes


@dataclass(frozen=True, slots=True)
class ChunkRange:
    """Elements ``first`` to ``last`` of a held piece's own memory, to be written as one chunk."""

    first: int
    last: int
    piece: Piece
    """The same elements as a piece of the whole tensor."""
    is_saved_here: bool = True
    """Whether this holder writes it."""


def chunk_ranges(held: HeldPiece) -> Iterator[ChunkRange]:
    """All ranges of the piece in memory order; for an empty piece, one empty range."""
    numel, first_holder = held.piece.numel, _first_holder(held)
    if numel == 0:
        # A tensor without elements is still written, so that its name is recorded; an empty piece of a non-empty tensor
        # is not.
        is_named = prod(held.piece.shape) == 0
        yield ChunkRange(0, 0, held.piece, is_saved_here=is_named and held.holder == first_holder)
        return
    num_parts = max(1, min(held.num_holders, held.num_bytes // WHOLE_BYTES))
    for part in range(num_parts):
        first, last = (numel * number // num_parts for number in (part, part + 1))
        is_saved_here = (part + first_holder) % held.num_holders == held.holder
        for start, stop in _cuts(first, last, max(1, CHUNK_BYTES // held.item_bytes)):
            yield ChunkRange(start, stop, _part_of(held.piece, start, stop), is_saved_here)


def own_chunk_ranges(held: HeldPiece) -> tuple[ChunkRange, ...]:
    """The ranges that this holder writes, in memory order."""
    return tuple(chunk_range for chunk_range in chunk_ranges(held) if chunk_range.is_saved_here)


def _first_holder(held: HeldPiece) -> int:
    """Chosen by a hash of the piece's identity; Python's ``hash`` would differ between processes."""
    piece = held.piece
    identity = repr((held.section, piece.name, piece.shape, piece.start, piece.size, piece.flat))
    return crc32(identity.encode()) % held.num_holders


def _cuts(first: int, last: int, most: int) -> Iterator[tuple[int, int]]:
    """Full chunks from the front: if a piece has one holder, the boundaries do not move when it grows."""
    for start in range(first, last, most):
        yield start, min(start + most, last)


def _part_of(piece: Piece, first: int, last: int) -> Piece:
    """A range of a piece's memory as a piece of the tensor; a range of a flat piece is a range of the same box."""
    if (first, last) == (0, piece.numel):
        return piece
    begin = piece.flat[0] if piece.flat is not None else 0
    return piece.flattened(begin + first, begin + last)
