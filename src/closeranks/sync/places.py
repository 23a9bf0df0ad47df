"""What lies where in a flat tensor that travels?

A load is a bucket or a unit of gradients as its way sees it: so many elements, and the parameters' parts among them, by
which what a way remembers is found again in any other layout. Sizes and corners are in the order of memory, slowest dim
first. Invariants: places do not overlap; what no place covers is a gap, belongs to nobody and holds zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from closeranks.core.pieces import Piece
from closeranks.core.protocols import Held
from closeranks.sync.held import dense_strides


@dataclass(frozen=True, slots=True)
class Place:
    """Elements ``begin`` to ``end`` of a box of a parameter, row by row, lie at ``offset``."""

    piece: Piece
    offset: int
    begin: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.begin

    @property
    def is_box(self) -> bool:
        """Whether the whole box is here."""
        return self.begin == 0 and self.end == self.piece.numel


@dataclass(frozen=True)
class Load:
    """A flat tensor that travels, but for its values."""

    places: tuple[Place, ...]
    numel: int
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def gaps(self) -> Tensor | None:
        """Numbers of the elements that belong to nobody; None where there are none."""
        is_gap = torch.ones(self.numel, dtype=torch.bool)
        for place in self.places:
            is_gap[place.offset : place.offset + place.numel] = False
        return is_gap.nonzero().view(-1).to(self.device) if is_gap.any() else None

    def clear_gaps(self, flat: Tensor) -> None:
        """Codes of a few bits know no zero."""
        if self.gaps is not None:
            flat.index_fill_(0, self.gaps, 0.0)

    def slice(self, first: int, last: int) -> Load:
        """Elements ``first`` to ``last`` as a load of their own."""
        clipped = (_clipped(place, first, last) for place in self.places)
        return replace(self, places=tuple(place for place in clipped if place.numel > 0), numel=last - first)


def _clipped(place: Place, first: int, last: int) -> Place:
    begin, end = max(place.offset, first), min(place.offset + place.numel, last)
    if begin >= end:
        return replace(place, begin=0, end=0)
    skipped = begin - place.offset
    return Place(place.piece, begin - first, place.begin + skipped, place.begin + skipped + end - begin)


def place_of(held: Held, offset: int) -> Place:
    """A held parameter that lies dense at ``offset``."""
    piece = in_memory_order(held.piece, memory_order(held.parameter))
    return Place(piece, offset, 0, piece.numel)


def memory_order(parameter: Tensor) -> tuple[int, ...]:
    """Its dims, from the one that memory runs through slowest."""
    strides = dense_strides(parameter)
    return tuple(sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim)))


def in_memory_order(piece: Piece, order: Sequence[int]) -> Piece:
    """The name tells another order than the parameter's own: such a piece is never taken for one that lies plainly."""

    def sorted_by(sizes: Iterable[int]) -> tuple[int, ...]:
        sizes = tuple(sizes)
        return tuple(sizes[dim] for dim in order)

    name = piece.name if list(order) == sorted(order) else f"{piece.name}@{','.join(map(str, order))}"
    return Piece(name, sorted_by(piece.shape), sorted_by(piece.start), sorted_by(piece.size), piece.flat)


def load_of(held: Sequence[Held], offsets: Sequence[int], flat: Tensor) -> Load:
    """The load that a flat tensor with these parameters is."""
    places = tuple(place_of(one, offset) for one, offset in zip(held, offsets, strict=True))
    return Load(places, flat.numel(), flat.dtype, flat.device)
