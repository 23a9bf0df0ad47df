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


def chunk_ranges(holding: HeldPiece) -> Iterator[ChunkRange]:
    """All ranges of the piece in memory order; for an empty piece, one empty range."""
    numel, first_holder = holding.piece.numel, _first_holder(holding)
    if numel == 0:
        # A tensor without elements is still written, so that its name is recorded; an empty piece of a non-empty tensor
        # is not.
        is_named = prod(holding.piece.shape) == 0
        yield ChunkRange(0, 0, holding.piece, is_saved_here=is_named and holding.holder == first_holder)
        return
    num_parts = max(1, min(holding.num_holders, holding.num_bytes // WHOLE_BYTES))
    for part in range(num_parts):
        first, last = (numel * number // num_parts for number in (part, part + 1))
        is_ours = (part + first_holder) % holding.num_holders == holding.holder
        for start, stop in _cuts(first, last, max(1, CHUNK_BYTES // holding.item_bytes)):
            yield ChunkRange(start, stop, _part_of(holding.piece, start, stop), is_ours)


def own_chunk_ranges(holding: HeldPiece) -> tuple[ChunkRange, ...]:
    """The ranges that this holder writes, in memory order."""
    return tuple(share for share in chunk_ranges(holding) if share.is_saved_here)


def _first_holder(holding: HeldPiece) -> int:
    """Chosen by a hash of the piece's identity; Python's ``hash`` would differ between processes."""
    piece = holding.piece
    identity = repr((holding.section, piece.name, piece.shape, piece.start, piece.size, piece.flat))
    return crc32(identity.encode()) % holding.num_holders


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
