"""Into which ranges is a tensor of the state cut, and which of its holders writes each of them to a checkpoint?

A large piece is cut into ranges of its own memory, shared out among its holders; a small one goes whole to one of them,
which its name and place draw. So each answer follows from the piece alone: holders agree whatever else each of them
holds, and in whatever order it lists it (stages that share a tied weight hold different lists). The price is that
balance is exact for large pieces and a matter of chance for small ones. Invariant: the ranges cover a piece exactly,
without overlap, each has one writer, and none is longer than a chunk. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from zlib import crc32

from closeranks.core.pieces import Piece

CHUNK_BYTES = 32 << 20
"""Pieces are cut at this size: a reader that needs a few rows reads, and checks, no more than this around them."""
WHOLE_BYTES = 1 << 20
"""Smaller pieces are not shared out: what more chunks cost a manifest outweighs what cutting balances."""


@dataclass(frozen=True, slots=True)
class Holding:
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
class Share:
    """Elements ``first`` to ``last`` of a held piece's own memory, to be written as one chunk."""

    first: int
    last: int
    piece: Piece
    """What they are of the whole tensor."""
    is_ours: bool = True
    """Whether it is for this holder to write."""


def all_shares(holding: Holding) -> Iterator[Share]:
    """The whole piece, in the order of its memory; one empty range of an empty one."""
    numel, first_holder = holding.piece.numel, _first_holder(holding)
    if numel == 0:
        # A tensor without elements is written all the same, to be known by its name; an empty piece of another is not.
        is_named = prod(holding.piece.shape) == 0
        yield Share(0, 0, holding.piece, is_ours=is_named and holding.holder == first_holder)
        return
    num_parts = max(1, min(holding.num_holders, holding.num_bytes // WHOLE_BYTES))
    for part in range(num_parts):
        first, last = (numel * number // num_parts for number in (part, part + 1))
        is_ours = (part + first_holder) % holding.num_holders == holding.holder
        for start, stop in _cuts(first, last, max(1, CHUNK_BYTES // holding.item_bytes)):
            yield Share(start, stop, _part_of(holding.piece, start, stop), is_ours)


def shares(holding: Holding) -> tuple[Share, ...]:
    """What this holder writes of it, in the order of its memory."""
    return tuple(share for share in all_shares(holding) if share.is_ours)


def _first_holder(holding: Holding) -> int:
    """Drawn by what the piece is; ``hash`` would differ from process to process."""
    piece = holding.piece
    identity = repr((holding.section, piece.name, piece.shape, piece.start, piece.size, piece.flat))
    return crc32(identity.encode()) % holding.num_holders


def _cuts(first: int, last: int, most: int) -> Iterator[tuple[int, int]]:
    """Full chunks from the front: where a piece has one holder, its cuts do not move when it grows."""
    for start in range(first, last, most):
        yield start, min(start + most, last)


def _part_of(piece: Piece, first: int, last: int) -> Piece:
    """A range of a piece's memory as a piece of the tensor; a range of a flat piece is a range of the same box."""
    if (first, last) == (0, piece.numel):
        return piece
    begin = piece.flat[0] if piece.flat is not None else 0
    return piece.flattened(begin + first, begin + last)
