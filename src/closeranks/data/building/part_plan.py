"""Cuts the inputs of a build into parts, each of which becomes one shard or more.

The inputs are concatenated, and the sequence is cut into parts: whole files, or ranges of those that can be cut (bytes
of lines, numbers of records). Invariant: the plan is a pure function of the inputs and of the requested part size,
never of processes or time. A build is therefore byte-identical for any number of processes, and can be resumed after a
kill.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

_SLIVERS = 16
"""A piece is a sliver if it is smaller than a part divided by this."""


@dataclass(frozen=True, slots=True)
class InputExtent:
    """What the plan must know about an input."""

    weight: int
    """Expected number of output bytes."""
    num_units: int
    """Number of units into which it may be cut: bytes, records, or 1 for inputs that can only be read from the
    beginning."""


@dataclass(frozen=True, slots=True, order=True)
class InputPosition:
    """A point in the sequence of inputs: before unit ``unit`` of input ``input``."""

    input: int
    unit: int


@dataclass(frozen=True, slots=True)
class BuildPart:
    """What one process reads and writes at a time: the sequence of inputs from ``first`` up to ``last``."""

    index: int
    first: InputPosition
    last: InputPosition


@dataclass(frozen=True, slots=True)
class InputRange:
    """Units ``[first, last)`` of one input."""

    input: int
    first: int
    last: int


def plan_parts(extents: Sequence[InputExtent], part_bytes: int) -> tuple[BuildPart, ...]:
    """Parts of about ``part_bytes``, in the order of the inputs; each input is in one part, or in consecutive ones."""
    positions = [InputPosition(0, 0), *_positions(extents, part_bytes), InputPosition(len(extents), 0)]
    positions = [
        position for number, position in enumerate(positions) if number == 0 or position != positions[number - 1]
    ]
    return tuple(BuildPart(index, first, last) for index, (first, last) in enumerate(pairwise(positions)))


def _positions(extents: Iterable[InputExtent], part_bytes: int) -> Iterator[InputPosition]:
    """No cut leaves a sliver on either side: it would not be worth the seek and the search for the next line."""
    sliver, filled = part_bytes // _SLIVERS, 0
    for number, extent in enumerate(extents):
        reached = 0
        while _weight(extent, reached, extent.num_units) > part_bytes - filled + sliver:
            unit = _last_unit(extent, reached, part_bytes - filled)
            if unit == reached and filled == 0:  # a single unit is larger than a part
                unit = reached + 1
            elif part_bytes - filled <= sliver:
                unit = reached
            if unit >= extent.num_units:
                break
            yield InputPosition(number, unit)
            reached, filled = unit, 0
        filled += _weight(extent, reached, extent.num_units)
        if filled >= part_bytes:
            yield InputPosition(number + 1, 0)
            filled = 0


def _weight(extent: InputExtent, first: int, last: int) -> int:
    return extent.weight * last // extent.num_units - extent.weight * first // extent.num_units if last else 0


def _last_unit(extent: InputExtent, reached: int, room: int) -> int:
    """The last unit before which the input can be cut so that what comes after ``reached`` fits into ``room``."""
    return min(reached + extent.num_units * room // extent.weight, extent.num_units - 1)


def part_ranges(part: BuildPart, extents: Sequence[InputExtent]) -> Iterator[InputRange]:
    """What a part takes from each input, in order; inputs without any unit are left out."""
    for number in range(part.first.input, min(part.last.input + 1, len(extents))):
        first = part.first.unit if number == part.first.input else 0
        last = part.last.unit if number == part.last.input else extents[number].num_units
        if first < last:
            yield InputRange(number, first, last)
