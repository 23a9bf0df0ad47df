"""Which part of what several ranks hold alike does each of them write?

A large piece is cut into ranges of its own memory, one for each holder; a small one goes whole to one of them, which
its name and place draw. So each answer follows from the piece alone: holders agree whatever else each of them holds,
and in whatever order it lists it (stages that share a tied weight hold different lists). The price is that balance is
exact for large pieces and a matter of chance for small ones. Invariant: over all holders the ranges cover a piece
exactly, without overlap, and none is longer than a chunk. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from zlib import crc32

from closeranks.checkpoint.manifest import CHUNK_BYTES
from closeranks.core.pieces import Piece

WHOLE_BYTES = 1 << 20
"""Smaller pieces are not cut: what more chunks cost a manifest outweighs what cutting balances."""


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


def shares(holding: Holding) -> tuple[Share, ...]:
    """What this holder writes of it, in the order of its memory."""
    numel = holding.piece.numel
    if numel == 0:
        return _of_nothing(holding)
    num_parts = max(1, min(holding.num_holders, holding.num_bytes // WHOLE_BYTES))
    part = (holding.holder - _first_holder(holding)) % holding.num_holders
    if part >= num_parts:
        return ()
    first, last = (numel * number // num_parts for number in (part, part + 1))
    cuts = _cuts(first, last, max(1, CHUNK_BYTES // holding.item_bytes))
    return tuple(Share(start, stop, _part_of(holding.piece, start, stop)) for start, stop in cuts)


def _of_nothing(holding: Holding) -> tuple[Share, ...]:
    """A tensor without elements is written all the same, to be known by its name; an empty piece of another is not."""
    is_writer = holding.holder == _first_holder(holding)
    return (Share(0, 0, holding.piece),) if is_writer and prod(holding.piece.shape) == 0 else ()


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
