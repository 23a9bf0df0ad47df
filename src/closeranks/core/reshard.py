"""Plans which saved pieces of a tensor to copy into a wanted piece.

A piece is decomposed into contiguous boxes: boxes of the tensor whose elements follow one another in the piece's own
memory, one for a box, a few for a flat range of one. A plan is then the set of overlaps between boxes, whatever the
layout of either side. Invariants: a plan writes each wanted element exactly once, and elements that no saved piece
covers are reported as missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from closeranks.core.pieces import Piece


@dataclass(frozen=True, slots=True)
class TensorBox:
    """``size`` elements from ``start`` in each dim of the whole tensor."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.size)


@dataclass(frozen=True, slots=True)
class ContiguousBox:
    """A box that is stored in row-major order in a piece's memory, starting at its element ``first``."""

    box: TensorBox
    first: int


@dataclass(frozen=True, slots=True)
class Overlap:
    """A box to be copied from a contiguous box of a saved piece into one of the wanted piece."""

    saved: int
    """Index of the saved piece."""
    source: ContiguousBox
    target: ContiguousBox
    box: TensorBox


@dataclass(frozen=True, slots=True)
class CopyPlan:
    overlaps: tuple[Overlap, ...]
    missing: tuple[TensorBox, ...]


def plan_copies(wanted: Piece, saved: Sequence[Piece]) -> CopyPlan:
    """What to copy from where. Saved pieces may overlap, as the copies of replicas do: the first one is used."""
    rest = [(run, run.box) for run in contiguous_boxes(wanted)]
    overlaps: list[Overlap] = []
    for number, piece in enumerate(saved):
        for source in contiguous_boxes(piece):
            remaining: list[tuple[ContiguousBox, TensorBox]] = []
            for target, box in rest:
                shared = _common(box, source.box)
                if shared is None:
                    remaining.append((target, box))
                    continue
                overlaps.append(Overlap(number, source, target, shared))
                remaining += [(target, part) for part in _without(box, shared)]
            rest = remaining
        if not rest:
            break
    return CopyPlan(tuple(overlaps), tuple(box for _, box in rest))


def contiguous_boxes(piece: Piece) -> tuple[ContiguousBox, ...]:
    """The piece's contiguous boxes in memory order; none for an empty piece."""
    first, last = piece.flat or (0, prod(piece.size))
    found: list[ContiguousBox] = []
    position = 0
    for box in _range(piece.start, piece.size, first, last):
        found.append(ContiguousBox(box, position))
        position += box.numel
    return tuple(found)


def _range(start: tuple[int, ...], size: tuple[int, ...], first: int, last: int) -> Iterator[TensorBox]:
    """Elements ``first`` to ``last`` of a box as boxes: part of a row, whole rows, part of a row."""
    if first >= last:
        return
    if last - first == prod(size):
        yield TensorBox(start, size)
        return
    row = prod(size[1:])
    begin, end = -(-first // row), last // row
    if begin > end:  # within one row
        yield from _in_row(start, size, end, first - end * row, last - end * row)
        return
    yield from _in_row(start, size, begin - 1, first - (begin - 1) * row, row)
    if begin < end:
        yield TensorBox((start[0] + begin, *start[1:]), (end - begin, *size[1:]))
    yield from _in_row(start, size, end, 0, last - end * row)


def _in_row(start: tuple[int, ...], size: tuple[int, ...], index: int, first: int, last: int) -> Iterator[TensorBox]:
    for box in _range(start[1:], size[1:], first, last):
        yield TensorBox((start[0] + index, *box.start), (1, *box.size))


def _common(one: TensorBox, other: TensorBox) -> TensorBox | None:
    start = tuple(max(pair) for pair in zip(one.start, other.start, strict=True))
    ends = (min(a + n, b + m) for a, n, b, m in zip(one.start, one.size, other.start, other.size, strict=True))
    size = tuple(end - begin for begin, end in zip(start, ends, strict=True))
    return TensorBox(start, size) if all(extent > 0 for extent in size) else None


def _without(box: TensorBox, hole: TensorBox) -> Iterator[TensorBox]:
    """What is left of a box around a hole in it, dim by dim: before it, after it, and then within its extent."""
    start, size = list(box.start), list(box.size)
    for dim, (first, extent) in enumerate(zip(hole.start, hole.size, strict=True)):
        end = start[dim] + size[dim]
        for begin, stop in ((start[dim], first), (first + extent, end)):
            if begin < stop:
                corner, extents = list(start), list(size)
                corner[dim], extents[dim] = begin, stop - begin
                yield TensorBox(tuple(corner), tuple(extents))
        start[dim], size[dim] = first, extent
