"""The plan of a build: every unit of every input in exactly one part, in order, whatever the sizes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from closeranks.data.building.part_plan import (
    BuildPart,
    InputExtent,
    InputPosition,
    InputRange,
    part_ranges,
    plan_parts,
)

extents = st.lists(
    st.one_of(
        st.integers(0, 5000).map(lambda size: InputExtent(size, size)),  # bytes of lines
        st.tuples(st.integers(0, 5000), st.integers(0, 50)).map(lambda pair: InputExtent(*pair)),  # records
        st.integers(0, 5000).map(lambda size: InputExtent(size, 1)),  # whole files
    ),
    max_size=20,
)


@given(extents, st.integers(1, 2000))
def test_every_unit_lies_in_exactly_one_part_and_in_order(row: list[InputExtent], part_bytes: int) -> None:
    seen = [
        (one.input, unit)
        for part in plan_parts(row, part_bytes)
        for one in part_ranges(part, row)
        for unit in range(one.first, one.last)
    ]
    assert seen == [(number, unit) for number, extent in enumerate(row) for unit in range(extent.num_units)]


@given(extents, st.integers(1, 2000))
def test_parts_are_numbered_and_meet(row: list[InputExtent], part_bytes: int) -> None:
    parts = plan_parts(row, part_bytes)
    assert [part.index for part in parts] == list(range(len(parts)))
    assert all(one.last == other.first and one.first < one.last for one, other in pairwise(parts))


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=20), st.integers(16, 2000))
def test_lines_fill_parts_evenly(sizes: list[int], part_bytes: int) -> None:
    """What can be cut anywhere gives parts of the size asked for, up to a sliver more; only the last is smaller."""
    row = [InputExtent(size, size) for size in sizes]
    weights = [sum(one.last - one.first for one in part_ranges(part, row)) for part in plan_parts(row, part_bytes)]
    sliver = part_bytes // 16
    assert all(part_bytes - sliver <= weight <= part_bytes + sliver for weight in weights[:-1])
    assert weights[-1] <= part_bytes + sliver
    assert sum(weights) == sum(sizes)


def test_what_cannot_be_cut_stays_whole() -> None:
    row = [InputExtent(60, 1), InputExtent(300, 1), InputExtent(60, 1)]
    assert plan_parts(row, 100) == (
        BuildPart(0, InputPosition(0, 0), InputPosition(1, 0)),
        BuildPart(1, InputPosition(1, 0), InputPosition(2, 0)),
        BuildPart(2, InputPosition(2, 0), InputPosition(3, 0)),
    )


def test_a_part_may_span_inputs_and_end_inside_one() -> None:
    row = [InputExtent(60, 60), InputExtent(100, 100)]
    first, second = plan_parts(row, 80)
    assert list(part_ranges(first, row)) == [InputRange(0, 0, 60), InputRange(1, 0, 20)]
    assert list(part_ranges(second, row)) == [InputRange(1, 20, 100)]


def test_no_inputs_no_parts() -> None:
    assert plan_parts([], 10) == ()


def test_a_record_larger_than_a_part_is_a_part() -> None:
    row = [InputExtent(900, 3)]
    assert [list(part_ranges(part, row)) for part in plan_parts(row, 100)] == [
        [InputRange(0, 0, 1)],
        [InputRange(0, 1, 2)],
        [InputRange(0, 2, 3)],
    ]
